/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Direct server return (docs/decisions/0048). The node that a client dials sends the unchanged
 * packet in Geneve to the node of the endpoint (dsr_dial.h). That node translates it like a packet
 * of its own client (dsr_receive.h), so the replies go directly to the client.
 */
#pragma once

#include "admit.h"

#define TUNNEL_IPV6    1 /* BPF_F_TUNINFO_IPV6 */
#define TUNNEL_NETWORK 1 /* the virtual network identifier of all tunneled packets */
#define TUNNEL_TTL     64

/* struct bpf_tunnel_key as Linux 5.10 has it. Later fields are not used. */
struct tunnel_key {
	u32 network;
	union {
		u32 v4; /* in host byte order */
		struct address v6;
	} remote;
	u8 tos;
	u8 ttl;
	u16 flags;
	u32 label;
};

/* Whether the address belongs to a node that sends tunneled packets. */
static __always_inline bool is_tunnel_source(const struct address *address)
{
	WORD_STRUCT(struct network_key, key);

	key->length = 128;
	key->address = *address;
	return tunnel_sources.lookup(key) != NULL;
}

static __always_inline const struct service *service_of_tuple(const struct flow_key *tuple,
							      struct workspace *work)
{
	WORD_STRUCT(struct service_key, key);

	frontend_of_tuple(&work->frontend, tuple);
	return service_lookup(key, &work->frontend);
}

/* Whether a packet that belongs to no flow is for a Service with direct server return, so that
 * TAIL_DIAL decides. Other packets of outside clients, and all packets on a node without it, cost
 * only this check.
 */
static __always_inline bool is_dialed(struct __sk_buff *skb, const struct flow_key *tuple,
				      struct workspace *work)
{
	const struct node *settings = node_get();
	const struct service *service;

	if (!settings || !settings->tunnel_device || skb->pkt_type == PACKET_OTHERHOST)
		return false;
	service = service_of_tuple(tuple, work);
	return service && service->flags & SERVICE_DSR && class_of(skb) == OUTSIDE;
}
