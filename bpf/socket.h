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

static __always_inline void socket_key(struct socket_key *key, u64 cookie,
				       const struct service_key *peer, u8 direction)
{
	key->cookie = cookie;
	key->address = peer->address;
	key->port = peer->port;
	key->protocol = peer->protocol;
	key->direction = direction;
	key->pad = 0;
}

static __always_inline bool on_node(u64 netns_cookie)
{
	u32 zero = 0;
	struct node *found = node.lookup(&zero);

	return found && found->netns_cookie == netns_cookie;
}

/* PASS and REFUSED for what has no endpoint to offer this client; TRANSLATED: go on and choose. */
static __always_inline enum verdict socket_admit(const struct service *service, bool from_node)
{
	if (service->flags & SERVICE_RESTRICTED &&
	    !(from_node && service->flags & SERVICE_NODE_ADMITTED)) {
		count(COUNTER_RESTRICTED);
		return PASS;
	}
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

/* A socket connects to `dialed`, which becomes the endpoint's address where TRANSLATED. */
static __always_inline enum verdict socket_connect(struct service_key *dialed, u64 netns_cookie,
						   u64 cookie)
{
	bool from_node = on_node(netns_cookie);
	struct socket_peer peer = {};
	struct socket_key key;
	struct service service;
	struct endpoint *endpoint;
	enum verdict verdict;

	if (!service_find(dialed, from_node, &service))
		return PASS;
	verdict = socket_admit(&service, from_node);
	if (verdict != TRANSLATED)
		return verdict;
	endpoint = socket_choose(&service, netns_cookie, &peer.endpoint);
	if (!endpoint) {
		count(COUNTER_INCONSISTENT);
		return REFUSED;
	}
	peer.address = dialed->address;
	peer.port = dialed->port;
	peer.service_id = service.id;
	redirect(dialed, endpoint);
	socket_key(&key, cookie, dialed, TO_FRONTEND);
	/* Without the entry getpeername() shows the endpoint: no reason to fail the connection. */
	if (socket_peers.update(&key, &peer))
		count(COUNTER_PEERS_FULL);
	count(COUNTER_CONNECT);
	return TRANSLATED;
}

/* An unconnected UDP socket sends to `dialed`. It keeps the endpoint that it has for this frontend
 * as long as that one may be used.
 */
static __always_inline enum verdict socket_send(struct service_key *dialed, u64 netns_cookie,
						u64 cookie)
{
	bool from_node = on_node(netns_cookie);
	struct socket_peer peer = {};
	struct socket_key there, back;
	struct service service;
	struct socket_peer *known;
	struct endpoint *endpoint = NULL;
	enum verdict verdict;

	if (!service_find(dialed, from_node, &service)) {
		/* The same socket may have reached this address through a service before. */
		socket_key(&back, cookie, dialed, TO_FRONTEND);
		if (socket_flows.lookup(&back))
			socket_flows.delete(&back);
		return PASS;
	}
	verdict = socket_admit(&service, from_node);
	if (verdict != TRANSLATED)
		return verdict;

	socket_key(&there, cookie, dialed, TO_ENDPOINT);
	known = socket_flows.lookup(&there);
	if (known) {
		peer.endpoint = known->endpoint;
		endpoint = endpoint_of(&service, peer.endpoint, usable_flags(&service));
	}
	if (!endpoint) {
		endpoint = socket_choose(&service, netns_cookie, &peer.endpoint);
		if (!endpoint) {
			count(COUNTER_INCONSISTENT);
			return REFUSED;
		}
		peer.address = endpoint->address;
		peer.port = endpoint->port;
		peer.service_id = service.id;
		if (socket_flows.update(&there, &peer))
			count(COUNTER_PEERS_FULL);
	}
	peer.address = dialed->address;
	peer.port = dialed->port;
	peer.service_id = service.id;
	redirect(dialed, endpoint);
	socket_key(&back, cookie, dialed, TO_FRONTEND);
	known = socket_flows.lookup(&back);
	/* Two frontends may share an endpoint: replies are from the one that was sent to last. */
	if (!known || known->port != peer.port || known->service_id != peer.service_id ||
	    !address_equal(&known->address, &peer.address))
		if (socket_flows.update(&back, &peer))
			count(COUNTER_PEERS_FULL);
	count(COUNTER_DATAGRAM);
	return TRANSLATED;
}

/* A socket learns its peer or a datagram's source: an endpoint's becomes what was dialed. */
static __always_inline bool socket_give_back(struct service_key *peer, u64 cookie, bool datagram)
{
	struct socket_key key;
	struct socket_peer *dialed;

	socket_key(&key, cookie, peer, TO_FRONTEND);
	dialed = datagram ? socket_flows.lookup(&key) : NULL;
	if (!dialed)
		dialed = socket_peers.lookup(&key);
	if (!dialed)
		return false;
	peer->address = dialed->address;
	peer->port = dialed->port;
	return true;
}

/* A socket is closed. */
static __always_inline void socket_forget(const struct service_key *peer, u64 cookie)
{
	struct socket_key key;

	socket_key(&key, cookie, peer, TO_FRONTEND);
	socket_peers.delete(&key);
}

/* The node itself binds `bound`: false where a NodePort answers there. An IPv6 socket bound to ::
 * takes IPv4 as well, unless it is IPV6_V6ONLY, which cannot be seen from here.
 */
static __always_inline bool socket_bind(const struct service_key *bound, u64 netns_cookie)
{
	bool any = address_is_unspecified(&bound->address);
	struct service_key key = *bound;

	if (!on_node(netns_cookie))
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
