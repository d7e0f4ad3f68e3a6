/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * The socket path. The connect() and sendmsg() hooks replace a frontend by an endpoint. The
 * recvmsg() and getpeername() hooks replace the endpoint by the frontend. The post_bind hook
 * protects NodePorts.
 */
#pragma once

#include "service.h"

enum verdict {
	PASS,	    /* the address is unchanged: no frontend, or no redirection */
	TRANSLATED, /* the address is now that of an endpoint */
	REFUSED,    /* the system call fails with ECONNREFUSED */
};

static __always_inline struct socket_peer *peer_find(u64 cookie)
{
#pragma unroll
	for (u32 way = 0; way < SOCKET_WAYS; way++) {
		WORD_KEY(index, (cookie + way) % LOADED(SOCKETS));
		struct socket_peer *peer = socket_peers.lookup(index);

		if (peer && peer->cookie == cookie)
			return peer;
	}
	return NULL;
}

/* Selects the entry for a socket that connects: its own entry, a free one, or one to evict. For a
 * TCP socket the entry affects getpeername(), and whether the agent can reset the connection if its
 * endpoint is removed. The agent also needs the entry of a UDP socket to detect that the socket is
 * stale, so only another UDP socket can evict it. Returns NULL if no entry can be evicted.
 */
static __always_inline struct socket_peer *peer_slot(u64 cookie, u8 protocol)
{
	struct socket_peer *expendable = NULL;

#pragma unroll
	for (u32 way = 0; way < SOCKET_WAYS; way++) {
		WORD_KEY(index, (cookie + way) % LOADED(SOCKETS));
		struct socket_peer *peer = socket_peers.lookup(index);

		if (!peer)
			continue;
		if (!peer->cookie || peer->cookie == cookie)
			return peer;
		if (peer->protocol == IPPROTO_TCP || (!expendable && protocol == IPPROTO_UDP))
			expendable = peer;
	}
	count(COUNTER_PEERS_FULL);
	return expendable;
}

/* Ends the count of a socket whose entry is removed or replaced. If another endpoint has the id by
 * now, the socket is not included in its count.
 */
static __always_inline void peer_uncount(struct socket_peer *entry)
{
	if (!entry->pad2)
		return;
	entry->pad2 = 0;
	if (endpoint_same(entry->endpoint, entry->service_id, &entry->endpoint_address,
			  entry->endpoint_port))
		connections_add(entry->endpoint, -1);
}

static __always_inline void peer_free(struct socket_peer *entry)
{
	peer_uncount(entry);
	entry->cookie = 0;
}

static __always_inline void peer_remove(u64 cookie)
{
	struct socket_peer *entry = peer_find(cookie);

	if (entry)
		peer_free(entry);
}

/* Records that the socket connected to `frontend`. `peer` is the address of the endpoint `id`. If
 * the socket waits for an endpoint, `id` is NO_ENDPOINT and `peer` is the frontend. `counted`: the
 * endpoint's open connections are counted.
 */
static __always_inline void peer_write(u64 cookie, const struct service_key *frontend,
				       const struct service_key *peer, u32 service_id, u32 id,
				       bool counted)
{
	struct socket_peer *entry = peer_slot(cookie, frontend->protocol);

	if (!entry)
		return;
	peer_uncount(entry);
	entry->endpoint_address = peer->address;
	entry->endpoint_port = peer->port;
	entry->protocol = frontend->protocol;
	entry->service_id = service_id;
	entry->frontend_address = frontend->address;
	entry->frontend_port = frontend->port;
	entry->endpoint = id;
	if (counted) {
		entry->pad2 = 1;
		connections_add(id, 1);
	}
	entry->cookie = cookie;
}

static __always_inline void socket_flow_key_set(struct socket_flow_key *key, u64 cookie,
						const struct service_key *peer, u8 direction)
{
	key->cookie = cookie;
	key->address = peer->address;
	key->port = peer->port;
	key->protocol = peer->protocol;
	key->direction = direction;
	key->pad = 0;
}

