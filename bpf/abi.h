/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Structs, enums and limits that the C programs and the Python control plane share.
 * ebpfproxy/backends/ebpf/abi.py parses this file, so its shapes are plain: scalar types, structs
 * declared above, arrays of constant size, enums with explicit values. Structs have no implicit
 * padding. The kernel compares keys bytewise, so `pad` is always zero.
 *
 * Byte order: __be16 and __be32 are in network byte order, all other integers in host byte order.
 */
#pragma once

/* IPv6, or IPv4 a.b.c.d as ::ffff:a.b.c.d, so that one code path handles both families. */
struct address {
	__be32 word[4];
};

/* Key of `services`: the address, port and protocol of a frontend. A NodePort has the unspecified
 * address of its family (:: or ::ffff:0.0.0.0). It represents every local address that serves
 * NodePorts.
 */
struct service_key {
	struct address address;
	__be16 port;
	__u8 protocol; /* IPPROTO_TCP, IPPROTO_UDP, IPPROTO_SCTP */
	__u8 pad;
};

/* `service_ports` has one bit for each port and protocol, which is set if a frontend uses the port.
 * A word holds 64 ports, with the lowest port in the lowest bit. Each protocol has a line of 1024
 * words. NodePorts have separate lines after those of the other frontends. Most packets use a port
 * without a frontend and need no hash lookup. Most of the other packets need one.
 */
#define SERVICE_PORT_LINE  1024
#define SERVICE_PORT_WORDS 6144
#define NODE_PORT_LINES	   3
enum port_line {
	PORTS_TCP = 0,
	PORTS_UDP = 1,
	PORTS_SCTP = 2,
};

/* Value of `slots`: the slots 2 * KEY and 2 * KEY + 1, since the kernel pads values to 8 bytes. */
struct slot_pair {
	__u32 endpoint_id[2];
};

/* `count` slots, starting at `first`. Each contains an endpoint id. An endpoint may have several
 * slots: by its weight, or in the table of a hash algorithm. With ALGORITHM_ROUND_ROBIN the slot
 * after the last one contains the number of the next turn.
 */
struct slot_range {
	__u32 first;
	__u32 count;
};

enum service_flag {
	SERVICE_INTERNAL_LOCAL = 1,  /* `internal` has the endpoints for traffic policy Local */
	SERVICE_EXTERNAL_LOCAL = 2,  /* `external` has the endpoints for traffic policy Local */
	SERVICE_REJECT = 4,	     /* no-endpoint action: reject; if not set: drop */
	SERVICE_RESTRICTED = 8,	     /* has source ranges: the packet path decides for pods */
	SERVICE_NODE_ADMITTED = 16,  /* the source ranges admit the node itself */
	SERVICE_MASQUERADE_POD = 32, /* packet path: pods get the node's address */
	SERVICE_MASQUERADE_NODE = 64,
	SERVICE_MASQUERADE_OUTSIDE = 128,
	SERVICE_DSR = 256, /* some endpoints have an entry in `tunnels` */
};

/* How the entry of a slot range is selected for a new connection. */
enum algorithm {
	ALGORITHM_RANDOM = 0,
	ALGORITHM_ROUND_ROBIN = 1,
	ALGORITHM_SOURCE_HASH = 2, /* hash of the client */
	ALGORITHM_MAGLEV = 3,	   /* hash of the client's address and port */
	/* The endpoint with fewer open connections, of two random ones */
	ALGORITHM_LEAST_CONNECTIONS = 4,
};

/* The most endpoints with an entry in `new_endpoints`. */
#define NEW_ENDPOINTS_MAX 16384

/* The most endpoints with an entry in `connections`. */
#define CONNECTIONS_MAX 32768

/* Another seed moves the flows of all hash algorithms. */
#define CLIENT_HASH_SEED 740178029

enum service_kind {
	KIND_CLUSTER_IP = 1,
	KIND_NODE_PORT = 2,
	KIND_EXTERNAL_IP = 3,
	KIND_LOAD_BALANCER = 4,
};

/* Value of `services`. All frontends of a ServicePort in one address family share `id`, and
 * therefore session affinity.
 */
