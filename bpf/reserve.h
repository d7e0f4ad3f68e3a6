/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Opening a flow: the entry by which a reply is found reserves the port that the reply is sent to.
 */
#pragma once

#include "flow.h"
#include "route.h"

/* Ports that are tried at random before all are looked at: ROUNDS * TRIES. Two loops, since the
 * verifier follows each turn of the inner one, and that only looks.
 */
#define ROUNDS		3
#define TRIES		4
#define FIRST_PORT	1024
#define PORT_COUNT	(65536 - FIRST_PORT)
#define SEARCH_PORTS	2016 /* in one run of find_port(): with 32 tail calls of 33 these are all */
#define TAIL_FIND_PORT	0
#define EEXIST_NEGATIVE (-17)

static __always_inline __be16 random_port(void)
{
	return bpf_htons((u16)(FIRST_PORT + (((u64)bpf_get_prandom_u32() * PORT_COUNT) >> 32)));
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
static __always_inline bool udp_socket_receives(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
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
static __always_inline bool tcp_socket_receives(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
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

/* Whether another user of this node has a connection from the address and port to the endpoint: a
 * socket, or netfilter, whose connections from before this dataplane are in `netfilter_flows`.
 */
static __always_inline bool port_is_in_use(struct __sk_buff *skb, const struct address *endpoint,
					   __be16 endpoint_port, const struct address *masquerade,
					   __be16 port, u8 protocol, struct scratch *scratch)
{
	const struct node *settings = node_get();

	if (settings && settings->flags & NODE_NETFILTER_FLOWS) {
		tuple_set(&scratch->key, endpoint, endpoint_port, masquerade, port);
		scratch->key.protocol = protocol;
		scratch->key.side = AT_INGRESS;
		scratch->key.pad = 0;
		if (netfilter_flows.lookup(&scratch->key))
			return true;
	}
#if defined(HAVE_SKC_LOOKUP_TCP) && defined(HAVE_SK_LOOKUP_UDP)
	{
		struct bpf_sock_tuple *tuple = &scratch->sockets;
		u32 size = socket_tuple(tuple, endpoint, endpoint_port, masquerade, port);

		if (protocol == IPPROTO_TCP)
			return tcp_socket_receives(skb, tuple, size);
		if (protocol == IPPROTO_UDP)
			return udp_socket_receives(skb, tuple, size, false);
	}
#endif
	return false;
}

enum port_state {
	PORT_FREE,
	PORT_REUSABLE, /* this flow's own, or of one that is over */
	PORT_TAKEN,
};

static __always_inline int put_flow(struct flow_key *key, struct flow *flow)
{
	return flows.update(key, flow);
}

static __always_inline int add_reply(struct flow_key *key, struct reply *reply)
{
	return replies.insert(key, reply);
}

/* What is at `scratch->reply_key`. Being closed is not enough to be over: who was connected may not
 * know yet, and what is under way would reach another connection.
 */
static __always_inline enum port_state port_state_of(struct scratch *scratch)
{
	const struct flow_key *key = &scratch->reply_key;
	struct reply *present;

	/* Of an endpoint to itself there and back must differ. */
	if (key->destination_port == key->source_port &&
	    address_equal(&key->source, &scratch->reply.client))
		return PORT_TAKEN;
	present = replies.lookup(&scratch->reply_key);
	if (!present)
		return PORT_FREE;
	if (is_reply_of(present, &scratch->flow_key))
		return PORT_REUSABLE;
	return present->half_open &&
		       half_open_is_over(present->last_seen, key->protocol, scratch->now)
		   ? PORT_REUSABLE
		   : PORT_TAKEN;
}

/* Take `scratch->reply_key` for `scratch->reply`. EEXIST: another flow was faster, or another user
 * of the node uses the port with the same address. Otherwise as bpf_map_update_elem().
 */
static __always_inline int take_port(struct __sk_buff *skb, enum port_state state,
				     struct scratch *scratch)
{
	const struct flow *flow = &scratch->flow;
	const struct reply *previous = LOOKUP_PREVIOUS(previous_replies_map(), &scratch->reply_key);

	if (previous && !is_reply_of(previous, &scratch->flow_key))
		return EEXIST_NEGATIVE;
	if (scratch->reply.masquerade_digest &&
	    port_is_in_use(skb, &flow->endpoint, flow->endpoint_port, &flow->masquerade,
			   scratch->reply_key.destination_port, scratch->reply_key.protocol,
			   scratch))
		return EEXIST_NEGATIVE;
	if (state == PORT_REUSABLE)
		replies.delete(&scratch->reply_key);
	return RETRY(add_reply(&scratch->reply_key, &scratch->reply));
}

/* Whether all ports of the endpoint were in use a moment ago: then a search would find nothing but
 * take milliseconds.
 */
static __always_inline bool is_exhausted(struct scratch *scratch)
{
	u32 *since;

	scratch->key = scratch->reply_key;
	scratch->key.destination_port = 0;
	since = exhausted_ports.lookup(&scratch->key);
	return since && (s32)(scratch->now - *since) < 1;
}

static __always_inline void record_exhausted(struct scratch *scratch)
{
	count(COUNTER_PORTS_EXHAUSTED);
	scratch->key = scratch->reply_key;
	scratch->key.destination_port = 0;
	exhausted_ports.update(&scratch->key, &scratch->now);
}

/* Reserve a port for the flow in the scratch, the client's own where it is free:
 * `scratch->reply_key` with that port is the key of `scratch->reply`, which is written there.
 * `redirect_to`: see struct port_search. False: it is counted why not. Where random ports are taken
 * it does not return: find_port() looks at all of them, and the packet comes again.
 */
static __always_inline bool reserve(struct __sk_buff *skb, u64 redirect_to, struct scratch *scratch)
{
	u8 protocol = scratch->reply_key.protocol;
	int failed = EEXIST_NEGATIVE;

#pragma nounroll
	for (int round = 0; round < ROUNDS; again(round, 1)) {
		enum port_state state = PORT_TAKEN;

#pragma nounroll
		for (int try = 0; try < TRIES; again(try, 1)) {
			state = port_state_of(scratch);
			/* SCTP's checksum covers the ports. */
			if (state != PORT_TAKEN || protocol == IPPROTO_SCTP)
				break;
			scratch->reply_key.destination_port = random_port();
		}
		if (state != PORT_TAKEN) {
			failed = take_port(skb, state, scratch);
			if (failed != EEXIST_NEGATIVE)
				break;
		}
		if (protocol == IPPROTO_SCTP)
			break;
		scratch->reply_key.destination_port = random_port();
	}
	if (!failed)
		return true;
	if (failed != EEXIST_NEGATIVE) {
		count(COUNTER_FLOWS_FULL);
		return false;
	}
	if (protocol != IPPROTO_SCTP && !is_exhausted(scratch)) {
		scratch->search.next = bpf_ntohs(scratch->reply_key.destination_port) - FIRST_PORT;
		scratch->search.left = PORT_COUNT;
		scratch->search.redirect_to = redirect_to;
		tail_calls.call(skb, TAIL_FIND_PORT);
	}
	record_exhausted(scratch);
	return false;
}

/* The reply is there: now the flow's own entry. */
static __always_inline bool flow_write(struct scratch *scratch)
{
	const struct flow_key *client = &scratch->flow_key;
	struct flow *flow = &scratch->flow;

	flow->reply_port = scratch->reply_key.destination_port;
	if (flow->reply_port != client->source_port)
		count(COUNTER_PORT_CHANGED);
	if (RETRY(put_flow(&scratch->flow_key, flow))) {
		count(COUNTER_FLOWS_FULL);
		return false;
	}
	port_set_use(client->protocol, client->destination_port, PORT_OF_FRONTEND);
	port_set_use(client->protocol, flow->endpoint_port, PORT_OF_ENDPOINT);
	return true;
}

/* Make the entries of `scratch->flow`, whose key is `scratch->flow_key`: the reply first, so that
 * no packet of the endpoint is of no flow.
 */
static __always_inline bool flow_open(struct __sk_buff *skb, const struct packet *packet,
				      u64 redirect_to, struct scratch *scratch)
{
	const struct flow_key *client = &scratch->flow_key;
	struct reply *reply = &scratch->reply;
	struct flow *flow = &scratch->flow;
	u64 now = time_now();

	scratch->now = (u32)(now >> 30);
	__builtin_memset(reply, 0, sizeof(*reply));
	reply->client = client->source;
	reply->client_port = client->source_port;
	reply->frontend = client->destination;
	reply->frontend_port = client->destination_port;
	reply->service_id = flow->service_id;
	reply->flags = flow->flags;
	reply->device = flow->flags & FLOW_NODE ? 0 : skb->ifindex;
	reply->last_seen = scratch->now;
	if (!address_is_unspecified(&flow->masquerade))
		reply->masquerade_digest = address_digest(&flow->masquerade);
	half_open_take_slot(half_open_time(now), scratch);
	reply->half_open = flow->half_open = 1;
	flow->last_seen = scratch->now;
	flow->sequence_end = packet->sequence_end;
	flow->reply_port = client->source_port;
	reply_key_of(&scratch->reply_key, client, flow);
	return reserve(skb, redirect_to, scratch) && flow_write(scratch);
}

/* Look at the next SEARCH_PORTS ports; true: `scratch->reply_key` has one that is free, or whose
 * half-open flow is over. It asks less than place_of(): the verifier keeps each branch of each turn
 * in mind, and has room for 8192.
 */
static __always_inline bool search_ports(struct scratch *scratch)
{
	struct port_search *search = &scratch->search;
	const struct node *settings = node_get();
	u32 oldest = scratch->now;

	if (!settings)
		return false;
	oldest -= scratch->reply_key.protocol == IPPROTO_TCP ? settings->tcp_syn : settings->udp;
#pragma nounroll
	for (int i = 0; i < SEARCH_PORTS; again(i, 1)) {
		struct reply *present;

		scratch->reply_key.destination_port =
		    bpf_htons((u16)(FIRST_PORT + search->next % PORT_COUNT));
		search->next += 1;
		search->left -= 1;
		present = replies.lookup(&scratch->reply_key);
		if (!present)
			return true;
		if (present->half_open && (s32)(present->last_seen - oldest) < 0)
			return true;
	}
	return false;
}

/* The rest of reserve(), by a tail call: search for a free port, open the flow in the scratch, and
 * let the packet come again, which then is of that flow.
 */
static __always_inline int continue_search(struct __sk_buff *skb, struct scratch *scratch)
{
	if (search_ports(scratch)) {
		enum port_state state = port_state_of(scratch);
		int failed = EEXIST_NEGATIVE;

		if (state != PORT_TAKEN)
			failed = take_port(skb, state, scratch);
		if (!failed)
			return flow_write(scratch)
				   ? bpf_redirect(skb->ifindex, scratch->search.redirect_to)
				   : DROP;
		if (failed != EEXIST_NEGATIVE) {
			count(COUNTER_FLOWS_FULL);
			return DROP;
		}
	}
	if (scratch->search.left && scratch->search.left <= PORT_COUNT)
		tail_calls.call(skb, TAIL_FIND_PORT);
	record_exhausted(scratch);
	return DROP;
}

/* What is masqueraded at the device gets, of the family of `like`; unspecified: there is none. */
static __always_inline const struct address *address_of_device(const struct device *device,
							       const struct address *like)
{
	return address_is_v4(like) ? &device->v4 : &device->v6;
}

/* Set the address that the endpoint is to see in place of the client's: that of the device towards
 * it. False: it has none, which is counted.
 */
static __always_inline bool choose_masquerade(struct flow *flow, u32 ifindex)
{
	struct device *device = devices.lookup(&ifindex);

	if (device)
		flow->masquerade = *address_of_device(device, &flow->endpoint);
	if (!device || address_is_unspecified(&flow->masquerade)) {
		count(COUNTER_NO_ADDRESS);
		return false;
	}
	return true;
}
