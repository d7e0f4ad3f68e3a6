/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Opening a flow. The entry in `replies` reserves the client port that the endpoint sees, because
 * that port is part of its key.
 */
#pragma once

#include "flow.h"
#include "route.h"
#include "socket_lookup.h"

/* ROUNDS * TRIES random ports are tried before all ports are searched. There are two loops because
 * the verifier follows each iteration of the inner loop, which therefore only does lookups.
 */
#define ROUNDS	   3
#define TRIES	   4
#define FIRST_PORT 1024
#define PORT_COUNT (65536 - FIRST_PORT)
/* Per run of find_port(). The 31 runs that tail calls allow search a quarter of all ports, so that
 * one packet does not hold the CPU for long. The verifier follows each iteration.
 */
#define SEARCH_PORTS	528
#define EEXIST_NEGATIVE (-17)
#define EBUSY_NEGATIVE	(-16)
#define BUSY_ATTEMPTS	3

static __always_inline __be16 random_port(void)
{
	return bpf_htons((u16)(FIRST_PORT + (((u64)bpf_get_prandom_u32() * PORT_COUNT) >> 32)));
}

enum port_state {
	PORT_FREE,
	PORT_REUSABLE, /* the entry belongs to this flow, or to one that is over */
	PORT_TAKEN,
};

static __always_inline enum port_state port_state_of(struct flow_view *view)
{
	const struct flow_key *key = &view->reply_key;
	struct reply *present;

	/* If an endpoint connects to itself, the tuples of both directions must differ. */
	if (key->destination_port == key->source_port &&
	    address_equal(&key->source, &view->reply.client))
		return PORT_TAKEN;
	present = replies.lookup(&view->reply_key);
	if (!present)
		return PORT_FREE;
	if (is_reply_of(present, &view->key))
		return PORT_REUSABLE;
	return is_over(SIDE(present), key->protocol, view->now) ? PORT_REUSABLE : PORT_TAKEN;
}

/* Removes the entries of the flow that had the port in `view->reply_key`. Returns false if its
 * client has sent within the flow's timeout.
 */
static __always_inline bool remove_previous_owner(struct flow_view *view, struct workspace *work)
{
	struct reply *present = replies.lookup(&view->reply_key);
	struct flow *flow;

	if (!present)
		return true;
	if (is_reply_of(present, &view->key)) {
		replies.delete(&view->reply_key);
		return true;
	}
	flow_key_of(&work->key, view->reply_key.protocol, present);
	flow = flows.lookup(&work->key);
	if (flow && is_flow_of(flow, &view->reply_key) &&
	    !is_over(SIDE(flow), work->key.protocol, view->now))
		return false;
	flow_remove(&work->key, &view->reply_key);
	return true;
}

/* Whether the stack would see the same tuple for the flow of `view` and for another flow of its
 * client to the same endpoint: one of both is masqueraded, and egress could not distinguish them.
 * Host-originated packets are not translated twice.
 */
static __always_inline bool stack_sees_twin(struct flow_view *view, struct workspace *work)
{
	const struct flow_key *own = &view->reply_key;
	const struct reply *present;

	if (view->flow.flags & FLOW_NODE)
		return false;
	key_of_masqueraded(&work->key, &own->source, own->source_port, own->destination_port,
			   own->protocol);
	if (own->side == MASQUERADED) {
		work->key.destination = view->key.source;
		work->key.side = AT_EGRESS;
	}
	present = replies.lookup(&work->key);
	return present && present->client_port &&
	       address_equal(&present->client, &view->key.source);
}

/* Inserts the entry in `replies`, or updates the one in `flows`. Returns the result of
 * bpf_map_update_elem(). Repeats it after EBUSY, while a reader locks the bucket
 * (htab_lock_bucket()); cilium #35010.
 */
static __always_inline int entry_write(struct flow_view *view, bool is_reply)
{
	int failed = 0;

#pragma nounroll
	for (int attempt = 0; attempt < BUSY_ATTEMPTS; again(attempt, 1)) {
		failed = is_reply ? replies.insert(&view->reply_key, &view->reply)
				  : flows.update(&view->key, &view->flow);
		if (failed != EBUSY_NEGATIVE)
			break;
		count(COUNTER_FLOWS_BUSY);
	}
	return failed;
}

/* Inserts `view->reply` with the key `view->reply_key`. Returns EEXIST_NEGATIVE if another flow has
 * taken the port in the meantime, or if port_is_in_use() or stack_sees_twin(). Otherwise returns
 * the result of bpf_map_update_elem().
 */
static __always_inline int take_port(struct __sk_buff *skb, enum port_state state,
				     struct flow_view *view, struct workspace *work)
{
	const struct reply *previous = LOOKUP_PREVIOUS(previous_replies_map(), &view->reply_key);

