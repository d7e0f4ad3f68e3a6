/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * What TCP says of the state of a flow, by sequence numbers that are credible.
 */
#pragma once

#include "scratch.h"

#define CLOSED_BY_BOTH (FLOW_CLIENT_FIN | FLOW_ENDPOINT_FIN)

/* Sequence numbers further than this beyond what was acknowledged are out of any usual window. */
#define WINDOW_MAX (1 << 22)

static __always_inline bool is_closed(u16 flags)
{
	return flags & FLOW_RESET || (flags & CLOSED_BY_BOTH) == CLOSED_BY_BOTH;
}

/* Whether a reset that one side sends would end the connection for the other, as conntrack decides
 * (tcp_in_window(), be0502a3f2e9, 5.3; nf_conntrack_tcp_packet()) and RFC 5961, 3.2: its sequence
 * number is the very one that the other side waits for. `sent`: the end of the last segment of the
 * same side, which may not be acknowledged yet.
 */
static __always_inline bool reset_is_valid(u32 sequence, u32 sent, u32 acknowledged)
{
	return sequence == acknowledged ||
	       (sequence == sent && sequence - acknowledged < WINDOW_MAX);
}

/* A segment with FIN or RST: what it ends, as flags; 0 where its sequence number is not credible.
 */
static __always_inline u16 closing_flags(const struct packet *packet, u32 sent, u32 acknowledged,
					 u16 fin)
{
	if (packet->tcp_flags & TCP_RST)
		return reset_is_valid(packet->sequence, sent, acknowledged) ? FLOW_RESET : 0;
	return packet->sequence - acknowledged < WINDOW_MAX ? fin : 0;
}

/* What a segment says of the connection's sequence numbers. Those of RST and SYN are not kept, but
 * of the SYNs that open it.
 */
#define record_sequence(entry, packet, half_open)                                                  \
	({                                                                                         \
		u8 noted = (packet)->tcp_flags;                                                    \
                                                                                                   \
		if (!(noted & TCP_RST) && (!(noted & TCP_SYN) || half_open)) {                     \
			(entry)->sequence_end = (packet)->sequence_end;                            \
			if (noted & TCP_ACK)                                                       \
				(entry)->acknowledged = (packet)->acknowledged;                    \
		}                                                                                  \
	})

static __always_inline bool is_segment(const struct packet *packet)
{
	return packet->tuple.protocol == IPPROTO_TCP && packet->fragment != LATER;
}

/* Whether this packet of the client shows that it has heard the endpoint. */
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
