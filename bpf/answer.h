/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Replies that are built in place from the received packet: a TCP reset, an SCTP ABORT and an ICMP
 * error. echo.h builds the fourth one, an echo reply.
 */
#pragma once

#include "rewrite.h"

#define TTL 64

#define ICMP_HEADER    8
#define QUOTED_PAYLOAD 8   /* of the rejected packet, as in RFC 792 */
#define QUOTED_MAX     124 /* IP header with options or extension headers, and payload */

#define BPF_ADJ_ROOM_AT_MAC 1

/* Whether a host can have this address. No reply is sent to an unspecified, loopback, multicast or
 * broadcast address.
 */
static __always_inline bool is_answerable(const struct address *source)
{
	if (address_is_unspecified(source) || address_is_loopback(source))
		return false;
	if (address_is_v4(source)) /* multicast, class E, broadcast */
		return bpf_ntohl(source->word[3]) < 0xe0000000;
	return *(const u8 *)source != 0xff;
}

static __always_inline bool swap_ethernet(struct __sk_buff *skb, u32 l3)
{
	u8 from[12] ALIGNED, to[12] ALIGNED;

	if (l3 != ETHERNET_HEADER)
		return true;
	if (!load(skb, 0, from, 12))
		return false;
#pragma unroll
	for (int i = 0; i < 6; i++) {
		to[i] = from[i + 6];
		to[i + 6] = from[i];
	}
	return !bpf_skb_store_bytes(skb, 0, to, 12, 0);
}

/* Swaps source and destination, which changes no checksum, and resets the TTL. */
static __always_inline bool swap_addresses(struct __sk_buff *skb, struct packet *packet)
{
	struct flow_key to;

	to.source = packet->tuple.destination;
	to.destination = packet->tuple.source;
	return write_addresses(skb, packet->l3, packet->version, packet->checksum, &to, 0, false) &&
	       write_ttl(skb, packet, TTL);
}

/* The first 16 bytes of a TCP header. */
struct tcp_header {
	__be16 source_port;
	__be16 destination_port;
	__be32 sequence;
	__be32 acknowledged;
	u8 data_offset; /* upper 4 bits, in 32-bit words */
	u8 flags;
	__be16 window;
};

/* Turns a SYN into the reset that a closed port sends (RFC 9293, 3.10.7.1). Options and data remain
 * in the packet. Removing them would require the sum over them, which is unknown if the device
 * computes the checksum.
 */
static __always_inline bool answer_reset(struct __sk_buff *skb, struct packet *packet)
{
	struct tcp_header old, new = {};
	u32 data, diff;

	if (!load(skb, packet->l4, &old, sizeof(old)))
		return false;
	data = packet->length - (packet->l4 - packet->l3) - (old.data_offset >> 4) * 4;
	new.source_port = old.destination_port;
	new.destination_port = old.source_port;
	new.acknowledged = bpf_htonl(bpf_ntohl(old.sequence) + data + 1);
	new.data_offset = old.data_offset;
	new.flags = TCP_RST | TCP_ACK;
	diff = (u32)bpf_csum_diff((void *)&old, sizeof(old), (void *)&new, sizeof(new), 0);
	return swap_ethernet(skb, packet->l3) && swap_addresses(skb, packet) &&
	       !bpf_l4_csum_replace(skb, packet->l4 + TCP_CHECKSUM, 0, diff, 0) &&
	       !bpf_skb_store_bytes(skb, packet->l4, &new, sizeof(new), 0);
}

#define SCTP_INIT  1
#define SCTP_ABORT 6

/* The first 20 bytes of an SCTP packet that opens an association (RFC 9260, 3.3.2). */
struct sctp_init {
	struct sctp_header header;
	u8 type;
	u8 flags;
	__be16 length;
	__be32 tag;
};

/* An SCTP packet with an ABORT chunk (RFC 9260, 3.3.7). */
struct sctp_abort {
	struct sctp_header header;
	u8 type;
	u8 flags;
	__be16 length;
};

/* Sets the length of the IP packet. `packet` still has the previous one. */
static __always_inline bool write_length(struct __sk_buff *skb, const struct packet *packet,
					 u32 length)
{
	__be16 new[2] ALIGNED;

	if (packet->version == 6) {
		new[0] = bpf_htons(length - IPV6_HEADER);
		return !bpf_skb_store_bytes(skb, packet->l3 + 4, new, 2, RECOMPUTE_SUM);
	}
	new[0] = bpf_htons(length);
	return !bpf_l3_csum_replace(skb, packet->l3 + IPV4_CHECKSUM, bpf_htons(packet->length),
				    new[0], 2) &&
	       !bpf_skb_store_bytes(skb, packet->l3 + 2, new, 2, 0);
}

