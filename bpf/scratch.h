/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * What a program works on that does not fit on a stack of 512 bytes.
 */
#pragma once

#include "packet.h"
#include "service.h"

struct port_search {
	u32 next;	 /* the port to look at, less FIRST_PORT */
	u32 left;	 /* how many ports are still to be looked at */
	u64 redirect_to; /* BPF_F_INGRESS or 0: by which side the packet comes again */
};

/* How a packet gets to a next hop, as route() has found. */
struct next_hop {
	struct bpf_redir_neigh neighbor;
	u8 ethernet[12];   /* the next hop's address, and the one that it is sent from */
	bool has_ethernet; /* false: the next hop's is not known yet, or the device has none */
	bool into_pod;	   /* by redirect_into_pod() */
};

/* One program at a time uses it on a CPU: tc runs with bottom halves off. The verifier knows
 * nothing of the content of a map's value, so paths that differ in that alone are one to it
 * (docs/decisions/0019).
 */
struct scratch {
	/* Set by parsing; `quoted` is the packet that an ICMP error is about. */
	struct packet packet;
	struct packet quoted;
	/* What the packet is looked up by: its own tuple, or the reverse of the quoted one. */
	struct flow_key tuple;
	/* Copies of the entries found, or the entries to be made, and their keys. `flow_key` is set
	 * wherever one of both entries is.
	 */
	struct flow flow;
	struct reply reply;
	struct flow_key flow_key;
	struct flow_key reply_key;
	u32 now; /* when the packet was looked up, as flow.last_seen */
	/* How far find_port() has come with the flow. */
	struct port_search search;
	struct flow_key to;	  /* what the packet becomes */
	struct next_hop next_hop; /* by which it is redirected */
	/* Arguments of helpers, each used within one function. */
	struct flow_key key;
	struct service_key frontend;
	struct affinity_key affinity;
	struct source_range_key source;
	struct bpf_sock_tuple sockets;
	u8 bytes[128];
	/* Kept from packet to packet: the row of half_open_begin(). */
	u32 row;
};
BPF_PERCPU_ARRAY(scratches, struct scratch, 1);

static __always_inline struct scratch *scratch_get(void)
{
	WORD_KEY(zero, 0);

	return scratches.lookup(zero);
}
