/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Lowers the maximum segment size that the endpoint of a tunneled connection announces, so that the
 * client's segments fit in the tunnel.
 */
#pragma once

#include "rewrite.h"

#define TCP_HEADER  20
#define TCP_OPTIONS 10 /* the most options that are read; MSS is usually the first one */

#define OPTION_END 0
#define OPTION_NOP 1
#define OPTION_MSS 2

struct mss_option {
	u8 kind;
	u8 length;
	__be16 size;
};

/* Returns the offset of the MSS option in the packet, 0 if there is none. Copies the option. */
static __always_inline u32 mss_option_find(struct __sk_buff *skb, const struct packet *packet,
					   struct mss_option *option)
{
	u32 at = packet->l4 + TCP_HEADER, end;
	u8 words = 0;

	if (!load(skb, packet->l4 + 12, &words, 1))
		return 0;
	end = packet->l4 + (words >> 4) * 4;
#pragma nounroll
	for (int i = 0; i < TCP_OPTIONS; again(i, 1)) {
		u64 other, is_nop, size;

		if (at + sizeof(*option) > end || !load(skb, at, option, sizeof(*option)) ||
		    option->kind == OPTION_END)
			return 0;
		if (option->kind == OPTION_MSS)
			return option->length == sizeof(*option) ? at : 0;
		/* Without a branch: the verifier would follow both ways from each option. */
		other = option->kind ^ OPTION_NOP;
		hide(other);
		is_nop = (other - 1) >> 63;
		size = is_nop | ((is_nop - 1) & option->length);
		if (size + is_nop < 2)
			return 0;
		at += size;
	}
	return 0;
}

/* Lowers the MSS option of a segment with SYN to that of packets of `mtu` bytes. Only whole packets
 * are changed. Returns false on failure; the packet is then invalid and must be dropped.
 *
 * An option at an odd offset changes other 16-bit words of the checksum, so it is swapped for that.
 */
static __always_inline bool clamp_mss(struct __sk_buff *skb, const struct packet *packet, u32 mtu)
{
	u32 headers = (packet->version == 4 ? IPV4_HEADER : IPV6_HEADER) + TCP_HEADER;
	struct mss_option option = {};
	u32 at, most = mtu - headers;
	u16 old, new;

	if (packet->fragment != WHOLE || mtu <= headers)
		return true;
	at = mss_option_find(skb, packet, &option);
	if (!at || bpf_ntohs(option.size) <= most)
		return true;
	old = option.size;
	option.size = new = bpf_htons((u16)most);
	if ((at - packet->l4) & 1) {
		old = old << 8 | old >> 8;
		new = new << 8 | new >> 8;
	}
	return !bpf_l4_csum_replace(skb, packet->l4 + TCP_CHECKSUM, old, new, 2) &&
	       !bpf_skb_store_bytes(skb, at + 2, &option.size, 2, 0);
}
