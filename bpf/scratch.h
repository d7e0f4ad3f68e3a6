/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Working memory of a program. It does not fit on the stack, which has 512 bytes.
 */
#pragma once

#include "packet.h"
#include "service.h"

/* The compiler copies the structs within by words of 8 bytes. */
#define WORDS __attribute__((aligned(8)))

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

/* The flow of a packet: copies of its entries as they were found or will be written, their keys,
 * and what packet_event() reports about it.
 */
struct flow_view {
	/* What is looked up: the tuple of the packet, or the reverse of the quoted packet's. */
	struct flow_key tuple;
	struct flow_key key; /* of `flow`; set by each lookup that finds one of both entries */
	struct flow flow;
	struct flow_key reply_key; /* of `reply` */
	struct reply reply;
	u32 now; /* the time of the lookup, in the unit of flow.last_seen */
	struct happening happening;
} WORDS;

/* The packet after its translation, and where it is sent. */
struct target {
	struct flow_key tuple;
	struct next_hop next_hop; /* of `device` */
	u32 device;		  /* where the packet is sent past the stack; 0: nowhere */
	bool to_node;		  /* ingress: the packet is a reply to the node itself */
	u8 outgoing;		  /* enum outgoing */
} WORDS;

/* Arguments of lookups and helpers, and results of loops. Each is valid only within one function. A
 * pointer to a workspace says nothing about what a function reads or writes.
 */
struct workspace {
	struct flow_key key;
	struct affinity_key affinity;
	struct source_range_key source;
	struct bpf_fib_lookup lookup;
	u8 bytes[128];
	struct service_key frontend;
	u32 column;
	struct bpf_sock_tuple sockets;
	u32 port_state;
	struct source_key source_address;
} WORDS;

/* Each CPU has one scratch. tc programs run with bottom halves disabled, so only one program at a
 * time uses it. The verifier does not track the content of map values. Execution paths that differ
 * only in the scratch are therefore the same state for it (docs/decisions/0025).
 *
 * Functions get pointers to the parts that they read or write. Only those that combine many parts
 * get the scratch itself.
 */
struct scratch {
	/* Set by the parser; `quoted` is the packet that an ICMP error quotes. */
	struct packet packet;
	struct packet quoted;
	struct flow_view view;
	struct target target;
	struct port_search search;
	/* Direct server return: where the packet is sent, and the option that it is sent with. */
	struct tunneled_flow tunneled;
	struct tunnel_option option;
	struct workspace work;
	/* Kept between packets: the next row of half_open_take_slot(). */
	u32 row;
};
BPF_PERCPU_ARRAY(scratches, struct scratch, 1);

static __always_inline struct scratch *scratch_get(void)
{
	WORD_KEY(zero, 0);

	return scratches.lookup(zero);
}

static __always_inline void frontend_of_tuple(struct service_key *frontend,
					      const struct flow_key *tuple)
{
	frontend->address = tuple->destination;
	frontend->port = tuple->destination_port;
	frontend->protocol = tuple->protocol;
	frontend->pad = 0;
}

/* Reports that a segment with RST has ended a flow. */
static __always_inline void report_reset(struct happening *happening, u32 service_id, u16 flags)
{
	happening->kind = EVENT_RESET;
	happening->reason = 0;
	happening->flags = flags;
	happening->service_id = service_id;
}

static __always_inline void happening_reset(struct happening *happening)
{
	happening->kind = 0;
	happening->service_id = 0;
}

/* Records what happened to the packet, if anything. Connections that belong to no Service are no
 * events.
 */
static __always_inline void packet_event(const struct flow_view *view)
{
	const struct happening *what = &view->happening;
	const struct flow_key *client = &view->key;
	struct event *event;

	if (!what->kind || (!what->service_id && what->reason != COUNTER_CLUSTER_IP_UNUSED))
		return;
	event = event_begin(what);
	if (!event)
		return;
	if (what->kind == EVENT_NEW) {
		event->endpoint = view->flow.endpoint;
		event->endpoint_port = view->flow.endpoint_port;
	} else if (what->kind == EVENT_RESET) {
		event->endpoint = view->reply_key.source;
		event->endpoint_port = view->reply_key.source_port;
	}
	event->client = client->source;
	event->client_port = client->source_port;
	event->frontend = client->destination;
	event->frontend_port = client->destination_port;
	event->protocol = client->protocol;
	events.ringbuf_submit(event, NO_WAKEUP);
}
