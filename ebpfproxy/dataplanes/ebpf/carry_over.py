"""What a former layout's maps remember of sockets and clients, copied into the present maps.

Services, endpoints and networks are written anew from the plan. Sockets that are connected, unconnected
UDP sockets that await an answer, and clients with affinity are known to the maps alone: without them
getpeername() would show an endpoint, an answer would come from one, and no stale socket would be found.

Each layout gives ids of its own, so a former id is taken for the ServicePort that has it in
`service_names`, and for an endpoint's place. What has no such service or endpoint any more keeps its
addresses, since its socket does, and gets the id 0, which is in force nowhere: it counts as stale.
"""

import contextlib
import heapq
import itertools
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from socket import IPPROTO_TCP, IPPROTO_UDP, ntohs
from typing import Any

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.entries import ServicePortKey
from ebpfproxy.dataplanes.ebpf.maps import Maps
from ebpfproxy.dataplanes.ebpf.service_table import Place
from ebpfproxy.errors import AlreadyExists, KernelError
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family, Protocol

log = Logger(__name__)

IdsOf = Callable[[ServicePortKey], tuple[int, Mapping[Place, int]] | None]
"""The present ids of a ServicePort and of its endpoints; None where it is not served."""

_Pair = tuple[bytes, bytes]  # a key, and its value

_NEEDED = {
    "socket_peers": ("service_names",),
    "socket_flows": ("service_names",),
    "affinity": ("service_names", "endpoints"),
}
"""What is carried over, and which other former maps that takes."""
_FORMER = ("service_names", "endpoints", *_NEEDED)
_NOEXIST = 1  # BPF_NOEXIST
_BATCH = 4096  # entries
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_PEER = abi.SOCKET_PEER.size
_WORDS = _PEER // _U64.size
_BLOCK = 64 * _PEER
_FREE = bytes(_PEER)
_WAYS = range(abi.SOCKET_WAYS)
_FAMILIES = {4: Family.IPV4, 6: Family.IPV6}  # by service_name.family


class CarryOver:
    """From one former layout into the present maps. Nothing is ever written to the former ones.

    `copy` as often as needed, once before the hooks are switched and once after. Close with `close`.
    """

    def __init__(self, former: Path, maps: Maps, ids_of: IdsOf) -> None:
        """`former`: the folder of the former layout's maps, not that of `maps`.

        Raises no KernelError: former maps that are gone, or not like ours, are left behind and logged.
        """
        self._present = maps
        self._ids_of = ids_of
        self._former: dict[str, Map] = {}
        unlike = {name: reason for name in _FORMER if (reason := self._open(former, name))}
        self._names = [name for name, needed in _NEEDED.items() if not unlike.keys() & {name, *needed}]
        if unlike:
            lost = ",".join(name for name in _NEEDED if name not in self._names)
            reason = "; ".join(dict.fromkeys(unlike.values()))
            log.warning("maps of a former layout cannot be carried over", maps=lost, reason=reason)
        self._seen_keys: dict[str, set[bytes]] = {name: set() for name in self._names}
        peers = self._former.get("socket_peers")
        self._seen_peers = bytearray(peers.shape.max_entries * _PEER if peers else 0)

    def _open(self, folder: Path, name: str) -> str:
        """Why a map of the former layout is of no use; "" where it is."""
        if not folder.parent.name.startswith(f"v{abi.ABI_VERSION}-"):
            return f"{folder.parent.name} is of another ABI"
        try:
            opened = Map.pinned(folder / name)
        except KernelError as failure:
            return failure.message
        if _kind(opened) != _kind(self._present[name]):
            opened.close()
            return f"{name} is of another shape"
        self._former[name] = opened
        return ""

    def close(self) -> None:
        for opened in self._former.values():
            opened.close()

    def copy(self) -> int:
        """Copy what is new in the former maps since the last time; how many entries were written.

        What the programs wrote into the present maps meanwhile is newer, and stays. What failed is logged:
        a memory that is lost is no reason not to serve.
        """
        if not self._names:
            return 0
        ids = _Translation(self._former["service_names"], self._ids_of)
        steps = {"socket_peers": self._peers, "socket_flows": self._flows, "affinity": self._affinity}
        written: dict[str, int] = {}
        for name in self._names:
            try:
                written[name] = steps[name](ids)
            except KernelError as failure:
                log.error("could not carry over", map=name, reason=failure.message)
        if any(written.values()):
            log.info("carried over from the former layout", **written)
        return sum(written.values())

    # Connected sockets

    def _peers(self, ids: "_Translation") -> int:
        """Whatever changed is taken back first, then put: a socket may have moved to another place."""
        changed = self._changed_peers()
        present = _Peers(self._present["socket_peers"])
        try:
            for old, _ in _changes(self._seen_peers, changed):
                if old != _FREE:
                    present.remove(old)
            put = sum(present.put(new, ids) for _, new in _changes(self._seen_peers, changed) if new != _FREE)
        finally:
            present.close()
        for start, block in changed:
            self._seen_peers[start : start + len(block)] = block
        return put

    def _changed_peers(self) -> list[tuple[int, bytes]]:
        """The parts of the former array that are not as they were seen last, each with where it starts."""
        memory = self._former["socket_peers"].mapped()
        try:
            found = []
            for start in range(0, len(self._seen_peers), _BLOCK):
                end = min(start + _BLOCK, len(self._seen_peers))
                if (block := memory[start:end]) != self._seen_peers[start:end]:
                    found.append((start, block))
            return found
        finally:
            memory.close()

    # Unconnected sockets, and clients

    def _flows(self, ids: "_Translation") -> int:
        entries = self._fresh("socket_flows", 0)
        return self._write("socket_flows", (_flow(key, value, ids) for key, value in entries))

    def _affinity(self, ids: "_Translation") -> int:
        """Of the services that have affinity now: what is turned off and on again starts anew."""
        services = map(abi.SERVICE.unpack, (value for _, value in self._present["services"].items()))
        having = {service for _, _, service, timeout, *_ in services if timeout}
        endpoints = self._former["endpoints"].mapped()
        try:
            entries = self._fresh("affinity", 1)
            found = (_affinity(key, value, ids, having, endpoints) for key, value in entries)
            return self._write("affinity", (pair for pair in found if pair))
        finally:
            endpoints.close()

    def _fresh(self, name: str, part: int) -> Iterator[_Pair]:
        """The former entries that were not seen yet.

        Where the present map has less room, only the newest: those whose key (`part` 0), or value (1),
        begins with the highest numbers. They come last, since the last written are the last to be evicted.
        """
        seen = self._seen_keys[name]
        former, room = self._former[name], self._present[name].shape.max_entries
        pairs: Iterable[_Pair] = former.items()
        if former.shape.max_entries > room:
            latest = heapq.nlargest(room, pairs, key=lambda pair: int(_U64.unpack_from(pair[part])[0]))
            pairs = reversed(latest)
        for key, value in pairs:
            if key not in seen:
                seen.add(key)
                yield key, value

    def _write(self, name: str, pairs: Iterator[_Pair]) -> int:
        """How many were written. What is there already stays: it is newer."""
        target = self._present[name]
        written = 0
        if next(target.items(), None) is None:  # nobody writes there yet
            while batch := list(itertools.islice(pairs, _BATCH)):
                target.update_all(batch)
                written += len(batch)
        for key, value in pairs:
            with contextlib.suppress(AlreadyExists):
                target.update(key, value, _NOEXIST)
                written += 1
        return written


