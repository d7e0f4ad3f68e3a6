/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * The packet path: what becomes of a packet at ingress and at egress. See docs/architecture.md for
 * the picture.
 */
#pragma once

#include "answer.h"
#include "flow.h"
#include "icmp_error.h"
#include "packet.h"
#include "rewrite.h"
#include "route.h"
#include "service.h"

#define BYPASS_SAMPLE 15 /* of a pod's datagrams that nobody translated, one in 16 is looked at */

enum client_class {
	POD,
	NODE,
	OUTSIDE,
};

enum admission {
	NO_SERVICE,
	ADMITTED, /* there is a flow now */
	REFUSED_BY_ANSWER,
	DISCARDED,
};

static __always_inline bool is_first(const struct packet *packet)
{
	if (packet->tuple.protocol == IPPROTO_UDP)
		return packet->fragment != LATER;
	return (packet->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

static __always_inline bool source_admitted(const struct service *service,
					    const struct address *source)
{
	struct source_range_key key = {.length = 160, .service_id = service->id, .source = *source};

	return source_ranges.lookup(&key) != NULL;
}

/* A UDP socket of this node that is connected to the sender gets its datagrams, be its port a
 * NodePort or not: the kernel gives such a port out where ip_local_port_range has it.
 */
static __always_inline bool is_for_connected_socket(struct __sk_buff *skb,
						    const struct packet *packet)
{
#if defined(HAVE_SKC_LOOKUP_TCP) && defined(HAVE_SK_LOOKUP_UDP)
	const struct flow_key *key = &packet->tuple;
	struct bpf_sock_tuple tuple = {};
	u32 size;

	if (key->protocol != IPPROTO_UDP)
		return false;
	size = socket_tuple(&tuple, &key->source, key->source_port, &key->destination,
			    key->destination_port);
	return udp_socket_gets(skb, &tuple, size, true);
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

/* Whether, and to which endpoint, a client may open a flow to what it dials; then `scratch->flow`
 * is that flow, of which nothing is remembered yet.
 */
static __always_inline enum admission admit(struct __sk_buff *skb, const struct packet *packet,
					    enum client_class class, struct scratch *scratch)
{
	const struct flow_key *tuple = &packet->tuple;
	struct service_key dialed = {.address = tuple->destination,
				     .port = tuple->destination_port,
				     .protocol = tuple->protocol};
	struct affinity_key client = {.client = tuple->source, .client_kind = CLIENT_ADDRESS};
	struct flow *flow = &scratch->flow;
	struct service service;
	struct slot_range range;
	struct endpoint *endpoint;
	u16 local, usable;
	u32 id = 0;

	/* What a device overhears; a pod's port of a bridge sees what is for the bridge. */
	if (class == OUTSIDE && skb->pkt_type == PACKET_OTHERHOST)
		return NO_SERVICE;
	if (!service_find(&dialed, class == NODE, &service))
		return NO_SERVICE;
	if (service.kind == KIND_NODE_PORT && class != NODE && is_for_connected_socket(skb, packet))
		return NO_SERVICE;
	if (service.flags & SERVICE_RESTRICTED &&
	    !(class == NODE && service.flags & SERVICE_NODE_ADMITTED) &&
	    !source_admitted(&service, &tuple->source)) {
		count(COUNTER_SOURCE_REFUSED);
		return DISCARDED;
	}
	range = class == OUTSIDE ? service.external : service.internal;
	if (!range.count) {
		bool reject = service.flags & SERVICE_REJECT;

		count(reject ? COUNTER_PACKET_REJECTED : COUNTER_PACKET_DROPPED);
		return reject ? REFUSED_BY_ANSWER : DISCARDED;
	}
	local = class == OUTSIDE ? SERVICE_EXTERNAL_LOCAL : SERVICE_INTERNAL_LOCAL;
	usable = service.flags & local ? ENDPOINT_LOCAL : ENDPOINT_CLUSTER;
	client.service_id = service.id;
	endpoint = endpoint_choose(&service, &range, usable, &client, &id);
	if (!endpoint) {
		count(COUNTER_INCONSISTENT);
		return DISCARDED;
	}
	if (tuple->protocol == IPPROTO_SCTP && endpoint->port != dialed.port) {
		count(COUNTER_PORT_UNEQUAL);
		return DISCARDED;
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
	return ADMITTED;
}

/* Remember `scratch->flow`: what undoes it first, so that no reply is met by surprise. */
static __always_inline bool flow_open(struct scratch *scratch, u64 now)
{
	struct flow *flow = &scratch->flow;

	flow->last_seen = now;
	switch (flow_reserve_between(scratch, now)) {
	case NO_PORT:
		count(COUNTER_PORTS_EXHAUSTED);
		return false;
	case NO_ROOM:
		count(COUNTER_FLOWS_FULL);
		return false;
	default:
		break;
	}
	flow->way = FROM_CLIENT;
	flow_key_of(&scratch->key, flow, FROM_CLIENT);
	if (flow_write(&scratch->key, flow, false)) {
		count(COUNTER_FLOWS_FULL);
		return false;
	}
	count(COUNTER_PACKET_NEW);
	scratch->mine = *flow;
	return true;
}

/* Ids are given again, so the place is compared, too. */
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
static __always_inline bool frontend_is_in_force(const struct flow *flow)
{
	struct service_key key = {
	    .address = flow->frontend, .port = flow->frontend_port, .protocol = flow->protocol};
	struct service *service;

	if (flow->flags & FLOW_DIRECT)
		return true;
	service = services.lookup(&key);
	if (!service) {
		address_unspecified_like(&key.address, &flow->frontend);
		service = services.lookup(&key);
	}
	return service && service->id == flow->service_id;
}

/* Whether the packet belongs to the flow that has its tuple, and does not begin another one. A
 * datagram does where endpoint or frontend are gone, since UDP itself never ends. A SYN does after
 * the end of the flow, or where its endpoint is gone, unless that has just answered.
 */
static __always_inline bool goes_on(const struct flow *flow, const struct packet *packet)
{
	if (flow->protocol == IPPROTO_UDP)
		return endpoint_is_in_force(flow) && frontend_is_in_force(flow);
	if (!is_first(packet))
		return true;
	if (flow_is_closed(flow))
		return false;
	return endpoint_is_in_force(flow) ||
	       (flow->protocol == IPPROTO_TCP &&
		(flow->flags & (FLOW_REPLIED | FLOW_ESTABLISHED)) == FLOW_REPLIED);
}

/* The entry that has this key, unless it is over. */
static __always_inline struct flow *flow_find(struct flow_key *key, u64 *now)
{
	struct flow *flow = flows.lookup(key);

	if (!flow)
		return NULL;
	*now = time_now(); /* it costs as much as parsing: not for packets of no flow */
	if (*now - flow->last_seen >= NSEC_PER_SEC && flow_is_over(flow, *now))
		return NULL;
	return flow;
}

/* Choose the address and port by which the endpoint sees the client of `mine`, and tell its
 * entries. `ifindex` is the device towards the endpoint. False: it is counted why not.
 */
static __always_inline bool masquerade(struct __sk_buff *skb, struct flow *mine, u32 ifindex,
				       u64 now, struct scratch *scratch)
{
	struct device *device = devices.lookup(&ifindex);

	if (!device) {
		count(COUNTER_NO_ADDRESS);
		return false;
	}
	scratch->flow = *mine;
	scratch->flow.masquerade = address_is_v4(&mine->endpoint) ? device->v4 : device->v6;
	if (address_is_unspecified(&scratch->flow.masquerade)) {
		count(COUNTER_NO_ADDRESS);
		return false;
	}
	scratch->flow.last_seen = now;
	switch (flow_reserve_masquerade(skb, scratch, now, mine->flags & FLOW_DIRECT)) {
	case NO_PORT:
		count(COUNTER_PORTS_EXHAUSTED);
		return false;
	case NO_ROOM:
		count(COUNTER_FLOWS_FULL);
		return false;
	default:
		break;
	}
	mine->masquerade = scratch->flow.masquerade;
	mine->masquerade_port = scratch->flow.masquerade_port;
	mine->last_seen = now;
	flow_tell_all(mine, scratch);
	return true;
}

/* To the node itself, whose own flow it is. What it dialed may have been the endpoint as such: then
 * nothing but a port is given back, and the packet finds its way by itself.
 */
static __always_inline int to_node(struct __sk_buff *skb, const struct packet *packet,
				   const struct flow *flow)
{
	struct node *settings = node_get();

	if (!settings || !settings->inlet || flow->flags & FLOW_DIRECT)
		return PASS_ON;
	return deliver(skb, packet);
}

/* The device by which a packet may leave at once, past this node's stack; 0: it is for the stack.
 */
static __always_inline u32 way_past_stack(struct __sk_buff *skb, const struct packet *packet,
					  const struct flow *flow, bool to_endpoint)
{
	u32 device;

	if (!(flow->flags & FLOW_REDIRECT) || packet->fragment != WHOLE || packet->ttl <= 1)
		return 0;
	device = route(skb, packet, to_endpoint ? &flow->client : &flow->frontend,
		       to_endpoint ? &flow->endpoint : &flow->client);
	return device && devices.lookup(&device) ? device : 0;
}

/* What a packet becomes at ingress; `past_stack`: both translations are done at once. */
static __always_inline void ingress_target(struct flow_key *to, const struct flow *flow,
					   bool past_stack)
{
	if (flow->way == FROM_ENDPOINT) {
		if (past_stack || flow->flags & FLOW_NODE)
			flow_to_client(to, flow);
		else
			tuple_set(to, &flow->endpoint, flow->endpoint_port, &flow->client,
				  flow->between_port);
	} else if (past_stack) {
		flow_to_endpoint(to, flow);
	} else {
		flow_between(to, flow);
	}
}

static __always_inline int translate_at_ingress(struct __sk_buff *skb, struct packet *packet,
						struct scratch *scratch, u64 now)
{
	struct flow *flow = &scratch->mine;
	struct flow_key *to = &scratch->to;
	bool to_endpoint = flow->way == FROM_CLIENT;
	u32 device;

	flow_seen(flow, packet->tcp_flags, to_endpoint, now, scratch);
	device = way_past_stack(skb, packet, flow, to_endpoint);
	if (device && to_endpoint && !flow->masquerade_port &&
	    !masquerade(skb, flow, device, now, scratch))
		return DROP;
	if (to_endpoint || device || flow->flags & FLOW_NODE) /* others are counted at egress */
		carried(flow->service_id, packet->length, to_endpoint, packet->opens);
	ingress_target(to, flow, device);
	if (!rewrite(skb, packet, to))
		return DROP;
	if (device) {
		count(COUNTER_REDIRECTED);
		return decrement_ttl(skb, packet) ? redirect_out(skb, device) : DROP;
	}
	if (flow->flags & FLOW_NODE)
		return to_node(skb, packet, flow);
	if (flow->flags & FLOW_MASQUERADE)
		mark_set(skb, to_endpoint ? MARK_FORWARD : MARK_REPLY);
	return PASS_ON;
}

/* An error about a packet of a flow, at ingress. */
static __always_inline int icmp_ingress(struct __sk_buff *skb, struct packet *packet,
					struct scratch *scratch)
{
	struct packet quoted = {.l3 = packet->l4 + ICMP_HEADER, .tuple.side = AT_INGRESS};
	struct flow_key as;
	struct flow *flow;
	u64 now;

	if (!parse_quoted(skb, packet, &quoted))
		return PASS_ON;
	tuple_reverse(&as, &quoted.tuple);
	flow = flow_find(&as, &now);
	if (!flow || !address_equal(&packet->tuple.destination, &as.destination))
		return PASS_ON;
	ingress_target(&scratch->to, flow, false);
	if (!rewrite_icmp_error(skb, packet, &quoted, &scratch->to, scratch))
		return DROP;
	if (flow->flags & FLOW_NODE)
		return to_node(skb, packet, flow);
	if (flow->flags & FLOW_MASQUERADE)
		mark_set(skb, flow->way == FROM_CLIENT ? MARK_FORWARD : MARK_REPLY);
	return PASS_ON;
}

/* A ping of an address that is none of this node's, and that some frontend has. */
static __always_inline bool is_answered_echo(struct packet *packet)
{
	struct address *dialed = &packet->tuple.destination;

	if (!is_echo_request(packet) || packet->fragment != WHOLE ||
	    !is_answerable(&packet->tuple.source) || !frontend_addresses.lookup(dialed) ||
	    network_flags(dialed) & NETWORK_LOCAL)
		return false;
	count(COUNTER_ECHO_ANSWERED);
	return true;
}

static __always_inline enum client_class class_of(struct __sk_buff *skb)
{
	u32 ifindex = skb->ifindex;
	struct device *device = devices.lookup(&ifindex);

	return device && device->flags & DEVICE_POD ? POD : OUTSIDE;
}

/* Back out by the device that it came in by, as if somebody beyond had sent it. */
static __always_inline int back_out(struct __sk_buff *skb)
{
	mark_set(skb, MARK_DONE);
	return bpf_redirect(skb->ifindex, 0);
}

static __always_inline bool answer_refusal(struct __sk_buff *skb, struct packet *packet,
					   struct scratch *scratch)
{
	if (!is_answerable(&packet->tuple.source))
		return false;
	if (packet->tuple.protocol == IPPROTO_TCP)
		return answer_reset(skb, packet);
	return answer_unreachable(skb, packet, scratch->bytes);
}

/* PREROUTING: what comes in is given the endpoint's address, or gets its client's back. */
static __always_inline int ingress(struct __sk_buff *skb, u32 l3)
{
	struct packet packet = {.l3 = l3, .tuple.side = AT_INGRESS};
	struct scratch *scratch = scratch_get();
	struct flow *flow;
	u64 now = 0;

	if (mark_get(skb) || !scratch) /* a device above has done it, as a bridge's port */
		return PASS_ON;
	if (skb->pkt_type == PACKET_BROADCAST || skb->pkt_type == PACKET_MULTICAST)
		return PASS_ON;
	switch (parse(skb, &packet)) {
	case TRANSPORT:
		break;
	case ICMP:
		if (is_icmp_error(&packet))
			return icmp_ingress(skb, &packet, scratch);
		if (is_answered_echo(&packet))
			return answer_echo(skb, &packet) ? back_out(skb) : DROP;
		return PASS_ON;
	default:
		return PASS_ON;
	}
	if (packet.fragment != WHOLE && !fragment_ports(&packet))
		return PASS_ON;
	flow = flow_find(&packet.tuple, &now);
	if (!flow || (flow->way == FROM_CLIENT && !goes_on(flow, &packet))) {
		if (!is_first(&packet))
			return PASS_ON;
		switch (admit(skb, &packet, class_of(skb), scratch)) {
		case ADMITTED:
			break;
		case REFUSED_BY_ANSWER:
			return answer_refusal(skb, &packet, scratch) ? back_out(skb) : DROP;
		case DISCARDED:
			return DROP;
		default:
			if (flow) /* that ended: what follows would be taken for it */
				flows.delete(&packet.tuple);
			return PASS_ON;
		}
		now = time_now();
		if (!flow_open(scratch, now))
			return DROP;
		packet.opens = true;
	} else {
		scratch->mine = *flow;
	}
	return translate_at_ingress(skb, &packet, scratch, now);
}

/* Make `scratch->flow` where the node dials the endpoint itself, from a port by which the endpoint
 * knows one of our clients.
 */
static __always_inline bool direct_flow(const struct packet *packet, struct scratch *scratch)
{
	u64 now;
	struct flow *taken;

	tuple_reverse(&scratch->key, &packet->tuple);
	scratch->key.side = AT_INGRESS;
	taken = flow_find(&scratch->key, &now);
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

/* A pod's packet to a frontend that came as far as this has bypassed the socket path, and no
 * program is on the pod's device: tell the agent, which puts one there.
 */
static __always_inline void note_bypass(struct __sk_buff *skb, const struct packet *packet)
{
	struct service_key dialed = {.address = packet->tuple.destination,
				     .port = packet->tuple.destination_port,
				     .protocol = packet->tuple.protocol};
	u32 device = skb->ingress_ifindex;
	u64 now;

	if (!is_first(packet) ||
	    (packet->tuple.protocol == IPPROTO_UDP && bpf_get_prandom_u32() & BYPASS_SAMPLE))
		return;
	if (!port_is_served(dialed.protocol, dialed.port) || !services.lookup(&dialed) ||
	    devices.lookup(&device))
		return;
	count(COUNTER_BYPASSED);
	now = time_now();
	bypassing.update(&device, &now);
}

/* The flow that a quoted packet at egress belongs to, and what it is taken for. */
static __always_inline struct flow *flow_of_quoted(struct __sk_buff *skb, struct packet *quoted,
						   struct flow_key *as)
{
	struct flow *flow;
	u64 now;

	if (mark_get(skb) == MARK_FORWARD) { /* of a client, about what the endpoint sent */
		flow = flow_find(&quoted->tuple, &now);
		tuple_reverse(as, &quoted->tuple);
		return flow && flow->masquerade_port ? flow : NULL;
	}
	tuple_reverse(as, &quoted->tuple);
	return flow_find(as, &now);
}

static __always_inline int icmp_egress(struct __sk_buff *skb, struct packet *packet,
				       struct scratch *scratch)
{
	struct packet quoted = {.l3 = packet->l4 + ICMP_HEADER, .tuple.side = AT_EGRESS};
	struct flow_key as;
	struct flow *flow;

	if (!parse_quoted(skb, packet, &quoted))
		return PASS_ON;
	flow = flow_of_quoted(skb, &quoted, &as);
	if (!flow || !address_equal(&packet->tuple.destination, &as.destination))
		return PASS_ON;
	/* The node's own stack complains of what it was given back, to nobody who would know it; or
	 * knows of a better way to an endpoint whose address its client never saw.
	 */
	if (flow->way != BETWEEN || is_icmp_redirect(packet))
		return DROP;
	if (mark_get(skb) == MARK_FORWARD)
		flow_to_endpoint(&scratch->to, flow);
	else
		flow_to_client(&scratch->to, flow);
	return rewrite_icmp_error(skb, packet, &quoted, &scratch->to, scratch) ? PASS_ON : DROP;
}

/* A flow that the node itself opens, as an OUTPUT chain would see it; false: `verdict` is all. */
static __always_inline bool flow_of_node(struct __sk_buff *skb, struct packet *packet,
					 struct scratch *scratch, u64 *now, int *verdict)
{
	*verdict = PASS_ON;
	if (!is_first(packet))
		return false;
	switch (admit(skb, packet, NODE, scratch)) {
	case ADMITTED:
		break;
	case REFUSED_BY_ANSWER: /* at its own address nobody listens, and the stack says so itself
				 */
		if (network_flags(&packet->tuple.destination) & NETWORK_LOCAL)
			return false;
		*verdict = answer_refusal(skb, packet, scratch)
			       ? bpf_redirect(skb->ifindex, BPF_F_INGRESS)
			       : DROP;
		return false;
	case DISCARDED:
		*verdict = DROP;
		return false;
	default:
		if (!direct_flow(packet, scratch))
			return false;
	}
	*verdict = DROP;
	packet->opens = true;
	*now = time_now();
	return flow_open(scratch, *now);
}

/* By which device a packet to an endpoint leaves, which for the node's own is not the one that led
 * to the frontend; 0: there is no way.
 */
static __always_inline u32 way_to_endpoint(struct __sk_buff *skb, const struct packet *packet,
					   const struct flow *flow)
{
	if (flow->way == BETWEEN || flow->flags & FLOW_DIRECT)
		return skb->ifindex;
	return route(skb, packet, &flow->client, &flow->endpoint);
}

static __always_inline int translate_at_egress(struct __sk_buff *skb, struct packet *packet,
					       struct scratch *scratch, bool to_endpoint, u64 now)
{
	struct flow *flow = &scratch->mine;
	struct flow_key *to = &scratch->to;
	bool masqueraded = to_endpoint && flow->flags & FLOW_MASQUERADE;
	u32 device = 0;

	flow_seen(flow, packet->tcp_flags, to_endpoint, now, scratch);
	if (masqueraded) {
		device = way_to_endpoint(skb, packet, flow);
		if (!device) {
			count(COUNTER_NO_ROUTE);
			return DROP;
		}
		if (!flow->masquerade_port && !masquerade(skb, flow, device, now, scratch))
			return DROP;
	}
	if (!to_endpoint || flow->way == FROM_CLIENT) /* others were counted at ingress */
		carried(flow->service_id, packet->length, to_endpoint, packet->opens);
	if (to_endpoint)
		flow_to_endpoint(to, flow);
	else
		flow_to_client(to, flow);
	if (!rewrite(skb, packet, to))
		return DROP;
	if (flow->way == BETWEEN || flow->flags & FLOW_DIRECT) {
		mark_set(skb, MARK_DONE);
		return PASS_ON;
	}
	return masqueraded ? redirect_out(skb, device) : deliver(skb, packet);
}

static __always_inline bool flow_copy(struct scratch *scratch, const struct flow *flow)
{
	scratch->mine = *flow;
	return true;
}

/* Find the flow that a packet at egress is of, into `scratch->mine`; false: `verdict` is all. */
static __always_inline bool flow_at_egress(struct __sk_buff *skb, struct packet *packet,
					   struct scratch *scratch, u32 mark, u64 *now,
					   int *verdict)
{
	struct flow *flow;

	*verdict = PASS_ON;
	if (mark == MARK_FORWARD) {
		tuple_reverse(&scratch->key, &packet->tuple);
		flow = flow_find(&scratch->key, now);
		if (flow && flow->way == BETWEEN && flow->flags & FLOW_MASQUERADE)
			return flow_copy(scratch, flow);
		/* Somebody else has masqueraded it, as the rules of a CNI do, and will undo that.
		 */
		if (network_flags(&packet->tuple.source) & NETWORK_LOCAL)
			return false;
		count(COUNTER_INCONSISTENT); /* better no packet than one that gets no answer */
		*verdict = DROP;
		return false;
	}
	flow = flow_find(&packet->tuple, now);
	if (flow && flow->way == BETWEEN) {
		/* A masqueraded flow's replies came in by our ingress; what else looks so is none.
		 */
		if (flow->masquerade_port && mark != MARK_REPLY)
			return false;
		/* Nor is what opens another connection after the end of this one. */
		if (packet->tcp_flags & TCP_SYN && flow_is_closed(flow)) {
			flows.delete(&packet->tuple);
			return false;
		}
		return flow_copy(scratch, flow);
	}
	if (flow && goes_on(flow, packet))
		return flow_copy(scratch, flow);
	if (flow) /* that ended: what follows this packet would be taken for it */
		flows.delete(&packet->tuple);
	if (!skb->ingress_ifindex)
		return flow_of_node(skb, packet, scratch, now, verdict);
	/* Masqueraded by somebody else, who does not know of our ports. */
	if (packet->tuple.protocol == IPPROTO_TCP && is_first(packet) &&
	    network_flags(&packet->tuple.source) & NETWORK_LOCAL && direct_flow(packet, scratch)) {
		*verdict = DROP;
		*now = time_now();
		return flow_open(scratch, *now);
	}
	note_bypass(skb, packet);
	return false;
}

/* POSTROUTING: what goes out is masqueraded, or gets the address back that its client dialed. */
static __always_inline int egress(struct __sk_buff *skb, u32 l3)
{
	struct packet packet = {.l3 = l3, .tuple.side = AT_EGRESS};
	struct scratch *scratch = scratch_get();
	u32 mark = mark_get(skb);
	u64 now = 0;
	bool to_endpoint;
	int verdict;

	if (mark == MARK_DONE || !scratch)
		return PASS_ON;
	switch (parse(skb, &packet)) {
	case TRANSPORT:
		break;
	case ICMP:
		if (is_icmp_error(&packet) || is_icmp_redirect(&packet))
			return icmp_egress(skb, &packet, scratch);
		if (is_answered_echo(&packet))
			return answer_echo(skb, &packet) ? bpf_redirect(skb->ifindex, BPF_F_INGRESS)
							 : DROP;
		return PASS_ON;
	default:
		return PASS_ON;
	}
	if (packet.fragment != WHOLE && !fragment_ports(&packet))
		return PASS_ON;
	if (!flow_at_egress(skb, &packet, scratch, mark, &now, &verdict))
		return verdict;
	to_endpoint = mark == MARK_FORWARD || scratch->mine.way == FROM_CLIENT;
	return translate_at_egress(skb, &packet, scratch, to_endpoint, now);
}