struct service {
	struct slot_range internal; /* for pods on this node and the node itself */
	struct slot_range external; /* for all other clients */
	__u32 id;		    /* never 0 */
	__u32 affinity_timeout;	    /* seconds; 0: no affinity */
	__u16 flags;		    /* enum service_flag */
	__u8 kind;		    /* enum service_kind */
	__u8 algorithm;		    /* enum algorithm */
	__u32 slow_start;	    /* seconds; 0: none */
};

enum ping_client {
	PING_FROM_INSIDE = 1,	/* pods on this node and the node itself */
	PING_FROM_OUTSIDE = 2,	/* all other clients */
	PING_TO_CLUSTER_IP = 4, /* the address is a ClusterIP, so no machine can have it */
};

/* Value of `frontend_addresses`; the key is the address of a frontend. A client gets no reply to a
 * ping if every frontend of the address would drop its packets. If no client gets a reply, the
 * address has no entry.
 */
struct frontend_address {
	__u32 answered; /* enum ping_client; PING_TO_CLUSTER_IP is only set with another one */
};

/* "namespace/name:port", each part at most 63 bytes, NUL-terminated. */
#define SERVICE_NAME_SIZE 196

/* Value of `service_names`; the key is the service id. The programs do not read it; it is for
 * display.
 */
struct service_name {
	char text[SERVICE_NAME_SIZE];
	__u32 protocol;
	__u32 family; /* 4 or 6 */
};

enum endpoint_flag {
	ENDPOINT_LISTED = 1,  /* in use; if not set: draining, kept for readers of an old range */
	ENDPOINT_CLUSTER = 2, /* usable for new connections with traffic policy Cluster */
	ENDPOINT_LOCAL = 4,   /* usable for new connections with traffic policy Local */
	ENDPOINT_ON_NODE = 8, /* it runs on this node */
	/* Its slice names no node. Only the agent reads it. */
	ENDPOINT_NODE_UNKNOWN = 16,
};

/* The upper byte of an endpoint's flags is its weight; 0 stands for 1. Lists and tables contain the
 * weights, so the programs only read it for ALGORITHM_LEAST_CONNECTIONS.
 */
#define ENDPOINT_WEIGHT_SHIFT 8

/* Value of `endpoints`; the key is the endpoint id. An id belongs to one service. */
struct endpoint {
	struct address address;
	__be16 port;
	__u16 flags;	  /* enum endpoint_flag, and the weight */
	__u32 service_id; /* 0: the entry is free */
};

enum client_kind {
	CLIENT_ADDRESS = 0, /* `client` is the client's address */
	CLIENT_NETNS = 1,   /* its first 8 bytes are a network namespace cookie */
};

/* Value of `pod_namespaces`: the sources of the pod's packets to Services. Unspecified if the pod
 * has none of global scope in that family, or several.
 */
struct pod_namespace {
	struct address v4;
	struct address v6;
};

/* Key of `affinity`. */
struct affinity_key {
	struct address client;
	__u32 service_id;
	__u32 client_kind;
};

struct affinity {
	__u64 last_used; /* bpf_ktime_get_ns() of the last new connection */
	__u32 endpoint;
	__u32 pad;
};

enum socket_direction {
	TO_ENDPOINT = 1, /* key: the frontend; value: the endpoint */
	TO_FRONTEND = 2, /* key: the endpoint; value: the frontend */
};

/* Entry of `socket_peers`: a connected socket and its frontend. The index is the cookie modulo the
 * map's size, or one of the next SOCKET_WAYS - 1 indexes. A UDP socket that is connected to a
 * frontend without endpoints waits: its peer is the frontend, and `endpoint` is NO_ENDPOINT.
 */
#define SOCKET_WAYS 4
#define NO_ENDPOINT 4294967295
struct socket_peer {
	__u64 cookie; /* bpf_get_socket_cookie(); 0: the entry is free */
	struct address endpoint_address;
	__be16 endpoint_port;
	__u8 protocol;
	__u8 pad;
	__u32 service_id;
	struct address frontend_address;
	__be16 frontend_port;
	/* 1: the socket is included in `connections`. Previous versions wrote 0. They call the
	 * field pad2, and another name would be another layout, which loses all entries at an
	 * update.
	 */
	__u16 pad2;
	__u32 endpoint; /* an id, or NO_ENDPOINT */
	__u64 pad3;	/* 64 bytes: one cache line */
};

