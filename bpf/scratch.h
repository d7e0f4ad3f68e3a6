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
 * only in the scratch are therefore the same state for it (docs/decisions/0019).
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
	u32 now; /* the time of the lookup, in the unit of flow.last_seen */
	/* Progress of find_port(). */
	struct port_search search;
	struct flow_key to;	  /* the tuple of the packet after translation */
	struct next_hop next_hop; /* where the packet is redirected to */
	/* Arguments of helper functions; each is valid only within one function. */
	struct flow_key key;
	struct service_key frontend;
	struct affinity_key affinity;
	struct source_range_key source;
	struct bpf_sock_tuple sockets;
	u8 bytes[128];
	/* Kept between packets: the next row of half_open_take_slot(). */
	u32 row;
};
BPF_PERCPU_ARRAY(scratches, struct scratch, 1);

static __always_inline struct scratch *scratch_get(void)
{
	WORD_KEY(zero, 0);

	return scratches.lookup(zero);
}
