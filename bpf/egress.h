/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * The egress program, at the position of POSTROUTING. It masquerades packets to endpoints and
 * restores the frontend address in replies. For host-originated packets it also does the work of
 * the ingress program: it selects an endpoint and replaces the destination.
 */
#pragma once

#include "admit.h"
#include "answer.h"
#include "bypass.h"
#include "echo.h"
#include "icmp_error.h"
#include "masquerade.h"
#include "mss.h"
#include "on_link.h"
#include "reserve.h"
#include "route.h"
#include "socket.h"
#include "unrelated.h"

/* The class of a packet at egress. */
enum outgoing {
	OUT_NO_FLOW,
	OUT_REPLY, /* a reply to the client of `view->reply` */
	/* From a client to the endpoint of `view->reply`; egress still has to masquerade it. */
	OUT_FORWARDED,
	OUT_HOST_ORIGINATED, /* belongs to `view->flow`, whose client is this node */
	OUT_DIRECT,	     /* belongs to `view->flow`, which has no Service: gets another port */
	OUT_COLLIDES,	     /* belongs to no flow, but its replies would match those of one */
};

/* Redirects the packet to the ingress side of its output device. The node then processes it like a
 * received packet.
 */
static __always_inline int reinject(struct __sk_buff *skb)
{
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

static __always_inline bool look_up_reply(const struct packet *packet, bool is_error,
					  struct flow_view *view)
{
	const struct flow_key *tuple = &view->tuple;
	struct reply *reply;

	view->reply_key = *tuple;
	reply = reply_find(NULL, view);
	if (!reply) {
		key_of_masqueraded(&view->reply_key, &tuple->source, tuple->source_port,
				   tuple->destination_port, tuple->protocol);
		/* If the client is masqueraded, ingress has restored its address. */
		reply = reply_find(&tuple->destination, view);
		if (!reply || view->reply.flags & FLOW_NODE)
			return false;
		if (view->reply.masquerade_digest)
			return true; /* ingress has recorded it */
	}
	return is_error || reply_record(reply, packet, view);
}

/* Classifies a packet that can only be one to an endpoint, or collide with a flow. */
static __always_inline enum outgoing look_up_forwarded(struct __sk_buff *skb,
						       struct flow_view *view)
{
	const struct flow_key *tuple = &view->tuple;
	const struct reply *reply = &view->reply;
	struct reply *entry;

	key_of_masqueraded(&view->reply_key, &tuple->destination, tuple->destination_port,
			   tuple->source_port, tuple->protocol);
	entry = reply_read(view);
	if (!entry)
		return OUT_NO_FLOW;
	if (reply_belongs_to(entry, &tuple->source, view) && !(reply->flags & FLOW_NODE))
		return OUT_FORWARDED;
	if (!is_masquerade(reply, &tuple->source))
		return OUT_NO_FLOW;
	/* This is the flow's own packet: ingress redirected it, and another program removed its
	 * mark before this program runs.
	 */
	if (reply->flags & FLOW_REDIRECT && skb->ingress_ifindex)
		return OUT_NO_FLOW;
	return OUT_COLLIDES;
}

/* Classifies `view->tuple` as an outgoing packet. `is_error`: the tuple is the reverse of a packet
 * that an ICMP error quotes.
 */
static __always_inline enum outgoing look_up_outgoing(struct __sk_buff *skb,
						      const struct packet *packet, bool is_error,
						      struct flow_view *view,
						      struct workspace *work)
{
	const struct flow_key *tuple = &view->tuple;

	if (port_has_use(tuple->protocol, tuple->destination_port, PORT_OF_FRONTEND) &&
	    client_find(packet, is_error, view, work)) {
		if (view->flow.flags & FLOW_DIRECT)
			return OUT_DIRECT;
		if (!skb->ingress_ifindex || is_error)
			return OUT_HOST_ORIGINATED;
	}
	if (port_has_use(tuple->protocol, tuple->source_port, PORT_OF_ENDPOINT) &&
	    look_up_reply(packet, is_error, view))
		return OUT_REPLY;
	if (port_has_use(tuple->protocol, tuple->destination_port, PORT_OF_ENDPOINT))
		return look_up_forwarded(skb, view);
	return OUT_NO_FLOW;
}

/* Returns the entry in `flows` that belongs to `view->reply`, and copies it to `view->flow`.
 * Returns NULL if the entry is gone, or belongs to a newer flow of the same client and frontend.
 */
static __always_inline struct flow *flow_of_reply(struct flow_view *view)
{
	struct flow *flow = flow_lookup(&view->key, view);

	if (!flow || !(flow->flags & FLOW_MASQUERADE) || !is_flow_of(flow, &view->reply_key))
		return NULL;
	view->flow = *flow;
	return flow;
}

/* Sets `view->flow.masquerade` for the client of `view->reply`, whose flow has such an address. It
 * is usually that of the output device, so that one is compared first. Returns false if the flow
 * has ended.
 */
static __always_inline bool masquerade_of_flow(struct __sk_buff *skb, const struct packet *packet,
					       struct flow_view *view)
{
	struct device *device = device_get(skb->ifindex);
	struct address *masquerade = &view->flow.masquerade;

	if (device) {
		*masquerade = *address_of_device(device, &packet->tuple.destination);
		if (is_masquerade(&view->reply, masquerade))
			return true;
	}
	return flow_of_reply(view) != NULL;
}

/* Selects `view->flow.masquerade` for the flow of `view->reply`, which has none yet: the first
 * forwarded packet does it, because the output device is only known at egress. Returns NO_FLOW if
 * the flow has ended, and OPENS if it needs another port.
 */
static __always_inline enum admission masquerade(struct __sk_buff *skb, const struct packet *packet,
						 struct flow_view *view, struct workspace *work)
{
	struct flow *flow = flow_of_reply(view), *copy = &view->flow;
	struct reply *reply;

	if (!flow)
		return NO_FLOW;
	reply = replies.lookup(&view->reply_key);
	if (!reply)
		return NO_FLOW;
	if (!choose_masquerade(skb, packet, skb->ifindex, view, work)) {
		view->happening.service_id = copy->service_id;
		return DROPPED;
	}
	if (port_is_in_use(skb, copy, copy->reply_port, view->reply_key.protocol, work)) {
		replies.delete(&view->reply_key);
		return OPENS;
	}
	flow->masquerade = copy->masquerade;
	reply->masquerade_digest = address_digest(&copy->masquerade);
	return KNOWN;
}

static __always_inline int error_egress(struct __sk_buff *skb, struct packet *packet,
					enum outgoing outgoing, struct scratch *scratch)
{
	const struct flow_key *tuple = &scratch->view.tuple;
	const struct reply *reply = &scratch->view.reply;
	const struct flow *flow = &scratch->view.flow;
	struct flow_key *to = &scratch->target.tuple;

	if (outgoing == OUT_NO_FLOW || outgoing == OUT_COLLIDES ||
	    !address_equal(&packet->tuple.destination, &tuple->destination))
		return PASS_ON;
	/* Drop errors that the recipient cannot assign to a connection. OUT_HOST_ORIGINATED: the
	 * node's stack reports an error about a translated reply to the frontend address, and no
	 * host at that address has the connection. ICMP redirect: it describes a route to the
	 * endpoint, whose address the client does not know. Errors about a direct flow are
	 * translated, because its endpoint knows the changed port.
	 */
	if (outgoing == OUT_HOST_ORIGINATED || is_icmp_redirect(packet))
		return DROP;
	if (outgoing == OUT_REPLY) {
		tuple_of_reply(to, reply);
	} else {
		/* The endpoint has received no packet of this flow, so the quoted packet is not its
		 * reply.
		 */
		if (outgoing == OUT_FORWARDED &&
		    (!reply->masquerade_digest || !flow_of_reply(&scratch->view)))
			return PASS_ON;
		tuple_set(to, &flow->masquerade, flow->reply_port, &tuple->destination,
			  tuple->destination_port);
	}
	return rewrite_icmp_error(skb, packet, &scratch->quoted, to, &scratch->work.key) ? PASS_ON
											 : DROP;
}

/* Whether the stack has routed a reply to the wrong device. The request arrived on another device,
 * and the route from the frontend to the client uses that device. This happens with source-based
 * routing of pod addresses: the stack routes by the endpoint's address, which egress has not
 * replaced yet.
 */
static __always_inline bool has_wrong_output_device(struct __sk_buff *skb,
						    const struct packet *packet,
						    const struct reply *reply,
						    struct next_hop *next_hop)
{
	return reply->device && reply->device != skb->ifindex &&
	       route(skb, packet, &reply->frontend, &reply->client, next_hop) == reply->device;
}

/* If the client's packets arrive in a tunnel, limits their size. */
static __always_inline bool fit_tunnel(struct __sk_buff *skb, const struct packet *packet,
				       u16 flow_flags)
{
	const struct node *settings;

	if (!(flow_flags & FLOW_DSR) || !(packet->tcp_flags & TCP_SYN) ||
	    packet->tuple.protocol != IPPROTO_TCP)
		return true;
	settings = node_get();
	return !settings || clamp_mss(skb, packet, settings->tunnel_mtu);
}

/* Returns the endpoint that the socket path selected for this host-originated packet, or
 * NO_ENDPOINT.
 */
static __always_inline u32 endpoint_of_socket(struct __sk_buff *skb, const struct flow_key *tuple,
					      struct service_key *endpoint)
{
	u64 cookie = bpf_get_socket_cookie(skb);
	struct socket_peer *peer = cookie ? peer_find(cookie) : NULL;
	WORD_STRUCT(struct socket_flow_key, key);
	struct socket_flow *flow;

	frontend_of_tuple(endpoint, tuple);
	if (peer && peer->endpoint_port == endpoint->port &&
	    address_equal(&peer->endpoint_address, &endpoint->address))
		return peer->endpoint;
	socket_flow_key_set(key, cookie, endpoint, TO_FRONTEND);
	flow = socket_flows.lookup(key);
	return flow ? flow->endpoint : NO_ENDPOINT;
}

/* Whether the socket of this host-originated packet is bound to a frontend address and connected to
 * an endpoint on another node. Several nodes can have that address, and the endpoint's replies
 * could reach the wrong one.
 */
static __always_inline bool is_bound_to_frontend(struct __sk_buff *skb, struct flow_key *tuple,
						 struct service_key *key)
{
	struct endpoint *endpoint;

	if (!frontend_addresses.lookup(&tuple->source))
		return false;
	endpoint = endpoint_get(endpoint_of_socket(skb, tuple, key));
	return endpoint && !(endpoint->flags & ENDPOINT_ON_NODE);
}

/* Whether the first packet of a client leaves the node for a ClusterIP and port that no Service
 * has. Here and not at ingress, since another proxy of this node may have translated it by now.
 * `from_node`: this node has sent it. Otherwise this node's stack must have routed it, unlike
 * frames that a bridge forwards, or those of a macvlan guest, which may be for a host with this
 * address in another network. So may those to a pod.
 */
static __always_inline bool is_to_unused_cluster_ip(struct __sk_buff *skb,
						    const struct flow_key *tuple, bool from_node,
						    struct service_key *frontend)
{
	if (!from_node && (!skb->ingress_ifindex || skb->pkt_type != PACKET_HOST))
		return false;
	if (!is_in_service_cidr(&tuple->destination) || class_of(skb) == POD)
		return false;
	frontend_of_tuple(frontend, tuple);
	return !services.lookup(frontend);
}

/* Classifies a first packet that belongs to no flow. A host-originated packet can open a flow to a
 * Service. A packet that collides with a flow, or whose source is a frontend address, opens a
 * direct flow.
 */
static __always_inline enum admission
admit_first_packet(struct __sk_buff *skb, struct packet *packet, struct flow_view *view,
		   struct target *target, struct workspace *work)
{
	enum admission admission = NO_FLOW;
	bool from_node = is_host_originated(skb, packet), collides;

	if (from_node)
		admission = admit(skb, packet, NODE, view, work);
	barrier();
	collides = target->outgoing == OUT_COLLIDES;
	target->outgoing = OUT_HOST_ORIGINATED;
	if (admission == NO_FLOW &&
	    (collides ||
	     (from_node && is_bound_to_frontend(skb, &packet->tuple, &work->frontend)))) {
		direct_flow(packet, &view->flow);
		view->flow.masquerade = packet->tuple.source;
		view->flow.flags |= FLOW_NODE | FLOW_MASQUERADE;
		target->outgoing = OUT_DIRECT;
		return collides || choose_masquerade(skb, packet, skb->ifindex, view, work)
			   ? OPENS
			   : DROPPED;
	}
	/* At an address of this node no socket listens on this port, and the stack rejects the
	 * packet.
	 */
	if (admission == REJECTED && network_flags(&packet->tuple.destination) & NETWORK_LOCAL)
		return NO_FLOW;
	if (admission == NO_FLOW && skb->ingress_ifindex)
		admission = admit_bypassing_packet(skb, packet, view, work);
	if (admission == NO_FLOW &&
	    is_to_unused_cluster_ip(skb, &packet->tuple, from_node, &work->frontend)) {
		view->happening.service_id = 0;
		view->happening.flags = 0;
		view->key = packet->tuple;
		happened(&view->happening, EVENT_REJECTED, COUNTER_CLUSTER_IP_UNUSED);
		return REJECTED;
	}
	return admission;
}

/* Gives the packet the tuple `target->tuple`, and sends it. All classes of `target->outgoing` come
 * here, so that the verifier checks the rewriting of a packet once.
 *
 * The route of forwarded packets and of direct flows is already correct. Their mark prevents a
 * second translation at another device.
 */
static __always_inline int translate_outgoing(struct __sk_buff *skb, struct packet *packet,
					      const struct flow_view *view, struct target *target)
{
	struct next_hop *next_hop = &target->next_hop;

	barrier();
	if (target->outgoing == OUT_REPLY && !fit_tunnel(skb, packet, view->reply.flags))
		return DROP;
	if (!rewrite(skb, packet, &target->tuple))
		return DROP;
	barrier();
	switch (target->outgoing) {
	case OUT_REPLY:
		if (!has_wrong_output_device(skb, packet, &view->reply, next_hop))
			return PASS_ON;
		return redirect_routed_out(skb, view->reply.device, next_hop);
	case OUT_HOST_ORIGINATED:
		/* The stack has routed it to the frontend, so it is redirected past the stack. */
		if (view->flow.flags & FLOW_MASQUERADE)
			return redirect_routed_out(skb, target->device, next_hop);
		return deliver(skb, packet);
	default:
		mark_set(skb, MARK_DONE);
		return PASS_ON;
	}
}

/* Selects the masquerade address of a host-originated packet to `device`. While sockets are
 * redirected, replies may have no program on their way: then the agent attaches programs to the
 * devices in `bypassing`, and with those of loopback it provides the reinjection veth pair. The
 * client has to send the packet again. A bridge of pods never has programs, only its ports. Its
 * pods can reply to the address of the packet's device.
 */
static __always_inline bool choose_masquerade_of_node(struct __sk_buff *skb,
						      const struct packet *packet, u32 device,
						      struct flow_view *view,
						      struct workspace *work)
{
	const struct node *settings = node_get();
	WORD_KEY(key, device);

	if (settings && !settings->reinjection_device)
		record_bypassing(LOOPBACK_IFINDEX);
	if (device_get(device))
		return choose_masquerade(skb, packet, device, view, work);
	if (bypassing.lookup(key))
		return choose_masquerade(skb, packet, skb->ifindex, view, work);
	happened(&view->happening, EVENT_DROPPED, COUNTER_BYPASSED);
	record_bypassing(device);
	return false;
}

/* Prepares the translation of a packet to the endpoint of a flow. `admission`: KNOWN or OPENS.
 * Returns the action, or TRANSLATE.
 */
static __always_inline int egress_to_endpoint(struct __sk_buff *skb, struct packet *packet,
					      enum admission admission, struct scratch *scratch)
{
	struct flow_view *view = &scratch->view;
	struct target *target = &scratch->target;
	struct workspace *work = &scratch->work;
	struct flow *flow = &view->flow;
	u32 device = 0;

	if (target->outgoing == OUT_HOST_ORIGINATED && flow->flags & FLOW_MASQUERADE) {
		/* The stack selected a device for the frontend, so this one can differ. */
		route_source(&work->key.source, &packet->tuple.source);
		device = route(skb, packet, &work->key.source, &flow->endpoint, &target->next_hop);
		if (!device) {
			happened(&view->happening, EVENT_DROPPED, COUNTER_NO_ROUTE);
			return DROP;
		}
		if (admission == OPENS &&
		    !choose_masquerade_of_node(skb, packet, device, view, work))
			return DROP;
	}
	target->device = device;
	if (admission == OPENS && !flow_open(skb, packet, skb->ifindex, 0, scratch))
		return DROP;
	barrier();
	if (target->outgoing == OUT_FORWARDED) {
		tuple_set(&target->tuple, &flow->masquerade, view->reply_key.destination_port,
			  &packet->tuple.destination, packet->tuple.destination_port);
		return TRANSLATE;
	}
	count_traffic(flow->service_id, packet->length, true, packet->opens);
	tuple_to_endpoint(&target->tuple,
			  flow->flags & FLOW_MASQUERADE ? &flow->masquerade : &packet->tuple.source,
			  flow);
	return TRANSLATE;
}

/* TAIL_OPEN_OUT: the packet may open a flow, or it is the first one of a flow that is masqueraded.
 */
static __always_inline int egress_first(struct __sk_buff *skb, struct scratch *scratch)
{
	struct packet *packet = &scratch->packet;
	struct flow_view *view = &scratch->view;
	struct target *target = &scratch->target;
	struct workspace *work = &scratch->work;
	enum admission admission;
	int action;

	if (target->outgoing == OUT_FORWARDED) {
		admission = masquerade(skb, packet, view, work);
	} else {
		admission = admit_first_packet(skb, packet, view, target, work);
		if (admission == OPENS) {
			packet->opens = true;
			count(COUNTER_PACKET_NEW);
			view->key = packet->tuple;
		}
	}
	if (admission == REJECTED)
		action = answer_rejection(skb, packet, work->bytes) ? reinject(skb) : DROP;
	else if (admission == DROPPED)
		action = DROP;
	else if (admission == NO_FLOW)
		action = PASS_ON;
	else
		action = egress_to_endpoint(skb, packet, admission, scratch);
	if (action == TRANSLATE)
		action = translate_outgoing(skb, packet, view, target);
	packet_event(view);
	return action;
}

/* TAIL_ICMP_OUT: an ICMP message. */
static __always_inline int egress_icmp(struct __sk_buff *skb, struct scratch *scratch)
{
	struct packet *packet = &scratch->packet;
	struct flow_view *view = &scratch->view;
	enum outgoing outgoing;

	if (names_on_link_gateway(skb, packet))
		return DROP;
	if (is_answered_ping_out(skb, packet))
		return answer_echo(skb, packet) ? reinject(skb) : DROP;
	if ((!is_icmp_error(packet) && !is_icmp_redirect(packet)) ||
	    !parse_quoted(skb, packet, AT_EGRESS, &scratch->quoted, &view->tuple))
		return PASS_ON;
	happening_reset(&view->happening);
	outgoing = look_up_outgoing(skb, packet, true, view, &scratch->work);
	return error_egress(skb, packet, outgoing, scratch);
}

static __always_inline int egress(struct __sk_buff *skb, u32 l3)
{
	struct scratch *scratch;
	struct flow_view *view;
	struct target *target;
	struct packet *packet;
	enum outgoing outgoing;
	int action = PASS_ON;

	if (mark_get(skb) == MARK_DONE || is_unrelated(skb, l3, AT_EGRESS))
		return PASS_ON;
	scratch = scratch_get();
	if (!scratch)
		return PASS_ON;
	view = &scratch->view;
	target = &scratch->target;
	packet = packet_begin(&scratch->packet, l3, AT_EGRESS);
	switch (parse(skb, packet)) {
	case TRANSPORT:
		break;
	case ICMP:
		tail_calls.call(skb, TAIL_ICMP_OUT);
		return PASS_ON;
	default:
		return PASS_ON;
	}
	if (packet->fragment != WHOLE && !fragment_ports(packet))
		return PASS_ON;
	view->tuple = packet->tuple;
	happening_reset(&view->happening);
	outgoing = look_up_outgoing(skb, packet, false, view, &scratch->work);
	target->outgoing = outgoing;
	if (outgoing == OUT_REPLY) {
		if (!view->reply.masquerade_digest) /* otherwise ingress has counted it */
			count_traffic(view->reply.service_id, packet->length, false, false);
		tuple_of_reply(&target->tuple, &view->reply);
		action = TRANSLATE;
	} else if (outgoing == OUT_NO_FLOW || outgoing == OUT_COLLIDES) {
		if (is_first(packet))
			tail_calls.call(skb, TAIL_OPEN_OUT);
	} else if (outgoing == OUT_FORWARDED && !view->reply.masquerade_digest) {
		tail_calls.call(skb, TAIL_OPEN_OUT);
	} else if (outgoing != OUT_FORWARDED || masquerade_of_flow(skb, packet, view)) {
		action = egress_to_endpoint(skb, packet, KNOWN, scratch);
	}
	if (action == TRANSLATE)
		action = translate_outgoing(skb, packet, view, target);
	packet_event(view);
	return action;
}
