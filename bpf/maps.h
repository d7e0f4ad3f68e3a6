/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * The maps. The sizes in an object file are those of the compiler's command line; the agent makes
 * maps of its own sizes before it loads the programs. map_shapes.py reads these lines and adds a
 * digest of each map's shape to the name of its pin.
 */
#pragma once

#include "abi.h"
#include "compat.h"

/* A map that the agent pins. */
#define PINNED(type, key, value, name, size, flags) BPF_F_TABLE(type, key, value, name, size, flags)

/* A ring buffer that the agent pins. bcc's BPF_RINGBUF_OUTPUT has no type for its records. */
#define PINNED_RING(record, name, bytes)                                                           \
	struct name##_table_t {                                                                    \
		int key;                                                                           \
		u32 leaf;                                                                          \
		void *(*ringbuf_reserve)(u64);                                                     \
		void (*ringbuf_submit)(void *, u64);                                               \
		u32 max_entries;                                                                   \
	};                                                                                         \
	__attribute__((section("maps/ringbuf"))) struct name##_table_t name = {.max_entries =      \
										   (bytes)}

/* Hash maps have BPF_F_NO_PREALLOC: they take memory for entries in use, and 16 bytes for each
 * bucket, so that they can have their final size from the start (docs/decisions/0092).
 */
PINNED("hash", struct service_key, struct service, services, SERVICES_MAX, BPF_F_NO_PREALLOC);
PINNED("hash", u32, struct service_name, service_names, SERVICES_MAX, BPF_F_NO_PREALLOC);

/* The control plane writes these through mmap(2), without a system call per entry. */
PINNED("array", u32, struct slot_pair, slots, SLOT_PAIRS_MAX, BPF_F_MMAPABLE);
PINNED("array", u32, struct endpoint, endpoints, ENDPOINTS_MAX, BPF_F_MMAPABLE);
PINNED("array", u32, struct node, node, 1, BPF_F_MMAPABLE);

PINNED("lpm_trie", struct network_key, u32, local_networks, 65536, BPF_F_NO_PREALLOC);

/* The approximate numbers of open connections of endpoints whose Service has
 * ALGORITHM_LEAST_CONNECTIONS, by endpoint id. Other endpoints have no entry.
 */
PINNED("hash", u32, u32, connections, CONNECTIONS_MAX, BPF_F_NO_PREALLOC);

/* Endpoints that do not get their full share of new connections yet (slow start), by endpoint id.
 * The value is the time at which the endpoint was added, by bpf_ktime_get_ns().
 */
PINNED("hash", u32, u64, new_endpoints, NEW_ENDPOINTS_MAX, BPF_F_NO_PREALLOC);

PINNED("lru_hash", struct affinity_key, struct affinity, affinity, AFFINITY_MAX, 0);
PINNED("lru_hash", struct socket_flow_key, struct socket_flow, socket_flows, SOCKETS_MAX, 0);

/* An array, because cookies are consecutive numbers. It costs a fifth of a hash map. */
PINNED("array", u32, struct socket_peer, socket_peers, SOCKETS_MAX, BPF_F_MMAPABLE);

PINNED("lpm_trie", struct source_range_key, u32, source_ranges, SOURCE_RANGES_MAX,
       BPF_F_NO_PREALLOC);
PINNED("array", u32, u64, service_ports, SERVICE_PORT_WORDS, BPF_F_MMAPABLE);
PINNED("hash", struct address, struct frontend_address, frontend_addresses, SERVICES_MAX,
       BPF_F_NO_PREALLOC);

/* The network namespaces of the pods that the socket path serves. Key: the cookie. */
PINNED("hash", u64, struct pod_namespace, pod_namespaces, 65536, BPF_F_NO_PREALLOC);

PINNED("hash", u32, struct device, devices, 4096, BPF_F_NO_PREALLOC);
/* For devices with DEVICE_SOURCES. Only used if the kernel lacks BPF_FIB_LOOKUP_SRC. */
PINNED("lpm_trie", struct source_key, struct address, source_addresses, 65536, BPF_F_NO_PREALLOC);
PINNED("hash", u32, struct xdp_device, xdp_devices, 4096, BPF_F_NO_PREALLOC);
#define LOOPBACK_IFINDEX 1 /* in every network namespace (include/net/flow.h) */

/* Key: the interface index of a pod whose packets to a frontend were processed by no program before
 * egress (bypass.h), or whose replies to the node would be. Loopback: the node's packets to
 * frontends take the packet path. Value: the time of the last such packet.
 */
PINNED("lru_hash", u32, u64, bypassing, 4096, 0);

/* Room for FLOWS_MAX established and HALF_OPEN_ROWS * HALF_OPEN_ROW half-open flows. Preallocated:
 * an allocation takes time and can fail (docs/decisions/0092).
 */
