"""Stages a change of services: writes endpoints and lists that no entry refers to yet.

Room in every map is checked first, so that a ServicePort without room keeps its current state.
"""

import dataclasses
from collections.abc import Container
from random import getrandbits
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.services.arrays import Arrays
from ebpfproxy.backends.ebpf.services.record import (
    NOTHING,
    Range,
    Record,
    service_key,
    service_value,
)
from ebpfproxy.backends.ebpf.services.slot_lists import HASHING, places
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE, Ids, Ranges
from ebpfproxy.errors import TableFull
from ebpfproxy.model.address import Network
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
    """The changes of one delta, in `changes`. `owned`: the keys that `services` contains already."""

    def __init__(
        self,
        arrays: Arrays,
        service_ids: Ids,
        owned: Container[bytes],
        services: Room,
        sources: Room,
        now: float,
    ) -> None:
        self.changes: dict[ServicePortKey, Change] = {}
        self._arrays = arrays
        self._service_ids = service_ids
        self._owned = owned
        self._services = services
        self._sources = sources
        self._now = now

    def add(self, key: ServicePortKey, old: Record | None, entry: ServicePortEntry) -> None:
        """Write entries that no reader can find yet. Raises TableFull after undoing all of it."""
        fresh = sum(service_key(frontend) not in self._owned for frontend in entry.frontends)
        self._services.check(key, fresh)
        sources = len(sources_beyond(entry, old.entry if old else None))
        self._sources.check(key, sources)
        self.changes[key] = Change(old, self._stage(key, old, entry))
        self._services.used += fresh
        self._sources.used += sources

    def _stage(self, key: ServicePortKey, old: Record | None, entry: ServicePortEntry) -> Record:
        id_ = old.id if old else self._service_ids.allocate(self._now)
        if id_ is None:
            raise _ids_are_used_up("service_names", key, 1, self._service_ids)
        new = Record(id_, entry)
        taken: list[int] = []
        ranges: list[Range] = []
        try:
            self._stage_endpoints(key, old, new, taken)
            new.cluster = self._stage_list(key, old, new, abi.ENDPOINT_CLUSTER, ranges)
            new.local = self._stage_list(key, old, new, abi.ENDPOINT_LOCAL, ranges)
        except TableFull:
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
        self, key: ServicePortKey, old: Record | None, new: Record, bit: int, ranges: list[Range]
    ) -> Range:
        """The range with the endpoints that have this flag. It is the old one if the list is unchanged."""
        previous = NOTHING
        if old and old.entry.algorithm == new.entry.algorithm:
            previous = old.cluster if bit == abi.ENDPOINT_CLUSTER else old.local
            if previous != NOTHING and self._has_same_table(old, new):
                return previous
        ids, digest = new.slots(bit)
        if not ids:
            return NOTHING
        if previous[1] == len(ids) and self._arrays.read_slots(previous) == ids:
            self._arrays.note_expanded(previous[0], digest)
            return previous
        count = places(len(ids), new.entry.algorithm)
        first = self._arrays.ranges.allocate(count, self._now)
        if first is None:
            room, staged = self._arrays.ranges, sum(1 << Ranges.order_of(count) for _, count in ranges)
            needed = f"{1 << Ranges.order_of(count):,} more in one range"
            raise _full("slots", key, needed, room.used - staged, room.capacity, room.resting)
        ranges.append((first, count))
        self._write(first, ids, new, previous)
        self._arrays.note_expanded(first, digest)
        return first, len(ids)

    @staticmethod
    def _has_same_table(old: Record, new: Record) -> bool:
        """Whether the lists are tables, and equal. It saves computing them."""
        is_right = old.entry.affinity_timeout >= 0  # the maps contained what the entry says
        return new.entry.algorithm in HASHING and is_right and old.entry.endpoints == new.entry.endpoints

    def _write(self, first: int, ids: list[int], new: Record, previous: Range) -> None:
        """Write a list. Its first turn is the next turn of the `previous` list, otherwise a random one: all
        nodes would otherwise begin with the same endpoint."""
        if new.entry.algorithm == abi.ALGORITHM_ROUND_ROBIN:
            turn = self._arrays.read_slots((sum(previous), 1))[0] if previous[1] else getrandbits(32)
            self._arrays.write_slots(first, [*ids, turn])
        else:
            self._arrays.write_slots(first, ids)


def sources_beyond(entry: ServicePortEntry, other: ServicePortEntry | None) -> set[Network]:
    """The source ranges of `entry` that `other` does not have."""
    return set(entry.source_ranges).difference(other.source_ranges if other else ())


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
