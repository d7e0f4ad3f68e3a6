"""Live events of the programs, for `monitor` and `top` (docs/decisions/0031). It needs no running agent.

The programs record events only before a deadline in the map `monitor`, which `EventReader.renew` extends. If
the reader is killed, they stop after LEASE seconds. The ring buffer has one consumer, so there is one reader
for each bpffs root at a time.
"""

import contextlib
import mmap
import struct
import time
from collections.abc import Callable, Collection
from pathlib import Path
from socket import ntohs
from typing import Any, NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.inspect.client_names import ClientNames
from ebpfproxy.backends.ebpf.inspect.counters import ServiceName, service_name, service_names
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.errors import AlreadyExists, NotFound
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.bpf.ring_buffer import RingBuffer
from ebpfproxy.linux.locks import FolderLock
from ebpfproxy.model.address import Address, format_address, format_endpoint, is_unspecified, protocol_name

LEASE = 3.0
"""Seconds after `renew` at which the programs stop to record events."""

KINDS = {
    abi.CONSTANTS["EVENT_NEW"]: "new",
    abi.CONSTANTS["EVENT_REJECTED"]: "rejected",
    abi.CONSTANTS["EVENT_DROPPED"]: "dropped",
    abi.CONSTANTS["EVENT_RESET"]: "reset",
    abi.CONSTANTS["EVENT_RECONNECTED"]: "reconnected",
}
"""The name of each kind of event (enum event_kind)."""

_SOCKET_PATH = abi.CONSTANTS["EVENT_SOCKET_PATH"]
_AFFINITY_USED, _AFFINITY_SET = abi.CONSTANTS["EVENT_AFFINITY_USED"], abi.CONSTANTS["EVENT_AFFINITY_SET"]
_BY_ENDPOINT = abi.CONSTANTS["EVENT_BY_ENDPOINT"]
_REASONS = {
    name: name.removeprefix("packet_").replace("_", "-")
    for name in ("inconsistent", "source_refused", "ports_exhausted", "no_address", "no_route")
} | {
    "rejected": "no-endpoints",
    "packet_rejected": "no-endpoints",
    "dropped": "no-local-endpoints",
    "packet_dropped": "no-local-endpoints",
    "flows_full": "flows-full",
    "cluster_ip_unused": "unused-cluster-ip",
}
_FIELD = {field.name: at for at, field in enumerate(abi.EVENT.fields)}
_NETNS, _CLIENT, _SERVICE, _FLAGS = (
    _FIELD[name] for name in ("netns_cookie", "client", "service_id", "flags")
)
_NO_LIMIT = (1 << 64) - 1
_SERVICES: int = abi.CONSTANTS["MONITOR_SERVICES"]
_WINDOW = (1 << 30) / 1e9  # seconds
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


class Event(NamedTuple):
    """One event.

    - `time`: seconds since the epoch.
    - `service`: "namespace/name:port", ``?/ID`` if the Service has no name any more, "-" if no Service has
      the address.
    - `path`: "socket" or "packet".
    - `client`: an address and port. On the socket path these are not known yet: "node", an address of the
      pod's network namespace, or "netns" and its cookie.
    - `endpoint`: "" if there is none.
    - `reason`: for "rejected" and "dropped" why; for "reset" "by-client" or "by-endpoint"; otherwise "".
    - `affinity`: "used" if session affinity selected the endpoint, "set" if the client got a new affinity,
      otherwise "".
    """

    time: float
    event: str
    service: str
    protocol: str
    path: str
    client: str
    frontend: str
    endpoint: str
    reason: str
    affinity: str


class Lost(NamedTuple):
    """Events that were not recorded since the reader started.

    `rate`: they exceeded the rate. `buffer`: the ring buffer had no room.
    """

    rate: int
    buffer: int


