/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Packets that belong to no flow and open none: most packets of most nodes. They are recognized
 * by their ports, from headers that are read where they are. The scratch and the rest of the
 * program are then not needed, and stay out of the caches.
 */
#pragma once

#include "flow_key.h"
#include "rewrite.h"

#define IPV4_PROTOCOL 9
#define IPV4_FRAGMENT 6
#define IPV6_NEXT     6
#define IPV4_TO	      16
#define IPV6_TO	      24
#define TCP_FLAGS     13

struct ports {
	__be16 source;
	__be16 destination;
	u8 protocol;
	bool opens; /* the packet may open a flow */
};

/* Reads the header after an IP header of `size` bytes, which is a constant. Returns false if it is
 * truncated or not in the linear part.
 */
static __always_inline bool ports_read(const u8 *ip, const void *end, u32 size, u8 protocol,
				       struct ports *ports)
{
	const u8 *l4 = ip + size;

	if ((void *)l4 + UDP_HEADER > end)
		return false;
	ports->source = ((const __be16 *)l4)[0];
	ports->destination = ((const __be16 *)l4)[1];
	ports->protocol = protocol;
	ports->opens = true;
	if (protocol == IPPROTO_UDP)
		return true;
	if (protocol != IPPROTO_TCP || (void *)l4 + TCP_HEADER > end)
		return false;
	ports->opens = (l4[TCP_FLAGS] & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
	return true;
}

/* Finds the ports of a TCP segment or UDP datagram with the IP header at `l3`, which is a constant.
 * Returns false for packets in any other form, such as fragments and those with IP options.
 */
static __always_inline bool ports_of(struct __sk_buff *skb, u32 l3, struct ports *ports)
{
	const u8 *ip = (void *)(long)skb->data + l3;
	const void *end = (void *)(long)skb->data_end;

	if (skb->protocol == bpf_htons(ETH_P_IP))
		return (void *)ip + IPV4_HEADER <= end && *ip == 0x45 &&
		       !(*(const __be16 *)(ip + IPV4_FRAGMENT) &
			 bpf_htons(MORE_FRAGMENTS | FRAGMENT_OFFSET)) &&
		       ports_read(ip, end, IPV4_HEADER, ip[IPV4_PROTOCOL], ports);
	return skb->protocol == bpf_htons(ETH_P_IPV6) && (void *)ip + IPV6_HEADER <= end &&
	       *ip >> 4 == 6 && ports_read(ip, end, IPV6_HEADER, ip[IPV6_NEXT], ports);
}

/* Whether the destination of a packet may be in a ServiceCIDR. `l3` is a constant. */
static __always_inline bool may_be_cluster_ip(struct __sk_buff *skb, u32 l3,
					      const struct node *settings)
{
	const u8 *ip = (void *)(long)skb->data + l3;
	const void *end = (void *)(long)skb->data_end;

	if (skb->protocol == bpf_htons(ETH_P_IP))
		return (void *)ip + IPV4_HEADER <= end &&
		       (*(const __be32 *)(ip + IPV4_TO) & settings->service_mask4) ==
			   settings->service_cidrs4;
	return (void *)ip + IPV6_HEADER <= end &&
	       (*(const u64 *)(ip + IPV6_TO) & settings->service_mask6) == settings->service_cidrs6;
}

/* Whether a packet at the side `side` (enum side) certainly belongs to no flow and opens none. It
 * then passes unchanged. `l3` is a constant.
 */
static __always_inline bool is_unrelated(struct __sk_buff *skb, u32 l3, u8 side)
{
	const struct node *settings;
	struct ports ports;
	u8 protocol;

	if (!ports_of(skb, l3, &ports))
		return false;
	protocol = ports.protocol;
	if (port_has_use(protocol, ports.source, PORT_OF_ENDPOINT) ||
	    port_has_use(protocol, ports.destination, PORT_OF_FRONTEND))
		return false;
	/* Only the first packet of a client can collide with a flow at ingress. */
	if ((side == AT_EGRESS || ports.opens) &&
	    port_has_use(protocol, ports.destination, PORT_OF_ENDPOINT))
		return false;
	settings = node_get();
	if (!settings)
		return false;
	/* With direct server return, any packet can be for a frontend whose flows are elsewhere. */
	if (!ports.opens && (side == AT_EGRESS || !settings->tunnel_device))
		return true;
	/* The node's own packets can need masquerading: see is_bound_to_frontend(). Datagrams of
	 * stale sockets are recognized by their addresses.
	 */
	if ((side == AT_EGRESS && !skb->ingress_ifindex) ||
	    (protocol == IPPROTO_UDP && settings->flags & NODE_STALE_SOCKETS))
		return false;
	if (side == AT_EGRESS && may_be_cluster_ip(skb, l3, settings))
		return false;
	return !port_is_served(protocol, ports.destination, 0) &&
	       !port_is_served(protocol, ports.destination, NODE_PORT_LINES);
}
