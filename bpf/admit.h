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
	KNOWN,	  /* it is of the flow in the scratch */
	OPENS,	  /* it opens the flow in the scratch, which has no entries yet */
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

/* `dialed` becomes the frontend that a pod's stale UDP socket sends to by `tuple`; false: it is no
 * such socket's.
 */
static __always_inline bool stale_socket_find(struct flow_key *tuple, struct service_key *dialed)
{
	const struct node *settings = node_get();
	struct service_key *frontend;

	if (tuple->protocol != IPPROTO_UDP || !settings || !(settings->flags & NODE_STALE_SOCKETS))
		return false;
	frontend = stale_sockets.lookup(tuple);
	if (!frontend)
		return false;
	*dialed = *frontend;
	return true;
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
	if (class != POD || !stale_socket_find(&scratch->tuple, dialed)) {
		dialed->address = tuple->destination;
		dialed->port = tuple->destination_port;
		dialed->protocol = tuple->protocol;
		dialed->pad = 0;
	}
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
	flow->endpoint = endpoint->address;
	flow->endpoint_port = endpoint->port;
	flow->service_id = service.id;
	flow->endpoint_id = id;
	flow->flags = flow_flags(&service, endpoint, &tuple->source, class);
	if (class == POD && !(dialed->port == tuple->destination_port &&
			      address_equal(&dialed->address, &tuple->destination)))
		flow->flags |= FLOW_STALE_SOCKET;
	return OPENS;
}

/* Ids are given again, so the place is compared, too. A direct flow is no Service's. */
static __always_inline bool endpoint_is_in_force(const struct flow *flow)
{
	u32 id = flow->endpoint_id;
	struct endpoint *endpoint;

	if (!flow->service_id)
		return true;
	endpoint = endpoints.lookup(&id);
	return endpoint && endpoint->service_id == flow->service_id &&
	       endpoint->flags & ENDPOINT_LISTED && endpoint->port == flow->endpoint_port &&
	       address_equal(&endpoint->address, &flow->endpoint);
}

/* Whether the frontend is still that Service's. */
static __always_inline bool frontend_is_in_force(const struct flow *flow, struct flow_key *flow_key,
						 struct service_key *dialed)
{
	struct service_key key;
	struct service *service;

	if (!flow->service_id)
		return true;
	if (flow->flags & FLOW_STALE_SOCKET) {
		if (!stale_socket_find(flow_key, dialed))
			return false;
	} else {
		dialed->address = flow_key->destination;
		dialed->port = flow_key->destination_port;
		dialed->protocol = flow_key->protocol;
		dialed->pad = 0;
	}
	service = service_lookup(&key, dialed);
	return service && service->id == flow->service_id;
}

/* Whether a UDP flow has been idle for so long that its next datagram opens another one. The
 * endpoint may have sent meanwhile, which its own entry knows.
 */
static __always_inline bool stream_is_over(const struct flow *flow, struct scratch *scratch)
{
	const struct node *settings = node_get();
	struct reply *reply;

	if (!settings || !has_passed(flow->last_seen, scratch->now, settings->udp_stream))
		return false;
	reply = replies.lookup(&scratch->reply_key);
	return !reply || has_passed(reply->last_seen, scratch->now, settings->udp_stream);
}

/* Whether the packet belongs to the established flow that has its tuple, and opens no other. A
 * datagram opens another one where endpoint or frontend are gone, since UDP itself never ends. A
 * SYN does after the end of the connection alone: as long as it may live, its endpoint says so to
 * whoever sent the SYN (RFC 5961, 4).
 */
static __always_inline bool goes_on(const struct flow *flow, const struct packet *packet,
				    struct scratch *scratch)
{
	if (packet->tuple.protocol == IPPROTO_UDP)
		return endpoint_is_in_force(flow) &&
		       frontend_is_in_force(flow, &scratch->flow_key, &scratch->dialed) &&
		       !stream_is_over(flow, scratch);
	if (!is_first(packet))
		return true;
	return packet->tuple.protocol == IPPROTO_TCP ? !is_closed(flow->flags)
						     : endpoint_is_in_force(flow);
}

/* The client of an established flow has sent `packet`: whether that goes on with it. */
static __always_inline bool established_continue(struct flow *flow, const struct packet *packet,
						 struct scratch *scratch)
{
	if (!goes_on(flow, packet, scratch))
		return false;
	client_sent(flow, packet, scratch);
	return true;
}

/* As goes_on(), of a half-open flow. A SYN that is sent again goes to another endpoint where the
 * first one is gone, unless that has answered; a connection that was refused is over.
 */
static __always_inline bool half_open_goes_on(const struct flow *flow, const struct packet *packet,
					      const struct reply *reply, struct scratch *scratch)
{
	if (half_open_is_over(flow->last_seen, packet->tuple.protocol, scratch->now))
		return false;
	if (!reply && is_first(packet)) /* another flow has its place */
		return false;
	if (packet->tuple.protocol == IPPROTO_UDP)
		return endpoint_is_in_force(flow) &&
		       frontend_is_in_force(flow, &scratch->flow_key, &scratch->dialed);
	if (!is_first(packet))
		return true;
	if (is_closed(flow->flags))
		return false;
	return endpoint_is_in_force(flow) || (reply && reply->flags & FLOW_REPLIED);
}

/* The client of the half-open `flow` has sent `packet`: whether that goes on with it. It is
 * established where this is the proof that both sides have been heard.
 */
static __always_inline bool half_open_continue(struct flow *flow, const struct packet *packet,
					       struct scratch *scratch)
{
	struct reply *reply = reply_lookup(&scratch->reply_key, scratch);

	if (reply && !is_reply_of(reply, &scratch->flow_key))
		reply = NULL;
	if (!half_open_goes_on(flow, packet, reply, scratch))
		return false;
	half_open_refresh(flow, reply, scratch->now);
	if (is_segment(packet))
		note_sequence(flow, packet, true);
	if (reply && completes(packet, reply) && flow_is_at(&scratch->flow_key, flow))
		establish(flow, reply);
	return true;
}

/* What a packet that a client may have sent, by `packet->tuple` at its side, has to do with flows.
 * An entry that ended is removed: what follows this packet would be taken for it.
 */
static __always_inline bool client_find(const struct packet *packet, struct scratch *scratch)
{
	struct flow *flow;

	scratch->flow_key = scratch->tuple;
	flow = flow_lookup(&scratch->flow_key, scratch);
	if (!flow)
		return false;
	scratch->now = flow_now();
	reply_key_of(&scratch->reply_key, &scratch->flow_key, flow);
	if (flow->half_open ? half_open_continue(flow, packet, scratch)
			    : established_continue(flow, packet, scratch)) {
		scratch->flow = *flow;
		return !scratch->flow.half_open || flow_is_at(&scratch->flow_key, flow);
	}
	flow_delete(&scratch->flow_key);
	return false;
}

/* As client_find(), for an ICMP error: nothing is written, and nothing ends. */
static __always_inline bool client_find_quoted(struct scratch *scratch)
{
	struct flow *flow;

	scratch->flow_key = scratch->tuple;
	flow = flow_lookup(&scratch->flow_key, scratch);
	if (!flow)
		return false;
	scratch->flow = *flow;
	return true;
}

static __always_inline enum client_class class_of(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = devices.lookup(&ifindex);

	return device && device->flags & DEVICE_POD ? POD : OUTSIDE;
}
