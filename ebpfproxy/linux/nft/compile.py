"""Compiles the text of a rule: only the part of nft's syntax that the nftables backend uses.

The expressions are the same as those of nft(8) for the same text, so that nft lists the rules as written.
"""

import functools
import re
import socket
import sys
from collections.abc import Callable, Iterator

from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.expressions import (
    VERDICT_REGISTER,
    Bitwise,
    Code,
    Compare,
    Comparison,
    Dynset,
    Expression,
    InRange,
    Load,
    Lookup,
    Masquerade,
    MetaKey,
    Nat,
    Payload,
    Reject,
    SetMeta,
    Verdict,
)
from ebpfproxy.linux.nft.rule import FIELDS, AnonymousSet, Field, Rule, random_number
from ebpfproxy.linux.nft.sets import Declaration, SetElement, SetFlag, interval_elements

REJECT = {"ip": Reject(0, 3), "ip6": Reject(0, 4)}
"""The expression of `reject`, by family: ICMP port unreachable."""

FULLY_RANDOM = 0x10  # NF_NAT_RANGE_PROTO_RANDOM_FULLY
DESTINATION = 1  # NFT_NAT_DNAT
UPDATE = 1  # NFT_DYNSET_OP_UPDATE
NAT_FAMILIES = {"ip": int(socket.AF_INET), "ip6": int(socket.AF_INET6)}
VERDICTS = {"drop": Code.DROP, "accept": Code.ACCEPT, "return": Code.RETURN}
JUMPS = {"jump": Code.JUMP, "goto": Code.GOTO}

_COMMENTED = re.compile(r'(.*?) ?\bcomment "([^"]*)"')
_WORDS_OF_FIELDS = {words.partition(" ")[0]: words.count(" ") + 1 for words in FIELDS}
_PORT_SLOT = 4  # after the longest address
_CONSTANT = SetFlag.ANONYMOUS | SetFlag.CONSTANT
_WORD = 4  # bytes of a register


def compile_rule(text: str, family: str) -> Rule:
    """The rule of a text. `family` is "ip" or "ip6". Raises ValueError with the word that is not
    supported."""
    commented = _COMMENTED.fullmatch(text) if text.endswith('"') else None
    body, comment = commented.groups() if commented else (text, "")
    rule = _Compiler(body.split(" "), family)
    try:
        rule.compile()
    except (ValueError, IndexError, KeyError) as failure:
        rest = " ".join(rule.words[max(0, rule.at - 1) :])
        raise ValueError(f"cannot compile the rule {text!r} at {rest!r}: {failure}") from failure
    return Rule(tuple(rule.expressions), comment, tuple(rule.sets))


def endpoint_types(family: str) -> types.Key:
    """The types of an endpoint's address and port."""
    return FIELDS[f"{family} daddr"].type, types.PORT


@functools.lru_cache(maxsize=4096)
def parse_verdict(text: str) -> Verdict:
    """
    >>> parse_verdict("goto reject-chain")
    Verdict(code=<Code.GOTO: -4>, chain='reject-chain')

    Raises ValueError.
    """
    word, _, chain = text.partition(" ")
    if word in VERDICTS and not chain:
        return Verdict(VERDICTS[word])
    if word in JUMPS and chain and " " not in chain:
        return Verdict(JUMPS[word], chain)
    raise ValueError(f"{text!r} is not a verdict")


