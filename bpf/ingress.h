/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * The ingress program, at the position of PREROUTING. It replaces a frontend by an endpoint in
 * packets from clients. It replaces the masquerade address by the client's address in replies.
 */
#pragma once

#include "admit.h"
#include "answer.h"
#include "dsr.h"
#include "echo.h"
#include "icmp_error.h"
#include "masquerade.h"
#include "reserve.h"
#include "route.h"
#include "unrelated.h"

/* The class of a packet at ingress. */
enum incoming {
	IN_NO_FLOW,
	IN_FROM_CLIENT,	  /* belongs to `view->flow` */
	IN_FROM_ENDPOINT, /* a reply of `view->reply`, whose client is masqueraded */
	/* A reply of `view->reply`. Egress translates it, unless it bypasses the stack. */
	IN_FROM_POD,
};

static __always_inline int send_back(struct __sk_buff *skb)
{
	mark_set(skb, MARK_DONE);
	return bpf_redirect(skb->ifindex, 0);
}

/* Returns the output device if the packet can bypass this node's stack. Returns 0 if the stack must
 * process it. `to` is the packet's destination after translation.
 */
static __always_inline u32 stack_bypass_device(struct __sk_buff *skb, const struct packet *packet,
					       u16 flow_flags, const struct address *from,
					       const struct address *to, struct next_hop *next_hop)
{
	struct device *entry;
	u32 device;

	if (!(flow_flags & FLOW_REDIRECT) || packet->fragment != WHOLE || packet->ttl <= 1)
		return 0;
	device = route(skb, packet, from, to, next_hop);
	entry = device ? device_get(device) : NULL;
	if (!entry)
		return 0;
	if (HAVE(REDIRECT_PEER))
		next_hop->into_pod = entry->flags & DEVICE_PEER && next_hop->has_ethernet &&
				     packet->l3 == ETHERNET_HEADER;
	return device;
}

static __always_inline int redirect_past_stack(struct __sk_buff *skb, const struct packet *packet,
					       u32 device, struct next_hop *next_hop)
{
	count(COUNTER_REDIRECTED);
	/* stack_bypass_device() excludes packets whose TTL is at most 1. */
	if (!write_ttl(skb, packet, packet->ttl - 1))
		return DROP;
	return next_hop->into_pod ? redirect_into_pod(skb, device, next_hop)
				  : redirect_out(skb, device, next_hop);
}

/* Whether an endpoint on this node sends the packet to a client whose flow bypasses the stack. On
 * devices that do not belong to a pod, any host could spoof the endpoint's address.
 */
static __always_inline bool find_reply_of_pod(struct __sk_buff *skb, const struct packet *packet,
					      struct flow_view *view)
{
	const struct node *settings = node_get();
	struct reply *reply;

	if (!settings || !(settings->flags & NODE_REDIRECT) || class_of(skb) != POD)
		return false;
	view->reply_key = view->tuple;
	view->reply_key.side = AT_EGRESS;
	reply = reply_find(NULL, view);
	return reply && view->reply.flags & FLOW_REDIRECT && reply_record(reply, packet, view);
}

/* Classifies `view->tuple` as an incoming packet. `is_error`: the tuple is the reverse of a packet
 * that an ICMP error quotes.
 */
static __always_inline enum incoming look_up_incoming(struct __sk_buff *skb,
						      const struct packet *packet, bool is_error,
						      struct flow_view *view,
						      struct workspace *work)
{
	const struct flow_key *tuple = &view->tuple;
	struct reply *reply;

	if (port_has_use(tuple->protocol, tuple->source_port, PORT_OF_ENDPOINT)) {
		key_of_masqueraded(&view->reply_key, &tuple->source, tuple->source_port,
				   tuple->destination_port, tuple->protocol);
		reply = reply_read(view);
		if (reply && is_masquerade(&view->reply, &tuple->destination) &&
		    reply_belongs_to(reply, NULL, view) &&
		    (is_error || reply_record(reply, packet, view)))
			return IN_FROM_ENDPOINT;
		if (!is_error && find_reply_of_pod(skb, packet, view))
			return IN_FROM_POD;
	}
	/* A frame for a router of the network may have the tuple of a flow: the router returns it
	 * to this node.
	 */
	if (!port_has_use(tuple->protocol, tuple->destination_port, PORT_OF_FRONTEND) ||
	    !is_for_this_node(skb))
		return IN_NO_FLOW;
	return client_find(packet, is_error, view, work) ? IN_FROM_CLIENT : IN_NO_FLOW;
}

