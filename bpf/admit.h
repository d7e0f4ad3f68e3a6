/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Admission: which client may open a flow, to which endpoint, and whether a packet continues an
 * existing flow.
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

/* Whether a packet may open a flow. */
enum admission {
	NO_FLOW,  /* the packet is not for a frontend and passes unchanged */
	OPENS,	  /* the packet opens `view->flow`, which has no entries yet */
	REJECTED, /* the client gets a TCP reset, an SCTP ABORT or an ICMP error */
	DROPPED,  /* the client gets no reply */
};

static __always_inline bool is_first(const struct packet *packet)
{
	if (packet->tuple.protocol == IPPROTO_UDP)
		return packet->fragment != LATER;
	return (packet->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

static __always_inline enum client_class class_of(struct __sk_buff *skb)
{
	struct device *device = device_get(skb->ifindex);

	return device && device->flags & DEVICE_POD ? POD : OUTSIDE;
}

/* Whether the received frame is addressed to this node. On a port of a bridge, frames for the
 * bridge itself are PACKET_OTHERHOST, as are those that the bridge forwards to other hosts, such as
 * a router of the network. Which frames another kind of switch passes to the node is unknown.
 */
static __always_inline bool is_for_this_node(struct __sk_buff *skb)
{
	u8 destination[8] ALIGNED;
	struct device *device;

	if (skb->pkt_type != PACKET_OTHERHOST)
		return true;
	device = device_get(skb->ifindex);
	if (!device || !(device->flags & (DEVICE_POD | DEVICE_GUEST)) ||
	    device->flags & DEVICE_LAYER3)
		return false;
	if (device->flags & DEVICE_SWITCHED)
		return true;
	if (!load_header(skb, 0, destination, sizeof(destination)))
		return false;
#pragma unroll
	for (int i = 0; i < 6; i++)
		if (destination[i] != device->bridge[i])
			return false;
	return true;
}

/* Whether the packet comes from this node's own stack. A packet without an ingress device can also
 * be that of a macvlan or ipvlan guest, which leaves by the device that it shares with the node. No
 * stack of the node has processed it. The network namespace of its socket decides. For packets
 * without a socket, and on kernels that do not return the namespace, the source address decides.
 */
static __always_inline bool is_host_originated(struct __sk_buff *skb, const struct packet *packet)
{
	const struct node *settings = node_get();
	const struct address *source = &packet->tuple.source;

	if (skb->ingress_ifindex || !settings)
		return false;
	if (HAVE(NETNS_COOKIE) && settings->netns_cookie && skb->sk)
		return bpf_get_netns_cookie(skb) == settings->netns_cookie;
	return address_is_loopback(source) || network_flags(source) & NETWORK_LOCAL;
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

/* Whether a connected UDP socket of this node receives the packet. Such a socket takes precedence
 * over a NodePort with its port: the kernel can assign a NodePort that is within
 * ip_local_port_range.
 */
static __always_inline bool is_for_connected_socket(struct __sk_buff *skb,
						    const struct packet *packet,
						    struct bpf_sock_tuple *tuple)
{
	const struct flow_key *key = &packet->tuple;
	u32 size;

	if (!HAVE(SK_LOOKUP_UDP) || key->protocol != IPPROTO_UDP)
		return false;
	size = socket_tuple(tuple, &key->source, key->source_port, &key->destination,
			    key->destination_port);
	return udp_socket_receives(skb, tuple, size, true);
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

/* Sets `frontend` to the frontend of a pod's stale UDP socket that sends packets with `tuple`.
 * Returns false if no stale socket has this tuple.
 */
static __always_inline bool stale_socket_find(struct flow_key *tuple, struct service_key *frontend)
{
	const struct node *settings = node_get();
	struct service_key *found;

	if (tuple->protocol != IPPROTO_UDP || !settings || !(settings->flags & NODE_STALE_SOCKETS))
		return false;
	found = stale_sockets.lookup(tuple);
	if (!found)
		return false;
	*frontend = *found;
	return true;
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
	u16 local, usable;
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
	if (service.flags & SERVICE_RESTRICTED &&
	    !(class == NODE && service.flags & SERVICE_NODE_ADMITTED) &&
	    !source_admitted(&service, &tuple->source, &work->source)) {
		count_drop(&view->happening, COUNTER_SOURCE_REFUSED);
		return DROPPED;
	}
	range = class == OUTSIDE ? service.external : service.internal;
	if (!range.count) {
		bool reject = service.flags & SERVICE_REJECT;

		u32 counter = reject ? COUNTER_PACKET_REJECTED : COUNTER_PACKET_DROPPED;

		count(counter);
		report(&view->happening, reject ? EVENT_REJECTED : EVENT_DROPPED, (u8)counter);
		return reject ? REJECTED : DROPPED;
	}
	local = class == OUTSIDE ? SERVICE_EXTERNAL_LOCAL : SERVICE_INTERNAL_LOCAL;
	usable = service.flags & local ? ENDPOINT_LOCAL : ENDPOINT_CLUSTER;
	client->client = tuple->source;
	client->client_kind = CLIENT_ADDRESS;
	client->service_id = service.id;
	endpoint = endpoint_choose(&service, &range, usable, client, tuple->source_port, &id,
				   &view->happening.flags);
	if (!endpoint) {
		count_drop(&view->happening, COUNTER_INCONSISTENT);
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

/* Whether the endpoint of a flow is still in use. Ids are reused, so the address and port are
 * compared, too. A direct flow has no Service.
 */
static __always_inline bool endpoint_is_in_force(const struct flow *flow)
{
	struct endpoint *endpoint;

	if (!flow->service_id)
		return true;
	endpoint = endpoint_same(flow->endpoint_id, flow->service_id, &flow->endpoint,
				 flow->endpoint_port);
	return endpoint && endpoint->flags & ENDPOINT_LISTED;
}

/* Whether the frontend still belongs to the Service of the flow. */
static __always_inline bool frontend_is_in_force(const struct flow *flow, struct flow_key *flow_key,
						 struct service_key *frontend)
{
	WORD_STRUCT(struct service_key, key);
	struct service *service;

	if (!flow->service_id)
		return true;
	if (flow->flags & FLOW_STALE_SOCKET) {
		if (!stale_socket_find(flow_key, frontend))
			return false;
	} else {
		frontend_of_tuple(frontend, flow_key);
	}
	service = service_lookup(key, frontend);
	return service && service->id == flow->service_id;
}

/* Whether a UDP flow is idle for longer than its timeout. Its next datagram then opens a new flow.
 * The endpoint may have sent packets in the meantime; only the entry in `replies` records them.
 */
static __always_inline bool stream_is_over(const struct flow *flow, struct flow_view *view)
{
	const struct node *settings = node_get();
	struct reply *reply;

	if (!settings || !has_passed(flow->last_seen, view->now, settings->udp_stream))
		return false;
	reply = replies.lookup(&view->reply_key);
	return !reply || has_passed(reply->last_seen, view->now, settings->udp_stream);
}

/* Whether the endpoint of a TCP flow has sent nothing for as long as a SYN may be unanswered. */
static __always_inline bool endpoint_is_silent(struct flow_view *view)
{
	const struct node *settings = node_get();
	struct reply *reply = replies.lookup(&view->reply_key);

	return !reply || (settings && has_passed(reply->last_seen, view->now, settings->tcp_syn));
}

/* Whether the packet continues the established flow with its tuple, and does not open a new flow.
 *
 * UDP has no end of a connection: a datagram opens a new flow if the endpoint or the frontend is
 * gone. A SYN opens a new flow only after the connection has ended. While the connection may exist,
 * the endpoint itself replies to the SYN (challenge ACK, RFC 5961, 4). If the endpoint was removed
 * and is silent, the reply could only be that of another pod with the same address.
 */
static __always_inline bool continues_established(const struct flow *flow,
						  const struct packet *packet,
						  struct flow_view *view, struct workspace *work)
{
	if (packet->tuple.protocol == IPPROTO_UDP)
		return endpoint_is_in_force(flow) &&
		       frontend_is_in_force(flow, &view->key, &work->frontend) &&
		       !stream_is_over(flow, view);
	if (!is_first(packet))
		return true;
	if (packet->tuple.protocol != IPPROTO_TCP)
		return endpoint_is_in_force(flow);
	return !is_closed(flow->flags) && (endpoint_is_in_force(flow) || !endpoint_is_silent(view));
}

/* Processes a packet from the client of an established flow. Returns whether the packet continues
 * the flow.
 */
static __always_inline bool established_continue(struct flow *flow, const struct packet *packet,
						 struct flow_view *view, struct workspace *work)
{
	if (!continues_established(flow, packet, view, work))
		return false;
	client_sent(flow, packet, view);
	return true;
}

/* As continues_established(), for a half-open flow. A retransmitted SYN goes to another endpoint if
 * the first endpoint is gone and has not replied. A connection that the endpoint has rejected is
 * over.
 */
static __always_inline bool continues_half_open(const struct flow *flow,
						const struct packet *packet,
						const struct reply *reply, struct flow_view *view,
						struct workspace *work)
{
	if (half_open_is_over(flow->last_seen, packet->tuple.protocol, view->now))
		return false;
	/* Another flow has its entry in `replies`. */
	if (!reply && is_first(packet))
		return false;
	if (packet->tuple.protocol == IPPROTO_UDP)
		return endpoint_is_in_force(flow) &&
		       frontend_is_in_force(flow, &view->key, &work->frontend);
	if (!is_first(packet))
		return true;
	if (is_closed(flow->flags))
		return false;
	return endpoint_is_in_force(flow) || (reply && reply->flags & FLOW_REPLIED);
}

/* Processes a packet from the client of the half-open `flow`. Returns whether the packet continues
 * the flow. The flow becomes established if the packet proves that each side has received a packet
 * from the other, or if it is a UDP flow of more than a second: its client may expect no reply.
 */
static __always_inline bool half_open_continue(struct flow *flow, const struct packet *packet,
					       struct flow_view *view, struct workspace *work)
{
	struct reply *reply = reply_lookup(&view->reply_key, view);
	bool lasts = packet->tuple.protocol == IPPROTO_UDP && flow->last_seen != view->now;
	bool confirms;

	if (reply && !is_reply_of(reply, &view->key))
		reply = NULL;
	if (!continues_half_open(flow, packet, reply, view, work))
		return false;
	half_open_refresh(flow, reply, view->now);
	confirms = reply && (lasts || confirms_reply(packet, reply));
	if (is_segment(packet) && !(packet->tcp_flags & TCP_RST))
		record_half_open(flow, packet, confirms || packet->tcp_flags & TCP_SYN);
	if (confirms && flow_is_at(&view->key, flow))
		establish(flow, reply, view->key.protocol);
	return true;
}

/* Finds the flow of a packet that a client may have sent by `view->tuple`, and sets `view->key`. If
 * it returns true, `view->flow` and `view->now` are set, too. An entry that has ended is removed,
 * because later packets would match it.
 */
static __always_inline bool client_find(const struct packet *packet, struct flow_view *view,
					struct workspace *work)
{
	struct flow *flow;

	view->key = view->tuple;
	flow = flow_lookup(&view->key, view);
	if (!flow)
		return false;
	view->now = flow_now();
	reply_key_of(&view->reply_key, &view->key, flow);
	if (flow->half_open ? half_open_continue(flow, packet, view, work)
			    : established_continue(flow, packet, view, work)) {
		view->flow = *flow;
		return !view->flow.half_open || flow_is_at(&view->key, flow);
	}
	flow_remove(&view->key, &view->reply_key);
	return false;
}

/* As client_find(), for a packet that an ICMP error quotes. No entry is written or removed. */
static __always_inline bool client_find_quoted(struct flow_view *view)
{
	struct flow *flow;

	view->key = view->tuple;
	flow = flow_lookup(&view->key, view);
	if (!flow)
		return false;
	view->flow = *flow;
	return true;
}
