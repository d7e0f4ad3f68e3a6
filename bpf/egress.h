/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * POSTROUTING: what goes out is masqueraded, or gets the address back that its client dialed. For
 * what the node itself sends this is its PREROUTING, too.
 */
#pragma once

#include "admit.h"
#include "answer.h"
#include "bypass.h"
#include "icmp_error.h"
#include "reserve.h"
#include "route.h"

/* Back in by the device that it was to leave by, as if somebody beyond had sent it. */
static __always_inline int back_in(struct __sk_buff *skb)
{
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

/* The flow that a quoted packet at egress belongs to, and what it is taken for. */
static __always_inline struct flow *flow_of_quoted(struct __sk_buff *skb, struct packet *quoted,
						   struct flow_key *as, struct scratch *scratch)
{
	struct flow *flow;

	if (mark_get(skb) == MARK_FORWARD) { /* of a client, about what the endpoint sent */
		flow = flow_find(&quoted->tuple, scratch);
		tuple_reverse(as, &quoted->tuple);
		return flow && flow->masquerade_port ? flow : NULL;
	}
	tuple_reverse(as, &quoted->tuple);
	return flow_find(as, scratch);
}

static __always_inline int icmp_egress(struct __sk_buff *skb, struct packet *packet,
				       struct scratch *scratch)
{
	struct packet *quoted = packet_begin(&scratch->quoted, packet->l4 + ICMP_HEADER, AT_EGRESS);
	struct flow_key *as = &scratch->as;
	struct flow *flow;

	if (!parse_quoted(skb, packet, quoted))
		return PASS_ON;
	flow = flow_of_quoted(skb, quoted, as, scratch);
	if (!flow || !address_equal(&packet->tuple.destination, &as->destination))
		return PASS_ON;
	/* The node's own stack complains of what it was given back, to nobody who would know it; or
	 * knows of a better way to an endpoint whose address its client never saw. A direct flow is
	 * known to its endpoint, by the port that it was given.
	 */
	if ((flow->way != BETWEEN && !(flow->flags & FLOW_DIRECT)) || is_icmp_redirect(packet))
		return DROP;
	if (mark_get(skb) == MARK_FORWARD || flow->flags & FLOW_DIRECT)
		flow_to_endpoint(&scratch->to, flow);
	else
		flow_to_client(&scratch->to, flow);
	return rewrite_icmp_error(skb, packet, quoted, &scratch->to, scratch) ? PASS_ON : DROP;
}

/* By which device a packet to an endpoint leaves, which for the node's own is not the one that led
 * to the frontend; 0: there is no way. From ::1 there never is one (rt6_need_strict()), but that is
 * not where the packet will come from.
 */
static __always_inline u32 way_to_endpoint(struct __sk_buff *skb, const struct packet *packet,
					   const struct flow *flow)
{
	struct address any;

	if (flow->way == BETWEEN || flow->flags & FLOW_DIRECT)
		return skb->ifindex;
	address_unspecified_like(&any, &flow->client);
	return route(skb, packet, address_is_loopback(&flow->client) ? &any : &flow->client,
		     &flow->endpoint);
}

static __always_inline int translate_at_egress(struct __sk_buff *skb, struct packet *packet,
					       struct scratch *scratch, bool to_endpoint)
{
	struct flow *flow = &scratch->mine;
	struct flow_key *to = &scratch->to;
	bool masqueraded = to_endpoint && flow->flags & FLOW_MASQUERADE;
	u32 device = 0;

	flow_seen(flow, packet->tcp_flags, to_endpoint, scratch);
	if (masqueraded) {
		device = way_to_endpoint(skb, packet, flow);
		if (!device) {
			count(COUNTER_NO_ROUTE);
			return DROP;
		}
		if (!flow->masquerade_port && !masquerade(skb, flow, device, scratch))
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

/* What a packet that the stack marked to be masqueraded has to do with flows. */
static __always_inline enum standing standing_of_forwarded(const struct packet *packet,
							   struct scratch *scratch)
{
	struct flow *flow;

	tuple_reverse(&scratch->key, &packet->tuple);
	flow = flow_find(&scratch->key, scratch);
	if (flow && flow->way == BETWEEN && flow->flags & FLOW_MASQUERADE) {
		scratch->mine = *flow;
		return KNOWN;
	}
	/* Somebody else has masqueraded it, as the rules of a CNI do, and will undo that. */
	if (network_flags(&packet->tuple.source) & NETWORK_LOCAL)
		return NO_FLOW;
	count(COUNTER_INCONSISTENT); /* better no packet than one that gets no answer */
	return DROPPED;
}

/* Whether it is an address that endpoints may know our clients by, where they are reached by the
 * packet's device.
 */
static __always_inline bool masquerades_with(struct __sk_buff *skb, const struct address *address)
{
	u32 ifindex = skb->ifindex;
	struct device *device = devices.lookup(&ifindex);

	return device && address_equal(address_of_device(device, address), address);
}

/* What a packet of no flow has to do with flows, that comes from the node itself, as an OUTPUT
 * chain would see it.
 */
static __always_inline enum standing
standing_of_node(struct __sk_buff *skb, const struct packet *packet, struct scratch *scratch)
{
	enum standing standing;

	if (!is_first(packet))
		return NO_FLOW;
	standing = admit(skb, packet, NODE, scratch);
	if (standing == NO_FLOW)
		return direct_flow(packet, scratch) ? OPENS : NO_FLOW;
	/* At its own address nobody listens, and the stack says so itself. */
	if (standing == REJECTED && network_flags(&packet->tuple.destination) & NETWORK_LOCAL)
		return NO_FLOW;
	return standing;
}

/* What a packet that goes out has to do with flows. */
static __always_inline enum standing
standing_at_egress(struct __sk_buff *skb, struct packet *packet, struct scratch *scratch, u32 mark)
{
	struct flow *flow;

	if (mark == MARK_FORWARD) {
		enum standing standing = standing_of_forwarded(packet, scratch);

		if (standing != NO_FLOW)
			return standing;
	}
	flow = flow_find(&packet->tuple, scratch);
	/* A masqueraded flow's replies came in by our ingress; what else looks so is none. */
	if (flow && flow->way == BETWEEN && flow->masquerade_port && mark != MARK_REPLY)
		return NO_FLOW;
	if (flow && flow->way == BETWEEN ? !(packet->tcp_flags & TCP_SYN && flow_is_closed(flow))
					 : flow && goes_on(flow, packet, scratch)) {
		scratch->mine = *flow;
		return KNOWN;
	}
	if (flow) /* that ended: what follows this packet would be taken for it */
		flows.delete(&packet->tuple);
	if (!skb->ingress_ifindex)
		return standing_of_node(skb, packet, scratch);
	/* Masqueraded by somebody else, who does not know of our ports. */
	if (is_first(packet) && masquerades_with(skb, &packet->tuple.source) &&
	    direct_flow(packet, scratch))
		return OPENS;
	return standing_of_bypass(skb, packet);
}

static __always_inline int egress(struct __sk_buff *skb, u32 l3)
{
	struct scratch *scratch = scratch_get();
	struct packet *packet;
	u32 mark = mark_get(skb);
	bool to_endpoint;

	if (mark == MARK_DONE || !scratch)
		return PASS_ON;
	packet = packet_begin(&scratch->packet, l3, AT_EGRESS);
	switch (parse(skb, packet)) {
	case TRANSPORT:
		break;
	case ICMP:
		if (is_icmp_error(packet) || is_icmp_redirect(packet))
			return icmp_egress(skb, packet, scratch);
		if (is_echo_of_ours(packet))
			return answer_echo(skb, packet) ? back_in(skb) : DROP;
		return PASS_ON;
	default:
		return PASS_ON;
	}
	if (packet->fragment != WHOLE && !fragment_ports(packet))
		return PASS_ON;
	switch (standing_at_egress(skb, packet, scratch, mark)) {
	case KNOWN:
		break;
	case OPENS:
		scratch->now = time_now();
		if (!flow_open(skb, packet, scratch))
			return DROP;
		break;
	case REJECTED:
		return answer_refusal(skb, packet, scratch) ? back_in(skb) : DROP;
	case DROPPED:
		return DROP;
	default:
		return PASS_ON;
	}
	to_endpoint = mark == MARK_FORWARD || scratch->mine.way == FROM_CLIENT;
	return translate_at_egress(skb, packet, scratch, to_endpoint);
}
