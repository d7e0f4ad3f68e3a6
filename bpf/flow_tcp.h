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

/* Returns the flags that a segment with FIN or RST sets in both entries. Returns 0 if the sequence
 * number is implausible. `fin` is the flag for a FIN of this side.
 */
static __always_inline u16 closing_flags(const struct packet *packet, u32 sent, u32 acknowledged,
					 u16 fin)
{
	if (packet->tcp_flags & TCP_RST)
		return reset_is_valid(packet->sequence, sent, acknowledged) ? FLOW_RESET : 0;
	return packet->sequence - acknowledged < WINDOW_MAX ? fin : 0;
}

/* Records the sequence numbers of a segment in the entry of its sender. Segments with RST are
 * ignored. Segments with SYN are recorded only while the flow is half-open: they open the
 * connection.
 */
#define record_sequence(entry, packet, half_open)                                                  \
	({                                                                                         \
		u8 flags = (packet)->tcp_flags;                                                    \
                                                                                                   \
		if (!(flags & TCP_RST) && (!(flags & TCP_SYN) || half_open)) {                     \
			(entry)->sequence_end = (packet)->sequence_end;                            \
			if (flags & TCP_ACK)                                                       \
				(entry)->acknowledged = (packet)->acknowledged;                    \
		}                                                                                  \
	})

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
