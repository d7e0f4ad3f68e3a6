/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Flows: what is remembered of a connection that is translated. See enum flow_side in abi.h for the
 * places where it is looked up, and by what.
 */
#pragma once

#include "packet.h"
#include "service.h"

#define ATTEMPTS	24 /* ports that are tried before there is said to be none */
#define FIRST_PORT	1024
#define BUSY_ATTEMPTS	3
#define CLOSED_BY_BOTH	(FLOW_CLIENT_FIN | FLOW_ENDPOINT_FIN)
#define EEXIST_NEGATIVE (-17)
#define EBUSY_NEGATIVE	(-16)

/* Room for what does not fit on a stack of 512 bytes. One program at a time uses it on a CPU: tc
 * runs with bottom halves off.
 */
struct scratch {
	struct flow flow; /* what is written into the map */
	struct flow mine; /* the flow that the packet is of */
	struct flow_key key;
	struct flow_key to;
	u8 bytes[128];
};
BPF_PERCPU_ARRAY(scratches, struct scratch, 1);

static __always_inline struct scratch *scratch_get(void)
{
	u32 zero = 0;

	return scratches.lookup(&zero);
}

/* Seconds after which a flow without packets is over. flow_state.py tells the same to people. */
static __always_inline u32 flow_timeout(const struct flow *flow, const struct node *node)
{
	if (flow->protocol != IPPROTO_TCP)
		return flow->flags & FLOW_REPLIED ? node->udp_stream : node->udp;
	if (flow->flags & FLOW_RESET || (flow->flags & CLOSED_BY_BOTH) == CLOSED_BY_BOTH)
		return node->tcp_fin;
	if (flow->flags & CLOSED_BY_BOTH)
		return node->tcp_close_wait;
	return flow->flags & FLOW_ESTABLISHED ? node->tcp_established : node->tcp_syn;
}

static __always_inline struct node *node_get(void)
{
	u32 zero = 0;

	return node.lookup(&zero);
}

/* Over for good, or so long without a packet that it counts as over. */
static __always_inline bool flow_is_over(const struct flow *flow, u64 now)
{
	const struct node *settings = node_get();

	if (!settings)
		return false;
	return now > flow->last_seen &&
	       now - flow->last_seen > flow_timeout(flow, settings) * NSEC_PER_SEC;
}

static __always_inline bool flow_is_closed(const struct flow *flow)
{
	return flow->flags & FLOW_RESET || (flow->flags & CLOSED_BY_BOTH) == CLOSED_BY_BOTH;
}

static __always_inline void tuple_set(struct flow_key *key, const struct address *source,
				      __be16 source_port, const struct address *destination,
				      __be16 destination_port)
{
	key->source = *source;
	key->destination = *destination;
	key->source_port = source_port;
	key->destination_port = destination_port;
}

static __always_inline void tuple_reverse(struct flow_key *key, const struct flow_key *tuple)
{
	tuple_set(key, &tuple->destination, tuple->destination_port, &tuple->source,
		  tuple->source_port);
	key->protocol = tuple->protocol;
	key->side = tuple->side;
	key->pad = 0;
}

/* The key of the flow's entry for `way`. */
static __always_inline void flow_key_of(struct flow_key *key, const struct flow *flow, u8 way)
{
	key->protocol = flow->protocol;
	key->pad = 0;
	if (way == FROM_CLIENT) {
		tuple_set(key, &flow->client, flow->client_port, &flow->frontend,
			  flow->frontend_port);
		key->side = flow->flags & FLOW_NODE ? AT_EGRESS : AT_INGRESS;
	} else if (way == BETWEEN) {
		tuple_set(key, &flow->endpoint, flow->endpoint_port, &flow->client,
			  flow->between_port);
		key->side = AT_EGRESS;
	} else {
		tuple_set(key, &flow->endpoint, flow->endpoint_port, &flow->masquerade,
			  flow->masquerade_port);
		key->side = AT_INGRESS;
	}
}

/* What a packet from the client is, once both translations are done. */
static __always_inline void flow_to_endpoint(struct flow_key *to, const struct flow *flow)
{
	if (flow->masquerade_port)
		tuple_set(to, &flow->masquerade, flow->masquerade_port, &flow->endpoint,
			  flow->endpoint_port);
	else
		tuple_set(to, &flow->client, flow->between_port, &flow->endpoint,
			  flow->endpoint_port);
}

