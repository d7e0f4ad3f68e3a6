"""Migrates `socket_peers` (connected sockets): copies each entry to its place in an array of another size."""

import struct
from collections.abc import Iterator
from socket import IPPROTO_TCP, IPPROTO_UDP

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf.bpf import Map

_COOKIE = struct.Struct("=Q")
_SIZE = abi.SOCKET_PEER.size
_WORDS = _SIZE // _COOKIE.size
_BLOCK = 256 * _SIZE
_FREE = bytes(_SIZE)
_PROTOCOL_AT = abi.SOCKET_PEER.offset("protocol")


class PeerMigration:
    """Keeps the previous map's last contents, so that each copy is of the changes since then only."""

    def __init__(self, previous: Map, present: Map) -> None:
        self._previous = previous
        self._map = present
        self._places = present.shape.max_entries
        self._seen = bytes(previous.shape.max_entries * _SIZE)

    def copy(self) -> int:
        """Copy the changes. Returns how many entries were written.

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
        """Write the entry if a place is free and the socket has no entry yet. Returns whether it was written.

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
        """As peer_place() of socket.h, but it replaces only a TCP socket's entry, and only by a UDP one's."""
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
