/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Lookups of flows, also in the maps of before a change of their layout or size.
 */
#pragma once

#include "scratch.h"

/* Entries of the previous maps of flows, while there are such (map_migration.py), are moved to the
 * present ones when they are looked up.
 */
#define LOOKUP_PREVIOUS(array, key)                                                                \
	({                                                                                         \
		void *previous = (array);                                                          \
		previous ? bpf_map_lookup_elem(previous, key) : NULL;                              \
	})

static __always_inline void *previous_flows_map(void)
{
	WORD_KEY(zero, 0);

	return previous_flows.lookup(zero);
}

static __always_inline void *previous_replies_map(void)
{
	WORD_KEY(zero, 0);

	return previous_replies.lookup(zero);
}

static __always_inline struct flow *flow_lookup(struct flow_key *key, struct scratch *scratch)
{
	struct flow *found = flows.lookup(key);

	if (found)
		return found;
	found = LOOKUP_PREVIOUS(previous_flows_map(), key);
	if (!found)
		return NULL;
	scratch->flow = *found;
	flows.insert(key, &scratch->flow);
	return flows.lookup(key);
}

static __always_inline struct reply *reply_lookup(struct flow_key *key, struct scratch *scratch)
{
	struct reply *found = replies.lookup(key);

	if (found)
		return found;
	found = LOOKUP_PREVIOUS(previous_replies_map(), key);
	if (!found)
		return NULL;
	scratch->reply = *found;
	replies.insert(key, &scratch->reply);
	return replies.lookup(key);
}

/* Remove what flow_lookup() has found, for good. */
static __always_inline void flow_delete(struct flow_key *key)
{
	void *previous = previous_flows_map();

	flows.delete(key);
	if (previous)
		bpf_map_delete_elem(previous, key);
}