	if (previous && !is_reply_of(previous, &view->key))
		return EEXIST_NEGATIVE;
	if (stack_sees_twin(view, work))
		return EEXIST_NEGATIVE;
	if (view->reply.masquerade_digest &&
	    port_is_in_use(skb, &view->flow, view->reply_key.destination_port,
			   view->reply_key.protocol, work))
		return EEXIST_NEGATIVE;
	if (state == PORT_REUSABLE && !remove_previous_owner(view, work))
		return EEXIST_NEGATIVE;
	return entry_write(view, true);
}

static __always_inline const struct flow_key *exhausted_key(const struct flow_view *view,
							    struct workspace *work)
{
	work->key = view->reply_key;
	work->key.destination_port = 0;
	return &work->key;
}

/* Begins a search, or continues the one of the packet before. Returns false if it ended within the
 * last second: most likely there is still no free port.
 */
static __always_inline bool search_begin(struct flow_view *view, struct port_search *search,
					 struct workspace *work)
{
	const struct exhausted *before = exhausted_ports.lookup(exhausted_key(view, work));

	if (before && before->left) {
		search->next = before->next;
		search->left = before->left;
		return true;
	}
	if (before && (s32)(view->now - before->since) < 1)
		return false;
	search->next = bpf_ntohs(view->reply_key.destination_port) - FIRST_PORT;
	search->left = PORT_COUNT;
	return true;
}

static __always_inline void search_end(struct flow_view *view, const struct port_search *search,
				       struct workspace *work)
{
	WORD_STRUCT(struct exhausted, found);

	found->next = (u16)(search->next % PORT_COUNT);
	found->left = search->left <= PORT_COUNT ? (u16)search->left : 0;
	found->since = view->now;
	exhausted_ports.update(exhausted_key(view, work), found);
}

/* Reserves a port for the flow of `view`, preferably the client's own port: sets the port in
 * `view->reply_key` and inserts `view->reply`. `redirect_to`: see struct port_search. Returns false
 * if no port can be reserved; the reason is counted. If all tried random ports are in use, it does
 * not return: a tail call to find_port() searches further ports and redirects the packet, so that
 * this program processes it again. Four packets search all ports.
 */
static __always_inline bool reserve(struct __sk_buff *skb, u64 redirect_to, struct flow_view *view,
				    struct port_search *search, struct workspace *work)
{
	int failed = EEXIST_NEGATIVE;

#pragma nounroll
	for (int round = 0; round < ROUNDS; again(round, 1)) {
		enum port_state state = PORT_TAKEN;

		barrier(); /* otherwise the loop ends with reads, without a jump */
#pragma unroll
		for (int try = 0; try < TRIES; try++) {
			state = port_state_of(view);
			if (state != PORT_TAKEN)
				break;
			view->reply_key.destination_port = random_port();
		}
		work->port_state = state;
		barrier();
		if (work->port_state != PORT_TAKEN) {
			failed = take_port(skb, work->port_state, view, work);
			if (failed != EEXIST_NEGATIVE)
				break;
		}
		view->reply_key.destination_port = random_port();
	}
	if (!failed)
		return true;
	if (failed != EEXIST_NEGATIVE) {
		happened(&view->happening, EVENT_DROPPED, COUNTER_FLOWS_FULL);
		return false;
	}
	if (search_begin(view, search, work)) {
		search->redirect_to = redirect_to;
		tail_calls.call(skb, TAIL_FIND_PORT);
	}
	happened(&view->happening, EVENT_DROPPED, COUNTER_PORTS_EXHAUSTED);
	return false;
}

/* Writes the entry in `flows`, after the entry in `replies` exists. Returns false if there is no
 * room.
 */
static __always_inline bool flow_write(struct flow_view *view)
{
	const struct flow_key *client = &view->key;
	struct flow *flow = &view->flow;

	flow->reply_port = view->reply_key.destination_port;
	if (flow->reply_port != client->source_port)
		count(COUNTER_PORT_CHANGED);
	if (entry_write(view, false)) {
		replies.delete(&view->reply_key);
		happened(&view->happening, EVENT_DROPPED, COUNTER_FLOWS_FULL);
		return false;
	}
	view->happening.kind = EVENT_NEW;
	view->happening.reason = COUNTER_PACKET_NEW;
	port_set_use(client->protocol, client->destination_port, PORT_OF_FRONTEND);
	port_set_use(client->protocol, flow->endpoint_port, PORT_OF_ENDPOINT);
	return true;
}

/* Initializes the direct flow of a packet without a Service. Without another source port the
 * endpoint could not distinguish it from another flow.
 */