/* Prepares the translation of a client's packet to the endpoint. If the packet passes the node's
 * stack, its source is the client's address, and egress masquerades it. If it bypasses the stack,
 * its source is the masquerade address.
 */
static __always_inline int to_endpoint(struct __sk_buff *skb, const struct packet *packet,
				       const struct flow *flow, struct target *target)
{
	const struct address *client = &packet->tuple.source;
	u32 device = 0;

	if (!(flow->flags & FLOW_MASQUERADE) || !address_is_unspecified(&flow->masquerade))
		device = stack_bypass_device(skb, packet, flow->flags, client, &flow->endpoint,
					     &target->next_hop);
	count_traffic(flow->service_id, packet->length, true, packet->opens);
	tuple_to_endpoint(&target->tuple,
			  device && flow->flags & FLOW_MASQUERADE ? &flow->masquerade : client,
			  flow);
	target->device = device;
	target->to_node = false;
	return TRANSLATE;
}

/* Delivers a reply to the node, which is the client of the flow. In a direct flow only a port
 * changes, so the stack accepts the packet without reinjection.
 */
static __always_inline int deliver_reply_to_node(struct __sk_buff *skb, const struct packet *packet,
						 u16 flow_flags)
{
	const struct node *settings = node_get();

	if (!settings || !settings->reinjection_device || flow_flags & FLOW_DIRECT)
		return PASS_ON;
	return deliver(skb, packet);
}

/* Computes the tuple of a reply at ingress. `complete`: the reply is translated completely, because
 * no egress program sees it afterwards. Otherwise the stack sees the endpoint's own address.
 */
static __always_inline void reply_tuple(struct flow_key *to, const struct flow_key *tuple,
					const struct reply *reply, bool complete)
{
	if (complete)
		tuple_of_reply(to, reply);
	else
		tuple_set(to, &tuple->source, tuple->source_port, &reply->client,
			  tuple->destination_port);
}

/* Prepares the translation of a reply. If it passes the stack to an outside client or a pod, egress
 * does the second step. `from_pod`: it was not sent to an address of this node, so there is no
 * first step.
 */
static __always_inline int translate_reply(struct __sk_buff *skb, const struct packet *packet,
					   bool from_pod, const struct reply *reply,
					   struct target *target)
{
	bool client_is_node = reply->flags & FLOW_NODE;
	u32 device = 0;

	if (!client_is_node)
		device = stack_bypass_device(skb, packet, reply->flags, &reply->frontend,
					     &reply->client, &target->next_hop);
	if (from_pod && !device)
		return PASS_ON;
	count_traffic(reply->service_id, packet->length, false, false);
	reply_tuple(&target->tuple, &packet->tuple, reply, client_is_node || device);
	target->device = device;
	target->to_node = client_is_node;
	return TRANSLATE;
}

/* Gives the packet the tuple `target->tuple`, and sends it past the stack to `target->device`, or
 * to the stack. All classes of packets come here, so that the verifier checks the rewriting of a
 * packet once. `reply`: only read for a packet to the node.
 */
static __always_inline int translate_incoming(struct __sk_buff *skb, struct packet *packet,
					      struct target *target, const struct reply *reply)
{
	barrier();
	if (!rewrite(skb, packet, &target->tuple))
		return DROP;
	barrier();
	if (target->device)
		return redirect_past_stack(skb, packet, target->device, &target->next_hop);
	return target->to_node ? deliver_reply_to_node(skb, packet, reply->flags) : PASS_ON;
}

