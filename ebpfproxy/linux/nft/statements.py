"""Statements of nf_tables rules as values, each with its expressions and its text in the syntax of nft(8).

Only the statements that the nftables backend uses. The expressions are the same as those of nft for the
text, so that nft lists rules in this form. `expressions` computes them: a large table has the values of
20,000 rules in memory, but the expressions of few.
"""

import functools
import socket
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.draws import Draw
from ebpfproxy.linux.nft.expressions import (
    VERDICT_REGISTER,
    Base,
    Bitwise,
    Code,
    Compare,
    Comparison,
    Ct,
    Dynset,
    Expression,
    Fib,
    InRange,
    Load,
    Lookup,
    Meta,
    MetaKey,
    Nat,
    NetworkOrder,
    Numgen,
    Payload,
    SetMeta,
)
from ebpfproxy.linux.nft.expressions import Masquerade as MasqueradeExpression
from ebpfproxy.linux.nft.expressions import Reject as RejectExpression
from ebpfproxy.linux.nft.expressions import Verdict as VerdictExpression
from ebpfproxy.linux.nft.rewriting import ExchangePort, HasPort, IcmpError, WithoutUdpChecksum
from ebpfproxy.linux.nft.sets import Declaration, SetElement, SetFlag, interval_elements
from ebpfproxy.linux.nft.types import Datatype

Expressions = tuple[Expression, ...]

_WORD = 4  # bytes of a slot
_STATE, _STATUS = 0, 2  # NFT_CT_*
_ADDRESS_TYPE = 3  # NFT_FIB_RESULT_ADDRTYPE
_OF_SOURCE, _OF_DESTINATION = 1, 2  # NFTA_FIB_F_SADDR, NFTA_FIB_F_DADDR
_RANDOM = 1  # NFT_NG_RANDOM
_SOURCE_SLOT = 4  # behind the key of a list
_FULLY_RANDOM = 0x10  # NF_NAT_RANGE_PROTO_RANDOM_FULLY
_DESTINATION = 1  # NFT_NAT_DNAT
_UPDATE = 1  # NFT_DYNSET_OP_UPDATE
_FAMILIES = {"ip": int(socket.AF_INET), "ip6": int(socket.AF_INET6)}
_REJECT = {"ip": RejectExpression(0, 3), "ip6": RejectExpression(0, 4)}  # ICMP port unreachable
_RESET = RejectExpression(1, 0)  # NFT_REJECT_TCP_RST


class Field(NamedTuple):
    """A field that rules can match. `load` loads it into slot 0."""

    words: str
    type: Datatype
    load: Payload | Meta | Ct | Fib


FIELDS = {
    each.words: each
    for each in (
        Field("ip saddr", types.IPV4, Payload(0, Base.NETWORK, 12, 4)),
        Field("ip daddr", types.IPV4, Payload(0, Base.NETWORK, 16, 4)),
        Field("ip6 saddr", types.IPV6, Payload(0, Base.NETWORK, 8, 16)),
        Field("ip6 daddr", types.IPV6, Payload(0, Base.NETWORK, 24, 16)),
        Field("th dport", types.PORT, Payload(0, Base.TRANSPORT, 2, 2)),
        Field("meta l4proto", types.PROTOCOL, Meta(0, MetaKey.PROTOCOL)),
        Field("meta mark", types.MARK, Meta(0, MetaKey.MARK)),
        Field("iifname", types.DEVICE, Meta(0, MetaKey.INPUT_NAME)),
        Field("ct state", types.STATE, Ct(0, _STATE)),
        Field("ct status", types.STATUS, Ct(0, _STATUS)),
        Field("fib saddr type", types.ADDRESS_TYPE, Fib(0, _ADDRESS_TYPE, _OF_SOURCE)),
        Field("fib daddr type", types.ADDRESS_TYPE, Fib(0, _ADDRESS_TYPE, _OF_DESTINATION)),
    )
}


class Match(NamedTuple):
    """Continue if the field has the value, or with `inverted` if it has not.

    `value` is the text of a value, prefix, range or, with a final asterisk, of the beginning of a device
    name; or the name of a set after "@". Raises ValueError in `expressions` if it is not.
    """

    field: str
    value: str
    inverted: bool = False

    def __str__(self) -> str:
        return f"{self.field} {'!= ' if self.inverted else ''}{self.value}"

    def expressions(self) -> Expressions:
        field, how = FIELDS[self.field], Comparison.UNEQUAL if self.inverted else Comparison.EQUAL
        if self.value.startswith("@"):
            return field.load, Lookup(self.value[1:], 0, inverted=self.inverted)
        if field.type in (types.IPV4, types.IPV6):
            return tuple(_in_interval(field, how, types.parse_interval(field.type, self.value)))
        value = field.type.parse(self.value)
        if field.type in types.BITS:
            matching = Comparison.EQUAL if self.inverted else Comparison.UNEQUAL
            return field.load, Bitwise(0, 0, value, bytes(_WORD)), Compare(0, matching, bytes(_WORD))
        return field.load, Compare(0, how, value)


