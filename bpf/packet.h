/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Parsing: finds the headers of a packet and reads its tuple. Nothing in this file changes a
 * packet.
 */
#pragma once

#include "maps.h"
#include "addr.h"
#include "crc32c.h"

#define ETHERNET_HEADER	  14
#define FRAGMENT_OFFSET	  0x1fff
#define MORE_FRAGMENTS	  0x2000
#define LINEAR_MAX	  1024 /* maximum offset at which load_header() reads the linear part */
#define EXTENSION_HEADERS 6    /* a packet with more extension headers is MALFORMED */

#define FRAGMENTS_TIMEOUT 30000000000ULL /* ns; the default of net.ipv4.ipfrag_time */
#define VLAN_ID		  0x0fff	 /* 0: the tag has only a priority */

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

#ifndef IPPROTO_SCTP
#define IPPROTO_SCTP 132
#endif

enum parsed {
	UNSUPPORTED, /* not IP, or a protocol that Services do not have */
	TRANSPORT,   /* TCP, UDP or SCTP; later fragments have no ports */
	ICMP,	     /* ICMP or ICMPv6; their later fragments are UNSUPPORTED */
	MALFORMED,   /* headers are inconsistent or truncated, or there are too many of them */
};

enum fragment_kind {
	WHOLE,
	FIRST,
	LATER, /* a fragment without transport header */
};

/* Aligned, so that the compiler zeroes it by words. */
struct packet {
	struct flow_key tuple; /* ports are 0 if the packet has none */
	u32 l3;		       /* offset of the IP header in the packet */
	u32 l4;		       /* offset of the header after the IP header and its extensions */
	u32 length;	       /* length of the IP packet; link layer padding may follow */
	u32 fragment_id;
	/* TCP: the sequence number of the first byte, the one after the last byte (SYN and FIN
	 * count as one each), and the acknowledgment number, in host byte order.
	 */
	u32 sequence;
	u32 sequence_end;
	u32 acknowledged;
	u32 crc_shift;	      /* SCTP: crc_shift() of the length of the SCTP packet */
	u8 version;	      /* 4 or 6 */
	u8 fragment;	      /* enum fragment_kind */
	u8 fragment_protocol; /* as fragment_key.protocol */
	u8 tcp_flags; /* TCP; SCTP: TCP_SYN if the packet opens an association; otherwise 0 */
	u8 icmp_type; /* 0 if the packet is not ICMP */
	u16 checksum; /* of the IPv4 header */
	u8 ttl;	      /* IPv6: the hop limit */
	bool opens;   /* the first packet of its flow */
} __attribute__((aligned(8)));

struct ipv4_header {
	u8 version_length;
	u8 tos;
	__be16 total_length;
	__be16 id;
	__be16 offset;
	u8 ttl;
	u8 protocol;
	u16 checksum;
	__be32 source;
	__be32 destination;
};

struct ipv6_header {
	__be32 version_class_label;
	__be16 payload_length;
	u8 next;
	u8 hop_limit;
	struct address source;
	struct address destination;
};

static __always_inline bool load(struct __sk_buff *skb, u32 offset, void *to, u32 size)
{
	return !bpf_skb_load_bytes(skb, offset, to, size);
}

/* As load(), for headers that are read from every packet. `size` is a constant multiple of 4.
 * Headers are usually in the linear part of the packet, which can be read without a helper. Two
 * calls of the helper would cost more than the rest of the program.
 */
static __always_inline bool load_header(struct __sk_buff *skb, u32 offset, void *to, u32 size)
{
	u64 at = offset;

	hide(at);
	if (at < LINEAR_MAX) {
		void *begin = (void *)(long)skb->data + at;

		hide(begin); /* compare the same register that is read from, for the verifier */
		if (begin + size <= (void *)(long)skb->data_end) {
#pragma unroll
			for (u32 i = 0; i < size / 4; i++)
				((u32 *)to)[i] = ((u32 *)begin)[i];
			return true;
		}
	}
	return load(skb, offset, to, size);
}

/* Sets the fields of `packet` that the IPv4 header contains, except those of fragments. */
static __always_inline void packet_set4(struct packet *packet, const struct ipv4_header *ip)
{
	packet->version = 4;
	packet->l4 = packet->l3 + (ip->version_length & 15) * 4;
	packet->length = bpf_ntohs(ip->total_length);
	packet->checksum = ip->checksum;
	packet->ttl = ip->ttl;
	address_v4(&packet->tuple.source, ip->source);
	address_v4(&packet->tuple.destination, ip->destination);
	packet->tuple.protocol = ip->protocol;
}

