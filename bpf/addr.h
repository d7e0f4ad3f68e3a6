/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * Addresses: 16 bytes for both families.
 */
#pragma once

#include "abi.h"

#define V4_WORD bpf_htonl(0xffff) /* the third word of ::ffff:a.b.c.d */

static __always_inline void address_v4(struct address *address, __be32 v4)
{
	address->word[0] = 0;
	address->word[1] = 0;
	address->word[2] = V4_WORD;
	address->word[3] = v4;
}

static __always_inline bool address_equal(const struct address *a, const struct address *b)
{
	return a->word[0] == b->word[0] && a->word[1] == b->word[1] && a->word[2] == b->word[2] &&
	       a->word[3] == b->word[3];
}

static __always_inline bool address_is_v4(const struct address *address)
{
	return !address->word[0] && !address->word[1] && address->word[2] == V4_WORD;
}

static __always_inline bool address_is_unspecified(const struct address *address)
{
	return !address->word[0] && !address->word[1] && !address->word[3] &&
	       (!address->word[2] || address->word[2] == V4_WORD);
}

/* 127.0.0.0/8 or ::1 */
static __always_inline bool address_is_loopback(const struct address *address)
{
	if (address_is_v4(address))
		return (address->word[3] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	return !address->word[0] && !address->word[1] && !address->word[2] &&
	       address->word[3] == bpf_htonl(1);
}

/* Sets `result` to the unspecified address of the same family. */
static __always_inline void address_unspecified_like(struct address *result,
						     const struct address *address)
{
	result->word[0] = 0;
	result->word[1] = 0;
	result->word[2] = address_is_v4(address) ? V4_WORD : 0;
	result->word[3] = 0;
}

/* Sets an address from four words. A macro, because the verifier only accepts loads of a context at
 * constant offsets.
 */
#define address_v6(address, words)                                                                 \
	({                                                                                         \
		(address)->word[0] = (words)[0];                                                   \
		(address)->word[1] = (words)[1];                                                   \
		(address)->word[2] = (words)[2];                                                   \
		(address)->word[3] = (words)[3];                                                   \
	})
