"""Converts the text of a rule, in the syntax of nft(8), into expressions. Pure.

It knows only the statements that ebpfproxy uses. The expressions are the same as those of nft for the text,
so that nft lists rules in this form. Not in the syntax of nft is `checksum OFFSET` after a change of raw
bytes.
"""

import itertools
import re
import secrets
import socket
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.linux.nft import expressions, types
from ebpfproxy.linux.nft.expressions import Base, Comparison, Ct, Fib, Meta, Payload
from ebpfproxy.linux.nft.sets import Declaration, SetElement, SetFlag, interval_elements, parse_verdict
from ebpfproxy.linux.nft.types import Datatype

_WORD = 4  # bytes of a slot
_NUMBERS = {"inc": 0, "random": 1}  # NFT_NG_*
_SOURCE_SLOT = 4  # of what is hashed: behind the key of a list
_PORT_SLOT = 4
_FAMILIES = {"ip": int(socket.AF_INET), "ip6": int(socket.AF_INET6)}
_REJECT = {"ip": (0, 3), "ip6": (0, 4)}  # ICMP port unreachable
_ORIGINAL = 0  # IP_CT_DIR_ORIGINAL
_RESET = (1, 0)  # NFT_REJECT_TCP_RST
_COMMENT = re.compile(r'(.*) comment "([^"]*)"')
_RAW = re.compile(r"@(nh|th),([0-9]+),([0-9]+)")
_DESTINATION = re.compile(r"\[?([0-9a-f.:]+?)\]?:([0-9]+)")


class _Field(NamedTuple):
    """A field of a packet. `checksum`: the offset of the checksum that changes with it."""

    type: Datatype
    source: Payload | Meta | Ct | Fib
    checksum: int | None = None


_FIELDS = {
    "ip saddr": _Field(types.IPV4, Payload(Base.NETWORK, 12, 4)),
    "ip daddr": _Field(types.IPV4, Payload(Base.NETWORK, 16, 4)),
    "ip6 saddr": _Field(types.IPV6, Payload(Base.NETWORK, 8, 16)),
    "ip6 daddr": _Field(types.IPV6, Payload(Base.NETWORK, 24, 16)),
    "th sport": _Field(types.PORT, Payload(Base.TRANSPORT, 0, 2)),
    "th dport": _Field(types.PORT, Payload(Base.TRANSPORT, 2, 2)),
    "tcp sport": _Field(types.PORT, Payload(Base.TRANSPORT, 0, 2), 16),
    "tcp dport": _Field(types.PORT, Payload(Base.TRANSPORT, 2, 2), 16),
    "udp sport": _Field(types.PORT, Payload(Base.TRANSPORT, 0, 2), 6),
    "udp dport": _Field(types.PORT, Payload(Base.TRANSPORT, 2, 2), 6),
    "udp checksum": _Field(types.PORT, Payload(Base.TRANSPORT, 6, 2)),
    "icmp type": _Field(types.PROTOCOL, Payload(Base.TRANSPORT, 0, 1)),
    "icmpv6 type": _Field(types.PROTOCOL, Payload(Base.TRANSPORT, 0, 1)),
    "meta l4proto": _Field(types.PROTOCOL, Meta(16)),
    "meta mark": _Field(types.MARK, Meta(3)),
    "iifname": _Field(types.DEVICE, Meta(6)),
    "ct state": _Field(types.STATE, Ct(0)),
    "ct status": _Field(types.STATUS, Ct(2)),
    "ct original ip daddr": _Field(types.IPV4, Ct(20, _ORIGINAL)),
    "ct original ip6 daddr": _Field(types.IPV6, Ct(22, _ORIGINAL)),
    "ct original proto-dst": _Field(types.PORT, Ct(12, _ORIGINAL)),
    "fib saddr type": _Field(types.ADDRESS_TYPE, Fib(3, 1)),
    "fib daddr type": _Field(types.ADDRESS_TYPE, Fib(3, 2)),
}


class AnonymousSet(NamedTuple):
    """A set that belongs to one rule, and is deleted with it."""

    name: str
    number: int
    declaration: Declaration
    elements: tuple[SetElement, ...]


class Converted(NamedTuple):
    """The value of NFTA_RULE_EXPRESSIONS, the sets to create before the rule, and its comment."""

    expressions: bytes
    sets: list[AnonymousSet]
    comment: str


