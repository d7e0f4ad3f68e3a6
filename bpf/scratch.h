/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Working memory of a program. It does not fit on the stack, which has 512 bytes.
 */
#pragma once

#include "packet.h"
#include "service.h"

struct port_search {
	u32 next;	 /* the next port, minus FIRST_PORT */
	u32 left;	 /* number of ports not searched yet */
	u64 redirect_to; /* BPF_F_INGRESS or 0: the side on which the packet is processed again */
};

/* The result of route(). */
struct next_hop {
	struct bpf_redir_neigh neighbor;
	u8 ethernet[12];   /* destination and source address of the Ethernet header */
	bool has_ethernet; /* false: the neighbor is unresolved, or the device has no addresses */
	bool into_pod;	   /* use redirect_into_pod() */
};

/* Each CPU has one scratch. tc programs run with bottom halves disabled, so only one program at a
 * time uses it. The verifier does not track the content of map values. Execution paths that differ
 * only in the scratch are therefore the same state for it (docs/decisions/0025).
 */
struct scratch {
	/* Set by the parser; `quoted` is the packet that an ICMP error quotes. */
	struct packet packet;
	struct packet quoted;
	/* The tuple for lookups: that of the packet, or the reverse of the quoted packet's. */
	struct flow_key tuple;
	/* Copies of the entries that were found or will be written, and their keys. `flow_key` is
	 * set if `flow` or `reply` is.
	 */
	struct flow flow;
	struct reply reply;
	struct flow_key flow_key;
	struct flow_key reply_key;
	u32 now;		    /* the time of the lookup, in the unit of flow.last_seen */
	struct happening happening; /* what packet_event() records */
	/* Progress of find_port(). */
	struct port_search search;
	struct flow_key to;	  /* the tuple of the packet after translation */
	struct next_hop next_hop; /* where the packet is redirected to */
	/* Direct server return: where the packet is sent, and the option that it is sent with. */
	struct tunneled_flow tunneled;
	struct tunnel_option option;
	/* Arguments of helper functions; each is valid only within one function. */
	struct flow_key key;
	struct service_key frontend;
	struct affinity_key affinity;
	struct source_range_key source;
	struct bpf_sock_tuple sockets;
	struct bpf_fib_lookup lookup;
	struct source_key source_address;
	u8 bytes[128];
	/* Of egress() and ingress(). In a register, the verifier would follow each possible value
	 * separately.
	 */
	u32 outgoing, device;
	bool to_node;
	u32 column, port_state; /* of half_open_take_slot() and reserve(), for the same reason */
	/* Kept between packets: the next row of half_open_take_slot(). */
	u32 row;
};
BPF_PERCPU_ARRAY(scratches, struct scratch, 1);

static __always_inline struct scratch *scratch_get(void)
{
	WORD_KEY(zero, 0);

	return scratches.lookup(zero);
}

/* Sets the frontend that a client reaches with `scratch->tuple`. */
static __always_inline void frontend_of_tuple(struct scratch *scratch)
{
	scratch->frontend.address = scratch->tuple.destination;
	scratch->frontend.port = scratch->tuple.destination_port;
	scratch->frontend.protocol = scratch->tuple.protocol;
	scratch->frontend.pad = 0;
}

/* Reports what happened to the first packet of the client in `scratch->flow_key`. */
static __always_inline void report(struct scratch *scratch, u8 kind, u8 reason)
{
	scratch->happening.kind = kind;
	scratch->happening.reason = reason;
}

/* Drops the first packet of a client: counts the reason and reports it. */
static __always_inline void count_drop(struct scratch *scratch, u32 counter)
{
	count(counter);
	report(scratch, EVENT_DROPPED, (u8)counter);
}

/* Reports that a segment with RST has ended the flow of `scratch->flow_key`. */
static __always_inline void report_reset(struct scratch *scratch, u32 service_id, u16 flags)
{
	scratch->happening.kind = EVENT_RESET;
	scratch->happening.reason = 0;
	scratch->happening.flags = flags;
	scratch->happening.service_id = service_id;
}

/* Clears what happened to the previous packet of this CPU. */
static __always_inline void happening_reset(struct scratch *scratch)
{
	scratch->happening.kind = 0;
	scratch->happening.service_id = 0;
}

/* Records what happened to the packet, if anything. Connections that belong to no Service are no
 * events.
 */
static __always_inline void packet_event(struct scratch *scratch)
{
	const struct happening *what = &scratch->happening;
	const struct flow_key *client = &scratch->flow_key;
	struct event *event;

	if (!what->kind || !what->service_id)
		return;
	event = event_begin(what);
	if (!event)
		return;
	if (what->kind == EVENT_NEW) {
		event->endpoint = scratch->flow.endpoint;
		event->endpoint_port = scratch->flow.endpoint_port;
	} else if (what->kind == EVENT_RESET) {
		event->endpoint = scratch->reply_key.source;
		event->endpoint_port = scratch->reply_key.source_port;
	} else {
		__builtin_memset(&event->endpoint, 0, sizeof(event->endpoint));
		event->endpoint_port = 0;
	}
	event->netns_cookie = 0;
	event->client = client->source;
	event->client_port = client->source_port;
	event->frontend = client->destination;
	event->frontend_port = client->destination_port;
	event->protocol = client->protocol;
	events.ringbuf_submit(event, NO_WAKEUP);
}