class EventReader:
    """The reader of events below `root`, the bpffs root. Close with `close`: then nothing is recorded.

    Raises NotFound if no maps are pinned, AlreadyExists if another reader runs, and other KernelErrors.
    """

    def __init__(
        self,
        root: Path,
        service: str = "",
        kinds: Collection[str] = (),
        rate: int = 0,
        client: str = "",
    ) -> None:
        """`service`: "namespace/name" with or without ":port", "" for all. `kinds`: names in KINDS, none for
        all. `rate`: the most events in a second, 0 for no limit. `client`: "node", or an address in canonical
        text, "" for all clients."""
        pins = Pins(root)
        self._pin = pins.maps_of(pins.hooked_in()).get("events")
        self._pins = pins
        if self._pin is None:
            raise NotFound(f"the programs in {root} record no events", "start an agent of this version")
        self._service, self._client = service, client
        self._names: dict[int, ServiceName] = {}
        self._lost_before = Lost(0, 0)
        bits = {name: 1 << number for number, name in KINDS.items()}
        self._kinds = sum(bits[name] for name in set(kinds) or bits)
        self._rate = max(1, round(rate * _WINDOW)) if rate else _NO_LIMIT
        self._boot = time.time() - time.monotonic()
        with contextlib.ExitStack() as opened:
            opened.callback(self._lock(pins).release)
            folder = pins.hooked_in() / "maps"
            self._maps = {name: Map.pinned(folder / name) for name in ("monitor", "service_names", "node")}
            for each in self._maps.values():
                opened.callback(each.close)
            events = Map.pinned(folder / "events")
            opened.callback(events.close)
            self._ring = RingBuffer(events)
            opened.callback(self._ring.close)
            self._monitor: mmap.mmap = self._maps["monitor"].mapped()
            opened.callback(self._monitor.close)
            self._clients = ClientNames(self._node_cookie())
            self._ring.skip()
            self._lost_before = self.lost()
            opened.callback(self._stop)
            self.renew()
            self._opened = opened.pop_all()

    @staticmethod
    def _lock(pins: Pins) -> FolderLock:
        try:
            return FolderLock(pins.maps, patience=0)
        except AlreadyExists:
            raise AlreadyExists(
                f"another monitor or top reads the events of {pins.root}", "end it, or use its output"
            ) from None

    def _node_cookie(self) -> int:
        value = self._maps["node"].lookup(_U32.pack(0)) or bytes(8)
        return int(_U64.unpack_from(value)[0])

    def renew(self) -> None:
        """Let the programs record events for LEASE more seconds. Call it about once per second.

        Raises NotFound if the agent was replaced by one whose programs use other maps.
        """
        if self._pins.maps_of(self._pins.hooked_in()).get("events") != self._pin:
            raise NotFound("the agent replaced the maps of its programs", "start this command again")
        ids = self._ids_of_service()
        filtered = [*ids, *[0] * _SERVICES][:_SERVICES] if len(ids) <= _SERVICES else [0] * _SERVICES
        self._set("services", struct.pack(f"={_SERVICES}I", *filtered))
        self._set("kinds", _U32.pack(self._kinds))
        self._set("rate", _U64.pack(self._rate))
        self._set("until", _U64.pack(time.monotonic_ns() + int(LEASE * 1e9)))

    def _stop(self) -> None:
        self._set("until", bytes(8))

    def _set(self, field: str, value: bytes) -> None:
        at = abi.MONITOR.offset(field)
        self._monitor[at : at + len(value)] = value

    def _get(self, field: str) -> int:
        return int(_U64.unpack_from(self._monitor, abi.MONITOR.offset(field))[0])

    def _ids_of_service(self) -> list[int]:
        """The ids of the Service's ports. [NO id] if it does not exist (yet). Empty: all Services."""
        if not self._service:
            self._names.clear()  # ids are assigned again
            return []
        self._names = service_names(self._maps["service_names"])
        return [id_ for id_, name in self._names.items() if self._is_wanted(name.text)] or [(1 << 32) - 1]

    def _is_wanted(self, service: str) -> bool:
        return not self._service or self._service in (service, service.partition(":")[0])

    def read(self, receive: Callable[[Event], None]) -> None:
        """Pass each event since the last call to `receive`, the oldest first."""
        self._ring.read(lambda record: self._receive(record, receive))

    def _receive(self, record: bytes, receive: Callable[[Event], None]) -> None:
        fields = abi.EVENT.unpack(record)
        if not self._is_wanted(self._name(fields[_SERVICE])):  # the kernel does not filter many ports
            return
        if not self._client or self._is_client(fields):
            receive(self._event(fields))

    def _is_client(self, fields: tuple[Any, ...]) -> bool:
        if not fields[_FLAGS] & _SOCKET_PATH:
            return format_address(Address(fields[_CLIENT])) == self._client
        netns = fields[_NETNS]
        return self._clients.name(netns) == self._client or self._clients.has_address(netns, self._client)

    def lost(self) -> Lost:
        """The lost events since the reader started."""
        before = self._lost_before
        return Lost(self._get("limited") - before.rate, self._get("lost") - before.buffer)

    def _event(self, fields: tuple[Any, ...]) -> Event:
        seen, netns, client, frontend, endpoint, client_port, frontend_port, endpoint_port, *others = fields
        protocol, kind, service, flags, reason, _ = others
        return Event(
            time=round(self._boot + seen / 1e9, 6),
            event=KINDS.get(kind, str(kind)),
            service=self._name(service),
            protocol=protocol_name(protocol),
            path="socket" if flags & _SOCKET_PATH else "packet",
            client=self._clients.name(netns) if flags & _SOCKET_PATH else _place(client, client_port),
            frontend=_place(frontend, frontend_port),
            endpoint="" if is_unspecified(Address(endpoint)) else _place(endpoint, endpoint_port),
            reason=_reason(KINDS.get(kind, ""), reason, flags),
            affinity="used" if flags & _AFFINITY_USED else "set" if flags & _AFFINITY_SET else "",
        )

    def _name(self, service: int) -> str:
        """A Service that is newer than the last `renew` is looked up."""
        if not service:
            return "-"
        known = self._names.get(service)
        if known is None:
            value = self._maps["service_names"].lookup(_U32.pack(service))
            known = service_name(value) if value else ServiceName(f"?/{service}", 0, 0)
            self._names[service] = known
        return known.text

    def close(self) -> None:
        """Let the programs record nothing. A second call does nothing."""
        self._opened.close()


def _reason(kind: str, reason: int, flags: int) -> str:
    if kind == "reset":
        return "by-endpoint" if flags & _BY_ENDPOINT else "by-client"
    return _REASONS.get(abi.COUNTERS.get(reason, ""), "") if kind in ("rejected", "dropped") else ""


def _place(address: bytes, port: int) -> str:
    return format_endpoint(Address(address), ntohs(port))
