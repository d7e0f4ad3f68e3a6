/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * What the C programs and the Python control plane share: every struct, enum and limit, once.
 * ebpfproxy/backends/ebpf/abi.py reads this very file for its packing, so its shapes are plain:
 * scalar types, structs declared above, arrays of constant size, enums with explicit values.
 * Structs have no implicit padding; `pad` is always zero, since keys are compared bytewise.
 *
 * Byte order: __be16 and __be32 are in network order, all other integers in the machine's own.
 */
#pragma once

/* IPv6, or IPv4 a.b.c.d as ::ffff:a.b.c.d: one code path for both families. */
struct address {
	__be32 word[4];
};

/* Key of `services`: what a client dials. A NodePort has the unspecified address of its family
 * (:: or ::ffff:0.0.0.0) and stands for every local address that answers NodePorts.
 */
struct service_key {
	struct address address;
	__be16 port;
	__u8 protocol; /* IPPROTO_TCP, IPPROTO_UDP, IPPROTO_SCTP */
	__u8 pad;
};

/* `service_ports` has a bit for each port that a frontend has, by protocol: 64 in a word, the
 * lowest port in the lowest bit, and a line of 1024 words for each protocol. NodePorts have lines
 * of their own behind those of the other frontends. Most ports are no frontend's, so most packets
 * need no lookup in a hash map, and most others one.
 */
#define SERVICE_PORT_LINE  1024
#define SERVICE_PORT_WORDS 6144
#define NODE_PORT_LINES	   3
enum port_line {
	PORTS_TCP = 0,
	PORTS_UDP = 1,
	PORTS_SCTP = 2,
};

/* `count` entries of `slots`, from `first` on; each is the id of an endpoint. */
struct slot_range {
	__u32 first;
	__u32 count;
};

enum service_flag {
	SERVICE_INTERNAL_LOCAL = 1, /* `internal` holds the endpoints of scope Local */
	SERVICE_EXTERNAL_LOCAL = 2, /* `external` does */
	SERVICE_REJECT = 4,	    /* an empty range: refuse; without it: drop */
	SERVICE_RESTRICTED = 8,	    /* has source ranges: not decided on the socket path for pods */
	SERVICE_NODE_ADMITTED = 16, /* but the node itself may */
	SERVICE_MASQUERADE_POD = 32, /* packet path: pods get the node's address */
	SERVICE_MASQUERADE_NODE = 64,
	SERVICE_MASQUERADE_OUTSIDE = 128,
};

enum service_kind {
	KIND_CLUSTER_IP = 1,
	KIND_NODE_PORT = 2,
	KIND_EXTERNAL_IP = 3,
	KIND_LOAD_BALANCER = 4,
};

/* Value of `services`. All frontends of a ServicePort in one family share `id`, and so affinity. */
struct service {
	struct slot_range internal; /* for pods of this node and the node itself */
	struct slot_range external; /* for everybody else */
	__u32 id;		    /* never 0 */
	__u32 affinity_timeout;	    /* seconds; 0: no affinity */
	__u16 flags;		    /* enum service_flag */
	__u8 kind;		    /* enum service_kind */
	__u8 pad;
};

enum ping_client {
	PING_FROM_INSIDE = 1,  /* pods of this node and the node itself */
	PING_FROM_OUTSIDE = 2, /* all others */
};

/* Value of `frontend_addresses`, by a frontend's address. A client whose packets every frontend of
 * the address would drop gets no answer to a ping; an address without any other client has no
 * entry.
 */
struct frontend_address {
	__u32 answered; /* enum ping_client */
};

/* "namespace/name:port", each part at most 63 bytes, NUL-terminated. */
#define SERVICE_NAME_SIZE 196

/* Value of `service_names`, by service id: for people, not for the programs. */
struct service_name {
	char text[SERVICE_NAME_SIZE];
	__u32 protocol;
	__u32 family; /* 4 or 6 */
};