/* Turns an INIT into the ABORT that a host without a listening socket sends (RFC 9260, 8.4). Its
 * verification tag is the one that the client has sent in the INIT. A CRC that the device computes
 * stays 0. Returns false if the packet gets no reply.
 */
static __always_inline bool answer_abort(struct __sk_buff *skb, struct packet *packet)
{
	struct sctp_init init;
	struct sctp_abort abort = {};
	bool pending;

	if (packet->fragment != WHOLE || !load(skb, packet->l4, &init, sizeof(init)) ||
	    init.type != SCTP_INIT || !init.tag)
		return false;
	pending = !init.header.checksum && crc_is_pending(skb, packet->l4 + SCTP_CHECKSUM);
	abort.header.ports = init.header.ports << 16 | init.header.ports >> 16;
	abort.header.tag = init.tag;
	abort.type = SCTP_ABORT;
	abort.length = bpf_htons(4);
	if (!pending)
		abort.header.checksum = crc_of((u32 *)&abort, sizeof(abort) / 4);
	return !bpf_skb_change_tail(skb, packet->l4 + sizeof(abort), 0) &&
	       swap_ethernet(skb, packet->l3) && swap_addresses(skb, packet) &&
	       write_length(skb, packet, packet->l4 - packet->l3 + sizeof(abort)) &&
	       !bpf_skb_store_bytes(skb, packet->l4, &abort, sizeof(abort), RECOMPUTE_SUM);
}

/* Truncates the packet after the first QUOTED_PAYLOAD bytes of payload. Copies the result to
 * `bytes`: `quoted` bytes, starting at the IP header.
 *
 * If the device computes the UDP checksum, it is written later, over the truncated packet. The ICMP
 * checksum must include that value. The first truncation detects this case: the kernel does not
 * remove the bytes that will hold the checksum (__bpf_skb_min_len()), and the helper fails.
 */
static __always_inline bool quote(struct __sk_buff *skb, struct packet *packet, u8 *bytes,
				  u64 quoted)
{
	u32 end = packet->l4 + QUOTED_PAYLOAD;
	bool is_udp = packet->tuple.protocol == IPPROTO_UDP;
	u16 checksum = 0;
	bool is_partial = false;

	if (is_udp) {
		if (!load(skb, packet->l4 + UDP_CHECKSUM, &checksum, 2))
			return false;
		is_partial = bpf_skb_change_tail(skb, packet->l4 + UDP_CHECKSUM, 0);
	}
	if (bpf_skb_change_tail(skb, end, 0))
		return false;
	if (is_udp && !is_partial &&
	    bpf_skb_store_bytes(skb, packet->l4 + UDP_CHECKSUM, &checksum, 2, 0))
		return false;
	if (!within(quoted, 28, QUOTED_MAX) || bpf_skb_load_bytes(skb, packet->l3, bytes, quoted))
		return false;
	if (is_partial) {
		u16 udp[4] ALIGNED;
		u32 sum = 0;

		if (!load(skb, packet->l4, udp, sizeof(udp)))
			return false;
#pragma unroll
		for (int i = 0; i < 4; i++)
			sum += udp[i];
		checksum = ~fold(sum);
		if (!checksum)
			checksum = 0xffff;
		if (!within(quoted, 28, QUOTED_MAX))
			return false;
		*(u16 *)(bytes + quoted - 2) = checksum;
	}
	return true;
}

struct icmp_header {
	u8 type;
	u8 code;
	u16 checksum;
	__be32 mtu; /* 0, unless the packet is too big */
};

struct error4 {
	struct ipv4_header ip;
	struct icmp_header icmp;
};

struct error6 {
	struct ipv6_header ip;
	struct icmp_header icmp;
};

/* `mtu`: see answer_icmp(). */
static __always_inline bool error4(struct __sk_buff *skb, struct packet *packet, u8 *bytes,
				   u64 quoted, u32 mtu)
{
	struct error4 header = {};
	u32 sum;

	header.ip.version_length = 0x45;
	header.ip.total_length = bpf_htons(sizeof(header) + quoted);
	header.ip.ttl = TTL;
	header.ip.protocol = IPPROTO_ICMP;
	header.ip.source = packet->tuple.destination.word[3];
	header.ip.destination = packet->tuple.source.word[3];
	header.ip.checksum =
	    ~fold((u32)bpf_csum_diff(0, 0, (void *)&header.ip, sizeof(header.ip), 0));
	header.icmp.type = 3;
	header.icmp.code = mtu ? 4 : 3; /* fragmentation needed; port unreachable, as REJECT */
	header.icmp.mtu = bpf_htonl(mtu);
	sum = (u32)bpf_csum_diff(0, 0, (void *)&header.icmp, sizeof(header.icmp), 0);
	hide(quoted);
	if (quoted > QUOTED_MAX)
		return false;
	header.icmp.checksum = ~fold((u32)bpf_csum_diff(0, 0, bytes, quoted, sum));
	return !bpf_skb_adjust_room(skb, sizeof(header), BPF_ADJ_ROOM_AT_MAC, 0) &&
	       !bpf_skb_store_bytes(skb, packet->l3, &header, sizeof(header), 0);
}

