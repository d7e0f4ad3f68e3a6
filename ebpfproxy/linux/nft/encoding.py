"""Encodes expressions of nf_tables as netlink attributes, and decodes them.

An unknown expression, or one with unknown attributes, is decoded as `Other`. So an unknown rule is never
mistaken for a known one.

Sources: include/uapi/linux/netfilter/nf_tables.h; nft_*.c of net/netfilter for optional attributes.
"""

import functools
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ebpfproxy.linux.netlink.netlink import attribute, attributes, text
from ebpfproxy.linux.nft.expressions import (
    VERDICT_REGISTER,
    Bitwise,
    Compare,
    Ct,
    Dynset,
    Expression,
    Fib,
    InRange,
    Load,
    Lookup,
    Masquerade,
    Meta,
    Nat,
    Numgen,
    Other,
    Payload,
    Reject,
    SetMeta,
    Verdict,
)

NESTED = 0x8000
_U32 = struct.Struct(">I")
_I32 = struct.Struct(">i")
_U64 = struct.Struct(">Q")
_FOLLOWING_NAT_FLAGS = 0x3  # NF_NAT_RANGE_MAP_IPS and NF_NAT_RANGE_PROTO_SPECIFIED
_INVERTED = 1  # NFT_LOOKUP_F_INV


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


def decode_all(data: bytes) -> tuple[Expression, ...]:
    """The expressions in NFTA_RULE_EXPRESSIONS. Unknown ones are `Other`."""
    return tuple(_decode(element) for _, element in attributes(data, 0))


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


def _slot(value: bytes) -> int:
    register = number(value)
    if register == 0:
        return VERDICT_REGISTER
    return 4 * (register - 1) if register <= 4 else register - 8


def _data(kind: int, value: bytes) -> bytes:
    return nested(kind, attribute(1, value))


def _value(data: bytes) -> bytes:
    return dict(attributes(data, 0))[1]


Attributes = Mapping[int, bytes]


def _bitwise(each: Bitwise) -> tuple[bytes, ...]:
    slots = _register(1, each.slot), _register(2, each.target)
    return (*slots, u32(3, len(each.mask)), u32(6, 0), _data(4, each.mask), _data(5, each.xor))


def _read_bitwise(found: Attributes) -> Bitwise:
    if number(found.get(6)) != 0:
        raise KeyError("a shift, or an operation on two registers")
    return Bitwise(_slot(found[1]), _slot(found[2]), _value(found[4]), _value(found[5]))


def _lookup(each: Lookup) -> tuple[bytes, ...]:
    return (
        name(1, each.set_name),
        _register(2, each.slot),
        _register(3, each.target) if each.target is not None else b"",
        u32(4, each.set_id) if each.set_id else b"",
        u32(5, _INVERTED) if each.inverted else b"",
    )


def _read_lookup(found: Attributes) -> Lookup:
    target = _slot(found[3]) if 3 in found else None
    set_id = number(found.get(4))
    return Lookup(text(found[1]), _slot(found[2]), target, set_id, bool(number(found.get(5)) & _INVERTED))


def _nat(each: Nat) -> tuple[bytes, ...]:
    return (
        u32(1, each.kind),
        u32(2, each.family),
        _register(3, each.address) if each.address is not None else b"",
        _register(5, each.port) if each.port is not None else b"",
        u32(7, each.flags) if each.flags else b"",
    )


def _read_nat(found: Attributes) -> Nat:
    """The kernel also returns the end of each range. Here it must equal the start."""
    if found.get(4, found.get(3)) != found.get(3) or found.get(6, found.get(5)) != found.get(5):
        raise KeyError("a range")
    address, port = (_slot(found[kind]) if kind in found else None for kind in (3, 5))
    flags = number(found.get(7)) & ~_FOLLOWING_NAT_FLAGS
    return Nat(number(found[1]), number(found[2]), address, port, flags)


def _load(each: Load) -> tuple[bytes, ...]:
    return _register(1, each.slot), _data(2, each.value)


def _verdict(each: Verdict) -> tuple[bytes, ...]:
    return _register(1, VERDICT_REGISTER), nested(2, encode_verdict(each))


def _read_immediate(found: Attributes) -> Load | Verdict:
    data = dict(attributes(found[2], 0))
    return decode_verdict(data[2]) if 2 in data else Load(_slot(found[1]), data[1])