enum endpoint_flag {
	ENDPOINT_LISTED = 1,  /* in force; without it: retired, kept for readers of an old range */
	ENDPOINT_CLUSTER = 2, /* new connections of scope Cluster may use it */
	ENDPOINT_LOCAL = 4,   /* those of scope Local may */
	ENDPOINT_ON_NODE = 8, /* it runs on this node */
};

/* Value of `endpoints`, by endpoint id. An id belongs to one service. */
struct endpoint {
	struct address address;
	__be16 port;
	__u16 flags;	  /* enum endpoint_flag */
	__u32 service_id; /* 0: the entry is free */
};

enum client_kind {
	CLIENT_ADDRESS = 0, /* `client` is the address it comes from */
	CLIENT_NETNS = 1,   /* the first 8 bytes of `client` are its network namespace's cookie */
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
	TO_ENDPOINT = 1, /* key: the frontend dialed; value: where it goes */
	TO_FRONTEND = 2, /* key: the endpoint; value: what was dialed */
};

/* Entry of `socket_peers`: a connected socket, and what it dialed. It stands at its cookie modulo
 * the map's size, or at one of the SOCKET_WAYS - 1 places behind that. A UDP socket that is
 * connected to a frontend without endpoints waits: its peer is the frontend, and `endpoint` is
 * NO_ENDPOINT.
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
	__u16 pad2;
	__u32 endpoint; /* an id, or NO_ENDPOINT */
	__u64 pad3;	/* 64 bytes: one cache line */
};

/* Key of `socket_flows`: where an unconnected UDP socket sends to, both ways. */
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

/* Key of `local_networks`: `length` bits of `address` count, 96 more for IPv4. */
struct network_key {
	__u32 length;
	struct address address;
};

enum network_flag {
	NETWORK_LOCAL = 1,	/* this node delivers it to itself */
	NETWORK_NODE_PORTS = 2, /* NodePorts answer there */
};

/* Key of `source_ranges`: `length` bits of what follows count, 32 of them the service's id. */
struct source_range_key {
	__u32 length;
	__u32 service_id;
	struct address source;
};

enum node_flag {
	NODE_SOCKETS_OF_PODS = 1, /* the socket path serves pods, too, and not the node alone */
	NODE_REDIRECT = 2,	  /* flows of clients outside skip this node's stack */
	NODE_NETFILTER_FLOWS = 4, /* `netfilter_flows` has entries */
	NODE_STALE_SOCKETS = 8,	  /* `stale_sockets` has entries */
};

/* The one entry of `node`: what holds for all programs. Timeouts in seconds. */
struct node {
	__u64 netns_cookie; /* of the namespace that counts as the node; 0: none does yet */
	__u32 flags;	    /* enum node_flag */
	__u32 inlet;	    /* index of the device by which replies reach the node; 0: none */
	__u32 tcp_established;
	__u32 tcp_close_wait; /* one side has closed */
	__u32 tcp_syn;	      /* not established yet */
	__u32 tcp_fin;	      /* both sides have closed, or one was reset */
	__u32 udp;	      /* not answered yet; SCTP, too */
	__u32 udp_stream;     /* answered */
	__u32 icmp_rate;      /* ICMP errors per second; 0: none */
	__u32 icmp_burst;     /* ICMP errors at once */
};

/* The one entry of `icmp_budget`. */
struct icmp_budget {
	__u64 refilled; /* bpf_ktime_get_ns() */
	__u64 errors;	/* that may still be sent */
};

enum device_flag {
	DEVICE_POD = 1,	   /* what comes in is of a pod of this node; else of somebody outside */
	DEVICE_LAYER3 = 2, /* its packets begin with the IP header */
	DEVICE_CLSACT = 4, /* its clsact qdisc is of our making */
	DEVICE_PEER = 8,   /* of a pair whose other end is in another network namespace */
};

/* Value of `devices`, by interface index: devices that have our programs. */
struct device {
	struct address v4; /* what is masqueraded there gets; unspecified: there is none */
	struct address v6;
	__u32 flags; /* enum device_flag */
	__u32 pad;
};

/* `device_packets` counts the packets that reach a classifier: two entries, ingress and egress, for
 * the interface index modulo this.
 */
