/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Events for `ebpfproxy monitor`. They are recorded only while a process reads them
 * (docs/decisions/0031).
 */
#pragma once

#include "maps.h"

/* The reader polls, so no event wakes it (BPF_RB_NO_WAKEUP). */
#define NO_WAKEUP 1

/* What one run of a program reports. `kind` is 0 if there is nothing to report. */
struct happening {
	u32 service_id;
	u16 flags; /* enum event_flag */
	u8 kind;   /* enum event_kind */
	u8 reason; /* enum counter */
};

/* Counts what happened to a packet or socket, and reports it. */
static __always_inline void happened(struct happening *what, u8 kind, u32 counter)
{
	count(counter);
	what->kind = kind;
	what->reason = (u8)counter;
}

/* Without branches, of which the verifier would follow each combination: a difference of 0 minus 1
 * has the highest bit.
 */
static __always_inline bool event_is_wanted(const struct monitor *watch, u8 kind, u32 service_id)
{
	u64 wanted = (u64)watch->services[0] - 1; /* no filter */

#pragma unroll
	for (int i = 0; i < MONITOR_SERVICES; i++)
		wanted |= (u64)(watch->services[i] ^ service_id) - 1;
	return wanted >> 63 & watch->kinds >> (kind & 31);
}

/* Whether the rate admits one more event. CPUs that count at the same time may exceed it slightly.
 */
static __always_inline bool event_is_within_rate(struct monitor *watch, u64 now)
{
	if (watch->window != now >> 30) {
		watch->window = now >> 30;
		watch->recorded = 0;
	}
	if (watch->recorded >= watch->rate) {
		__sync_fetch_and_add(&watch->limited, 1);
		return false;
	}
	__sync_fetch_and_add(&watch->recorded, 1);
	return true;
}

/* Returns a new record, or NULL if the event is not recorded. The caller sets the addresses and
 * ports that are known, and submits it.
 */
static __always_inline struct event *event_begin(const struct happening *what)
{
	WORD_KEY(zero, 0);
	struct monitor *watch = monitor.lookup(zero);
	struct event *event;
	u64 now;

	if (!watch || !watch->until)
		return NULL;
	now = bpf_ktime_get_ns();
	if (now > watch->until) { /* the reader was killed */
		watch->until = 0;
		return NULL;
	}
	if (!event_is_wanted(watch, what->kind, what->service_id) ||
	    !event_is_within_rate(watch, now))
		return NULL;
	event = events.ringbuf_reserve(sizeof(*event));
	if (!event) {
		__sync_fetch_and_add(&watch->lost, 1);
		return NULL;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->time = now;
	event->kind = what->kind;
	event->reason = what->reason;
	event->flags = what->flags;
	event->service_id = what->service_id;
	return event;
}
