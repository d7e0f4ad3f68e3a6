// SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
/*
 * The XDP program of uplinks (--ebpf-xdp). It forwards packets of established flows whose endpoint
 * is on another node, and passes everything else to the tc programs: docs/decisions/0049. It sends
 * only packets that the ingress program would also send past the stack, and they have the same
 * bytes.
 */
#include <uapi/linux/bpf.h>
#include <uapi/linux/if_ether.h>
#include <uapi/linux/in.h>
#include <uapi/linux/in6.h>

#include "compat.h"
#include "flow.h"
#include "frame.h"
#include "route.h"

/* The flags of flows that this program forwards. The client is outside, and the endpoint is on
 * another node and sees an address of this node.
 */
#define FORWARDED (FLOW_REDIRECT | FLOW_MASQUERADE)

/* Whether the tc programs have seen a packet of this side of the flow in this second, and would
 * record the packet without the entry of the other side. They get one packet in each second,
 * refresh the entry, and have the kernel verify the neighbor.
 */
static __always_inline bool may_forward(const struct side *sender, const struct packet *packet,
					u32 now)
{
	return !sender->half_open && (sender->flags & (FORWARDED | FLOW_DSR)) == FORWARDED &&
	       sender->last_seen == now &&
	       (!is_segment(packet) || follows(packet, sender->sequence_end, sender->acknowledged));
}

static __always_inline bool is_addressed_to(const void *data, const void *end,
					    const struct xdp_device *device)
{
	const u16 *frame = data, *own = (const u16 *)device->ethernet;

	return data + ETHERNET_HEADER <= end && frame[0] == own[0] && frame[1] == own[1] &&
	       frame[2] == own[2];
}

/* Forwards the packet with the tuple of `target`, and records it: with the sequence numbers the tc
 * programs recognize the end of a connection. `from`: the source address for the route. Returns
 * XDP_PASS if it cannot; the packet is unchanged then.
 */
static __always_inline int forward(struct xdp_md *context, const struct packet *packet,
				   const struct address *from, struct target *target,
				   struct side *sender, u32 service_id, bool to_endpoint)
{
	void *data = (void *)(long)context->data, *end = (void *)(long)context->data_end;
	u32 ifindex = context->ingress_ifindex, device;
	struct next_hop *next_hop = &target->next_hop;
	struct xdp_device *entry = xdp_devices.lookup(&ifindex);
	bool back;

	if (!entry || !is_addressed_to(data, end, entry))
		return XDP_PASS;
	device = route_by(context, ifindex, packet->length, packet, from,
			  &target->tuple.destination, next_hop);
	if (!device || !next_hop->has_ethernet)
		return XDP_PASS;
	entry = xdp_devices.lookup(&device);
	if (!entry)
		return XDP_PASS;
	back = device == ifindex && entry->flags & XDP_SENDS_BACK;
	if (!back && !(entry->flags & XDP_SENDS))
		return XDP_PASS;
	if (!frame_write(data, end, packet, &target->tuple, next_hop->ethernet))
		return XDP_PASS;
	count(COUNTER_XDP_FORWARDED);
	if (is_segment(packet))
		record_next(sender, packet);
	count_traffic(service_id, packet->length, to_endpoint, false);
	return back ? XDP_TX : bpf_redirect(device, 0);
}

static __always_inline int forward_request(struct xdp_md *context, struct packet *packet,
					   struct flow *entry, struct scratch *scratch)
{
	struct flow_view *view = &scratch->view;
	struct target *target = &scratch->target;
	const struct flow *flow = &view->flow;

	view->flow = *entry;
	/* A flow that was seen in this second is not over, so `view->reply_key` is not used. */
	if (!may_forward(SIDE(flow), packet, view->now) ||
	    address_is_unspecified(&flow->masquerade) ||
	    !continues_established(flow, packet, view, &scratch->work))
		return XDP_PASS;
	tuple_to_endpoint(&target->tuple, &flow->masquerade, flow);
	return forward(context, packet, &packet->tuple.source, target, SIDE(entry),
		       flow->service_id, true);
}

static __always_inline int forward_reply(struct xdp_md *context, struct packet *packet,
					 struct reply *entry, struct flow_view *view,
					 struct target *target)
{
	const struct reply *reply = &view->reply;

	view->reply = *entry;
	if (!may_forward(SIDE(reply), packet, view->now))
		return XDP_PASS;
	tuple_of_reply(&target->tuple, reply);
	return forward(context, packet, &target->tuple.source, target, SIDE(entry),
		       reply->service_id, false);
}

/* As look_up_incoming(). The tc programs copy entries of the previous maps, so a packet that may
 * belong to one is passed to them.
 */
int xdp_forward(struct xdp_md *context)
{
	struct scratch *scratch = scratch_get();
	struct flow_view *view;
	struct packet *packet;
	const struct flow_key *tuple;
	struct flow *flow;

	if (!scratch)
		return XDP_PASS;
	packet = packet_begin(&scratch->packet, ETHERNET_HEADER, AT_INGRESS);
	if (!frame_read((void *)(long)context->data, (void *)(long)context->data_end, packet))
		return XDP_PASS;
	view = &scratch->view;
	tuple = &packet->tuple;
	view->now = flow_now();
	if (port_has_use(tuple->protocol, tuple->source_port, PORT_OF_ENDPOINT)) {
		struct reply *reply;

		key_of_masqueraded(&view->reply_key, &tuple->source, tuple->source_port,
				   tuple->destination_port, tuple->protocol);
		reply = replies.lookup(&view->reply_key);
		if (!reply && previous_replies_map())
			return XDP_PASS;
		if (reply && is_masquerade(reply, &tuple->destination))
			return forward_reply(context, packet, reply, view, &scratch->target);
	}
	if (!port_has_use(tuple->protocol, tuple->destination_port, PORT_OF_FRONTEND))
		return XDP_PASS;
	view->key = *tuple;
	flow = flows.lookup(&view->key);
	return flow ? forward_request(context, packet, flow, scratch) : XDP_PASS;
}