static __always_inline void socket_flow_write(struct socket_flow_key *key, struct socket_flow *flow)
{
	if (socket_flows.update(key, flow))
		count(COUNTER_PEERS_FULL);
}

/* Ends the translation of replies from an address that is not a frontend. The socket may have
 * reached it through a Service before.
 */
static __always_inline void socket_flow_forget(u64 cookie, const struct service_key *peer)
{
	struct socket_flow_key key;

	socket_flow_key_set(&key, cookie, peer, TO_FRONTEND);
	if (socket_flows.lookup(&key))
		socket_flows.delete(&key);
}

enum socket_owner {
	OWNER_UNSERVED, /* the packet path serves the network namespace */
	OWNER_POD,
	OWNER_NODE,
};

static __always_inline enum socket_owner socket_owner(u64 netns_cookie)
{
	struct node *found = node_get();

	if (!found)
		return OWNER_UNSERVED;
	if (found->netns_cookie == netns_cookie)
		return OWNER_NODE;
	if (!(found->flags & NODE_SOCKETS_OF_PODS))
		return OWNER_UNSERVED;
	return pod_namespaces.lookup(&netns_cookie) ? OWNER_POD : OWNER_UNSERVED;
}

/* Returns PASS (drop) or REFUSED if the Service has no endpoint for this client. Returns TRANSLATED
 * if the caller can select an endpoint.
 */
static __always_inline enum verdict socket_admit(const struct service *service,
						 struct happening *what)
{
	if (service->internal.count)
		return TRANSLATED;
	if (!(service->flags & SERVICE_REJECT)) {
		happened(what, EVENT_DROPPED, COUNTER_DROPPED);
		return PASS;
	}
	happened(what, EVENT_REJECTED, COUNTER_REJECTED);
	return REFUSED;
}

/* Records what happened to a socket. `endpoint` is only used if one was selected. */
static __always_inline void socket_event(const struct happening *what, u64 netns_cookie,
					 const struct service_key *frontend,
					 const struct service_key *endpoint)
{
	struct event *event = what->kind ? event_begin(what) : NULL;

	if (!event)
		return;
	event->netns_cookie = netns_cookie;
	event->flags |= EVENT_SOCKET_PATH;
	event->frontend = frontend->address;
	event->frontend_port = frontend->port;
	event->protocol = frontend->protocol;
	if (what->kind == EVENT_NEW || what->kind == EVENT_RECONNECTED) {
		event->endpoint = endpoint->address;
		event->endpoint_port = endpoint->port;
	}
	events.ringbuf_submit(event, NO_WAKEUP);
}

/* Sets what identifies the client of a socket to session affinity and hashes: the address that
 * connect() will select if the pod has only one, so that the packet path selects the same endpoint.
 * Otherwise, and for the node, it is the network namespace. The address that a socket is bound to
 * may be any, by IP_FREEBIND.
 */
static __always_inline void client_set(struct affinity_key *client, u64 netns_cookie,
				       const struct service_key *destination)
{
	struct pod_namespace *pod = pod_namespaces.lookup(&netns_cookie);

	if (pod) {
		client->client_kind = CLIENT_ADDRESS;
		client->client = address_is_v4(&destination->address) ? pod->v4 : pod->v6;
		if (!address_is_unspecified(&client->client))
			return;
	}
	client->client_kind = CLIENT_NETNS;
	client->client.word[0] = (u32)netns_cookie;
	client->client.word[1] = (u32)(netns_cookie >> 32);
	client->client.word[2] = 0;
	client->client.word[3] = 0;
}

/* Selects the endpoint for a new connection of a socket, whose port is not known yet. */
static __always_inline struct endpoint *socket_choose(const struct service *service,
						      const struct service_key *destination,
						      u64 netns_cookie, u32 *id, u16 *uses)
{
	struct affinity_key client = {.service_id = service->id};

	if (service->affinity_timeout || service->algorithm == ALGORITHM_SOURCE_HASH)
		client_set(&client, netns_cookie, destination);
	return endpoint_choose(service, &service->internal,
			       usable_flag(service, SERVICE_INTERNAL_LOCAL), &client, 0, id, uses);
}

