"""Encodes the expressions of nf_tables rules as netlink attributes.

A rule is a list of expressions. Most of them load data into registers, or use the data there. There are
sixteen slots of four bytes each, and a register for the verdict. Source:
include/uapi/linux/netfilter/nf_tables.h.
"""

import enum
import functools
import struct
from typing import NamedTuple

from ebpfproxy.linux.netlink.netlink import attribute
from ebpfproxy.linux.nft.encoding import Verdict, encode_verdict, name, nested, u32

_U64 = struct.Struct(">Q")
_WORD = 4  # bytes of a slot
_VERDICT = 0  # NFT_REG_VERDICT
_HTON = 1  # NFT_BYTEORDER_HTON
_INTERNET = 1  # NFT_PAYLOAD_CSUM_INET
_JENKINS = 0  # NFT_HASH_JENKINS
_INVERTED = 1  # NFT_LOOKUP_F_INV
_DESTINATION = 1  # NFT_NAT_DNAT
_UPDATE = 1  # NFT_DYNSET_OP_UPDATE
_FULLY_RANDOM = 0x10  # NF_NAT_RANGE_PROTO_RANDOM_FULLY
COUNTER = "counter"
"""The kernel's name of the expression."""


class Base(enum.IntEnum):
    """The header at which a payload offset starts: NFT_PAYLOAD_*."""

    NETWORK = 1
    TRANSPORT = 2


class Comparison(enum.IntEnum):
    """NFT_CMP_*. NFT_RANGE_* has the first two."""

    EQUAL = 0
    UNEQUAL = 1
    LESS = 2
    AT_MOST = 3
    AT_LEAST = 5


class Payload(NamedTuple):
    """Bytes of the packet, from `offset` in a header on."""

    base: Base
    offset: int
    length: int

    def load(self, slot: int) -> bytes:
        return _payload(*self, slot)

    def write(self, slot: int, checksum: int | None) -> bytes:
        """Write the slot. `checksum`: the offset of the checksum to update, from the same header on."""
        where = u32(2, self.base), u32(3, self.offset), u32(4, self.length), _register(5, slot)
        update = () if checksum is None else (u32(6, _INTERNET), u32(7, checksum))
        return _expression("payload", *where, *update)


class Meta(NamedTuple):
    """Metadata of the packet: NFT_META_*."""

    key: int

    def load(self, slot: int) -> bytes:
        return _expression("meta", _register(1, slot), u32(2, self.key))

    def write(self, slot: int) -> bytes:
        return _expression("meta", u32(2, self.key), _register(3, slot))


class Ct(NamedTuple):
    """Data of the conntrack entry: NFT_CT_*. `direction`: that of one direction (IP_CT_DIR_*)."""

    key: int
    direction: int | None = None

    def load(self, slot: int) -> bytes:
        of = b"" if self.direction is None else attribute(3, bytes((self.direction,)))
        return _expression("ct", _register(1, slot), u32(2, self.key), of)


class Fib(NamedTuple):
    """A result of the routing tables: NFT_FIB_RESULT_*, for the address that NFTA_FIB_F_* name."""

    result: int
    flags: int

    def load(self, slot: int) -> bytes:
        return _expression("fib", _register(1, slot), u32(2, self.result), u32(3, self.flags))


@functools.lru_cache(maxsize=1024)
def number(slot: int, kind: int, modulus: int, offset: int) -> bytes:
    """Store a generated number. `kind` is NFT_NG_*."""
    return _expression("numgen", _register(1, slot), u32(2, modulus), u32(3, kind), u32(4, offset))


def hashed(source: int, slot: int, length: int, modulus: int, seed: int) -> bytes:
    """Store the Jenkins hash of `length` bytes, from slot `source` on: a number less than `modulus`."""
    slots = _register(1, source), _register(2, slot)
    return _expression("hash", *slots, u32(3, length), u32(4, modulus), u32(5, seed), u32(7, _JENKINS))


def network_order(slot: int) -> bytes:
    """Convert the number in a slot to network byte order, in which numbers can be compared."""
    slots = _register(1, slot), _register(2, slot)
    return _expression("byteorder", *slots, u32(3, _HTON), u32(4, _WORD), u32(5, _WORD))


