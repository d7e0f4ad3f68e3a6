"""What a former layout's maps remember of sockets, flows and clients, copied into the present maps.

Services, endpoints, source ranges, networks and devices are written anew from the plan. Sockets that are
connected, unconnected UDP sockets that await an answer, and clients with affinity are known to the maps
alone: without them getpeername() would show an endpoint, an answer would come from one, and no stale socket
would be found.

What has no service or endpoint any more keeps its addresses, since its socket or its connection does.

Left behind: `counters` and `traffic`, which start anew, as after a node's start; `fragments` of datagrams
under way; and `bypassing`, of which the agent knows what matters (`former_pods`).
"""

import contextlib
import heapq
import itertools
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.carry_over_ids import IdsOf, Translation
from ebpfproxy.dataplanes.ebpf.carry_over_peers import CarriedPeers
from ebpfproxy.dataplanes.ebpf.maps import Maps
from ebpfproxy.errors import AlreadyExists, KernelError
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.log import Logger

log = Logger(__name__)

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
_U64 = struct.Struct("=Q")


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
        names = [name for name, needed in _NEEDED.items() if not unlike.keys() & {name, *needed}]
        if unlike:
            lost = ",".join(name for name in _NEEDED if name not in names)
            reason = "; ".join(dict.fromkeys(unlike.values()))
            log.warning("maps of a former layout cannot be carried over", maps=lost, reason=reason)
        self._seen_keys: dict[str, set[bytes]] = {name: set() for name in ("socket_flows", "affinity")}
        self._steps = {name: self._step(name) for name in names}

    def _step(self, name: str) -> Callable[[Translation], int]:
        """What copies this map, and tells how many entries it wrote."""
        if name == "socket_peers":
            return CarriedPeers(self._former[name], self._present[name]).copy
        return self._datagrams if name == "socket_flows" else self._affinity

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
        if not self._steps:
            return 0
        ids = Translation(self._former["service_names"], self._ids_of)
        written: dict[str, int] = {}
        for name, step in self._steps.items():
            try:
                written[name] = step(ids)
            except KernelError as failure:
                log.error("could not carry over", map=name, reason=failure.message)
        if any(written.values()):
            log.info("carried over from the former layout", **written)
        return sum(written.values())

    # Unconnected sockets, and clients

    def _datagrams(self, ids: Translation) -> int:
        entries = self._fresh("socket_flows", 0)
        return self._write("socket_flows", (_datagram(key, value, ids) for key, value in entries))

    def _affinity(self, ids: Translation) -> int:
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


def _kind(of: Map) -> tuple[int, int, int]:
    return of.shape.type, of.shape.key_size, of.shape.value_size


def _datagram(key: bytes, value: bytes, ids: Translation) -> _Pair:
    """An entry of `socket_flows`: its endpoint is the value's address or the key's, by its direction."""
    _, *dialed, _, direction, _ = abi.SOCKET_FLOW_KEY.unpack(key)
    address, port, pad, service, _ = abi.SOCKET_FLOW.unpack(value)
    place = (address, port) if direction == abi.TO_ENDPOINT else dialed
    return key, abi.SOCKET_FLOW.pack(address, port, pad, *ids.of(service, *place))


def _affinity(
    key: bytes, value: bytes, ids: Translation, having: set[int], endpoints: mmap.mmap
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