/* As packet_set4() for IPv6, except the protocol. Returns false for IPv4-mapped addresses, which
 * the programs would treat as IPv4 (RFC 4291, 2.5.5.2; RFC 4038, 4.2).
 */
static __always_inline bool packet_set6(struct packet *packet, const struct ipv6_header *ip)
{
	packet->version = 6;
	packet->l4 = packet->l3 + sizeof(*ip);
	packet->length = bpf_ntohs(ip->payload_length) + sizeof(*ip);
	packet->ttl = ip->hop_limit;
	packet->tuple.source = ip->source;
	packet->tuple.destination = ip->destination;
	return !address_is_v4(&ip->source) && !address_is_v4(&ip->destination);
}

static __always_inline void parse_tcp(struct packet *packet, const __be32 *header)
{
	u32 headers = packet->l4 - packet->l3 + (((const u8 *)header)[12] >> 4) * 4;
	u8 flags = ((const u8 *)header)[13];

	packet->tcp_flags = flags;
	packet->sequence = bpf_ntohl(header[1]);
	packet->acknowledged = bpf_ntohl(header[2]);
	packet->sequence_end =
	    packet->sequence + packet->length - headers + !!(flags & TCP_SYN) + !!(flags & TCP_FIN);
}

/* Reads the ports, and the TCP fields. The complete header must be present, because later steps
 * write its checksum.
 */
static __always_inline enum parsed parse_transport(struct __sk_buff *skb, struct packet *packet)
{
	u8 protocol = packet->tuple.protocol;
	__be32 header[5];

	if (protocol == IPPROTO_TCP) {
		if (!load_header(skb, packet->l4, header, 20))
			return MALFORMED;
		parse_tcp(packet, header);
	} else if (protocol == IPPROTO_UDP) {
		if (!load_header(skb, packet->l4, header, 8))
			return MALFORMED;
	} else if (protocol == IPPROTO_SCTP) {
		if (!load_header(skb, packet->l4, header, 12))
			return MALFORMED;
		if (!header[1]) /* only INIT has verification tag 0 (RFC 9260, 8.5.1) */
			packet->tcp_flags = TCP_SYN;
	} else {
		return UNSUPPORTED;
	}
	packet->tuple.source_port = ((__be16 *)header)[0];
	packet->tuple.destination_port = ((__be16 *)header)[1];
	return TRANSPORT;
}

static __always_inline bool is_transport(u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP;
}

static __always_inline bool is_extension(u8 protocol)
{
	return protocol == IPPROTO_HOPOPTS || protocol == IPPROTO_ROUTING ||
	       protocol == IPPROTO_DSTOPTS || protocol == IPPROTO_FRAGMENT;
}

/* Parses the header after the IP header, whose fields `packet` already contains. */
static __always_inline enum parsed parse_payload(struct __sk_buff *skb, struct packet *packet)
{
	u8 protocol = packet->tuple.protocol;

	if (packet->fragment == LATER)
		return is_transport(protocol) || is_extension(protocol) ? TRANSPORT : UNSUPPORTED;
	if (protocol == (packet->version == 4 ? IPPROTO_ICMP : IPPROTO_ICMPV6)) {
		__be32 header[2];

		if (!load(skb, packet->l4, header, 8))
			return MALFORMED;
		packet->icmp_type = *(u8 *)header;
		return ICMP;
	}
	return parse_transport(skb, packet);
}

static __always_inline enum parsed parse4(struct __sk_buff *skb, struct packet *packet)
{
	struct ipv4_header ip;
	u16 offset;

	if (!load_header(skb, packet->l3, &ip, sizeof(ip)))
		return MALFORMED;
	if (ip.version_length >> 4 != 4 || (ip.version_length & 15) < 5)
		return MALFORMED;
	packet_set4(packet, &ip);
	offset = bpf_ntohs(ip.offset);
	packet->fragment_id = ip.id;
	packet->fragment_protocol = ip.protocol;
	if (offset & FRAGMENT_OFFSET)
		packet->fragment = LATER;
	else if (offset & MORE_FRAGMENTS)
		packet->fragment = FIRST;
	return parse_payload(skb, packet);
}

struct fragment_header {
	u8 next;
	u8 reserved;
	__be16 offset; /* upper 13 bits: offset; lowest bit: more fragments */
	__be32 id;
};

