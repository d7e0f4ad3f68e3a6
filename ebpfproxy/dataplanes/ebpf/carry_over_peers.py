"""Connected sockets of a former layout: its `socket_peers` into the present one, each at its place there."""

import struct
from collections.abc import Iterator
from socket import IPPROTO_TCP, IPPROTO_UDP
from typing import Any

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.carry_over_ids import Translation
from ebpfproxy.kernel.bpf import Map

_U64 = struct.Struct("=Q")
_PEER = abi.SOCKET_PEER.size
_WORDS = _PEER // _U64.size
_BLOCK = 64 * _PEER
_FREE = bytes(_PEER)
_WAYS = range(abi.SOCKET_WAYS)
_PROTOCOL_AT = abi.SOCKET_PEER.offset("protocol")


class CarriedPeers:
    """Remembers what it has seen, so that each copy is of what changed since the last."""

    def __init__(self, former: Map, present: Map) -> None:
        self._former = former
        self._present = present
        self._seen = bytearray(former.shape.max_entries * _PEER)

    def copy(self, ids: Translation) -> int:
        """How many were written.

        Whatever changed is taken back first, then put: a socket may have moved to another place.
        """
        changed = self._changed()
        present = _Peers(self._present)
        try:
            for old, _ in _changes(self._seen, changed):
                if old != _FREE:
                    present.remove(old)
            put = sum(present.put(new, ids) for _, new in _changes(self._seen, changed) if new != _FREE)
        finally:
            present.close()
        for start, block in changed:
            self._seen[start : start + len(block)] = block
        return put

    def _changed(self) -> list[tuple[int, bytes]]:
        """The parts of the former array that are not as they were seen last, each with where it starts."""
        memory = self._former.mapped()
        try:
            found = []
            for start in range(0, len(self._seen), _BLOCK):
                end = min(start + _BLOCK, len(self._seen))
                if (block := memory[start:end]) != self._seen[start:end]:
                    found.append((start, block))
            return found
        finally:
            memory.close()


class _Peers:
    """The present `socket_peers`, while programs write there too.

    An entry is in force by its cookie, one aligned word, which is therefore written last. Between a look
    at a place and the writing there a program may take it, as two programs may: then one socket's entry
    is lost.
    """

    def __init__(self, peers: Map) -> None:
        self._size = peers.shape.max_entries
        self._memory = peers.mapped()
        self._words = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        self._words.release()
        self._memory.close()

    def _at(self, cookie: int) -> list[int]:
        """The offsets in words where a socket's entry may be: peer_find() of socket.h."""
        size = self._size
        return [(cookie + way) % size * _WORDS for way in _WAYS]

    def remove(self, packed: bytes) -> None:
        """Take back the copy of a former entry, unless the socket has connected to something else since."""
        former = abi.SOCKET_PEER.unpack(packed)
        for at in self._at(former[0]) if former[0] else ():
            if self._words[at] == former[0]:
                found = abi.SOCKET_PEER.unpack_from(self._memory, at * _U64.size)
                if _without_ids(found) == _without_ids(former):
                    self._words[at] = 0

    def put(self, packed: bytes, ids: Translation) -> bool:
        """Whether there was a place for this former entry, and none of the same socket."""
        cookie, address, port, protocol, pad, service, *rest, _, pad3 = abi.SOCKET_PEER.unpack(packed)
        at = self._place(cookie, protocol) if cookie else None
        if at is None:
            return False
        service, endpoint = ids.of(service, address, port)
        fields = address, port, protocol, pad, service, *rest, endpoint, pad3
        abi.SOCKET_PEER.pack_into(self._memory, at * _U64.size, 0, *fields)
        self._words[at] = cookie
        return True

    def _place(self, cookie: int, protocol: int) -> int | None:
        """As peer_place() of socket.h, but that nobody makes room for us save TCP for UDP."""
        places = self._at(cookie)
        words = self._words
        owners = [words[at] for at in places]
        if cookie in owners:
            return None
        if 0 in owners:
            return places[owners.index(0)]
        if protocol != IPPROTO_UDP:
            return None
        protocols = (self._memory[at * _U64.size + _PROTOCOL_AT] for at in places)
        return next((at for at, of in zip(places, protocols, strict=True) if of == IPPROTO_TCP), None)


def _changes(seen: bytearray, blocks: list[tuple[int, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """What an entry of `socket_peers` was and is, for each that changed."""
    for start, block in blocks:
        former = bytes(seen[start : start + len(block)])
        for at in range(0, len(block), _PEER):
            old, new = former[at : at + _PEER], block[at : at + _PEER]
            if old != new:
                yield old, new


def _without_ids(peer: tuple[Any, ...]) -> tuple[Any, ...]:
    """An entry of `socket_peers`, unpacked, without what another layout has other numbers for."""
    return peer[:5] + peer[6:9]
