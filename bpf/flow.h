/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Flows: how packets of the client and of the endpoint find the two entries of a translated
 * connection, whether they continue it, and what is recorded. See docs/decisions/0023.
 */
#pragma once

#include "flow_previous.h"
#include "flow_half_open.h"
#include "flow_key.h"
#include "flow_tcp.h"

/* Records a packet from the client of an established flow. */
static __always_inline void client_sent(struct flow *flow, const struct packet *packet,
					struct flow_view *view)
{
	if (is_segment(packet)) {
		struct reply *reply =
		    needs_other_side(SIDE(flow), packet) ? replies.lookup(&view->reply_key) : NULL;
		enum segment kind =
		    record_segment(SIDE(flow), SIDE_OR_NULL(reply), packet, FLOW_CLIENT_FIN);

		if (kind == SEGMENT_INVALID)
			return;
		if (kind == SEGMENT_RESET)
			report_reset(&view->happening, flow->service_id, 0);
	}
	if (flow->last_seen != view->now)
		flow->last_seen = view->now;
}

/* Sets `frontend` to the frontend of a pod's stale UDP socket that sends packets with `tuple`.
 * Returns false if no stale socket has this tuple.
 */
static __always_inline bool stale_socket_find(struct flow_key *tuple, struct service_key *frontend)
{
	const struct node *settings = node_get();
	struct service_key *found;

	if (tuple->protocol != IPPROTO_UDP || !settings || !(settings->flags & NODE_STALE_SOCKETS))
		return false;
	found = stale_sockets.lookup(tuple);
	if (!found)
		return false;
	*frontend = *found;
	return true;
}

/* Whether the endpoint of a flow is still in use. Ids are reused, so the address and port are
 * compared, too. A direct flow has no Service.
 */
static __always_inline bool endpoint_is_in_force(const struct flow *flow)
{
	struct endpoint *endpoint;

	if (!flow->service_id)
		return true;
	endpoint = endpoint_same(flow->endpoint_id, flow->service_id, &flow->endpoint,
				 flow->endpoint_port);
	return endpoint && endpoint->flags & ENDPOINT_LISTED;
}

/* Whether the frontend still belongs to the Service of the flow. */
static __always_inline bool frontend_is_in_force(const struct flow *flow, struct flow_key *flow_key,
						 struct service_key *frontend)
{
	WORD_STRUCT(struct service_key, key);
	struct service *service;

	if (!flow->service_id)
		return true;
	if (flow->flags & FLOW_STALE_SOCKET) {
		if (!stale_socket_find(flow_key, frontend))
			return false;
	} else {
		frontend_of_tuple(frontend, flow_key);
	}
	service = service_lookup(key, frontend);
	return service && service->id == flow->service_id;
}

/* Whether a UDP flow is idle for longer than its timeout. Its next datagram then opens a new flow.
 * The endpoint may have sent packets in the meantime; only the entry in `replies` records them.
 */
static __always_inline bool stream_is_over(const struct flow *flow, struct flow_view *view)
{
	const struct node *settings = node_get();
	struct reply *reply;

	if (!settings || !has_passed(flow->last_seen, view->now, settings->udp_stream))
		return false;
	reply = replies.lookup(&view->reply_key);
	return !reply || has_passed(reply->last_seen, view->now, settings->udp_stream);
}

/* Whether the endpoint of a TCP flow has sent nothing for as long as a SYN may be unanswered. */
static __always_inline bool endpoint_is_silent(struct flow_view *view)
{
	const struct node *settings = node_get();
	struct reply *reply = replies.lookup(&view->reply_key);

	return !reply || (settings && has_passed(reply->last_seen, view->now, settings->tcp_syn));
}

/* Whether the packet continues the established flow with its tuple, and does not open a new flow.
 *
 * UDP has no end of a connection: a datagram opens a new flow if the endpoint or the frontend is
 * gone. A SYN opens a new flow only after the connection has ended. While the connection may exist,
 * the endpoint itself replies to the SYN (challenge ACK, RFC 5961, 4). If the endpoint was removed
 * and is silent, the reply could only be that of another pod with the same address.
 */
