"""Sets and maps of nf_tables: what fits in, and what is in, as values and in the words of `nft`."""

import enum
import functools
import operator
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.expressions import Verdict
from ebpfproxy.linux.nft.types import Datatype, Interval


class SetFlag(enum.IntFlag):
    """NFT_SET_*: of `flags dynamic` the kernel's word is EVAL."""

    ANONYMOUS = 0x1
    CONSTANT = 0x2
    INTERVAL = 0x4
    MAP = 0x8
    TIMEOUT = 0x10
    EVAL = 0x20


class Declaration(NamedTuple):
    """What fits into a set; `verdicts`: it is a map that says what becomes of packets. `values`: it is a map
    that gives such ones. `size` is 0 for no limit."""

    key: types.Key
    verdicts: bool = False
    flags: SetFlag = SetFlag(0)
    size: int = 0
    values: types.Key = ()


class SetElement(NamedTuple):
    """`is_end`: the first value behind an interval, rather than one that is in the set; `is_open`: nothing is
    behind this interval."""

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

    Raises ValueError, for a type that we never write, too.
    """
    parts = dict(part.strip().partition(" ")[::2] for part in text.rstrip("; ").split(";"))
    named, _, data = parts.pop("type", "").partition(" : ")
    names, size = named.split(" . "), parts.pop("size", "0")
    words = list(filter(None, parts.pop("flags", "").split(",")))
    known = types.IN_SETS.keys() >= set(names) and _FLAGS.keys() >= set(words)
    if parts or not known or data not in ("", "verdict") or not size.isdecimal():
        raise ValueError(f"the declaration {text!r} is not understood")
    flags = functools.reduce(operator.or_, (_FLAGS[word] for word in words), SetFlag(0))
    return Declaration(tuple(types.IN_SETS[name] for name in names), bool(data), flags, int(size))


def declaration_text(of: Declaration) -> str:
    """What `parse_declaration` reads."""
    text = f"type {' . '.join(part.name for part in of.key)}{' : verdict' if of.verdicts else ''};"
    if of.size:
        text += f" size {of.size};"
    words = sorted(word for flag, word in _FLAG_WORDS.items() if flag in of.flags)
    return f"{text} flags {','.join(words)};" if words else text


def interval_elements(of: Datatype, text: str) -> Iterator[SetElement]:
    """The one or two elements that an interval, in the words of `parse_interval`, is in a set."""
    interval = types.parse_interval(of, text)
    behind = int.from_bytes(interval.last) + 1
    is_open = behind.bit_length() > 8 * of.length
    yield SetElement(interval.first, is_open=is_open)
    if not is_open:
        yield SetElement(behind.to_bytes(of.length), is_end=True)


def intervals(found: Iterable[SetElement]) -> Iterator[Interval]:
    """The intervals of a set, from its elements in any order.

    An end without a beginning says nothing: `nft` puts one before the first interval of a set.
    """
    first: bytes | None = None
    for each in sorted(found, key=lambda each: (each.key, not each.is_end)):
        if first is not None:  # another beginning ends what is open as well
            yield Interval(first, (int.from_bytes(each.key) - 1).to_bytes(len(first)))
        first = None if each.is_end else each.key
    if first is not None:
        yield Interval(first, b"\xff" * len(first))
