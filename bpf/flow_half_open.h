/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Half-open flows: their slots, and how a flow becomes established. See docs/decisions/0023.
 */
#pragma once

#include "flow_previous.h"
#include "flow_key.h"
#include "flow_tcp.h"

static __always_inline u32 flow_now(void)
{
	return (u32)(time_now() >> 30);
}

/* Whether `seconds` have passed since `last_seen`. The difference is signed because another CPU may
 * have written a later time than `now`.
 */
static __always_inline bool has_passed(u32 last_seen, u32 now, u32 seconds)
{
	s32 units = (s32)(now - last_seen);

	return units > 0 && (u64)(u32)units << 30 > seconds * NSEC_PER_SEC;
}

/* Whether a half-open flow has expired. Its entries remain in the maps until another flow takes its
 * slot or its port, or the agent removes them (flows/sweep.py).
 */
static __always_inline bool half_open_is_over(u32 last_seen, u8 protocol, u32 now)
{
	const struct node *settings = node_get();

	if (!settings)
		return false;
	return has_passed(last_seen, now,
			  protocol == IPPROTO_TCP ? settings->tcp_syn : settings->udp);
}

/* Whether one side of a flow has been silent for the flow's timeout. A closed TCP flow is not over
 * before: one side may not know yet that the connection is closed, and packets in flight would
 * reach the new connection. Open connections and associations are left to the agent.
 */
static __always_inline bool is_over(const struct side *side, u8 protocol, u32 now)
{
	const struct node *settings = node_get();

	if (side->half_open)
		return half_open_is_over(side->last_seen, protocol, now);
	if (!settings || protocol == IPPROTO_SCTP)
		return false;
	if (protocol == IPPROTO_UDP)
		return has_passed(side->last_seen, now, settings->udp_stream);
	return is_closed(side->flags) && has_passed(side->last_seen, now, settings->tcp_fin);
}

/* Whether the entry in `replies` belongs to the flow with this key. Another flow may have replaced
 * the entry.
 */
static __always_inline bool is_reply_of(const struct reply *reply, const struct flow_key *flow_key)
{
	return reply->client_port == flow_key->source_port &&
	       reply->frontend_port == flow_key->destination_port &&
	       address_equal(&reply->client, &flow_key->source) &&
	       address_equal(&reply->frontend, &flow_key->destination);
}

/* Converts `now` to the unit of half_open_row.seen. Never returns 0, which marks a free slot. */
static __always_inline u32 half_open_time(u64 now)
{
	return (u32)(now >> 20) | 1;
}

static __always_inline u32 *half_open_seen(u32 slot)
{
	WORD_KEY(index, slot / HALF_OPEN_ROW);
	struct half_open_row *row = half_open_flows.lookup(index);

	return row ? &row->seen[slot % HALF_OPEN_ROW] : NULL;
}

/* Whether the flow has the entry in `replies` with this key. */
static __always_inline bool is_flow_of(const struct flow *flow, const struct flow_key *reply_key)
{
	return flow->reply_port == reply_key->destination_port &&
	       flow->endpoint_port == reply_key->source_port &&
	       address_equal(&flow->endpoint, &reply_key->source);
}

static __always_inline void established_add(u8 protocol, int number)
{
	WORD_KEY(kind, protocol == IPPROTO_TCP ? FLOWS_OF_TCP : FLOWS_OF_OTHERS);
	u32 *established = established_flows.lookup(kind);

	if (established)
		__sync_fetch_and_add(established, number);
}

/* Removes the flow with `key`, whose entry in `replies` has `reply_key`. */
static __always_inline void flow_remove(struct flow_key *key, struct flow_key *reply_key)
{
	struct flow *flow = flows.lookup(key);
	struct reply *reply = replies.lookup(reply_key);

	if (reply && is_reply_of(reply, key))
		reply_delete(reply_key);
	if (flow && is_flow_of(flow, reply_key)) {
		bool half_open = flow->half_open;

		if (flow_delete(key) && !half_open)
			established_add(key->protocol, -1);
	}
}

