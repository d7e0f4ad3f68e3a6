/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Redirects: how a packet leaves the normal path through the stack.
 */
#pragma once

#include "flow.h"
#include "rewrite.h"

#define PASS_ON (-1) /* TC_ACT_UNSPEC: filters of other programs run next, then the stack */
#define DROP	2    /* TC_ACT_SHOT */
/* No action of a program: the packet gets the tuple `target->tuple`, which determines the action.
 */
#define TRANSLATE (-3)

/* A mark in skb->tc_index is a hint to the program that sees the packet next, after a redirect. A
 * filter that returns TC_ACT_OK overwrites tc_index, so a packet that has lost its mark must be
 * processed in the same way by its tuple. The upper byte identifies the node: with kind, a packet
 * may arrive with the mark of another node on the same machine. Test runs of a program can only set
 * and read cb.
 */
#define MARK_NONE     0
#define MARK_DONE     3 /* completely translated */
#define MARK_STRIPPED 4 /* received from a tunnel for the second time (ingress.h) */
#define MARK_RECEIVED 5 /* translated after it was received from another node (dsr.h) */

#ifdef MARK_IN_CB
#define mark_word(skb) ((skb)->cb[0])
#else
#define mark_word(skb) ((skb)->tc_index)
#endif

static __always_inline u32 mark_of_node(void)
{
	struct node *settings = node_get();

	return ((u8)(0xeb + (settings ? settings->netns_cookie : 0))) << 8;
}

/* Returns MARK_NONE if the mark belongs to another node. */
static __always_inline u32 mark_get(struct __sk_buff *skb)
{
	u32 mark = mark_word(skb);

	if (!mark || (mark & 0xff00) != mark_of_node())
		return MARK_NONE;
	return mark & 0xff;
}

static __always_inline void mark_set(struct __sk_buff *skb, u32 mark)
{
	mark_word(skb) = mark_of_node() | mark;
}

/* The Ethernet address of the first device of the reinjection veth pair
 * (linux/netlink/reinjection.py).
 */
static const u8 REINJECTION_ETHERNET[6] = {0x02, 0xeb, 0xbf, 0x00, 0x00, 0x01};

/* Whether this is the Ethernet address of the gateway in the routes of on-link frontends: see
 * on_link.h. No machine has it.
 */
static __always_inline bool is_on_link_gateway(const void *ethernet)
{
	const __be16 *halves = ethernet;

	return halves[0] == bpf_htons(0x02eb) && halves[1] == bpf_htons(0xbf00) &&
	       halves[2] == bpf_htons(0x0002);
}

/* bpf_redirect_neigh(). Up to version 0.37, bcc declares it without the length of its parameters.
 */
static long (*redirect_by_neighbor)(u32 ifindex, void *parameters, int length,
				    u64 flags) = (void *)152;

/* Looks up the route of a packet from `from` to `to`. A `length` of 0 is not compared with the MTU.
 * `context`: of a tc program or of an XDP program. Returns as bpf_fib_lookup().
 */
static __always_inline int look_up_route(void *context, struct bpf_fib_lookup *lookup, u32 ifindex,
					 u32 length, u8 protocol, const struct address *from,
					 const struct address *to, u32 flags)
{
	__builtin_memset(lookup, 0, sizeof(*lookup));
	lookup->l4_protocol = protocol;
	lookup->tot_len = length;
	lookup->ifindex = ifindex;
	if (address_is_v4(to)) {
		lookup->family = AF_INET;
		lookup->ipv4_src = from->word[3];
		lookup->ipv4_dst = to->word[3];
	} else {
		lookup->family = AF_INET6;
		*(struct address *)lookup->ipv6_src = *from;
		*(struct address *)lookup->ipv6_dst = *to;
	}
	return bpf_fib_lookup(context, lookup, sizeof(*lookup), flags);
}

/* Sets `source` to the source for the lookup of a route of a host-originated packet from `from`.
 * From a loopback address no route exists (rt6_need_strict()). The packet gets another source
 * address, so the lookup uses the unspecified address.
 */
static __always_inline void route_source(struct address *source, const struct address *from)
{
	if (address_is_loopback(from))
		address_unspecified_like(source, from);
	else
		*source = *from;
}

/* Returns the output device for a packet from `from` to `to` that arrived on the device `ifindex`,
 * or 0 if there is no route, or if `length` exceeds the MTU. Sets `next_hop`. See look_up_route().
 */