class _Compiler:
    """`at`: the number of words that were consumed."""

    def __init__(self, words: list[str], family: str) -> None:
        self.words = words
        self.at = 0
        self.expressions: list[Expression] = []
        self.sets: list[AnonymousSet] = []
        self._family = family

    def compile(self) -> None:
        while self.at < len(self.words):
            word = self._next()
            statement = _STATEMENTS.get(word)
            if statement:
                statement(self)
            elif word in VERDICTS:
                self._put(Verdict(VERDICTS[word]))
            elif word in JUMPS:
                self._put(Verdict(JUMPS[word], self._next()))
            else:
                self._condition(word)

    def _next(self) -> str:
        self.at += 1
        return self.words[self.at - 1]

    def _expect(self, *words: str) -> None:
        for word in words:
            if self._next() != word:
                raise ValueError(f"{word!r} is missing")

    def _follows(self, *words: str) -> bool:
        """Consume these words if they are the next ones; return whether they are."""
        if self.words[self.at : self.at + len(words)] != list(words):
            return False
        self.at += len(words)
        return True

    def _put(self, *expressions: Expression) -> None:
        self.expressions += expressions

    # --- statements ---

    def reject(self) -> None:
        self._put(REJECT[self._family])

    def masquerade(self) -> None:
        self._put(Masquerade(FULLY_RANDOM if self._follows("fully-random") else 0))

    def dnat(self) -> None:
        """DNAT to one endpoint, or to the endpoint that a map returns."""
        address, port = endpoint = endpoint_types(self._family)
        port_slot = _PORT_SLOT
        if self._follows(self._family, "to"):
            field = self._field(self._next())
            self._expect("map")
            self._put(field.load, self._values((field.type,), endpoint))
            port_slot = types.padded(address) // _WORD
        else:
            self._expect("to")
            text, _, number = self._next().rpartition(":")
            self._put(Load(0, address.parse(text.strip("[]"))), Load(port_slot, port.parse(number)))
        self._put(Nat(DESTINATION, NAT_FAMILIES[self._family], 0, port_slot))

    def update(self) -> None:
        name = self._next().removeprefix("@")
        self._expect("{")
        field = self._field(self._next())
        self._expect("timeout")
        seconds = int(self._next().removesuffix("s"))
        self._expect("}")
        self._put(field.load, Dynset(name, UPDATE, 0, 1000 * seconds))

    # --- conditions ---

    def _condition(self, word: str) -> None:
        field = self._field(word)
        if self._follows("."):
            self._concatenation(field)
        elif self._follows("set"):
            self._assignment(field)
        elif self._follows("&"):
            mask = types.MARK.parse(self._next())
            how = self._comparison()
            self._put(field.load, Bitwise(0, 0, mask, bytes(_WORD)))
            self._put(Compare(0, how, field.type.parse(self._next())))
        elif self._follows("vmap"):
            self._put(field.load)
            self._verdicts((field.type,))
        else:
            self._compared(field, self._comparison())

    def _field(self, word: str) -> Field:
        if word == "numgen":
            self._expect("random", "mod")
            return random_number(int(self._next()))
        count = _WORDS_OF_FIELDS[word]
        self.at += count - 1
        return FIELDS[" ".join(self.words[self.at - count : self.at])]

    def _comparison(self) -> Comparison:
        if self._follows("!="):
            return Comparison.UNEQUAL
        self._follows("==")
        return Comparison.EQUAL

    def _concatenation(self, first: Field) -> None:
        fields = [first, self._field(self._next())]
        while self._follows("."):
            fields.append(self._field(self._next()))
        slot = 0
        for each in fields:
            self._put(each.load._replace(slot=slot))
            slot += types.padded(each.type) // _WORD
        if self._follows("vmap"):
            self._verdicts(tuple(each.type for each in fields))
        else:
            inverted = self._comparison() is Comparison.UNEQUAL
            self._put(Lookup(self._named(self._next()), 0, inverted=inverted))

    def _assignment(self, field: Field) -> None:
        """`meta mark set meta mark | 0x4000`, or with ^."""
        if field.words != "meta mark" or not self._follows("meta", "mark"):
            raise ValueError("only the mark can be set, to a value that is computed from it")
        operator, value = self._next(), types.MARK.parse(self._next())
        keeping = {"|": _inverted(value), "^": b"\xff" * _WORD}
        self._put(field.load, Bitwise(0, 0, keeping[operator], value), SetMeta(0, MetaKey.MARK))

    def _verdicts(self, key: types.Key) -> None:
        """What follows `vmap`: the name of a map, or an anonymous map."""
        word = self._next()
        if word.startswith("@"):
            self._put(Lookup(word[1:], 0, VERDICT_REGISTER))
            return
        elements = tuple(
            SetElement(types.parse_key(key, value), parse_verdict(verdict))
            for value, verdict in self._pairs(word)
        )
        self.sets.append(AnonymousSet(Declaration(key, True, _CONSTANT, len(elements)), elements))
        self._put(Lookup("__map%d", 0, VERDICT_REGISTER, len(self.sets)))

    def _values(self, key: types.Key, values: types.Key) -> Lookup:
        """What follows `map`: an anonymous map of values."""
        elements = tuple(
            SetElement(types.parse_key(key, key_text), value=types.parse_key(values, value_text))
            for key_text, value_text in self._pairs(self._next())
        )
        declaration = Declaration(key, flags=_CONSTANT, size=len(elements), values=values)
        self.sets.append(AnonymousSet(declaration, elements))
        return Lookup("__map%d", 0, 0, len(self.sets))

    def _pairs(self, word: str) -> Iterator[tuple[str, str]]:
        for each in self._listed(word):
            key, _, value = each.partition(" : ")
            yield key, value

    def _named(self, word: str) -> str:
        if not word.startswith("@"):
            raise ValueError("the name of a set is missing")
        return word[1:]

    def _listed(self, word: str) -> Iterator[str]:
        """The elements between braces. `word` is the opening brace."""
        if word != "{":
            raise ValueError("'{' is missing")
        end = self.words.index("}", self.at)
        text = " ".join(self.words[self.at : end])
        self.at = end + 1
        yield from text.split(", ")

    def _compared(self, field: Field, how: Comparison) -> None:
        word = self._next()
        inverted = how is Comparison.UNEQUAL
        if word.startswith("@"):
            self._put(field.load, Lookup(word[1:], 0, inverted=inverted))
        elif word == "{":
            self._put(field.load, self._anonymous(field, inverted))
        elif field.type in (types.IPV4, types.IPV6):
            self._put(*_in_interval(field, how, types.parse_interval(field.type, word)))
        elif field.type in types.BITS:
            bit = field.type.parse(word)
            matching = Comparison.EQUAL if inverted else Comparison.UNEQUAL
            self._put(field.load, Bitwise(0, 0, bit, bytes(_WORD)), Compare(0, matching, bytes(_WORD)))
        else:
            self._put(field.load, Compare(0, how, field.type.parse(word)))

    def _anonymous(self, field: Field, inverted: bool) -> Lookup:
        elements = [end for each in self._listed("{") for end in interval_elements(field.type, each)]
        flags = _CONSTANT | SetFlag.INTERVAL
        declaration = Declaration((field.type,), flags=flags, size=len(elements))
        self.sets.append(AnonymousSet(declaration, tuple(elements)))
        return Lookup("__set%d", 0, set_id=len(self.sets), inverted=inverted)


_STATEMENTS: dict[str, Callable[[_Compiler], None]] = {
    "reject": _Compiler.reject,
    "masquerade": _Compiler.masquerade,
    "dnat": _Compiler.dnat,
    "update": _Compiler.update,
}


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


def _inverted(value: bytes) -> bytes:
    return (~int.from_bytes(value, sys.byteorder) & 0xFFFFFFFF).to_bytes(_WORD, sys.byteorder)
