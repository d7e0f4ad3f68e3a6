/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Pings of frontends' addresses: which are answered, and the echo reply.
 *
 * A client gets an answer where some frontend of the address gives it an endpoint or a rejection. A
 * node that would drop its packets, for example by policy Local, is silent: a router or a monitor
 * that chooses nodes by ping does not choose this one.
 */
#pragma once

#include "admit.h"
#include "answer.h"

#define ICMP_ECHO_REPLY	   0
#define ICMP_ECHO_REQUEST  8
#define ICMP6_ECHO_REQUEST 128
#define ICMP6_ECHO_REPLY   129

static __always_inline bool is_echo_request(const struct packet *packet)
{
	return packet->icmp_type == (packet->version == 4 ? ICMP_ECHO_REQUEST : ICMP6_ECHO_REQUEST);
}

/* Whose pings of the packet's destination are answered (enum ping_client). 0: it is no ping, or its
 * address belongs to no frontend, or to the node itself, whose stack answers.
 */
static __always_inline u32 clients_answered(const struct packet *packet)
{
	const struct address *dialed = &packet->tuple.destination;
	struct frontend_address *found;

	if (!is_echo_request(packet) || packet->fragment != WHOLE ||
	    !is_answerable(&packet->tuple.source))
		return 0;
	found = frontend_addresses.lookup(dialed);
	if (!found || network_flags(dialed) & NETWORK_LOCAL)
		return 0;
	return found->answered;
}

/* Whether a ping that comes in gets an answer. The caller checks whether the frame is for this
 * node.
 */
static __always_inline bool is_answered_ping(struct __sk_buff *skb, const struct packet *packet)
{
	u32 clients = clients_answered(packet);

	if (!clients)
		return false;
	return clients & (class_of(skb) == POD ? PING_FROM_INSIDE : PING_FROM_OUTSIDE);
}

/* The same of a ping that goes out. It is the node's own, or was forwarded: then it gets no other
 * result than at ingress. A device without a program leads to a pod whose sockets need none, as in
 * standing_of_bypass(). What a bridge forwards is for another host.
 */
static __always_inline bool is_answered_ping_out(struct __sk_buff *skb, const struct packet *packet)
{
	u32 clients = clients_answered(packet);
	u32 ifindex = skb->ingress_ifindex;
	struct device *device;

	if (!clients || skb->pkt_type == PACKET_OTHERHOST)
		return false;
	device = ifindex ? devices.lookup(&ifindex) : NULL;
	if (device && !(device->flags & DEVICE_POD))
		return clients & PING_FROM_OUTSIDE;
	return clients & PING_FROM_INSIDE;
}

/* The echo reply to an echo request (RFC 792, RFC 4443); false: the packet is spoiled. */
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