static __always_inline bool continues_established(const struct flow *flow,
						  const struct packet *packet,
						  struct flow_view *view, struct workspace *work)
{
	if (packet->tuple.protocol == IPPROTO_UDP)
		return endpoint_is_in_force(flow) &&
		       frontend_is_in_force(flow, &view->key, &work->frontend) &&
		       !stream_is_over(flow, view);
	if (!is_first(packet))
		return true;
	if (packet->tuple.protocol != IPPROTO_TCP)
		return endpoint_is_in_force(flow);
	return !is_closed(flow->flags) && (endpoint_is_in_force(flow) || !endpoint_is_silent(view));
}

/* As continues_established(), for a half-open flow. A retransmitted SYN goes to another endpoint if
 * the first endpoint is gone and has not replied. A connection that the endpoint has rejected is
 * over.
 */
static __always_inline bool continues_half_open(const struct flow *flow,
						const struct packet *packet,
						const struct reply *reply, struct flow_view *view,
						struct workspace *work)
{
	if (half_open_is_over(flow->last_seen, packet->tuple.protocol, view->now))
		return false;
	/* Another flow has its entry in `replies`. */
	if (!reply && is_first(packet))
		return false;
	if (packet->tuple.protocol == IPPROTO_UDP)
		return endpoint_is_in_force(flow) &&
		       frontend_is_in_force(flow, &view->key, &work->frontend);
	if (!is_first(packet))
		return true;
	if (is_closed(flow->flags))
		return false;
	return endpoint_is_in_force(flow) || (reply && reply->flags & FLOW_REPLIED);
}

/* Processes a packet from the client of the half-open `flow`. Returns whether the packet continues
 * the flow. The flow becomes established if the packet proves that each side has received a packet
 * from the other, or if it is a UDP flow of more than a second: its client may expect no reply.
 */
static __always_inline bool half_open_continue(struct flow *flow, const struct packet *packet,
					       struct flow_view *view, struct workspace *work)
{
	struct reply *reply = reply_lookup(&view->reply_key, view);
	bool lasts = packet->tuple.protocol == IPPROTO_UDP && flow->last_seen != view->now;
	bool confirms;

	if (reply && !is_reply_of(reply, &view->key))
		reply = NULL;
	if (!continues_half_open(flow, packet, reply, view, work))
		return false;
	half_open_refresh(flow, reply, view->now);
	confirms = reply && (lasts || confirms_reply(packet, reply));
	if (is_segment(packet) && !(packet->tcp_flags & TCP_RST))
		record_half_open(SIDE(flow), packet, confirms || packet->tcp_flags & TCP_SYN);
	if (confirms && flow_is_at(&view->key, flow))
		establish(flow, reply, view->key.protocol);
	return true;
}

/* Finds the flow of a packet that a client may have sent by `view->tuple`, and sets `view->key`. If
 * it returns true, `view->flow` and `view->now` are set, too. An entry that has ended is removed,
 * because later packets would match it. `is_error`: an ICMP error quotes the packet, so no entry is
 * written or removed, and `view->now` is not set.
 */
static __always_inline bool client_find(const struct packet *packet, bool is_error,
					struct flow_view *view, struct workspace *work)
{
	struct flow *flow;
	bool continues;

	view->key = view->tuple;
	flow = flow_lookup(&view->key, view);
	if (!flow)
		return false;
	if (is_error) {
		view->flow = *flow;
		return true;
	}
	view->now = flow_now();
	reply_key_of(&view->reply_key, &view->key, flow);
	if (flow->half_open) {
		continues = half_open_continue(flow, packet, view, work);
	} else {
		continues = continues_established(flow, packet, view, work);
		if (continues)
			client_sent(flow, packet, view);
	}
	if (continues) {
		view->flow = *flow;
		return !view->flow.half_open || flow_is_at(&view->key, flow);
	}
	flow_remove(&view->key, &view->reply_key);
	return false;
}

/* Records a packet from the endpoint of an established flow. */
static __always_inline void endpoint_sent(struct reply *reply, const struct packet *packet,
					  struct flow_view *view)
{
	if (is_segment(packet)) {
		struct flow *flow =
		    needs_other_side(SIDE(reply), packet) ? flows.lookup(&view->key) : NULL;
		enum segment kind =
		    record_segment(SIDE(reply), SIDE_OR_NULL(flow), packet, FLOW_ENDPOINT_FIN);

		if (kind == SEGMENT_INVALID)
			return;
		if (kind == SEGMENT_RESET)
			report_reset(&view->happening, reply->service_id, EVENT_BY_ENDPOINT);
	}
	if (reply->last_seen != view->now) {
		reply->last_seen = view->now;
		if (!(reply->flags & FLOW_REPLIED)) /* a UDP flow that lasted without a reply */
			reply->flags |= FLOW_REPLIED;
	}
}

