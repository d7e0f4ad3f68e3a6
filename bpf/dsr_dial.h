/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Direct server return on the node that a client dials: selects the endpoint of each packet, and
 * sends the packet to the endpoint's node.
 *
 * The node sees no replies, so it cannot tell whether a client exists, and keeps no entries in
 * `flows`. The cache `tunneled_flows` keeps a flow at its endpoint when the set of endpoints
 * changes. Without an entry in it, every packet selects its endpoint by the hash of the client. All
 * nodes select the same one, so a flow may move to another node at any time.
 */
#pragma once

#include "dsr.h"
#include "ingress.h"

/* Whether a packet of the cached flow `known` still goes to its endpoint. The first packet of a
 * connection needs an endpoint that is usable for it. A datagram needs one that is listed. For
 * both, the node must still accept tunneled packets. A later packet of a connection needs an
 * endpoint whose id is not reused.
 */
static __always_inline bool tunneled_flow_continues(const struct tunneled_flow *known,
						    bool is_datagram, bool first, u16 usable,
						    const struct service *service)
{
	WORD_KEY(id, known->endpoint_id);
	struct endpoint *endpoint;
	struct tunnel *tunnel;

	if (known->service_id != service->id)
		return false;
	endpoint = endpoint_same(*id, known->service_id, &known->endpoint, known->endpoint_port);
	if (!endpoint)
		return false;
	if (!is_datagram && !first)
		return true;
	if (!(endpoint->flags & (is_datagram ? ENDPOINT_LISTED : usable)))
		return false;
	tunnel = tunnels.lookup(id);
	return tunnel && address_equal(&tunnel->node, &known->node);
}

/* Selects the endpoint and its node for a packet with `tuple`, and sets `to`. Returns false if the
 * endpoint gets no tunneled packets. `uses`: see endpoint_choose().
 */
static __always_inline bool tunnel_choose(struct flow_key *tuple, bool first, bool is_error,
					  const struct service *service, struct tunneled_flow *to,
					  u16 *uses, struct affinity_key *client)
{
	u16 usable = usable_flag(service, SERVICE_EXTERNAL_LOCAL);
	struct tunneled_flow *known;
	struct slot_range range = service->external;
	struct endpoint *endpoint;
	struct tunnel *tunnel;
	u32 id = 0;

	known = tunneled_flows.lookup(tuple);
	if (known) {
		*to = *known;
		if (tunneled_flow_continues(to, tuple->protocol == IPPROTO_UDP, first, usable,
					    service))
			return true;
	}
	if (!range.count)
		return false;
	client->client = tuple->source;
	client->client_kind = CLIENT_ADDRESS;
	client->service_id = service->id;
	endpoint = endpoint_choose(service, &range, usable, client, tuple->source_port, &id, uses);
	tunnel = endpoint ? tunnels.lookup(&id) : NULL;
	/* A client that is its own endpoint must be masqueraded. */
	if (!tunnel || address_equal(&endpoint->address, &client->client))
		return false;
	to->endpoint = endpoint->address;
	to->endpoint_port = endpoint->port;
	to->node = tunnel->node;
	to->pad = 0;
	to->service_id = service->id;
	to->endpoint_id = id;
	if (!is_error)
		tunneled_flows.update(tuple, to);
	return true;
}

/* Sends the packet to the node of `to`. `option` is the memory for the option of the packet. */
static __always_inline int tunnel_send(struct __sk_buff *skb, const struct packet *packet,
				       const struct tunneled_flow *to, struct tunnel_option *option)
{
	const struct node *settings = node_get();
	struct tunnel_key key = {.network = TUNNEL_NETWORK, .ttl = TUNNEL_TTL};
	u64 flags = 0;

	if (!settings)
		return DROP;
	if (address_is_v4(&to->node)) {
		key.remote.v4 = bpf_ntohl(to->node.word[3]);
	} else {
		key.remote.v6 = to->node;
		flags = TUNNEL_IPV6;
	}
	option->option_class = bpf_htons(TUNNEL_OPTION_CLASS);
	option->type = TUNNEL_OPTION_TYPE;
	option->length = TUNNEL_OPTION_LENGTH;
	option->endpoint = to->endpoint;
	option->endpoint_port = to->endpoint_port;
	option->version = TUNNEL_OPTION_VERSION;
	option->pad = 0;
	if (!write_ttl(skb, packet, packet->ttl - 1) ||
	    (!packet->l3 && !write_ethernet(skb, packet, false)) || /* Geneve carries frames */
	    bpf_skb_set_tunnel_key(skb, (void *)&key, sizeof(key), flags) ||
	    bpf_skb_set_tunnel_opt(skb, (void *)option, sizeof(*option)))
		return DROP;
	count(COUNTER_TUNNELED);
	mark_set(skb, MARK_DONE);
	return bpf_redirect(settings->tunnel_device, 0);
}

