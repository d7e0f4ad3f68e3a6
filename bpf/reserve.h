/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Opening a flow: the ports that it is known by are reserved by the very entries that a reply looks
 * for.
 */
#pragma once

#include "flow.h"

/* Ports that are looked at before there is said to be none: ROUNDS * TRIES. Two loops, since the
 * verifier follows each turn of the inner one, and that only looks.
 */
#define ROUNDS		4
#define TRIES		6
#define FIRST_PORT	1024
#define EEXIST_NEGATIVE (-17)

static __always_inline __be16 any_port(void)
{
	u32 room = 65536 - FIRST_PORT;

	return bpf_htons((u16)(FIRST_PORT + (((u64)bpf_get_prandom_u32() * room) >> 32)));
}

#if defined(HAVE_SKC_LOOKUP_TCP) && defined(HAVE_SK_LOOKUP_UDP)

/* As a packet from one to the other would find its socket; the size of what is filled in. */
static __always_inline u32 socket_tuple(struct bpf_sock_tuple *tuple, const struct address *from,
					__be16 from_port, const struct address *to, __be16 to_port)
{
	if (address_is_v4(from)) {
		tuple->ipv4.saddr = from->word[3];
		tuple->ipv4.daddr = to->word[3];
		tuple->ipv4.sport = from_port;
		tuple->ipv4.dport = to_port;
		return sizeof(tuple->ipv4);
	}
	*(struct address *)tuple->ipv6.saddr = *from;
	*(struct address *)tuple->ipv6.daddr = *to;
	tuple->ipv6.sport = from_port;
	tuple->ipv6.dport = to_port;
	return sizeof(tuple->ipv6);
}

/* Whether a UDP socket of this node gets what comes in with this tuple; `connected`: only one that
 * is connected to the sender.
 */
static __always_inline bool udp_socket_gets(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
					    u32 size, bool connected)
{
	struct bpf_sock *found = bpf_sk_lookup_udp(skb, tuple, size, BPF_F_CURRENT_NETNS, 0);
	bool gets;

	if (!found)
		return false;
	gets = !connected || found->state == BPF_TCP_ESTABLISHED;
	bpf_sk_release(found);
	return gets;
}

/* The same of TCP; who only listens has no connection with the sender. */
static __always_inline bool tcp_socket_gets(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
					    u32 size)
{
	struct bpf_sock *found = bpf_skc_lookup_tcp(skb, tuple, size, BPF_F_CURRENT_NETNS, 0);
	bool gets;

	if (!found)
		return false;
	gets = found->state != BPF_TCP_LISTEN;
	barrier(); /* one instruction must not read from both kinds of sockets */
	bpf_sk_release(found);
	return gets;
}

#endif

/* Whether a socket of this node talks to the endpoint from where `flow` is masqueraded to. */
static __always_inline bool socket_uses(struct __sk_buff *skb, const struct flow *flow,
					struct scratch *scratch)
{
#if defined(HAVE_SKC_LOOKUP_TCP) && defined(HAVE_SK_LOOKUP_UDP)
	struct bpf_sock_tuple *tuple = &scratch->sockets;
	u32 size = socket_tuple(tuple, &flow->endpoint, flow->endpoint_port, &flow->masquerade,
				flow->masquerade_port);

	if (flow->protocol == IPPROTO_TCP)
		return tcp_socket_gets(skb, tuple, size);
	if (flow->protocol == IPPROTO_UDP)
		return udp_socket_gets(skb, tuple, size, false);
#endif
	return false;
}

/* Whether the previous map has another flow at `scratch->key` that is not over. */
static __always_inline bool is_former_flows(struct scratch *scratch)
{
	struct flow *former = flow_former(&scratch->key);

	return former && !flow_is_same(former, &scratch->flow) &&
	       !flow_is_over(former, scratch->now);
}

enum place {
	VACANT,
	REUSABLE, /* this flow's own, or of one that is over */
	TAKEN,
};

/* What is at `scratch->key`, by which `scratch->flow` would be known for `way`. Being closed is not
 * enough to be over: who was connected may not know yet, and what is on its way would come to
 * somebody else's connection.
 */
static __always_inline enum place place_of(struct scratch *scratch, u8 way)
{
	const struct flow *flow = &scratch->flow;
	struct flow *present;

	/* Of an endpoint to itself there and back must differ. */
	if (way == BETWEEN && flow->between_port == flow->endpoint_port &&
	    address_equal(&flow->client, &flow->endpoint))
		return TAKEN;
	if (way == FROM_ENDPOINT && netfilter_flows.lookup(&scratch->key))
		return TAKEN;
	present = flows.lookup(&scratch->key);
	if (!present)
		return VACANT;
	return flow_is_same(present, flow) || flow_is_over(present, scratch->now) ? REUSABLE
										  : TAKEN;
}

