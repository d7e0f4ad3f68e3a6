/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Parsing and rewriting for the XDP program, which reads and writes the frame in memory: no helper
 * for checksums takes its context. The results are the same bytes as those of packet.h and
 * rewrite.h.
 */
#pragma once

#include "packet.h"
#include "rewrite.h"

/* Whether a device or the stack still has to compute the checksum of the transport header
 * (CHECKSUM_PARTIAL): then the field contains the sum of the pseudo header. An XDP program cannot
 * read skb->ip_summed, and a frame that it sends loses it. By chance, one in 65535 complete
 * checksums has this value, too; tc processes these packets.
 */
static __always_inline bool checksum_is_pending(const struct packet *packet, u16 checksum)
{
	const __be32 *words = packet->tuple.source.word;
	u64 sum = bpf_htons((u16)(packet->length - (packet->l4 - packet->l3)));

	sum += bpf_htons(packet->tuple.protocol);
#pragma unroll
	for (u32 i = 0; i < ADDRESSES / 4; i++) /* ::ffff:0:0/96 adds 0xffff, which equals 0 */
		sum += words[i];
	sum = (sum & 0xffffffff) + (sum >> 32);
	return fold((u32)sum + (u32)(sum >> 32)) == checksum;
}

/* Reads the transport header at `l4`. Returns false if it is truncated, or if the packet is not a
 * datagram or segment that only continues a flow.
 */
static __always_inline bool read_transport(const void *l4, const void *end, struct packet *packet)
{
	const u16 *halves = l4;

	if (l4 + UDP_HEADER > end)
		return false;
	packet->tuple.source_port = halves[0];
	packet->tuple.destination_port = halves[1];
	if (packet->tuple.protocol == IPPROTO_UDP)
		return !checksum_is_pending(packet, halves[UDP_CHECKSUM / 2]);
	if (packet->tuple.protocol != IPPROTO_TCP || l4 + TCP_HEADER > end)
		return false;
	parse_tcp(packet, l4);
	return !(packet->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST)) &&
	       !checksum_is_pending(packet, halves[TCP_CHECKSUM / 2]);
}

static __always_inline bool read4(const void *l3, const void *end, struct packet *packet)
{
	const struct ipv4_header *ip = l3;

	if (l3 + IPV4_HEADER > end || ip->version_length != 0x45 ||
	    bpf_ntohs(ip->offset) & (MORE_FRAGMENTS | FRAGMENT_OFFSET))
		return false;
	packet_set4(packet, ip);
	return read_transport(l3 + IPV4_HEADER, end, packet);
}

static __always_inline bool read6(const void *l3, const void *end, struct packet *packet)
{
	const struct ipv6_header *ip = l3;

	if (l3 + IPV6_HEADER > end || *(u8 *)l3 >> 4 != 6)
		return false;
	packet->tuple.protocol = ip->next;
	return packet_set6(packet, ip) && read_transport(l3 + IPV6_HEADER, end, packet);
}

/* Parses a frame. `packet` comes from packet_begin(). Returns false unless it is a complete packet
 * in one buffer, without IP options, extension headers or a VLAN tag, that can continue a flow past
 * the stack. A frame in several buffers is not complete at `end`.
 */
static __always_inline bool frame_read(const void *data, const void *end, struct packet *packet)
{
	__be16 type;
	bool read = false;

	if (data + ETHERNET_HEADER > end)
		return false;
	type = *(__be16 *)(data + 12);
	if (type == bpf_htons(ETH_P_IP))
		read = read4(data + ETHERNET_HEADER, end, packet);
	else if (type == bpf_htons(ETH_P_IPV6))
		read = read6(data + ETHERNET_HEADER, end, packet);
	return read && packet->ttl > 1 && end - data >= ETHERNET_HEADER + (s64)packet->length;
}

/* Returns the checksum after the sum over its data has changed by `diff`, with the same
 * representation of 0 as the kernel (inet_proto_csum_replace_by_diff()). UDP has no checksum 0.
 */
static __always_inline u16 updated_checksum(u16 checksum, u32 diff, bool is_udp)
{
	u32 sum = ~(u32)checksum + diff;

	checksum = ~fold(sum + (sum < diff));
	return is_udp && !checksum ? 0xffff : checksum;
}

/* Writes the ports of `to`, and the checksum at the offset `at`, after the sum over the addresses
 * has changed by `diff`.
 */
static __always_inline void write_ports(void *l4, u32 at, bool is_udp, const struct packet *packet,
					const struct flow_key *to, u32 diff)
{
	u16 checksum = *(u16 *)(l4 + at);

	if (!is_udp || checksum) { /* 0: the datagram has no checksum */
		checksum = updated_checksum(checksum, diff, is_udp);
		if (ports_differ(&packet->tuple, to))
			checksum =
			    updated_checksum(checksum, ports_diff(&packet->tuple, to), is_udp);
		*(u16 *)(l4 + at) = checksum;
	}
	((__be16 *)l4)[0] = to->source_port;
	((__be16 *)l4)[1] = to->destination_port;
}

static __always_inline void write4(struct ipv4_header *ip, const struct flow_key *to, u32 diff)
{
	u16 before = *(u16 *)&ip->ttl, after; /* TTL and protocol */

	ip->ttl -= 1;
	after = *(u16 *)&ip->ttl;
	ip->checksum = ~fold((u16)~header_checksum(ip->checksum, diff) + (u16)~before + after);
	ip->source = to->source.word[3];
	ip->destination = to->destination.word[3];
}

static __always_inline void write6(struct ipv6_header *ip, const struct flow_key *to)
{
	ip->hop_limit -= 1;
	ip->source = to->source;
	ip->destination = to->destination;
}

/* The sizes of headers are constants in each call, for the verifier. */
static __always_inline bool write_headers(void *data, const void *end, u32 ip_size, bool is_udp,
					  const struct packet *packet, const struct flow_key *to,
					  const u8 *ethernet)
{
	u32 diff = addresses_diff(&packet->tuple, to);
	void *l3 = data + ETHERNET_HEADER;

	if (l3 + ip_size + (is_udp ? UDP_HEADER : TCP_HEADER) > end)
		return false;
	if (ip_size == IPV4_HEADER)
		write4(l3, to, diff);
	else
		write6(l3, to);
	write_ports(l3 + ip_size, is_udp ? UDP_CHECKSUM : TCP_CHECKSUM, is_udp, packet, to, diff);
	__builtin_memcpy(data, ethernet, 12);
	return true;
}

/* Replaces addresses and ports of a frame that frame_read() accepted by those of `to`, decrements
 * the TTL, and sets the Ethernet addresses. Returns false if the frame is truncated. This cannot
 * happen, but the verifier does not know it.
 */
static __always_inline bool frame_write(void *data, const void *end, const struct packet *packet,
					const struct flow_key *to, const u8 *ethernet)
{
	bool is_udp = packet->tuple.protocol == IPPROTO_UDP;

	if (packet->version == 4)
		return is_udp ? write_headers(data, end, IPV4_HEADER, true, packet, to, ethernet)
			      : write_headers(data, end, IPV4_HEADER, false, packet, to, ethernet);
	return is_udp ? write_headers(data, end, IPV6_HEADER, true, packet, to, ethernet)
		      : write_headers(data, end, IPV6_HEADER, false, packet, to, ethernet);
}