#define DEVICE_SLOTS   1024
#define DEVICE_PACKETS 2048

/* A flow is one connection that is translated. It has two entries: one in `flows`, by what its
 * client sends, and one in `replies`, by what its endpoint sends. It is half-open until both sides
 * have been heard: TCP has seen the three-way handshake, a datagram was answered and another one
 * followed. Half-open flows have places, of which there is a limited number, and evict each other
 * there: so nothing that one side sends alone can evict an established flow.
 *
 * A flow that is not masqueraded is translated in one step each way. One that is masqueraded and
 * passes the node's stack is translated in two: the stack sees client:reply_port and the endpoint's
 * own address, in both directions.
 */
enum flow_side {
	AT_INGRESS = 1, /* `flows`: what a client sends that is not this node */
	/* `flows`: what the node itself sends; `replies`: to a client whose address the endpoint
	 * sees
	 */
	AT_EGRESS = 2,
	/* `replies`: to an address of this node. `destination` in the key is all zero: the stack
	 * sees the same reply with the client's address in its place.
	 */
	MASQUERADED = 3,
};

/* Key of `flows` and `replies`, and of their half-open counterparts: a packet's tuple. */
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
	FLOW_MASQUERADE = 1,	/* the endpoint sees an address of this node */
	FLOW_NODE = 2,		/* the client is this node itself */
	FLOW_REPLIED = 4,	/* the endpoint has sent something; set in the reply alone */
	FLOW_CLIENT_FIN = 8,	/* TCP: no more from the client */
	FLOW_ENDPOINT_FIN = 16, /* TCP: nor from the endpoint */
	FLOW_RESET = 32,    /* TCP: by either, with a sequence number that the other side accepts */
	FLOW_REDIRECT = 64, /* both directions skip the node's stack */
	FLOW_DIRECT = 128,  /* of no Service: its address and port were another flow's */
	FLOW_STALE_SOCKET = 256, /* its client is in `stale_sockets` */
};

/* Value of `flows`: where what the client sends goes. `last_seen` is in units
 * of 2^30 ns (1.07 s) of CLOCK_MONOTONIC, when this side sent last.
 */
struct flow {
	struct address endpoint;
	struct address masquerade; /* all zero: the client's own, or not chosen yet */
	__be16 endpoint_port;
	__be16 reply_port; /* the client's port as the endpoint sees it */
	__u32 service_id;  /* 0, as endpoint_id: none */
	__u32 endpoint_id;
	__u16 flags;	/* enum flow_flag */
	__u8 half_open; /* a byte of its own: flags change on other CPUs at the same time */
	__u8 pad;
	__u32 last_seen;
	__u32 sequence_end; /* TCP: of the last segment, behind its last byte */
	__u32 acknowledged; /* TCP: the last acknowledgment */
	__u32 place;	    /* row * HALF_OPEN_ROW + column; 64 bytes: one cache line */
};

/* Value of `replies`: where what the endpoint sends goes; otherwise as struct flow. */
struct reply {
	struct address client;
	struct address frontend;
	__be16 client_port;
	__be16 frontend_port;
	__u32 service_id;
	__u32 masquerade_digest; /* address_digest() of what the client is masqueraded with; 0: not
				    yet */
	__u16 flags;
	__u8 half_open;
	__u8 pad;
	__u32 last_seen;
	__u32 sequence_end;
	__u32 acknowledged;
	__u32 device; /* the index of the one that the client's first packet came in by; 0: the
			 client is this node */
};

/* Value of `half_open_flows`: some places in a row. `seen`: when the flow at a place was seen, by
 * about a second, in units of 2^20 ns of CLOCK_MONOTONIC; 0: the place is free. A flow that ends by
 * itself does not free its place.
 */
#define HALF_OPEN_ROW 4
struct half_open_row {
	__u32 seen[HALF_OPEN_ROW];
	struct flow_key flow[HALF_OPEN_ROW];
};

/* Value of `flow_ports`, for 64 ports in a row; a line of FLOW_PORT_LINE for each protocol (enum
 * port_line). A byte says how flows have used the port since the map was made.
 */
