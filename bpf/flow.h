/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Flows: the two entries of a translated connection, how a packet finds them, and when they end.
 * See docs/decisions/0023.
 */
#pragma once

#include "flow_previous.h"
#include "flow_half_open.h"
#include "flow_key.h"
#include "flow_tcp.h"

#define BUSY_ATTEMPTS  3
#define EBUSY_NEGATIVE (-16)

/* Whether the entry of the other side is needed to record a segment: not for most segments. */
#define needs_other_entry(entry, packet)                                                           \
	((packet)->tcp_flags & (TCP_FIN | TCP_RST) ||                                              \
	 !follows(packet, (entry)->sequence_end, (entry)->acknowledged))

/* Records a packet from the client of an established flow. */
static __always_inline void client_sent(struct flow *flow, const struct packet *packet,
					struct flow_view *view)
{
	if (is_segment(packet)) {
		struct reply *reply = NULL;
		enum segment kind;

		if (needs_other_entry(flow, packet))
			reply = replies.lookup(&view->reply_key);
		kind = classify_segment(flow, packet, reply);
		if (kind == SEGMENT_INVALID)
			return;
		if (kind == SEGMENT_NEXT || kind == SEGMENT_FIN)
			record_next(flow, packet);
		if (reply && (kind == SEGMENT_FIN || kind == SEGMENT_RESET)) {
			u16 ended = kind == SEGMENT_FIN ? FLOW_CLIENT_FIN : FLOW_RESET;

			flow->flags |= ended;
			reply->flags |= ended;
			if (kind == SEGMENT_RESET)
				report_reset(&view->happening, flow->service_id, 0);
		}
	}
	if (flow->last_seen != view->now)
		flow->last_seen = view->now;
}

/* Records a packet from the endpoint of an established flow. */
static __always_inline void endpoint_sent(struct reply *reply, const struct packet *packet,
					  struct flow_view *view)
{
	if (is_segment(packet)) {
		struct flow *flow = NULL;
		enum segment kind;

		if (needs_other_entry(reply, packet))
			flow = flows.lookup(&view->key);
		kind = classify_segment(reply, packet, flow);
		if (kind == SEGMENT_INVALID)
			return;
		if (kind == SEGMENT_NEXT || kind == SEGMENT_FIN)
			record_next(reply, packet);
		if (flow && (kind == SEGMENT_FIN || kind == SEGMENT_RESET)) {
			u16 ended = kind == SEGMENT_FIN ? FLOW_ENDPOINT_FIN : FLOW_RESET;

			reply->flags |= ended;
			flow->flags |= ended;
			if (kind == SEGMENT_RESET)
				report_reset(&view->happening, reply->service_id,
					     EVENT_BY_ENDPOINT);
		}
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
		record_half_open(reply, packet, packet->tcp_flags & TCP_SYN);
}

/* The address of a packet that must match the value of an entry in `replies`. A key with side
 * MASQUERADED contains only one of both addresses.
 */
enum reply_match {
	MATCH_KEY,	  /* none: the key contains both addresses */
	MATCH_MASQUERADE, /* the destination is the masquerade address */
	/* The destination is the client. If the client is masqueraded, ingress has already
	 * translated the packet.
	 */
	MATCH_DESTINATION,
	MATCH_SOURCE, /* the source is the client; the key is the reverse of the packet's tuple */
};

static __always_inline bool reply_matches(const struct reply *reply, const struct flow_key *tuple,
					  enum reply_match match)
{
	switch (match) {
	case MATCH_MASQUERADE:
		return is_masquerade(reply, &tuple->destination);
	case MATCH_DESTINATION:
		return address_equal(&reply->client, &tuple->destination);
	case MATCH_SOURCE:
		return address_equal(&reply->client, &tuple->source);
	default:
		return true;
	}
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

/* Whether the entry that reply_read() returned belongs to the flow of a packet with `tuple`, and is
 * in use. Sets `view->key` and `view->now`.
 */
static __always_inline bool reply_belongs_to(const struct reply *reply, enum reply_match match,
					     struct flow_view *view)
{
	if (!reply_matches(&view->reply, &view->tuple, match))
		return false;
	if (view->reply.half_open && !reply_is_at(&view->reply_key, reply))
		return false;
	/* Reading the clock costs as much as parsing, so it is done only for packets of a flow. */
	view->now = flow_now();
	if (view->reply.half_open &&
	    half_open_is_over(view->reply.last_seen, view->reply_key.protocol, view->now))
		return false;
	flow_key_of(&view->key, view->reply_key.protocol, &view->reply);
	return true;
}

/* Finds the entry of the flow of a packet with `tuple` by `view->reply_key`. Sets `view->reply`,
 * `view->key` and `view->now`, which are valid only if it returns an entry.
 */
static __always_inline struct reply *reply_find(enum reply_match match, struct flow_view *view)
{
	struct reply *reply = reply_read(view);

	return reply && reply_belongs_to(reply, match, view) ? reply : NULL;
}

/* Whether the endpoint's segment belongs to a connection that is older than the half-open flow of
 * `reply`, and has the same tuple: it is no reply to a SYN. The programs do not know this
 * connection. The client opened it without a Service, or netfilter masqueraded it.
 */
static __always_inline bool is_of_older_connection(const struct packet *packet,
						   const struct reply *reply)
{
	return reply->half_open && !(reply->flags & FLOW_REPLIED) && is_segment(packet) &&
	       !(packet->tcp_flags & (TCP_SYN | TCP_RST));
}

/* Records a packet that the endpoint has sent in the entry that reply_find() returned. Returns
 * false if the endpoint replies to another connection with the same tuple, which belongs to no
 * flow. If that connection is older, the entry from then on only reserves the port, and the
 * client's next SYN gets another one. See docs/decisions/0023.
 */
static __always_inline bool reply_record(struct reply *reply, const struct packet *packet,
					 struct flow_view *view)
{
	if (packet->tcp_flags & TCP_SYN && is_closed(view->reply.flags)) {
		flow_remove(&view->key, &view->reply_key);
		return false;
	}
	if (is_of_older_connection(packet, &view->reply)) {
		reply->client_port = 0;
		return false;
	}
	if (view->reply.half_open)
		endpoint_answered(reply, packet, view);
	else
		endpoint_sent(reply, packet, view);
	return true;
}

/* Repeats a map update that failed with EBUSY. This happens while a reader locks the bucket
 * (htab_lock_bucket()); cilium #35010.
 */
#define RETRY(write)                                                                               \
	({                                                                                         \
		int failed = 0;                                                                    \
		_Pragma("nounroll") for (int attempt = 0; attempt < BUSY_ATTEMPTS;                 \
					 again(attempt, 1))                                        \
		{                                                                                  \
			failed = (write);                                                          \
			if (failed != EBUSY_NEGATIVE)                                              \
				break;                                                             \
			count(COUNTER_FLOWS_BUSY);                                                 \
		}                                                                                  \
		failed;                                                                            \
	})

static __always_inline void count_traffic(u32 service_id, u32 bytes, bool to_endpoint, bool is_new)
{
	WORD_KEY(entry, service_id <= LOADED(TRAFFIC) ? service_id : 0);
	struct traffic *sum = traffic.lookup(entry);

	if (!sum)
		return;
	if (to_endpoint) {
		sum->new_flows += is_new;
		sum->packets_in += 1;
		sum->bytes_in += bytes;
	} else {
		sum->packets_out += 1;
		sum->bytes_out += bytes;
	}
}