/* Removes the flow with `key`, if it is half-open and still has this slot. */
static __always_inline void half_open_evict(struct flow_key *key, u32 slot,
					    struct flow_key *reply_key)
{
	struct flow *flow = flows.lookup(key);
	struct reply *reply;

	if (!flow || !flow->half_open || flow->place != slot)
		return;
	reply_key_of(reply_key, key, flow);
	flows.delete(key);
	reply = replies.lookup(reply_key);
	if (reply && reply->half_open && is_reply_of(reply, key))
		replies.delete(reply_key);
}

/* Whether an entry that was found by this key still belongs to it. Another CPU may evict a
 * half-open flow at any time, and the kernel immediately reuses a removed element for another key.
 */
static __always_inline bool flow_is_at(struct flow_key *key, const struct flow *flow)
{
	return flows.lookup(key) == flow;
}

/* Selects a slot for the new flow with `view->key`, and sets `view->flow.place`: a free one in the
 * next row, or the one whose flow was not seen for the longest time. That flow is evicted. Each CPU
 * iterates over all rows independently of other CPUs: `next_row` is kept between packets.
 */
static __always_inline void half_open_take_slot(u32 now, u32 *next_row, struct flow_view *view,
						struct workspace *work)
{
	WORD_KEY(index, *next_row < LOADED(HALF_OPEN_ROWS) ? *next_row : 0);
	struct half_open_row *row = half_open_flows.lookup(index);
	struct flow_key *slot;
	u32 oldest = 0, column = 0;

	*next_row = *index + 1;
	if (!row)
		return;
#pragma unroll
	for (u32 i = 0; i < HALF_OPEN_ROW; i++) {
		u32 age = now - row->seen[i];

		if (!row->seen[i])
			age = -1;
		else if ((s32)age < 0) /* another CPU has written a later time than `now` */
			age = 0;
		if (age > oldest) {
			oldest = age;
			column = i;
		}
	}
	work->column = column;
	barrier();
	column = work->column % HALF_OPEN_ROW;
	view->flow.place = *index * HALF_OPEN_ROW + column;
	slot = &row->flow[column];
	if (row->seen[column])
		half_open_evict(slot, view->flow.place, &work->key);
	*slot = view->key;
	row->seen[column] = now;
}

/* Records the time of a packet from the client of a half-open flow. Both entries expire at the same
 * time, so both are refreshed.
 */
static __always_inline void half_open_refresh(struct flow *flow, struct reply *reply, u32 now)
{
	u32 *seen;

	if (flow->last_seen == now)
		return;
	flow->last_seen = now;
	if (reply)
		reply->last_seen = now;
	seen = half_open_seen(flow->place);
	if (seen)
		*seen = half_open_time((u64)now << 30);
}

/* Whether there is room for one more established flow. TCP flows leave a quarter of the room to
 * others, and these to TCP flows: their clients may have spoofed addresses. The numbers are signed
 * because the agent sets them (flows/sweep.py), without flows that were established at that moment.
 */
static __always_inline bool may_establish(u8 protocol)
{
	WORD_KEY(tcp, FLOWS_OF_TCP);
	WORD_KEY(others, FLOWS_OF_OTHERS);
	s32 *of_tcp = established_flows.lookup(tcp), *of_others = established_flows.lookup(others);
	s32 room = LOADED(FLOWS), share = LOADED(FLOWS) - LOADED(FLOWS) / 4, own;

	if (!of_tcp || !of_others)
		return false;
	own = protocol == IPPROTO_TCP ? *of_tcp : *of_others;
	return own < share && *of_tcp + *of_others < room;
}

/* Makes a half-open flow established and frees its slot. If too many flows are established, the
 * flow stays half-open.
 */
static __always_inline void establish(struct flow *flow, struct reply *reply, u8 protocol)
{
	u32 *seen;

	if (!may_establish(protocol)) {
		count(COUNTER_FLOWS_FULL);
		return;
	}
	established_add(protocol, 1);
	reply->half_open = 0;
	flow->half_open = 0;
	seen = half_open_seen(flow->place);
	if (seen)
		*seen = 0;
}
