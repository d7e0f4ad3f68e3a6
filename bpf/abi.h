/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * What the C programs and the Python control plane share: every struct, enum and limit, once.
 * ebpfproxy/dataplanes/ebpf/abi.py reads this very file for its packing, so its shapes are plain:
 * scalar types, structs declared above, arrays of constant size, enums with explicit values.
 * Structs have no implicit padding; `pad` is always zero, since keys are compared bytewise.
 *
 * Byte order: __be16 and __be32 are in network order, all other integers in the machine's own.
 */
#pragma once

/* Raised with every change that sizes do not show: of a meaning, or of the order of fields. */
#define ABI_VERSION 1

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
 * the map's size, or at one of the SOCKET_WAYS - 1 places behind that.
 */
#define SOCKET_WAYS 4
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
	__u32 endpoint;
	__u64 pad3; /* 64 bytes: one cache line */
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

/* The one entry of `node`: which network namespace counts as the node itself. */
struct node {
	__u64 netns_cookie; /* 0: the initial one */
};

/* Index of `counters`, and why the socket path did what it did. */
enum counter {
	COUNTER_CONNECT = 0,	  /* connections sent to an endpoint */
	COUNTER_DATAGRAM = 1,	  /* datagrams of unconnected sockets sent to an endpoint */
	COUNTER_REJECTED = 2,	  /* no endpoint: refused */
	COUNTER_DROPPED = 3,	  /* no endpoint by policy: left to time out */
	COUNTER_RESTRICTED = 4,	  /* source ranges: left to the packet path */
	COUNTER_BIND_REFUSED = 5, /* a bind on a NodePort */
	COUNTER_INCONSISTENT = 6, /* a service, slot or endpoint that should be there was not */
	COUNTER_PEERS_FULL = 7,	  /* socket_peers overwrote, or socket_flows refused, an entry */
	COUNTERS = 8,
};
