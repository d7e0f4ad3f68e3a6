/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Echo requests to frontend addresses: which get a reply, and the echo reply.
 *
 * A client gets a reply if at least one frontend of the address would redirect or reject its
 * packets. A node that would drop them, for example because of traffic policy Local, sends no
 * reply. A router or monitor that selects nodes by ping then does not select this node.
 */
#pragma once

#include "answer.h"
#include "origin.h"

#define ICMP_ECHO_REPLY	   0
#define ICMP_ECHO_REQUEST  8
#define ICMP6_ECHO_REQUEST 128
#define ICMP6_ECHO_REPLY   129

/* Whether another host replies to pings of a frontend address: this node's stack, or a machine that
 * may have the address (plan/foreign_addresses.py).
 */
static __always_inline bool has_host(const struct address *address, u32 answered)
{
	u32 flags = network_flags(address);

	return flags & NETWORK_LOCAL ||
	       (flags & NETWORK_FOREIGN && !(answered & PING_TO_CLUSTER_IP));
}

/* Returns the clients that get a reply from the destination of the packet (enum ping_client).
 * Returns 0 if the packet is not an echo request, or if its destination is not a frontend address.
 * Returns 0 as well for an address that has a host.
 */
static __always_inline u32 clients_answered(struct packet *packet)
{
	struct address *destination = &packet->tuple.destination;
	u8 request = packet->version == 4 ? ICMP_ECHO_REQUEST : ICMP6_ECHO_REQUEST;
	struct frontend_address *found;

	if (packet->icmp_type != request || packet->fragment != WHOLE ||
	    !is_answerable(&packet->tuple.source))
		return 0;
	found = frontend_addresses.lookup(destination);
	return found && !has_host(destination, found->answered) ? found->answered : 0;
}

/* Whether a received echo request gets a reply. The caller checks whether the frame is addressed to
 * this node.
 */
static __always_inline bool is_answered_ping(struct __sk_buff *skb, struct packet *packet)
{
	u32 clients = clients_answered(packet);

	if (!clients)
		return false;
	return clients & (class_of(skb) == POD ? PING_FROM_INSIDE : PING_FROM_OUTSIDE);
}

/* Whether an outgoing echo request gets a reply. It is host-originated or forwarded; for a
 * forwarded request the result is the same as at ingress. A device without a program leads to a pod
 * whose sockets need none, as in admit_bypassing_packet(). A frame that a bridge forwards is for
 * another host, and so is a frame of a guest that shares the device.
 */
static __always_inline bool is_answered_ping_out(struct __sk_buff *skb, struct packet *packet)
{
	u32 clients = clients_answered(packet);
	u32 ifindex = skb->ingress_ifindex;
	struct device *device;

	if (!clients || skb->pkt_type == PACKET_OTHERHOST ||
	    (!ifindex && !is_host_originated(skb, packet)))
		return false;
	device = ifindex ? device_get(ifindex) : NULL;
	if (device && !(device->flags & DEVICE_POD))
		return clients & PING_FROM_OUTSIDE;
	return clients & PING_FROM_INSIDE;
}

/* Turns an echo request into the echo reply (RFC 792, RFC 4443). Returns false on failure; the
 * packet is then invalid and must be dropped.
 */
static __always_inline bool answer_echo(struct __sk_buff *skb, struct packet *packet)
{
	bool v4 = packet->version == 4;
	u8 old[2] ALIGNED, new[2] ALIGNED;

	count(COUNTER_ECHO_ANSWERED);
	if (!load(skb, packet->l4, old, 2))
		return false;
	new[0] = v4 ? ICMP_ECHO_REPLY : ICMP6_ECHO_REPLY;
	new[1] = old[1];
	return swap_ethernet(skb, packet->l3) && swap_addresses(skb, packet) &&
	       !bpf_l4_csum_replace(skb, packet->l4 + ICMP_CHECKSUM, *(u16 *)old, *(u16 *)new, 2) &&
	       !bpf_skb_store_bytes(skb, packet->l4, new, 2, 0);
}