/* Key of `socket_flows`: destinations of an unconnected UDP socket, in both directions. */
struct socket_flow_key {
	__u64 cookie; /* bpf_get_socket_cookie() */
	struct address address;
	__be16 port;
	__u8 protocol;
	__u8 direction; /* enum socket_direction */
	__u32 pad;
};

struct socket_flow {
	struct address address;
	__be16 port;
	__u16 pad;
	__u32 service_id;
	__u32 endpoint;
};

/* Key of `local_networks`. `length` is the prefix length in bits. For IPv4 it includes the 96 bits
 * of ::ffff:0:0/96.
 */
struct network_key {
	__u32 length;
	struct address address;
};

enum network_flag {
	NETWORK_LOCAL = 1,	/* the node delivers packets to this network locally */
	NETWORK_NODE_PORTS = 2, /* NodePorts are served at addresses of this network */
	NETWORK_OF_NODE = 4,	/* an address of the Node object: every endpoint can reply to it */
	NETWORK_FOREIGN = 8,	/* its addresses may be those of other machines */
	NETWORK_SERVICE_CIDR = 16, /* connections to addresses that no Service has are rejected */
};

/* Key of `source_ranges`. `length` is the number of bits that must match in the fields after it,
 * including the 32 bits of the service id.
 */
struct source_range_key {
	__u32 length;
	__u32 service_id;
	struct address source;
};

/* Value of `tunnels`, for direct server return (dsr.h); the key is the endpoint id. */
struct tunnel {
	struct address node; /* accepts tunneled packets to the endpoint */
};

/* Key of `tunnel_endpoints`: an endpoint on this node for which it accepts tunneled packets. The
 * value is the endpoint id.
 */
struct tunnel_endpoint {
	struct address address;
	__be16 port;
	__u16 pad;
	__u32 service_id;
};

/* Value of `tunneled_flows`, by the client's packets: where they are sent. The node sees no replies
 * of these flows.
 */
struct tunneled_flow {
	struct address endpoint;
	struct address node;
	__be16 endpoint_port;
	__u16 pad;
	__u32 service_id;
	__u32 endpoint_id;
};

/* The Geneve option of a tunneled packet (RFC 8926, 3.5): its endpoint. The class is in the range
 * for experimental use. `length` is in units of 4 bytes, without the first 4 bytes.
 */
#define TUNNEL_OPTION_CLASS   65515
#define TUNNEL_OPTION_TYPE    1
#define TUNNEL_OPTION_LENGTH  5
#define TUNNEL_OPTION_VERSION 1
struct tunnel_option {
	__be16 option_class;
	__u8 type;
	__u8 length;
	struct address endpoint;
	__be16 endpoint_port;
	__u8 version;
	__u8 pad;
};

/* The most bytes in front of a tunneled IP packet: IPv6, UDP and Geneve headers, the option, and an
 * Ethernet header.
 */
#define TUNNEL_OVERHEAD 94

enum node_flag {
	NODE_SOCKETS_OF_PODS = 1, /* the socket path handles `pod_namespaces`, too */
	NODE_REDIRECT = 2,	  /* flows of outside clients bypass this node's stack */
	NODE_NETFILTER_FLOWS = 4, /* `netfilter_flows` has entries */
	NODE_STALE_SOCKETS = 8,	  /* `stale_sockets` has entries */
};

/* The only entry of `node`: settings for all programs. Timeouts are in seconds. */
struct node {
	__u64 netns_cookie;	  /* the node's network namespace; 0: not known yet */
	__u32 flags;		  /* enum node_flag */
	__u32 reinjection_device; /* ifindex of the reinjection veth pair; 0: none */
	__u32 tcp_established;
	__u32 tcp_close_wait; /* one side has closed */
	__u32 tcp_syn;	      /* not established yet */
	__u32 tcp_fin;	      /* both sides have closed, or one side has sent a reset */
	__u32 udp;	      /* no reply yet; also for SCTP */
	__u32 udp_stream;     /* a reply was sent */
	__u32 icmp_rate;      /* ICMP errors per second; 0: none */
	__u32 icmp_burst;     /* maximum burst of ICMP errors */
	__u32 tunnel_device;  /* ifindex of the Geneve device; 0: no direct server return */
	__u32 tunnel_mtu;     /* the largest IP packet that fits in an unfragmented tunneled one */
	/* A network that contains all ServiceCIDRs of a family: its address, and a mask of its
	 * first bits, for IPv6 of the first 64. Without a ServiceCIDR, no address matches.
	 */
	__be32 service_cidrs4;
	__be32 service_mask4;
	__u64 service_cidrs6; /* in network byte order */
	__u64 service_mask6;
};

