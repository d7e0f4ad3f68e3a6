"""Sets and maps of nf_tables: declarations and elements, as values and as text of nft."""

import enum
import functools
import operator
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.encoding import Code, Verdict
from ebpfproxy.linux.nft.types import Datatype, Interval

LIST_KEY = struct.Struct("=8sI")
"""The key of an element of a list of endpoints: the identity of the list, and the place in it from 0 on."""


class SetFlag(enum.IntFlag):
    """NFT_SET_*. The kernel calls nft's `flags dynamic` EVAL."""

    ANONYMOUS = 0x1
    CONSTANT = 0x2
    INTERVAL = 0x4
    MAP = 0x8
    TIMEOUT = 0x10
    EVAL = 0x20


class Declaration(NamedTuple):
    """The declaration of a set or map. `size` is 0 for no limit.

    `verdicts`: it is a verdict map. `values`: it is a map with values of these types; () if it is not.
    """

    key: types.Key
    verdicts: bool = False
    flags: SetFlag = SetFlag(0)
    size: int = 0
    values: types.Key = ()


class SetElement(NamedTuple):
    """An element of a set or map.

    `is_end`: the first value after an interval, which is not in the set. `is_open`: the interval that starts
    here has no end, because it contains the largest value. `timeout`: after the last use, and `expires`:
    from now, both in milliseconds, 0 for the timeout of the set.
    """

    key: bytes
    verdict: Verdict | None = None
    is_end: bool = False
    is_open: bool = False
    comment: str = ""
    value: bytes = b""
    timeout: int = 0
    expires: int = 0


_FLAG_WORDS = {
    SetFlag.CONSTANT: "constant",
    SetFlag.EVAL: "dynamic",
    SetFlag.INTERVAL: "interval",
    SetFlag.TIMEOUT: "timeout",
}
_FLAGS = {word: flag for flag, word in _FLAG_WORDS.items()}


def parse_declaration(text: str) -> Declaration:
    """
    >>> parse_declaration("type ipv4_addr; size 65535; flags dynamic,timeout;").size
    65535

    Raises ValueError, also for a type that ebpfproxy never uses.
    """
    parts = dict(part.strip().partition(" ")[::2] for part in text.rstrip("; ").split(";"))
    named, _, data = parts.pop("type", "").partition(" : ")
    names, size = named.split(" . "), parts.pop("size", "0")
    values = [] if data in ("", "verdict") else data.split(" . ")
    words = list(filter(None, parts.pop("flags", "").split(",")))
    known = types.IN_SETS.keys() >= {*names, *values} and _FLAGS.keys() >= set(words)
    if parts or not known or not size.isdecimal():
        raise ValueError(f"cannot parse the declaration {text!r}")
    flags = functools.reduce(operator.or_, (_FLAGS[word] for word in words), SetFlag(0))
    key, value = (tuple(types.IN_SETS[name] for name in part) for part in (names, values))
    return Declaration(key, data == "verdict", flags, int(size), value)


def declaration_text(of: Declaration) -> str:
    """The text that `parse_declaration` reads."""
    data = "verdict" if of.verdicts else " . ".join(part.name for part in of.values)
    text = f"type {' . '.join(part.name for part in of.key)}{f' : {data}' if data else ''};"
    if of.size:
        text += f" size {of.size};"
    words = sorted(word for flag, word in _FLAG_WORDS.items() if flag in of.flags)
    return f"{text} flags {','.join(words)};" if words else text


@functools.lru_cache(maxsize=4096)
def parse_verdict(text: str) -> Verdict:
    """
    >>> parse_verdict("goto reject-chain")
    Verdict(code=<Code.GOTO: -4>, chain='reject-chain')

    Raises ValueError.
    """
    word, _, chain = text.partition(" ")
    if word in _VERDICTS and bool(chain) is (word in ("jump", "goto")) and " " not in chain:
        return Verdict(_VERDICTS[word], chain)
    raise ValueError(f"{text!r} is not a verdict")


def verdict_text(verdict: Verdict) -> str:
    """The text that `parse_verdict` reads; for an unknown code, its number."""
    return f"{_VERDICT_WORDS.get(verdict.code, verdict.code)} {verdict.chain}".rstrip()


_VERDICTS = {code.name.lower(): code for code in Code}
_VERDICT_WORDS = {int(code): word for word, code in _VERDICTS.items()}


def interval_elements(of: Datatype, text: str) -> Iterator[SetElement]:
    """The one or two set elements of an interval. `text`: see `types.parse_interval`."""
    interval = types.parse_interval(of, text)
    end = int.from_bytes(interval.last) + 1
    is_open = end.bit_length() > 8 * of.length
    yield SetElement(interval.first, is_open=is_open)
    if not is_open:
        yield SetElement(end.to_bytes(of.length), is_end=True)


def intervals(found: Iterable[SetElement]) -> Iterator[Interval]:
    """The intervals of a set, from its elements in any order.

    An end without a start has no meaning: `nft` adds one before the first interval of a set.
    """
    first: bytes | None = None
    for each in sorted(found, key=lambda each: (each.key, not each.is_end)):
        if first is not None:  # the start of the next interval ends this one, too
            yield Interval(first, (int.from_bytes(each.key) - 1).to_bytes(len(first)))
        first = None if each.is_end else each.key
    if first is not None:
        yield Interval(first, b"\xff" * len(first))


# How nft shows keys: the expressions of a declaration with `typeof`, in the userdata of the set. Without
# them nft lists the same declaration with types, but does not accept this listing as input. Source: the
# functions *_build_udata() of nftables, and enum nftnl_udata_set_types of libnftnl.

_KEY, _DATA = 3, 4
_PAYLOAD, _CONCATENATION, _NUMGEN = 7, 13, 23  # enum expr_types
_PORT = 11, 2  # th dport


def _tlv(kind: int, value: bytes | int) -> bytes:
    value = value.to_bytes(4, sys.byteorder) if isinstance(value, int) else value
    return bytes((kind, len(value))) + value


def _expression(kind: int, *parts: bytes | int) -> bytes:
    return _tlv(0, kind) + _tlv(1, b"".join(_tlv(number, part) for number, part in enumerate(parts)))


def _typeof(kind: int, *parts: bytes) -> bytes:
    return _tlv(kind, _expression(_CONCATENATION, *parts))


Shape = tuple[types.Key, types.Key]
"""The types of a key and of the values."""

_NUMBER = _expression(_NUMGEN, 1, 1, 0)
_BYTE = _expression(_PAYLOAD, 0, 0, 2, 0, 8)
_NO_ORDER = _tlv(0, 0)


def _shown(address: Datatype, source: tuple[int, int], destination: tuple[int, int]) -> dict[Shape, bytes]:
    endpoint = (_expression(_PAYLOAD, *destination), _expression(_PAYLOAD, *_PORT))
    listed = _typeof(_KEY, *[_NUMBER] * 3) + _typeof(_DATA, *endpoint)
    return {
        ((types.MARK,) * 3, (address, types.PORT)): _NO_ORDER + _tlv(1, 0) + listed,
        ((address, types.MARK), ()): _NO_ORDER + _typeof(_KEY, _expression(_PAYLOAD, *source), _NUMBER),
    }


TYPEOF: dict[Shape, bytes] = {
    **_shown(types.IPV4, (12, 11), (12, 12)),
    **_shown(types.IPV6, (13, 8), (13, 9)),
    ((types.MARK,) * 2, ()): _NO_ORDER + _typeof(_KEY, _BYTE, _BYTE),
}
"""The userdata of sets whose keys have numbers."""
