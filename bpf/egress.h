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

/* The class of a packet at egress. */
enum outgoing {
	OUT_NO_FLOW,
	OUT_REPLY, /* a reply to the client of `scratch->reply` */
	/* From a client to the endpoint of `scratch->reply`; egress still has to masquerade it. */
	OUT_FORWARDED,
	OUT_HOST_ORIGINATED, /* belongs to `scratch->flow`, whose client is this node */
	OUT_DIRECT,   /* belongs to `scratch->flow`, which has no Service: gets another port */
	OUT_COLLIDES, /* belongs to no flow, but its replies would match `scratch->reply` */
};

/* Redirects the packet to the ingress side of its output device. The node then processes it like a
 * received packet.
 */
static __always_inline int reinject(struct __sk_buff *skb)
{
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

static __always_inline enum outgoing look_up_node(struct __sk_buff *skb,
						  const struct packet *packet, bool is_error,
						  struct scratch *scratch)
{
	if (!(is_error ? client_find_quoted(scratch) : client_find(packet, scratch)))
		return OUT_NO_FLOW;
	if (scratch->flow.flags & FLOW_DIRECT)
		return OUT_DIRECT;
	return !skb->ingress_ifindex || is_error ? OUT_HOST_ORIGINATED : OUT_NO_FLOW;
}

static __always_inline bool look_up_reply(const struct packet *packet, bool is_error,
					  struct scratch *scratch)
{
	const struct flow_key *tuple = &scratch->tuple;
	struct reply *reply;

	scratch->reply_key = *tuple;
	reply = reply_find(scratch, MATCH_KEY);
	if (!reply) {
		key_of_masqueraded(&scratch->reply_key, &tuple->source, tuple->source_port,
				   tuple->destination_port, tuple->protocol);
		reply = reply_find(scratch, MATCH_DESTINATION);
		if (!reply || scratch->reply.flags & FLOW_NODE)
			return false;
		if (scratch->reply.masquerade_digest)
			return true; /* ingress has recorded it */
	}
	return is_error || reply_record(reply, packet, scratch);
}

static __always_inline enum outgoing look_up_forwarded(struct __sk_buff *skb,
						       struct scratch *scratch)
{
	const struct flow_key *tuple = &scratch->tuple;
	const struct reply *reply = &scratch->reply;

	key_of_masqueraded(&scratch->reply_key, &tuple->destination, tuple->destination_port,
			   tuple->source_port, tuple->protocol);
	if (reply_find(scratch, MATCH_SOURCE) && !(reply->flags & FLOW_NODE))
		return OUT_FORWARDED;
	if (!reply->client_port || !is_masquerade(reply, &tuple->source))
		return OUT_NO_FLOW;
	/* This is the flow's own packet: ingress redirected it, and another program removed its
	 * mark before this program runs.
	 */
	if (reply->flags & FLOW_REDIRECT && skb->ingress_ifindex)
		return OUT_NO_FLOW;
	return OUT_COLLIDES;
}

/* Classifies `scratch->tuple` as an outgoing packet. `is_error`: the tuple is the reverse of a
 * packet that an ICMP error quotes.
 */
static __always_inline enum outgoing look_up_outgoing(struct __sk_buff *skb,
						      const struct packet *packet, bool is_error,
						      struct scratch *scratch)
{
	const struct flow_key *tuple = &scratch->tuple;

	if (port_has_use(tuple->protocol, tuple->destination_port, PORT_OF_FRONTEND)) {
		enum outgoing outgoing = look_up_node(skb, packet, is_error, scratch);

		if (outgoing != OUT_NO_FLOW)
			return outgoing;
	}
	if (port_has_use(tuple->protocol, tuple->source_port, PORT_OF_ENDPOINT) &&
	    look_up_reply(packet, is_error, scratch))
		return OUT_REPLY;
	if (port_has_use(tuple->protocol, tuple->destination_port, PORT_OF_ENDPOINT))
		return look_up_forwarded(skb, scratch);
	return OUT_NO_FLOW;
}

/* Returns the entry in `flows` that belongs to `scratch->reply`, and copies it to `scratch->flow`.
 * Returns NULL if the entry is gone, or belongs to a newer flow of the same client and frontend.
 */
static __always_inline struct flow *flow_of_reply(struct scratch *scratch)
{
	struct flow *flow = flow_lookup(&scratch->flow_key, scratch);

	if (!flow || !(flow->flags & FLOW_MASQUERADE) || !is_flow_of(flow, &scratch->reply_key))
		return NULL;
	scratch->flow = *flow;
	return flow;
}

enum masquerade_result {
	/* `scratch->flow.masquerade` is the source address; the source port of the packet is
	 * correct.
	 */
	MASQUERADE_SELECTED,
	MASQUERADE_PORT_IN_USE, /* the port is in use with this address: select another port */
	MASQUERADE_NO_ADDRESS,	/* the device has no masquerade address; this is counted */
	MASQUERADE_FLOW_ENDED,	/* the flow that the reply belonged to has ended */
};

/* Selects the masquerade address for the first forwarded packet of a flow. It depends on the output
 * device, which is only known at egress.
 */
static __always_inline enum masquerade_result masquerade_first(struct __sk_buff *skb,
							       struct scratch *scratch)
{
	struct flow *flow = flow_of_reply(scratch);
	struct reply *reply = replies.lookup(&scratch->reply_key);
	struct flow *copy = &scratch->flow;

	if (!flow || !reply)
		return MASQUERADE_FLOW_ENDED;
	if (!choose_masquerade(skb, skb->ifindex, scratch)) {
		scratch->happening.service_id = copy->service_id;
		return MASQUERADE_NO_ADDRESS;
	}
	if (port_is_in_use(skb, &copy->endpoint, copy->endpoint_port, &copy->masquerade,
			   copy->reply_port, scratch->reply_key.protocol, scratch)) {
		replies.delete(&scratch->reply_key);
		return MASQUERADE_PORT_IN_USE;
	}
	flow->masquerade = copy->masquerade;
	reply->masquerade_digest = address_digest(&copy->masquerade);
	return MASQUERADE_SELECTED;
}

/* Determines the masquerade address for the client of `scratch->reply`. A flow keeps its address.
 * This is usually the address of the output device, so that address is compared first.
 */
static __always_inline enum masquerade_result masquerade(struct __sk_buff *skb,
							 struct scratch *scratch)
{
	struct device *device;

	if (!scratch->reply.masquerade_digest)
		return masquerade_first(skb, scratch);
	device = device_get(skb->ifindex);
	if (device) {
		scratch->flow.masquerade = *address_of_device(device, &scratch->tuple.destination);
		if (is_masquerade(&scratch->reply, &scratch->flow.masquerade))
			return MASQUERADE_SELECTED;
	}
	return flow_of_reply(scratch) ? MASQUERADE_SELECTED : MASQUERADE_FLOW_ENDED;
}

static __always_inline int icmp_egress(struct __sk_buff *skb, struct packet *packet,
				       enum outgoing outgoing, struct scratch *scratch)
{
	const struct flow_key *tuple = &scratch->tuple;
	const struct reply *reply = &scratch->reply;
	const struct flow *flow = &scratch->flow;

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
		tuple_set(&scratch->to, &reply->frontend, reply->frontend_port, &reply->client,
			  reply->client_port);
	} else {
		/* The endpoint has received no packet of this flow, so the quoted packet is not its
		 * reply.
		 */
		if (outgoing == OUT_FORWARDED &&
		    (!reply->masquerade_digest || !flow_of_reply(scratch)))
			return PASS_ON;
		tuple_set(&scratch->to, &flow->masquerade, flow->reply_port, &tuple->destination,
			  tuple->destination_port);
	}
	return rewrite_icmp_error(skb, packet, &scratch->quoted, &scratch->to, scratch) ? PASS_ON
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

/* Sets `scratch->to` for a reply, which gets the frontend address. Replies to masqueraded clients
 * are already counted at ingress.
 */
static __always_inline void reply_prepare(const struct packet *packet, struct scratch *scratch)
{
	const struct reply *reply = &scratch->reply;

	if (!reply->masquerade_digest)
		count_traffic(reply->service_id, packet->length, false, false);
	tuple_set(&scratch->to, &reply->frontend, reply->frontend_port, &reply->client,
		  reply->client_port);
}

static __always_inline int reply_send(struct __sk_buff *skb, const struct packet *packet,
				      struct scratch *scratch)
{
	const struct reply *reply = &scratch->reply;

	return has_wrong_output_device(skb, packet, reply, &scratch->next_hop)
		   ? redirect_routed_out(skb, reply->device, &scratch->next_hop)
		   : PASS_ON;
}

/* Initializes the direct flow of a packet with an address of this node. */
static __always_inline void direct_flow_masqueraded(const struct packet *packet, struct flow *flow)
{
	direct_flow(packet, flow);
	flow->masquerade = packet->tuple.source;
	flow->flags |= FLOW_NODE | FLOW_MASQUERADE;
}

/* Returns the endpoint that the socket path selected for this host-originated packet, or
 * NO_ENDPOINT.
 */
static __always_inline u32 endpoint_of_socket(struct __sk_buff *skb, struct scratch *scratch)
{
	struct service_key *endpoint = &scratch->frontend;
	u64 cookie = bpf_get_socket_cookie(skb);
	struct socket_peer *peer = cookie ? peer_find(cookie) : NULL;
	WORD_STRUCT(struct socket_flow_key, key);
	struct socket_flow *flow;

	frontend_of_tuple(scratch);
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
static __always_inline bool is_bound_to_frontend(struct __sk_buff *skb, struct scratch *scratch)
{
	struct endpoint *endpoint;

	if (!frontend_addresses.lookup(&scratch->tuple.source))
		return false;
	endpoint = endpoint_get(endpoint_of_socket(skb, scratch));
	return endpoint && !(endpoint->flags & ENDPOINT_ON_NODE);
}

/* Classifies a first packet that belongs to no flow. A host-originated packet can open a flow to a
 * Service. A packet that collides with a flow, or whose source is a frontend address, opens a
 * direct flow.
 */
static __always_inline enum admission admit_first_packet(struct __sk_buff *skb,
							 const struct packet *packet,
							 enum outgoing *outgoing,
							 struct scratch *scratch)
{
	enum admission admission = NO_FLOW;
	bool from_node = is_host_originated(skb, packet), collides;

	scratch->outgoing = *outgoing;
	if (from_node)
		admission = admit(skb, packet, NODE, scratch);
	barrier();
	collides = scratch->outgoing == OUT_COLLIDES;
	*outgoing = OUT_HOST_ORIGINATED;
	if (admission == NO_FLOW && collides) {
		direct_flow_masqueraded(packet, &scratch->flow);
		*outgoing = OUT_DIRECT;
		return OPENS;
	}
	if (admission == NO_FLOW && from_node && is_bound_to_frontend(skb, scratch)) {
		direct_flow_masqueraded(packet, &scratch->flow);
		*outgoing = OUT_DIRECT;
		return choose_masquerade(skb, skb->ifindex, scratch) ? OPENS : DROPPED;
	}
	/* At an address of this node no socket listens on this port, and the stack rejects the
	 * packet.
	 */
	if (admission == REJECTED && network_flags(&packet->tuple.destination) & NETWORK_LOCAL)
		return NO_FLOW;
	if (admission == NO_FLOW && skb->ingress_ifindex)
		return admit_bypassing_packet(skb, packet, scratch);
	return admission;
}

/* Returns the output device for a host-originated packet to its endpoint, or 0 if there is no
 * route. The stack selected a device for the frontend, so the result can differ.
 */
static __always_inline u32 route_to_endpoint(struct __sk_buff *skb, const struct packet *packet,
					     const struct flow *flow, struct next_hop *next_hop)
{
	struct address source;

	route_source(&source, &packet->tuple.source);
	return route(skb, packet, &source, &flow->endpoint, next_hop);
}

/* Sets `scratch->to` for a packet of `scratch->flow`. */
static __always_inline void host_originated_prepare(const struct packet *packet,
						    struct scratch *scratch)
{
	const struct flow *flow = &scratch->flow;

	count_traffic(flow->service_id, packet->length, true, packet->opens);
	tuple_set(&scratch->to,
		  flow->flags & FLOW_MASQUERADE ? &flow->masquerade : &packet->tuple.source,
		  flow->reply_port, &flow->endpoint, flow->endpoint_port);
}

/* Sends a host-originated packet to its endpoint. The stack has routed the packet to the frontend,
 * so it is redirected past the stack. `scratch->device`: see route_to_endpoint().
 */
static __always_inline int host_originated_send(struct __sk_buff *skb, const struct packet *packet,
						struct scratch *scratch)
{
	return scratch->flow.flags & FLOW_MASQUERADE
		   ? redirect_routed_out(skb, scratch->device, &scratch->next_hop)
		   : deliver(skb, packet);
}

/* Sets `scratch->to` for a packet to the endpoint of `scratch->reply`. */
static __always_inline void forwarded_prepare(const struct packet *packet, struct scratch *scratch)
{
	tuple_set(&scratch->to, &scratch->flow.masquerade, scratch->reply_key.destination_port,
		  &packet->tuple.destination, packet->tuple.destination_port);
}

/* Gives the packet the tuple `scratch->to`, and sends it. All classes of `scratch->outgoing` come
 * here, so that the verifier checks the rewriting of a packet once.
 *
 * The route of forwarded packets and of direct flows is already correct. Their mark prevents a
 * second translation at another device.
 */
static __always_inline int translate_outgoing(struct __sk_buff *skb, struct packet *packet,
					      struct scratch *scratch)
{
	barrier();
	if (scratch->outgoing == OUT_REPLY && !fit_tunnel(skb, packet, scratch->reply.flags))
		return DROP;
	if (!rewrite(skb, packet, &scratch->to))
		return DROP;
	barrier();
	switch (scratch->outgoing) {
	case OUT_REPLY:
		return reply_send(skb, packet, scratch);
	case OUT_HOST_ORIGINATED:
		return host_originated_send(skb, packet, scratch);
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
static __always_inline bool choose_masquerade_of_node(struct __sk_buff *skb, u32 device,
						      struct scratch *scratch)
{
	const struct node *settings = node_get();
	WORD_KEY(key, device);

	if (settings && !settings->reinjection_device)
		record_bypassing(LOOPBACK_IFINDEX);
	if (device_get(device))
		return choose_masquerade(skb, device, scratch);
	if (bypassing.lookup(key))
		return choose_masquerade(skb, skb->ifindex, scratch);
	count_drop(scratch, COUNTER_BYPASSED);
	record_bypassing(device);
	return false;
}

/* Handles packets that can open a flow or that go to the endpoint of a flow. Returns the
 * action, or TRANSLATE.
 */
static __always_inline int egress_to_endpoint(struct __sk_buff *skb, struct packet *packet,
					      enum outgoing outgoing, struct scratch *scratch)
{
	struct flow *flow = &scratch->flow;
	bool opens = false;
	u32 device = 0;

	if (outgoing == OUT_FORWARDED) {
		switch (masquerade(skb, scratch)) {
		case MASQUERADE_SELECTED:
			break;
		case MASQUERADE_PORT_IN_USE:
			opens = true;
			break;
		case MASQUERADE_NO_ADDRESS:
			return DROP;
		default:
			return PASS_ON;
		}
	} else if (outgoing != OUT_HOST_ORIGINATED && outgoing != OUT_DIRECT) {
		if (!is_first(packet))
			return PASS_ON;
		switch (admit_first_packet(skb, packet, &outgoing, scratch)) {
		case OPENS:
			break;
		case REJECTED:
			return answer_rejection(skb, packet, scratch) ? reinject(skb) : DROP;
		case DROPPED:
			return DROP;
		default:
			return PASS_ON;
		}
		opens = packet->opens = true;
		count(COUNTER_PACKET_NEW);
		scratch->flow_key = packet->tuple;
	}
	if (outgoing == OUT_HOST_ORIGINATED && flow->flags & FLOW_MASQUERADE) {
		device = route_to_endpoint(skb, packet, flow, &scratch->next_hop);
		if (!device) {
			count_drop(scratch, COUNTER_NO_ROUTE);
			return DROP;
		}
		if (opens && !choose_masquerade_of_node(skb, device, scratch))
			return DROP;
	}
	scratch->outgoing = outgoing;
	scratch->device = device;
	if (opens && !flow_open(skb, packet, skb->ifindex, 0, scratch))
		return DROP;
	barrier();
	if (scratch->outgoing == OUT_FORWARDED)
		forwarded_prepare(packet, scratch);
	else
		host_originated_prepare(packet, scratch);
	return TRANSLATE;
}

static __always_inline int egress(struct __sk_buff *skb, u32 l3)
{
	struct scratch *scratch = scratch_get();
	struct packet *packet;
	enum outgoing outgoing;
	bool is_error = false;
	int action = TRANSLATE;

	if (mark_get(skb) == MARK_DONE || !scratch)
		return PASS_ON;
	packet = packet_begin(&scratch->packet, l3, AT_EGRESS);
	switch (parse(skb, packet)) {
	case TRANSPORT:
		if (packet->fragment != WHOLE && !fragment_ports(packet))
			return PASS_ON;
		scratch->tuple = packet->tuple;
		break;
	case ICMP:
		if (names_on_link_gateway(skb, packet))
			return DROP;
		if (is_answered_ping_out(skb, packet))
			return answer_echo(skb, packet) ? reinject(skb) : DROP;
		if ((!is_icmp_error(packet) && !is_icmp_redirect(packet)) ||
		    !parse_quoted(skb, packet, AT_EGRESS, scratch))
			return PASS_ON;
		is_error = true;
		break;
	default:
		return PASS_ON;
	}
	happening_reset(scratch);
	outgoing = look_up_outgoing(skb, packet, is_error, scratch);
	if (is_error)
		return icmp_egress(skb, packet, outgoing, scratch);
	if (outgoing == OUT_REPLY) {
		scratch->outgoing = outgoing;
		reply_prepare(packet, scratch);
	} else {
		action = egress_to_endpoint(skb, packet, outgoing, scratch);
	}
	if (action == TRANSLATE)
		action = translate_outgoing(skb, packet, scratch);
	packet_event(scratch);
	return action;
}
