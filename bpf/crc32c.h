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
	for (u64 i = 0; i < 32; again(i, 4)) {
#pragma unroll
		for (int j = 0; j < 4; j++) {
			u64 carry = product & 1, bit = a & 1;

			hide(carry);
			hide(bit);
			product = product >> 1 ^ carry * CRC32C ^ bit * b;
			a >>= 1;
		}
	}
	return product;
}

/* Returns `powers[digit]`. For an index that is not constant, the array would have to be a map. */
static __always_inline u32 crc_power(const u32 *powers, u32 digit)
{
	u32 power = powers[0];

#pragma unroll
	for (u32 i = 1; i < 16; i++) {
		hide(digit); /* otherwise clang makes an array of it */
		if (digit == i)
			power = powers[i];
	}
	return power;
}

/* Returns x^(8 * bytes) modulo CRC32C: the factor by which `bytes` more bytes multiply a remainder.
 * Only the lower 16 bits of `bytes` count, as in the length of an IP packet.
 */
static __always_inline u32 crc_shift(u32 bytes)
{
	/* x^(8 * digit * 16^row) modulo CRC32C */
	static const u32 powers[4][16] = {
	    {0x80000000, 0x00800000, 0x00008000, 0x00000080, 0x82f63b78, 0xfbc3faf9, 0x8b277743,
	     0x52a0c93f, 0x6ea2d55c, 0x1c08b7d6, 0xf56e0ef4, 0x34019664, 0xa66805eb, 0x7a1f6b24,
	     0xe75d06aa, 0xc94ec098},
	    {0x80000000, 0x18b8ea18, 0x510ac59a, 0xb2dea967, 0xb82be955, 0x36c41f1c, 0x19b29a35,
	     0xc9e90b9e, 0xb8fdb1e7, 0xe55ef1f3, 0x1fe0b5c3, 0xe0553f1e, 0x18e4a304, 0x2b830011,
	     0x56993a31, 0x0246e2e6},
	    {0x80000000, 0x88e56f72, 0x74c360a4, 0x631bb273, 0xe4172b16, 0x71892b1b, 0x835305c9,
	     0x196b1eae, 0x0d65762a, 0xafc81338, 0xb5a50ab7, 0xf373c3ac, 0x5f60970f, 0xd46d3063,
	     0x3a5275ea, 0x02331c01},
	    {0x80000000, 0x35d73a62, 0x28461564, 0x43eefc9f, 0xbf455269, 0x5edcdeb9, 0x65059450,
	     0x4e6f41a4, 0xe2ea32dc, 0xf5b95b32, 0x695a4c87, 0xf204502c, 0x9a4f01b6, 0x941a0916,
	     0x4303cb97, 0x4c3d3d65},
	};
	u64 shift = crc_power(powers[0], bytes & 15);

#pragma unroll
	for (int i = 1; i < 4; i++)
		shift = crc_multiply(shift, crc_power(powers[i], bytes >> 4 * i & 15));
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