#define FLOW_PORT_LINE	  1024
#define FLOW_PORT_ENTRIES 3072
struct port_uses {
	__u8 use[64]; /* enum port_use */
};

enum port_use {
	PORT_OF_FRONTEND = 1,
	PORT_OF_ENDPOINT = 2,
};

/* Key of `fragments`: packets of one datagram, at one side. `protocol` is the one that all of them
 * name: of IPv6 what the fragment header says comes next, which may be another extension header.
 */
struct fragment_key {
	struct address source;
	struct address destination;
	__u32 id; /* as in the packet, 16 bits of IPv4 or 32 of IPv6 */
	__u8 protocol;
	__u8 side; /* enum flow_side */
	__u16 pad;
};

/* What only the first fragment tells. */
struct fragment {
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol; /* IPPROTO_TCP, IPPROTO_UDP, IPPROTO_SCTP */
	__u8 pad;
	__u16 pad2;
	__u64 seen; /* as flow.last_seen: ids are used again */
};

/* Value of `traffic`, by service id, for each CPU: what the packet path has carried. Bytes are
 * those of the IP packets; a GSO packet counts as one.
 */
struct traffic {
	__u64 new_flows;
	__u64 packets_in; /* to endpoints */
	__u64 bytes_in;
	__u64 packets_out; /* to clients */
	__u64 bytes_out;
};

/* Index of `counters`, and why a program did what it did. Up to PACKET_NEW of the socket path. */
enum counter {
	COUNTER_CONNECT = 0,	     /* connections sent to an endpoint */
	COUNTER_DATAGRAM = 1,	     /* datagrams of unconnected sockets sent to an endpoint */
	COUNTER_REJECTED = 2,	     /* no endpoint: refused */
	COUNTER_DROPPED = 3,	     /* no endpoint by policy: left to time out */
	COUNTER_RESTRICTED = 4,	     /* source ranges: left to the packet path */
	COUNTER_BIND_REFUSED = 5,    /* a bind on a NodePort */
	COUNTER_INCONSISTENT = 6,    /* a service, slot or endpoint that should be there was not */
	COUNTER_PEERS_FULL = 7,	     /* socket_peers overwrote, or socket_flows refused, an entry */
	COUNTER_PACKET_NEW = 8,	     /* new flows of the packet path */
	COUNTER_PACKET_REJECTED = 9, /* no endpoint: refused by a packet of ours */
	COUNTER_PACKET_DROPPED = 10, /* no endpoint by policy: dropped */
	COUNTER_SOURCE_REFUSED = 11, /* outside the source ranges: dropped */
	COUNTER_PORTS_EXHAUSTED = 12, /* no free port to masquerade with: dropped */
	COUNTER_NO_ADDRESS = 13,      /* a device has no address to masquerade with: dropped */
	COUNTER_FLOWS_FULL = 14,      /* too many established flows: the flow stays half-open */
	COUNTER_FLOWS_BUSY = 15,      /* a bucket of a flow map was locked: tried again */
	COUNTER_ICMP_LIMITED = 16,    /* an ICMP error was due, and over the rate limit: dropped */
	COUNTER_PORT_CHANGED = 17,    /* a client's port was taken between node and endpoint */
	COUNTER_ICMP_ERROR = 18,      /* ICMP errors translated */
	COUNTER_ECHO_ANSWERED = 19,   /* pings of a frontend's address answered */
	COUNTER_FRAGMENT_ORPHAN = 20, /* fragments whose first one is not known: passed on */
	COUNTER_UNPARSED = 21,	      /* packets that cannot be parsed: passed on */
	COUNTER_PORT_UNEQUAL = 22,    /* SCTP: the endpoint's port is not the frontend's: dropped */
	COUNTER_REDIRECTED = 23,      /* packets that skipped the node's stack */
	COUNTER_NO_ROUTE = 24,	      /* of the node itself: no way to the endpoint, dropped */
	COUNTER_BYPASSED = 25,	      /* a pod's packets that no program saw before egress */
	COUNTERS = 26,
};
