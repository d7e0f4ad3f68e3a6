"""The map `new_endpoints`: endpoints in slow start, and since when.

An endpoint is new if its Service has slow start and already had a usable endpoint when this one was added.
So the first endpoints of a Service share its connections equally. The map outlives the agent, so that a
restart ends no slow start and begins none.
"""

import contextlib
import struct
import time
from collections.abc import Callable, Iterable

from ebpfproxy.backends.ebpf.services.record import U32, Record
from ebpfproxy.errors import AlreadyExists, KernelError
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.plan.planned_endpoints import CLUSTER, LOCAL

_U64 = struct.Struct("=Q")
_NOEXIST = 1  # BPF_NOEXIST
_NS = 1_000_000_000


class NewEndpoints:
    """Adds and removes entries. An endpoint without room gets its full share at once.

    `clock` returns ns of CLOCK_MONOTONIC, as bpf_ktime_get_ns().
    """

    def __init__(self, map_: Map, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._map = map_
        self._clock = clock
        self._until: dict[int, int] = {}  # by endpoint id: when slow start ends

    def read(self, records: Iterable[Record]) -> None:
        """Take over the entries of these Services, and remove all others."""
        found = {U32.unpack(key)[0]: int(_U64.unpack(value)[0]) for key, value in self._map.items()}
        self._until = {}
        if found:
            for record in records:
                if record.entry.slow_start:
                    lasts = record.entry.slow_start * _NS
                    self._until |= {id_: found[id_] + lasts for id_ in record.ids if id_ in found}
        for id_ in found.keys() - self._until.keys():
            self._delete(id_)

    def change(self, old: Record | None, new: Record) -> None:
        """Begin slow start for the usable endpoints that `new` adds. Call it before they are in force."""
        if not new.entry.slow_start:
            if old and old.entry.slow_start:
                self.remove(old.ids)
            return
        if old and old.entry.slow_start != new.entry.slow_start:
            self._lengthen(old.ids, (new.entry.slow_start - old.entry.slow_start) * _NS)
        before = _usable(old) if old else set()
        if not before:
            return
        now = self._clock()
        for id_ in _usable(new) - before:
            with contextlib.suppress(KernelError):  # the map is full, or memory is missing
                self._add(id_, now)
                self._until[id_] = now + new.entry.slow_start * _NS

    def _lengthen(self, ids: Iterable[int], by: int) -> None:
        """Move the end of slow start by so many ns. The programs compare with the new time as well."""
        for id_ in ids:
            if id_ in self._until:
                self._until[id_] += by

    def _add(self, id_: int, now: int) -> None:
        with contextlib.suppress(AlreadyExists):
            self._map.update(U32.pack(id_), _U64.pack(now), _NOEXIST)

    def remove(self, ids: Iterable[int]) -> None:
        """End slow start, for example because the endpoints are gone."""
        if self._until:
            for id_ in ids:
                if self._until.pop(id_, None) is not None:
                    self._delete(id_)

    def expire(self) -> None:
        """Remove the endpoints whose slow start is over. Call it every few seconds."""
        if self._until:
            now = self._clock()
            self.remove([id_ for id_, until in self._until.items() if until <= now])

    def _delete(self, id_: int) -> None:
        with contextlib.suppress(KernelError):
            self._map.delete(U32.pack(id_))


def _usable(record: Record) -> set[int]:
    flags = record.entry.endpoints.flags()
    return {id_ for id_, each in zip(record.ids, flags, strict=True) if each & (CLUSTER | LOCAL)}
