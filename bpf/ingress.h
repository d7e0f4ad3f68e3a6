/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * PREROUTING: what comes in is given the endpoint's address, or gets its client's back.
 */
#pragma once

#include "admit.h"
#include "answer.h"
#include "icmp_error.h"
#include "reserve.h"
#include "route.h"

/* Back out by the device that it came in by, as if somebody beyond had sent it. */
static __always_inline int back_out(struct __sk_buff *skb)
{
	mark_set(skb, MARK_DONE);
	return bpf_redirect(skb->ifindex, 0);
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

static __always_inline int translate_at_ingress(struct __sk_buff *skb, struct packet *packet,
						struct scratch *scratch)
{
	struct flow *flow = &scratch->mine;
	struct flow_key *to = &scratch->to;
	bool to_endpoint = flow->way == FROM_CLIENT;
	u32 device;

	flow_seen(flow, packet->tcp_flags, to_endpoint, scratch);
	device = way_past_stack(skb, packet, flow, to_endpoint);
	if (device && to_endpoint && !flow->masquerade_port &&
	    !masquerade(skb, flow, device, scratch))
		return DROP;
	if (to_endpoint || device || flow->flags & FLOW_NODE) /* others are counted at egress */
		carried(flow->service_id, packet->length, to_endpoint, packet->opens);
	ingress_target(to, flow, device);
	if (!rewrite(skb, packet, to))
		return DROP;
	if (device) {
		count(COUNTER_REDIRECTED);
		/* way_past_stack() left those to the stack that have no hop left. */
		return write_ttl(skb, packet, packet->ttl - 1) ? redirect_out(skb, device) : DROP;
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
	struct packet *quoted =
	    packet_begin(&scratch->quoted, packet->l4 + ICMP_HEADER, AT_INGRESS);
	struct flow_key *as = &scratch->as;
	struct flow *flow;

	if (!parse_quoted(skb, packet, quoted))
		return PASS_ON;
	tuple_reverse(as, &quoted->tuple);
	flow = flow_find(as, scratch);
	if (!flow || !address_equal(&packet->tuple.destination, &as->destination))
		return PASS_ON;
	ingress_target(&scratch->to, flow, false);
	if (!rewrite_icmp_error(skb, packet, quoted, &scratch->to, scratch))
		return DROP;
	if (flow->flags & FLOW_NODE)
		return to_node(skb, packet, flow);
	if (flow->flags & FLOW_MASQUERADE)
		mark_set(skb, flow->way == FROM_CLIENT ? MARK_FORWARD : MARK_REPLY);
	return PASS_ON;
}

/* What a packet that came in has to do with flows. */
static __always_inline enum standing
standing_at_ingress(struct __sk_buff *skb, struct packet *packet, struct scratch *scratch)
{
	struct flow *flow = flow_find(&packet->tuple, scratch);
	enum standing standing;

	if (flow && (flow->way != FROM_CLIENT || goes_on(flow, packet, scratch))) {
		scratch->mine = *flow;
		return KNOWN;
	}
	if (!is_first(packet))
		return NO_FLOW;
	standing = admit(skb, packet, class_of(skb), scratch);
	if (flow && standing == NO_FLOW) /* that ended: what follows would be taken for it */
		flows.delete(&packet->tuple);
	return standing;
}

static __always_inline int ingress(struct __sk_buff *skb, u32 l3)
{
	struct scratch *scratch = scratch_get();
	struct packet *packet;

	if (mark_get(skb) || !scratch) /* a device above has done it, as a bridge's port */
		return PASS_ON;
	if (skb->pkt_type == PACKET_BROADCAST || skb->pkt_type == PACKET_MULTICAST)
		return PASS_ON;
	packet = packet_begin(&scratch->packet, l3, AT_INGRESS);
	switch (parse(skb, packet)) {
	case TRANSPORT:
		break;
	case ICMP:
		if (is_icmp_error(packet))
			return icmp_ingress(skb, packet, scratch);
		if (is_echo_of_ours(packet))
			return answer_echo(skb, packet) ? back_out(skb) : DROP;
		return PASS_ON;
	default:
		return PASS_ON;
	}
	if (packet->fragment != WHOLE && !fragment_ports(packet))
		return PASS_ON;
	switch (standing_at_ingress(skb, packet, scratch)) {
	case KNOWN:
		break;
	case OPENS:
		scratch->now = time_now();
		if (!flow_open(skb, packet, scratch))
			return DROP;
		break;
	case REJECTED:
		return answer_refusal(skb, packet, scratch) ? back_out(skb) : DROP;
	case DROPPED:
		return DROP;
	default:
		return PASS_ON;
	}
	return translate_at_ingress(skb, packet, scratch);
}

/* Whether a packet of a device without Ethernet begins with something else than its IP header: up
 * to Linux 5.13 tunnels leave there what they took off it ("net: reset MAC header consistently
 * across L3 virtual devices", 5.14). What has no 8 bytes has no such thing either.
 */
static __always_inline bool has_outer_headers(struct __sk_buff *skb)
{
	u64 begin, ip;

	return !bpf_skb_load_bytes_relative(skb, 0, &ip, sizeof(ip), BPF_HDR_START_NET) &&
	       load_header(skb, 0, &begin, sizeof(begin)) && begin != ip;
}

/* Let the kernel take those headers off, as it does with whatever is redirected to a device without
 * Ethernet, and see the packet again at the same place. Once: what still has some then goes its
 * way.
 */
static __always_inline int come_in_bare(struct __sk_buff *skb)
{
	if (mark_get(skb))
		return PASS_ON;
	mark_set(skb, MARK_BARE);
	return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
}

static __always_inline int ingress_without_ethernet(struct __sk_buff *skb)
{
	if (has_outer_headers(skb))
		return come_in_bare(skb);
	if (mark_get(skb) == MARK_BARE)
		mark_word(skb) = MARK_NONE;
	return ingress(skb, 0);
}
