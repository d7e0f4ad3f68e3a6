"""Connected sockets: entries of `socket_peers`, each to its place in an array of another size."""

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
    """Remembers what it has seen, so that each copy is of what changed since the last one."""

    def __init__(self, former: Map, present: Map) -> None:
        self._former = former
        self._map = present
        self._places = present.shape.max_entries
        self._seen = bytes(former.shape.max_entries * _SIZE)

    def copy(self) -> int:
        """How many entries were written.

        What changed is taken back first, then put: a socket may have got another place.
        """
        former = self._former.mapped()
        now = former[: len(self._seen)]
        former.close()
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
        """The offsets in words where a socket's entry may be, as peer_find() of socket.h."""
        (cookie,) = _COOKIE.unpack_from(entry)
        ways = range(abi.SOCKET_WAYS) if cookie else ()
        return [(cookie + way) % self._places * _WORDS for way in ways]

    def _remove(self, old: bytes) -> None:
        """Unless the socket has connected to something else since."""
        for at in self._at(old):
            start = at * _COOKIE.size
            if self._memory[start : start + _SIZE] == old:
                self._words[at] = 0

    def _put(self, new: bytes) -> bool:
        """Whether there was a place, and no entry of the same socket.

        The cookie is written last, in one store: it puts the entry in force.
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
        """As peer_place() of socket.h, but only a TCP socket makes room, and only for a UDP socket."""
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
    """What an entry was and is, for each that changed."""
    for start in range(0, len(new), _BLOCK):
        if old[start : start + _BLOCK] == new[start : start + _BLOCK]:
            continue
        for at in range(start, min(start + _BLOCK, len(new)), _SIZE):
            if old[at : at + _SIZE] != new[at : at + _SIZE]:
                yield old[at : at + _SIZE], new[at : at + _SIZE]
