/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Packets to on-link addresses that frontends have.
 *
 * The kernel sends a packet to an on-link address only once a machine has answered for the address.
 * For a frontend there may be none. Routes therefore send packets for these addresses to a gateway
 * whose link-layer address is fixed (linux/netlink/on_link_routes.py), so that they reach egress at
 * once. What egress does not take is for the machine that has the address.
 */
#pragma once

#include "icmp_error.h"
#include "route.h"

#define ON_LINK_GATEWAY4 bpf_htonl(0xc0000008) /* 192.0.0.8 */
#define ICMP_REDIRECT6	 137
/* Offsets in the message. */
#define ICMP_REDIRECT_GATEWAY 4
#define ICMP_REDIRECT6_TARGET 8
/* Offsets of the destination address in the IP header. */
#define DESTINATION4 16
#define DESTINATION6 24

static __always_inline bool is_to_on_link_gateway(struct __sk_buff *skb)
{
	const void *frame = (void *)(long)skb->data;

	return frame + ETHERNET_HEADER <= (void *)(long)skb->data_end && is_on_link_gateway(frame);
}

/* Whether an ICMP redirect names the gateway. Other machines cannot use it. */
static __always_inline bool names_on_link_gateway(struct __sk_buff *skb,
						  const struct packet *packet)
{
	__be32 gateway[4] = {};

	if (is_icmp_redirect(packet))
		return !bpf_skb_load_bytes(skb, packet->l4 + ICMP_REDIRECT_GATEWAY, gateway, 4) &&
		       gateway[0] == ON_LINK_GATEWAY4;
	if (packet->version == 4)
		return false;
	/* fe80::eb:bfff:fe00:2 */
	return packet->icmp_type == ICMP_REDIRECT6 &&
	       !bpf_skb_load_bytes(skb, packet->l4 + ICMP_REDIRECT6_TARGET, gateway, 16) &&
	       gateway[0] == bpf_htonl(0xfe800000) && !gateway[1] &&
	       gateway[2] == bpf_htonl(0x00ebbfff) && gateway[3] == bpf_htonl(0xfe000002);
}

/* Sends the packet to the neighbor that has its destination address, as without the route. Until
 * the kernel knows the neighbor it keeps the packet, and then sends it by its route: egress sees it
 * again.
 */
static __always_inline int find_on_link(struct __sk_buff *skb)
{
	struct bpf_redir_neigh neighbor = {};
	long missing;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		neighbor.nh_family = AF_INET;
		missing =
		    bpf_skb_load_bytes(skb, ETHERNET_HEADER + DESTINATION4, &neighbor.ipv4_nh, 4);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		neighbor.nh_family = AF_INET6;
		missing =
		    bpf_skb_load_bytes(skb, ETHERNET_HEADER + DESTINATION6, &neighbor.ipv6_nh, 16);
	} else {
		return PASS_ON;
	}
	if (!HAVE(REDIRECT_NEIGH) || missing)
		return DROP;
	mark_set(skb, MARK_DONE);
	return redirect_by_neighbor(skb->ifindex, &neighbor, sizeof(neighbor), 0);
}