/* The only entry of `icmp_budget`. */
struct icmp_budget {
	__u64 refilled; /* bpf_ktime_get_ns() */
	__u64 errors;	/* ICMP errors that may still be sent */
};

enum device_flag {
	DEVICE_POD = 1, /* received packets are from a pod on this node; if not set: from outside */
	DEVICE_LAYER3 = 2,    /* its packets begin with the IP header */
	DEVICE_CLSACT = 4,    /* the agent created its clsact qdisc */
	DEVICE_PEER = 8,      /* one end of a pair; the other end is in another network namespace */
	DEVICE_TUNNEL = 16,   /* the Geneve device of direct server return */
	DEVICE_SWITCHED = 32, /* a port of a switch other than a bridge, such as Open vSwitch */
	DEVICE_SOURCES = 64,  /* the masquerade address depends on the destination (masquerade.h) */
	DEVICE_GUEST = 128,   /* received packets are from a container or VM that is no pod */
};

/* Value of `devices`; the key is the interface index. The devices are those with attached programs.
 */
struct device {
	struct address v4; /* masquerade address; unspecified: none */
	struct address v6;
	__u16 flags;	/* enum device_flag */
	__u8 bridge[6]; /* Ethernet address of the bridge that it is a port of; zero: none */
};

/* What the address in a source_key is. */
enum source_side {
	SOURCE_OF_NEXT_HOP = 1, /* that of the gateway, or of the destination without one */
	SOURCE_OF_DESTINATION = 2,
};

/* Key of `source_addresses`: the source address for packets that a device sends to a network.
 * `length` is that of the prefix in bits: 64 for the two following fields, then as in network_key.
 */
struct source_key {
	__u32 length;
	__u32 ifindex;
	__u32 side; /* enum source_side */
	struct address address;
};

enum xdp_device_flag {
	XDP_SENDS_BACK = 1, /* the driver sends frames that the device has received (XDP_TX) */
	XDP_SENDS = 2,	    /* the device sends frames of any device (ndo_xdp_xmit) */
};

/* Value of `xdp_devices`; the key is the interface index. Without --ebpf-xdp there are none. */
struct xdp_device {
	__u8 ethernet[6]; /* the device's Ethernet address */
	__u16 flags;	  /* enum xdp_device_flag */
};

/* `device_packets` counts the packets that reach a classifier. Each interface index modulo
 * DEVICE_SLOTS has two entries, for ingress and egress.
 */
#define DEVICE_SLOTS   1024
#define DEVICE_PACKETS 2048

/* A flow is one translated connection. It has two entries: one in `flows`, found by the client's
 * packets, and one in `replies`, found by the endpoint's packets. A flow is half-open until packets
 * of both sides have been seen:
 * - TCP: the three-way handshake is complete.
 * - UDP and SCTP: the client has sent another packet after a reply.
 *
 * Half-open flows occupy a limited number of slots in `half_open_flows` and evict each other. So
 * packets of one side alone cannot evict an established flow.
 *
 * A flow without masquerading is translated once in each direction. A masqueraded flow that passes
 * the node's stack is translated twice in each direction. In both directions the stack sees
 * client:reply_port and the endpoint's own address.
 */
enum flow_side {
	AT_INGRESS = 1, /* `flows`: packets of clients other than this node */
	/* `flows`: host-originated packets. `replies`: packets to a client that is not masqueraded.
	 */
	AT_EGRESS = 2,
	/* `replies`: packets to an address of this node. `destination` in the key is all zero,
	 * because the stack sees the same reply with the client's address as destination.
	 */
	MASQUERADED = 3,
};

/* Key of `flows` and `replies`: the tuple of a packet. `half_open_flows` also contains such keys.
 */
struct flow_key {
	struct address source;
	struct address destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 side; /* enum flow_side */
	__u16 pad;
};

