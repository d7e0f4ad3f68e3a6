/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Half-open flows: their places, and how a flow becomes an established one.
 * docs/decisions/0023 has the reasons.
 */
#pragma once

#include "flow_previous.h"
#include "flow_key.h"

static __always_inline u32 flow_now(void)
{
	return (u32)(time_now() >> 30);
}

/* Whether `seconds` have passed since `last_seen`. Signed: another CPU may have read the clock
 * later.
 */
static __always_inline bool has_passed(u32 last_seen, u32 now, u32 seconds)
{
	s32 units = (s32)(now - last_seen);

	return units > 0 && (u64)(u32)units << 30 > seconds * NSEC_PER_SEC;
}

/* Whether a half-open flow is over. It stays in the maps until another flow needs its place, or
 * flow_sweep.py removes it.
 */
static __always_inline bool half_open_is_over(u32 last_seen, u8 protocol, u32 now)
{
	const struct node *settings = node_get();

	if (!settings)
		return false;
	return has_passed(last_seen, now,
			  protocol == IPPROTO_TCP ? settings->tcp_syn : settings->udp);
}

/* Whether the reply is of the flow with this key, and not of one that has its place by now. */
static __always_inline bool is_reply_of(const struct reply *reply, const struct flow_key *flow_key)
{
	return reply->client_port == flow_key->source_port &&
	       reply->frontend_port == flow_key->destination_port &&
	       address_equal(&reply->client, &flow_key->source) &&
	       address_equal(&reply->frontend, &flow_key->destination);
}

/* `now` as in struct half_open_row; never 0. */
static __always_inline u32 half_open_time(u64 now)
{
	return (u32)(now >> 20) | 1;
}

/* Where the place of a flow is noted as seen; NULL: it has none. */
static __always_inline u32 *half_open_seen(u32 slot)
{
	u32 index = slot / HALF_OPEN_ROW;
	struct half_open_row *row = half_open_flows.lookup(&index);

	return row ? &row->seen[slot % HALF_OPEN_ROW] : NULL;
}

/* Remove the flow with `key`, if it is half-open and still at this place. */
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

/* Whether an entry that was found by this key is still its own: another CPU may evict a half-open
 * flow at any time, and the kernel gives its entry to another key at once.
 */
static __always_inline bool flow_is_at(struct flow_key *key, const struct flow *flow)
{
	return flows.lookup(key) == flow;
}

static __always_inline bool reply_is_at(struct flow_key *key, const struct reply *reply)
{
	return replies.lookup(key) == reply;
}

/* Give the new flow in the scratch a place in the next row, where each CPU goes round by itself: a
 * free one, or that of the flow which was not seen for longest. `scratch->key` is written over.
 */
static __always_inline void half_open_take_slot(u32 now, struct scratch *scratch)
{
	u32 index = scratch->row < HALF_OPEN_ROWS ? scratch->row : 0;
	struct half_open_row *row = half_open_flows.lookup(&index);
	struct flow_key *slot;
	u32 oldest = 0, column = 0;

	scratch->row = index + 1;
	if (!row)
		return;
#pragma unroll
	for (u32 i = 0; i < HALF_OPEN_ROW; i++) {
		u32 age = now - row->seen[i];

		if (!row->seen[i])
			age = -1;
		else if ((s32)age < 0) /* another CPU has read the clock later */
			age = 0;
		if (age > oldest) {
			oldest = age;
			column = i;
		}
	}
	column %= HALF_OPEN_ROW; /* for the verifier */
	scratch->flow.place = index * HALF_OPEN_ROW + column;
	slot = &row->flow[column];
	if (row->seen[column])
		half_open_evict(slot, scratch->flow.place, &scratch->key);
	*slot = scratch->flow_key;
	row->seen[column] = now;
}

/* The client has sent something. Half-open entries are over at the same time. */
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

static __always_inline bool may_establish(void)
{
	WORD_KEY(zero, 0);
	u32 *number = established_flows.lookup(zero);

	if (!number || *number >= FLOWS_MAX)
		return false;
	__sync_fetch_and_add(number, 1);
	return true;
}

/* Both sides have been heard. Where too many flows are established it stays half-open. */
static __always_inline void establish(struct flow *flow, struct reply *reply)
{
	u32 *seen;

	if (!may_establish()) {
		count(COUNTER_FLOWS_FULL);
		return;
	}
	reply->half_open = 0;
	flow->half_open = 0;
	seen = half_open_seen(flow->place);
	if (seen)
		*seen = 0;
}
