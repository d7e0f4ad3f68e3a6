/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * The socket path: what happens to the address that a socket dials, and how it is given back.
 */
#pragma once

#include "service.h"

enum verdict {
	PASS,	    /* no service's, or one that is left alone: the address stays */
	TRANSLATED, /* the address is now an endpoint's */
	REFUSED,    /* to be failed with ECONNREFUSED */
};

/* The entry of a connected socket; NULL: it has none. */
static __always_inline struct socket_peer *peer_find(u64 cookie)
{
#pragma unroll
	for (u32 way = 0; way < SOCKET_WAYS; way++) {
		u32 place = (cookie + way) % SOCKETS_MAX;
		struct socket_peer *peer = socket_peers.lookup(&place);

		if (peer && peer->cookie == cookie)
			return peer;
	}
	return NULL;
}

/* Where the entry of a socket that connects goes: its own, a free one, or else that of a TCP
 * socket, which only loses what getpeername() shows. A UDP socket's entry is also needed to tell
 * when it is stale, so it makes room for another UDP socket alone. NULL: nowhere.
 */
static __always_inline struct socket_peer *peer_place(u64 cookie, u8 protocol)
{
	struct socket_peer *expendable = NULL;

#pragma unroll
	for (u32 way = 0; way < SOCKET_WAYS; way++) {
		u32 place = (cookie + way) % SOCKETS_MAX;
		struct socket_peer *peer = socket_peers.lookup(&place);

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

/* The socket dialed `dialed`, and its peer is now `peer`: that of the endpoint `id`, or `dialed`
 * itself where it waits for one (NO_ENDPOINT).
 */
static __always_inline void peer_write(u64 cookie, const struct service_key *dialed,
				       const struct service_key *peer, u32 service_id, u32 id)
{
	struct socket_peer *entry = peer_place(cookie, dialed->protocol);

	if (!entry)
		return;
	entry->endpoint_address = peer->address;
	entry->endpoint_port = peer->port;
	entry->protocol = dialed->protocol;
	entry->service_id = service_id;
	entry->frontend_address = dialed->address;
	entry->frontend_port = dialed->port;
	entry->endpoint = id;
	entry->cookie = cookie;
}

static __always_inline void flow_key(struct socket_flow_key *key, u64 cookie,
				     const struct service_key *peer, u8 direction)
{
	key->cookie = cookie;
	key->address = peer->address;
	key->port = peer->port;
	key->protocol = peer->protocol;
	key->direction = direction;
	key->pad = 0;
}

enum socket_owner {
	UNSERVED, /* a pod's socket where those of pods are left alone */
	OF_POD,
	OF_NODE,
};

static __always_inline enum socket_owner socket_owner(u64 netns_cookie)
{
	u32 zero = 0;
	struct node *found = node.lookup(&zero);

	if (!found)
		return UNSERVED;
	if (found->netns_cookie == netns_cookie)
		return OF_NODE;
	return found->flags & NODE_SOCKETS_OF_PODS ? OF_POD : UNSERVED;
}

/* PASS and REFUSED for what has no endpoint to offer this client; TRANSLATED: go on and choose. */
static __always_inline enum verdict socket_admit(const struct service *service)
{
	if (service->internal.count)
		return TRANSLATED;
	if (!(service->flags & SERVICE_REJECT)) {
		count(COUNTER_DROPPED);
		return PASS;
	}
	count(COUNTER_REJECTED);
	return REFUSED;
}

static __always_inline u16 usable_flags(const struct service *service)
{
	return service->flags & SERVICE_INTERNAL_LOCAL ? ENDPOINT_LOCAL : ENDPOINT_CLUSTER;
}

/* A new connection's endpoint; a client is its network namespace, since its address is not known
 * yet. */
static __always_inline struct endpoint *socket_choose(const struct service *service,
						      u64 netns_cookie, u32 *id)
{
	struct affinity_key client = {.service_id = service->id, .client_kind = CLIENT_NETNS};

	client.client.word[0] = (u32)netns_cookie;
	client.client.word[1] = (u32)(netns_cookie >> 32);
	return endpoint_choose(service, &service->internal, usable_flags(service), &client, id);
}

static __always_inline void redirect(struct service_key *dialed, const struct endpoint *endpoint)
{
	dialed->address = endpoint->address;
	dialed->port = endpoint->port;
}

/* A socket is closed, or connects to an address that is no frontend. */
static __always_inline void socket_forget(u64 cookie)
{
	struct socket_peer *peer = peer_find(cookie);

	if (peer)
		peer->cookie = 0;
}

/* Whether the packet path decides on this client, since its address is not known before. */
static __always_inline bool is_left_to_packets(const struct service *service, bool from_node)
{
	if (!(service->flags & SERVICE_RESTRICTED) ||
	    (from_node && service->flags & SERVICE_NODE_ADMITTED))
		return false;
	count(COUNTER_RESTRICTED);
	return true;
}

/* A UDP socket that is connected to another endpoint of the frontend than before: datagrams of the
 * former one may still be in its receive queue, and have the frontend's address in recvmsg().
 */
static __always_inline void keep_former_source(u64 cookie, const struct service_key *dialed)
{
	struct socket_peer *entry = peer_find(cookie);
	struct socket_flow flow = {};
	struct service_key former = {};
	struct socket_flow_key back;

	if (!entry || entry->endpoint == NO_ENDPOINT || entry->frontend_port != dialed->port ||
	    !address_equal(&entry->frontend_address, &dialed->address))
		return;
	former.address = entry->endpoint_address;
	former.port = entry->endpoint_port;
	former.protocol = entry->protocol;
	flow.address = dialed->address;
	flow.port = dialed->port;
	flow.service_id = entry->service_id;
	flow.endpoint = entry->endpoint;
	flow_key(&back, cookie, &former, TO_FRONTEND);
	if (socket_flows.update(&back, &flow))
		count(COUNTER_PEERS_FULL);
}

/* A UDP socket connects to an address that is no frontend. If it was connected to this address when
 * it was one, it waits until it is one again: the control plane connects it then.
 */
static __always_inline void datagrams_unserved(u64 cookie, const struct service_key *dialed)
{
	struct socket_peer *entry = peer_find(cookie);
	struct socket_flow_key back;

	/* The same socket may have reached this address through a service before. */
	flow_key(&back, cookie, dialed, TO_FRONTEND);
	if (socket_flows.lookup(&back))
		socket_flows.delete(&back);
	if (!entry)
		return;
	if (entry->frontend_port == dialed->port &&
	    address_equal(&entry->frontend_address, &dialed->address)) {
		keep_former_source(cookie, dialed);
		peer_write(cookie, dialed, dialed, entry->service_id, NO_ENDPOINT);
	} else {
		entry->cookie = 0;
	}
}

/* No endpoint can be offered to a socket that connects. TCP fails where the service rejects. UDP
 * connects to the frontend itself, whose packets are rejected or dropped, and waits there: the
 * control plane connects it again when there is an endpoint.
 */
static __always_inline enum verdict connect_without_endpoint(const struct service_key *dialed,
							     const struct service *service,
							     u64 cookie, enum verdict verdict)
{
	if (dialed->protocol != IPPROTO_UDP) {
		socket_forget(cookie);
		return verdict;
	}
	keep_former_source(cookie, dialed);
	peer_write(cookie, dialed, dialed, service->id, NO_ENDPOINT);
	return PASS;
}

/* A socket connects to `dialed`, which becomes the endpoint's address where TRANSLATED. */
static __always_inline enum verdict socket_connect(struct service_key *dialed, u64 netns_cookie,
						   u64 cookie)
{
	enum socket_owner owner = socket_owner(netns_cookie);
	struct service_key peer = *dialed;
	struct service service;
	struct endpoint *endpoint;
	enum verdict verdict;
	u32 id = 0;

	if (owner == UNSERVED || !service_find(dialed, owner == OF_NODE, &service)) {
		if (dialed->protocol == IPPROTO_UDP) /* which may connect often; TCP once */
			datagrams_unserved(cookie, dialed);
		return PASS;
	}
	if (is_left_to_packets(&service, owner == OF_NODE)) {
		socket_forget(cookie);
		return PASS;
	}
	verdict = socket_admit(&service);
	if (verdict != TRANSLATED)
		return connect_without_endpoint(dialed, &service, cookie, verdict);
	endpoint = socket_choose(&service, netns_cookie, &id);
	if (!endpoint) {
		count(COUNTER_INCONSISTENT);
		return connect_without_endpoint(dialed, &service, cookie, REFUSED);
	}
	redirect(&peer, endpoint);
	if (dialed->protocol == IPPROTO_UDP)
		keep_former_source(cookie, dialed);
	peer_write(cookie, dialed, &peer, service.id, id);
	*dialed = peer;
	count(COUNTER_CONNECT);
	return TRANSLATED;
}

/* A UDP socket sends to `dialed`. It keeps the endpoint that it has for this frontend as long as
 * that one may be used. `connected`: it has a peer nonetheless, be it that of IPv6 whose peer is an
 * IPv4 address, which udpv6_sendmsg() hands on as if that had been named.
 */
static __always_inline enum verdict socket_send(struct service_key *dialed, u64 netns_cookie,
						u64 cookie, bool connected)
{
	enum socket_owner owner = socket_owner(netns_cookie);
	struct socket_flow flow = {};
	struct socket_flow_key there, back;
	struct service service;
	struct socket_flow *known;
	struct endpoint *endpoint = NULL;
	enum verdict verdict;

	if (owner == UNSERVED || !service_find(dialed, owner == OF_NODE, &service)) {
		/* The same socket may have reached this address through a service before. */
		flow_key(&back, cookie, dialed, TO_FRONTEND);
		if (socket_flows.lookup(&back))
			socket_flows.delete(&back);
		if (!connected) /* any more: connect() to AF_UNSPEC meets no hook */
			socket_forget(cookie);
		return PASS;
	}
	if (is_left_to_packets(&service, owner == OF_NODE))
		return PASS;
	verdict = socket_admit(&service);
	if (verdict != TRANSLATED)
		return verdict;

	flow_key(&there, cookie, dialed, TO_ENDPOINT);
	known = socket_flows.lookup(&there);
	if (known) {
		flow.endpoint = known->endpoint;
		endpoint = endpoint_of(&service, flow.endpoint, usable_flags(&service));
	}
	if (!endpoint) {
		endpoint = socket_choose(&service, netns_cookie, &flow.endpoint);
		if (!endpoint) {
			count(COUNTER_INCONSISTENT);
			return REFUSED;
		}
		flow.address = endpoint->address;
		flow.port = endpoint->port;
		flow.service_id = service.id;
		if (socket_flows.update(&there, &flow))
			count(COUNTER_PEERS_FULL);
	}
	flow.address = dialed->address;
	flow.port = dialed->port;
	flow.service_id = service.id;
	redirect(dialed, endpoint);
	flow_key(&back, cookie, dialed, TO_FRONTEND);
	known = socket_flows.lookup(&back);
	/* Two frontends may share an endpoint: replies are from the one that was sent to last. */
	if (!known || known->port != flow.port || known->service_id != flow.service_id ||
	    !address_equal(&known->address, &flow.address))
		if (socket_flows.update(&back, &flow))
			count(COUNTER_PEERS_FULL);
	count(COUNTER_DATAGRAM);
	return TRANSLATED;
}

/* A datagram's source, or a socket's peer, as the socket sees it: an endpoint becomes what was
 * dialed. */
static __always_inline bool socket_give_back(struct service_key *peer, u64 cookie, bool datagram)
{
	struct socket_flow_key key;
	struct socket_flow *flow = NULL;
	struct socket_peer *connected;

	if (datagram) {
		flow_key(&key, cookie, peer, TO_FRONTEND);
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

/* The node itself binds `bound`: false where a NodePort answers there. An IPv6 socket bound to ::
 * takes IPv4 as well, unless it is IPV6_V6ONLY, which cannot be seen from here.
 */
static __always_inline bool socket_bind(const struct service_key *bound, u64 netns_cookie)
{
	bool any = address_is_unspecified(&bound->address);
	struct service_key key = *bound;

	if (socket_owner(netns_cookie) != OF_NODE)
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