/* Records a packet from the endpoint of a half-open flow. Both entries expire at the same time, so
 * both are refreshed, at most once per second. A reset ends the flow without a check of its
 * sequence number: a sender that can spoof the endpoint's address could do more damage than that.
 */
static __always_inline void endpoint_answered(struct reply *reply, const struct packet *packet,
					      struct flow_view *view)
{
	bool resets = is_segment(packet) && packet->tcp_flags & TCP_RST;

	reply->flags |= FLOW_REPLIED;
	if (resets || reply->last_seen != view->now) {
		struct flow *flow = flows.lookup(&view->key);
		u16 ended = resets ? FLOW_RESET : 0;

		reply->last_seen = view->now;
		if (resets && !(reply->flags & FLOW_RESET))
			report_reset(&view->happening, reply->service_id, EVENT_BY_ENDPOINT);
		reply->flags |= ended;
		if (flow) {
			flow->last_seen = view->now;
			flow->flags |= ended;
		}
	}
	if (is_segment(packet) && !resets)
		record_half_open(SIDE(reply), packet, packet->tcp_flags & TCP_SYN);
}

/* Copies the entry with the key `view->reply_key` to `view->reply`. Returns NULL if there is none,
 * or if it only reserves the port.
 */
static __always_inline struct reply *reply_read(struct flow_view *view)
{
	struct reply *reply = reply_lookup(&view->reply_key, view);

	if (!reply)
		return NULL;
	view->reply = *reply;
	return view->reply.client_port ? reply : NULL;
}

/* Whether the entry that reply_read() returned belongs to a flow of `client`, and is in use. Sets
 * `view->key` and `view->now`. `client`: NULL if the key contains the client, or if the caller has
 * compared it.
 */
static __always_inline bool reply_belongs_to(const struct reply *reply,
					     const struct address *client, struct flow_view *view)
{
	if (client && !address_equal(&view->reply.client, client))
		return false;
	if (view->reply.half_open &&
	    replies.lookup(&view->reply_key) != reply) /* see flow_is_at() */
		return false;
	/* Reading the clock costs as much as parsing, so it is done only for packets of a flow. */
	view->now = flow_now();
	if (view->reply.half_open &&
	    half_open_is_over(view->reply.last_seen, view->reply_key.protocol, view->now))
		return false;
	flow_key_of(&view->key, view->reply_key.protocol, &view->reply);
	return true;
}

/* Finds the entry of a flow by `view->reply_key`. Sets `view->reply`, `view->key` and `view->now`,
 * which are valid only if it returns an entry. `client`: see reply_belongs_to().
 */
static __always_inline struct reply *reply_find(const struct address *client,
						struct flow_view *view)
{
	struct reply *reply = reply_read(view);

	return reply && reply_belongs_to(reply, client, view) ? reply : NULL;
}

/* Records a packet that the endpoint has sent in the entry that reply_find() returned. Returns
 * false if the endpoint replies to another connection with the same tuple, which belongs to no
 * flow. A segment that is no reply to a SYN belongs to an older connection, which the client opened
 * without a Service, or which netfilter masqueraded. The entry from then on only reserves the port,
 * and the client's next SYN gets another one. See docs/decisions/0023.
 */
static __always_inline bool reply_record(struct reply *reply, const struct packet *packet,
					 struct flow_view *view)
{
	if (packet->tcp_flags & TCP_SYN && is_closed(view->reply.flags)) {
		flow_remove(&view->key, &view->reply_key);
		return false;
	}
	if (view->reply.half_open && !(view->reply.flags & FLOW_REPLIED) && is_segment(packet) &&
	    !(packet->tcp_flags & (TCP_SYN | TCP_RST))) {
		reply->client_port = 0;
		return false;
	}
	if (view->reply.half_open)
		endpoint_answered(reply, packet, view);
	else
		endpoint_sent(reply, packet, view);
	return true;
}
