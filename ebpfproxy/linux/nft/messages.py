"""Netlink messages that create, change and delete objects of nf_tables.

Sources: include/uapi/linux/netfilter/nf_tables.h; nf_tables_api.c for the required attributes;
include/libnftnl/udata.h of libnftnl for the userdata, which the kernel only stores.
"""

import enum
import functools
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.linux.netlink.netlink import NLM_F_CREATE, attribute
from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.encoding import NESTED, encode_verdict, name, nested, u32
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.rule_expressions import SetNames, convert
from ebpfproxy.linux.nft.sets import LIST_KEY, TYPEOF, Declaration, SetElement, SetFlag

HEAD = struct.Struct(">BBH")  # struct nfgenmsg: family, version, res_id
_NLM_F_APPEND = 0x800
VERDICTS = 0xFFFFFF00  # NFT_DATA_VERDICT, instead of the number of a type
_VERDICT_LENGTH = 16
INTERVAL_END = 1  # NFT_SET_ELEMINTERVAL_END
_DORMANT = 1  # NFT_TABLE_F_DORMANT
_ACCEPT = 1
_ELEMENTS_IN_A_MESSAGE = 100  # each has 600 bytes at most
_LISTED_IN_A_MESSAGE = 1000  # each has 52 bytes at most
_FAMILIES = {"ip": 2, "ip6": 10}

HOOKS = {"prerouting": 0, "input": 1, "forward": 2, "output": 3, "postrouting": 4}

# userdata: a type and a length, each of one byte, and the value
COMMENT, _ELEMENT_FLAGS = 0, 1
DIGEST = 200
"""The digest of a rule. nft ignores types that it does not know."""
REMEMBERS = 201
"""The number that a rule remembers clients with, in the byte order of this machine."""
_U64 = struct.Struct(">Q")
_OPEN = (1).to_bytes(4, sys.byteorder)


class Kind(enum.IntEnum):
    """NFT_MSG_*."""

    NEW_TABLE = 0
    GET_TABLE = 1
    DELETE_TABLE = 2
    NEW_CHAIN = 3
    GET_CHAIN = 4
    DELETE_CHAIN = 5
    NEW_RULE = 6
    GET_RULE = 7
    DELETE_RULE = 8
    NEW_SET = 9
    GET_SET = 10
    DELETE_SET = 11
    NEW_ELEMENT = 12
    GET_ELEMENT = 13
    DELETE_ELEMENT = 14
    NEW_GENERATION = 15
    GET_GENERATION = 16
    NEW_FLOWTABLE = 22
    GET_FLOWTABLE = 23
    DELETE_FLOWTABLE = 24


class Table(NamedTuple):
    """`family` is "ip" or "ip6"."""

    family: str
    name: str

    @property
    def number(self) -> int:
        """NFPROTO_*."""
        return _FAMILIES[self.family]

    def __str__(self) -> str:
        return f"{self.family} {self.name}"


class Operation(NamedTuple):
    """One message of a transaction. `flags` are NLM_F_*, `family` is an NFPROTO_*."""

    kind: Kind
    flags: int
    family: int
    body: bytes


class Hook(NamedTuple):
    """The hook of a base chain. `type` is "filter", "nat" or "route"."""

    type: str
    hook: str
    priority: int


def _operation(kind: Kind, table: Table, *parts: bytes) -> Operation:
    return Operation(kind, NLM_F_CREATE, table.number, b"".join(parts))


@functools.lru_cache(maxsize=8)
def _of(table: Table) -> bytes:
    """The first attribute of every message: the table's name, NFTA_TABLE_NAME, NFTA_CHAIN_TABLE and so on."""
    return name(1, table.name)


# Adding an existing object is no error. Deleting a missing object is ENOENT.


def add_table(table: Table, dormant: bool = False) -> Operation:
    """Add a table. `dormant`: its chains are not called for any packet."""
    return _operation(Kind.NEW_TABLE, table, _of(table), u32(2, _DORMANT) if dormant else b"")


def delete_table(table: Table) -> Operation:
    """Delete a table with its contents."""
    return _operation(Kind.DELETE_TABLE, table, _of(table))


def add_chain(table: Table, chain: str, hook: Hook | None = None) -> Operation:
    """Add a chain. With a `hook` it is a base chain with the policy accept."""
    parts = [_of(table), name(3, chain)]
    if hook:
        position = u32(1, HOOKS[hook.hook]), attribute(2, struct.pack(">i", hook.priority))
        parts += [nested(4, *position), u32(5, _ACCEPT), name(7, hook.type)]
    return _operation(Kind.NEW_CHAIN, table, *parts)


def flush_chain(table: Table, chain: str) -> Operation:
    return _operation(Kind.DELETE_RULE, table, _of(table), name(2, chain))


def delete_chain(table: Table, chain: str) -> Operation:
    """Delete a chain. Rejected with EBUSY if a rule or an element jumps to it."""
    return _operation(Kind.DELETE_CHAIN, table, _of(table), name(3, chain))


def add_rule(table: Table, chain: str, rule: Rule, names: SetNames) -> Iterator[Operation]:
    """Add the anonymous sets of a rule, then the rule at the end of the chain.

    Raises ValueError if the rule has an invalid text.
    """
    converted = convert(rule.text, table.family, names)
    for each in converted.sets:
        yield add_set(table, each.name, each.declaration, each.number)
        yield from add_elements(table, each.name, each.elements, each.number)
    data = _comment(converted.comment) if converted.comment else b""
    data += _userdata(DIGEST, rule.digest)
    if rule.remembers is not None:
        data += _userdata(REMEMBERS, rule.remembers.to_bytes(4, sys.byteorder))
    parts = [_of(table), name(2, chain), nested(4, converted.expressions), attribute(7, data)]
    yield Operation(Kind.NEW_RULE, NLM_F_CREATE | _NLM_F_APPEND, table.number, b"".join(parts))