def bitwise(slot: int, mask: bytes, xor: bytes) -> bytes:
    """Replace the slot by `slot & mask ^ xor`."""
    slots = _register(1, slot), _register(2, slot)
    return _expression("bitwise", *slots, u32(3, len(mask)), u32(6, 0), _data(4, mask), _data(5, xor))


@functools.lru_cache(maxsize=1024)
def compare(slot: int, how: Comparison, value: bytes) -> bytes:
    """End the rule unless the comparison is true."""
    return _expression("cmp", _register(1, slot), u32(2, how), _data(3, value))


def outside(slot: int, low: bytes, high: bytes) -> bytes:
    """End the rule if the slot is in the range."""
    return _expression("range", _register(1, slot), u32(2, Comparison.UNEQUAL), _data(3, low), _data(4, high))


def constant(slot: int, value: bytes) -> bytes:
    return _expression("immediate", _register(1, slot), _data(2, value))


def verdict(value: Verdict) -> bytes:
    return _expression("immediate", u32(1, _VERDICT), nested(2, encode_verdict(value)))


def find(set_name: str, slot: int, set_id: int = 0, *, inverted: bool = False) -> bytes:
    """End the rule unless the set has the slot; with `inverted`, if it has.

    `set_id` identifies a set that is created in the same transaction; 0 if it is identified by its name.
    """
    own, how = u32(4, set_id) if set_id else b"", u32(5, _INVERTED) if inverted else b""
    return _expression("lookup", name(1, set_name), _register(2, slot), own, how)


def take(map_name: str, slot: int, target: int | None) -> bytes:
    """Store the slot's value in a map in `target`; None for a map of verdicts, whose verdict is taken.

    End the rule if the map has none.
    """
    into = u32(3, _VERDICT) if target is None else _register(3, target)
    return _expression("lookup", name(1, map_name), _register(2, slot), into)


def update(set_name: str, slot: int, timeout: int) -> bytes:
    """Add the slot to a set, or renew its timeout, in milliseconds."""
    until = attribute(6, _U64.pack(timeout))
    return _expression("dynset", name(1, set_name), u32(3, _UPDATE), _register(4, slot), until)


def dnat(family: int, address: int, port: int) -> bytes:
    """Translate the destination to the address and port in these slots. `family` is an NFPROTO_*."""
    slots = _register(3, address), _register(5, port)
    return _expression("nat", u32(1, _DESTINATION), u32(2, family), *slots)


def masquerade() -> bytes:
    """Masquerade the packet, with a random port."""
    return _expression("masq", u32(1, _FULLY_RANDOM))


def counter() -> bytes:
    """Count packets and bytes."""
    return _expression(COUNTER)


def add_flow(flowtable: str) -> bytes:
    """Add the flow of the packet to a flowtable. End the rule if the kernel cannot forward it there."""
    return _expression("flow_offload", name(1, flowtable))


def reject(kind: int, code: int) -> bytes:
    """Reject the packet. `kind` is NFT_REJECT_*, `code` that of ICMP."""
    return _expression("reject", u32(1, kind), attribute(2, bytes((code,))))


def _expression(kernel_name: str, *parts: bytes) -> bytes:
    return nested(1, _name(kernel_name), nested(2, *parts))


@functools.cache
def _name(kernel_name: str) -> bytes:
    return name(1, kernel_name)


def _data(kind: int, value: bytes) -> bytes:
    return nested(kind, attribute(1, value))


@functools.lru_cache(maxsize=256)
def _payload(base: Base, offset: int, length: int, slot: int) -> bytes:
    return _expression("payload", _register(1, slot), u32(2, base), u32(3, offset), u32(4, length))


@functools.cache
def _register(kind: int, slot: int) -> bytes:
    """A slot. Registers 1 to 4 of 16 bytes are the same memory as 8 to 23 of 4 bytes. The kernel reports the
    older form if possible (nft_dump_register()).
    """
    return u32(kind, 1 + slot // 4 if slot % 4 == 0 else 8 + slot)