enum flow_flag {
	FLOW_MASQUERADE = 1,	 /* the endpoint sees an address of this node */
	FLOW_NODE = 2,		 /* the client is this node itself */
	FLOW_REPLIED = 4,	 /* the endpoint has sent a packet; set only in `replies` */
	FLOW_CLIENT_FIN = 8,	 /* TCP: the client has closed its side */
	FLOW_ENDPOINT_FIN = 16,	 /* TCP: the endpoint has closed its side */
	FLOW_RESET = 32,	 /* TCP: one side has sent a reset that the other side accepts */
	FLOW_REDIRECT = 64,	 /* both directions bypass the node's stack */
	FLOW_DIRECT = 128,	 /* no Service; another flow used its address and port */
	FLOW_STALE_SOCKET = 256, /* the client is in `stale_sockets` */
	FLOW_DSR = 512,		 /* opened by a tunneled packet */
};

/* Index in `established_flows`. */
enum flow_kind {
	FLOWS_OF_TCP = 0,
	FLOWS_OF_OTHERS = 1,
};

/* Value of `flows`: the endpoint for the client's packets. `last_seen` is the time of the client's
 * last packet, in units of 2^30 ns (1.07 s) of CLOCK_MONOTONIC. An entry has 64 bytes: one cache
 * line.
 */
struct flow {
	struct address endpoint;
	struct address masquerade; /* all zero: the client's own address, or not selected yet */
	__be16 endpoint_port;
	__be16 reply_port; /* the client's port as the endpoint sees it */
	__u32 service_id;  /* 0: no Service; then `endpoint_id` is 0, too */
	__u32 endpoint_id;
	__u16 flags;	/* enum flow_flag */
	__u8 half_open; /* a separate byte: other CPUs change `flags` at the same time */
	__u8 pad;
	__u32 last_seen;
	__u32 sequence_end; /* TCP: the sequence number after the last segment */
	__u32 acknowledged; /* TCP: the last acknowledgment number */
	__u32 place;	    /* slot: row * HALF_OPEN_ROW + column */
};

/* Value of `replies`: the client and the frontend for the endpoint's packets. The other fields are
 * as in struct flow.
 */
struct reply {
	struct address client;
	struct address frontend;
	__be16 client_port;
	__be16 frontend_port;
	__u32 service_id;
	/* address_digest() of the masquerade address; 0: not selected yet. */
	__u32 masquerade_digest;
	__u16 flags;
	__u8 half_open;
	__u8 pad;
	__u32 last_seen;
	__u32 sequence_end;
	__u32 acknowledged;
	/* The ifindex on which the client's first packet arrived; 0: the client is this node. */
	__u32 device;
};

/* Value of `half_open_flows`: a row of slots. `seen` is the approximate time (about 1 s) at which
 * the flow in a slot was last seen, in units of 2^20 ns of CLOCK_MONOTONIC; 0: the slot is free. A
 * flow that ends without eviction does not free its slot.
 */
#define HALF_OPEN_ROW 4
struct half_open_row {
	__u32 seen[HALF_OPEN_ROW];
	struct flow_key flow[HALF_OPEN_ROW];
};

/* Value of `flow_ports`, for 64 consecutive ports. Each protocol has a line of FLOW_PORT_LINE
 * entries (enum port_line). A byte is 1 if a flow has used the port in this way (enum port_use)
 * since the map was created. Two CPUs may write at the same time, so no byte has two meanings.
 */
#define FLOW_PORT_LINE	  1024
#define FLOW_PORT_ENTRIES 3072
struct port_uses {
	__u8 is_used[128];
};

/* Where the bytes of one use begin in struct port_uses. */
enum port_use {
	PORT_OF_FRONTEND = 0,
	PORT_OF_ENDPOINT = 64,
};

/* Key of `fragments`: the fragments of one datagram, on one side of the stack. `protocol` is
 * identical in all of them. For IPv6 it is the next header of the fragment header, which can be
 * another extension header.
 */
struct fragment_key {
	struct address source;
	struct address destination;
	__u32 id; /* as in the packet: 16 bits for IPv4, 32 for IPv6 */
	__u8 protocol;
	__u8 side; /* enum flow_side */
	__u16 pad;
};

/* Fields that only the first fragment contains. */
struct fragment {
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol; /* IPPROTO_TCP, IPPROTO_UDP, IPPROTO_SCTP */
	__u8 pad;
	__u16 pad2;
	__u64 seen; /* as flow.last_seen, but in ns; ids are reused */
};