/* What a packet from the client is between both translations. */
static __always_inline void flow_between(struct flow_key *to, const struct flow *flow)
{
	tuple_set(to, &flow->client, flow->between_port, &flow->endpoint, flow->endpoint_port);
}

/* What a packet from the endpoint is, once both translations are undone. */
static __always_inline void flow_to_client(struct flow_key *to, const struct flow *flow)
{
	tuple_set(to, &flow->frontend, flow->frontend_port, &flow->client, flow->client_port);
}

/* Whether the flow has an entry for `way`. A node's own flow that leaves by a device has no part in
 * which the stack sees it translated by half.
 */
static __always_inline bool flow_has(const struct flow *flow, u8 way)
{
	if (way == FROM_ENDPOINT)
		return flow->masquerade_port != 0;
	if (way == BETWEEN)
		return !(flow->flags & FLOW_NODE && flow->flags & FLOW_MASQUERADE);
	return true;
}

/* Write an entry. EBUSY: somebody reads this bucket just now (htab_lock_bucket()); cilium #35010.
 */
static __always_inline int flow_write(struct flow_key *key, struct flow *flow, bool only_new)
{
	int failed = 0;

#pragma nounroll
	for (int attempt = 0; attempt < BUSY_ATTEMPTS; attempt++) {
		failed = only_new ? flows.insert(key, flow) : flows.update(key, flow);
		if (failed != EBUSY_NEGATIVE)
			break;
		count(COUNTER_FLOWS_BUSY);
	}
	return failed;
}

/* Whether both are between the same client's socket and the same frontend. */
static __always_inline bool flow_is_same(const struct flow *one, const struct flow *other)
{
	return one->client_port == other->client_port &&
	       one->frontend_port == other->frontend_port &&
	       address_equal(&one->client, &other->client) &&
	       address_equal(&one->frontend, &other->frontend);
}

/* Tell the entry for `way` what is known of the flow; one that was evicted is restored. */
static __always_inline void flow_tell(struct flow *known, u8 way, struct scratch *scratch)
{
	struct flow *entry;

	if (!flow_has(known, way))
		return;
	flow_key_of(&scratch->key, known, way);
	entry = flows.lookup(&scratch->key);
	/* Not that of an earlier flow between the same, which had another port in between. */
	if (entry && entry->endpoint_id == known->endpoint_id &&
	    entry->between_port == known->between_port && flow_is_same(entry, known)) {
		entry->flags = known->flags | (entry->flags & ~FLOW_RESET);
		entry->last_seen = known->last_seen;
		entry->masquerade = known->masquerade;
		entry->masquerade_port = known->masquerade_port;
		return;
	}
	if (entry) { /* another flow took the place meanwhile: this one will get a new port */
		if (way == FROM_ENDPOINT)
			known->masquerade_port = 0;
		return;
	}
	scratch->flow = *known;
	scratch->flow.way = way;
	if (!flow_write(&scratch->key, &scratch->flow, true))
		count(COUNTER_HEALED);
}

/* Tell all entries of the flow. What a lookup returned is not to be used any more then: to restore
 * one, the LRU may take any other's place, and gives it to somebody else at once.
 */
static __always_inline void flow_tell_all(struct flow *known, struct scratch *scratch)
{
#pragma nounroll
	for (u8 way = FROM_ENDPOINT; way >= FROM_CLIENT;
	     way--) /* whether the port is lost comes first */
		flow_tell(known, way, scratch);
}

/* A packet of the flow was seen. What is new of it is told to the flow's entries at once, that it
 * lives once a second: so a busy one costs nothing to keep, and no half of it is forgotten. `mine`
 * is a copy.
 */
static __always_inline void flow_seen(struct flow *mine, u8 tcp_flags, bool from_client, u64 now,
				      struct scratch *scratch)
{
	u16 flags = mine->flags;

	if (!from_client)
		flags |= FLOW_REPLIED;
	if (mine->protocol == IPPROTO_TCP) {
		/* Whoever gets a reset may know better: then the connection goes on. */
		flags = tcp_flags & TCP_RST ? flags | FLOW_RESET : flags & ~FLOW_RESET;
		if (tcp_flags & TCP_FIN)
			flags |= from_client ? FLOW_CLIENT_FIN : FLOW_ENDPOINT_FIN;
		if (from_client && tcp_flags & TCP_ACK && flags & FLOW_REPLIED)
			flags |= FLOW_ESTABLISHED;
	}
	if (flags == mine->flags && now - mine->last_seen < NSEC_PER_SEC)
		return;
	mine->flags = flags;
	mine->last_seen = now;
	flow_tell_all(mine, scratch);
}