static __always_inline int error_ingress(struct __sk_buff *skb, struct packet *packet,
					 enum incoming incoming, struct scratch *scratch)
{
	const struct flow_key *tuple = &scratch->view.tuple;
	const struct flow *flow = &scratch->view.flow;
	const struct reply *reply = &scratch->view.reply;
	struct flow_key *to = &scratch->target.tuple;
	bool client_is_node = false;

	if (incoming == IN_NO_FLOW ||
	    !address_equal(&packet->tuple.destination, &tuple->destination))
		return PASS_ON;
	if (incoming == IN_FROM_CLIENT) {
		tuple_to_endpoint(to, &tuple->source, flow);
	} else {
		client_is_node = reply->flags & FLOW_NODE;
		reply_tuple(to, tuple, reply, client_is_node);
	}
	if (!rewrite_icmp_error(skb, packet, &scratch->quoted, to, &scratch->work.key))
		return DROP;
	return client_is_node ? deliver_reply_to_node(skb, packet, reply->flags) : PASS_ON;
}

/* Whether a first packet without a Service, to the endpoint of a flow, has the tuple of that flow
 * after its translation here. Packets of the flow itself may reach a second device with a program,
 * but not the client's device again.
 */
static __always_inline bool collides_with_flow(struct __sk_buff *skb, const struct flow_key *tuple,
					       struct flow_key *key)
{
	struct reply *reply;

	if (!port_has_use(tuple->protocol, tuple->destination_port, PORT_OF_ENDPOINT) ||
	    !is_for_this_node(skb))
		return false;
	tuple_reverse(key, tuple);
	key->side = AT_EGRESS;
	reply = replies.lookup(key);
	if (!reply) {
		key_of_masqueraded(key, &tuple->destination, tuple->destination_port,
				   tuple->source_port, tuple->protocol);
		reply = replies.lookup(key);
	}
	return reply && reply->client_port && !is_closed(reply->flags) &&
	       reply->device == skb->ifindex && address_equal(&reply->client, &tuple->source);
}

/* Opens a flow if the first packet of a client is addressed to a frontend, or collides with a flow.
 * Returns TRANSLATE, or the action for a packet that opens none.
 */
static __always_inline int open_incoming(struct __sk_buff *skb, struct packet *packet,
					 struct scratch *scratch)
{
	struct flow_view *view = &scratch->view;
	struct workspace *work = &scratch->work;
	struct next_hop *next_hop = &scratch->target.next_hop;
	struct flow *flow = &view->flow;
	u32 device;

	switch (admit(skb, packet, class_of(skb), view, work)) {
	case OPENS:
		break;
	case REJECTED:
		return answer_rejection(skb, packet, work->bytes) ? send_back(skb) : DROP;
	case DROPPED:
		return DROP;
	default:
		if (!collides_with_flow(skb, &packet->tuple, &work->key))
			return PASS_ON;
		direct_flow(packet, flow);
	}
	device = stack_bypass_device(skb, packet, flow->flags, &packet->tuple.source,
				     &flow->endpoint, next_hop);
	if (device && flow->flags & FLOW_MASQUERADE &&
	    !choose_masquerade(skb, packet, device, view, work))
		return DROP;
	count(COUNTER_PACKET_NEW);
	view->key = packet->tuple;
	if (!flow_open(skb, packet, skb->ifindex, BPF_F_INGRESS, scratch))
		return DROP;
	packet->opens = true;
	return to_endpoint(skb, packet, flow, &scratch->target);
}

/* TAIL_OPEN_IN: the packet belongs to no flow and is the first one of its client. */
static __always_inline int ingress_first(struct __sk_buff *skb, struct scratch *scratch)
{
	struct packet *packet = &scratch->packet;
	struct flow_view *view = &scratch->view;
	int action = open_incoming(skb, packet, scratch);

	if (action == TRANSLATE)
		action = translate_incoming(skb, packet, &scratch->target, &view->reply);
	packet_event(view);
	return action;
}

