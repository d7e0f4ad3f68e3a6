/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * The TCP state of a flow. Segments with implausible sequence numbers do not change it.
 */
#pragma once

#include "scratch.h"

#define CLOSED_BY_BOTH (FLOW_CLIENT_FIN | FLOW_ENDPOINT_FIN)

/* In bytes. A sequence number that exceeds the last acknowledgment by more is outside any usual
 * receive window.
 */
#define WINDOW_MAX (1 << 22)

/* In bytes. Successive segments of one side are seldom further apart. */
#define NEAR (1 << 17)

static __always_inline bool is_closed(u16 flags)
{
	return flags & FLOW_RESET || (flags & CLOSED_BY_BOTH) == CLOSED_BY_BOTH;
}

/* Whether the receiver of a reset accepts it, as in RFC 5961, 3.2 and in conntrack
 * (tcp_in_window(), be0502a3f2e9, 5.3; nf_conntrack_tcp_packet()): its sequence number is exactly
 * the one that the receiver expects next. That is the last acknowledged number, or `sent`, the
 * number after the sender's last segment, which may not be acknowledged yet.
 */
static __always_inline bool reset_is_valid(u32 sequence, u32 sent, u32 acknowledged)
{
	return sequence == acknowledged ||
	       (sequence == sent && sequence - acknowledged < WINDOW_MAX);
}

static __always_inline bool is_near(u32 number, u32 last)
{
	return number - last + NEAR < 2 * NEAR;
}

/* Whether a segment follows its sender's last one, by both of its numbers. A sender who knows the
 * tuple but not the numbers needs 2^28 segments for one that does.
 */
static __always_inline bool follows(const struct packet *packet, u32 sent, u32 acknowledged)
{
	return is_near(packet->sequence, sent) && is_near(packet->acknowledged, acknowledged);
}

/* As follows(), for a segment after many others that were lost before this node, or one that
 * acknowledges many segments. `other_sent`: the number after the last segment of the other side.
 * One of both numbers may differ by more if the other one is exact or lies between the last
 * acknowledgment and `other_sent`.
 */
static __always_inline bool follows_gap(const struct packet *packet, u32 sent, u32 acknowledged,
					u32 other_sent)
{
	if (packet->acknowledged == other_sent)
		return packet->sequence - sent + WINDOW_MAX < 2 * WINDOW_MAX;
	return is_near(packet->sequence, sent) && (s32)(other_sent - acknowledged) > 0 &&
	       packet->acknowledged - acknowledged <= other_sent - acknowledged;
}

/* What `flows` and `replies` record about one side of a flow: the fields that both structs have
 * from `flags` on.
 */
struct side {
	u16 flags;
	u8 half_open;
	u8 pad;
	u32 last_seen;
	u32 sequence_end;
	u32 acknowledged;
} __attribute__((may_alias));

#define SIDE(entry) ((struct side *)&(entry)->flags)
/* As SIDE() for the result of a lookup, which can be NULL. The verifier rejects an address that is
 * computed before the check.
 */
#define SIDE_OR_NULL(entry)                                                                        \
	((entry) ? ({                                                                              \
		hide(entry);                                                                       \
		SIDE(entry);                                                                       \
	})                                                                                         \
		 : NULL)
#define IS_SIDE(type)                                                                              \
	(__builtin_offsetof(type, acknowledged) - __builtin_offsetof(type, flags) ==               \
	 __builtin_offsetof(struct side, acknowledged))
_Static_assert(IS_SIDE(struct flow) && IS_SIDE(struct reply), "other fields in between");

/* Records a segment in the entry of its sender. The numbers only increase. */
static __always_inline void record_next(struct side *sender, const struct packet *packet)
{
	if ((s32)(packet->sequence_end - sender->sequence_end) > 0)
		sender->sequence_end = packet->sequence_end;
	if ((s32)(packet->acknowledged - sender->acknowledged) > 0)
		sender->acknowledged = packet->acknowledged;
}

/* Records a segment of a half-open flow in the entry of its sender. `opens`: it is a SYN, or it
 * acknowledges the SYN of the other side.
 */
static __always_inline void record_half_open(struct side *sender, const struct packet *packet,
					     bool opens)
{
	if (opens) {
		sender->sequence_end = packet->sequence_end;
		sender->acknowledged = packet->acknowledged;
	} else if (follows(packet, sender->sequence_end, sender->acknowledged)) {
		record_next(sender, packet);
	}
}

/* What a segment of an established flow is for the flow. */
enum segment {
	SEGMENT_INVALID,       /* not part of the connection: it changes nothing */
	SEGMENT_OUT_OF_WINDOW, /* its numbers are not recorded; the receiver decides about it */
	SEGMENT_NEXT,	       /* its numbers are recorded */
	SEGMENT_FIN,	       /* as SEGMENT_NEXT, and its side has closed */
	SEGMENT_RESET,	       /* it ends the connection */
};

/* Classifies a segment by the entry of its sender. `other`: the entry of the other side, NULL if
 * there is none. A SYN, or a reset that the receiver does not accept, is invalid: it is spoofed, or
 * its sender does not know the connection.
 */
static __always_inline enum segment
classify_segment(const struct side *sender, const struct side *other, const struct packet *packet)
{
	u32 sent = sender->sequence_end, acknowledged = sender->acknowledged;

	if (packet->tcp_flags & TCP_RST)
		return other && reset_is_valid(packet->sequence, sent, other->acknowledged)
			   ? SEGMENT_RESET
			   : SEGMENT_INVALID;
	if (packet->tcp_flags & TCP_SYN)
		return SEGMENT_INVALID;
	if (!follows(packet, sent, acknowledged) &&
	    !(other && follows_gap(packet, sent, acknowledged, other->sequence_end)))
		return SEGMENT_OUT_OF_WINDOW;
	return packet->tcp_flags & TCP_FIN ? SEGMENT_FIN : SEGMENT_NEXT;
}

/* Records a segment of an established flow. As classify_segment(). `fin`: the flag that shows that
 * the sender has closed.
 */
static __always_inline enum segment record_segment(struct side *sender, struct side *other,
						   const struct packet *packet, u16 fin)
{
	enum segment kind = classify_segment(sender, other, packet);

	if (kind == SEGMENT_NEXT || kind == SEGMENT_FIN)
		record_next(sender, packet);
	if (other && (kind == SEGMENT_FIN || kind == SEGMENT_RESET)) {
		u16 ended = kind == SEGMENT_FIN ? fin : FLOW_RESET;

		sender->flags |= ended;
		other->flags |= ended;
	}
	return kind;
}

/* Whether the entry of the other side is needed to record a segment: not for most segments. */
static __always_inline bool needs_other_side(const struct side *sender, const struct packet *packet)
{
	return packet->tcp_flags & (TCP_FIN | TCP_RST) ||
	       !follows(packet, sender->sequence_end, sender->acknowledged);
}

static __always_inline bool is_segment(const struct packet *packet)
{
	return packet->tuple.protocol == IPPROTO_TCP && packet->fragment != LATER;
}

/* Whether a packet from the client confirms a reply of the endpoint. TCP: it acknowledges the
 * endpoint's SYN. UDP and SCTP: it is any packet after a reply.
 */
static __always_inline bool confirms_reply(const struct packet *packet, const struct reply *reply)
{
	if (!(reply->flags & FLOW_REPLIED))
		return false;
	if (packet->tuple.protocol != IPPROTO_TCP)
		return true;
	return is_segment(packet) &&
	       (packet->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_ACK &&
	       packet->acknowledged == reply->sequence_end;
}
