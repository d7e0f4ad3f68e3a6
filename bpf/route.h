/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Where a packet goes when it does not go up or down the stack by itself.
 */
#pragma once

#include "flow.h"
#include "rewrite.h"

#define PASS_ON (-1) /* TC_ACT_UNSPEC: other people's filters have their turn, then the stack */
#define DROP	2    /* TC_ACT_SHOT */

#define LOOPBACK_IFINDEX 1 /* in every network namespace (include/net/flow.h) */

/* A note to the next program of ours that sees the packet, where no other one comes in between:
 * right behind a redirect. Whatever classifies a packet with TC_ACT_OK overwrites tc_index, so a
 * packet that has lost its note must get the same treatment by its tuple. Its upper
 * half is this node's: with kind, a packet may bring the note of another node on the same machine.
 * Test runs have no other way in than cb.
 */
#define MARK_NONE     0
#define MARK_DONE     3 /* needs nothing any more */
#define MARK_STRIPPED 4 /* comes in by a tunnel for the second time (come_in_bare()) */

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

/* MARK_NONE for another node's. */
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

/* The address of the first device of the pair that the agent makes (linux/netlink/reinjection.py).
 */
static const u8 REINJECTION_ETHERNET[6] = {0x02, 0xeb, 0xbf, 0x00, 0x00, 0x01};

/* bcc declares it without the parameters' length (up to 0.37). */
static long (*redirect_by_neighbor)(u32 ifindex, void *parameters, int length,
				    u64 flags) = (void *)152;

/* The device by which `to` is reached from here, 0 where there is no way. What is too long for that
 * way is not sent there either, as far as the kernel looks: by the length of one packet. That of a
 * GSO packet is none, and that of the node's own does not count, since no router would complain of
 * it. The next hop goes to `way`, for redirect_out() and redirect_into_pod().
 */
static __always_inline u32 route(struct __sk_buff *skb, const struct packet *packet,
				 const struct address *from, const struct address *to,
				 struct next_hop *next_hop)
{
#if defined(HAVE_FIB_LOOKUP) && defined(HAVE_REDIRECT_NEIGH)
	struct bpf_fib_lookup lookup = {};
	int found;

	lookup.l4_protocol = packet->tuple.protocol;
	lookup.tot_len = skb->gso_segs || !skb->ingress_ifindex ? 0 : packet->length;
	lookup.ifindex = skb->ifindex;
	if (packet->version == 4) {
		lookup.family = AF_INET;
		lookup.ipv4_src = from->word[3];
		lookup.ipv4_dst = to->word[3];
	} else {
		lookup.family = AF_INET6;
		*(struct address *)lookup.ipv6_src = *from;
		*(struct address *)lookup.ipv6_dst = *to;
	}
	found = bpf_fib_lookup(skb, &lookup, sizeof(lookup), 0);
	if (found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH) {
		next_hop->neighbor.nh_family = lookup.family;
		*(struct address *)next_hop->neighbor.ipv6_nh = *(struct address *)lookup.ipv6_dst;
		next_hop->has_ethernet = found == BPF_FIB_LKUP_RET_SUCCESS;
		__builtin_memcpy(next_hop->ethernet, lookup.dmac, 6);
		__builtin_memcpy(next_hop->ethernet + 6, lookup.smac, 6);
		next_hop->into_pod = false;
		return lookup.ifindex;
	}
#endif
	return 0;
}

/* Without the next hop the kernel would choose one again, of an IPv6 multipath route also one of
 * another device (__bpf_redirect_neigh_v6(), ip6_route_output()), and find no neighbor there.
 */
static __always_inline int redirect_out(struct __sk_buff *skb, u32 ifindex,
					struct next_hop *next_hop)
{
	mark_set(skb, MARK_DONE);
#ifdef HAVE_REDIRECT_NEIGH
	return redirect_by_neighbor(ifindex, &next_hop->neighbor, sizeof(next_hop->neighbor), 0);
#else
	return DROP;
#endif
}

/* Into the network namespace of a pod by its device `ifindex` (DEVICE_PEER), as if the other end
 * had received it: without the queue between both ends. For ingress alone.
 */
static __always_inline int redirect_into_pod(struct __sk_buff *skb, u32 ifindex,
					     struct next_hop *next_hop)
{
#ifdef HAVE_REDIRECT_PEER
	if (!bpf_skb_store_bytes(skb, 0, next_hop->ethernet, sizeof(next_hop->ethernet), 0))
		return bpf_redirect_peer(ifindex, 0);
#endif
	return DROP;
}

/* Up this node's own stack, as if it had come in by the inlet, or by loopback: there neither a
 * reverse path filter nor the check of sources that are local (martians) is in the way of IPv4, and
 * IPv6 has none but that ::1 comes by loopback alone.
 */
static __always_inline int deliver(struct __sk_buff *skb, const struct packet *packet)
{
	struct node *settings = node_get();
	u8 ethernet[ETHERNET_HEADER] ALIGNED = {};
	u32 device = LOOPBACK_IFINDEX;

	if (!settings)
		return DROP;
	if (packet->version == 4) {
		device = settings->reinjection_device;
#pragma unroll
		for (int i = 0; i < 6; i++)
			ethernet[i] = REINJECTION_ETHERNET[i];
	}
	*(__be16 *)(ethernet + 12) =
	    packet->version == 4 ? bpf_htons(ETH_P_IP) : bpf_htons(ETH_P_IPV6);
	if (!device || (packet->l3 == 0 && bpf_skb_change_head(skb, ETHERNET_HEADER, 0)) ||
	    bpf_skb_store_bytes(skb, 0, ethernet, ETHERNET_HEADER, 0)) {
		count(COUNTER_NO_ROUTE);
		return DROP;
	}
	return bpf_redirect(device, BPF_F_INGRESS);
}
