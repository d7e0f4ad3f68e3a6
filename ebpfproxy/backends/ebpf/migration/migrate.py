"""Migrates entries that only the programs write, from maps of the previous size to the current ones.

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
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from socket import IPPROTO_TCP, IPPROTO_UDP

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.migration.map_shapes import MapShape, layout_of
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
"""A connection that starts while programs are replaced may be reset."""

_COOKIE = struct.Struct("=Q")
_SIZE = abi.SOCKET_PEER.size
_WORDS = _SIZE // _COOKIE.size
_BLOCK = 256 * _SIZE
_PROTOCOL_AT = abi.SOCKET_PEER.offset("protocol")

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
        same_layout = {name for name, pin in changed.items() if layout_of(pin.name) == wanted[name].layout}
        if discarded := sorted(changed.keys() - same_layout):
            log.warning(DISCARDED, maps=",".join(discarded))
        with contextlib.ExitStack() as opened:
            self._previous = {
                name: opened.enter_context(contextlib.closing(Map.pinned(changed[name])))
                for name in sorted(same_layout)
            }
            self._opened = opened.pop_all()
        self._flows = [name for name in self._arrays if name in same_layout]
        self._flows_done = False
        self._seen: dict[str, set[bytes]] = {name: set() for name in _HASHES}
        hashes = [name for name in _HASHES if name in same_layout]
        self._steps = {name: functools.partial(self._copy_new, name) for name in hashes}
        if _PEERS in same_layout:
            self._steps[_PEERS] = functools.partial(PeerMigration(self._previous[_PEERS], maps[_PEERS]).copy)

    def close(self) -> None:
        """Later calls of other methods copy nothing."""
        self._flows.clear()
        self._steps.clear()
        self._opened.close()

    def start(self) -> None:
        """Copy sockets and clients, and let the new programs also look up flows in the previous maps."""
        self._flows_done = False
        for name in self._flows:
            try:
                self._maps[self._arrays[name]].update(
                    _ONLY, self._previous[name].fd.to_bytes(4, sys.byteorder)
                )
            except KernelError as failure:  # before 5.10, if the sizes differ (134fede4eecf)
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
        """Copy the entries that earlier copies did not include. If such an entry is missing, a program has
        removed it."""
        seen = self._seen[name]
        fresh = [pair for pair in self._previous[name].items() if pair[0] not in seen]
        seen.update(key for key, _ in fresh)
        return self._insert(name, fresh)

    def _insert(self, name: str, pairs: Iterable[tuple[bytes, bytes]] | None = None) -> int:
        """Insert the entries that fit and whose key does not exist; return how many were inserted."""
        previous, present = self._previous[name], self._maps[name]
        room = present.shape.max_entries
        if room < previous.shape.max_entries:
            room -= sum(1 for _ in present.items())
        pairs = previous.items() if pairs is None else pairs
        return sum(_add(present, key, value) for key, value in itertools.islice(pairs, max(room, 0)))


def _add(present: Map, key: bytes, value: bytes) -> bool:
    """Insert an entry; return whether it was inserted. If its bucket stays locked, only this entry is
    lost."""
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


class PeerMigration:
    """Migrates `socket_peers` (connected sockets) to an array of another size.

    It keeps the contents of the previous map at the last copy. So each copy is only of the changes since
    then.
    """

    def __init__(self, previous: Map, present: Map) -> None:
        self._previous = previous
        self._map = present
        self._places = present.shape.max_entries
        self._seen = bytes(previous.shape.max_entries * _SIZE)

    def copy(self) -> int:
        """Copy the changes; return how many entries were written.

        All changed entries are removed before any is written, since a socket's entry may have another place
        now.
        """
        previous = self._previous.mapped()
        now = previous[: len(self._seen)]
        previous.close()
        changes = list(_changes(self._seen, now))
        self._seen = now
        self._memory = self._map.mapped()
        self._words = memoryview(self._memory).cast("Q")
        try:
            for old, _ in changes:
                self._remove(old)
            return sum(self._put(new) for _, new in changes)
        finally:
            self._words.release()
            self._memory.close()

    def _at(self, entry: bytes) -> list[int]:
        """The offsets, in words of 8 bytes, where a socket's entry may be, as in peer_find() of socket.h."""
        (cookie,) = _COOKIE.unpack_from(entry)
        ways = range(abi.SOCKET_WAYS) if cookie else ()
        return [(cookie + way) % self._places * _WORDS for way in ways]

    def _remove(self, old: bytes) -> None:
        """Remove the entry, unless the new programs have changed it since."""
        for at in self._at(old):
            start = at * _COOKIE.size
            if self._memory[start : start + _SIZE] == old:
                self._words[at] = 0

    def _put(self, new: bytes) -> bool:
        """Write the entry if a place is free and the socket has no entry yet; return whether it was written.

        The cookie is written last, in one store, since it puts the entry in force.
        """
        at = self._place(new)
        if at is None:
            return False
        start = at * _COOKIE.size
        self._words[at] = 0
        self._memory[start + _COOKIE.size : start + _SIZE] = new[_COOKIE.size :]
        (self._words[at],) = _COOKIE.unpack_from(new)
        return True

    def _place(self, new: bytes) -> int | None:
        """The place for an entry, like peer_slot() of socket.h. It replaces only a TCP socket's entry, and
        only with a UDP socket's."""
        places = self._at(new)
        owners = [self._words[at] for at in places]
        if not places or _COOKIE.unpack_from(new)[0] in owners:
            return None
        if 0 in owners:
            return places[owners.index(0)]
        if new[_PROTOCOL_AT] != IPPROTO_UDP:
            return None
        protocols = (self._memory[at * _COOKIE.size + _PROTOCOL_AT] for at in places)
        return next((at for at, of in zip(places, protocols, strict=True) if of == IPPROTO_TCP), None)


def _changes(old: bytes, new: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The old and the new content of each entry that changed."""
    for start in range(0, len(new), _BLOCK):
        if old[start : start + _BLOCK] == new[start : start + _BLOCK]:
            continue
        for at in range(start, min(start + _BLOCK, len(new)), _SIZE):
            if old[at : at + _SIZE] != new[at : at + _SIZE]:
                yield old[at : at + _SIZE], new[at : at + _SIZE]
