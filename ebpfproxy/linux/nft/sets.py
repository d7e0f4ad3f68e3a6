"""Sets and maps of nf_tables: declarations and elements, as values and as text of nft."""

import enum
import functools
import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.expressions import Verdict
from ebpfproxy.linux.nft.types import Datatype, Interval


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
    here has no end, because it contains the largest value.
    """

    key: bytes
    verdict: Verdict | None = None
    is_end: bool = False
    is_open: bool = False
    comment: str = ""
    value: bytes = b""


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
    words = list(filter(None, parts.pop("flags", "").split(",")))
    known = types.IN_SETS.keys() >= set(names) and _FLAGS.keys() >= set(words)
    if parts or not known or data not in ("", "verdict") or not size.isdecimal():
        raise ValueError(f"cannot parse the declaration {text!r}")
    flags = functools.reduce(operator.or_, (_FLAGS[word] for word in words), SetFlag(0))
    return Declaration(tuple(types.IN_SETS[name] for name in names), bool(data), flags, int(size))


def declaration_text(of: Declaration) -> str:
    """The text that `parse_declaration` reads."""
    text = f"type {' . '.join(part.name for part in of.key)}{' : verdict' if of.verdicts else ''};"
    if of.size:
        text += f" size {of.size};"
    words = sorted(word for flag, word in _FLAG_WORDS.items() if flag in of.flags)
    return f"{text} flags {','.join(words)};" if words else text


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