static __always_inline bool error6(struct __sk_buff *skb, struct packet *packet, u8 *bytes,
				   u64 quoted, u32 mtu)
{
	struct error6 header = {};
	__be32 pseudo[2] = {bpf_htonl(sizeof(header.icmp) + quoted), bpf_htonl(IPPROTO_ICMPV6)};
	u32 sum;

	*(u8 *)&header.ip = 0x60;
	header.ip.payload_length = bpf_htons(sizeof(header.icmp) + quoted);
	header.ip.next = IPPROTO_ICMPV6;
	header.ip.hop_limit = TTL;
	header.ip.source = packet->tuple.destination;
	header.ip.destination = packet->tuple.source;
	header.icmp.type = mtu ? 2 : 1; /* packet too big; destination unreachable */
	header.icmp.code = mtu ? 0 : 4; /* port unreachable */
	header.icmp.mtu = bpf_htonl(mtu);
	sum = (u32)bpf_csum_diff(0, 0, (void *)&header.ip.source, ADDRESSES, 0);
	sum = (u32)bpf_csum_diff(0, 0, (void *)pseudo, sizeof(pseudo), sum);
	sum = (u32)bpf_csum_diff(0, 0, (void *)&header.icmp, sizeof(header.icmp), sum);
	hide(quoted);
	if (quoted > QUOTED_MAX)
		return false;
	header.icmp.checksum = ~fold((u32)bpf_csum_diff(0, 0, bytes, quoted, sum));
	return !bpf_skb_adjust_room(skb, sizeof(header), BPF_ADJ_ROOM_AT_MAC, 0) &&
	       !bpf_skb_store_bytes(skb, packet->l3, &header, sizeof(header), 0);
}

/* Turns the packet into the ICMP error that a closed port sends (RFC 1122, 4.1.3.1; RFC 4443, 3.1),
 * or, if `mtu` is not 0, into the one of a router whose next link has this MTU (RFC 1191, 4; RFC
 * 4443, 3.2). `bytes` has room for 128 bytes. Returns false on failure; the packet is then invalid
 * and must be dropped.
 */
static __always_inline bool answer_icmp(struct __sk_buff *skb, struct packet *packet, u8 *bytes,
					u32 mtu)
{
	u64 quoted = packet->l4 - packet->l3 + QUOTED_PAYLOAD;

	if (!swap_ethernet(skb, packet->l3) || !quote(skb, packet, bytes, quoted))
		return false;
	if (packet->version == 4)
		return error4(skb, packet, bytes, quoted, mtu);
	return error6(skb, packet, bytes, quoted, mtu);
}

/* Takes one ICMP error from the node's budget. The budget is refilled at the kernel's own rate
 * (net.ipv4.icmp_msgs_per_sec and icmp_msgs_burst, icmp_global_allow()). Concurrent CPUs may take
 * the same unit. Returns false if the budget is empty, which is always the case if the rate is 0.
 */
static __always_inline bool icmp_is_allowed(void)
{
	WORD_KEY(zero, 0);
	struct icmp_budget *budget = icmp_budget.lookup(zero);
	const struct node *settings = node_get();
	u64 now, refill;

	if (!budget || !settings)
		return true;
	now = bpf_ktime_get_ns();
	refill = now - budget->refilled;
	if (refill > NSEC_PER_SEC)
		refill = NSEC_PER_SEC;
	refill = refill * settings->icmp_rate / NSEC_PER_SEC;
	if (!settings->icmp_rate) {
		budget->errors = 0;
	} else if (refill) {
		u64 errors = budget->errors + refill;

		budget->refilled = now;
		budget->errors = errors < settings->icmp_burst ? errors : settings->icmp_burst;
	}
	if (!budget->errors) {
		count(COUNTER_ICMP_LIMITED);
		return false;
	}
	budget->errors -= 1;
	return true;
}

/* Turns the packet into the rejection that the client of a Service without endpoints gets. Returns
 * false if the client gets no reply; the caller then drops the packet. `bytes`: see answer_icmp().
 */
static __always_inline bool answer_rejection(struct __sk_buff *skb, struct packet *packet,
					     u8 *bytes)
{
	if (!is_answerable(&packet->tuple.source))
		return false;
	if (packet->tuple.protocol == IPPROTO_TCP)
		return answer_reset(skb, packet);
	if (packet->tuple.protocol == IPPROTO_SCTP)
		return answer_abort(skb, packet);
	if (!icmp_is_allowed())
		return false;
	return answer_icmp(skb, packet, bytes, 0);
}
