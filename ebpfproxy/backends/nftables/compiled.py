"""Compiles entries into kernel objects: parses the text of declarations and elements. Pure."""

import functools
import itertools
import re
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Endpoints,
    Entry,
    Key,
    Map,
    Set,
    endpoint_bytes,
)
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.nft import messages, types
from ebpfproxy.linux.nft.messages import Hook, Operation, Table
from ebpfproxy.linux.nft.rule_expressions import SetNames
from ebpfproxy.linux.nft.sets import (
    Declaration,
    SetElement,
    SetFlag,
    interval_elements,
    parse_declaration,
    parse_verdict,
)

_HOOK = re.compile(r"type (\w+) hook (\w+) priority (-?[0-9]+); policy accept;")

Elements = tuple[SetElement, ...]
"""The elements of one entry: one, or the two ends of an interval."""


class KnownObjects(NamedTuple):
    """The objects of a table that the kernel is known to have: chains with their hooks, sets and maps with
    their declarations, the keys of elements, and lists of endpoints.
    """

    chains: dict[str, str]
    containers: dict[str, str]
    elements: set[Element]
    endpoints: dict[Endpoints, bytes]

    def update(self, puts: Mapping[Key, Entry], drops: Iterable[Key]) -> None:
        """Record that these puts and drops were committed."""
        for key in drops:
            if isinstance(key, Chain):
                self.chains.pop(key.name, None)
            elif isinstance(key, Element):
                self.elements.discard(key)
            elif isinstance(key, Endpoints):
                self.endpoints.pop(key, None)
            elif isinstance(key, Set | Map):
                self.containers.pop(key.name, None)
        for key, entry in puts.items():
            if isinstance(key, Element):
                self.elements.add(key)
            elif isinstance(key, Chain) and isinstance(entry, ChainEntry):
                self.chains[key.name] = entry.hook
            elif isinstance(key, Endpoints) and isinstance(entry, bytes):
                self.endpoints[key] = entry
            elif isinstance(key, Set | Map) and isinstance(entry, str):
                self.containers[key.name] = entry


class CompiledChain(NamedTuple):
    """`hook` is None for a regular chain. `rules`: the operations that add them. `is_rehooked`: the chain
    exists with another hook.
    """

    hook: Hook | None
    rules: tuple[Operation, ...]
    is_rehooked: bool


class CompiledContainer(NamedTuple):
    """`is_other`: a set or map of this name exists with another declaration."""

    declaration: Declaration
    is_other: bool


class CompiledEndpoints(NamedTuple):
    """The difference to the endpoints that the kernel has: the places whose elements are removed, and the
    places and endpoints that are added then.
    """

    removed: list[int]
    added: list[tuple[int, bytes]]


class Compiled(NamedTuple):
    """The puts and drops of one table. `removed`: existing elements that are dropped or replaced."""

    chains: dict[Chain, CompiledChain]
    containers: dict[Set | Map, CompiledContainer]
    elements: dict[Element, Elements]
    removed: dict[Element, Elements]
    endpoints: dict[Endpoints, CompiledEndpoints]
    drops: frozenset[Key]


def compile_entries(
    table: Table, puts: Mapping[Key, Entry], drops: Collection[Key], known: KnownObjects, names: SetNames
) -> tuple[Compiled, dict[Key, KernelError]]:
    """Compile puts and drops, and return also the entries that cannot be parsed, by key."""
    put_containers = {
        key.name: entry
        for key, entry in puts.items()
        if isinstance(key, Set | Map) and isinstance(entry, str)
    }
    # A set that a map of the same name replaces is not dropped: `is_other` deletes it first.
    final_drops = (key for key in drops if not (isinstance(key, Set | Map) and key.name in put_containers))
    result = Compiled({}, {}, {}, {}, {}, frozenset(final_drops))
    rejected: dict[Key, KernelError] = {}
    declared = ChainMap(put_containers, known.containers)
    for key, entry in puts.items():
        try:
            if isinstance(key, Element) and isinstance(entry, ElementEntry):
                result.elements[key] = _elements(key, entry, declared)
            elif isinstance(key, Chain) and isinstance(entry, ChainEntry):
                rules = (messages.add_rule(table, key.name, rule, names) for rule in entry.rules)
                is_rehooked = known.chains.get(key.name, entry.hook) != entry.hook
                added = tuple(itertools.chain.from_iterable(rules))
                result.chains[key] = CompiledChain(_hook(entry.hook), added, is_rehooked)
            elif isinstance(key, Set | Map) and isinstance(entry, str):
                is_other = known.containers.get(key.name, entry) != entry
                result.containers[key] = CompiledContainer(_declaration(entry), is_other)
            elif isinstance(key, Endpoints) and isinstance(entry, bytes):
                result.endpoints[key] = _endpoints(key, entry, known)
        except ValueError as failure:
            rejected[key] = Rejected(f"nftables: {key}: {failure}")
    for key in (*result.elements, *drops):
        if isinstance(key, Element) and key in known.elements:
            result.removed[key] = _elements(key, ElementEntry(), known.containers)
    for key in drops:
        if isinstance(key, Endpoints) and key in known.endpoints:
            result.endpoints[key] = _endpoints(key, b"", known)
    return result, rejected


def _endpoints(key: Endpoints, entry: bytes, known: KnownObjects) -> CompiledEndpoints:
    size = endpoint_bytes(key.family)
    before, after = (
        [each[at : at + size] for at in range(0, len(each), size)]
        for each in (known.endpoints.get(key, b""), entry)
    )
    change = CompiledEndpoints([], [])
    for place, (old, new) in enumerate(itertools.zip_longest(before, after)):
        if old != new:
            if old and any(old):
                change.removed.append(place)
            if new:
                change.added.append((place, new))
    return change


def _hook(text: str) -> Hook | None:
    if not text:
        return None
    found = _HOOK.fullmatch(text)
    if not found:
        raise ValueError(f"cannot parse {text!r}")
    return Hook(found[1], found[2], int(found[3]))


def _elements(key: Element, entry: ElementEntry, declared: Mapping[str, str]) -> Elements:
    if key.container not in declared:
        raise ValueError(f"set or map {key.container} does not exist")
    declaration = _declaration(declared[key.container])
    if SetFlag.INTERVAL in declaration.flags:
        return tuple(interval_elements(declaration.key[0], key.key))
    value = types.parse_key(declaration.key, key.key)
    verdict = parse_verdict(entry.verdict) if entry.verdict else None
    return (SetElement(value, verdict, comment=entry.comment),)


@functools.lru_cache(maxsize=64)
def _declaration(text: str) -> Declaration:
    return parse_declaration(text)
