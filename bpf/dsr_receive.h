/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Direct server return on the node of the endpoint: translates a tunneled packet, as if the device
 * that leads to the client had received it. So the reverse path filter and netfilter see what they
 * would see without a tunnel.
 */
#pragma once

#include "dsr.h"
#include "ingress.h"

/* Reads the sender of a tunneled packet, and its option. Returns false if this node does not accept
 * the packet: the device receives all virtual networks.
 */
static __always_inline bool tunnel_accepts(struct __sk_buff *skb, struct tunnel_option *option)
{
	struct tunnel_key key = {};
	struct address sender;

	if (!bpf_skb_get_tunnel_key(skb, (void *)&key, sizeof(key), 0))
		address_v4(&sender, bpf_htonl(key.remote.v4));
	else if (!bpf_skb_get_tunnel_key(skb, (void *)&key, sizeof(key), TUNNEL_IPV6))
		sender = key.remote.v6;
	else
		return false;
	if (key.network != TUNNEL_NETWORK || !is_tunnel_source(&sender))
		return false;
	return bpf_skb_get_tunnel_opt(skb, (void *)option, sizeof(*option)) == sizeof(*option) &&
	       option->option_class == bpf_htons(TUNNEL_OPTION_CLASS) &&
	       option->type == TUNNEL_OPTION_TYPE && option->length == TUNNEL_OPTION_LENGTH &&
	       option->version == TUNNEL_OPTION_VERSION;
}

/* Finds the Service of the frontend in `tuple`. A NodePort is found at any address, because the
 * address is that of the node that sent the packet.
 */
static __always_inline bool tunneled_service_find(const struct flow_key *tuple,
						  struct service *service,
						  struct service_key *frontend)
{
	struct service_key key;
	struct service *found;

	frontend_of_tuple(frontend, tuple);
	if (address_is_unspecified(&frontend->address) || address_is_loopback(&frontend->address))
		return false;
	found = service_lookup(&key, frontend);
	return found && service_copy(&key, found, service);
}

/* Opens a flow to the endpoint that the sender has selected. `device`: see reply.device. Any packet
 * may open it: the endpoint resets a connection that it does not know. Returns false if the packet
 * must be dropped.
 */
static __always_inline bool open_tunneled(struct __sk_buff *skb, struct packet *packet, u32 device,
					  struct scratch *scratch)
{
	struct flow_view *view = &scratch->view;
	struct flow *flow = &view->flow;
	struct tunnel_endpoint at = {};
	struct service service;
	u32 *id;

	if (!tunneled_service_find(&packet->tuple, &service, &scratch->work.frontend)) {
		count(COUNTER_TUNNEL_NO_ENDPOINT);
		return false;
	}
	view->happening.service_id = service.id;
	view->happening.flags = 0;
	view->key = packet->tuple;
	if (!source_admitted(&service, &packet->tuple.source, &scratch->work.source)) {
		happened(&view->happening, EVENT_DROPPED, COUNTER_SOURCE_REFUSED);
		return false;
	}
	at.address = scratch->option.endpoint;
	at.port = scratch->option.endpoint_port;
	at.service_id = service.id;
	id = tunnel_endpoints.lookup(&at);
	if (!id) {
		happened(&view->happening, EVENT_DROPPED, COUNTER_TUNNEL_NO_ENDPOINT);
		return false;
	}
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->endpoint = at.address;
	flow->endpoint_port = at.port;
	flow->service_id = service.id;
	flow->endpoint_id = *id;
	flow->flags = FLOW_DSR;
	count(COUNTER_PACKET_NEW);
	packet->opens = true;
	return flow_open(skb, packet, device, BPF_F_INGRESS, scratch);
}

/* Finds the flow of a tunneled packet. A masqueraded flow does not count: its endpoint is on
 * another node.
 */
