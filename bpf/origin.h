/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Where a packet comes from, and whether it is addressed to this node.
 */
#pragma once

#include "packet.h"
#include "service.h"

enum client_class {
	POD,
	NODE,
	OUTSIDE,
};

static __always_inline enum client_class class_of(struct __sk_buff *skb)
{
	struct device *device = device_get(skb->ifindex);

	return device && device->flags & DEVICE_POD ? POD : OUTSIDE;
}

/* Whether the received frame is addressed to this node. On a port of a bridge, frames for the
 * bridge itself are PACKET_OTHERHOST, as are those that the bridge forwards to other hosts, such as
 * a router of the network. Which frames another kind of switch passes to the node is unknown.
 */
static __always_inline bool is_for_this_node(struct __sk_buff *skb)
{
	u8 destination[8] ALIGNED;
	struct device *device;

	if (skb->pkt_type != PACKET_OTHERHOST)
		return true;
	device = device_get(skb->ifindex);
	if (!device || !(device->flags & (DEVICE_POD | DEVICE_GUEST)) ||
	    device->flags & DEVICE_LAYER3)
		return false;
	if (device->flags & DEVICE_SWITCHED)
		return true;
	if (!load_header(skb, 0, destination, sizeof(destination)))
		return false;
#pragma unroll
	for (int i = 0; i < 6; i++)
		if (destination[i] != device->bridge[i])
			return false;
	return true;
}

/* Whether the packet comes from this node's own stack. A packet without an ingress device can also
 * be that of a macvlan or ipvlan guest, which leaves by the device that it shares with the node. No
 * stack of the node has processed it. The network namespace of its socket decides. For packets
 * without a socket, and on kernels that do not return the namespace, the source address decides.
 */
static __always_inline bool is_host_originated(struct __sk_buff *skb, const struct packet *packet)
{
	const struct node *settings = node_get();
	const struct address *source = &packet->tuple.source;

	if (skb->ingress_ifindex || !settings)
		return false;
	if (HAVE(NETNS_COOKIE) && settings->netns_cookie && skb->sk)
		return bpf_get_netns_cookie(skb) == settings->netns_cookie;
	return address_is_loopback(source) || network_flags(source) & NETWORK_LOCAL;
}
