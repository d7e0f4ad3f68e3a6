/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * ICMP errors about a packet of a flow: who gets one must find in it the packet that he sent.
 *
 * An error is about a packet that went the other way. So the packet it quotes, turned round, is one
 * that the error may be taken for: it is translated as that packet would be, and the quoted one as
 * that packet's reverse.
 */
#pragma once

#include "answer.h"
#include "flow.h"
#include "rewrite.h"

/* Whether the ICMP packet quotes another one: unreachable, frag-needed, time exceeded, parameter
 * problem (RFC 792), or any error of ICMPv6 (RFC 4443, 2.1).
 */
static __always_inline bool is_icmp_error(const struct packet *packet)
{
	u8 type = packet->icmp_type;

	if (packet->version == 4)
		return type == 3 || type == 11 || type == 12;
	return type != 0 && type < 128;
}

/* It quotes a packet, too, but only this node's own stack makes one that matters here. That of
 * ICMPv6 has another form (RFC 4861, 4.5), and is not looked into.
 */
static __always_inline bool is_icmp_redirect(const struct packet *packet)
{
	return packet->version == 4 && packet->icmp_type == 5;
}

/* The packet that `error` quotes, into `scratch->quoted`, and its reverse into `scratch->tuple`.
 * Its transport header may be cut short behind the ports. False: there is none, or none of a
 * Service.
 */
static __always_inline bool parse_quoted(struct __sk_buff *skb, const struct packet *error, u8 side,
					 struct scratch *scratch)
{
	struct packet *quoted = packet_begin(&scratch->quoted, error->l4 + ICMP_HEADER, side);
	u32 end = error->l3 + error->length; /* behind it is padding, maybe */
	u8 version = error->version;
	__be16 ports[2];

	if (version == 4) {
		struct ipv4_header ip;

		if (!load(skb, quoted->l3, &ip, sizeof(ip)) || ip.version_length >> 4 != 4 ||
		    (ip.version_length & 15) < 5 || ip.offset & bpf_htons(FRAGMENT_OFFSET))
			return false;
		quoted->l4 = quoted->l3 + (ip.version_length & 15) * 4;
		quoted->checksum = ip.checksum;
		address_v4(&quoted->tuple.source, ip.source);
		address_v4(&quoted->tuple.destination, ip.destination);
		quoted->tuple.protocol = ip.protocol;
	} else {
		struct ipv6_header ip;

		if (!load(skb, quoted->l3, &ip, sizeof(ip)) || *(u8 *)&ip >> 4 != 6)
			return false;
		quoted->l4 = quoted->l3 + sizeof(ip);
		quoted->tuple.source = ip.source;
		quoted->tuple.destination = ip.destination;
		if (address_is_v4(&ip.source) || address_is_v4(&ip.destination))
			return false; /* it would be taken for IPv4 */
		if (!skip_extensions(skb, quoted, ip.next) || quoted->fragment == LATER)
			return false;
	}
	quoted->version = version;
	quoted->length = end - quoted->l3;
	if (!is_transport(quoted->tuple.protocol) || quoted->l4 + 4 > end ||
	    !load(skb, quoted->l4, ports, 4))
		return false;
	quoted->tuple.source_port = ports[0];
	quoted->tuple.destination_port = ports[1];
	tuple_reverse(&scratch->tuple, &quoted->tuple);
	return true;
}

/* Replace the 16 bits at `offset`, a checksum, by what it is after its words changed by `diff`; by
 * how much these bits themselves change the sum over the packet goes to `by`. Where the
 * quotation ends before it, nothing happens.
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

/* Give the quoted packet the tuple `to`; by how much the sum over the ICMP message changes goes to
 * `diff`. False: the packet is spoiled.
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
	if (bpf_skb_store_bytes(skb, quoted->l4, &words, 4, 0))
		return false;
	*diff = (u32)fold(ports) + fold(checksum_diff);
	if (quoted->version == 6) /* IPv4's own checksum takes up what its addresses change */
		*diff += fold(addresses);
	return write_addresses(skb, quoted->l3, quoted->version, quoted->checksum, to, addresses,
			       false);
}

/* Translate the error `packet`, which quotes `quoted`, as if it were a packet that becomes `to`.
 * False: the packet is spoiled.
 */
static __always_inline bool rewrite_icmp_error(struct __sk_buff *skb, struct packet *packet,
					       struct packet *quoted, const struct flow_key *to,
					       struct scratch *scratch)
{
	u32 checksum = packet->l4 + ICMP_CHECKSUM;
	u32 diff = 0;

	tuple_reverse(&scratch->key, to);
	if (!rewrite_quoted(skb, quoted, &scratch->key, &diff) ||
	    bpf_l4_csum_replace(skb, checksum, 0, fold(diff), 0))
		return false;
	/* The source, too, as nf_nat_icmp_reply_translation() does: a router on both sides of this
	 * node would take its own address, coming in from elsewhere, for a martian.
	 */
	scratch->key = packet->tuple;
	scratch->key.source = to->source;
	scratch->key.destination = to->destination;
	diff = addresses_diff(&packet->tuple, &scratch->key);
	if (packet->version == 6 && !update_pseudo_header_sum(skb, checksum, 6, diff, 0))
		return false;
	count(COUNTER_ICMP_ERROR);
	return write_addresses(skb, packet->l3, packet->version, packet->checksum, &scratch->key,
			       diff, false);
}
