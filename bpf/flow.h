/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Flows: the two entries of a connection that is translated, how a packet finds them, and when they
 * end. docs/decisions/0023 has the reasons.
 */
#pragma once

#include "flow_previous.h"
#include "flow_half_open.h"
#include "flow_key.h"
#include "flow_tcp.h"

#define BUSY_ATTEMPTS  3
#define EBUSY_NEGATIVE (-16)

/* The client of an established flow has sent `packet`. Nothing but the entry that was found is
 * written, unless the connection ends.
 */
static __always_inline void client_sent(struct flow *flow, const struct packet *packet,
					struct scratch *scratch)
{
	if (flow->last_seen != scratch->now)
		flow->last_seen = scratch->now;
	if (!is_segment(packet))
		return;
	if (packet->tcp_flags & (TCP_FIN | TCP_RST)) {
		struct reply *reply = replies.lookup(&scratch->reply_key);

		if (reply) {
			u16 ended = closing_flags(packet, flow->sequence_end, reply->acknowledged,
						  FLOW_CLIENT_FIN);

			flow->flags |= ended;
			reply->flags |= ended;
		}
	}
	record_sequence(flow, packet, false);
}

/* The endpoint of an established flow has sent `packet`. */
static __always_inline void endpoint_sent(struct reply *reply, const struct packet *packet,
					  struct scratch *scratch)
{
	if (reply->last_seen != scratch->now)
		reply->last_seen = scratch->now;
	if (!is_segment(packet))
		return;
	if (packet->tcp_flags & (TCP_FIN | TCP_RST)) {
		struct flow *flow = flows.lookup(&scratch->flow_key);

		if (flow) {
			u16 ended = closing_flags(packet, reply->sequence_end, flow->acknowledged,
						  FLOW_ENDPOINT_FIN);

			reply->flags |= ended;
			flow->flags |= ended;
		}
	}
	record_sequence(reply, packet, false);
}

/* The endpoint of a half-open flow has sent `packet`. Both entries are over at the same time, so
 * both are refreshed once a second. A reset refuses the connection: a sender that can use the
 * endpoint's address can do worse.
 */
static __always_inline void endpoint_answered(struct reply *reply, const struct packet *packet,
					      struct scratch *scratch)
{
	bool resets = is_segment(packet) && packet->tcp_flags & TCP_RST;

	reply->flags |= FLOW_REPLIED;
	if (resets || reply->last_seen != scratch->now) {
		struct flow *flow = flows.lookup(&scratch->flow_key);
		u16 ended = resets ? FLOW_RESET : 0;

		reply->last_seen = scratch->now;
		reply->flags |= ended;
		if (flow) {
			flow->last_seen = scratch->now;
			flow->flags |= ended;
		}
	}
	if (is_segment(packet))
		record_sequence(reply, packet, true);
}

/* By what a packet that fits the key of a reply has to fit its value, too. */
enum reply_match {
	MATCH_KEY,	   /* nothing else: the key has both addresses */
	MATCH_MASQUERADE,  /* it is sent to what the client is masqueraded with */
	MATCH_DESTINATION, /* it is sent to the client: ingress has seen it, if it is masqueraded */
	MATCH_SOURCE,	   /* the client sends it: the key is of its reverse */
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

/* Find the entry of `scratch->reply_key` that fits `scratch->tuple`; it is copied to
 * `scratch->reply`, and `scratch->flow_key` is set. `seen`: the endpoint's packet, which is new to
 * the entry; NULL where it is not. False: there is none; `scratch->reply` may be another flow's.
 */
static __always_inline bool reply_find(struct scratch *scratch, enum reply_match match,
				       const struct packet *packet)
{
	struct reply *reply = reply_lookup(&scratch->reply_key, scratch);

	if (!reply) {
		scratch->reply.client_port = 0;
		return false;
	}
	scratch->reply = *reply;
	if (!reply_matches(&scratch->reply, &scratch->tuple, match))
		return false;
	if (scratch->reply.half_open && !reply_is_at(&scratch->reply_key, reply))
		return false;
	scratch->now = flow_now(); /* it costs as much as parsing: not for packets of no flow */
	if (scratch->reply.half_open &&
	    half_open_is_over(scratch->reply.last_seen, scratch->reply_key.protocol, scratch->now))
		return false;
	flow_key_of(&scratch->flow_key, scratch->reply_key.protocol, &scratch->reply);
	if (packet && (match != MATCH_DESTINATION || !scratch->reply.masquerade_digest)) {
		/* The endpoint answers another connection, of no flow, that has this one's tuple.
		 */
		if (packet->tcp_flags & TCP_SYN && is_closed(scratch->reply.flags)) {
			replies.delete(&scratch->reply_key);
			return false;
		}
		if (scratch->reply.half_open)
			endpoint_answered(reply, packet, scratch);
		else
			endpoint_sent(reply, packet, scratch);
	}
	return true;
}

/* EBUSY: the bucket is locked by a reader (htab_lock_bucket()); cilium #35010. */
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
	struct traffic *sum = traffic.lookup(&service_id);

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
