"""Reads the entries of mode ebpf from its pins, and what no entry shows. It changes nothing in the kernel.

Unlike `EbpfBackend`, it needs no lock: the agent may change the maps meanwhile. Then the result may contain
differences that do not last.
"""

import contextlib
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from socket import ntohs
from typing import Any, NamedTuple

from ebpfproxy.backends.difference import DIFFERENT, MISSING, UNEXPECTED, Difference
from ebpfproxy.backends.ebpf import abi, attachments, entries
from ebpfproxy.backends.ebpf.devices import frontend_routes, source_addresses, xdp
from ebpfproxy.backends.ebpf.devices.filters import DeviceTable, bypassing_pods, served_loopback, served_pods
from ebpfproxy.backends.ebpf.devices.positions import Positions
from ebpfproxy.backends.ebpf.entries import (
    BEHIND,
    DeviceEntry,
    Entry,
    FrontendEntry,
    HookKey,
    Key,
    NamespaceEntry,
    NamespaceKey,
    ServicePortEntry,
    TunnelSourceKey,
)
from ebpfproxy.backends.ebpf.inspect import translations
from ebpfproxy.backends.ebpf.inspect.read_only import ReadOnlyArrays, ReadOnlyMap
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.backends.ebpf.programs import PinnedPrograms, available_hooks, pinned_classifiers
from ebpfproxy.backends.ebpf.services import ports
from ebpfproxy.backends.ebpf.services.frontend_addresses import FrontendAddresses
from ebpfproxy.backends.ebpf.services.node_entry import NodeEntry
from ebpfproxy.backends.ebpf.services.reading import Reading
from ebpfproxy.backends.ebpf.services.slot_ranges import Ids
from ebpfproxy.backends.ebpf.services.source_ranges import SERVICE_ID_BITS, SourceRanges
from ebpfproxy.backends.ebpf.services.tunnels import Tunnels
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.backends.ebpf.sockets import netns_cookie, pod_namespaces
from ebpfproxy.backends.interface import Inspection
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import cgroup
from ebpfproxy.linux.netlink import geneve, on_link_routes
from ebpfproxy.model.address import (
    Address,
    Network,
    format_address,
    format_endpoint,
    is_unspecified,
    network,
    protocol_name,
)
from ebpfproxy.model.connection import Connection, Translation
from ebpfproxy.model.namespace import Namespace
from ebpfproxy.plan.planned_endpoints import PlannedEndpoint
from ebpfproxy.plan.service_plan import NodePlan, PlanContext, ServicePortPlan, SocketLb

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


