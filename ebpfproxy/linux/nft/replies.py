"""Decodes the objects of nf_tables in the kernel's replies. Sources: see `messages`."""

import functools
import operator
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ebpfproxy.linux.netlink.netlink import attributes, text
from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.encoding import decode_all, decode_verdict, number
from ebpfproxy.linux.nft.expressions import Expression, Lookup
from ebpfproxy.linux.nft.messages import COMMENT, HEAD, HOOKS, INTERVAL_END, VERDICTS, Hook, Table
from ebpfproxy.linux.nft.rule import AnonymousSet, Rule
from ebpfproxy.linux.nft.sets import Declaration, SetElement, SetFlag

_HOOKS = {number: hook for hook, number in HOOKS.items()}
_FAMILIES = {Table(family, "").number: family for family in ("ip", "ip6")}
_ACCEPT = (1).to_bytes(4)
_ALL_FLAGS = functools.reduce(operator.or_, SetFlag)


class ListedChain(NamedTuple):
    """A chain. `hook` is None for a regular chain. `accepts`: the policy of a base chain is accept."""

    name: str
    hook: Hook | None
    accepts: bool = True


class ListedSet(NamedTuple):
    """A set. `declaration` is None if the set has properties that ebpfproxy never uses. `is_anonymous`: it
    belongs to a rule."""

    name: str
    declaration: Declaration | None
    is_anonymous: bool
    is_dynamic: bool


def table_of(payload: bytes) -> Table | None:
    """The table of a message of any kind; None for a family other than ip and ip6."""
    found = next((value for kind, value in attributes(payload, HEAD.size) if kind == 1), None)
    return Table(_FAMILIES[payload[0]], text(found)) if found and payload[0] in _FAMILIES else None


def read_chain(payload: bytes) -> ListedChain:
    found = dict(attributes(payload, HEAD.size))
    hook = None
    if 4 in found:
        position = dict(attributes(found[4], 0))
        (priority,) = struct.unpack(">i", position[2])
        hook = Hook(text(found.get(7)), _HOOKS.get(number(position[1]), "other"), priority)
    return ListedChain(text(found[3]), hook, number(found.get(5, _ACCEPT)) == 1)


def read_set(payload: bytes) -> ListedSet:
    """The set in a payload. Its policy (memory or performance), timeouts and comments are ignored."""
    found = dict(attributes(payload, HEAD.size))
    flags = SetFlag(number(found.get(3)) & _ALL_FLAGS)
    data = number(found.get(6))
    verdicts, values = data == VERDICTS, types.key_of_number(data) or ()
    size = number(dict(attributes(found.get(9, b""), 0)).get(1))
    key = types.key_of_number(number(found.get(4)))
    declaration = None
    known = (
        SetFlag.MAP | SetFlag.ANONYMOUS | SetFlag.CONSTANT | SetFlag.INTERVAL | SetFlag.TIMEOUT | SetFlag.EVAL
    )
    if key and (verdicts or bool(values)) is (SetFlag.MAP in flags) and not flags & ~known:
        declaration = Declaration(key, verdicts, flags & ~SetFlag.MAP, size, values)
    return ListedSet(text(found[2]), declaration, SetFlag.ANONYMOUS in flags, SetFlag.EVAL in flags)


def read_elements(payload: bytes) -> Iterator[SetElement]:
    """The elements in one payload. A set may have several payloads."""
    for _, element in attributes(dict(attributes(payload, HEAD.size)).get(3, b""), 0):
        found = dict(attributes(element, 0))
        if 1 not in found:  # the catch-all element has no key
            continue
        data = dict(attributes(found.get(2, b""), 0))
        yield SetElement(
            dict(attributes(found[1], 0))[1],
            decode_verdict(data[2]) if 2 in data else None,
            bool(number(found.get(3)) & INTERVAL_END),
            comment=_read_comment(found.get(6)),
            value=data.get(1, b""),
        )


def read_rule(payload: bytes, anonymous: Callable[[str], AnonymousSet | None]) -> Rule:
    """The rule in a payload. `anonymous` returns the anonymous set of a name, and None for other sets."""
    found = dict(attributes(payload, HEAD.size))
    sets: list[AnonymousSet] = []
    expressions: list[Expression] = []
    for each in decode_all(found.get(4, b"")):
        own = anonymous(each.set_name) if isinstance(each, Lookup) else None
        if own and isinstance(each, Lookup):
            sets.append(own)
            each = each._replace(set_id=len(sets))
        expressions.append(each)
    return Rule(tuple(expressions), _read_comment(found.get(7)), tuple(sets))


def _read_comment(data: bytes | None) -> str:
    """The comment in userdata; "" if there is none."""
    while data and len(data) >= 2:
        kind, length = data[0], data[1]
        if kind == COMMENT:
            return text(data[2 : 2 + length])
        data = data[2 + length :]
    return ""
