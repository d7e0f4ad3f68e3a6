/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Admission: which client may open a flow, and to which endpoint.
 */
#pragma once

#include "flow.h"
#include "origin.h"
#include "socket_lookup.h"

/* Whether a packet may open a flow. */
enum admission {
	NO_FLOW,  /* no flow, and no packet for a frontend: it passes unchanged */
	KNOWN,	  /* the packet belongs to `view->flow` */
	OPENS,	  /* the packet opens `view->flow`, which has no entries yet */
	REJECTED, /* the client gets a TCP reset, an SCTP ABORT or an ICMP error */
	DROPPED,  /* the client gets no reply */
};

/* Whether the source ranges of the Service admit the client, if it has any. */
static __always_inline bool source_admitted(const struct service *service,
					    const struct address *source,
					    struct source_range_key *key)
{
	if (!(service->flags & SERVICE_RESTRICTED))
		return true;
	key->length = 160;
	key->service_id = service->id;
	key->source = *source;
	return source_ranges.lookup(key) != NULL;
}

/* Decides which source address the endpoint sees: docs/decisions/0011. */
static __always_inline u16 flow_flags(const struct service *service,
				      const struct endpoint *endpoint, const struct address *client,
				      enum client_class class)
{
	u16 masquerade = class == POD ? SERVICE_MASQUERADE_POD : SERVICE_MASQUERADE_OUTSIDE;
	struct node *settings;
	u16 redirect;

	if (class == NODE) {
		if (network_flags(&endpoint->address) & NETWORK_LOCAL)
			return FLOW_NODE;
		return FLOW_NODE | FLOW_MASQUERADE;
	}
	if (address_equal(&endpoint->address, client))
		return FLOW_MASQUERADE;
	settings = node_get();
	redirect = settings && settings->flags & NODE_REDIRECT ? FLOW_REDIRECT : 0;
	if (endpoint->flags & ENDPOINT_ON_NODE)
		return class == OUTSIDE ? redirect : 0;
	if (!(service->flags & masquerade))
		return 0;
	return FLOW_MASQUERADE | redirect;
}

/* Decides whether a client may open a flow to the destination of the packet, and selects the
 * endpoint. If the destination is a frontend, it sets `view->key` and `view->happening`. If the
 * packet opens a flow, it sets `view->flow`.
 */
static __always_inline enum admission admit(struct __sk_buff *skb, struct packet *packet,
					    enum client_class class, struct flow_view *view,
					    struct workspace *work)
{
	struct flow_key *tuple = &packet->tuple;
	struct service_key *frontend = &work->frontend;
	struct affinity_key *client = &work->affinity;
	struct flow *flow = &view->flow;
	struct service service;
	struct slot_range range;
	struct endpoint *endpoint;
	u16 usable;
	u32 id = 0;

	if (class != NODE && !is_for_this_node(skb))
		return NO_FLOW;
	if (class != POD || !stale_socket_find(tuple, frontend))
		frontend_of_tuple(frontend, tuple);
	if (!service_find(frontend, class == NODE, &service))
		return NO_FLOW;
	view->happening.service_id = service.id;
	view->happening.flags = 0;
	view->key = packet->tuple;
	if (service.kind == KIND_NODE_PORT && class != NODE &&
	    is_for_connected_socket(skb, packet, &work->sockets))
		return NO_FLOW;
	if (!(class == NODE && service.flags & SERVICE_NODE_ADMITTED) &&
	    !source_admitted(&service, &tuple->source, &work->source)) {
		happened(&view->happening, EVENT_DROPPED, COUNTER_SOURCE_REFUSED);
		return DROPPED;
	}
	range = class == OUTSIDE ? service.external : service.internal;
	if (!range.count) {
		bool reject = service.flags & SERVICE_REJECT;

		happened(&view->happening, reject ? EVENT_REJECTED : EVENT_DROPPED,
			 reject ? COUNTER_PACKET_REJECTED : COUNTER_PACKET_DROPPED);
		return reject ? REJECTED : DROPPED;
	}
	usable = usable_flag(&service,
			     class == OUTSIDE ? SERVICE_EXTERNAL_LOCAL : SERVICE_INTERNAL_LOCAL);
	client->client = tuple->source;
	client->client_kind = CLIENT_ADDRESS;
	client->service_id = service.id;
	endpoint = endpoint_choose(&service, &range, usable, client, tuple->source_port, &id,
				   &view->happening.flags);
	if (!endpoint) {
		happened(&view->happening, EVENT_DROPPED, COUNTER_INCONSISTENT);
		return DROPPED;
	}
	if (service.algorithm == ALGORITHM_LEAST_CONNECTIONS)
		connections_add(id, 1);
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->endpoint = endpoint->address;
	flow->endpoint_port = endpoint->port;
	flow->service_id = service.id;
	flow->endpoint_id = id;
	flow->flags = flow_flags(&service, endpoint, &tuple->source, class);
	if (class == POD && !(frontend->port == tuple->destination_port &&
			      address_equal(&frontend->address, &tuple->destination)))
		flow->flags |= FLOW_STALE_SOCKET;
	return OPENS;
}
