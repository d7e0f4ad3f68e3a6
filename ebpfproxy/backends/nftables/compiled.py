"""Entries as the kernel takes them: the text of rules, declarations and elements is understood here. Pure."""

import functools
import re
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, Element, ElementEntry, Entry, Key, Map, Set
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.compile import compile_rule, parse_verdict
from ebpfproxy.linux.nft.messages import Hook
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.sets import Declaration, SetElement, SetFlag, interval_elements, parse_declaration

_HOOK = re.compile(r"type (\w+) hook (\w+) priority (-?[0-9]+); policy accept;")

Elements = tuple[SetElement, ...]
"""What one entry is in a set: one, or the two ends of an interval."""


class Held(NamedTuple):
    """What the kernel is known to have of a table: chains with their hooks, sets and maps with their
    declarations, and the keys of elements."""

    chains: dict[str, str]
    containers: dict[str, str]
    elements: set[Element]

    def take(self, puts: Mapping[Key, Entry], drops: Iterable[Key]) -> None:
        """This was brought into the kernel."""
        for key in drops:
            if isinstance(key, Chain):
                self.chains.pop(key.name, None)
            elif isinstance(key, Element):
                self.elements.discard(key)
            else:
                self.containers.pop(key.name, None)
        for key, entry in puts.items():
            if isinstance(key, Element):
                self.elements.add(key)
            elif isinstance(entry, ChainEntry):
                self.chains[key.name] = entry.hook
            elif isinstance(entry, str):
                self.containers[key.name] = entry


class CompiledChain(NamedTuple):
    """`hook` is None for a regular chain. `is_rehooked`: it is there, but called from elsewhere."""

    hook: Hook | None
    rules: tuple[Rule, ...]
    is_rehooked: bool


class CompiledContainer(NamedTuple):
    """`is_other`: one of this name is there, into which other elements fit."""

    declaration: Declaration
    is_other: bool


class Compiled(NamedTuple):
    """The puts and drops of one table. `gone` are the elements that are there, and go or become others."""

    chains: dict[Chain, CompiledChain]
    containers: dict[Set | Map, CompiledContainer]
    elements: dict[Element, Elements]
    gone: dict[Element, Elements]
    drops: frozenset[Key]


def compiled(
    family: str, puts: Mapping[Key, Entry], drops: Collection[Key], held: Held
) -> tuple[Compiled, dict[Key, KernelError]]:
    """And what is not understood, by key. `family` is "ip" or "ip6"."""
    put = {
        key.name: entry
        for key, entry in puts.items()
        if isinstance(key, Set | Map) and isinstance(entry, str)
    }
    # A set whose name a map gets goes before that comes: with `is_other`.
    really = (key for key in drops if not (isinstance(key, Set | Map) and key.name in put))
    done = Compiled({}, {}, {}, {}, frozenset(really))
    rejected: dict[Key, KernelError] = {}
    declared = ChainMap(put, held.containers)
    for key, entry in puts.items():
        try:
            if isinstance(key, Element) and isinstance(entry, ElementEntry):
                done.elements[key] = _elements(key, entry, declared)
            elif isinstance(key, Chain) and isinstance(entry, ChainEntry):
                done.chains[key] = _chain(entry, family, held.chains.get(key.name, entry.hook))
            elif isinstance(key, Set | Map) and isinstance(entry, str):
                is_other = held.containers.get(key.name, entry) != entry
                done.containers[key] = CompiledContainer(_declaration(entry), is_other)
        except ValueError as failure:
            rejected[key] = Rejected(f"nftables: {key}: {failure}")
    for key in (*done.elements, *drops):
        if isinstance(key, Element) and key in held.elements:
            done.gone[key] = _elements(key, ElementEntry(), held.containers)
    return done, rejected


def _chain(entry: ChainEntry, family: str, held: str) -> CompiledChain:
    rules = tuple(compile_rule(text, family) for text in entry.rules)
    return CompiledChain(_hook(entry.hook), rules, held != entry.hook)


def _hook(text: str) -> Hook | None:
    if not text:
        return None
    found = _HOOK.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not understood")
    return Hook(found[1], found[2], int(found[3]))


def _elements(key: Element, entry: ElementEntry, declared: Mapping[str, str]) -> Elements:
    if key.container not in declared:
        raise ValueError("there is no such set or map")
    declaration = _declaration(declared[key.container])
    if SetFlag.INTERVAL in declaration.flags:
        return tuple(interval_elements(declaration.key[0], key.key))
    value = types.parse_key(declaration.key, key.key)
    verdict = parse_verdict(entry.verdict) if entry.verdict else None
    return (SetElement(value, verdict, comment=entry.comment),)


@functools.lru_cache(maxsize=64)
def _declaration(text: str) -> Declaration:
    return parse_declaration(text)