/* Whether the packet path decides on this client. The socket path does not know the client's
 * address and cannot compare it with the source ranges.
 */
static __always_inline bool is_left_to_packet_path(const struct service *service, bool from_node)
{
	if (!(service->flags & SERVICE_RESTRICTED) ||
	    (from_node && service->flags & SERVICE_NODE_ADMITTED))
		return false;
	count(COUNTER_RESTRICTED);
	return true;
}

/* bpf_skc_to_mptcp_sock(). bcc may not declare it. */
static void *(*mptcp_of_subflow)(void *subflow) = (void *)196;

static __always_inline bool is_connected(struct bpf_sock *sk)
{
	return sk && sk->state == BPF_TCP_ESTABLISHED;
}

/* Whether the socket is a subflow of an MPTCP socket. The process only has the MPTCP socket, which
 * has another cookie: its getpeername() would return the endpoint, and no hook runs for the subflow
 * when it is closed.
 */
static __always_inline bool is_subflow(struct bpf_sock *sk, u8 protocol)
{
	return HAVE(SKC_TO_MPTCP_SOCK) && sk && protocol == IPPROTO_TCP && mptcp_of_subflow(sk);
}

/* Returns the address that the socket is bound to, unspecified if there is none. That of a
 * connected UDP socket does not count: connect() has set it.
 */
static __always_inline bool bound_address(struct bpf_sock *sk, struct address *source)
{
	if (!sk || is_connected(sk))
		return false;
	if (sk->family == AF_INET) {
		address_v4(source, sk->src_ip4);
		return source->word[3];
	}
	address_v6(source, sk->src_ip6);
	return !address_is_unspecified(source);
}

/* Whether the programs of loopback see packets to this node's own addresses. If they do not, the
 * agent attaches them. Replies then need the reinjection pair.
 */
static __always_inline bool loopback_has_programs(void)
{
	struct node *settings = node_get();

	if (settings && settings->reinjection_device)
		return true;
	record_bypassing(LOOPBACK_IFINDEX);
	return false;
}

/* Whether a socket of the node can be redirected to the endpoint although it is bound to an
 * address. Each endpoint can reply to an address of the Node, and one on this node to any address
 * of this node, except loopback. For all others egress masquerades, and sees packets to local
 * addresses only at loopback. Without programs there, they would be rejected.
 */
static __always_inline bool replies_reach(struct bpf_sock *sk,
					  const struct service_key *destination,
					  const struct endpoint *endpoint)
{
	struct address source;
	u32 flags;

	if (!bound_address(sk, &source))
		return true;
	flags = network_flags(&source);
	if (flags & NETWORK_OF_NODE)
		return true;
	if (flags & NETWORK_LOCAL && endpoint->flags & ENDPOINT_ON_NODE &&
	    !address_is_loopback(&source))
		return true;
	return network_flags(&destination->address) & NETWORK_LOCAL && !loopback_has_programs();
}

/* A UDP socket reconnects to another endpoint of the same frontend. Its receive queue may still
 * hold datagrams from the previous endpoint. recvmsg() must report the frontend as their source.
 * Returns whether the socket was connected to this frontend, or waited for its first endpoint.
 */
static __always_inline bool keep_previous_endpoint(u64 cookie, const struct service_key *frontend)
{
	struct socket_peer *entry = peer_find(cookie);
	struct socket_flow flow = {};
	struct service_key previous = {};
	struct socket_flow_key reverse_key;

	if (!entry || entry->frontend_port != frontend->port ||
	    !address_equal(&entry->frontend_address, &frontend->address))
		return false;
	if (entry->endpoint == NO_ENDPOINT)
		return true;
	previous.address = entry->endpoint_address;
	previous.port = entry->endpoint_port;
	previous.protocol = entry->protocol;
	flow.address = frontend->address;
	flow.port = frontend->port;
	flow.service_id = entry->service_id;
	flow.endpoint = entry->endpoint;
	socket_flow_key_set(&reverse_key, cookie, &previous, TO_FRONTEND);
	socket_flow_write(&reverse_key, &flow);
	return true;
}

