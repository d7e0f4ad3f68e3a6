"""The map `stale_sockets`: UDP sockets of pods that could not be reconnected, and are translated instead.

Such a socket stays connected to its removed endpoint. The programs on the pod's device handle its packets as
packets to the frontend, and select an endpoint. Replies get the address of the removed endpoint. So these
devices need programs, which a call of `pods_bypass` requests.

The key of an entry is the tuple of the socket's packets, so the entry must be removed with the socket.
Another socket may get the same port, and be connected to a new pod with the same address. Entries are
compared with `socket_peers` every second (`forget`), and with all stale sockets at each search (`translate`).
The map is pinned, so the next agent removes entries that this one has left.

A pod without a gateway on the path to the removed endpoint (both are on one bridge) sends nothing once no
neighbor answers for that address. Its sockets get entries, but do not count as translated.

Sockets of the node itself are not translated. Their packets would need programs on the devices of all pods,
and the reinjection veth pair, which --socket-lb=off uses for replies to the node.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from socket import IPPROTO_UDP, htons
from struct import Struct
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.state import reply_key
from ebpfproxy.backends.ebpf.sockets import reconnect
from ebpfproxy.backends.ebpf.sockets.peers import SocketPeers, StalePeer
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.netlink import pod_devices, routing
from ebpfproxy.linux.netlink.pod_devices import PodDevice
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.sockets.sockets import DiagSocket

_IFINDEX = Struct("=I")
_MAPS = "stale_sockets", "devices", "flows", "replies"
_PATIENCE = 10.0  # if a device has no programs this many seconds after the request, it gets none


class Translated(NamedTuple):
    """Cookies of sockets. `done`: they are translated. `pending`: their pod's device has no programs yet."""

    done: frozenset[int]
    pending: frozenset[int]


class _Found(NamedTuple):
    key: bytes
    frontend: bytes
    device: PodDevice
    has_gateway: bool


class StaleTranslation:
    """The entries of the map. For one thread.

    Calls `note` with True before it writes the first entry, and with False after it removed the last one. The
    constructor calls `note` with whether a previous agent has left entries. `pods_bypass` is called with the
    ifindexes of devices that need programs.
    """

    def __init__(
        self,
        maps: Path,
        proc_root: str,
        note: Callable[[bool], object],
        pods_bypass: Callable[[frozenset[int]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`maps`: the directory where they are pinned. Raises NotFound."""
        with contextlib.ExitStack() as opened:
            self._maps = {name: Map.pinned(maps / name) for name in _MAPS}
            for each in self._maps.values():
                opened.callback(each.close)
            self._opened = opened.pop_all()
        self._proc_root = proc_root
        self._node = namespaces.identity_of("/proc/thread-self/ns/net")
        self._note = note
        self._pods_bypass = pods_bypass
        self._clock = clock
        self._cookies: dict[int, bytes] = {}  # the key of each socket's entry
        self._requested: dict[int, float] = {}  # by ifindex: time of the first request for programs
        self._noted = next(self._maps["stale_sockets"].items(), None) is not None
        note(self._noted)

    def close(self) -> None:
        """Close the maps. Entries stay, since the programs stay attached."""
        self._opened.close()

    @property
    def is_empty(self) -> bool:
        """Whether no entry that this object has written exists any more."""
        return not self._cookies

    def translate(self, stale: Mapping[int, StalePeer]) -> Translated:
        """Write entries for the sockets in `stale` that are found, and remove all others.

        Raises KernelError.
        """
        found = dict(self._find(stale)) if stale else {}
        wanted = {each.key: each.frontend for each in found.values()}
        entries = self._maps["stale_sockets"]
        for key, _ in list(entries.items()):
            if key not in wanted:
                self._remove(key)
        if wanted:
            self._set(True)
        written = set()
        for key, frontend in wanted.items():
            with contextlib.suppress(KernelError):  # the map is full: the socket is not translated
                entries.update(key, frontend)
                written.add(key)
        self._cookies = {cookie: each.key for cookie, each in found.items() if each.key in written}
        if not written:
            self._set(False)
        done, pending = self._attached({cookie: found[cookie].device.outer for cookie in self._cookies})
        by_gateway = frozenset(cookie for cookie, each in found.items() if each.has_gateway)
        return Translated(done & by_gateway, pending & by_gateway)

    def forget(self, peers: SocketPeers) -> None:
        """Remove the entries of sockets that were closed or are no longer stale. Raises KernelError."""
        for cookie, key in list(self._cookies.items()):
            if not peers.of(cookie):
                self._remove(key)
                del self._cookies[cookie]
        if not self._cookies:
            self._set(False)

    def _find(self, stale: Mapping[int, StalePeer]) -> Iterator[tuple[int, _Found]]:
        """The sockets of pods to which a device of the node leads, with their cookies."""
        located: list[tuple[DiagSocket, PodDevice, bool]] = []
        with contextlib.closing(reconnect.located_by_namespace(self._proc_root, stale)) as spaces:
            for identity, sockets in spaces:
                if sockets and identity != self._node:
                    located += _in_pod(sockets)
        leading = {device for device in {device for _, device, _ in located} if pod_devices.leads_to(device)}
        for each, device, has_gateway in located:
            if device in leading:
                yield each.cookie, _Found(_key(each), _frontend(stale[each.cookie]), device, has_gateway)

    def _attached(self, devices: Mapping[int, int]) -> Translated:
        """Request programs for the devices that have none. `devices`: each socket's ifindex, by cookie."""
        lacking = {each for each in devices.values() if not self._has_programs(each)}
        now = self._clock()
        self._requested = {each: self._requested.get(each, now) for each in lacking}
        if lacking:
            self._pods_bypass(frozenset(lacking))
        pending = {each for each in lacking if now - self._requested[each] < _PATIENCE}
        return Translated(_of(devices, set(devices.values()) - lacking), _of(devices, pending))

    def _has_programs(self, device: int) -> bool:
        value = self._maps["devices"].lookup(_IFINDEX.pack(device))
        return bool(value and abi.DEVICE.unpack(value)[2] & abi.DEVICE_POD)

    def _remove(self, key: bytes) -> None:
        """Remove the entry, then its flow, since another socket may connect to the endpoint from the same
        port."""
        self._maps["stale_sockets"].delete(key)
        if value := self._maps["flows"].lookup(key):
            self._maps["replies"].delete(reply_key(key, value))
            self._maps["flows"].delete(key)

    def _set(self, present: bool) -> None:
        if self._noted != present:
            self._note(present)
            self._noted = present


def _in_pod(sockets: list[DiagSocket]) -> Iterator[tuple[DiagSocket, PodDevice, bool]]:
    """Each socket with its pod's device, and whether it sends through a gateway.

    The calling thread is in the pod's network namespace.
    """
    devices = pod_devices.by_address()
    peers = {each.destination for each in sockets}
    by_gateway = {address for address in peers if routing.route_to(address).has_gateway}
    for each in sockets:
        if each.source in devices:
            yield each, devices[each.source], each.destination in by_gateway


def _of(devices: Mapping[int, int], wanted: Collection[int]) -> frozenset[int]:
    return frozenset(cookie for cookie, device in devices.items() if device in wanted)


def _key(found: DiagSocket) -> bytes:
    ports = htons(found.source_port), htons(found.destination_port)
    return abi.FLOW_KEY.pack(found.source, found.destination, *ports, IPPROTO_UDP, abi.AT_INGRESS, 0)


def _frontend(stale: StalePeer) -> bytes:
    address, port = stale.frontend
    return abi.SERVICE_KEY.pack(address, htons(port), IPPROTO_UDP, 0)
