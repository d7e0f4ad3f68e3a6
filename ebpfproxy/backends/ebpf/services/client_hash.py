"""The hash of a client that selects an entry of a table: client_hash() of bpf/service.h."""

import struct

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.model.address import Address

_WORDS = struct.Struct(">4I")
_MASK = 0xFFFFFFFF


def client_hash(client: Address, port: int = 0) -> int:
    """The 32-bit hash of a client's address and port. `port`: 0 for the hash of the address alone."""
    value = abi.CONSTANTS["CLIENT_HASH_SEED"]
    for word in (*_WORDS.unpack(client), port):
        word = word * 0xCC9E2D51 & _MASK
        word = (word << 15 | word >> 17) & _MASK
        value ^= word * 0x1B873593 & _MASK
        value = (value << 13 | value >> 19) & _MASK
        value = (value * 5 + 0xE6546B64) & _MASK
    value = (value ^ value >> 16) * 0x85EBCA6B & _MASK
    value = (value ^ value >> 13) * 0xC2B2AE35 & _MASK
    return value ^ value >> 16


def entry_of(hashed: int, entries: int) -> int:
    """The entry of a table with so many entries that a hash selects, as slot_select() of bpf/service.h."""
    return hashed * entries >> 32
