/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Lookups of flows in the present maps and in the previous version of the maps.
 *
 * While programs that use the previous maps are attached to a device, `previous_flows` and
 * `previous_replies` contain these maps (migrate.py). A lookup copies an entry that it finds only
 * there to the present map.
 */
#pragma once

#include "scratch.h"

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

static __always_inline struct flow *flow_lookup(struct flow_key *key, struct flow_view *view)
{
	struct flow *found = flows.lookup(key);

	if (found)
		return found;
	found = LOOKUP_PREVIOUS(previous_flows_map(), key);
	if (!found)
		return NULL;
	view->flow = *found;
	flows.insert(key, &view->flow);
	return flows.lookup(key);
}

static __always_inline struct reply *reply_lookup(struct flow_key *key, struct flow_view *view)
{
	struct reply *found = replies.lookup(key);

	if (found)
		return found;
	found = LOOKUP_PREVIOUS(previous_replies_map(), key);
	if (!found)
		return NULL;
	view->reply = *found;
	replies.insert(key, &view->reply);
	return replies.lookup(key);
}

/* Removes an entry from both maps. Otherwise flow_lookup() would copy it from the previous map
 * again. Returns whether it was in the present map.
 */
static __always_inline bool flow_delete(struct flow_key *key)
{
	void *previous = previous_flows_map();
	bool removed = !flows.delete(key);

	if (previous)
		bpf_map_delete_elem(previous, key);
	return removed;
}

static __always_inline void reply_delete(struct flow_key *key)
{
	void *previous = previous_replies_map();

	replies.delete(key);
	if (previous)
		bpf_map_delete_elem(previous, key);
}
