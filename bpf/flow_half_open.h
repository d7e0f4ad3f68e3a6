/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Half-open flows: their places, and how a flow becomes an established one.
 * docs/decisions/0023 has the reasons.
 */
#pragma once

#include "flow_former.h"
#include "flow_key.h"

/* A new flow takes one of so many places in a row: a free one, or that of the oldest flow there.
 * With a flood of n packets a second, a flow of t seconds is evicted with the probability that 4
 * new ones hit its row: about 10 * (n * t / HALF_OPEN_MAX)^4.
 */
#define ROW 4

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

/* Whether a half-open flow is over, which stays in the maps until somebody needs its place, or
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

/* Remove the flow at a place, if it is half-open and has not moved to another place. */
static __always_inline void half_open_evict(struct half_open_place *place, u32 index,
					    struct flow_key *reply_key)
{
	struct flow *flow = flows.lookup(&place->flow);
	struct reply *reply;

	if (!flow || !flow->half_open || flow->place != index)
		return;
	reply_key_of(reply_key, &place->flow, flow);
	flows.delete(&place->flow);
	reply = replies.lookup(reply_key);
	if (reply && reply->half_open && is_reply_of(reply, &place->flow))
		replies.delete(reply_key);
}

/* Give the new flow in the scratch a place. `scratch->key` is written over. */
static __always_inline void half_open_begin(struct scratch *scratch)
{
	u32 now = (u32)(time_now() >> 20) | 1;
	u32 first = (u32)(((u64)bpf_get_prandom_u32() * (HALF_OPEN_MAX / ROW)) >> 32) * ROW;
	struct half_open_place *chosen = NULL;
	u32 longest = 0;

#pragma unroll
	for (u32 i = 0; i < ROW; i++) {
		u32 index = first + i;
		struct half_open_place *place = half_open_flows.lookup(&index);
		u32 age;

		if (!place)
			return;
		age = place->opened ? now - place->opened : -1;
		if (!chosen || age > longest) {
			chosen = place;
			longest = age;
			scratch->flow.place = index;
		}
	}
	if (!chosen)
		return;
	if (chosen->opened)
		half_open_evict(chosen, scratch->flow.place, &scratch->key);
	chosen->flow = scratch->flow_key;
	chosen->opened = now;
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
	struct half_open_place *place;
	u32 index = flow->place;

	if (!may_establish()) {
		count(COUNTER_FLOWS_FULL);
		return;
	}
	reply->half_open = 0;
	flow->half_open = 0;
	place = half_open_flows.lookup(&index);
	if (place)
		place->opened = 0;
}