class SetNames:
    """Generates numbers and names for anonymous sets, unique among all processes.

    The kernel could generate the names. But to do so, it walks over all existing sets
    (nf_tables_set_alloc_name()).
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._prefix = secrets.token_hex(4)

    def number(self) -> int:
        """A number for a set. The kernel requires that it is unique within a transaction."""
        return next(self._numbers)

    def name(self, number: int) -> str:
        """The name of an anonymous set with this number."""
        return f"__{self._prefix}-{number}"


def convert(text: str, family: str, names: SetNames) -> Converted:
    """Convert a rule of a table of the family "ip" or "ip6". Raises ValueError with the text."""
    found = _COMMENT.fullmatch(text)
    statements, comment = (found[1], found[2]) if found else (text, "")
    conversion = _Conversion(statements, family, names)
    try:
        return Converted(b"".join(conversion.statements()), conversion.sets, comment)
    except (ValueError, KeyError) as failure:
        raise ValueError(f"invalid rule {text!r}: {failure}") from failure


class _Conversion:
    """The words of a rule that are not converted yet, and the anonymous sets of the others."""

    def __init__(self, text: str, family: str, names: SetNames) -> None:
        self.sets: list[AnonymousSet] = []
        self._words = text.split(" ")[::-1]
        self._family = family
        self._names = names

    def statements(self) -> Iterator[bytes]:
        while self._words:
            match self._words[-1]:
                case "update":
                    yield from self._update()
                case "dnat":
                    yield from self._dnat()
                case "masquerade":
                    self._expect("masquerade", "fully-random")
                    yield expressions.masquerade()
                case "counter":
                    self._expect("counter")
                    yield expressions.counter()
                case "reject":
                    self._expect("reject")
                    with_reset = self._skip("with")
                    if with_reset:
                        self._expect("tcp", "reset")
                    yield expressions.reject(*(_RESET if with_reset else _REJECT[self._family]))
                case "flow":
                    self._expect("flow", "add")
                    yield expressions.add_flow(self._name())
                case "drop" | "accept" | "return":
                    yield expressions.verdict(parse_verdict(self._next()))
                case "jump" | "goto":
                    yield expressions.verdict(parse_verdict(f"{self._next()} {self._next()}"))
                case _:
                    yield from self._match()

    # --- words ---

    def _next(self) -> str:
        if not self._words:
            raise ValueError("it is incomplete")
        return self._words.pop()

    def _skip(self, word: str) -> bool:
        """Whether this word follows. Then it is skipped."""
        follows = bool(self._words) and self._words[-1] == word
        if follows:
            self._words.pop()
        return follows

    def _expect(self, *words: str) -> None:
        for word in words:
            if not self._skip(word):
                raise ValueError(f"it lacks {word!r}, or has it at another position")

    def _name(self) -> str:
        """The name of a set or flowtable."""
        word = self._next()
        if not word.startswith("@"):
            raise ValueError(f"{word!r} is not the name of a set")
        return word[1:]

    # --- statements ---

    def _update(self) -> Iterator[bytes]:
        self._expect("update")
        name = self._name()
        self._expect("{")
        yield from self._concatenation()[1]
        self._expect("timeout")
        seconds = int(self._next().removesuffix("s"))
        self._expect("}")
        yield expressions.update(name, 0, 1000 * seconds)

    def _dnat(self) -> Iterator[bytes]:
        self._expect("dnat")
        address = types.IPV4 if self._family == "ip" else types.IPV6
        if self._skip("to"):
            found = _DESTINATION.fullmatch(self._next())
            if not found:
                raise ValueError("the destination is not an address with a port")
            port = _PORT_SLOT
            yield expressions.constant(0, address.parse(found[1]))
            yield expressions.constant(port, types.PORT.parse(found[2]))
        else:
            self._expect(self._family, "to")
            yield from self._concatenation()[1]
            self._expect("map")
            port = types.padded(address) // _WORD
            yield expressions.take(self._name(), 0, 0)
        yield expressions.dnat(_FAMILIES[self._family], 0, port)

    def _match(self) -> Iterator[bytes]:
        fields, loads = self._concatenation()
        if self._skip("set"):
            yield from self._change(fields[0])
        elif self._skip("vmap"):
            yield from (*loads, expressions.take(self._name(), 0, None))
        elif self._words and self._words[-1].startswith("@"):
            yield from (*loads, expressions.find(self._name(), 0))
        elif len(fields) > 1:
            raise ValueError("a concatenation is not compared with a set")
        elif self._skip("<"):
            yield from loads
            yield from _less(fields[0].type, int(self._next()))
        elif self._skip("&"):
            mask = fields[0].type.parse(self._next())
            self._expect("!=", "0x00000000")
            nothing = bytes(len(mask))
            compare = expressions.compare(0, Comparison.UNEQUAL, nothing)
            yield from (*loads, expressions.bitwise(0, mask, nothing), compare)
        else:
            yield from self._equal(fields[0], loads, self._skip("!="))

    def _change(self, field: _Field) -> Iterator[bytes]:
        (other,), loads = self._concatenation(operators=False)
        source = field.source
        if other != field or not isinstance(source, Payload | Meta):
            raise ValueError("only a change of bits is supported")
        inverts = self._skip("^")
        if not inverts:
            self._expect("|")
        bits = field.type.parse(str(int(self._next(), 16)))
        kept = bytes(0xFF if inverts else 0xFF ^ byte for byte in bits)
        yield from (*loads, expressions.bitwise(0, kept, bits))
        if isinstance(source, Meta):
            yield source.write(0)
        else:
            yield source.write(0, int(self._next()) if self._skip("checksum") else field.checksum)

    def _equal(self, field: _Field, loads: list[bytes], inverted: bool) -> Iterator[bytes]:
        how = Comparison.UNEQUAL if inverted else Comparison.EQUAL
        if self._words and self._words[-1].startswith("@"):
            yield from (*loads, expressions.find(self._name(), 0, inverted=inverted))
        elif self._skip("{"):
            own = self._set(field.type)
            yield from (*loads, expressions.find(own.name, 0, own.number, inverted=inverted))
        elif field.type in (types.IPV4, types.IPV6):
            yield from _in_interval(field.source, how, types.parse_interval(field.type, self._next()))
        elif field.type in types.BITS:
            bits, nothing = field.type.parse(self._next()), bytes(_WORD)
            how = Comparison.EQUAL if inverted else Comparison.UNEQUAL
            yield from (*loads, expressions.bitwise(0, bits, nothing), expressions.compare(0, how, nothing))
        else:
            yield from (*loads, expressions.compare(0, how, field.type.parse(self._next())))

    def _set(self, of: Datatype) -> AnonymousSet:
        """An anonymous set of ranges, which are disjoint and not adjacent."""
        elements: list[SetElement] = []
        while not self._skip("}"):
            elements += interval_elements(of, self._next().removesuffix(","))
        number = self._names.number()
        flags = SetFlag.ANONYMOUS | SetFlag.CONSTANT | SetFlag.INTERVAL
        declaration = Declaration((of,), flags=flags, size=len(elements))
        self.sets.append(AnonymousSet(self._names.name(number), number, declaration, tuple(elements)))
        return self.sets[-1]

    # --- fields ---

    def _concatenation(self, slot: int = 0, *, operators: bool = True) -> tuple[list[_Field], list[bytes]]:
        """The fields up to the next word that is none, and the expressions that store them from `slot` on."""
        fields: list[_Field] = []
        loads: list[bytes] = []
        while True:
            if self._skip("numgen"):
                field, load = self._number(slot)
            elif self._skip("jhash"):
                field, load = self._hash(slot)
            else:
                field = self._field()
                load = [field.source.load(slot)]
                if operators and self._skip("^"):
                    bits = field.type.parse(str(int(self._next(), 16)))
                    load.append(expressions.bitwise(slot, b"\xff" * len(bits), bits))
            fields.append(field)
            loads += load
            slot += types.padded(field.type) // _WORD
            if not self._skip("."):
                return fields, loads

    def _field(self) -> _Field:
        for count in (1, 2, 3, 4):
            words = self._words[: -count - 1 : -1]
            field = _FIELDS.get(" ".join(words))
            if field:
                del self._words[-count:]
                return field
        found = _RAW.fullmatch(self._next())
        if not found:
            raise ValueError("it has an unknown field or statement")
        base = Base.NETWORK if found[1] == "nh" else Base.TRANSPORT
        offset, length = (int(each) // 8 for each in found.groups()[1:])
        return _Field(types.raw(length), Payload(base, offset, length))

    def _number(self, slot: int) -> tuple[_Field, list[bytes]]:
        kind = _NUMBERS[self._next()]
        self._expect("mod")
        modulus = int(self._next())
        offset = int(self._next()) if self._skip("offset") else 0
        return _NUMBER, [expressions.number(slot, kind, modulus, offset)]

    def _hash(self, slot: int) -> tuple[_Field, list[bytes]]:
        fields, loads = self._concatenation(_SOURCE_SLOT)
        self._expect("mod")
        modulus = int(self._next())
        self._expect("seed")
        length = sum(types.padded(field.type) for field in fields)
        seed = int(self._next(), 16)
        return _NUMBER, [*loads, expressions.hashed(_SOURCE_SLOT, slot, length, modulus, seed)]


_NUMBER = _Field(types.INTEGER, Meta(0))
"""A generated number, of which only the type is used."""


def _less(of: Datatype, limit: int) -> Iterator[bytes]:
    if of is types.INTEGER:  # in the byte order of the machine
        yield expressions.network_order(0)
    yield expressions.compare(0, Comparison.LESS, limit.to_bytes(of.length))


def _in_interval(source: object, how: Comparison, interval: types.Interval) -> Iterator[bytes]:
    """The expressions of a comparison with an interval. If a prefix consists of full bytes, only these are
    loaded."""
    assert isinstance(source, Payload)
    length = types.prefix_length(interval)
    if length is None:
        yield source.load(0)
        if how is Comparison.UNEQUAL:
            yield expressions.outside(0, *interval)
        else:
            yield expressions.compare(0, Comparison.AT_LEAST, interval.first)
            yield expressions.compare(0, Comparison.AT_MOST, interval.last)
    elif length and length % 8 == 0:
        yield source._replace(length=length // 8).load(0)
        yield expressions.compare(0, how, interval.first[: length // 8])
    else:
        mask = bytes(first ^ last ^ 0xFF for first, last in zip(*interval, strict=True))
        yield source.load(0)
        yield expressions.bitwise(0, mask, bytes(len(mask)))
        yield expressions.compare(0, how, interval.first)