/* TAIL_ICMP_IN: an ICMP message. */
static __always_inline int ingress_icmp(struct __sk_buff *skb, struct scratch *scratch)
{
	struct packet *packet = &scratch->packet;
	struct flow_view *view = &scratch->view;
	enum incoming incoming;

	if (is_answered_ping(skb, packet) && is_for_this_node(skb))
		return answer_echo(skb, packet) ? send_back(skb) : DROP;
	if (!is_icmp_error(packet) ||
	    !parse_quoted(skb, packet, AT_INGRESS, &scratch->quoted, &view->tuple))
		return PASS_ON;
	happening_reset(&view->happening);
	incoming = look_up_incoming(skb, packet, true, view, &scratch->work);
	if (incoming == IN_NO_FLOW && is_dialed(skb, &view->tuple, &scratch->work))
		tail_calls.call(skb, TAIL_DIAL); /* returns if no such program is loaded */
	return error_ingress(skb, packet, incoming, scratch);
}

static __always_inline int ingress(struct __sk_buff *skb, u32 l3)
{
	struct scratch *scratch;
	struct flow_view *view;
	struct target *target;
	struct packet *packet;
	enum incoming incoming;
	u32 mark = mark_get(skb);
	int action = PASS_ON;

	if (mark) /* set at another device that the packet left by before */
		mark_word(skb) = MARK_NONE;
	if (mark == MARK_RECEIVED) {
		bpf_skb_change_type(skb, PACKET_HOST); /* see receive_at() */
		return PASS_ON;
	}
	if (skb->pkt_type == PACKET_BROADCAST || skb->pkt_type == PACKET_MULTICAST ||
	    is_unrelated(skb, l3, AT_INGRESS))
		return PASS_ON;
	scratch = scratch_get();
	if (!scratch)
		return PASS_ON;
	view = &scratch->view;
	target = &scratch->target;
	packet = packet_begin(&scratch->packet, l3, AT_INGRESS);
	switch (parse(skb, packet)) {
	case TRANSPORT:
		break;
	case ICMP:
		tail_calls.call(skb, TAIL_ICMP_IN);
		return PASS_ON;
	default:
		return PASS_ON;
	}
	if (packet->fragment != WHOLE && !fragment_ports(packet))
		return PASS_ON;
	view->tuple = packet->tuple;
	happening_reset(&view->happening);
	incoming = look_up_incoming(skb, packet, false, view, &scratch->work);
	if (incoming == IN_NO_FLOW) {
		if (is_dialed(skb, &view->tuple, &scratch->work))
			tail_calls.call(skb, TAIL_DIAL); /* returns if it is not loaded */
		if (is_first(packet))
			tail_calls.call(skb, TAIL_OPEN_IN);
	} else if (incoming == IN_FROM_CLIENT) {
		action = to_endpoint(skb, packet, &view->flow, target);
	} else {
		action =
		    translate_reply(skb, packet, incoming == IN_FROM_POD, &view->reply, target);
	}
	if (action == TRANSLATE)
		action = translate_incoming(skb, packet, target, &view->reply);
	packet_event(view);
	return action;
}

/* Whether a packet on a device without Ethernet starts with something other than its IP header. Up
 * to Linux 5.13, tunnels do not remove the outer headers of a received packet ("net: reset MAC
 * header consistently across L3 virtual devices", 5.14). A packet shorter than 8 bytes has no outer
 * headers.
 */
static __always_inline bool has_outer_headers(struct __sk_buff *skb)
{
	u64 begin, ip;

	return !bpf_skb_load_bytes_relative(skb, 0, &ip, sizeof(ip), BPF_HDR_START_NET) &&
	       load_header(skb, 0, &begin, sizeof(begin)) && begin != ip;
}

/* Redirects a packet with outer headers to its own device. For a device without Ethernet, the
 * kernel then removes them, and the program sees the packet again. MARK_STRIPPED prevents a second
 * redirect: a packet that still has outer headers is passed on.
 */
static __always_inline int ingress_without_ethernet(struct __sk_buff *skb)
{
	u32 mark = mark_get(skb);

	if (has_outer_headers(skb)) {
		if (mark)
			return PASS_ON;
		mark_set(skb, MARK_STRIPPED);
		return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
	}
	if (mark == MARK_STRIPPED)
		mark_word(skb) = MARK_NONE;
	return ingress(skb, 0);
}