/* A UDP socket connects to an address that is not a frontend. If the address was a frontend at the
 * previous connect() of this socket, the socket waits. The control plane reconnects it when the
 * address is a frontend again.
 */
static __always_inline void udp_connect_unserved(u64 cookie, const struct service_key *destination)
{
	struct socket_peer *entry = peer_find(cookie);

	socket_flow_forget(cookie, destination);
	if (!entry)
		return;
	if (keep_previous_endpoint(cookie, destination))
		peer_write(cookie, destination, destination, entry->service_id, NO_ENDPOINT, false);
	else
		peer_free(entry);
}

/* Selects the endpoint for a connected socket. If it returns TRANSLATED, `to` is the endpoint's
 * address. Without an endpoint for this client, connect() fails for TCP if the Service rejects. A
 * UDP socket connects to the frontend and waits: the packet path rejects or drops its packets, and
 * the control plane reconnects the socket when the Service has an endpoint.
 */
static __always_inline enum verdict socket_connect(const struct service_key *destination,
						   struct service_key *to, u64 netns_cookie,
						   u64 cookie, struct bpf_sock *sk,
						   struct happening *what)
{
	enum socket_owner owner = socket_owner(netns_cookie);
	bool is_udp = destination->protocol == IPPROTO_UDP;
	struct endpoint *endpoint = NULL;
	struct service service;
	enum verdict verdict;
	u32 id = NO_ENDPOINT;

	if (owner == OWNER_UNSERVED || !service_find(destination, owner == OWNER_NODE, &service)) {
		if (is_udp) /* TCP sockets connect only once */
			udp_connect_unserved(cookie, destination);
		return PASS;
	}
	if (is_left_to_packet_path(&service, owner == OWNER_NODE) ||
	    is_subflow(sk, destination->protocol)) {
		peer_remove(cookie);
		return PASS;
	}
	what->service_id = service.id;
	*to = *destination;
	verdict = socket_admit(&service, what);
	if (verdict == TRANSLATED) {
		endpoint = socket_choose(&service, destination, netns_cookie, &id, &what->flags);
		if (!endpoint) { /* maps contradict each other */
			happened(what, EVENT_REJECTED, COUNTER_INCONSISTENT);
			verdict = REFUSED;
			id = NO_ENDPOINT;
		}
	}
	if (endpoint) {
		if (owner == OWNER_NODE && !replies_reach(sk, destination, endpoint)) {
			peer_remove(cookie);
			return PASS;
		}
		to->address = endpoint->address;
		to->port = endpoint->port;
		happened(what, EVENT_NEW, COUNTER_CONNECT);
	} else if (!is_udp) {
		peer_remove(cookie);
		return verdict;
	} else {
		verdict = PASS;
	}
	if (is_udp && keep_previous_endpoint(cookie, destination) && endpoint)
		what->kind = EVENT_RECONNECTED;
	peer_write(cookie, destination, to, service.id, id,
		   endpoint && service.algorithm == ALGORITHM_LEAST_CONNECTIONS);
	return verdict;
}

/* Selects the endpoint for a datagram. The socket keeps its endpoint for this frontend while that
 * endpoint is usable. If it returns TRANSLATED, `to` is the endpoint's address.
 *
 * Connected sockets reach this hook, too: for an IPv6 socket with an IPv4 peer, udpv6_sendmsg()
 * passes the peer on as an explicit destination.
 */
static __always_inline enum verdict socket_send(const struct service_key *destination,
						struct service_key *to, u64 netns_cookie,
						u64 cookie, struct bpf_sock *sk,
						struct happening *what)
{
	enum socket_owner owner = socket_owner(netns_cookie);
	struct socket_flow flow = {};
	struct socket_flow_key forward_key, reverse_key;
	struct service service;
	struct socket_flow *known;
	struct endpoint *endpoint = NULL;
	enum verdict verdict;

