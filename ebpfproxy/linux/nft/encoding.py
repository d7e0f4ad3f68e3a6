"""Encodes expressions of nf_tables as netlink attributes, and decodes them.

An unknown expression, or one with unknown attributes, is decoded as `Other`. So an unknown rule is never
mistaken for a known one.

Sources: include/uapi/linux/netfilter/nf_tables.h; nft_*.c of net/netfilter for optional attributes.
"""

import functools
import struct
from collections.abc import Callable, Iterable
from typing import Any

from ebpfproxy.linux.netlink.netlink import attribute, attributes, text
from ebpfproxy.linux.nft.expressions import (
    VERDICT_REGISTER,
    Bitwise,
    Compare,
    Ct,
    Dynset,
    Expression,
    Fib,
    Hash,
    InRange,
    Load,
    Lookup,
    Masquerade,
    Meta,
    Nat,
    NetworkOrder,
    Numgen,
    Payload,
    Reject,
    SetMeta,
    SetPayload,
    Verdict,
)

NESTED = 0x8000
_U32 = struct.Struct(">I")
_I32 = struct.Struct(">i")
_U64 = struct.Struct(">Q")
_FOLLOWING_NAT_FLAGS = 0x3  # NF_NAT_RANGE_MAP_IPS and NF_NAT_RANGE_PROTO_SPECIFIED
_INVERTED = 1  # NFT_LOOKUP_F_INV
_JENKINS = 0  # NFT_HASH_JENKINS
_HTON = 1  # NFT_BYTEORDER_HTON
_INTERNET = 1  # NFT_PAYLOAD_CSUM_INET
_WORD = 4  # bytes


def nested(kind: int, *parts: bytes) -> bytes:
    """An attribute that contains other attributes."""
    return attribute(kind | NESTED, b"".join(parts))


def u32(kind: int, value: int) -> bytes:
    """A number; all numbers of nf_tables are in network byte order."""
    return attribute(kind, _U32.pack(value))


def name(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def number(value: bytes | None) -> int:
    """The number in an attribute; 0 if the attribute is missing."""
    return int.from_bytes(value) if value else 0


def encode_all(expressions: Iterable[Expression]) -> bytes:
    """The value of NFTA_RULE_EXPRESSIONS."""
    return b"".join(map(_encode, expressions))


def encode_verdict(verdict: Verdict) -> bytes:
    """NFTA_DATA_VERDICT."""
    chain = name(2, verdict.chain) if verdict.chain else b""
    return nested(2, attribute(1, _I32.pack(verdict.code)), chain)


def decode_verdict(data: bytes) -> Verdict:
    """The verdict in the value of NFTA_DATA_VERDICT."""
    found = dict(attributes(data, 0))
    return Verdict(_I32.unpack(found[1])[0], text(found.get(2)))


# Registers: 0 is the verdict. Registers 1 to 4 of 16 bytes are the same memory as 8 to 23 of 4 bytes. The
# kernel reports the older form if possible (nft_dump_register()).


def _register(kind: int, slot: int) -> bytes:
    if slot == VERDICT_REGISTER:
        return u32(kind, 0)
    return u32(kind, 1 + slot // 4 if slot % 4 == 0 else 8 + slot)


def _data(kind: int, value: bytes) -> bytes:
    return nested(kind, attribute(1, value))


def _bitwise(each: Bitwise) -> tuple[bytes, ...]:
    slots = _register(1, each.slot), _register(2, each.target)
    return (*slots, u32(3, len(each.mask)), u32(6, 0), _data(4, each.mask), _data(5, each.xor))


def _hash(each: Hash) -> tuple[bytes, ...]:
    slots = _register(1, each.source), _register(2, each.slot)
    return (*slots, u32(3, each.length), u32(4, each.modulus), u32(5, each.seed), u32(7, _JENKINS))


def _network_order(each: NetworkOrder) -> tuple[bytes, ...]:
    slots = _register(1, each.slot), _register(2, each.slot)
    return (*slots, u32(3, _HTON), u32(4, _WORD), u32(5, _WORD))


def _lookup(each: Lookup) -> tuple[bytes, ...]:
    return (
        name(1, each.set_name),
        _register(2, each.slot),
        _register(3, each.target) if each.target is not None else b"",
        u32(4, each.set_id) if each.set_id else b"",
        u32(5, _INVERTED) if each.inverted else b"",
    )


def _nat(each: Nat) -> tuple[bytes, ...]:
    return (
        u32(1, each.kind),
        u32(2, each.family),
        _register(3, each.address) if each.address is not None else b"",
        _register(5, each.port) if each.port is not None else b"",
        u32(7, each.flags) if each.flags else b"",
    )


def _set_payload(each: SetPayload) -> tuple[bytes, ...]:
    where = u32(2, each.base), u32(3, each.offset), u32(4, each.length), _register(5, each.slot)
    return where if each.checksum is None else (*where, u32(6, _INTERNET), u32(7, each.checksum))


def _load(each: Load) -> tuple[bytes, ...]:
    return _register(1, each.slot), _data(2, each.value)


def _verdict(each: Verdict) -> tuple[bytes, ...]:
    return _register(1, VERDICT_REGISTER), nested(2, encode_verdict(each))


def _dynset(each: Dynset) -> tuple[bytes, ...]:
    timeout = attribute(6, _U64.pack(each.timeout)) if each.timeout else b""
    data = _register(5, each.data) if each.data is not None else b""
    return name(1, each.set_name), u32(3, each.how), _register(4, each.slot), data, timeout


_ENCODE: dict[type, tuple[str, Callable[[Any], Iterable[bytes]]]] = {
    Payload: (
        "payload",
        lambda each: (_register(1, each.slot), u32(2, each.base), u32(3, each.offset), u32(4, each.length)),
    ),
    SetPayload: ("payload", _set_payload),
    Meta: ("meta", lambda each: (_register(1, each.slot), u32(2, each.key))),
    SetMeta: ("meta", lambda each: (u32(2, each.key), _register(3, each.slot))),
    Ct: ("ct", lambda each: (_register(1, each.slot), u32(2, each.key))),
    Fib: ("fib", lambda each: (_register(1, each.slot), u32(2, each.result), u32(3, each.flags))),
    Numgen: (
        "numgen",
        lambda each: (_register(1, each.slot), u32(2, each.modulus), u32(3, each.kind), u32(4, each.offset)),
    ),
    Hash: ("hash", _hash),
    NetworkOrder: ("byteorder", _network_order),
    Bitwise: ("bitwise", _bitwise),
    Compare: ("cmp", lambda each: (_register(1, each.slot), u32(2, each.how), _data(3, each.value))),
    InRange: (
        "range",
        lambda each: (_register(1, each.slot), u32(2, each.how), _data(3, each.low), _data(4, each.high)),
    ),
    Load: ("immediate", _load),
    Verdict: ("immediate", _verdict),
    Lookup: ("lookup", _lookup),
    Nat: ("nat", _nat),
    Masquerade: ("masq", lambda each: (u32(1, each.flags),) if each.flags else ()),
    Reject: ("reject", lambda each: (u32(1, each.kind), attribute(2, bytes((each.code,))))),
    Dynset: ("dynset", _dynset),
}


@functools.lru_cache(maxsize=4096, typed=True)
def _encode(expression: Expression) -> bytes:
    """Cached, since most rules share expressions. `typed`, since tuples of two types can be equal."""
    kernel_name, parts = _ENCODE[type(expression)]
    return nested(1, name(1, kernel_name), nested(2, *parts(expression)))