/* Value of `exhausted_ports`: the search for a free port towards an endpoint. */
struct exhausted {
	__u16 next;  /* the next port, minus FIRST_PORT */
	__u16 left;  /* number of ports not searched yet; 0: no port was free */
	__u32 since; /* the time of the last search, as flow.last_seen */
};

/* Value of `traffic`, by service id and CPU: traffic of the packet path. Bytes are those of the IP
 * packets. A GSO packet counts as one packet. Entry 0 is the sum of the Services whose id has no
 * entry.
 */
struct traffic {
	__u64 new_flows;
	__u64 packets_in; /* to endpoints */
	__u64 bytes_in;
	__u64 packets_out; /* to clients */
	__u64 bytes_out;
};

/* Index of `counters`: events and the reasons for them. Counters before COUNTER_PACKET_NEW are
 * those of the socket path. Both paths use COUNTER_INCONSISTENT.
 */
enum counter {
	COUNTER_CONNECT = 0,	  /* connections redirected to an endpoint */
	COUNTER_DATAGRAM = 1,	  /* datagrams of unconnected sockets redirected to an endpoint */
	COUNTER_REJECTED = 2,	  /* no endpoint: rejected */
	COUNTER_DROPPED = 3,	  /* no endpoint by traffic policy: left to time out */
	COUNTER_RESTRICTED = 4,	  /* source ranges: left to the packet path */
	COUNTER_BIND_REFUSED = 5, /* bind() to a NodePort, rejected */
	COUNTER_INCONSISTENT = 6, /* a service, slot or endpoint was missing */
	COUNTER_PEERS_FULL = 7,	  /* entry of socket_peers evicted, or socket_flows update failed */
	COUNTER_PACKET_NEW = 8,	  /* new flows of the packet path */
	COUNTER_PACKET_REJECTED = 9,  /* no endpoint: rejected by a TCP reset or an ICMP error */
	COUNTER_PACKET_DROPPED = 10,  /* no endpoint by traffic policy: dropped */
	COUNTER_SOURCE_REFUSED = 11,  /* source address outside the source ranges: dropped */
	COUNTER_PORTS_EXHAUSTED = 12, /* no free port to masquerade with: dropped */
	COUNTER_NO_ADDRESS = 13,      /* a device has no address to masquerade with: dropped */
	/* Too many established flows: the flow stays half-open. Or an entry could not be written:
	 * dropped.
	 */
	COUNTER_FLOWS_FULL = 14,
	COUNTER_FLOWS_BUSY = 15,    /* a bucket of a flow map was locked: retried */
	COUNTER_ICMP_LIMITED = 16,  /* ICMP error over the rate limit: dropped */
	COUNTER_PORT_CHANGED = 17,  /* client port in use between node and endpoint: another port */
	COUNTER_ICMP_ERROR = 18,    /* ICMP errors translated */
	COUNTER_ECHO_ANSWERED = 19, /* pings to a frontend address answered */
	COUNTER_FRAGMENT_ORPHAN = 20, /* fragments without a known first fragment: passed on */
	COUNTER_UNPARSED = 21,	      /* packets that cannot be parsed: passed on */
	COUNTER_SCTP_FRAGMENT = 22,   /* a fragment of an SCTP packet whose port changes: dropped */
	COUNTER_REDIRECTED = 23,      /* packets that bypassed the node's stack */
	COUNTER_NO_ROUTE = 24, /* client is this node: no route to the destination, dropped */
	COUNTER_BYPASSED = 25, /* packets of pods that no program saw before egress */
	COUNTER_TUNNELED = 26, /* direct server return: packets sent to the endpoint's node */
	COUNTER_TUNNEL_RECEIVED = 27, /* tunneled packets of other nodes, sent to an endpoint */
	/* A tunneled packet from an unknown node, or one that this version cannot read: dropped */
	COUNTER_TUNNEL_REFUSED = 28,
	/* A tunneled packet for a frontend or an endpoint that this node does not have: dropped */
	COUNTER_TUNNEL_NO_ENDPOINT = 29,
	/* A tunneled packet, and no device with programs leads to the client: dropped */
	COUNTER_TUNNEL_NO_DEVICE = 30,
	/* A packet that does not fit in a tunneled one: the client gets an ICMP error */
	COUNTER_TUNNEL_TOO_BIG = 31,
	COUNTER_XDP_FORWARDED = 32,	/* packets that the XDP program forwarded */
	COUNTER_CLUSTER_IP_UNUSED = 33, /* no Service has this ClusterIP and port: rejected */
	COUNTERS = 34,
};