/* Reserve for `scratch->flow` the port that its entry for `way` is known by, at first the one that
 * is at `port`, which is in that flow: the entry itself is what reserves it. False: it is counted
 * why not.
 */
static __always_inline bool reserve(struct __sk_buff *skb, struct scratch *scratch, u8 way,
				    __be16 *port)
{
	struct flow *flow = &scratch->flow;
	int failed = EEXIST_NEGATIVE;

	flow->way = way;
	flow_key_of(&scratch->key, flow, way);
#pragma nounroll
	for (int round = 0; round < ROUNDS; again(round, 1)) {
		enum place place = TAKEN;

#pragma nounroll
		for (int try = 0; try < TRIES; again(try, 1)) {
			scratch->key.destination_port = *port;
			place = place_of(scratch, way);
			/* SCTP's checksum covers the ports. */
			if (place != TAKEN || flow->protocol == IPPROTO_SCTP)
				break;
			*port = any_port();
		}
		if (place != TAKEN && !is_former_flows(scratch) &&
		    !(way == FROM_ENDPOINT && socket_uses(skb, flow, scratch))) {
			failed = flow_write(&scratch->key, flow, place == VACANT);
			if (failed != EEXIST_NEGATIVE)
				break;
		}
		if (flow->protocol == IPPROTO_SCTP)
			break;
		*port = any_port();
	}
	if (!failed)
		return true;
	count(failed == EEXIST_NEGATIVE ? COUNTER_PORTS_EXHAUSTED : COUNTER_FLOWS_FULL);
	return false;
}

/* Reserve the port by which the node's stack will know this flow, and no other between the two. */
static __always_inline bool reserve_between(struct __sk_buff *skb, struct scratch *scratch)
{
	struct flow *flow = &scratch->flow;

	flow->between_port = flow->client_port;
	if (!flow_has(flow, BETWEEN))
		return true;
	if (!reserve(skb, scratch, BETWEEN, &flow->between_port))
		return false;
	if (flow->between_port != flow->client_port)
		count(COUNTER_PORT_CHANGED);
	return true;
}

/* Remember `scratch->flow`: what undoes it first, so that no reply is met by surprise. */
static __always_inline bool flow_open(struct __sk_buff *skb, struct packet *packet,
				      struct scratch *scratch)
{
	struct flow *flow = &scratch->flow;

	flow->last_seen = scratch->now;
	if (!reserve_between(skb, scratch))
		return false;
	flow->way = FROM_CLIENT;
	flow_key_of(&scratch->key, flow, FROM_CLIENT);
	if (flow_write(&scratch->key, flow, false)) {
		count(COUNTER_FLOWS_FULL);
		return false;
	}
	count(COUNTER_PACKET_NEW);
	packet->opens = true;
	scratch->mine = *flow;
	return true;
}

/* What is masqueraded at the device gets, of the family of `like`; unspecified: there is none. */
static __always_inline const struct address *address_of_device(const struct device *device,
							       const struct address *like)
{
	return address_is_v4(like) ? &device->v4 : &device->v6;
}

/* Choose the address and port by which the endpoint sees the client of `mine`, and tell its
 * entries. `ifindex` is the device towards the endpoint. False: it is counted why not.
 */
static __always_inline bool masquerade(struct __sk_buff *skb, struct flow *mine, u32 ifindex,
				       struct scratch *scratch)
{
	struct device *device = devices.lookup(&ifindex);
	struct flow *flow = &scratch->flow;

	*flow = *mine;
	if (device)
		flow->masquerade = *address_of_device(device, &mine->endpoint);
	if (!device || address_is_unspecified(&flow->masquerade)) {
		count(COUNTER_NO_ADDRESS);
		return false;
	}
	flow->last_seen = scratch->now;
	/* The port by which a direct flow came is taken: that is why there is one. */
	flow->masquerade_port = mine->flags & FLOW_DIRECT ? any_port() : mine->between_port;
	if (!reserve(skb, scratch, FROM_ENDPOINT, &flow->masquerade_port))
		return false;
	mine->masquerade = flow->masquerade;
	mine->masquerade_port = flow->masquerade_port;
	mine->last_seen = scratch->now;
	flow_tell_all(mine, scratch);
	return true;
}