class _Translation:
    """From a former service id and an endpoint's place to the present ids, at one moment."""

    def __init__(self, names: Map, ids_of: IdsOf) -> None:
        self._names = names
        self._ids_of = ids_of
        self._services: dict[int, tuple[int, Mapping[Place, int]]] = {}
        self._known: dict[tuple[int, Address, int], tuple[int, int]] = {}

    def of(self, service: int, address: Address, port: int) -> tuple[int, int]:
        """The ids of service and endpoint, each 0 where there is none. `port` in network order."""
        sought = service, address, port
        found = self._known.get(sought)
        if found is None:
            id_, places = self._service(service)
            found = self._known[sought] = id_, places.get((address, ntohs(port)), 0)
        return found

    def _service(self, former: int) -> tuple[int, Mapping[Place, int]]:
        if former not in self._services:
            key = self._key(former)
            self._services[former] = (self._ids_of(key) if key else None) or (0, {})
        return self._services[former]

    def _key(self, former: int) -> ServicePortKey | None:
        value = self._names.lookup(_U32.pack(former))
        if value is None:
            return None
        text, protocol, version = abi.SERVICE_NAME.unpack(value)
        try:
            name = text.rstrip(b"\0").decode()
            return ServicePortKey(name, Protocol(protocol), _FAMILIES[version])
        except (KeyError, ValueError):  # a foreign writer's
            return None


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

    def put(self, packed: bytes, ids: _Translation) -> bool:
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
        offset = abi.SOCKET_PEER.offset("protocol")
        protocols = (self._memory[at * _U64.size + offset] for at in places)
        return next((at for at, of in zip(places, protocols, strict=True) if of == IPPROTO_TCP), None)


def _kind(of: Map) -> tuple[int, int, int]:
    return of.shape.type, of.shape.key_size, of.shape.value_size


def _changes(seen: bytearray, blocks: list[tuple[int, bytes]]) -> Iterator[_Pair]:
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


def _flow(key: bytes, value: bytes, ids: _Translation) -> _Pair:
    """An entry of `socket_flows`: its endpoint is the value's address or the key's, by its direction."""
    _, *dialed, _, direction, _ = abi.SOCKET_FLOW_KEY.unpack(key)
    address, port, pad, service, _ = abi.SOCKET_FLOW.unpack(value)
    place = (address, port) if direction == abi.TO_ENDPOINT else dialed
    return key, abi.SOCKET_FLOW.pack(address, port, pad, *ids.of(service, *place))


def _affinity(
    key: bytes, value: bytes, ids: _Translation, having: set[int], endpoints: mmap.mmap
) -> _Pair | None:
    """An entry of `affinity`; None where the client has to choose anew."""
    client, service, kind = abi.AFFINITY_KEY.unpack(key)
    last_used, endpoint, pad = abi.AFFINITY.unpack(value)
    at = endpoint * abi.ENDPOINT.size
    if at + abi.ENDPOINT.size > len(endpoints):
        return None
    address, port, _, owner = abi.ENDPOINT.unpack_from(endpoints, at)
    if owner != service:
        return None
    service, endpoint = ids.of(service, address, port)
    if not endpoint or service not in having:
        return None
    return abi.AFFINITY_KEY.pack(client, service, kind), abi.AFFINITY.pack(last_used, endpoint, pad)
