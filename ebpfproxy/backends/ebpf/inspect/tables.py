"""The contents of the pinned maps as tables, for `dump`. It needs no running agent.

It only reads. A dump of a busy node is not a snapshot: entries may change while they are read.
"""

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from socket import ntohs
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows import pairs
from ebpfproxy.backends.ebpf.inspect import client_view, counters, device_view, flow_view
from ebpfproxy.backends.ebpf.inspect.client_view import AffinityRow, SocketRow
from ebpfproxy.backends.ebpf.inspect.counters import ServiceName
from ebpfproxy.backends.ebpf.inspect.device_view import DeviceRow
from ebpfproxy.backends.ebpf.inspect.flow_view import FlowRow, TranslationRow
from ebpfproxy.backends.ebpf.inspect.view import (
    CounterRow,
    EndpointRow,
    MapRow,
    NetworkRow,
    RangeRow,
    ServiceRow,
    SettingRow,
)
from ebpfproxy.backends.ebpf.maps import Maps, slots_in
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.backends.ebpf.services.arrays import occupied
from ebpfproxy.backends.ebpf.services.source_ranges import SERVICE_ID_BITS
from ebpfproxy.errors import NotFound
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import (
    Address,
    Network,
    family,
    format_address,
    format_endpoint,
    format_network,
    is_unspecified,
    protocol_name,
)
from ebpfproxy.model.counters import ServiceTraffic
from ebpfproxy.plan.planned_endpoints import WEIGHT_SHIFT

_U32 = struct.Struct("=I")
_SLOT_SIZE = 4

SERVICE_GONE, ENDPOINT_GONE = "service removed", "endpoint removed"
NO_FRONTEND, IN_NO_SLOT = "no frontend", "in no slot"
"""Values of the column `orphaned`."""

_USAGE = (
    *("services", "endpoints", "affinity", "socket_peers", "socket_flows", "source_ranges"),
    *("flows", "half_open_flows"),
)
_FLAGS = {
    abi.SERVICE_REJECT: "reject",
    abi.SERVICE_RESTRICTED: "source-ranges",
    abi.SERVICE_NODE_ADMITTED: "node-admitted",
    abi.SERVICE_MASQUERADE_POD: "masquerade-pod",
    abi.SERVICE_MASQUERADE_NODE: "masquerade-node",
    abi.SERVICE_MASQUERADE_OUTSIDE: "masquerade-outside",
    abi.SERVICE_DSR: "dsr",
}


class _Endpoint(NamedTuple):
    address: Address
    port: int
    flags: int
    service: int

    def __str__(self) -> str:
        return format_endpoint(self.address, self.port)


