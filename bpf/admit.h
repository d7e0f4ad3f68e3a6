/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Who may open a flow, and to which endpoint; and whether a packet goes on with the flow that it
 * finds.
 */
#pragma once

#include "flow.h"
#include "reserve.h"
#include "service.h"

enum client_class {
	POD,
	NODE,
	OUTSIDE,
};

/* What a packet has to do with flows. */
enum standing {
	NO_FLOW,
	KNOWN,	  /* it is of `scratch->mine` */
	OPENS,	  /* it begins `scratch->flow`, of which nothing is remembered yet */
	REJECTED, /* its client is told so */
	DROPPED,  /* its client is told nothing */
};

static __always_inline bool is_first(const struct packet *packet)
{
	if (packet->tuple.protocol == IPPROTO_UDP)
		return packet->fragment != LATER;
	return (packet->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

static __always_inline bool source_admitted(const struct service *service,
					    const struct address *source,
					    struct source_range_key *key)
{
	key->length = 160;
	key->service_id = service->id;
	key->source = *source;
	return source_ranges.lookup(key) != NULL;
}

/* A UDP socket of this node that is connected to the sender gets its datagrams, be its port a
 * NodePort or not: the kernel gives such a port out where ip_local_port_range has it.
 */
static __always_inline bool is_for_connected_socket(struct __sk_buff *skb,
						    const struct packet *packet,
						    struct bpf_sock_tuple *tuple)
{
#if defined(HAVE_SKC_LOOKUP_TCP) && defined(HAVE_SK_LOOKUP_UDP)
	const struct flow_key *key = &packet->tuple;
	u32 size;

	if (key->protocol != IPPROTO_UDP)
		return false;
	size = socket_tuple(tuple, &key->source, key->source_port, &key->destination,
			    key->destination_port);
	return udp_socket_gets(skb, tuple, size, true);
#else
	return false;
#endif
}

/* What the endpoint is to see of the client: docs/decisions/0011. */
static __always_inline u16 flow_flags(const struct service *service,
				      const struct endpoint *endpoint, const struct address *client,
				      enum client_class class)
{
	u16 masquerade = class == POD ? SERVICE_MASQUERADE_POD : SERVICE_MASQUERADE_OUTSIDE;
	struct node *settings;

	if (class == NODE) {
		if (network_flags(&endpoint->address) & NETWORK_LOCAL)
			return FLOW_NODE;
		return FLOW_NODE | FLOW_MASQUERADE;
	}
	if (address_equal(&endpoint->address, client))
		return FLOW_MASQUERADE;
	if (endpoint->flags & ENDPOINT_ON_NODE || !(service->flags & masquerade))
		return 0;
	settings = node_get();
	if (settings && settings->flags & NODE_REDIRECT)
		return FLOW_MASQUERADE | FLOW_REDIRECT;
	return FLOW_MASQUERADE;
}

/* Whether, and to which endpoint, a client may open a flow to what it dials. */
static __always_inline enum standing admit(struct __sk_buff *skb, const struct packet *packet,
					   enum client_class class, struct scratch *scratch)
{
	const struct flow_key *tuple = &packet->tuple;
	struct service_key *dialed = &scratch->dialed;
	struct affinity_key *client = &scratch->affinity;
	struct flow *flow = &scratch->flow;
	struct service service;
	struct slot_range range;
	struct endpoint *endpoint;
	u16 local, usable;
	u32 id = 0;

	/* What a device overhears; a pod's port of a bridge sees what is for the bridge. */
	if (class == OUTSIDE && skb->pkt_type == PACKET_OTHERHOST)
		return NO_FLOW;
	dialed->address = tuple->destination;
	dialed->port = tuple->destination_port;
	dialed->protocol = tuple->protocol;
	dialed->pad = 0;
	if (!service_find(dialed, class == NODE, &service))
		return NO_FLOW;
	if (service.kind == KIND_NODE_PORT && class != NODE &&
	    is_for_connected_socket(skb, packet, &scratch->sockets))
		return NO_FLOW;
	if (service.flags & SERVICE_RESTRICTED &&
	    !(class == NODE && service.flags & SERVICE_NODE_ADMITTED) &&
	    !source_admitted(&service, &tuple->source, &scratch->source)) {
		count(COUNTER_SOURCE_REFUSED);
		return DROPPED;
	}
	range = class == OUTSIDE ? service.external : service.internal;
	if (!range.count) {
		bool reject = service.flags & SERVICE_REJECT;

		count(reject ? COUNTER_PACKET_REJECTED : COUNTER_PACKET_DROPPED);
		return reject ? REJECTED : DROPPED;
	}
	local = class == OUTSIDE ? SERVICE_EXTERNAL_LOCAL : SERVICE_INTERNAL_LOCAL;
	usable = service.flags & local ? ENDPOINT_LOCAL : ENDPOINT_CLUSTER;
	client->client = tuple->source;
	client->client_kind = CLIENT_ADDRESS;
	client->service_id = service.id;
	endpoint = endpoint_choose(&service, &range, usable, client, &id);
	if (!endpoint) {
		count(COUNTER_INCONSISTENT);
		return DROPPED;
	}
	if (tuple->protocol == IPPROTO_SCTP && endpoint->port != dialed->port) {
		count(COUNTER_PORT_UNEQUAL);
		return DROPPED;
	}
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->client = tuple->source;
	flow->client_port = tuple->source_port;
	flow->frontend = tuple->destination;
	flow->frontend_port = tuple->destination_port;
	flow->endpoint = endpoint->address;
	flow->endpoint_port = endpoint->port;
	flow->service_id = service.id;
	flow->endpoint_id = id;
	flow->protocol = tuple->protocol;
	flow->flags = flow_flags(&service, endpoint, &tuple->source, class);
	return OPENS;
}

/* Ids are given again, so the place is compared, too. A direct flow is no Service's. */
static __always_inline bool endpoint_is_in_force(const struct flow *flow)
{
	u32 id = flow->endpoint_id;
	struct endpoint *endpoint;

	if (flow->flags & FLOW_DIRECT)
		return true;
	endpoint = endpoints.lookup(&id);
	return endpoint && endpoint->service_id == flow->service_id &&
	       endpoint->flags & ENDPOINT_LISTED && endpoint->port == flow->endpoint_port &&
	       address_equal(&endpoint->address, &flow->endpoint);
}

/* Whether the frontend is still that Service's. */
static __always_inline bool frontend_is_in_force(const struct flow *flow, struct service_key *key)
{
	struct service *service;

	if (flow->flags & FLOW_DIRECT)
		return true;
	key->address = flow->frontend;
	key->port = flow->frontend_port;
	key->protocol = flow->protocol;
	key->pad = 0;
	service = services.lookup(key);
	if (!service) {
		address_unspecified_like(&key->address, &flow->frontend);
		service = services.lookup(key);
	}
	return service && service->id == flow->service_id;
}

/* Whether the packet belongs to the flow that has its tuple, and does not begin another one. A
 * datagram does where endpoint or frontend are gone, since UDP itself never ends. A SYN does after
 * the end of the flow, or where its endpoint is gone, unless that has just answered.
 */
static __always_inline bool goes_on(const struct flow *flow, const struct packet *packet,
				    struct scratch *scratch)
{
	if (flow->protocol == IPPROTO_UDP)
		return endpoint_is_in_force(flow) && frontend_is_in_force(flow, &scratch->dialed);
	if (!is_first(packet))
		return true;
	if (flow_is_closed(flow))
		return false;
	return endpoint_is_in_force(flow) ||
	       (flow->protocol == IPPROTO_TCP &&
		(flow->flags & (FLOW_REPLIED | FLOW_ESTABLISHED)) == FLOW_REPLIED);
}

static __always_inline enum client_class class_of(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = devices.lookup(&ifindex);

	return device && device->flags & DEVICE_POD ? POD : OUTSIDE;
}

/* Make `scratch->flow` where somebody reaches the endpoint itself, from an address and a port of
 * this node by which the endpoint knows one of our clients: the node, or whom somebody else
 * masquerades.
 */
static __always_inline bool direct_flow(const struct packet *packet, struct scratch *scratch)
{
	struct flow *taken;

	if (packet->tuple.protocol == IPPROTO_SCTP) /* its checksum covers the ports */
		return false;
	tuple_reverse(&scratch->key, &packet->tuple);
	scratch->key.side = AT_INGRESS;
	taken = flow_find(&scratch->key, scratch);
	if (!taken || taken->way != FROM_ENDPOINT) /* a closed flow still translates what comes */
		return false;
	__builtin_memset(&scratch->flow, 0, sizeof(scratch->flow));
	scratch->flow.client = packet->tuple.source;
	scratch->flow.client_port = packet->tuple.source_port;
	scratch->flow.frontend = packet->tuple.destination;
	scratch->flow.frontend_port = packet->tuple.destination_port;
	scratch->flow.endpoint = packet->tuple.destination;
	scratch->flow.endpoint_port = packet->tuple.destination_port;
	scratch->flow.protocol = packet->tuple.protocol;
	scratch->flow.flags = FLOW_NODE | FLOW_MASQUERADE | FLOW_DIRECT;
	return true;
}