class Outside(NamedTuple):
    """Continue if an address field is in none of several ranges, which are disjoint and not adjacent.

    They are in an anonymous set, the only one of the rule.
    """

    field: str
    ranges: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.field} != {{ {', '.join(self.ranges)} }}"

    def expressions(self) -> Expressions:
        return FIELDS[self.field].load, Lookup("__set%d", 0, set_id=1, inverted=True)

    def own_set(self) -> "AnonymousSet":
        of = FIELDS[self.field].type
        elements = tuple(end for each in self.ranges for end in interval_elements(of, each))
        flags = SetFlag.ANONYMOUS | SetFlag.CONSTANT | SetFlag.INTERVAL
        return AnonymousSet(Declaration((of,), flags=flags, size=len(elements)), elements)


class AnonymousSet(NamedTuple):
    """A set that belongs to one rule, and is deleted with it."""

    declaration: Declaration
    elements: tuple[SetElement, ...]


class Find(NamedTuple):
    """Continue if a set has the concatenation of fields; with `verdicts`, take the verdict of a map."""

    fields: tuple[str, ...]
    container: str
    verdicts: bool = False

    def __str__(self) -> str:
        return f"{' . '.join(self.fields)} {'vmap ' if self.verdicts else ''}@{self.container}"

    def expressions(self) -> Expressions:
        loads: list[Expression] = []
        slot = 0
        for words in self.fields:
            field = FIELDS[words]
            loads.append(field.load._replace(slot=slot))
            slot += types.padded(field.type) // _WORD
        return *loads, Lookup(self.container, 0, VERDICT_REGISTER if self.verdicts else None)


class SameByte(NamedTuple):
    """Continue if two bytes of the network header are equal, at these offsets.

    No expression compares two registers. So the set has the 256 pairs of equal bytes (`equal_bytes`).
    """

    first: int
    second: int
    container: str

    def __str__(self) -> str:
        return f"@nh,{8 * self.first},8 . @nh,{8 * self.second},8 @{self.container}"

    def expressions(self) -> Expressions:
        first, second = (
            Payload(slot, Base.NETWORK, offset, 1) for slot, offset in ((0, self.first), (1, self.second))
        )
        return first, second, Lookup(self.container, 0)


class Marked(NamedTuple):
    """Continue if these bits of the mark are set."""

    bits: int

    def __str__(self) -> str:
        return f"meta mark & 0x{self.bits:08x} != 0x00000000"

    def expressions(self) -> Expressions:
        mask = self.bits.to_bytes(_WORD, sys.byteorder)
        comparison = Compare(0, Comparison.UNEQUAL, bytes(_WORD))
        return Meta(0, MetaKey.MARK), Bitwise(0, 0, mask, bytes(_WORD)), comparison


class ChangeMark(NamedTuple):
    """Set these bits of the mark; with `inverts`, invert them."""

    bits: int
    inverts: bool = False

    def __str__(self) -> str:
        return f"meta mark set meta mark {'^' if self.inverts else '|'} 0x{self.bits:08x}"

    def expressions(self) -> Expressions:
        kept = 0xFFFFFFFF if self.inverts else 0xFFFFFFFF & ~self.bits
        mask, xor = (each.to_bytes(_WORD, sys.byteorder) for each in (kept, self.bits))
        return Meta(0, MetaKey.MARK), Bitwise(0, 0, mask, xor), SetMeta(0, MetaKey.MARK)


class Share(NamedTuple):
    """Continue for `part` of `total` packets: those with a drawn number less than `part`.

    `family` is "ip" or "ip6".
    """

    family: str
    total: int
    part: int = 1
    draw: Draw = Draw.RANDOM

    def __str__(self) -> str:
        return f"{self.draw.text(self.family, self.total)} {f'< {self.part}' if self.part > 1 else 0}"

    def expressions(self) -> Expressions:
        drawn = _drawn(self.draw, self.family, 0, self.total)
        if self.part == 1:
            return *drawn, Compare(0, Comparison.EQUAL, bytes(_WORD))
        return *drawn, NetworkOrder(0), Compare(0, Comparison.LESS, self.part.to_bytes(_WORD))


class Remembered(NamedTuple):
    """Continue if the set has the source address together with this number. `family` is "ip" or "ip6"."""

    family: str
    container: str
    number: int

    def __str__(self) -> str:
        return f"{_client_text(self.family, self.number)} @{self.container}"

    def expressions(self) -> Expressions:
        return *_client(self.family, self.number), Lookup(self.container, 0)


class Remember(NamedTuple):
    """Add the source address together with this number to the set, or renew its timeout.

    The rule ends here if the set is full.
    """

    family: str
    container: str
    number: int
    seconds: int

    def __str__(self) -> str:
        client = _client_text(self.family, self.number)
        return f"update @{self.container} {{ {client} timeout {self.seconds}s }}"

    def expressions(self) -> Expressions:
        client = _client(self.family, self.number)
        return *client, Dynset(self.container, _UPDATE, 0, 1000 * self.seconds)


