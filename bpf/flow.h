/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Flows: what is remembered of a connection that is translated. See enum flow_side in abi.h for the
 * places where it is looked up, and by what.
 */
#pragma once

#include "packet.h"
#include "service.h"

#define BUSY_ATTEMPTS  3
#define CLOSED_BY_BOTH (FLOW_CLIENT_FIN | FLOW_ENDPOINT_FIN)
#define EBUSY_NEGATIVE (-16)

/* Room for what does not fit on a stack of 512 bytes, and for whatever is known of a packet beyond
 * a few instructions: the verifier knows nothing of what is read from here, so ways that differ in
 * it alone are one to it (docs/decisions/0019). One program at a time uses it on a CPU: tc runs
 * with bottom halves off.
 */
struct scratch {
	struct flow flow;     /* what is written into the map */
	struct flow mine;     /* the flow that the packet is of */
	struct flow migrated; /* from the previous map */
	struct packet packet;
	struct packet quoted; /* by `packet`, an ICMP error */
	u64 now;	      /* from when a flow is found or opened on */
	struct flow_key key;
	struct flow_key to; /* what the packet becomes */
	struct flow_key as; /* what the quoted packet is taken for */
	struct service_key dialed;
	struct affinity_key affinity;
	struct source_range_key source;
	struct bpf_sock_tuple sockets;
	u8 bytes[128];
};
BPF_PERCPU_ARRAY(scratches, struct scratch, 1);

static __always_inline struct scratch *scratch_get(void)
{
	WORD_KEY(zero, 0);

	return scratches.lookup(zero);
}

/* `packet`, all zero but for where it begins, and the side. */
static __always_inline struct packet *packet_begin(struct packet *packet, u32 l3, u8 side)
{
	__builtin_memset(packet, 0, sizeof(*packet));
	packet->l3 = l3;
	packet->tuple.side = side;
	return packet;
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
	WORD_KEY(zero, 0);

	return node.lookup(zero);
}

/* Over for good, or so long without a packet that it counts as over. */
static __always_inline bool flow_is_over(const struct flow *flow, u64 now)
{
	const struct node *settings = node_get();

	if (!settings)
		return false;
	/* Signed: another CPU may have seen it after this one has looked at the clock. */
	return (s64)(now - flow->last_seen) > (s64)(flow_timeout(flow, settings) * NSEC_PER_SEC);
}

/* Write an entry. EBUSY: somebody reads this bucket just now (htab_lock_bucket()); cilium #35010.
 */
static __always_inline int flow_write(struct flow_key *key, struct flow *flow, bool only_new)
{
	int failed = 0;

#pragma nounroll
	for (int attempt = 0; attempt < BUSY_ATTEMPTS; again(attempt, 1)) {
		failed = only_new ? flows.insert(key, flow) : flows.update(key, flow);
		if (failed != EBUSY_NEGATIVE)
			break;
		count(COUNTER_FLOWS_BUSY);
	}
	return failed;
}

/* The entry in the previous `flows`, while its contents are migrated to a map of another size. */
static __always_inline struct flow *flow_former(struct flow_key *key)
{
	WORD_KEY(zero, 0);
	void *former = former_flows.lookup(zero);

	return former ? bpf_map_lookup_elem(former, key) : NULL;
}

/* Insert such an entry here as it is: ids are the same in both. */
static __always_inline bool flow_migrate(struct flow_key *key, struct scratch *scratch)
{
	struct flow *found = flow_former(key);

	if (!found)
		return false;
	scratch->migrated = *found;
	flow_write(key, &scratch->migrated, true);
	return true;
}

/* The entry that has this key, unless it is over. */
static __always_inline struct flow *flow_find(struct flow_key *key, struct scratch *scratch)
{
	struct flow *flow = flows.lookup(key);

	if (!flow && flow_migrate(key, scratch))
		flow = flows.lookup(key);
	if (!flow)
		return NULL;
	scratch->now = time_now(); /* it costs as much as parsing: not for packets of no flow */
	if (scratch->now - flow->last_seen >= NSEC_PER_SEC && flow_is_over(flow, scratch->now))
		return NULL;
	return flow;
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
	if (entry && entry->endpoint_port == known->endpoint_port &&
	    address_equal(&entry->endpoint, &known->endpoint) &&
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
	for (u32 way = FROM_ENDPOINT; way >= FROM_CLIENT;
	     again(way, -1)) /* whether the port is lost comes first */
		flow_tell(known, way, scratch);
}

/* A packet of the flow was seen. What is new of it is told to the flow's entries at once, that it
 * lives once a second: so a busy one costs nothing to keep, and no half of it is forgotten. `mine`
 * is a copy.
 */
static __always_inline void flow_seen(struct flow *mine, u8 tcp_flags, bool from_client,
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
	if (flags == mine->flags && scratch->now - mine->last_seen < NSEC_PER_SEC)
		return;
	mine->flags = flags;
	mine->last_seen = scratch->now;
	flow_tell_all(mine, scratch);
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
