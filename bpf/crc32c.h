/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only
 *
 * SCTP's checksum, a CRC32c over the complete packet, but not over addresses (RFC 9260, 6.8 and
 * appendix A). The CRC of a packet is a polynomial over GF(2), modulo CRC32C. A change of the ports
 * therefore changes it by a value that depends only on the change and on the number of bytes that
 * follow. No payload is read.
 *
 * A polynomial is a number whose most significant bit is the coefficient of x^0.
 */
#pragma once

#include "compat.h"

#define CRC32C 0x82f63b78ULL /* without x^32 */

/* Returns a * b modulo CRC32C. Branches would multiply the verifier's paths, so both factors of one
 * bit are hidden from the optimizer.
 */
static __always_inline u64 crc_multiply(u64 a, u64 b)
{
	u64 product = 0;

#pragma nounroll
	for (int i = 0; i < 32; again(i, 1)) {
		u64 carry = product & 1, bit = a & 1;

		hide(carry);
		hide(bit);
		product = product >> 1 ^ carry * CRC32C ^ bit * b;
		a >>= 1;
	}
	return product;
}

/* Returns x^(8 * bytes) modulo CRC32C: the factor by which `bytes` more bytes multiply a remainder.
 * Only the lower 16 bits of `bytes` count, as in the length of an IP packet.
 */
static __always_inline u32 crc_shift(u32 bytes)
{
	/* x^(8 * 2^i) modulo CRC32C */
	static const u32 powers[16] = {
	    0x00800000, 0x00008000, 0x82f63b78, 0x6ea2d55c, 0x18b8ea18, 0x510ac59a,
	    0xb82be955, 0xb8fdb1e7, 0x88e56f72, 0x74c360a4, 0xe4172b16, 0x0d65762a,
	    0x35d73a62, 0x28461564, 0xbf455269, 0xe2ea32dc,
	};
	u64 shift = 0x80000000; /* 1 */

#pragma unroll
	for (int i = 0; i < 16; i++)
		if (bytes >> i & 1)
			shift = crc_multiply(shift, powers[i]);
	return (u32)shift;
}

/* Converts between the byte order of the packet and that of a polynomial. */
static __always_inline u32 crc_order(u32 word)
{
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
	return __builtin_bswap32(word);
#else
	return word;
#endif
}

/* Returns the CRC field of an SCTP packet of `count` words, in which that field is 0. */
static __always_inline u32 crc_of(const u32 *words, u32 count)
{
	u64 crc = 0xffffffff;

#pragma unroll
	for (u32 i = 0; i < count; i++)
		crc = crc_multiply(crc ^ crc_order(words[i]), CRC32C); /* x^32 */
	return crc_order(~(u32)crc);
}

/* Returns the change of the CRC field after the first word of an SCTP packet has changed by
 * `change` (exclusive or). `shift`: crc_shift() of the length of the SCTP packet.
 */
static __always_inline u32 crc_change(u32 change, u32 shift)
{
	return crc_order((u32)crc_multiply(crc_order(change), shift));
}
