"""Converts puts and drops into operations, in an order that the kernel accepts. Pure.

Within a transaction, an object must exist before others refer to it, and must be deleted after them. Packets
see no intermediate state.
"""

import enum
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Endpoints,
    Entry,
    Flowtable,
    FlowtableDevice,
    Key,
    Map,
    Set,
    endpoint_bytes,
)
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.nft import flowtables, messages, types
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


class Phase(enum.IntEnum):
    """The order of the operations.

    - FLUSH: of chains that get other rules or are deleted, so that their rules refer to nothing.
    - REMOVE: elements that are dropped or replaced.
    - RECREATE: deletes what cannot be changed in place, before it is created again.
    """

    FLUSH = 0
    REMOVE = 1
    RECREATE = 2
    CONTAINERS = 3
    CHAINS = 4
    RULES = 5
    ELEMENTS = 6
    DELETE_CHAINS = 7
    DELETE_CONTAINERS = 8


class Step(NamedTuple):
    """One operation. `key` is None for the table itself. `may_be_absent`: if the object does not exist
    (ENOENT), there is nothing to do.
    """

    operation: Operation
    key: Key | None
    may_be_absent: bool = False


_PhasedOperation = tuple[Phase, Operation]


class Change:
    """The steps of puts and drops in one table. `rejected`: the entries that cannot be converted, by key.

    `known`: the entries of the table that the kernel is known to have; those of chains without rules.
    """

    def __init__(
        self,
        table: Table,
        puts: Mapping[Key, Entry],
        drops: Collection[Key],
        known: Mapping[Key, Entry],
        names: SetNames,
    ) -> None:
        self.rejected: dict[Key, KernelError] = {}
        self._table, self._puts, self._known, self._names = table, puts, known, names
        self._steps: dict[Phase, list[Step]] = {phase: [] for phase in Phase}
        self._dropped = {key.name for key in drops if isinstance(key, Flowtable)}
        for key, entry in puts.items():
            try:
                self._add(key, list(self._put(key, entry)))
            except ValueError as failure:
                self.rejected[key] = Rejected(f"nftables: {key}: {failure}")
        for key in drops:
            self._add(key, self._drop(key))

    def steps(self, *phases: Phase) -> Iterator[Step]:
        """Yield the steps of these phases, of all without any."""
        return itertools.chain.from_iterable(self._steps[phase] for phase in phases or Phase)

    def _add(self, key: Key, operations: Iterable[_PhasedOperation]) -> None:
        for phase, operation in operations:
            is_creation = Phase.CONTAINERS <= phase <= Phase.ELEMENTS
            self._steps[phase].append(Step(operation, key, not is_creation))

    def _put(self, key: Key, entry: Entry) -> Iterator[_PhasedOperation]:
        """Raises ValueError if the entry has an invalid text."""
        known = self._known.get(key)
        if isinstance(key, Chain) and isinstance(entry, ChainEntry):
            if isinstance(known, ChainEntry):
                yield Phase.FLUSH, messages.flush_chain(self._table, key.name)
                if known.hook != entry.hook:
                    yield Phase.RECREATE, messages.delete_chain(self._table, key.name)
            yield Phase.CHAINS, messages.add_chain(self._table, key.name, _hook(entry.hook))
            for rule in entry.rules:
                for operation in messages.add_rule(self._table, key.name, rule, self._names):
                    yield Phase.RULES, operation
        elif isinstance(key, Set | Map) and isinstance(entry, str):
            if declared(self._known, key) not in (None, entry):
                yield Phase.RECREATE, messages.delete_set(self._table, key.name)
            number = self._names.number()
            yield Phase.CONTAINERS, messages.add_set(self._table, key.name, _declaration(entry), number)
        elif isinstance(key, Element) and isinstance(entry, ElementEntry):
            added = self._elements(key, entry, self._puts, self._known)
            if known is not None:
                yield from self._drop(key)
            for operation in messages.add_elements(self._table, key.container, added):
                yield Phase.ELEMENTS, operation
        elif isinstance(key, Endpoints) and isinstance(entry, bytes):
            yield from self._endpoints(key, entry)
        elif isinstance(key, Flowtable):
            if known is not None:
                yield Phase.RECREATE, flowtables.delete_flowtable(self._table, key.name)
            yield Phase.CONTAINERS, flowtables.add_flowtable(self._table, key.name)
        elif isinstance(key, FlowtableDevice):
            yield Phase.ELEMENTS, flowtables.add_flowtable(self._table, key.flowtable, [key.device])

    def _drop(self, key: Key) -> Iterator[_PhasedOperation]:
        is_known = key in self._known
        if isinstance(key, Chain):
            if is_known:
                yield Phase.FLUSH, messages.flush_chain(self._table, key.name)
            yield Phase.DELETE_CHAINS, messages.delete_chain(self._table, key.name)
        elif isinstance(key, Set | Map):
            if declared(self._puts, key) is None:  # else a map replaces a set of the same name
                yield Phase.DELETE_CONTAINERS, messages.delete_set(self._table, key.name)
        elif is_known and isinstance(key, Element):
            removed = self._elements(key, ElementEntry(), self._known)
            yield Phase.REMOVE, messages.delete_elements(self._table, key.container, removed)
        elif is_known and isinstance(key, Endpoints):
            yield from self._endpoints(key, b"")
        elif isinstance(key, Flowtable):
            yield Phase.DELETE_CONTAINERS, flowtables.delete_flowtable(self._table, key.name)
        elif isinstance(key, FlowtableDevice) and key.flowtable not in self._dropped:
            yield Phase.REMOVE, flowtables.delete_device(self._table, key.flowtable, key.device)

    def _elements(self, key: Element, entry: ElementEntry, *entries: Mapping[Key, Entry]) -> list[SetElement]:
        """Return the elements of one entry: one, or the two ends of an interval."""
        container = Set(key.family, key.container)
        text = next(filter(None, (declared(each, container) for each in entries)), None)
        if text is None:
            raise ValueError(f"set or map {key.container} does not exist")
        declaration = _declaration(text)
        if SetFlag.INTERVAL in declaration.flags:
            return list(interval_elements(declaration.key[0], key.key))
        value = types.parse_key(declaration.key, key.key)
        verdict = parse_verdict(entry.verdict) if entry.verdict else None
        return [SetElement(value, verdict, comment=entry.comment)]

    def _endpoints(self, key: Endpoints, entry: bytes) -> Iterator[_PhasedOperation]:
        """Yield the difference to the endpoints that the kernel has."""
        size, known = endpoint_bytes(key.family), self._known.get(key, b"")
        assert isinstance(known, bytes)
        before, after = (
            [each[at : at + size] for at in range(0, len(each), size)] for each in (known, entry)
        )
        pairs = list(enumerate(itertools.zip_longest(before, after)))
        removed = [place for place, (old, new) in pairs if old != new and old and any(old)]
        added = [(place, new) for place, (old, new) in pairs if old != new and new]
        where = self._table, key.container, key.identity
        for operation in messages.delete_listed(*where, removed):
            yield Phase.REMOVE, operation
        for operation in messages.add_listed(*where, added):
            yield Phase.ELEMENTS, operation


def chain_deletions(table: Table, keys: Iterable[Key]) -> Iterator[Step]:
    """Delete existing chains without rules."""
    for key in keys:
        if isinstance(key, Chain):
            yield Step(messages.delete_chain(table, key.name), key, may_be_absent=True)


def declared(entries: Mapping[Key, Entry], key: Set | Map) -> str | None:
    """Return the declaration of the set or map of this name; None if there is none."""
    found = entries.get(Set(*key[:2])) or entries.get(Map(*key[:2]))
    return found if isinstance(found, str) else None


def _hook(text: str) -> Hook | None:
    if not text:
        return None
    found = _HOOK.fullmatch(text)
    if not found:
        raise ValueError(f"cannot parse {text!r}")
    return Hook(found[1], found[2], int(found[3]))


@functools.lru_cache(maxsize=64)
def _declaration(text: str) -> Declaration:
    return parse_declaration(text)