static __always_inline bool tunneled_flow_find(const struct packet *packet, bool is_error,
					       struct flow_view *view, struct workspace *work)
{
	if (!client_find(packet, is_error, view, work))
		return false;
	if (!(view->flow.flags & FLOW_MASQUERADE))
		return true;
	if (!is_error)
		flow_remove(&view->key, &view->reply_key);
	return false;
}

/* Hands the packet to the stack, as if `device` had received it from the next hop towards the
 * client. If the neighbor is not known, the frame has the address of another host, and ingress()
 * corrects the type of the packet.
 */
static __always_inline int receive_at(struct __sk_buff *skb, u32 device,
				      const struct next_hop *next_hop)
{
	u8 ethernet[12] ALIGNED;

	__builtin_memcpy(ethernet, next_hop->ethernet + 6, 6);
	__builtin_memcpy(ethernet + 6, next_hop->ethernet, 6);
	if (next_hop->has_ethernet && bpf_skb_store_bytes(skb, 0, ethernet, sizeof(ethernet), 0))
		return DROP;
	mark_set(skb, MARK_RECEIVED);
	return bpf_redirect(device, BPF_F_INGRESS);
}

/* Translates a packet of a client, or an ICMP error about a reply, and hands it to the stack. */
static __always_inline int translate_tunneled(struct __sk_buff *skb, struct packet *packet,
					      bool is_error, u32 device, struct scratch *scratch)
{
	const struct flow *flow = &scratch->view.flow;
	struct target *target = &scratch->target;
	bool written;

	tuple_to_endpoint(&target->tuple, &scratch->view.tuple.source, flow);
	if (is_error) {
		written = rewrite_icmp_error(skb, packet, &scratch->quoted, &target->tuple,
					     &scratch->work.key);
	} else {
		count_traffic(flow->service_id, packet->length, true, packet->opens);
		written = rewrite(skb, packet, &target->tuple);
	}
	if (!written)
		return DROP;
	count(COUNTER_TUNNEL_RECEIVED);
	return receive_at(skb, device, &target->next_hop);
}

static __always_inline int refuse_tunneled(void)
{
	count(COUNTER_TUNNEL_REFUSED);
	return DROP;
}

/* The program of the Geneve device. No packet passes it, so no packet is tunneled twice. */
static __always_inline int receive(struct __sk_buff *skb, struct scratch *scratch)
{
	struct packet *packet = packet_begin(&scratch->packet, ETHERNET_HEADER, AT_INGRESS);
	struct flow_key *tuple = &scratch->view.tuple;
	bool is_error = false;
	u32 device;

	if (!tunnel_accepts(skb, &scratch->option))
		return refuse_tunneled();
	switch (parse(skb, packet)) {
	case TRANSPORT:
		if (packet->fragment != WHOLE && !fragment_ports(packet))
			return DROP;
		scratch->view.tuple = packet->tuple;
		break;
	case ICMP:
		if (!is_icmp_error(packet) ||
		    !parse_quoted(skb, packet, AT_INGRESS, &scratch->quoted, tuple) ||
		    !address_equal(&packet->tuple.destination, &tuple->destination))
			return refuse_tunneled();
		is_error = true;
		break;
	default:
		return refuse_tunneled();
	}
	/* An ICMP error gets the client as its source, too (rewrite_icmp_error()). */
	device = route_by(skb, skb->ifindex, 0, packet, &tuple->destination, &tuple->source,
			  &scratch->target.next_hop);
	if (!device || !device_get(device)) {
		count(COUNTER_TUNNEL_NO_DEVICE);
		return DROP;
	}
	if (!tunneled_flow_find(packet, is_error, &scratch->view, &scratch->work)) {
		if (is_error) {
			count(COUNTER_TUNNEL_NO_ENDPOINT);
			return DROP;
		}
		if (!open_tunneled(skb, packet, device, scratch))
			return DROP;
	}
	return translate_tunneled(skb, packet, is_error, device, scratch);
}
