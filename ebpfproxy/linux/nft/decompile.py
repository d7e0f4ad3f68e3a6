"""Converts a rule to its text: the same text from which `compile` makes the rule."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.compile import (
    DESTINATION,
    FULLY_RANDOM,
    JUMPS,
    NAT_FAMILIES,
    REJECT,
    UPDATE,
    VERDICTS,
    endpoint_types,
)
from ebpfproxy.linux.nft.expressions import (
    VERDICT_REGISTER,
    Bitwise,
    Compare,
    Comparison,
    Ct,
    Dynset,
    Expression,
    Fib,
    InRange,
    Load,
    Lookup,
    Masquerade,
    Meta,
    MetaKey,
    Nat,
    Numgen,
    Payload,
    Reject,
    SetMeta,
    Verdict,
)
from ebpfproxy.linux.nft.rule import FIELDS, AnonymousSet, Field, Rule, random_number
from ebpfproxy.linux.nft.sets import SetElement, intervals
from ebpfproxy.linux.nft.types import Interval

_JUMPS_WORDS = {int(code): word for word, code in JUMPS.items()}
_VERDICT_WORDS = {int(code): word for word, code in VERDICTS.items()}
_SIGNS = {Comparison.EQUAL: "", Comparison.UNEQUAL: "!= "}
# The key contains the type, since tuples of two types can be equal.
_FIELDS_BY_LOAD: dict[tuple[type, Expression], Field] = {
    (type(each.load), each.load): each for each in FIELDS.values()
}
_PAYLOADS = {
    (each.load.base, each.load.offset): each for each in FIELDS.values() if isinstance(each.load, Payload)
}
_WORD = 4


class _Unreadable(Exception):
    """The rule has something that `compile` does not produce."""


def rule_text(rule: Rule, family: str) -> str:
    """The text of a rule. `family` is "ip" or "ip6".

    For a rule with anything that `compile` does not produce, the text is "other: " and the names of its
    expressions, which cannot be compiled.
    """
    reader = _Decompiler(rule.sets, family)
    try:
        for each in rule.expressions:
            reader.read(each)
        reader.end()
    except (_Unreadable, ValueError, LookupError):
        names = (type(each).__name__.lower() for each in rule.expressions)
        return f"other: {' '.join(names)}"
    text = " ".join(reader.words)
    return f'{text} comment "{rule.comment}"' if rule.comment else text


def verdict_text(verdict: Verdict) -> str:
    """The text that `parse_verdict` reads; for an unknown code, its number."""
    if verdict.chain:
        return f"{_JUMPS_WORDS.get(verdict.code, verdict.code)} {verdict.chain}"
    return _VERDICT_WORDS.get(verdict.code, str(verdict.code))


class _Decompiler:
    """Remembers the fields and constants that are loaded, by slot, until an expression uses them."""

    def __init__(self, sets: tuple[AnonymousSet, ...], family: str) -> None:
        self.words: list[str] = []
        self._sets = sets
        self._family = family
        self._fields: dict[int, tuple[Field, int]] = {}  # and the number of bytes that are loaded
        self._constants: dict[int, bytes] = {}
        self._chosen = ""  # the text of a map lookup whose result is in the slots from 0 on
        self._bits: Bitwise | None = None
        self._floor: Compare | None = None  # the lower end of a range, until the upper end is read

    def read(self, each: Expression) -> None:
        if self._floor and not isinstance(each, Compare):
            raise _Unreadable
        handler = _HANDLERS.get(type(each))
        if handler is None:
            raise _Unreadable
        handler(self, each)

    def end(self) -> None:
        """Raise _Unreadable if something that was loaded is unused."""
        if self._fields or self._constants or self._bits or self._floor or self._chosen:
            raise _Unreadable

    def load(self, each: Payload | Meta | Ct | Fib | Numgen) -> None:
        if each.slot in self._fields or self._bits or self._chosen:
            raise _Unreadable
        self._fields[each.slot] = _field(each)

    def constant(self, each: Load) -> None:
        if self._chosen:
            raise _Unreadable
        self._constants[each.slot] = each.value

    def bitwise(self, each: Bitwise) -> None:
        if self._bits or (each.slot, each.target) != (0, 0):
            raise _Unreadable
        self._bits = each

    def _unmodified(self, slot: int) -> Field:
        """The field in the slot, if all of its bytes are loaded and not modified."""
        field, length = self._fields.pop(slot)
        if self._bits or length != field.type.length:
            raise _Unreadable
        return field

    def compare(self, each: Compare) -> None:
        if each.how in (Comparison.AT_LEAST, Comparison.AT_MOST):
            self._range_end(each)
        elif self._bits:
            self._compare_bits(each, self._bits)
        else:
            field, length = self._fields.pop(each.slot)
            self._compare_value(field, length, each)

    def _compare_value(self, field: Field, length: int, each: Compare) -> None:
        whole = len(each.value) == field.type.length
        if field.type in (types.IPV4, types.IPV6):
            if len(each.value) != length:
                raise _Unreadable
            rest = field.type.length - length
            interval = Interval(each.value + bytes(rest), each.value + b"\xff" * rest)
            text = types.interval_text(field.type, interval)
        elif field.type is types.DEVICE or whole:
            text = field.type.text(each.value)
        else:
            raise _Unreadable
        self._say(field.words, _SIGNS[Comparison(each.how)] + text)

    def _compare_bits(self, each: Compare, bits: Bitwise) -> None:
        """Compare a prefix of an address, one of several states, or bits of the mark."""
        self._bits = None
        field = self._unmodified(each.slot)
        sign = _SIGNS[Comparison(each.how)]
        if any(bits.xor) or len(bits.mask) != len(each.value):
            raise _Unreadable
        if field.type in (types.IPV4, types.IPV6):
            last = bytes(value | mask ^ 0xFF for value, mask in zip(each.value, bits.mask, strict=True))
            interval = Interval(each.value, last)
            if types.prefix_length(interval) is None:
                raise _Unreadable
            self._say(field.words, sign + types.interval_text(field.type, interval))
        elif field.type in types.BITS and not any(each.value):
            self._say(field.words, ("" if sign else "!= ") + field.type.text(bits.mask))
        elif field.type is types.MARK:
            self._say(field.words, "&", field.type.text(bits.mask), sign.strip() or "==")
            self._say(field.type.text(each.value))
        else:
            raise _Unreadable

    def _range_end(self, each: Compare) -> None:
        if each.how == Comparison.AT_LEAST and self._floor is None:
            self._floor = each
        elif each.how == Comparison.AT_MOST and self._floor and self._floor.slot == each.slot:
            low, self._floor = self._floor.value, None
            self._interval(each.slot, "", Interval(low, each.value))
        else:
            raise _Unreadable

    def in_range(self, each: InRange) -> None:
        self._interval(each.slot, _SIGNS[Comparison(each.how)], Interval(each.low, each.high))

    def _interval(self, slot: int, sign: str, interval: Interval) -> None:
        field = self._unmodified(slot)
        self._say(field.words, sign + types.interval_text(field.type, interval))

    def lookup(self, each: Lookup) -> None:
        fields = list(self._concatenated(each.slot))
        words = " . ".join(field.words for field in fields)
        own = self._sets[each.set_id - 1] if each.set_id else None
        if each.target is None:
            text = _set_text(own, fields) if own else f"@{each.set_name}"
            self._say(words, _SIGNS[Comparison(each.inverted)] + text)
        elif each.inverted:
            raise _Unreadable
        elif each.target == VERDICT_REGISTER:
            self._say(words, "vmap", _map_text(own, fields) if own else f"@{each.set_name}")
        elif own and each.target == 0 and own.declaration.values == endpoint_types(self._family):
            self._chosen = f"{words} map {_map_text(own, fields)}"
        else:
            raise _Unreadable

    def _concatenated(self, slot: int) -> Iterator[Field]:
        """All fields in adjacent slots, from this slot on. No other field may be loaded."""
        while slot in self._fields:
            field = self._unmodified(slot)
            slot += types.padded(field.type) // _WORD
            yield field
        if self._fields:
            raise _Unreadable

    def set_meta(self, each: SetMeta) -> None:
        """Set or invert bits of the mark."""
        bits, self._bits = self._bits, None
        field = self._unmodified(each.slot)
        if bits is None or (field.words, each.key) != ("meta mark", MetaKey.MARK):
            raise _Unreadable
        mask, xor = (int.from_bytes(value, sys.byteorder) for value in (bits.mask, bits.xor))
        if mask == xor ^ 0xFFFFFFFF:
            operator = "|"
        elif mask == 0xFFFFFFFF:
            operator = "^"
        else:
            raise _Unreadable
        self._say("meta mark set meta mark", operator, field.type.text(bits.xor))

    def dynset(self, each: Dynset) -> None:
        if each.how != UPDATE or not each.timeout or each.timeout % 1000:
            raise _Unreadable
        field = self._unmodified(each.slot)
        self._say(f"update @{each.set_name} {{ {field.words} timeout {each.timeout // 1000}s }}")

    def nat(self, each: Nat) -> None:
        if each.kind != DESTINATION or each.flags or each.family != NAT_FAMILIES[self._family]:
            raise _Unreadable
        if each.address is None or each.port is None:
            raise _Unreadable
        if self._chosen:
            self._nat_to_chosen(each)
            return
        address = types.address_text(self._constants.pop(each.address))
        port = types.PORT.text(self._constants.pop(each.port))
        self._say("dnat to", f"[{address}]:{port}" if ":" in address else f"{address}:{port}")

    def _nat_to_chosen(self, each: Nat) -> None:
        address, _ = endpoint_types(self._family)
        if (each.address, each.port) != (0, types.padded(address) // _WORD):
            raise _Unreadable
        self._say(f"dnat {self._family} to", self._chosen)
        self._chosen = ""

    def masquerade(self, each: Masquerade) -> None:
        if each.flags not in (0, FULLY_RANDOM):
            raise _Unreadable
        self._say("masquerade fully-random" if each.flags else "masquerade")

    def reject(self, each: Reject) -> None:
        if each != REJECT[self._family]:
            raise _Unreadable
        self._say("reject")

    def verdict(self, each: Verdict) -> None:
        self._say(verdict_text(each))

    def _say(self, *words: str) -> None:
        self.words += words


_HANDLERS: dict[type, Callable[[_Decompiler, Any], None]] = {
    **dict.fromkeys((Payload, Meta, Ct, Fib, Numgen), _Decompiler.load),
    Load: _Decompiler.constant,
    Bitwise: _Decompiler.bitwise,
    Compare: _Decompiler.compare,
    InRange: _Decompiler.in_range,
    Lookup: _Decompiler.lookup,
    SetMeta: _Decompiler.set_meta,
    Dynset: _Decompiler.dynset,
    Nat: _Decompiler.nat,
    Masquerade: _Decompiler.masquerade,
    Reject: _Decompiler.reject,
    Verdict: _Decompiler.verdict,
}


def _field(load: Payload | Meta | Ct | Fib | Numgen) -> tuple[Field, int]:
    """The field that an expression loads, and the number of bytes. Raises KeyError for an unknown field."""
    if isinstance(load, Numgen):
        field = random_number(load.modulus)
        if field.load != load._replace(slot=0):
            raise KeyError(load)
        return field, field.type.length
    if isinstance(load, Payload):
        field = _PAYLOADS[load.base, load.offset]
        if load.length > field.type.length:
            raise KeyError(load)
        return field, load.length
    field = _FIELDS_BY_LOAD[type(load), load._replace(slot=0)]
    return field, field.type.length


def _map_text(of: AnonymousSet, fields: Sequence[Field]) -> str:
    """The text of an anonymous map of verdicts or values."""
    key, values = tuple(field.type for field in fields), of.declaration.values
    if key != of.declaration.key:
        raise _Unreadable
    elements = sorted(of.elements, key=lambda each: _ordered(key, each.key))
    return _braced(f"{types.key_text(key, each.key)} : {_value_text(each, values)}" for each in elements)


def _value_text(each: SetElement, values: types.Key) -> str:
    """The verdict or value of one element of a map."""
    if values:
        return types.key_text(values, each.value)
    if each.verdict:
        return verdict_text(each.verdict)
    raise _Unreadable


def _set_text(of: AnonymousSet, fields: Sequence[Field]) -> str:
    if len(fields) != 1:
        raise _Unreadable
    return _braced(types.interval_text(fields[0].type, each) for each in intervals(of.elements))


def _ordered(key: types.Key, value: bytes) -> int | bytes:
    """The sort key of a set's key: numbers in host byte order are sorted by value."""
    return int.from_bytes(value, sys.byteorder) if key == (types.INTEGER,) else value


def _braced(texts: Iterable[str]) -> str:
    return f"{{ {', '.join(texts)} }}"
