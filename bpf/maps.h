/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * The maps. This file and the entry points are all that is in bcc's dialect. The sizes and PIN_DIR
 * come from the compiler's command line. bcc reuses a pinned map without a check, so map_shapes.py
 * reads these lines and puts a digest of each map's shape into the name of its pin.
 */
#pragma once

#include "abi.h"
#include "compat.h"

#ifdef PIN_DIR
#define PINNED(type, key, value, name, size, flags)                                                \
	BPF_TABLE_PINNED(type, key, value, name, size, PIN_DIR "/" #name, flags)
#else /* a trial: the maps end with the process that made them */
#define PINNED(type, key, value, name, size, flags) BPF_F_TABLE(type, key, value, name, size, flags)
#endif

/* Preallocated: replacing an entry must never fail for want of memory. */
PINNED("hash", struct service_key, struct service, services, SERVICES_MAX, 0);
PINNED("hash", u32, struct service_name, service_names, SERVICES_MAX, BPF_F_NO_PREALLOC);

/* Written by the control plane through mmap(2), without a system call. */
PINNED("array", u32, u32, slots, SLOTS_MAX, BPF_F_MMAPABLE);
PINNED("array", u32, struct endpoint, endpoints, ENDPOINTS_MAX, BPF_F_MMAPABLE);
PINNED("array", u32, struct node, node, 1, BPF_F_MMAPABLE);

PINNED("lpm_trie", struct network_key, u32, local_networks, 65536, BPF_F_NO_PREALLOC);

PINNED("lru_hash", struct affinity_key, struct affinity, affinity, AFFINITY_MAX, 0);
PINNED("lru_hash", struct socket_flow_key, struct socket_flow, socket_flows, SOCKETS_MAX, 0);

/* An array, since cookies are given out one after another: a fifth of the cost of a hash map. */
PINNED("array", u32, struct socket_peer, socket_peers, SOCKETS_MAX, BPF_F_MMAPABLE);

PINNED("lpm_trie", struct source_range_key, u32, source_ranges, SOURCE_RANGES_MAX,
       BPF_F_NO_PREALLOC);
PINNED("array", u32, u64, service_ports, SERVICE_PORT_WORDS, BPF_F_MMAPABLE);
PINNED("hash", struct address, struct frontend_address, frontend_addresses, SERVICES_MAX,
       BPF_F_NO_PREALLOC);

PINNED("hash", u32, struct device, devices, 4096, BPF_F_NO_PREALLOC);
/* Pods, by the index of their device, whose packets reached a frontend by no program of ours. */
PINNED("lru_hash", u32, u64, bypassing, 4096, 0);

/* With room for FLOWS_MAX established flows and HALF_OPEN_ROWS * HALF_OPEN_ROW half-open ones. */
PINNED("hash", struct flow_key, struct flow, flows, FLOW_ENTRIES_MAX, 0);
PINNED("hash", struct flow_key, struct reply, replies, FLOW_ENTRIES_MAX, 0);
PINNED("array", u32, struct half_open_row, half_open_flows, HALF_OPEN_ROWS, 0);
/* How many flows are established: counted up by the programs, set by flow_sweep.py. */
PINNED("array", u32, u32, established_flows, 1, 0);
PINNED("array", u32, struct port_uses, flow_ports, FLOW_PORT_ENTRIES, 0);
/* The previous maps of flows, while programs that use them are attached to some device: what is not
 * in the present maps is looked up there.
 */
PINNED("array_of_maps$flows", u32, u32, previous_flows, 1, 0);
PINNED("array_of_maps$replies", u32, u32, previous_replies, 1, 0);
/* When no port was free, in units of 2^30 ns, by the key of the reply without its port. */
PINNED("lru_hash", struct flow_key, u32, exhausted_ports, 1024, 0);
/* Not pinned by its own path, but with the programs that belong to it. */
BPF_PROG_ARRAY(tail_calls, 1);
PINNED("array", u32, struct icmp_budget, icmp_budget, 1, 0);
/* By what their endpoint sends: connections to Services that netfilter masquerades, from before
 * this dataplane. The value is conntrack's zone of that direction.
 */
PINNED("hash", struct flow_key, u32, netfilter_flows, 65536, BPF_F_NO_PREALLOC);
/* What pods send by connected UDP sockets that keep a former endpoint as their peer, since they
 * could not be reconnected (docs/decisions/0021); the value is the frontend that it is for.
 */
PINNED("hash", struct flow_key, struct service_key, stale_sockets, 65536, BPF_F_NO_PREALLOC);
PINNED("lru_hash", struct fragment_key, struct fragment, fragments, 8192, 0);

PINNED("percpu_array", u32, u64, counters, COUNTERS, 0);
PINNED("percpu_array", u32, u64, device_packets, DEVICE_PACKETS, 0);
PINNED("percpu_array", u32, struct traffic, traffic, SERVICES_MAX + 1, 0);

static __always_inline void count(u32 counter)
{
	WORD_KEY(key, counter);
	u64 *value = counters.lookup(key);

	if (value)
		*value += 1; /* per CPU; where tc interrupts a socket hook, one may be lost */
}

static __always_inline struct node *node_get(void)
{
	WORD_KEY(zero, 0);

	return node.lookup(zero);
}
