/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Changes addresses and ports, and every checksum that covers them. The length of a packet does not
 * change.
 *
 * With CHECKSUM_PARTIAL the device computes the checksum, and the field holds only the sum of the
 * pseudo header. With CHECKSUM_NONE, _COMPLETE and _UNNECESSARY the field holds the complete
 * checksum. The kernel's helpers handle both cases, but need to know whether a change affects the
 * pseudo header or the rest. Each of the two therefore needs its own call.
 */
#pragma once

#include "packet.h"

#define IPV4_CHECKSUM 10
#define IPV6_SOURCE   8
#define TCP_CHECKSUM  16
#define UDP_CHECKSUM  6
#define SCTP_CHECKSUM 8
#define ICMP_CHECKSUM 2
#define IPV4_HEADER   20
#define IPV6_HEADER   40
#define UDP_HEADER    8
#define TCP_HEADER    20
#define ADDRESSES     32 /* source and destination are adjacent in struct flow_key */
#define PORTS	      4	 /* both ports follow directly */

#define PSEUDO_HEADER 0x10 /* BPF_F_PSEUDO_HDR */
#define RECOMPUTE_SUM 0x01 /* BPF_F_RECOMPUTE_CSUM: updates skb->csum of CHECKSUM_COMPLETE */
#define MANGLED_ZERO  0x20 /* BPF_F_MARK_MANGLED_0: 0 means no UDP checksum and stays 0 */

static __always_inline u16 fold(u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (u16)(sum + (sum >> 16));
}

/* Returns the difference between the one's complement sums over `count` words (RFC 1624). For so
 * few words this is faster than bpf_csum_diff().
 */
static __always_inline u32 sum_diff(const __be32 *from, const __be32 *to, u32 count)
{
	u64 sum = 0;

#pragma unroll
	for (u32 i = 0; i < count; i++)
		sum += (u64)(u32)~from[i] + to[i];
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (u32)sum + (u32)(sum >> 32);
}

/* Returns the difference between the sums over both addresses. It is correct for IPv4 as well,
 * because the prefix ::ffff:0:0/96 does not change.
 */
static __always_inline u32 addresses_diff(const struct flow_key *from, const struct flow_key *to)
{
	return sum_diff(from->source.word, to->source.word, ADDRESSES / 4);
}

static __always_inline bool ports_differ(const struct flow_key *from, const struct flow_key *to)
{
	return *(u32 *)&from->source_port != *(u32 *)&to->source_port;
}

static __always_inline u32 ports_diff(const struct flow_key *from, const struct flow_key *to)
{
	return sum_diff((__be32 *)&from->source_port, (__be32 *)&to->source_port, 1);
}

/* Updates the checksum at `offset` after the sum over its pseudo header has changed by `diff`.
 *
 * With CHECKSUM_COMPLETE, kernels before 6.16 subtract `diff` from skb->csum
 * (inet_proto_csum_replace_by_diff(); ead7f9b8de65, "bpf: Fix L4 csum update on IPv6 in
 * CHECKSUM_COMPLETE"). This is correct for IPv4, where the checksum of the IP header changes as
 * well. It is wrong for IPv6, so bpf_csum_update() adds `diff` again.
 */
static __always_inline bool update_pseudo_header_sum(struct __sk_buff *skb, u32 offset, u8 version,
						     u32 diff, u32 flags)
{
	if (bpf_l4_csum_replace(skb, offset, 0, diff, PSEUDO_HEADER | flags))
		return false;
	if (version == 6)
		bpf_csum_update(skb, fold(diff)); /* only affects CHECKSUM_COMPLETE */
	return true;
}

/* Returns the checksum of an IPv4 header after the sum over its addresses has changed by `diff`. */
static __always_inline u16 header_checksum(u16 checksum, u32 diff)
{
	return ~fold((u32)(u16)~checksum + fold(diff));
}

/* The end of an IPv4 header, and the ports, which follow directly if the header has no options. */
struct ipv4_tail {
	u16 checksum;
	__be16 addresses[4]; /* 16-bit halves of both addresses, to avoid padding */
	__be16 ports[2];
};

/* Writes the addresses of `to` into the IP header at `l3`. `diff` is the resulting difference
 * between the sums over the addresses, and `checksum` the present checksum of the IPv4 header.
 * `ports`: the ports follow directly and are written, too. Returns false on failure; the packet is
 * then invalid and must be dropped.
 */
static __always_inline bool write_addresses(struct __sk_buff *skb, u32 l3, u8 version, u16 checksum,
					    struct flow_key *to, u32 diff, bool ports)
{
	struct ipv4_tail tail;

	if (version == 6)
		return !bpf_skb_store_bytes(skb, l3 + IPV6_SOURCE, &to->source,
					    ports ? ADDRESSES + PORTS : ADDRESSES, 0);
	tail.checksum = header_checksum(checksum, diff);
	tail.addresses[0] = ((__be16 *)&to->source.word[3])[0];
	tail.addresses[1] = ((__be16 *)&to->source.word[3])[1];
	tail.addresses[2] = ((__be16 *)&to->destination.word[3])[0];
	tail.addresses[3] = ((__be16 *)&to->destination.word[3])[1];
	tail.ports[0] = to->source_port;
	tail.ports[1] = to->destination_port;
	return !bpf_skb_store_bytes(skb, l3 + IPV4_CHECKSUM, &tail,
				    ports ? sizeof(tail) : sizeof(tail) - PORTS, 0);
}

