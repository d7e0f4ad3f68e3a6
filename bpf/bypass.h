/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Packets from pods to frontends that no program has seen before egress.
 */
#pragma once

#include "admit.h"

/* A pod's packet to a frontend has bypassed the socket path, and no program is attached to the
 * pod's device. The entry in `bypassing` causes the agent to attach one. No program is needed if
 * the frontend rejects because it has no endpoint: egress rejects the packet. A UDP socket that
 * waits for an endpoint sends such packets. A frame that a bridge forwards is for another host.
 */
static __always_inline enum admission admit_bypassing_packet(struct __sk_buff *skb,
							     const struct packet *packet,
							     struct flow_view *view,
							     struct workspace *work)
{
	const struct flow_key *tuple = &packet->tuple;
	struct service_key *destination = &work->frontend;
	u32 device = skb->ingress_ifindex;
	struct service *service;

	if (!is_first(packet) || skb->pkt_type == PACKET_OTHERHOST ||
	    !port_is_served(tuple->protocol, tuple->destination_port, 0) || device_get(device))
		return NO_FLOW;
	frontend_of_tuple(destination, tuple);
	service = services.lookup(destination);
	if (!service)
		return NO_FLOW;
	if (!service->internal.count && service->flags & SERVICE_REJECT &&
	    !(service->flags & SERVICE_RESTRICTED)) {
		view->happening.service_id = service->id;
		view->happening.flags = 0;
		view->key = packet->tuple;
		happened(&view->happening, EVENT_REJECTED, COUNTER_PACKET_REJECTED);
		return REJECTED;
	}
	count(COUNTER_BYPASSED);
	record_bypassing(device);
	return NO_FLOW;
}
