/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * ICMP errors about packets of a flow. The recipient of an error must find in it the packet that it
 * sent, so the quoted packet is translated, too.
 *
 * The quoted packet was sent in the opposite direction of the error. The reverse of its tuple
 * therefore identifies the flow and direction of the error. The error is translated like a packet
 * with this reverse tuple, and the quoted packet gets the reverse of the result.
 */
#pragma once

#include "answer.h"
#include "flow.h"
#include "rewrite.h"

/* Whether the packet is an ICMP error, which quotes another packet. ICMP: destination unreachable
 * (including fragmentation needed), time exceeded, parameter problem (RFC 792). ICMPv6: all errors
 * (RFC 4443, 2.1).
 */
static __always_inline bool is_icmp_error(const struct packet *packet)
{
	u8 type = packet->icmp_type;

	if (packet->version == 4)
		return type == 3 || type == 11 || type == 12;
	return type != 0 && type < 128;
}

/* Whether the packet is an ICMP redirect, which quotes a packet as well. Only redirects from this
 * node's stack matter. ICMPv6 redirects have another format (RFC 4861, 4.5) and are not parsed.
 */
static __always_inline bool is_icmp_redirect(const struct packet *packet)
{
	return packet->version == 4 && packet->icmp_type == 5;
}

/* Parses the packet that `error` quotes into `quoted`, and sets `tuple` to the reverse of its
 * tuple. The quoted transport header may end after the ports. Returns false if no packet is quoted,
 * or if Services do not have its protocol.
 */
static __always_inline bool parse_quoted(struct __sk_buff *skb, const struct packet *error, u8 side,
					 struct packet *quoted, struct flow_key *tuple)
{
	u32 end = error->l3 + error->length; /* padding may follow */
	__be16 ports[2];
	u32 length;

	packet_begin(quoted, error->l4 + ICMP_HEADER, side);
	if (error->version == 4) {
		struct ipv4_header ip;

		if (!load(skb, quoted->l3, &ip, sizeof(ip)) || ip.version_length >> 4 != 4 ||
		    (ip.version_length & 15) < 5 || ip.offset & bpf_htons(FRAGMENT_OFFSET))
			return false;
		packet_set4(quoted, &ip);
	} else {
		struct ipv6_header ip;

		if (!load(skb, quoted->l3, &ip, sizeof(ip)) || *(u8 *)&ip >> 4 != 6 ||
		    !packet_set6(quoted, &ip) || !skip_extensions(skb, quoted, ip.next) ||
		    quoted->fragment == LATER)
			return false;
	}
	length = quoted->length; /* of the complete packet */
	quoted->length = end - quoted->l3;
	if (!is_transport(quoted->tuple.protocol) || quoted->l4 + 4 > end ||
	    !load(skb, quoted->l4, ports, 4))
		return false;
	if (quoted->tuple.protocol == IPPROTO_SCTP)
		quoted->crc_shift = crc_shift(length - (quoted->l4 - quoted->l3));
	quoted->tuple.source_port = ports[0];
	quoted->tuple.destination_port = ports[1];
	tuple_reverse(tuple, &quoted->tuple);
	return true;
}

/* Updates the quoted checksum at `offset` after the sum over the words that it covers has changed
 * by `diff`. Sets `checksum_diff` to the difference that the new checksum makes in the sum over the
 * ICMP message. Does nothing if the quotation ends before the checksum.
 */
static __always_inline bool patch_quoted_checksum(struct __sk_buff *skb, u32 offset, u32 diff,
						  bool zero_is_none, u32 *checksum_diff)
{
	u16 old, new;

	if (!load(skb, offset, &old, 2) || (zero_is_none && !old))
		return true;
	new = ~fold((u32)(u16)~old + fold(diff));
	if (zero_is_none && !new)
		new = 0xffff;
	*checksum_diff = (u32)(u16)~old + new;
	return !bpf_skb_store_bytes(skb, offset, &new, 2, 0);
}

/* As patch_quoted_checksum(), for SCTP. A CRC of 0 most likely is not computed yet, because this
 * node's stack quotes a packet that it did not send.
 */
static __always_inline bool patch_quoted_crc(struct __sk_buff *skb, const struct packet *quoted,
					     u32 ports_change, u32 *checksum_diff)
{
	u32 crc[2] = {};

	if (!load(skb, quoted->l4 + SCTP_CHECKSUM, &crc[0], 4) || !crc[0])
		return true;
	crc[1] = crc[0] ^ crc_change(ports_change, quoted->crc_shift);
	*checksum_diff = sum_diff(&crc[0], &crc[1], 1);
	return !bpf_skb_store_bytes(skb, quoted->l4 + SCTP_CHECKSUM, &crc[1], 4, 0);
}

/* Replaces the tuple of the quoted packet by `to`. Sets `diff` to the resulting difference of the
 * sum over the ICMP message. Returns false on failure; the packet is then invalid and must be
 * dropped.
 */
static __always_inline bool rewrite_quoted(struct __sk_buff *skb, struct packet *quoted,
					   struct flow_key *to, u32 *diff)
{
	u32 addresses = addresses_diff(&quoted->tuple, to);
	u32 ports = ports_diff(&quoted->tuple, to);
	u32 checksum = checksum_offset(quoted->tuple.protocol);
	u32 words = *(u32 *)&to->source_port;
	u32 checksum_diff = 0;

	if (checksum && quoted->l4 + checksum + 2 <= quoted->l3 + quoted->length &&
	    !patch_quoted_checksum(skb, quoted->l4 + checksum, fold(addresses) + fold(ports),
				   quoted->tuple.protocol == IPPROTO_UDP, &checksum_diff))
		return false;
	if (quoted->tuple.protocol == IPPROTO_SCTP &&
	    quoted->l4 + SCTP_CHECKSUM + 4 <= quoted->l3 + quoted->length &&
	    !patch_quoted_crc(skb, quoted, words ^ *(u32 *)&quoted->tuple.source_port,
			      &checksum_diff))
		return false;
	if (bpf_skb_store_bytes(skb, quoted->l4, &words, 4, 0))
		return false;
	*diff = (u32)fold(ports) + fold(checksum_diff);
	/* For IPv4 the checksum of the quoted IP header compensates the addresses. */
	if (quoted->version == 6)
		*diff += fold(addresses);
	return write_addresses(skb, quoted->l3, quoted->version, quoted->checksum, to, addresses,
			       false);
}

/* Translates the error `packet`, which quotes `quoted`, like a packet whose tuple becomes `to`.
 * Returns false on failure; the packet is then invalid and must be dropped. Overwrites `key`.
 */
static __always_inline bool rewrite_icmp_error(struct __sk_buff *skb, struct packet *packet,
					       struct packet *quoted, struct flow_key *to,
					       struct flow_key *key)
{
	u32 checksum = packet->l4 + ICMP_CHECKSUM;
	u32 diff = 0;

	tuple_reverse(key, to);
	if (!rewrite_quoted(skb, quoted, key, &diff) ||
	    bpf_l4_csum_replace(skb, checksum, 0, fold(diff), 0))
		return false;
	/* The source of the error changes as well, as in nf_nat_icmp_reply_translation(). If it is
	 * a router that is connected to both sides of this node, the router would otherwise receive
	 * a packet with its own source address and drop it as a martian.
	 */
	diff = addresses_diff(&packet->tuple, to);
	if (packet->version == 6 && !update_pseudo_header_sum(skb, checksum, 6, diff, 0))
		return false;
	count(COUNTER_ICMP_ERROR);
	return write_addresses(skb, packet->l3, packet->version, packet->checksum, to, diff, false);
}
