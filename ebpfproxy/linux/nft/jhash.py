"""The number that a `jhash` expression of nf_tables computes.

Sources: nft_jhash_eval() in net/netfilter/nft_hash.c, jhash() in include/linux/jhash.h.
"""

import struct

_INITIAL = 0xDEADBEEF  # JHASH_INITVAL
_MASK = 0xFFFFFFFF
_BLOCK = struct.Struct("=3I")  # in the byte order of the machine
_REST = struct.Struct("<3I")  # the kernel shifts the last bytes, in every byte order
_MIX = 4, 6, 8, 16, 19, 4  # bits by which __jhash_mix() rotates
_FINAL = 14, 11, 25, 16, 4, 14, 24  # bits by which __jhash_final() rotates


def jhash(data: bytes, modulus: int, seed: int) -> int:
    """Return a number less than `modulus`. `data`: the registers that are hashed, not empty."""
    return _hash(data, seed) * modulus >> 32  # reciprocal_scale()


def _hash(data: bytes, seed: int) -> int:
    words = [(_INITIAL + len(data) + seed) & _MASK] * 3
    while len(data) > _BLOCK.size:
        block, data = data[: _BLOCK.size], data[_BLOCK.size :]
        words = _mixed([_sum(*pair) for pair in zip(words, _BLOCK.unpack(block), strict=True)])
    rest = _REST.unpack(data.ljust(_REST.size, b"\0"))
    return _final([_sum(*pair) for pair in zip(words, rest, strict=True)])


def _sum(one: int, other: int) -> int:
    return (one + other) & _MASK


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> (32 - bits)) & _MASK


def _mixed(words: list[int]) -> list[int]:
    a, b, c = words
    for bits in _MIX:
        a = (a - c) & _MASK ^ _rotated(c, bits)
        c = (c + b) & _MASK
        a, b, c = b, c, a  # the next step does the same with the next words
    return [a, b, c]


def _final(words: list[int]) -> int:
    a, b, c = words
    for bits in _FINAL:
        c = ((c ^ b) - _rotated(b, bits)) & _MASK
        a, b, c = b, c, a
    return b