/* Returns the offset of the Internet checksum in the transport header. Returns 0 for SCTP, which
 * has a CRC (crc32c.h).
 */
static __always_inline u32 checksum_offset(u8 protocol)
{
	if (protocol == IPPROTO_TCP)
		return TCP_CHECKSUM;
	return protocol == IPPROTO_UDP ? UDP_CHECKSUM : 0;
}

/* Whether the device or the stack still has to compute the CRC of an SCTP packet
 * (CHECKSUM_PARTIAL). The CRC field at `offset` is 0, which is also one of the 2^32 possible CRCs.
 * No helper returns skb->ip_summed. bpf_l4_csum_replace() depends on it: with CHECKSUM_PARTIAL it
 * does not write a sum that covers no pseudo header.
 */
static __always_inline bool crc_is_pending(struct __sk_buff *skb, u32 offset)
{
	u16 sum[2] ALIGNED = {};

	if (bpf_l4_csum_replace(skb, offset, 0, 1, 0) || !load(skb, offset, sum, 2) || !sum[0])
		return true;
	sum[0] = 0;
	bpf_skb_store_bytes(skb, offset, sum, 2, 0);
	return false;
}

struct sctp_header {
	__be32 ports;
	__be32 tag;
	u32 checksum;
};

/* Replaces the ports of an SCTP packet. A fragment cannot be changed: the change of the CRC depends
 * on the length of the complete packet. Returns false if the packet must be dropped.
 */
static __always_inline bool write_sctp_ports(struct __sk_buff *skb, const struct packet *packet,
					     const struct flow_key *to)
{
	u32 ports = *(u32 *)&to->source_port;
	struct sctp_header header;

	if (packet->fragment != WHOLE) {
		count(COUNTER_SCTP_FRAGMENT);
		return false;
	}
	if (!load(skb, packet->l4, &header, sizeof(header)))
		return false;
	if (header.checksum || !crc_is_pending(skb, packet->l4 + SCTP_CHECKSUM))
		header.checksum ^= crc_change(header.ports ^ ports, packet->crc_shift);
	header.ports = ports;
	return !bpf_skb_store_bytes(skb, packet->l4, &header, sizeof(header), RECOMPUTE_SUM);
}

/* Replaces the addresses and ports of the packet by those of `to`. `packet` still describes the
 * packet before the change. Returns false if the kernel has no memory, or for a fragment of an SCTP
 * packet whose ports change; the packet is then invalid and must be dropped.
 */
static __always_inline bool rewrite(struct __sk_buff *skb, struct packet *packet,
				    struct flow_key *to)
{
	u32 diff = addresses_diff(&packet->tuple, to);
	u32 flags = packet->tuple.protocol == IPPROTO_UDP ? MANGLED_ZERO : 0;
	u32 checksum = checksum_offset(packet->tuple.protocol);
	u32 end = packet->l3 + (packet->version == 4 ? IPV4_HEADER : IPV6_HEADER);
	bool ports = false;

	if (packet->fragment != LATER && checksum) {
		if (!update_pseudo_header_sum(skb, packet->l4 + checksum, packet->version, diff,
					      flags))
			return false;
		ports = ports_differ(&packet->tuple, to);
	}
	if (packet->tuple.protocol == IPPROTO_SCTP && ports_differ(&packet->tuple, to) &&
	    !write_sctp_ports(skb, packet, to))
		return false;
	if (ports) {
		u32 port_diff = ports_diff(&packet->tuple, to);

		if (bpf_l4_csum_replace(skb, packet->l4 + checksum, 0, port_diff, flags))
			return false;
		if (packet->l4 != end) { /* options or extension headers precede the ports */
			if (bpf_skb_store_bytes(skb, packet->l4, &to->source_port, PORTS, 0))
				return false;
			ports = false;
		}
	}
	/* No checksum in the packet compensates the change. */
	if (packet->version == 6 && (packet->fragment == LATER || !checksum))
		bpf_csum_update(skb, fold(diff));
	return write_addresses(skb, packet->l3, packet->version, packet->checksum, to, diff, ports);
}

/* Sets the TTL or hop limit of the packet. `packet` still has the value before the change. For IPv6
 * skb->csum must be recomputed, because no checksum in the packet compensates the change.
 */
static __always_inline bool write_ttl(struct __sk_buff *skb, const struct packet *packet, u8 ttl)
{
	u8 old[2] ALIGNED = {packet->ttl, packet->tuple.protocol}, new[2] ALIGNED;

	if (packet->version == 6)
		return !bpf_skb_store_bytes(skb, packet->l3 + 7, &ttl, 1, RECOMPUTE_SUM);
	new[0] = ttl;
	new[1] = old[1];
	return !bpf_l3_csum_replace(skb, packet->l3 + IPV4_CHECKSUM, *(u16 *)old, *(u16 *)new, 2) &&
	       !bpf_skb_store_bytes(skb, packet->l3 + 8, new, 2, 0);
}
