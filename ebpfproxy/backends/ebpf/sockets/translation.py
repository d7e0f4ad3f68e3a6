"""The map `stale_sockets`: UDP sockets of pods that could not be reconnected, and are translated instead.

Such a socket stays connected to its former endpoint. The programs on the pod's device treat its packets as
packets to the frontend: they select an endpoint, and its answers get the address of the former endpoint. So
these devices need programs: `pods_bypass` has them attached.

An entry has the tuple of the socket's packets, so it must not outlast the socket: another one may get the
same port, and be connected to a pod that has the same address now. Entries are compared with `socket_peers`
every second (`forget`), and with all stale sockets at each search (`translate`).
The map is pinned: the next agent removes what this one has left.

A pod that has no gateway on the way to the former endpoint (a bridge that both are on) sends nothing once no
neighbor answers for that address. Its sockets get entries, but do not count as translated.

Sockets of the node itself are not translated. Their packets would need programs on the devices of all pods,
and the veth pair by which --socket-lb=off gives answers back to the node.
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
from ebpfproxy.linux.netlink import pod_devices
from ebpfproxy.linux.netlink.pod_devices import PodDevice
from ebpfproxy.linux.netns import namespaces
from ebpfproxy.linux.sockets.sockets import DiagSocket

_IFINDEX = Struct("=I")
_MAPS = "stale_sockets", "devices", "flows", "replies"
_PATIENCE = 10.0  # seconds until a device that was asked for counts as one that gets no programs


class Translated(NamedTuple):
    """Cookies of sockets. `pending`: the device of their pod has no programs yet."""

    done: frozenset[int]
    pending: frozenset[int]


class _Found(NamedTuple):
    key: bytes
    frontend: bytes
    device: PodDevice
    has_gateway: bool


class StaleTranslation:
    """For one thread.

    `note` is called with True before the first entry is written, with False after the last one was removed,
    and at once with whether a former agent has left any. `pods_bypass` is called with the indexes of devices
    that need programs.
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
        self._asked: dict[int, float] = {}  # when a device was, by its index
        self._noted = next(self._maps["stale_sockets"].items(), None) is not None
        note(self._noted)

    def close(self) -> None:
        """Entries stay, as the programs do."""
        self._opened.close()

    @property
    def is_empty(self) -> bool:
        """Whether this object has written no entry that is still there."""
        return not self._cookies

    def translate(self, stale: Mapping[int, StalePeer]) -> Translated:
        """Have entries of these sockets, as far as they are found, and of no others. Raises KernelError."""
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
            with contextlib.suppress(KernelError):  # full: the socket is left as it is
                entries.update(key, frontend)
                written.add(key)
        self._cookies = {cookie: each.key for cookie, each in found.items() if each.key in written}
        if not written:
            self._set(False)
        done, pending = self._attached({cookie: found[cookie].device.outer for cookie in self._cookies})
        sure = frozenset(cookie for cookie, each in found.items() if each.has_gateway)
        return Translated(done & sure, pending & sure)

    def forget(self, peers: SocketPeers) -> None:
        """Remove the entries of sockets that were closed, or are stale no more. Raises KernelError."""
        for cookie, key in list(self._cookies.items()):
            if not peers.of(cookie):
                self._remove(key)
                del self._cookies[cookie]
        if not self._cookies:
            self._set(False)

    def _find(self, stale: Mapping[int, StalePeer]) -> Iterator[tuple[int, _Found]]:
        """By cookie, of sockets of pods that a device of the node leads to."""
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
        """`devices`: the index of each socket's device, by cookie."""
        lacking = {each for each in devices.values() if not self._has_programs(each)}
        now = self._clock()
        self._asked = {each: self._asked.get(each, now) for each in lacking}
        if lacking:
            self._pods_bypass(frozenset(lacking))
        pending = {each for each in lacking if now - self._asked[each] < _PATIENCE}
        return Translated(_of(devices, set(devices.values()) - lacking), _of(devices, pending))

    def _has_programs(self, device: int) -> bool:
        value = self._maps["devices"].lookup(_IFINDEX.pack(device))
        return bool(value and abi.DEVICE.unpack(value)[2] & abi.DEVICE_POD)

    def _remove(self, key: bytes) -> None:
        """The entry, then its flow: the same port may get answers of that endpoint directly."""
        self._maps["stale_sockets"].delete(key)
        if value := self._maps["flows"].lookup(key):
            self._maps["replies"].delete(reply_key(key, value))
            self._maps["flows"].delete(key)

    def _set(self, present: bool) -> None:
        if self._noted != present:
            self._note(present)
            self._noted = present


def _in_pod(sockets: list[DiagSocket]) -> Iterator[tuple[DiagSocket, PodDevice, bool]]:
    """With the device of each, and whether it sends by a gateway. The calling thread is in the pod's network
    namespace."""
    devices = pod_devices.by_address()
    peers = {each.destination for each in sockets}
    by_gateway = {address for address in peers if pod_devices.has_gateway(address)}
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
