"""Stages a change of services: writes endpoints and lists that no entry refers to yet.

Room in every map is checked first, so that a ServicePort without room keeps its current state. What its new
state no longer has ends nevertheless (`smaller`): that needs no room.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from random import getrandbits
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.services import shares
from ebpfproxy.backends.ebpf.services.arrays import Arrays
from ebpfproxy.backends.ebpf.services.check import Written
from ebpfproxy.backends.ebpf.services.large_tables import SMALL, LargeTables
from ebpfproxy.backends.ebpf.services.record import (
    NOTHING,
    Range,
    Record,
    service_key,
    service_value,
)
from ebpfproxy.backends.ebpf.services.slot_lists import HASHING, most_places, places, places_needed
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE, Ids, Ranges
from ebpfproxy.backends.ebpf.services.smaller import common, plain
from ebpfproxy.errors import KernelError, NotYet, TableFull
from ebpfproxy.model.address import Network
from ebpfproxy.plan import maglev
from ebpfproxy.plan.planned_endpoints import ROW


class Change(NamedTuple):
    """A change of a ServicePort. `old` is None if the maps do not contain it."""

    old: Record | None
    new: Record


@dataclasses.dataclass(slots=True)
class Room:
    """The number of entries of a map, including staged ones, and its capacity. Drops free room only once they
    are committed."""

    map: str
    used: int
    capacity: int

    def check(self, key: ServicePortKey, fresh: int) -> None:
        """Raises TableFull if there is no room for `fresh` more entries."""
        if self.used + fresh > self.capacity:
            raise _full(self.map, key, f"{fresh:,} more", self.used, self.capacity)


class Staging:
    """The changes of one delta, in `changes`. `written`: what the maps contain already."""

    def __init__(
        self,
        arrays: Arrays,
        service_ids: Ids,
        written: Written,
        services: Room,
        sources: Room,
        now: float,
        tables: LargeTables | None = None,
    ) -> None:
        """`tables`: computes large tables in parts. Without it, they are computed at once."""
        self.changes: dict[ServicePortKey, Change] = {}
        self._arrays = arrays
        self._service_ids = service_ids
        self._written = written
        self._services = services
        self._sources = sources
        self._now = now
        self._tables = tables

    def takes_over(self, key: ServicePortKey, entry: ServicePortEntry) -> bool:
        """Whether another ServicePort has one of the frontends: the change is one step for both."""
        return any(self._written.owner.get(service_key(each), key) != key for each in entry.frontends)

    def add(self, key: ServicePortKey, entry: ServicePortEntry) -> KernelError | None:
        """Write entries that no reader can find yet.

        Without room, write those of an entry that needs less, if there is one, and return the error. NotYet:
        a table is incomplete. Frontends that nothing serves meanwhile get a list without a table.
        """
        old = self._written.records.get(key)
        try:
            self._add(key, old, entry)
        except TableFull as failure:
            self._add_smaller(key, old, entry)
            return failure
        except NotYet as failure:
            if not old or self.takes_over(key, entry):
                with contextlib.suppress(TableFull, NotYet):  # with tunnels, it is the same entry
                    self._add(key, old, plain(entry))
            return failure
        if self._tables:
            self._tables.end(key)
        return None

    def _add_smaller(self, key: ServicePortKey, old: Record | None, entry: ServicePortEntry) -> None:
        fallback = plain(entry)
        if old and fallback == old.entry:
            return
        if fallback != entry:
            with contextlib.suppress(TableFull):
                self._add(key, old, fallback)
                return
        if old and (part := common(entry, old.entry)) != old.entry:
            with contextlib.suppress(TableFull):  # only if the maps did not contain what the entry says
                self._add(key, old, part, within=True)

    def _add(
        self, key: ServicePortKey, old: Record | None, entry: ServicePortEntry, *, within: bool = False
    ) -> None:
        """Raises TableFull or NotYet after undoing everything. `within`: a list without room replaces the old
        one in its place, if it is not longer."""
        fresh = sum(service_key(frontend) not in self._written.owner for frontend in entry.frontends)
        self._services.check(key, fresh)
        sources = len(sources_beyond(entry, old.entry if old else None))
        self._sources.check(key, sources)
        self._check_share(key, old, entry, fresh)
        self.changes[key] = change = Change(old, self._stage(key, old, entry, within=within))
        self._services.used += fresh
        self._sources.used += sources
        if self._written.uses:
            self._written.uses.replace(key, old, change.new)

    def _check_share(
        self, key: ServicePortKey, old: Record | None, entry: ServicePortEntry, frontends: int
    ) -> None:
        """Raises TableFull if the namespace would use too much of a map (`shares`)."""
        for map_, used, capacity, fresh in self._additions(old, entry, frontends):
            # What all namespaces use is more than what this one uses.
            if fresh <= 0 or shares.is_within(used, fresh, capacity - used):
                continue
            namespace = shares.namespace_of(key)
            own = self._uses().of(namespace, map_)
            if not shares.is_within(own, fresh, capacity - used):
                raise _share_is_used_up(map_, key, namespace, own, fresh, used, capacity)

    def _additions(
        self, old: Record | None, entry: ServicePortEntry, frontends: int
    ) -> Iterator[tuple[str, int, int, int]]:
        """Yield for each map the entries in use, its capacity, and how many more it has after the change.
        `slots` are left out if that is certainly not too much."""
        before = shares.use_of(old) if old else Counter[str]()
        count, usage = len(entry.endpoints), self._arrays.usage()
        yield "services", self._services.used, self._services.capacity, frontends
        fresh = len(entry.source_ranges) - before["source_ranges"]
        yield "source_ranges", self._sources.used, self._sources.capacity, fresh
        yield "endpoints", *usage["endpoints"], count - before["endpoints"]
        used, capacity = usage["slots"]
        if not shares.is_within(used, most_places(count, entry.algorithm), capacity - used):
            needed = (places_needed(entry, flag) for flag in (abi.ENDPOINT_CLUSTER, abi.ENDPOINT_LOCAL))
            after = sum(1 << Ranges.order_of(each) for each in needed if each)
            yield "slots", used, capacity, after - before["slots"]

    def _uses(self) -> shares.Uses:
        """What is in use, with the changes so far. Counted at the first call: most nodes never need it."""
        if not self._written.uses:
            uses = self._written.uses = shares.Uses(self._written.records)
            for key, change in self.changes.items():
                uses.replace(key, change.old, change.new)
        return self._written.uses

    def _stage(
        self, key: ServicePortKey, old: Record | None, entry: ServicePortEntry, *, within: bool
    ) -> Record:
        id_ = old.id if old else self._service_ids.allocate(self._now)
        if id_ is None:
            raise _ids_are_used_up("service_names", key, 1, self._service_ids)
        new = Record(id_, entry)
        taken: list[int] = []
        ranges: list[Range] = []
        try:
            self._stage_endpoints(key, old, new, taken)
            new.cluster = self._stage_list(key, old, new, abi.ENDPOINT_CLUSTER, ranges, within=within)
            new.local = self._stage_list(key, old, new, abi.ENDPOINT_LOCAL, ranges, within=within)
        except (TableFull, NotYet):
            for endpoint in taken:
                self._arrays.set_flags(endpoint, 0)
                self._arrays.endpoint_ids.undo(endpoint)
            for first, count in ranges:
                self._arrays.ranges.undo(first, count)
            if not old:
                self._service_ids.undo(id_)
            raise
        new.services = {service_key(f): service_value(f, new) for f in entry.frontends}
        return new

    def _stage_endpoints(
        self, key: ServicePortKey, old: Record | None, new: Record, taken: list[int]
    ) -> None:
        previous = old.ids_by_target() if old else {}
        rows = new.entry.endpoints.rows
        for at, target in zip(range(0, len(rows), ROW.size), new.entry.endpoints.targets(), strict=True):
            id_ = previous.get(target)
            if id_ is None:
                id_ = self._arrays.endpoint_ids.allocate(self._now)
                if id_ is None:
                    fresh = sum(each not in previous for each in new.entry.endpoints.targets())
                    raise _ids_are_used_up("endpoints", key, fresh, self._arrays.endpoint_ids, len(taken))
                taken.append(id_)
                self._arrays.write_endpoint(id_, rows[at : at + ROW.size], new.id)
            new.ids.append(id_)

    def _stage_list(
        self,
        key: ServicePortKey,
        old: Record | None,
        new: Record,
        bit: int,
        ranges: list[Range],
        *,
        within: bool,
    ) -> Range:
        """The range with the endpoints that have this flag. It is the old one if the list is unchanged.

        `within`: without room, it is the beginning of the old one. Programs that still have the old range
        find endpoints of both lists there, and no others.
        """
        previous = NOTHING
        if old and old.entry.algorithm == new.entry.algorithm:
            previous = old.cluster if bit == abi.ENDPOINT_CLUSTER else old.local
            if previous != NOTHING and self._has_same_table(old, new):
                return previous
        ids, digest = new.slots(bit, functools.partial(self._table, key, new.entry))
        if not ids or (within and previous == NOTHING):  # no frontend refers to the list
            return NOTHING
        if previous[1] == len(ids) and self._arrays.read_slots(previous) == ids:
            self._arrays.note_expanded(previous[0], digest)
            return previous
        count = places(len(ids), new.entry.algorithm)
        first = self._arrays.ranges.allocate(count, self._now)
        if first is None and within and len(ids) <= previous[1]:
            self._arrays.replace_slots(previous[0], self._content(ids, new, previous))
            self._arrays.note_expanded(previous[0], digest)
            return previous[0], len(ids)
        if first is None:
            room, staged = self._arrays.ranges, sum(1 << Ranges.order_of(count) for _, count in ranges)
            needed = f"{1 << Ranges.order_of(count):,} more in one range"
            raise _full("slots", key, needed, room.used - staged, room.capacity, room.resting)
        ranges.append((first, count))
        self._arrays.write_slots(first, self._content(ids, new, previous))
        self._arrays.note_expanded(first, digest)
        return first, len(ids)

    def _table(
        self,
        key: ServicePortKey,
        entry: ServicePortEntry,
        targets: Sequence[bytes],
        weights: Sequence[int],
        size: int,
    ) -> list[int]:
        """Raises NotYet, but not if the entry has no other list and must be served (`plain`)."""
        if not self._tables or size < SMALL or (entry.tunnels and self.takes_over(key, entry)):
            return maglev.table(targets, weights, size)
        return self._tables.table(key, targets, weights, size)

    @staticmethod
    def _has_same_table(old: Record, new: Record) -> bool:
        """Whether the lists are tables, and equal. It saves computing them."""
        is_right = old.entry.affinity_timeout >= 0  # the maps contained what the entry says
        return new.entry.algorithm in HASHING and is_right and old.entry.endpoints == new.entry.endpoints

    def _content(self, ids: list[int], new: Record, previous: Range) -> list[int]:
        """The slots of a list. Its first turn is the next turn of the `previous` list. Without one it is
        random: otherwise all nodes would begin with the same endpoint."""
        if new.entry.algorithm != abi.ALGORITHM_ROUND_ROBIN:
            return ids
        return [*ids, self._arrays.read_slots((sum(previous), 1))[0] if previous[1] else getrandbits(32)]


def sources_beyond(entry: ServicePortEntry, other: ServicePortEntry | None) -> set[Network]:
    """The source ranges of `entry` that `other` does not have."""
    return set(entry.source_ranges).difference(other.source_ranges if other else ())


def _share_is_used_up(
    map_: str, key: ServicePortKey, namespace: str, own: int, fresh: int, used: int, capacity: int
) -> TableFull:
    """The error for a ServicePort that is too large for the share of its namespace."""
    failure = TableFull(
        f"{key.name}: map {map_} is full for namespace {namespace}: it has {own:,} of {used:,} entries in "
        f"use, {fresh:,} more needed, {capacity - used:,} of {capacity:,} left for other namespaces",
        f"make the Service smaller, or raise --ebpf-{map_.replace('_', '-')}-max",
        kind=f"share of map {map_} is used up",
    )
    failure.table = map_
    return failure


def _ids_are_used_up(map_: str, key: ServicePortKey, needed: int, ids: Ids, staged: int = 0) -> TableFull:
    """The error for a map whose keys are ids. `staged`: how many of the `needed` ids are taken already."""
    return _full(map_, key, f"{needed:,} more", ids.used - staged, ids.capacity - 1, ids.resting)


def _full(
    map_: str, key: ServicePortKey, needed: str, used: int, capacity: int, resting: int = 0
) -> TableFull:
    """The error for a map without room. `needed` is in words, without the noun "entries"."""
    table = {"service_names": "services"}.get(map_, map_)
    hint = f"raise --ebpf-{table.replace('_', '-')}-max"
    rest = ""
    if resting:
        rest = f", {resting:,} resting"
        hint += f"; resting entries become free within {GRACE:g} s"
    message = (
        f"{key.name}: map {map_} is full: {used:,} of {capacity:,} entries in use{rest}, {needed} needed"
    )
    failure = TableFull(message, hint, kind=f"map {map_} is full")
    failure.table = table
    return failure
