"""The eBPF backend: local networks, Services, devices and hooks."""

import contextlib
import functools
import math
import struct
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import NamedTuple, cast

from ebpfproxy.backends.connection_resets import ConnectionResets
from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.ebpf import abi, attachments, entries
from ebpfproxy.backends.ebpf.devices import frontend_routes, source_addresses
from ebpfproxy.backends.ebpf.devices.filter_watch import FilterWatch
from ebpfproxy.backends.ebpf.devices.filters import (
    DeviceTable,
    bypassing_pods,
    previous_clsacts,
    served_pods,
)
from ebpfproxy.backends.ebpf.devices.frontend_routes import FrontendRoutes
from ebpfproxy.backends.ebpf.devices.packet_check import PacketCheck
from ebpfproxy.backends.ebpf.devices.positions import Positions
from ebpfproxy.backends.ebpf.devices.xdp import XdpDevices, XdpState
from ebpfproxy.backends.ebpf.entries import (
    DeviceEntry,
    DeviceKey,
    Entry,
    HookKey,
    Key,
    NamespaceEntry,
    NamespaceKey,
    ServicePortEntry,
    ServicePortKey,
    SourceKey,
    TunnelSourceKey,
)
from ebpfproxy.backends.ebpf.flows.collector import FlowCollector
from ebpfproxy.backends.ebpf.flows.state import FlowTimeouts as FlowTimeouts
from ebpfproxy.backends.ebpf.hooks import BIND_HOOKS
from ebpfproxy.backends.ebpf.inspect.counters import Readings
from ebpfproxy.backends.ebpf.maps import Maps, shapes
from ebpfproxy.backends.ebpf.migration.migrate import Migration
from ebpfproxy.backends.ebpf.pins import Pins, converted
from ebpfproxy.backends.ebpf.programs import Programs, detach_all, first_needed, pinned_classifiers
from ebpfproxy.backends.ebpf.services.node_entry import NodeEntry
from ebpfproxy.backends.ebpf.services.table import ServiceTable
from ebpfproxy.backends.ebpf.settings import EbpfSettings as EbpfSettings
from ebpfproxy.backends.ebpf.sockets import netns_cookie
from ebpfproxy.backends.ebpf.sockets.pod_namespaces import PodNamespaces
from ebpfproxy.backends.ebpf.sockets.stale_sockets import StaleSockets
from ebpfproxy.backends.ebpf.sockets.translation import StaleTranslation
from ebpfproxy.backends.ebpf.translated_connections import TranslatedConnections
from ebpfproxy.backends.generation import Generation
from ebpfproxy.backends.interface import Backend, Callbacks
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import mounts
from ebpfproxy.linux.locks import FolderLock
from ebpfproxy.linux.netlink import on_link_routes
from ebpfproxy.linux.netlink.on_link_routes import Target
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Network, Protocol
from ebpfproxy.model.counters import Report, TableUse
from ebpfproxy.model.device import DeviceSide
from ebpfproxy.plan.service_plan import NodePlan, PlanKey, ServicePortPlan, SocketLb

log = Logger(__name__)

PINS_REMOVED = "Pins were removed, loading again"
"""Another program removed pins of maps, programs or links."""
PRIVATE_BPFFS = "The bpffs is private to this container: a restart will interrupt Services"
"""Mount the node's /sys/fs/bpf, as `deploy/base` does."""
UNKNOWN_PORTS = "Cannot read the connections that netfilter masquerades"
"""A new flow may get a port that one of them uses. That connection then receives no more replies."""

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
_LONGEST = 0.03  # seconds after which a change postpones further ServicePorts
_PATIENCE = 5.0  # seconds to wait for an agent that is ending, for example when a DaemonSet is updated

_ATTACHED = HookKey, DeviceKey, Target
"""The keys of what `_Attachments` has."""


class _Attachments(NamedTuple):
    pinned: bool
    hooks: frozenset[tuple[str, str]] = frozenset()
    devices: frozenset[tuple[DeviceKey, DeviceEntry]] = frozenset()
    routes: frozenset[tuple[Target, on_link_routes.Path]] = frozenset()