#define DONT_FRAGMENT 0x4000
#define IPV6_MTU_MIN  1280 /* RFC 8200, 5 */

/* Returns the MTU that the client must respect because the packet does not fit in the tunnel.
 * Returns 0 if it fits, or if only the outer packet can be fragmented: an IPv4 packet that may be
 * fragmented itself, or an IPv6 packet of at most IPV6_MTU_MIN. GSO packets are segmented later;
 * their size was announced by the endpoint (mss.h).
 */
static __always_inline u32 tunnel_mtu_for_client(struct __sk_buff *skb, const struct packet *packet)
{
	const struct node *settings = node_get();
	u32 mtu = settings ? settings->tunnel_mtu : 0;
	__be16 offset = 0;

	if (packet->version == 6 && mtu && mtu < IPV6_MTU_MIN)
		mtu = IPV6_MTU_MIN;
	if (!mtu || packet->length <= mtu || skb->gso_segs)
		return 0;
	if (packet->version == 6)
		return mtu;
	if (!load(skb, packet->l3 + 6, &offset, 2) || !(offset & bpf_htons(DONT_FRAGMENT)))
		return 0;
	return mtu;
}

static __always_inline int tunnel_too_big(struct __sk_buff *skb, struct packet *packet, u32 mtu,
					  u8 *bytes)
{
	count(COUNTER_TUNNEL_TOO_BIG);
	if (!is_answerable(&packet->tuple.source) || !icmp_is_allowed() ||
	    !answer_icmp(skb, packet, bytes, mtu))
		return DROP;
	return send_back(skb);
}

/* Whether the Service of `tuple` has direct server return, and admits the client. Copies the
 * Service.
 */
static __always_inline bool may_tunnel(struct __sk_buff *skb, const struct packet *packet,
				       struct service *service, const struct flow_key *tuple,
				       struct workspace *work)
{
	frontend_of_tuple(&work->frontend, tuple);
	if (packet->ttl <= 1 || !service_find(&work->frontend, false, service) ||
	    !(service->flags & SERVICE_DSR))
		return false;
	if (service->kind == KIND_NODE_PORT && is_for_connected_socket(skb, packet, &work->sockets))
		return false;
	if (!source_admitted(service, &tuple->source, &work->source))
		return false;
	/* The endpoint may run on that node itself, whose replies would not leave by a device. */
	return !is_tunnel_source(&tuple->source);
}

/* Continues ingress() after a tail call. Packets that are not tunneled are processed as if there
 * was no direct server return: endpoint_choose() selects the same endpoint again.
 */
static __always_inline int dial(struct __sk_buff *skb, struct scratch *scratch)
{
	struct packet *packet = &scratch->packet;
	struct flow_key *tuple = &scratch->view.tuple;
	struct workspace *work = &scratch->work;
	bool is_error = packet->icmp_type;
	bool first = !is_error && is_first(packet);
	struct service service;
	u32 mtu;

	if (is_error && !address_equal(&packet->tuple.destination, &tuple->destination))
		return PASS_ON;
	if (may_tunnel(skb, packet, &service, tuple, work) &&
	    tunnel_choose(tuple, first, is_error, &service, &scratch->tunneled,
			  &scratch->view.happening.flags, &work->affinity)) {
		mtu = is_error ? 0 : tunnel_mtu_for_client(skb, packet);
		return mtu ? tunnel_too_big(skb, packet, mtu, work->bytes)
			   : tunnel_send(skb, packet, &scratch->tunneled, &scratch->option);
	}
	if (first)
		tail_calls.call(skb, TAIL_OPEN_IN);
	return PASS_ON;
}