static __always_inline u32 route_by(void *context, u32 ifindex, u32 length,
				    const struct packet *packet, const struct address *from,
				    const struct address *to, struct next_hop *next_hop)
{
	struct bpf_fib_lookup lookup;
	int found;

	if (!HAVE(FIB_LOOKUP) || !HAVE(REDIRECT_NEIGH))
		return 0;
	found =
	    look_up_route(context, &lookup, ifindex, length, packet->tuple.protocol, from, to, 0);
	if (found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH) {
		next_hop->neighbor.nh_family = lookup.family;
		*(struct address *)next_hop->neighbor.ipv6_nh = *(struct address *)lookup.ipv6_dst;
		next_hop->has_ethernet = found == BPF_FIB_LKUP_RET_SUCCESS;
		__builtin_memcpy(next_hop->ethernet, lookup.dmac, 6);
		__builtin_memcpy(next_hop->ethernet + 6, lookup.smac, 6);
		next_hop->into_pod = false;
		if (is_on_link_gateway(next_hop->ethernet)) {
			*(struct address *)next_hop->neighbor.ipv6_nh = *to;
			if (packet->version == 4)
				next_hop->neighbor.ipv4_nh = to->word[3];
			next_hop->has_ethernet = false;
		}
		return lookup.ifindex;
	}
	return 0;
}

/* As route_by() for the packet of a tc program. The length is not passed for GSO packets, because
 * they are segmented later. It is not passed for host-originated packets either, because no router
 * would send an ICMP error about them.
 */
static __always_inline u32 route(struct __sk_buff *skb, const struct packet *packet,
				 const struct address *from, const struct address *to,
				 struct next_hop *next_hop)
{
	u32 length = skb->gso_segs || !skb->ingress_ifindex ? 0 : packet->length;

	return route_by(skb, skb->ifindex, length, packet, from, to, next_hop);
}

/* Sends the packet to the next hop. Without `next_hop` the kernel would select a next hop again.
 * For an IPv6 multipath route it could select one of another device, where it finds no neighbor
 * (__bpf_redirect_neigh_v6(), ip6_route_output()).
 */
static __always_inline int redirect_out(struct __sk_buff *skb, u32 ifindex,
					struct next_hop *next_hop)
{
	mark_set(skb, MARK_DONE);
	if (!HAVE(REDIRECT_NEIGH))
		return DROP;
	return redirect_by_neighbor(ifindex, &next_hop->neighbor, sizeof(next_hop->neighbor), 0);
}

/* Sends a packet to the next hop that the stack has already routed elsewhere. While the neighbor is
 * unknown, the kernel keeps the packet, and then sends it by the packet's route (neigh_update()).
 * Without `next_hop` it replaces that route.
 */
static __always_inline int redirect_routed_out(struct __sk_buff *skb, u32 ifindex,
					       struct next_hop *next_hop)
{
	if (next_hop->has_ethernet)
		return redirect_out(skb, ifindex, next_hop);
	mark_set(skb, MARK_DONE);
	return HAVE(REDIRECT_NEIGH) ? redirect_by_neighbor(ifindex, NULL, 0, 0) : DROP;
}

/* Moves the packet into the network namespace of a pod, as if the pod's end of the pair had
 * received it. `ifindex` is the node's end (DEVICE_PEER). This avoids the queue between both ends.
 * Only ingress programs can use it.
 */
static __always_inline int redirect_into_pod(struct __sk_buff *skb, u32 ifindex,
					     struct next_hop *next_hop)
{
	if (HAVE(REDIRECT_PEER) &&
	    !bpf_skb_store_bytes(skb, 0, next_hop->ethernet, sizeof(next_hop->ethernet), 0))
		return bpf_redirect_peer(ifindex, 0);
	return DROP;
}

/* Replaces or adds the Ethernet header. Its destination is that of the reinjection veth pair
 * (`reinjected`), or zero. Its source is zero.
 */
static __always_inline bool write_ethernet(struct __sk_buff *skb, const struct packet *packet,
					   bool reinjected)
{
	u8 ethernet[ETHERNET_HEADER] ALIGNED = {};

	if (reinjected)
		__builtin_memcpy(ethernet, REINJECTION_ETHERNET, 6);
	*(__be16 *)(ethernet + 12) =
	    packet->version == 4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
	return !(packet->l3 == 0 && bpf_skb_change_head(skb, ETHERNET_HEADER, 0)) &&
	       !bpf_skb_store_bytes(skb, 0, ethernet, ETHERNET_HEADER, 0);
}

/* Delivers the packet to this node's stack, as if a device had received it. IPv4 uses the
 * reinjection veth pair, which has no reverse path filter and accepts local source addresses
 * (martians). IPv6 uses loopback: it has no such checks, except that ::1 may only arrive on
 * loopback.
 */
static __always_inline int deliver(struct __sk_buff *skb, const struct packet *packet)
{
	struct node *settings = node_get();
	bool v4 = packet->version == 4;
	u32 device;

	if (!settings)
		return DROP;
	device = v4 ? settings->reinjection_device : LOOPBACK_IFINDEX;
	if (!device || !write_ethernet(skb, packet, v4)) {
		count(COUNTER_NO_ROUTE);
		return DROP;
	}
	return bpf_redirect(device, BPF_F_INGRESS);
}