def _without(devices: frozenset[int], of: _Attachments) -> _Attachments:
    """`devices`: the ifindexes to leave out."""
    return of._replace(devices=frozenset(each for each in of.devices if each[0].ifindex not in devices))


def _differ_by(
    delta: Delta[Key, Entry], rejected: Set[Key], before: _Attachments, after: _Attachments
) -> bool:
    """Whether the delta is the only difference. A device of the delta may be gone."""
    expected = {key: entry for key, entry in _entries(before).items() if key not in delta.drops}
    expected.update((key, entry) for key, entry in delta.puts.items() if isinstance(key, _ATTACHED))
    found = _entries(after)
    gone = {key for key in delta.puts.keys() - found.keys() if isinstance(key, DeviceKey)}
    differing = {key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)}
    return differing <= gone | rejected


def _entries(of: _Attachments) -> dict[Key, Entry]:
    found: dict[Key, Entry] = {HookKey(name): state for name, state in of.hooks}
    found.update(of.devices)
    found.update(of.routes)
    return found


class EbpfBackend(Backend[Key, Entry]):
    """The node is the calling thread's network namespace."""

    name = "ebpf"
    reread_seconds = math.inf  # `check` compares everything

    def __init__(
        self,
        settings: EbpfSettings,
        callbacks: Callbacks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `Callbacks.repeats`, `apply` postpones what would take too long (NotYet). Without it, `apply`
        applies everything.

        `open` calls `Callbacks.namespaces`, and `pods_bypass` with the devices of all pods whose packets a
        previous run translated, or found to need translation.
        """
        self._settings = settings
        self._callbacks = callbacks or Callbacks()
        self._clock = clock
        self._sizes = settings.map_sizes()
        self._watch: FilterWatch | None = None  # if programs are attached by tc filters
        self._positions = Positions(clock)
        self._routes = FrontendRoutes()
        self._xdp_reported: dict[int, XdpState] = {}
        self._clsacts: frozenset[int] = frozenset()  # ifindexes; previous maps record them as the agent's
        self._lock: FolderLock | None = None
        self._opened: contextlib.ExitStack | None = None  # what `close` closes, before the lock
        self._attached = Generation(self._attachments)
        self._generation: Hashable = None
        self._services_applied = False  # whether the last delta contained services only
        connections = TranslatedConnections(lambda: self._programs.maps, settings.proc_root)
        self._resets = ConnectionResets(connections, settings.resets, self._callbacks)

    def open(self) -> None:
        """Provide maps and programs. The attachments do not change.

        Raises AlreadyExists if another agent uses this bpffs root: two agents would overwrite each other's
        slots and endpoints. The caller ensures by a NamespaceLock that no other agent uses the devices of
        this network namespace. Each side of a device has at most one filter of ebpfproxy.

        After a failure nothing stays open, and `open` may be called again.
        """
        with self._converted():
            self._open_locked(self._settings.bpffs_root)

    def _converted(self) -> contextlib.AbstractContextManager[None]:
        return converted(self._settings.bpffs_root)

    def _open_locked(self, root: Path) -> None:
        if mounts.ensure_bpffs(root):
            _warn_of_private_mount(root, self._settings.proc_root)
        lock = FolderLock(root, _PATIENCE)
        try:
            self._pins = Pins(root)
            with contextlib.ExitStack() as opened:
                self._open(opened)
                self._opened = opened.pop_all()
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Open everything. `opened` gets each object as soon as it is open."""
        settings = self._settings
        self._programs = Programs(
            self._pins, settings.cgroup_root, self._sizes, settings.tunnels, settings.xdp
        )
        opened.callback(self._programs.close)
        self._maps = Maps(self._programs.maps)
        opened.callback(self._maps.close)
        self._table = ServiceTable(self._maps, self._clock)
        opened.callback(self._table.close)
        self._open_devices()
        self._open_rest(opened)
        in_force = self._pins.in_force()
        previous = in_force if in_force != self._programs.directory else None
        self._migration = Migration(shapes(self._sizes), self._maps, self._pins.maps_of(previous))
        opened.callback(self._migration.close)
        self._migration.copy()
        self._unattached: frozenset[Key] = frozenset()
        self._unhooked: KernelError | None = None
        self._settled = False

    def _open_devices(self) -> None:
        """Open the device table, with the clsacts and pods that all pinned maps `devices` record."""
        pins = list(self._pins.pinned_maps("devices"))
        pods = served_pods(pins) | bypassing_pods(self._pins.pinned_maps("bypassing"))
        pins.remove(self._pins.maps_of(self._programs.directory)["devices"])  # its content may still change
        self._clsacts |= previous_clsacts(pins)
        owned = None if self._settings.devices else pinned_classifiers(self._pins)
        self._devices = DeviceTable(
            self._maps["devices"],
            self._programs,
            self._clsacts,
            attachments.choose(self._pins.devices, owned),
            self._positions,
        )
        self._xdp = XdpDevices(
            self._maps["xdp_devices"],
            self._programs,
            self._pins.xdp,
            self._settings.xdp,
            self._xdp_reported,
        )
        if pods:
            self._callbacks.pods_bypass(pods)

    def _open_rest(self, opened: contextlib.ExitStack) -> None:
        cookie = netns_cookie.own(self._settings.cgroup_root)
        self._node = NodeEntry(self._maps["node"], self._settings, cookie, self._maps["local_networks"])
        self._node.write()
        pins = self._programs.maps
        proc_root, destroy = self._settings.proc_root, self._settings.destroy_stale_sockets
        note = self._node.note_stale_sockets
        translation = StaleTranslation(pins, str(proc_root), note, self._callbacks.pods_bypass)
        self._stale = StaleSockets(pins, proc_root, destroy, self._callbacks.sockets_counted, translation)
        opened.callback(self._stale.close)
        note = self._node.note_netfilter_flows
        self._collector = FlowCollector(pins, self._settings.timeouts, self._callbacks.pods_bypass, note)
        opened.callback(self._collector.close)
        if self._devices.uses_filters:
            self._watch = FilterWatch(self._devices.is_in_use, self._callbacks.changed)
            opened.callback(self._watch.close)
        if self._settings.socket_lb is SocketLb.ON:
            cgroup_root, report = self._settings.cgroup_root, self._callbacks.namespaces
            opened.callback(PodNamespaces(pins, proc_root, cgroup_root, report).close)
        self._check = PacketCheck(pins, self._devices.attached)
        opened.callback(self._check.close)
        self._readings = Readings(pins)
        opened.callback(self._readings.close)

    def dsr_port(self) -> int:
        """Return the UDP port at which this node accepts tunneled packets, 0 if it accepts none. Only while
        the backend is open."""
        return self._settings.dsr_port if self._node.has_tunnel else 0

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        off = self._settings.socket_lb is SocketLb.OFF
        hooks = () if off else self._programs.hooks
        return entries.render(plans, node, hooks, self._node.tunnel_device, frontend_routes.are_wanted(node))

    def read(self) -> dict[Key, Entry]:
        """Read all entries. If the pins were removed, open again first; then nothing is in force.

        Raises KernelError if that fails. The next call retries.
        """
        with self._converted():
            if self._opened and not self._programs.is_pinned():
                log.warning(PINS_REMOVED, root=self._settings.bpffs_root)
                self._clsacts |= self._devices.clsacts()
                self._close()
            if not self._opened:
                self.open()
            self._attached.reading()
            self._node.repair()
            found = self._read_node()
            if entries.has_loopback(found):
                self._node.note_loopback(True)
            found.update(self._table.read().items())
            return found

    def check(self, expected: Mapping[Key, Entry]) -> Iterator[bool]:
        """The networks, devices and hooks are one step, which takes as long as `generation`."""
        if not self._opened:
            yield False
            return
        with self._converted():
            is_right = self._holds_node(expected)
        yield is_right
        yield from self._table.check()

    def _holds_node(self, expected: Mapping[Key, Entry]) -> bool:
        if not self._programs.is_pinned() or not self._node.holds():
            return False
        return self._read_node() == {
            key: entry for key, entry in expected.items() if not isinstance(key, ServicePortKey)
        }

    def _read_node(self) -> dict[Key, Entry]:
        """Everything but the ServicePorts."""
        found: dict[Key, Entry] = {}
        for key, value in self._maps["local_networks"].items():
            length, address = abi.NETWORK_KEY.unpack(key)
            found[Network(Address(address), length)] = int(_U32.unpack(value)[0])
        for key, _ in self._maps["tunnel_sources"].items():
            length, address = abi.NETWORK_KEY.unpack(key)
            found[TunnelSourceKey(Network(Address(address), length))] = 1
        for key, value in self._maps["pod_namespaces"].items():
            found[NamespaceKey(*_U64.unpack(key))] = NamespaceEntry(*abi.POD_NAMESPACE.unpack(value))
        found.update(source_addresses.read(self._maps).items())
        found.update(self._devices.read().items())
        found.update({HookKey(name): state for name, state in self._programs.hook_states().items()})
        if self._settings.devices:
            found.update(self._routes.read().items())
        return found

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        """Put networks, services, devices and hooks, in this order, so that the maps are complete before a
        packet is translated.

        Services are put and dropped together, since a put may reuse a frontend or the room of a dropped
        service. The programs reject unused ClusterIPs only after that. Hooks, devices and networks are
        dropped last, in this order, when their replacements are in force. Routes need the programs: they are
        put after the devices, and dropped before them.
        """
        with self._converted():
            return self._apply_all(delta)

    def _apply_all(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        changed = [key for keys in (delta.puts, delta.drops) for key in keys]
        services_only = all(isinstance(key, ServicePortKey) for key in changed)
        devices = frozenset(key.ifindex for key in changed if isinstance(key, DeviceKey))
        # A pod's device is gone before its removal is reported.
        others = functools.partial(_without, devices)
        rejected: dict[Key, KernelError] = {}

        def is_own(before: _Attachments, after: _Attachments) -> bool:
            return before.pinned == after.pinned and _differ_by(delta, rejected.keys(), before, after)

        with contextlib.nullcontext() if services_only else self._attached.own_change(others, is_own):
            rejected.update(self._apply(delta))
        self._services_applied = services_only and self._generation is not None
        return rejected

    def maintain(self) -> None:
        """End slow start, and attach the XDP program to devices that have become available. Call it every few
        seconds.

        It is cheap if there is nothing to do. Raises KernelError.
        """
        with self._converted():
            if self._opened:
                self._table.maintain()
                if self._settled:
                    self._xdp.sync(self._devices.written())

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None) -> None:
        self._resets.expect(changed, node)

    def in_force(
        self, rejected: Callable[[], Collection[PlanKey]], holds: Callable[[Collection[Key]], bool]
    ) -> None:
        self._resets.in_force(rejected)

    def free_ports(self) -> None:
        """Let sockets of the node be bound to NodePorts, until everything is read and applied again. Raises
        KernelError.
        """
        detach_all(self._pins, self._settings.cgroup_root, BIND_HOOKS)

    def _apply(self, delta: Delta[Key, Entry]) -> dict[Key, KernelError]:
        if not self._settled:
            self._learn_netfilter_flows()
        rejected: dict[Key, KernelError] = dict(self._put_networks(delta.puts).items())
        puts = {k: cast(ServicePortEntry, e) for k, e in delta.puts.items() if isinstance(k, ServicePortKey)}
        drops = [key for key in delta.drops if isinstance(key, ServicePortKey)]
        is_limited = self._callbacks.repeats and self._settled
        longest = _LONGEST if is_limited else math.inf
        services = self._table.apply(puts, drops, longest)
        rejected.update(services.items())
        rejected.update(self._drop_routes(delta.drops).items())
        attached = self._attach(delta.puts, rejected)
        routes = {
            k: cast(on_link_routes.Path, each) for k, each in delta.puts.items() if isinstance(k, Target)
        }
        rejected.update(self._routes.put(routes).items())
        rejected.update(self._detach(delta.drops))
        for key in delta.drops:
            if isinstance(key, Network):
                self._maps["local_networks"].delete(_network_key(key))
            elif isinstance(key, TunnelSourceKey):
                self._maps["tunnel_sources"].delete(_network_key(key.network))
            elif isinstance(key, NamespaceKey):
                self._maps["pod_namespaces"].delete(_U64.pack(*key))
            elif isinstance(key, SourceKey):
                self._maps[source_addresses.MAP].delete(source_addresses.pack(key))
        if any(isinstance(key, Network) for key in (*delta.puts, *delta.drops)):
            self._node.note_service_cidrs()
        self._settle(rejected, attached)
        if any(isinstance(key, DeviceKey) for key in (*delta.puts, *delta.drops)):
            self._xdp.sync(self._devices.written())
        if any(key.protocol is Protocol.UDP for key in (*puts, *drops)):
            self._stale.look()
        return rejected

    def _drop_routes(self, drops: Collection[Key]) -> dict[Target, KernelError]:
        """An agent without devices has no routes. A previous run with devices may have left some."""
        targets = [key for key in drops if isinstance(key, Target)]
        gone = {key.ifindex for key in drops if isinstance(key, DeviceKey)}
        if gone and not self._settings.devices:
            targets = [target for target, path in self._routes.read().items() if path.ifindex in gone]
        return self._routes.drop(targets)

    def _put_networks(self, puts: Mapping[Key, Entry]) -> dict[Key, KernelError]:
        rejected: dict[Key, KernelError] = {}
        for key, entry in puts.items():
            if isinstance(key, Network):
                map_, packed = "local_networks", _network_key(key)
            elif isinstance(key, SourceKey):
                map_, packed = source_addresses.MAP, source_addresses.pack(key)
            elif isinstance(key, TunnelSourceKey):
                map_, packed = "tunnel_sources", _network_key(key.network)
            elif isinstance(key, NamespaceKey):
                map_, packed = "pod_namespaces", _U64.pack(*key)
            else:
                continue
            if isinstance(entry, NamespaceEntry):
                value = abi.POD_NAMESPACE.pack(*entry)
            else:
                value = entry if isinstance(entry, bytes) else _U32.pack(cast(int, entry))
            try:
                self._maps[map_].update(packed, value)
            except KernelError as failure:
                rejected[key] = failure
        return rejected

    def _attach(self, puts: Mapping[Key, Entry], rejected: dict[Key, KernelError]) -> bool:
        """Attach devices and hooks; return whether anything was attached. Failures are added to `rejected`.

        If programs with maps of other sizes are in force, flows, sockets and clients are migrated.
        """
        if entries.has_loopback(puts):
            self._node.note_loopback(True)
        hooks = [key.name for key in puts if isinstance(key, HookKey)]
        devices = {k: cast(DeviceEntry, e) for k, e in puts.items() if isinstance(k, DeviceKey)}
        rejected.update(self._devices.fill(devices).items())
        devices = {key: entry for key, entry in devices.items() if key not in rejected}
        wanted = frozenset[Key](devices).union(map(HookKey, hooks))
        if wanted and not wanted <= self._unattached:
            self._migration.start()
        rejected.update(self._devices.attach(devices).items())
        failed = self._programs.attach(hooks)
        self._unhooked = first_needed(failed)
        rejected.update({HookKey(name): failure for name, failure in failed.items()})
        self._unattached = wanted & rejected.keys()
        return not wanted <= rejected.keys()

    def _learn_netfilter_flows(self) -> None:
        """Learn connections of another mode, which may have been active until now.

        A failure is logged only: at worst, it breaks an open connection.
        """
        try:
            self._collector.netfilter_flows.learn()
        except KernelError as failure:
            log.error(UNKNOWN_PORTS, reason=failure.message)

    def _detach(self, drops: Collection[Key]) -> dict[Key, KernelError]:
        hooks = [key.name for key in drops if isinstance(key, HookKey)]
        failed = self._programs.detach(hooks) if hooks else {}
        rejected: dict[Key, KernelError] = {HookKey(name): failure for name, failure in failed.items()}
        devices = [key for key in drops if isinstance(key, DeviceKey)]
        rejected |= dict(self._devices.drop(devices).items())
        if entries.has_loopback(set(devices) - rejected.keys()):
            self._node.note_loopback(False)
        return rejected

    def _settle(self, rejected: Collection[Key], attached: bool) -> None:
        """Remove what a previous run left, after the first delta that leaves none of its programs attached.

        The contents of its maps are copied again after each replacement of a program. They are also copied at
        the end, because the last program of that run may have been detached with its device.
        """
        if self._settled:
            return
        # A device that rejects the filter, because of another program's qdisc, has no previous program.
        outdated_devices = any(
            self._devices.has_outdated(key) for key in rejected if isinstance(key, DeviceKey)
        )
        outdated = outdated_devices or any(isinstance(key, HookKey) for key in rejected)
        if attached or not outdated:
            self._migration.copy()
        if not outdated_devices:
            self._migration.finish_flows()
        if outdated:
            return
        self._learn_netfilter_flows()  # connections may have begun since the first call
        self._migration.close()
        self._programs.settle()
        self._node.settle()
        self._settled = True
        self._stale.look()  # endpoints may have changed while no agent ran

    def generation(self) -> Hashable:
        """A value that changes with pins, hooks and filters, but not with the contents of the maps.

        Reading the kernel takes longer than applying a small change. So after a delta of services only, the
        first call returns the previous value.
        """
        after_services = self._services_applied
        self._services_applied = False
        if not after_services:
            with self._converted():
                self._generation = self._attached.value()
        return self._generation

    def _attachments(self) -> "_Attachments":
        if not self._opened or not self._programs.is_pinned():
            return _Attachments(False)
        hooks = frozenset(self._programs.hook_states().items())
        routes = self._routes.read().items() if self._settings.devices else ()
        return _Attachments(True, hooks, frozenset(self._devices.look().items()), frozenset(routes))

    def close(self) -> None:
        """Close everything. Does nothing if it is not open, for example after a `read` that failed to open
        it."""
        self._resets.close()
        self._close()

    def _close(self) -> None:
        opened, lock = self._opened, self._lock
        self._opened = self._lock = None
        if opened:
            opened.close()
        if lock:
            lock.release()

    # For any thread:

    def report(self) -> Report:
        """The collector's last walk counted the flows."""
        found = self._collector.collected()
        usage = {name: TableUse(*use) for name, use in self._table.usage().items()}
        usage["flows"] = TableUse(found.entries, self._sizes.flows)
        usage["half_open_flows"] = TableUse(found.half_open, self._sizes.half_open)
        events = self._readings.counters() | found.events()
        return Report(usage, events, self._readings.traffic())

    def lacking(self) -> KernelError | None:
        """Why a required socket hook has no program. None if each has one."""
        return self._unhooked

    def is_notified(self) -> bool:
        """Whether `Callbacks.changed` is called for changes at the devices."""
        return self._watch is not None and self._watch.is_running()

    def bypassed(self) -> tuple[DeviceSide, ...]:
        """The places where other programs run before the classifiers, or where packets do not reach them."""
        return self._positions.troubles() + self._check.troubles()


def _warn_of_private_mount(root: Path, proc_root: Path) -> None:
    """Log a warning if host processes do not see this bpffs: it then ends with the container."""
    with contextlib.suppress(OSError):
        if not mounts.is_mounted_for(proc_root / "1", root):
            log.warning(
                PRIVATE_BPFFS,
                root=root,
                hint="mount the host's /sys/fs/bpf into the container, with mountPropagation Bidirectional",
            )


def _network_key(network: Network) -> bytes:
    return abi.NETWORK_KEY.pack(network.length, network.address)