static __always_inline __be16 any_port(void)
{
	u32 room = 65536 - FIRST_PORT;

	return bpf_htons((u16)(FIRST_PORT + (((u64)bpf_get_prandom_u32() * room) >> 32)));
}

/* Reserve the key `scratch->key` for `scratch->flow`: what is there already is either this flow's
 * own, or over, or in the way. Being closed is not enough: who was connected may not know yet, and
 * what is on its way would come to somebody else's connection.
 */
static __always_inline int flow_reserve(struct scratch *scratch, u64 now)
{
	struct flow *present = flows.lookup(&scratch->key);

	if (!present)
		return flow_write(&scratch->key, &scratch->flow, true);
	if (!flow_is_same(present, &scratch->flow) && !flow_is_over(present, now))
		return EEXIST_NEGATIVE;
	return flow_write(&scratch->key, &scratch->flow, false);
}

enum reserved {
	RESERVED,
	NO_PORT,
	NO_ROOM,
};

/* Find the port by which the node's stack will know this flow, and no other between the two. */
static __always_inline enum reserved flow_reserve_between(struct scratch *scratch, u64 now)
{
	struct flow *flow = &scratch->flow;
	bool hairpin = address_equal(&flow->client, &flow->endpoint);
	int failed = EEXIST_NEGATIVE;

	flow->way = BETWEEN;
	flow->between_port = flow->client_port;
	if (!flow_has(flow, BETWEEN))
		return RESERVED;
#pragma nounroll
	for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
		/* Of an endpoint to itself there and back must differ. */
		if (!hairpin || flow->between_port != flow->endpoint_port) {
			flow_key_of(&scratch->key, flow, BETWEEN);
			failed = flow_reserve(scratch, now);
			if (failed != EEXIST_NEGATIVE)
				break;
		}
		if (flow->protocol == IPPROTO_SCTP) /* its checksum covers the ports */
			break;
		flow->between_port = any_port();
	}
	if (failed)
		return failed == EEXIST_NEGATIVE ? NO_PORT : NO_ROOM;
	if (flow->between_port != flow->client_port)
		count(COUNTER_PORT_CHANGED);
	return RESERVED;
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
static __always_inline bool socket_uses(struct __sk_buff *skb, const struct flow *flow)
{
#if defined(HAVE_SKC_LOOKUP_TCP) && defined(HAVE_SK_LOOKUP_UDP)
	struct bpf_sock_tuple tuple = {};
	u32 size = socket_tuple(&tuple, &flow->endpoint, flow->endpoint_port, &flow->masquerade,
				flow->masquerade_port);

	if (flow->protocol == IPPROTO_TCP)
		return tcp_socket_gets(skb, &tuple, size);
	if (flow->protocol == IPPROTO_UDP)
		return udp_socket_gets(skb, &tuple, size, false);
#endif
	return false;
}

/* Find the port for `scratch->flow` at its address to masquerade with. The entry that the
 * endpoint's packets will look for is what reserves it.
 */
static __always_inline enum reserved
flow_reserve_masquerade(struct __sk_buff *skb, struct scratch *scratch, u64 now, bool own_socket)
{
	struct flow *flow = &scratch->flow;
	int failed = EEXIST_NEGATIVE;

	flow->way = FROM_ENDPOINT;
	flow->masquerade_port = own_socket ? any_port() : flow->between_port;
#pragma nounroll
	for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
		flow_key_of(&scratch->key, flow, FROM_ENDPOINT);
		if (!socket_uses(skb, flow)) {
			failed = flow_reserve(scratch, now);
			if (failed != EEXIST_NEGATIVE)
				break;
		}
		if (flow->protocol == IPPROTO_SCTP)
			break;
		flow->masquerade_port = any_port();
	}
	if (failed)
		return failed == EEXIST_NEGATIVE ? NO_PORT : NO_ROOM;
	return RESERVED;
}

static __always_inline void carried(u32 service_id, u32 bytes, bool to_endpoint, bool is_new)
{
	struct traffic *sum = traffic.lookup(&service_id);

	if (!sum)
		return;
	if (to_endpoint) {
		sum->new_flows += is_new;
		sum->packets_in += 1;
		sum->bytes_in += bytes;
	} else {
		sum->packets_out += 1;
		sum->bytes_out += bytes;
	}
}