	if (owner == OWNER_UNSERVED || !service_find(destination, owner == OWNER_NODE, &service)) {
		socket_flow_forget(cookie, destination);
		if (!is_connected(sk)) /* connect() with AF_UNSPEC runs no hook */
			peer_remove(cookie);
		return PASS;
	}
	if (is_left_to_packet_path(&service, owner == OWNER_NODE))
		return PASS;
	what->service_id = service.id;
	verdict = socket_admit(&service, what);
	if (verdict != TRANSLATED)
		return verdict;

	socket_flow_key_set(&forward_key, cookie, destination, TO_ENDPOINT);
	known = socket_flows.lookup(&forward_key);
	if (known) {
		flow.endpoint = known->endpoint;
		endpoint = endpoint_of(&service, flow.endpoint,
				       usable_flag(&service, SERVICE_INTERNAL_LOCAL));
	}
	if (!endpoint) {
		endpoint = socket_choose(&service, destination, netns_cookie, &flow.endpoint,
					 &what->flags);
		if (!endpoint) {
			happened(what, EVENT_REJECTED,
				 COUNTER_INCONSISTENT); /* maps contradict each other */
			return REFUSED;
		}
		if (owner == OWNER_NODE && !replies_reach(sk, destination, endpoint))
			return PASS;
		what->kind = EVENT_NEW;
		what->reason = COUNTER_DATAGRAM;
		flow.address = endpoint->address;
		flow.port = endpoint->port;
		flow.service_id = service.id;
		socket_flow_write(&forward_key, &flow);
	}
	flow.address = destination->address;
	flow.port = destination->port;
	flow.service_id = service.id;
	*to = *destination;
	to->address = endpoint->address;
	to->port = endpoint->port;
	socket_flow_key_set(&reverse_key, cookie, to, TO_FRONTEND);
	known = socket_flows.lookup(&reverse_key);
	/* If two frontends share an endpoint, replies get the address of the frontend used last. */
	if (!known || known->port != flow.port || known->service_id != flow.service_id ||
	    !address_equal(&known->address, &flow.address))
		socket_flow_write(&reverse_key, &flow);
	count(COUNTER_DATAGRAM);
	return TRANSLATED;
}

/* Replaces an endpoint by the frontend in the source of a datagram or the peer of a socket. */
static __always_inline bool socket_restore_frontend(struct service_key *peer, u64 cookie,
						    bool datagram)
{
	struct socket_flow_key key;
	struct socket_flow *flow = NULL;
	struct socket_peer *connected;

	if (datagram) {
		socket_flow_key_set(&key, cookie, peer, TO_FRONTEND);
		flow = socket_flows.lookup(&key);
	}
	if (flow) {
		peer->address = flow->address;
		peer->port = flow->port;
		return true;
	}
	connected = peer_find(cookie);
	if (!connected || connected->endpoint_port != peer->port ||
	    !address_equal(&connected->endpoint_address, &peer->address))
		return false;
	peer->address = connected->frontend_address;
	peer->port = connected->frontend_port;
	return true;
}

/* Returns false if a host socket binds a port that is a NodePort at this address. An IPv6 socket
 * bound to :: also receives IPv4, unless it is IPV6_V6ONLY. The hook cannot read that option, so it
 * checks both families.
 */
static __always_inline bool socket_bind(const struct service_key *bound, u64 netns_cookie)
{
	bool any = address_is_unspecified(&bound->address);
	struct service_key key = *bound;

	if (socket_owner(netns_cookie) != OWNER_NODE)
		return true;
	address_unspecified_like(&key.address, &bound->address);
	if (!services.lookup(&key)) {
		if (!any || address_is_v4(&bound->address))
			return true;
		key.address.word[2] = V4_WORD;
		if (!services.lookup(&key))
			return true;
	}
	if (!any && !(network_flags(&bound->address) & NETWORK_NODE_PORTS))
		return true;
	count(COUNTER_BIND_REFUSED);
	return false;
}