class EbpfInspection(Inspection[Key, Entry]):
    """Each `read` opens the pins again, since the agent may have replaced them."""

    def __init__(self, settings: EbpfSettings, context: PlanContext) -> None:
        """Raises NotFound if nothing is pinned."""
        self.context = context
        self._settings = settings
        self._pins = Pins(settings.bpffs_root)
        self._pins.hooked_in()
        self._hooks = available_hooks()
        self._further: list[Difference] = []

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        off = self._settings.socket_lb is SocketLb.OFF
        device = geneve.find() if self._settings.tunnels else 0
        routes = frontend_routes.are_wanted(node)
        return entries.render(plans, node, () if off else self._hooks, device, routes)

    def read(self) -> dict[Key, Entry]:
        """The entries. Empty if a pin is missing: `further` then names it. Raises KernelError."""
        self._further = []
        programs = PinnedPrograms(
            self._pins,
            self._settings.cgroup_root,
            self._pins.hooked_in(),
            self._hooks,
            self._settings.tunnels,
        )
        missing = programs.missing_pins()
        if missing:
            self._further = [Difference(f"pin {name}", MISSING) for name in missing]
            return {}
        with contextlib.ExitStack() as opened:
            programs.open()
            opened.callback(programs.close)
            maps = Maps(programs.maps, ReadOnlyMap)
            opened.callback(maps.close)
            found = dict(self._services(maps).items())
            found |= self._networks(maps)
            found |= self._devices(maps, programs)
            self._further += self._xdp(maps, programs)
            self._further += self._node(maps, entries.has_loopback(found))
            found |= {HookKey(name): state for name, state in programs.hook_states().items()}
            self._further += self._before_hooks(programs)
            if self._settings.devices:
                found.update(on_link_routes.read().items())
            return found

    def endpoint_of(self, connection: Connection) -> Translation | None:
        return translations.find(self._pins.hooked_in() / "maps", connection)

    def _services(self, maps: Maps) -> dict[Key, Entry]:
        arrays = ReadOnlyArrays(maps)
        try:
            ids = Ids(maps["service_names"].shape.max_entries + 1)
            sources = SourceRanges(maps["source_ranges"])
            found = Reading(maps, arrays, ids, sources, time.monotonic)
            self._further += map(_stray_endpoint, map(arrays.endpoint, arrays.unknown))
        finally:
            arrays.close()
        Tunnels(maps).read(found.records.values())
        services = [each for record in found.records.values() for each in record.services.items()]
        FrontendAddresses(maps["frontend_addresses"]).read(services)
        for name, text in _REPAIRED.items():
            self._further += _repairs(maps, name, text)
        memory = maps["service_ports"].mapped()
        try:
            wrong = ports.wrong_ports(memory, found.owner)
        finally:
            memory.close()
        if wrong:
            detail = f"{wrong} ports do not match the frontends"
            self._further.append(Difference("map service_ports", DIFFERENT, detail))
        return {key: record.entry for key, record in found.records.items()}

    def _networks(self, maps: Maps) -> dict[Key, Entry]:
        found: dict[Key, Entry] = {}
        for key, value in maps["local_networks"].items():
            length, address = abi.NETWORK_KEY.unpack(key)
            found[Network(Address(address), length)] = int(_U32.unpack(value)[0])
        for key, _ in maps["tunnel_sources"].items():
            length, address = abi.NETWORK_KEY.unpack(key)
            found[TunnelSourceKey(Network(Address(address), length))] = 1
        for key, value in maps["pod_namespaces"].items():
            found[NamespaceKey(*_U64.unpack(key))] = NamespaceEntry(*abi.POD_NAMESPACE.unpack(value))
        found.update(source_addresses.read(maps).items())
        return found

    def _devices(self, maps: Maps, programs: PinnedPrograms) -> dict[Key, Entry]:
        """The devices. A program that runs behind another one is in `further`, not in the entries."""
        owned = None if self._settings.devices else pinned_classifiers(self._pins)
        positions = Positions()
        table = DeviceTable(
            maps["devices"],
            programs,
            attachments=attachments.choose(self._pins.devices, owned),
            positions=positions,
        )
        found: dict[Key, Entry] = {}
        for key, entry in table.observe().items():
            sides = tuple(side.removesuffix(f" {BEHIND}") for side in entry.sides)
            found[key] = entry._replace(sides=sides)
        self._further += [
            Difference(f"device {each.device} {each.side}", DIFFERENT, f"runs after {', '.join(each.before)}")
            for each in positions.troubles()
        ]
        return found

    def _xdp(self, maps: Maps, programs: PinnedPrograms) -> Iterator[Difference]:
        """The devices that lack the XDP program of the settings, or have another one."""
        mode, folder = self._settings.xdp, self._pins.xdp
        flags = {_U32.unpack(key)[0]: abi.DEVICE.unpack(value)[2] for key, value in maps["devices"].items()}
        wanted = [each for each in flags if mode and xdp.is_wanted(each, flags[each])]
        for _, ifindex in xdp.pins(folder):
            if ifindex not in wanted:
                yield Difference(f"XDP link of device {ifindex}", UNEXPECTED)
        if mode is None:
            return
        for state in xdp.states(wanted, folder, mode).values():
            name = f"device {state.device.name} XDP"
            if state.lasting:  # `doctor` reports what the node lacks
                continue
            if not state.mode:
                yield Difference(name, MISSING, state.problem)
            elif state.mode != mode or state.device.programs[state.mode] != programs.xdp_id():
                yield Difference(name, DIFFERENT, f"have {state.mode} of another version")

    def _node(self, maps: Maps, loopback: bool) -> Iterator[Difference]:
        cookie = netns_cookie.own(self._settings.cgroup_root)
        detail = NodeEntry(maps["node"], self._settings, cookie, maps["local_networks"]).difference(loopback)
        if detail:
            yield Difference("map node", DIFFERENT, detail)

    def _before_hooks(self, programs: PinnedPrograms) -> Iterator[Difference]:
        """The hooks at which programs of others run before the agent's. Those of cgroups below are not
        included."""
        if self._settings.socket_lb is SocketLb.OFF:
            return
        for hook, own in programs.hook_ids().items():
            with contextlib.suppress(KernelError):
                running = cgroup.programs(self._settings.cgroup_root, hook.attach_type, effective=True)
                if own in running[1:]:
                    names = ", ".join(map(attachments.program_name, running[: running.index(own)]))
                    yield Difference(hook.name, DIFFERENT, f"runs after {names}")

    def shown(self, key: Any, entry: Any) -> Any:
        return shown(entry)

    def bypassing(self) -> frozenset[int]:
        return bypassing_pods(self._pins.pinned_maps("bypassing"))

    def namespaces(self) -> tuple[Namespace, ...]:
        if self._settings.socket_lb is not SocketLb.ON:
            return ()
        return pod_namespaces.read(self._settings.proc_root, self._settings.cgroup_root)

    def served_devices(self) -> frozenset[int]:
        pins = list(self._pins.pinned_maps("devices"))
        return served_pods(pins) | served_loopback(pins)

    def further(self) -> list[Difference]:
        return self._further

    def close(self) -> None:
        """Nothing stays open."""