def add_set(table: Table, set_name: str, declaration: Declaration, number: int) -> Operation:
    """Add a set. No other set of this transaction may have the same `number`.

    Rejected with EEXIST if the set exists with another declaration.
    """
    flags = declaration.flags | (SetFlag.MAP if declaration.verdicts or declaration.values else 0)
    parts = [_of(table), name(2, set_name), u32(3, flags)]
    parts += [u32(4, types.key_number(declaration.key)), u32(5, types.key_length(declaration.key))]
    if declaration.verdicts:
        parts += [u32(6, VERDICTS), u32(7, _VERDICT_LENGTH)]
    if declaration.values:
        values = declaration.values
        parts += [u32(6, types.key_number(values)), u32(7, types.key_length(values))]
    if declaration.size:
        parts.append(nested(9, u32(1, declaration.size)))
    parts.append(u32(10, number))
    shape = declaration.key, declaration.values
    if shape in TYPEOF:
        parts.append(attribute(13, TYPEOF[shape]))
    return _operation(Kind.NEW_SET, table, *parts)


def delete_set(table: Table, set_name: str) -> Operation:
    """Delete a set with its elements. Rejected with EBUSY if a rule uses it."""
    return _operation(Kind.DELETE_SET, table, _of(table), name(2, set_name))


def add_elements(
    table: Table, set_name: str, elements: Sequence[SetElement], number: int = 0
) -> Iterator[Operation]:
    """Add elements, in several messages if needed, since the length of an attribute is a u16.

    The kernel rejects an element with EBUSY if an element with the same key has another value. `number`: that
    of a set that this transaction creates, else 0.
    """
    of_set = u32(4, number) if number else name(2, set_name)  # by number, the kernel does not walk all sets
    for first in range(0, len(elements), _ELEMENTS_IN_A_MESSAGE):
        part = elements[first : first + _ELEMENTS_IN_A_MESSAGE]
        yield _operation(Kind.NEW_ELEMENT, table, _of(table), of_set, nested(3, *map(_element, part)))


_LISTED = struct.Struct("=HHHHHH8sIHHHH")
"""An element of a list of endpoints, up to its address and port: the attributes NFTA_LIST_ELEM,
NFTA_SET_ELEM_KEY, NFTA_DATA_VALUE, the key (`sets.LIST_KEY`), NFTA_SET_ELEM_DATA and NFTA_DATA_VALUE.
"""
_KEY_BYTES = LIST_KEY.size


def add_listed(
    table: Table, set_name: str, identity: bytes, endpoints: Sequence[tuple[int, bytes]]
) -> Iterator[Operation]:
    """Add elements of a list of endpoints: the places in it, and the addresses and ports. It is faster than
    `add_elements`.

    Rejected with EEXIST or EBUSY if there is another endpoint at the place.
    """
    size = len(endpoints[0][1]) if endpoints else 0
    head = (4 + 8 + _KEY_BYTES + 8 + size, 1 | NESTED, 8 + _KEY_BYTES, 1 | NESTED, 4 + _KEY_BYTES, 1)
    data = (8 + size, 2 | NESTED, 4 + size, 1)
    for first in range(0, len(endpoints), _LISTED_IN_A_MESSAGE):
        part = endpoints[first : first + _LISTED_IN_A_MESSAGE]
        listed = b"".join([_LISTED.pack(*head, identity, place, *data) + value for place, value in part])
        yield _operation(
            Kind.NEW_ELEMENT, table, _of(table), name(2, set_name), attribute(3 | NESTED, listed)
        )


def delete_listed(table: Table, set_name: str, identity: bytes, places: Sequence[int]) -> Iterator[Operation]:
    """Delete the elements of a list of endpoints at these places."""
    for first in range(0, len(places), _LISTED_IN_A_MESSAGE):
        part = places[first : first + _LISTED_IN_A_MESSAGE]
        yield delete_elements(table, set_name, [SetElement(LIST_KEY.pack(identity, place)) for place in part])


def delete_elements(table: Table, set_name: str, elements: Iterable[SetElement]) -> Operation:
    listed = nested(3, *map(_element, elements))
    return _operation(Kind.DELETE_ELEMENT, table, _of(table), name(2, set_name), listed)


def _element(each: SetElement) -> bytes:
    parts = [nested(1, attribute(1, each.key))]
    if each.verdict:
        parts.append(nested(2, encode_verdict(each.verdict)))
    if each.value:
        parts.append(nested(2, attribute(1, each.value)))
    if each.is_end:
        parts.append(u32(3, INTERVAL_END))
    if each.timeout:
        parts += [
            attribute(4, _U64.pack(each.timeout)),
            attribute(5, _U64.pack(each.expires or each.timeout)),
        ]
    data = _comment(each.comment) if each.comment else b""
    data += _userdata(_ELEMENT_FLAGS, _OPEN) if each.is_open else b""
    if data:
        parts.append(attribute(6, data))
    return nested(1, *parts)


def _userdata(kind: int, value: bytes) -> bytes:
    return bytes((kind, len(value))) + value


def _comment(remark: str) -> bytes:
    return _userdata(COMMENT, remark.encode()[:254] + b"\0")