class View:
    """The maps of the programs in force below `root`, the bpffs root. Close with `close`.

    Raises NotFound if nothing is pinned, Rejected if permissions are missing.
    """

    def __init__(self, root: Path) -> None:
        pins = Pins(root)
        self._maps = _open(pins)
        self._links, self._xdp_links = pins.devices, pins.xdp
        self._slots = self._maps["slots"].mapped()
        self._endpoints = self._maps["endpoints"].mapped()
        names = counters.service_names(self._maps["service_names"])
        self._names: dict[int, ServiceName | None] = dict(names)

    def close(self) -> None:
        self._slots.close()
        self._endpoints.close()
        self._maps.close()

    def services(self) -> list[ServiceRow]:
        """Sorted by service name, then address and port."""
        rows = [self._service(key, value) for key, value in self._maps["services"].items()]
        return [row for _, row in sorted(rows, key=lambda pair: (pair[1].service, pair[0]))]

    def _service(self, key: bytes, value: bytes) -> tuple[bytes, ServiceRow]:
        address, port, protocol, _ = abi.SERVICE_KEY.unpack(key)
        internal, external, id_, affinity, flags, kind, algorithm, slow_start = abi.SERVICE.unpack(value)
        policy = (
            "Local" if flags & abi.SERVICE_INTERNAL_LOCAL else "Cluster",
            "Local" if flags & abi.SERVICE_EXTERNAL_LOCAL else "Cluster",
        )
        row = ServiceRow(
            service=self.name(id_),
            kind=abi.KINDS.get(kind, str(kind)),
            protocol=protocol_name(protocol),
            address="*" if is_unspecified(address) else format_address(address),
            port=ntohs(port),
            internal=self._endpoints_in(internal),
            external=self._endpoints_in(external),
            policy=policy[0] if policy[0] == policy[1] else "/".join(policy),
            affinity=affinity,
            flags=[
                *(word for bit, word in _FLAGS.items() if flags & bit),
                *(["beyond-slots"] if self._is_beyond(internal) or self._is_beyond(external) else []),
            ],
            id=id_,
            internal_slots=_slots(internal),
            external_slots=_slots(external),
            algorithm=abi.ALGORITHMS.get(algorithm, str(algorithm)),
            slow_start=slow_start,
            orphaned=self._nameless(id_),
            family=family(address).value,
        )
        return key, row

    def _endpoints_in(self, packed: bytes) -> list[str]:
        """The endpoints of a range, each once. A range that another program wrote may exceed the array: then
        only its existing part is read."""
        found = [self._endpoint(id_) for id_ in set(self._ids_in(*abi.SLOT_RANGE.unpack(packed)))]
        return [str(e) if e.flags & abi.ENDPOINT_LISTED else f"{e} (not listed)" for e in sorted(found)]

    def _ids_in(self, first: int, count: int) -> list[int]:
        slots = range(first, min(first + count, self._room("slots")))
        return [_U32.unpack_from(self._slots, slot * _SLOT_SIZE)[0] for slot in slots]

    def _is_beyond(self, packed: bytes) -> bool:
        first, count = abi.SLOT_RANGE.unpack(packed)
        return bool(count) and first + count > self._room("slots")

    def _endpoint(self, id_: int) -> _Endpoint:
        if (id_ + 1) * abi.ENDPOINT.size > len(self._endpoints):
            return _Endpoint(Address(bytes(16)), 0, 0, 0)
        address, port, flags, service = abi.ENDPOINT.unpack_from(self._endpoints, id_ * abi.ENDPOINT.size)
        return _Endpoint(address, ntohs(port), flags, service)

    def endpoints(self) -> list[EndpointRow]:
        """Sorted by service name, then address and port."""
        rows = []
        in_slots, scopes = self._slot_uses()
        tunnels = self._tunnels()
        for first, block in occupied(self._endpoints, self._room("endpoints")):
            for id_, (_, _, flags, _) in enumerate(abi.ENDPOINT.iter_unpack(block), first):
                if flags & abi.ENDPOINT_LISTED:
                    rows.append((id_, self._endpoint(id_)))
        rows.sort(key=lambda row: (self.name(row[1].service), row[1].address, row[1].port))
        return [
            EndpointRow(
                service=self.name(endpoint.service),
                protocol=self._protocol(endpoint.service),
                address=format_address(endpoint.address),
                port=endpoint.port,
                lists=[
                    word
                    for bit, word in ((abi.ENDPOINT_CLUSTER, "cluster"), (abi.ENDPOINT_LOCAL, "local"))
                    if endpoint.flags & bit
                ],
                on_node=bool(endpoint.flags & abi.ENDPOINT_ON_NODE),
                id=id_,
                service_id=endpoint.service,
                weight=endpoint.flags >> WEIGHT_SHIFT or 1,
                tunnel=tunnels.get(id_, ""),
                orphaned=_unused(endpoint, id_ in in_slots, scopes.get(endpoint.service)),
            )
            for id_, endpoint in rows
        ]

    def _tunnels(self) -> dict[int, str]:
        """The column `tunnel`, by endpoint id."""
        here = {_U32.unpack(value)[0]: "here" for _, value in self._maps["tunnel_endpoints"].items()}
        remote = self._maps["tunnels"].items()
        return here | {_U32.unpack(key)[0]: format_address(Address(value)) for key, value in remote}

    def _slot_uses(self) -> tuple[set[int], dict[int, int]]:
        """The endpoint ids in the slots of all frontends, and by service id the endpoint flags of the lists
        that its frontends use."""
        ranges: set[tuple[int, int]] = set()
        scopes: dict[int, int] = {}
        for _, value in self._maps["services"].items():
            internal, external, id_, _, flags, *_ = abi.SERVICE.unpack(value)
            ranges |= {abi.SLOT_RANGE.unpack(internal), abi.SLOT_RANGE.unpack(external)}
            local = bool(flags & abi.SERVICE_INTERNAL_LOCAL), bool(flags & abi.SERVICE_EXTERNAL_LOCAL)
            scopes[id_] = scopes.get(id_, 0)
            for is_local in local:
                scopes[id_] |= abi.ENDPOINT_LOCAL if is_local else abi.ENDPOINT_CLUSTER
        return {id_ for span in ranges for id_ in self._ids_in(*span)}, scopes

    def _protocol(self, service: int) -> str:
        known = self._named(service)
        return protocol_name(known.protocol) if known else "?"

    def affinity(self) -> list[AffinityRow]:
        """Affinities that are still in force, the most recently used first."""
        return client_view.affinity(self._maps, self.name, lambda id_: str(self._endpoint(id_)), self._lost)

    def sockets(self) -> list[SocketRow]:
        """Connected sockets, then unconnected ones, sorted by service, cookie and frontend address."""
        return client_view.sockets(self._maps, self.name, self._lost)

    def conntrack(self) -> Iterator[FlowRow]:
        """The packet path's flows, sorted by client and frontend."""
        return flow_view.conntrack(self._maps, self.name, self._lost)

    def nat(self) -> Iterator[TranslationRow]:
        """How the packet path translates packets, sorted by client and frontend."""
        return flow_view.nat(self._maps, self.name, self._lost)

    def devices(self) -> list[DeviceRow]:
        """The devices of the packet path, by ifindex."""
        return device_view.devices(self._maps, self._links, self._xdp_links)

    def counters(self) -> list[CounterRow]:
        """Events in the programs, in the order of abi.h's enum counter."""
        found = counters.events(self._maps["counters"])
        return [CounterRow(name, sum(values), list(values)) for name, values in found.items()]

    def traffic(self) -> list[ServiceTraffic]:
        """The packet path's traffic, sorted by service."""
        names = {id_: name for id_, name in self._names.items() if name}
        return sorted(counters.traffic(self._maps["traffic"], names))

    @property
    def counts_services(self) -> bool:
        """Whether the agent counts the traffic of some services separately."""
        return counters.counts_services(self._maps["traffic"])

    def ranges(self) -> list[RangeRow]:
        """Source ranges, sorted by service name and network."""
        rows = []
        for key, _ in self._maps["source_ranges"].items():
            length, service, source = abi.SOURCE_RANGE_KEY.unpack(key)
            net = Network(Address(source), length - SERVICE_ID_BITS)
            rows.append((self.name(service), net, service))
        return [
            RangeRow(name, format_network(net), service, self._nameless(service))
            for name, net, service in sorted(rows)
        ]

    def networks(self) -> list[NetworkRow]:
        """Networks of the node, sorted by address and length."""
        rows = []
        for key, value in self._maps["local_networks"].items():
            length, address = abi.NETWORK_KEY.unpack(key)
            rows.append((Network(Address(address), length), _U32.unpack(value)[0]))
        return [
            NetworkRow(
                format_network(net),
                bool(flags & abi.NETWORK_LOCAL),
                bool(flags & abi.NETWORK_NODE_PORTS),
                bool(flags & abi.NETWORK_SERVICE_CIDR),
            )
            for net, flags in sorted(rows)
        ]

    def settings(self) -> list[SettingRow]:
        """The settings of the programs, in the order of abi.h's struct node. Its ServiceCIDRs are in
        `networks`."""
        value = self._maps["node"].lookup(_U32.pack(0)) or bytes(abi.NODE.size)
        return [
            SettingRow(field.name, number)
            for field, number in zip(abi.NODE.fields, abi.NODE.unpack(value), strict=True)
            if not field.name.startswith("service_")
        ]

    def maps(self) -> list[MapRow]:
        """The use of each map."""
        used = {name: self._count(name) for name in ("services", "affinity", "socket_flows")}
        timeouts = flow_view.read_timeouts(self._maps["node"])
        used["flows"], used["half_open_flows"] = pairs.count(self._maps, timeouts)
        used["endpoints"] = len(self.endpoints())
        used["socket_peers"] = client_view.connected(self._maps)
        used["source_ranges"] = self._count("source_ranges")
        room = {name: self._room(name) - (name == "endpoints") for name in used}
        room["half_open_flows"] *= abi.CONSTANTS["HALF_OPEN_ROW"]
        room["flows"] -= room["half_open_flows"]
        return [MapRow(name, used[name], room[name]) for name in _USAGE]

    def _count(self, name: str) -> int:
        return sum(1 for _ in self._maps[name].items())

    def _room(self, name: str) -> int:
        found = self._maps[name]
        return slots_in(found) if name == "slots" else found.shape.max_entries

    def name(self, service: int) -> str:
        """ "namespace/name:port", or ``?/ID`` for a service without a name."""
        known = self._named(service)
        return known.text if known else f"?/{service}"

    def _named(self, service: int) -> ServiceName | None:
        if service not in self._names:  # it may have been added since
            value = self._maps["service_names"].lookup(_U32.pack(service))
            self._names[service] = counters.service_name(value) if value else None
        return self._names[service]

    def _nameless(self, service: int) -> str:
        return "" if self._named(service) else SERVICE_GONE

    def _lost(self, service: int, endpoint: int, address: bytes, port: int) -> str:
        """See `client_view.LostOf`. Both maps are read now, so that what was added since is known."""
        if not self._named(service):
            return SERVICE_GONE
        if endpoint == abi.NO_ENDPOINT:
            return ""
        found = self._endpoint(endpoint)
        is_same = found.service == service and (not address or found[:2] == (address, ntohs(port)))
        return "" if is_same and found.flags & abi.ENDPOINT_LISTED else ENDPOINT_GONE


def _unused(endpoint: _Endpoint, in_slots: bool, scopes: int | None) -> str:
    """`scopes`: the flags of the lists that the frontends of its Service use, None without a frontend."""
    if scopes is None:
        return NO_FRONTEND
    return IN_NO_SLOT if endpoint.flags & scopes and not in_slots else ""


def _slots(packed: bytes) -> str:
    first, count = abi.SLOT_RANGE.unpack(packed)
    return f"{first}+{count}" if count else ""


def service_names(root: Path) -> set[str]:
    """The names of all ServicePorts in the maps below `root`, such as "default/web:http".

    Raises KernelError if there are no maps, or if they cannot be read.
    """
    with contextlib.closing(Map.pinned(Pins(root).hooked_in() / "maps" / "service_names")) as names:
        return {each.text for each in counters.service_names(names).values()}


def _open(pins: Pins) -> Maps:
    """Open the maps in force. It tries twice, since a starting agent of another version may remove them."""
    with contextlib.suppress(NotFound):
        return Maps(pins.hooked_in() / "maps")
    try:
        return Maps(pins.hooked_in() / "maps")
    except NotFound as failure:
        hint = failure.hint or "start the agent, which creates it again: another program removed it"
        raise NotFound(failure.message, hint) from failure