class Dnat(NamedTuple):
    """Translate the destination to this address and port. `address` has 4 or 16 bytes."""

    address: bytes
    port: int

    def __str__(self) -> str:
        text = types.address_text(self.address)
        return f"dnat to [{text}]:{self.port}" if ":" in text else f"dnat to {text}:{self.port}"

    def expressions(self) -> Expressions:
        family = _FAMILIES["ip" if len(self.address) == _WORD else "ip6"]
        loads = Load(0, self.address), Load(4, self.port.to_bytes(2))
        return *loads, Nat(_DESTINATION, family, 0, 4)


class DnatToOne(NamedTuple):
    """Translate the destination to one of `length` addresses and ports that a map lists.

    The key of the map is `LIST_KEY`: the list's identity of 8 bytes and the place in the list, which is
    drawn. The rule ends here if the map does not have the key.
    """

    family: str
    container: str
    identity: bytes
    length: int
    draw: Draw = Draw.RANDOM

    def __str__(self) -> str:
        identity = [f"numgen random mod 1 offset {each}" for each in _IDENTITY.unpack(self.identity)]
        key = " . ".join([*identity, self.draw.text(self.family, self.length)])
        return f"dnat {self.family} to {key} map @{self.container}"

    def expressions(self) -> Expressions:
        first, second = _IDENTITY.unpack(self.identity)
        key = _constant(0, first), _constant(1, second), *_drawn(self.draw, self.family, 2, self.length)
        port = 1 if self.family == "ip" else 4
        return *key, Lookup(self.container, 0, 0), Nat(_DESTINATION, _FAMILIES[self.family], 0, port)


class Masquerade(NamedTuple):
    """Masquerade the packet, with a random port."""

    def __str__(self) -> str:
        return "masquerade fully-random"

    def expressions(self) -> Expressions:
        return (MasqueradeExpression(_FULLY_RANDOM),)


class Reject(NamedTuple):
    """Reject the packet with ICMP port unreachable; with `reset`, with a TCP reset."""

    family: str
    reset: bool = False

    def __str__(self) -> str:
        return "reject with tcp reset" if self.reset else "reject"

    def expressions(self) -> Expressions:
        return (_RESET if self.reset else _REJECT[self.family],)


class Verdict(NamedTuple):
    """A verdict; `chain` is "" unless it is JUMP or GOTO."""

    code: Code
    chain: str = ""

    def __str__(self) -> str:
        return f"{self.code.name.lower()} {self.chain}".rstrip()

    def expressions(self) -> Expressions:
        return (VerdictExpression(self.code, self.chain),)


DROP, RETURN, ACCEPT = Verdict(Code.DROP), Verdict(Code.RETURN), Verdict(Code.ACCEPT)


def jump(chain: str) -> Verdict:
    return Verdict(Code.JUMP, chain)


def goto(chain: str) -> Verdict:
    return Verdict(Code.GOTO, chain)


Statement = (
    Match
    | Outside
    | Find
    | SameByte
    | Marked
    | ChangeMark
    | Share
    | Remembered
    | Remember
    | Dnat
    | DnatToOne
    | Masquerade
    | Reject
    | Verdict
    | HasPort
    | ExchangePort
    | WithoutUdpChecksum
    | IcmpError
)

_IDENTITY = struct.Struct("=II")
LIST_KEY = struct.Struct("=8sI")
"""The key of an element of a list of endpoints: the identity of the list, and the place in it from 0 on."""


def _constant(slot: int, value: int) -> Numgen:
    """A random number with the modulus 1: nft has no other form of a constant in a key."""
    return Numgen(slot, 1, _RANDOM, value)


def _drawn(draw: Draw, family: str, slot: int, modulus: int) -> Expressions:
    return draw.expressions(_source(family), slot, modulus)


@functools.cache
def _source(family: str) -> Payload:
    load = FIELDS[f"{family} saddr"].load
    assert isinstance(load, Payload)
    return load._replace(slot=_SOURCE_SLOT)


def _client_text(family: str, number: int) -> str:
    return f"{family} saddr . numgen random mod 1 offset {number}"


@functools.lru_cache(maxsize=1024)
def _client(family: str, number: int) -> Expressions:
    field = FIELDS[f"{family} saddr"]
    return field.load, _constant(field.type.length // _WORD, number)


def _in_interval(field: Field, how: Comparison, interval: types.Interval) -> Iterator[Expression]:
    """The expressions of a comparison with an interval. If a prefix consists of full bytes, only these are
    loaded."""
    length = types.prefix_length(interval)
    assert isinstance(field.load, Payload)
    if length is None:
        yield field.load
        if how is Comparison.UNEQUAL:
            yield InRange(0, how, *interval)
        else:
            yield Compare(0, Comparison.AT_LEAST, interval.first)
            yield Compare(0, Comparison.AT_MOST, interval.last)
    elif length and length % 8 == 0:
        yield field.load._replace(length=length // 8)
        yield Compare(0, how, interval.first[: length // 8])
    else:
        mask = bytes(first ^ last ^ 0xFF for first, last in zip(*interval, strict=True))
        yield field.load
        yield Bitwise(0, 0, mask, bytes(len(mask)))
        yield Compare(0, how, interval.first)
