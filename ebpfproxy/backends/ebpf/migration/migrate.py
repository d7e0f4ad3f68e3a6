"""Migrates entries that only the programs write, from maps of the previous size to the present ones.

Ids are the same in both (map_pins.py), so entries are copied unchanged. Sockets and clients are copied before
the programs are replaced, and again afterwards.

Flows are not copied before. As long as a previous program is attached to a device, the new programs also look
up flows in the previous map. They insert those they find into the new map. The rest of the previous map is
copied once the last device has its new program.

A map whose key or value has another layout is not migrated. Counters start at zero.
"""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.migration.map_shapes import MapShape, layout_of
from ebpfproxy.backends.ebpf.migration.peers import PeerMigration
from ebpfproxy.errors import AlreadyExists, KernelError
from ebpfproxy.linux.bpf.bpf import BUSY, Map, errno_of
from ebpfproxy.log import Logger

log = Logger(__name__)

DISCARDED = "Discarded map contents of another layout"
"""The struct has changed since the previous version: the contents of these maps are lost."""
MIGRATED = "Migrated map contents"
"""Entries were copied from a map of another size. The values are their numbers, by map."""
MIGRATION_FAILED = "Failed to migrate map contents"
"""Sockets, clients or flows of this map are unknown to the new programs."""
NO_FALLBACK = "Failed to show new programs the previous flows"
"""A connection that begins while programs are replaced may be reset."""

_PEERS = "socket_peers"
_HASHES = ("socket_flows", "affinity")
_ONLY = bytes(4)  # the key of an array of maps with one entry
_NOEXIST = 1  # BPF_NOEXIST
_ATTEMPTS = 3  # to insert an entry while its bucket is locked


class Migration:
    """Copies from the pinned maps `previous`, by name, to `maps`. It does not write to the previous maps.

    Call `start` before anything is attached, `copy` afterwards, and `finish_flows` once no device has a
    previous program. Each may be called again. A map that cannot be copied is logged. Close with `close`.
    """

    def __init__(self, wanted: Mapping[str, MapShape], maps: Maps, previous: Mapping[str, Path]) -> None:
        """`wanted`: the shapes of `maps`, by name. Raises NotFound if a pin is missing."""
        self._maps = maps
        self._arrays = {shape.inner: name for name, shape in wanted.items() if shape.inner}
        known = {*self._arrays, *_HASHES, _PEERS}
        changed = {n: pin for n, pin in previous.items() if n in known and pin.name != wanted[n].pin}
        alike = {name for name, pin in changed.items() if layout_of(pin.name) == wanted[name].layout}
        if discarded := sorted(changed.keys() - alike):
            log.warning(DISCARDED, maps=",".join(discarded))
        with contextlib.ExitStack() as opened:
            self._previous = {
                name: opened.enter_context(contextlib.closing(Map.pinned(changed[name])))
                for name in sorted(alike)
            }
            self._opened = opened.pop_all()
        self._flows = [name for name in self._arrays if name in alike]
        self._flows_done = False
        self._seen: dict[str, set[bytes]] = {name: set() for name in _HASHES}
        self._steps = {name: functools.partial(self._copy_new, name) for name in _HASHES if name in alike}
        if _PEERS in alike:
            self._steps[_PEERS] = functools.partial(PeerMigration(self._previous[_PEERS], maps[_PEERS]).copy)

    def close(self) -> None:
        """Later calls of other methods copy nothing."""
        self._flows.clear()
        self._steps.clear()
        self._opened.close()

    def start(self) -> None:
        """Copy sockets and clients, and have the new programs look up flows in the previous maps, too."""
        self._flows_done = False
        for name in self._flows:
            try:
                self._maps[self._arrays[name]].update(
                    _ONLY, self._previous[name].fd.to_bytes(4, sys.byteorder)
                )
            except KernelError as failure:  # before 5.10, where sizes differ (134fede4eecf)
                log.error(NO_FALLBACK, map=name, reason=failure.message)
                self._run({name: functools.partial(self._insert, name)})
        self.copy()

    def copy(self) -> None:
        """Copy sockets and clients that are new in the previous maps since the last copy.

        Entries that the new programs have written are newer, and stay.
        """
        self._run(self._steps)

    def finish_flows(self) -> None:
        """Copy the flows that no new program has inserted. Then end the lookups in the previous maps."""
        if self._flows_done:
            return
        self._run({name: functools.partial(self._insert, name) for name in self._flows})
        for array in self._arrays.values():
            self._maps[array].delete(_ONLY)
        self._flows_done = True

    def _run(self, steps: Mapping[str, Callable[[], int]]) -> None:
        copied: dict[str, int] = {}
        for name, step in steps.items():
            try:
                copied[name] = step()
            except KernelError as failure:
                log.error(MIGRATION_FAILED, map=name, reason=failure.message)
        if any(copied.values()):
            log.info(MIGRATED, **copied)

    def _copy_new(self, name: str) -> int:
        """Without the entries of earlier copies. If such an entry is missing, a program has removed it."""
        seen = self._seen[name]
        fresh = [pair for pair in self._previous[name].items() if pair[0] not in seen]
        seen.update(key for key, _ in fresh)
        return self._insert(name, fresh)

    def _insert(self, name: str, pairs: Iterable[tuple[bytes, bytes]] | None = None) -> int:
        """How many entries were inserted: at most as many as fit, and none whose key exists already."""
        previous, present = self._previous[name], self._maps[name]
        room = present.shape.max_entries
        if room < previous.shape.max_entries:
            room -= sum(1 for _ in present.items())
        pairs = previous.items() if pairs is None else pairs
        return sum(_add(present, key, value) for key, value in itertools.islice(pairs, max(room, 0)))


def _add(present: Map, key: bytes, value: bytes) -> bool:
    """Whether it was inserted. If its bucket stays locked, only this entry is lost."""
    for _ in range(_ATTEMPTS):
        try:
            present.update(key, value, _NOEXIST)
            return True
        except AlreadyExists:
            return False
        except KernelError as failure:
            if errno_of(failure) not in BUSY:
                raise
    return False