/* Skips the extension headers after the IPv6 header (RFC 8200, 4). `next` is the type of the first
 * header. Returns false if there are too many extension headers, or if one is truncated.
 */
static __always_inline bool skip_extensions(struct __sk_buff *skb, struct packet *packet, u8 next)
{
#pragma nounroll
	for (int i = 0; i <= EXTENSION_HEADERS; again(i, 1)) {
		struct fragment_header header;

		if (!is_extension(next)) {
			packet->tuple.protocol = next;
			return true;
		}
		if (i == EXTENSION_HEADERS || !load(skb, packet->l4, &header, sizeof(header)))
			return false;
		if (next == IPPROTO_FRAGMENT) {
			u16 offset = bpf_ntohs(header.offset);

			packet->fragment_id = header.id;
			packet->fragment_protocol = header.next;
			if (offset & 0xfff8)
				packet->fragment = LATER;
			else if (offset & 1)
				packet->fragment = FIRST;
			packet->l4 += sizeof(header);
		} else {
			packet->l4 +=
			    (header.reserved + 1) * 8; /* the length field of other headers */
		}
		next = header.next;
		if (packet->fragment == LATER) { /* payload follows, no header */
			packet->tuple.protocol = next;
			return true;
		}
	}
	return false;
}

static __always_inline enum parsed parse6(struct __sk_buff *skb, struct packet *packet)
{
	struct ipv6_header ip;

	if (!load_header(skb, packet->l3, &ip, sizeof(ip)) || *(u8 *)&ip >> 4 != 6)
		return MALFORMED;
	if (!packet_set6(packet, &ip))
		return UNSUPPORTED;
	if (!skip_extensions(skb, packet, ip.next))
		return MALFORMED;
	return parse_payload(skb, packet);
}

/* Parses a packet. `packet` comes from packet_begin(). A packet with a VLAN tag is UNSUPPORTED: the
 * VLAN device receives it without the tag, and has its own program.
 */
static __always_inline enum parsed parse(struct __sk_buff *skb, struct packet *packet)
{
	enum parsed parsed = UNSUPPORTED;

	if (skb->vlan_present && skb->vlan_tci & VLAN_ID)
		return UNSUPPORTED;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		parsed = parse4(skb, packet);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		parsed = parse6(skb, packet);
	if (parsed == MALFORMED)
		count(COUNTER_UNPARSED);
	if (parsed == TRANSPORT && packet->tuple.protocol == IPPROTO_SCTP)
		packet->crc_shift = crc_shift(packet->length - (packet->l4 - packet->l3));
	return parsed;
}

/* Stores the ports of a first fragment in the map, or sets the ports of a later fragment from the
 * map. Returns false if no first fragment has arrived within FRAGMENTS_TIMEOUT; an older one
 * belongs to another datagram.
 */
static __always_inline bool fragment_ports(struct packet *packet)
{
	WORD_STRUCT(struct fragment_key, key);
	struct fragment ports = {}, *known;

	key->source = packet->tuple.source;
	key->destination = packet->tuple.destination;
	key->id = packet->fragment_id;
	key->protocol = packet->fragment_protocol;
	key->side = packet->tuple.side;
	if (packet->fragment == FIRST) {
		ports.source_port = packet->tuple.source_port;
		ports.destination_port = packet->tuple.destination_port;
		ports.protocol = packet->tuple.protocol;
		ports.seen = time_now();
		fragments.update(key, &ports);
		return true;
	}
	known = fragments.lookup(key);
	if (!known || (s64)(time_now() - known->seen) > (s64)FRAGMENTS_TIMEOUT) {
		count(COUNTER_FRAGMENT_ORPHAN);
		return false;
	}
	packet->tuple.source_port = known->source_port;
	packet->tuple.destination_port = known->destination_port;
	packet->tuple.protocol = known->protocol;
	return true;
}

/* Zeroes `packet` except the offset of the IP header and the side. */
static __always_inline struct packet *packet_begin(struct packet *packet, u32 l3, u8 side)
{
	__builtin_memset(packet, 0, sizeof(*packet));
	packet->l3 = l3;
	packet->tuple.side = side;
	return packet;
}

static __always_inline bool is_first(const struct packet *packet)
{
	if (packet->tuple.protocol == IPPROTO_UDP)
		return packet->fragment != LATER;
	return (packet->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}