def _dynset(each: Dynset) -> tuple[bytes, ...]:
    timeout = attribute(6, _U64.pack(each.timeout)) if each.timeout else b""
    return name(1, each.set_name), u32(3, each.how), _register(4, each.slot), timeout


def _read_dynset(found: Attributes) -> Dynset:
    if number(found.get(9)):
        raise KeyError("flags")
    return Dynset(text(found[1]), number(found[3]), _slot(found[4]), number(found.get(6)))


def _read_meta(found: Attributes) -> Meta | SetMeta:
    return (
        SetMeta(_slot(found[3]), number(found[2])) if 3 in found else Meta(_slot(found[1]), number(found[2]))
    )


def _read_numgen(found: Attributes) -> Numgen:
    return Numgen(_slot(found[1]), number(found[2]), number(found[3]), number(found.get(4)))


_ENCODE: dict[type, tuple[str, Callable[[Any], Iterable[bytes]]]] = {
    Payload: (
        "payload",
        lambda each: (_register(1, each.slot), u32(2, each.base), u32(3, each.offset), u32(4, each.length)),
    ),
    Meta: ("meta", lambda each: (_register(1, each.slot), u32(2, each.key))),
    SetMeta: ("meta", lambda each: (u32(2, each.key), _register(3, each.slot))),
    Ct: ("ct", lambda each: (_register(1, each.slot), u32(2, each.key))),
    Fib: ("fib", lambda each: (_register(1, each.slot), u32(2, each.result), u32(3, each.flags))),
    Numgen: (
        "numgen",
        lambda each: (_register(1, each.slot), u32(2, each.modulus), u32(3, each.kind), u32(4, each.offset)),
    ),
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


class _Reader(NamedTuple):
    """Decodes an expression. `known`: the attributes that `read` uses, or that have no meaning."""

    known: frozenset[int]
    read: Callable[[Attributes], Expression]


def _reader(known: Iterable[int], read: Callable[[Attributes], Expression]) -> _Reader:
    return _Reader(frozenset(known), read)


_DECODE = {
    "payload": _reader(
        (1, 2, 3, 4), lambda found: Payload(_slot(found[1]), *(number(found[kind]) for kind in (2, 3, 4)))
    ),
    "meta": _reader((1, 2, 3), _read_meta),
    "ct": _reader((1, 2), lambda found: Ct(_slot(found[1]), number(found[2]))),
    "fib": _reader((1, 2, 3), lambda found: Fib(_slot(found[1]), number(found[2]), number(found[3]))),
    "numgen": _reader((1, 2, 3, 4), _read_numgen),
    "bitwise": _reader((1, 2, 3, 4, 5, 6), _read_bitwise),
    "cmp": _reader((1, 2, 3), lambda found: Compare(_slot(found[1]), number(found[2]), _value(found[3]))),
    "range": _reader(
        (1, 2, 3, 4),
        lambda found: InRange(_slot(found[1]), number(found[2]), _value(found[3]), _value(found[4])),
    ),
    "immediate": _reader((1, 2), _read_immediate),
    "lookup": _reader((1, 2, 3, 4, 5), _read_lookup),
    "nat": _reader((1, 2, 3, 4, 5, 6, 7), _read_nat),
    "masq": _reader((1,), lambda found: Masquerade(number(found.get(1)))),
    "reject": _reader((1, 2), lambda found: Reject(number(found[1]), number(found.get(2)))),
    "dynset": _reader((1, 3, 4, 6, 8, 9), _read_dynset),
}


@functools.lru_cache(maxsize=4096, typed=True)
def _encode(expression: Expression) -> bytes:
    """Cached, since most rules share expressions. `typed`, since tuples of two types can be equal."""
    if isinstance(expression, Other):
        raise TypeError(f"cannot encode an expression {expression.name}")
    kernel_name, parts = _ENCODE[type(expression)]
    return nested(1, name(1, kernel_name), nested(2, *parts(expression)))


@functools.lru_cache(maxsize=4096, typed=True)
def _decode(element: bytes) -> Expression:
    parts = dict(attributes(element, 0))
    kernel_name, data = text(parts.get(1)), parts.get(2, b"")
    reader, found = _DECODE.get(kernel_name), dict(attributes(data, 0))
    if reader is None or not found.keys() <= reader.known:
        return Other(kernel_name, data)
    try:
        return reader.read(found)
    except (KeyError, struct.error):
        return Other(kernel_name, data)
