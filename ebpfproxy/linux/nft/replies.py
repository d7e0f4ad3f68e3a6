"""Decodes the objects of nf_tables in the kernel's replies. Sources: see `messages`."""

import functools
import operator
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.linux.netlink.netlink import attribute, attributes, text
from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.encoding import Code, decode_verdict, number
from ebpfproxy.linux.nft.expressions import COUNTER
from ebpfproxy.linux.nft.messages import (
    COMMENT,
    DIGEST,
    HEAD,
    HOOKS,
    INTERVAL_END,
    REMEMBERS,
    VERDICTS,
    Hook,
    Table,
)
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.sets import LIST_KEY, Declaration, SetElement, SetFlag

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
    name = table_name(payload)
    return Table(_FAMILIES[payload[0]], name) if name and payload[0] in _FAMILIES else None


def table_name(payload: bytes) -> str:
    """The name of the table of a message of any kind and family; "" if there is none."""
    return text(next((value for kind, value in attributes(payload, HEAD.size) if kind == 1), None))


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
            timeout=number(found.get(4)),
            expires=number(found.get(5)),
        )


class ListedRule(NamedTuple):
    """A rule, without its statements, and its chain."""

    chain: str
    rule: Rule


def read_rule(payload: bytes) -> ListedRule:
    """The rule in a payload. Without a digest in its userdata it is one of another program."""
    chain, digest, target, remembers = "", b"", "", b""
    for kind, value in attributes(payload, HEAD.size):
        if kind == 2:
            chain = text(value)
        elif kind == 4:
            target = _target(value)
        elif kind == 7:
            digest, remembers = _userdata(value, DIGEST), _userdata(value, REMEMBERS)
    number = int.from_bytes(remembers, sys.byteorder) if remembers else None
    return ListedRule(chain, Rule.listed(digest, target, number))


def _target(expressions: bytes) -> str:
    """The chain that a rule jumps to."""
    for branch in _BRANCHES:
        at = expressions.find(branch)
        if at >= 0:
            (_, name), *_ = attributes(expressions, at + len(branch))
            return text(name)
    return ""


_BRANCHES = tuple(attribute(1, code.to_bytes(4, signed=True)) for code in (Code.JUMP, Code.GOTO))
"""NFTA_VERDICT_CODE, which NFTA_VERDICT_CHAIN follows."""


def counted_packets(payload: bytes) -> int:
    """The packets that the rule in a payload has counted; 0 if it has no counter."""
    packets = 0
    for _, expression in attributes(dict(attributes(payload, HEAD.size)).get(4, b""), 0):
        found = dict(attributes(expression, 0))
        if text(found[1]) == COUNTER:
            packets += number(dict(attributes(found[2], 0)).get(2))
    return packets


def read_listed(payload: bytes, address_bytes: int) -> Iterator[tuple[bytes, int, bytes]]:
    """The identity of the list, the place in it, and the endpoint, of each element of a list of endpoints.

    An endpoint has `address_bytes`, a port, and two zeros. It is faster than `read_elements`.
    """
    elements = dict(attributes(payload, HEAD.size)).get(3, b"")
    form = _LISTED[address_bytes]
    if len(elements) % form.size == 0:
        found = list(form.iter_unpack(elements))
        if len({each[0] for each in found}) <= 1 and all(each[3] == found[0][3] for each in found):
            size = struct.unpack_from("=H", found[0][0])[0] if found else form.size
            if size == form.size:  # else there are other attributes
                yield from ((each[1], each[2], each[4]) for each in found)
                return
    for element in read_elements(payload):
        identity, place = LIST_KEY.unpack(element.key)
        yield identity, place, element.value


_LISTED = {size: struct.Struct(f"=12s8sI8s{size + 4}s") for size in (4, 16)}
"""See `messages.add_listed`: three attributes, the key, two attributes, the endpoint."""


def _read_comment(data: bytes | None) -> str:
    """The comment in userdata; "" if there is none."""
    return text(_userdata(data, COMMENT))


def _userdata(data: bytes | None, wanted: int) -> bytes:
    """The value of this type in userdata; b"" if there is none."""
    while data and len(data) >= 2:
        kind, length = data[0], data[1]
        if kind == wanted:
            return data[2 : 2 + length]
        data = data[2 + length :]
    return b""