static __always_inline void direct_flow(const struct packet *packet, struct flow *flow)
{
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->endpoint = packet->tuple.destination;
	flow->endpoint_port = packet->tuple.destination_port;
	flow->flags = FLOW_DIRECT;
}

/* Writes both entries of `view->flow`, whose key is `view->key`. The entry in `replies` comes
 * first, so that every packet of the endpoint finds its flow. `device`: see reply.device. Returns
 * false on failure; the reason is counted.
 */
static __always_inline bool flow_open(struct __sk_buff *skb, const struct packet *packet,
				      u32 device, u64 redirect_to, struct scratch *scratch)
{
	struct flow_view *view = &scratch->view;
	const struct flow_key *client = &view->key;
	struct reply *reply = &view->reply;
	struct flow *flow = &view->flow;
	u64 now = time_now();

	view->now = (u32)(now >> 30);
	__builtin_memset(reply, 0, sizeof(*reply));
	reply->client = client->source;
	reply->client_port = client->source_port;
	reply->frontend = client->destination;
	reply->frontend_port = client->destination_port;
	reply->service_id = flow->service_id;
	reply->flags = flow->flags;
	reply->device = flow->flags & FLOW_NODE ? 0 : device;
	reply->last_seen = view->now;
	if (!address_is_unspecified(&flow->masquerade))
		reply->masquerade_digest = address_digest(&flow->masquerade);
	half_open_take_slot(half_open_time(now), &scratch->row, view, &scratch->work);
	reply->half_open = flow->half_open = 1;
	flow->last_seen = view->now;
	flow->sequence_end = packet->sequence_end;
	flow->reply_port = client->source_port;
	reply_key_of(&view->reply_key, client, flow);
	return reserve(skb, redirect_to, view, &scratch->search, &scratch->work) &&
	       flow_write(view);
}

/* 1 if a flow with these flags is closed, else 0. As is_closed(), without a branch. */
static __always_inline u32 closed_bit(u32 flags)
{
	return (flags / FLOW_RESET | (flags / FLOW_CLIENT_FIN & flags / FLOW_ENDPOINT_FIN)) & 1;
}

/* Searches the next SEARCH_PORTS ports. Returns true if `view->reply_key` has a port that is free
 * or whose flow's endpoint has been silent for the flow's timeout. It checks fewer conditions than
 * port_state_of(): the verifier stores each branch of each iteration, and its limit is 8192.
 */
static __always_inline bool search_ports(struct flow_view *view, struct port_search *search)
{
	const struct node *settings = node_get();
	u8 protocol = view->reply_key.protocol;
	u32 ends_unclosed = protocol == IPPROTO_UDP, established, half_open;

	if (!settings)
		return false;
	established = protocol == IPPROTO_UDP ? settings->udp_stream : settings->tcp_fin;
	half_open = protocol == IPPROTO_TCP ? settings->tcp_syn : settings->udp;
#pragma nounroll
	for (int i = 0; i < SEARCH_PORTS; again(i, 1)) {
		struct reply *present;
		u32 is_half_open, timeout;

		view->reply_key.destination_port =
		    bpf_htons((u16)(FIRST_PORT + search->next % PORT_COUNT));
		search->next += 1;
		search->left -= 1;
		present = replies.lookup(&view->reply_key);
		if (!present)
			return true;
		is_half_open = present->half_open & 1;
		timeout = established + is_half_open * (half_open - established);
		if ((ends_unclosed | is_half_open | closed_bit(present->flags)) &
		    ((present->last_seen + timeout - view->now) >> 31))
			return true;
	}
	return false;
}

/* Continues reserve() after a tail call: searches a free port and opens the flow of `view`.
 * Redirects the packet, so that the first program processes it again, now as a packet of that flow.
 */
static __always_inline int continue_search(struct __sk_buff *skb, struct flow_view *view,
					   struct port_search *search, struct workspace *work)
{
	if (search_ports(view, search)) {
		enum port_state state = port_state_of(view);
		int failed = EEXIST_NEGATIVE;

		if (state != PORT_TAKEN)
			failed = take_port(skb, state, view, work);
		if (!failed) {
			exhausted_ports.delete(exhausted_key(view, work));
			return flow_write(view) ? bpf_redirect(skb->ifindex, search->redirect_to)
						: DROP;
		}
		if (failed != EEXIST_NEGATIVE) {
			happened(&view->happening, EVENT_DROPPED, COUNTER_FLOWS_FULL);
			return DROP;
		}
	}
	if (search->left && search->left <= PORT_COUNT)
		tail_calls.call(skb, TAIL_FIND_PORT);
	happened(&view->happening, EVENT_DROPPED, COUNTER_PORTS_EXHAUSTED);
	search_end(view, search, work);
	return DROP;
}