enum event_kind {
	EVENT_NEW = 1,	       /* a connection or flow was redirected to an endpoint */
	EVENT_REJECTED = 2,    /* the client gets an error */
	EVENT_DROPPED = 3,     /* the client gets no reply */
	EVENT_RESET = 4,       /* packet path: a segment with RST ended a flow */
	EVENT_RECONNECTED = 5, /* a UDP socket connected to the same frontend again */
};

enum event_flag {
	EVENT_SOCKET_PATH = 1,	 /* `client` is unspecified, `netns_cookie` is set */
	EVENT_AFFINITY_USED = 2, /* session affinity selected the endpoint */
	EVENT_AFFINITY_SET = 4,	 /* the client has a new session affinity */
	EVENT_BY_ENDPOINT = 8,	 /* the endpoint sent the reset; if not set: the client */
};

/* A record of `events`. Addresses and ports that are not known are zero. */
struct event {
	__u64 time;	    /* bpf_ktime_get_ns() */
	__u64 netns_cookie; /* socket path: the client's network namespace */
	struct address client;
	struct address frontend;
	struct address endpoint;
	__be16 client_port;
	__be16 frontend_port;
	__be16 endpoint_port;
	__u8 protocol;
	__u8 kind; /* enum event_kind */
	__u32 service_id;
	__u16 flags; /* enum event_flag */
	__u8 reason; /* enum counter: the counter of the event, which names the reason */
	__u8 pad;
};

/* The size of `events` in bytes: a power of two, and a multiple of each page size. */
#define EVENTS_SIZE 524288

/* The only entry of `monitor`: which events are recorded. Only a process that reads them writes it.
 * The programs clear `until` after it has passed, and count lost events.
 */
#define MONITOR_SERVICES 8
struct monitor {
	__u64 until;	/* bpf_ktime_get_ns(); 0: no process reads events */
	__u64 window;	/* the time at which `recorded` began, in units of 2^30 ns */
	__u64 recorded; /* events in this window */
	__u64 rate;	/* the most events in a window */
	__u64 limited;	/* events that exceeded the rate */
	__u64 lost;	/* events for which the ring buffer had no room */
	__u32 kinds;	/* a bit for each kind of event that is recorded */
	__u32 pad;
	__u32 services[MONITOR_SERVICES]; /* record only events of these ids; all 0: all */
};

/* Stands in an object file for a number that the loader knows: sizes of maps, and 0 or 1 for each
 * helper that the kernel may lack. The values are 0x5eed0001 and following, which no other constant
 * of the programs has.
 */
enum placeholder {
	PLACEHOLDER_FLOWS = 1592590337,		 /* how many flows may be established */
	PLACEHOLDER_HALF_OPEN_ROWS = 1592590338, /* entries of half_open_flows */
	PLACEHOLDER_SOCKETS = 1592590339,	 /* entries of socket_peers */
	PLACEHOLDER_HAVE_SK_LOOKUP_UDP = 1592590340,
	PLACEHOLDER_HAVE_FIB_LOOKUP = 1592590341,
	PLACEHOLDER_HAVE_SKC_LOOKUP_TCP = 1592590342,
	PLACEHOLDER_HAVE_REDIRECT_NEIGH = 1592590343,
	PLACEHOLDER_HAVE_REDIRECT_PEER = 1592590344,
	PLACEHOLDER_HAVE_KTIME_COARSE = 1592590345,
	PLACEHOLDER_HAVE_SET_RETVAL = 1592590346,
	PLACEHOLDER_TRAFFIC = 1592590347, /* the highest id with an entry of traffic */
	PLACEHOLDER_HAVE_NETNS_COOKIE = 1592590348,
	PLACEHOLDER_HAVE_SKC_TO_MPTCP_SOCK = 1592590349,
	PLACEHOLDER_HAVE_FIB_LOOKUP_SRC = 1592590350,
};