def shown(entry: Any) -> Any:
    """An entry in the form for readers."""
    if isinstance(entry, ServicePortEntry):
        return _shown_service_port(entry)
    if isinstance(entry, DeviceEntry):
        return _ShownDevice(entry.flags, entry.v4, entry.v6, " and ".join(entry.sides))
    return entry


class _ShownServicePort(NamedTuple):
    """A `ServicePortEntry` for readers."""

    frontends: tuple[str, ...]
    endpoints: tuple[str, ...]
    affinity: str
    source_ranges: tuple[str, ...]
    algorithm: str
    slow_start: str
    tunnels: tuple[str, ...]


class _ShownDevice(NamedTuple):
    """A `DeviceEntry` for readers."""

    flags: int
    v4: Address
    v6: Address
    programs: str


def _shown_service_port(entry: ServicePortEntry) -> _ShownServicePort:
    timeout = entry.affinity_timeout
    return _ShownServicePort(
        tuple(map(_frontend_text, entry.frontends)),
        tuple(map(_endpoint_text, entry.endpoints, entry.endpoints.weights())),
        "lists that contradict the endpoints" if timeout < 0 else f"{timeout} s",
        tuple(map(str, entry.source_ranges)),
        abi.ALGORITHMS.get(entry.algorithm, f"algorithm {entry.algorithm}"),
        f"{entry.slow_start} s",
        tuple(format_address(each) if each else "-" for each in entry.tunnels),
    )


def _frontend_text(each: FrontendEntry) -> str:
    kind = abi.KINDS.get(each.kind, f"kind {each.kind}")
    host = "*" if is_unspecified(each.address) else ""
    target = f"{host}:{each.port}" if host else format_endpoint(each.address, each.port)
    return f"{kind} {target}/{protocol_name(each.protocol)} flags {each.flags:#x}"


def _endpoint_text(each: PlannedEndpoint, weight: int) -> str:
    """
    >>> from ebpfproxy.model.address import parse_address
    >>> here = PlannedEndpoint(parse_address("10.0.0.1"), 80, cluster=True, local=True, on_node=True)
    >>> _endpoint_text(here, 1), _endpoint_text(here._replace(local=False, on_node=None), 2)
    ('10.0.0.1:80 (cluster, local, this node)', '10.0.0.1:80 (cluster, unknown node, weight 2)')
    """
    scopes = [name for name, is_in in (("cluster", each.cluster), ("local", each.local)) if is_in]
    place = {True: "this node", False: "another node", None: "unknown node"}[each.on_node]
    heavy = [f"weight {weight}"] if weight > 1 else []
    return f"{format_endpoint(each.address, each.port)} ({', '.join((*scopes, place, *heavy))})"


def _stray_endpoint(packed: bytes) -> Difference:
    address, port, _, service = abi.ENDPOINT.unpack(packed)
    target = format_endpoint(Address(address), ntohs(port))
    return Difference(f"endpoint {target}", UNEXPECTED, f"of service id {service}")


def _repairs(maps: Maps, name: str, text: Callable[[bytes], str]) -> Iterator[Difference]:
    """The differences in a map whose repairs were recorded."""
    map_ = maps[name]
    assert isinstance(map_, ReadOnlyMap)
    present = dict(map_.items())
    for key, value in map_.repairs.items():
        state = UNEXPECTED if value is None else DIFFERENT if key in present else MISSING
        yield Difference(f"map {name}: {text(key)}", state)


def _source_range(key: bytes) -> str:
    length, service, address = abi.SOURCE_RANGE_KEY.unpack(key)
    bits = length - SERVICE_ID_BITS
    return f"{network(Address(address), bits)} of service id {service}" if bits >= 0 else key.hex()


def _frontend_address(key: bytes) -> str:
    return format_address(Address(key))


def _tunnel(key: bytes) -> str:
    return f"endpoint id {_U32.unpack(key)[0]}"


def _tunnel_endpoint(key: bytes) -> str:
    address, port, _, service = abi.TUNNEL_ENDPOINT.unpack(key)
    return f"{format_endpoint(Address(address), ntohs(port))} of service id {service}"


_REPAIRED = {
    "source_ranges": _source_range,
    "frontend_addresses": _frontend_address,
    "tunnels": _tunnel,
    "tunnel_endpoints": _tunnel_endpoint,
}
"""The maps that `_services` reads with repairs, and how a key is shown."""