PINNED("hash", struct flow_key, struct flow, flows, FLOW_ENTRIES_MAX, 0);
PINNED("hash", struct flow_key, struct reply, replies, FLOW_ENTRIES_MAX, 0);
PINNED("array", u32, struct half_open_row, half_open_flows, HALF_OPEN_ROWS, 0);
/* The numbers of established flows, by enum flow_kind. The programs change them, and flows/sweep.py
 * sets them.
 */
PINNED("array", u32, u32, established_flows, 2, 0);
PINNED("array", u32, struct port_uses, flow_ports, FLOW_PORT_ENTRIES, 0);
/* The previous version of `flows` and `replies`, while programs that use it are attached to a
 * device (flow_previous.h).
 */
PINNED("array_of_maps$flows", u32, u32, previous_flows, 1, 0);
PINNED("array_of_maps$replies", u32, u32, previous_replies, 1, 0);
/* Key: the key of a reply without its port. */
PINNED("lru_hash", struct flow_key, struct exhausted, exhausted_ports, 1024, 0);
/* Programs for what most packets do not need (tc.c), in the order of hooks.py. */
enum tail_call {
	TAIL_FIND_PORT,
	TAIL_OPEN_IN,
	TAIL_OPEN_OUT,
	TAIL_ICMP_IN,
	TAIL_ICMP_OUT,
	TAIL_DIAL,
	TAIL_CALLS,
};
/* Not pinned here: it is pinned together with its programs (compiler.py). */
BPF_PROG_ARRAY(tail_calls, TAIL_CALLS);
PINNED("array", u32, struct icmp_budget, icmp_budget, 1, 0);
/* Connections to Services that netfilter masqueraded before mode ebpf started. Key: the tuple of
 * the endpoint's packets. Value: the conntrack zone of that direction.
 */
PINNED("hash", struct flow_key, u32, netfilter_flows, 65536, BPF_F_NO_PREALLOC);
/* Connected UDP sockets of pods whose endpoint is gone and which could not be reconnected
 * (docs/decisions/0021). Key: the tuple of their packets. Value: the frontend.
 */
PINNED("hash", struct flow_key, struct service_key, stale_sockets, 65536, BPF_F_NO_PREALLOC);
PINNED("lru_hash", struct fragment_key, struct fragment, fragments, 8192, 0);

/* Direct server return (dsr.h): the endpoints on other nodes that get tunneled packets, those on
 * this node, the networks of nodes from which this node accepts tunneled packets, and a cache that
 * keeps flows at their endpoint.
 */
PINNED("hash", u32, struct tunnel, tunnels, TUNNELS_MAX, BPF_F_NO_PREALLOC);
PINNED("hash", struct tunnel_endpoint, u32, tunnel_endpoints, TUNNELS_MAX, BPF_F_NO_PREALLOC);
PINNED("lpm_trie", struct network_key, u32, tunnel_sources, 65536, BPF_F_NO_PREALLOC);
PINNED("lru_hash", struct flow_key, struct tunneled_flow, tunneled_flows, TUNNELED_FLOWS_MAX, 0);

PINNED("percpu_array", u32, u64, counters, COUNTERS, 0);
PINNED("percpu_array", u32, u64, device_packets, DEVICE_PACKETS, 0);
PINNED("percpu_array", u32, struct traffic, traffic, TRAFFIC_MAX + 1, 0);

/* Events for `ebpfproxy monitor`, and whether they are recorded (docs/decisions/0031). */
PINNED_RING(struct event, events, EVENTS_SIZE);
PINNED("array", u32, struct monitor, monitor, 1, BPF_F_MMAPABLE);

static __always_inline void count(u32 counter)
{
	WORD_KEY(key, counter);
	u64 *value = counters.lookup(key);

	if (value)
		*value += 1; /* per CPU; an increment is lost if tc interrupts a socket hook here */
}

static __always_inline struct node *node_get(void)
{
	WORD_KEY(zero, 0);

	return node.lookup(zero);
}

static __always_inline struct device *device_get(u32 ifindex)
{
	WORD_KEY(key, ifindex);

	return devices.lookup(key);
}

static __always_inline void count_traffic(u32 service_id, u32 bytes, bool to_endpoint, bool is_new)
{
	WORD_KEY(entry, service_id <= LOADED(TRAFFIC) ? service_id : 0);
	struct traffic *sum = traffic.lookup(entry);

	if (!sum)
		return;
	if (to_endpoint) {
		sum->new_flows += is_new;
		sum->packets_in += 1;
		sum->bytes_in += bytes;
	} else {
		sum->packets_out += 1;
		sum->bytes_out += bytes;
	}
}

/* Returns the time in nanoseconds. The coarse clock lags by up to one tick (at most 10 ms), which
 * is sufficient for timeouts of seconds.
 */
static __always_inline u64 time_now(void)
{
	return HAVE(KTIME_COARSE) ? bpf_ktime_get_coarse_ns() : bpf_ktime_get_ns();
}

/* Causes the agent to attach programs to the device: see `bypassing`. */
static __always_inline void record_bypassing(u32 device)
{
	WORD_KEY(key, device);
	u64 now = time_now();

	bypassing.update(key, &now);
}
