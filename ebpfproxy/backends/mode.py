"""The interface of a mode: what the agent needs to serve in it, to clean it up and to switch modes."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from ebpfproxy.backends.difference import Difference
from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Backend
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.model.address import Family
from ebpfproxy.model.connection import Connection, Translation
from ebpfproxy.model.counters import ServiceTraffic, SocketCounts, SyncCounts
from ebpfproxy.model.device import DeviceSide
from ebpfproxy.model.namespace import Namespace
from ebpfproxy.plan.balancing import Support
from ebpfproxy.plan.service_plan import NodePlan, PlanContext, PlanKey, ServicePortPlan


class Callbacks(NamedTuple):
    """What the threads of a backend report to the agent. Each may be called from any thread.

    - `stale_removed(ended, failed)`: how many flows to removed endpoints were ended, and how many could not
      be.
    - `sockets_counted`: the results for connected UDP sockets whose endpoint was removed.
    - `pods_bypass`: interface indexes of the devices of pods whose sockets bypass the hooks. The packet path
      must handle their packets.
    - `flows_looked_at(family, ended, seconds)`: the tracked flows of a family were searched for stale ones.
      Gives how many were ended, and the duration.
    - `map_grown`: the BPF map of this name was enlarged.
    - `namespaces`: the network namespaces that may be those of pods, sorted by cookie. Called again when they
      change.
    - `changed`: another program may have changed the backend's objects in the kernel, so the agent should
      check `Backend.generation` soon.
    - `retry`: the backend can take now what it has postponed (`KernelError.postponed`). None: it must not
      postpone anything.
    """

    stale_removed: Callable[[int, int], object]
    pods_bypass: Callable[[frozenset[int]], object]
    flows_looked_at: Callable[[Family, int, float], object] = lambda family, ended, seconds: None
    sockets_counted: Callable[[SocketCounts], object] = lambda counts: None
    changed: Callable[[], object] = lambda: None
    map_grown: Callable[[str], object] = lambda name: None
    namespaces: Callable[[tuple[Namespace, ...]], object] = lambda found: None
    retry: Callable[[], object] | None = None


def _no_usage() -> Mapping[str, tuple[int, int]]:
    return {}


def _no_counters() -> Mapping[str, int]:
    return {}


def _nothing_missing() -> KernelError | None:
    return None


def _no_traffic() -> list[ServiceTraffic]:
    return []


def _no_sync_counts() -> tuple[SyncCounts, ...]:
    return ()


def _no_bypassed_devices() -> tuple[DeviceSide, ...]:
    return ()


def _none_outdated(plans: Collection[PlanKey]) -> Collection[PlanKey]:
    return ()


class SyncHooks(Protocol):
    """Hooks of a mode around each sync; `opened` is called first, `close` last.

    - `opened`: the backend is open and nothing has been synced yet.
    - `expect`: the next sync applies these plans (None for a plan that is removed) and this node.
    - `left_over`: the first sync removed these keys, which a previous run had left in the kernel. Called
      before `in_force`.
    - `in_force`: the expected plans are in the kernel, except those `rejected`. `holds(keys)` returns whether
      the kernel has the entries of all these keys.
    - `restored`: changes that other programs made in the kernel were reverted.
    """

    def opened(self) -> None: ...

    def left_over(self, keys: Collection[Any]) -> None: ...

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None) -> None: ...

    def in_force(self, rejected: Collection[PlanKey], holds: Callable[[Collection[Any]], bool]) -> None: ...

    def restored(self) -> None: ...

    def close(self) -> None: ...


class Parts(NamedTuple):
    """A backend that is not open yet, and the parts of the mode that accompany it.

    - `usage` (entries in use and capacity, by table), `counters`, `traffic`, `sync_counts` and `bypassed`:
      for metrics and health checks. They may be called from any thread while the backend is open.
    - `owns_namespace`: a network namespace can have only one such mode at a time.
    - `lacking`: after a successful sync, the reason why the mode forwards nothing; None if it forwards.
    - `is_notified`: whether the backend calls `Callbacks.changed`.
    - `binds_sockets`: the mode serves with sockets that are bound to the frontends.
    - `free_ports`: another mode, which binds sockets, is about to start. From now on, sockets of the node may
      be bound to NodePorts. A sync that reads everything reverts this. Raises KernelError.
    - `dsr_port`: after a successful sync, the UDP port at which this node accepts tunneled packets (direct
      server return), 0 if it accepts none.
    - `maintain`: adapts tables to their use. Called every few seconds while the mode is in sync, by the
      thread of the backend. Raises KernelError.
    - `outdated(plans)`: which of the current plans would be rendered differently now, since they depend on
      more than plans. Called after `maintain`.
    """

    backend: Backend[Any, Any]
    context: PlanContext
    owns_namespace: bool = True
    usage: Callable[[], Mapping[str, tuple[int, int]]] = _no_usage
    counters: Callable[[], Mapping[str, int]] = _no_counters
    traffic: Callable[[], list[ServiceTraffic]] = _no_traffic
    sync_counts: Callable[[], Collection[SyncCounts]] = _no_sync_counts
    sync_hooks: SyncHooks | None = None
    bypassed: Callable[[], tuple[DeviceSide, ...]] = _no_bypassed_devices
    lacking: Callable[[], KernelError | None] = _nothing_missing
    is_notified: Callable[[], bool] = lambda: False
    maintain: Callable[[], object] = lambda: None
    outdated: Callable[[Collection[PlanKey]], Collection[PlanKey]] = _none_outdated
    binds_sockets: bool = False
    free_ports: Callable[[], object] = lambda: None
    dsr_port: Callable[[], int] = lambda: 0


class Inspection(Protocol):
    """A mode's state in the kernel, opened only to be read: no method changes the kernel.

    - `context`: the options on which plans for the mode depend.
    - `render` and `read`: as in `Backend`. Entries that must not differ are equal.
    - `shown`: an entry in the form for readers.
    - `bypassing`: as in `ClusterState`, as the mode recorded it in the kernel.
    - `namespaces`: as in `ClusterState`, as they are now.
    - `served_devices`: the ifindexes of loopback and of pods' devices, if they have programs. They may have
      them only because they were needed before.
    - `further`: the differences that no entry shows, as of the last `read`.
    - `endpoint_of`: where the kernel sends an open connection, as of now. None if it does not translate it.
      It does not read all connections.
    - `close` closes file descriptors.
    """

    context: PlanContext

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> Mapping[Any, Any]: ...

    def read(self) -> Mapping[Any, Any]: ...

    def shown(self, key: Any, entry: Any) -> Any: ...

    def bypassing(self) -> frozenset[int]: ...

    def namespaces(self) -> tuple[Namespace, ...]: ...

    def served_devices(self) -> frozenset[int]: ...

    def further(self) -> list[Difference]: ...

    def endpoint_of(self, connection: Connection) -> Translation | None: ...

    def close(self) -> None: ...


class BackendInspection:
    """The `Inspection` of a mode whose backend reads the kernel without changing it once it is open."""

    def __init__(
        self,
        backend: Backend[Any, Any],
        context: PlanContext,
        shown: Callable[[Any, Any], Any] = lambda key, entry: entry,
        further: Callable[[], list[Difference]] = list,
    ) -> None:
        """`backend` is open."""
        self.context = context
        self._backend = backend
        self._shown = shown
        self._further = further

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> Mapping[Any, Any]:
        return self._backend.render(plans, node)

    def read(self) -> Mapping[Any, Any]:
        return self._backend.read()

    def shown(self, key: Any, entry: Any) -> Any:
        return self._shown(key, entry)

    def bypassing(self) -> frozenset[int]:
        return frozenset()

    def namespaces(self) -> tuple[Namespace, ...]:
        return ()

    def served_devices(self) -> frozenset[int]:
        return frozenset()

    def further(self) -> list[Difference]:
        return self._further()

    def endpoint_of(self, connection: Connection) -> Translation | None:
        """As conntrack has it. The modes with kernel NAT have no other record."""
        flow = conntrack.find(connection)
        endpoint = (flow.reply_source, flow.reply_source_port) if flow else connection.frontend
        return Translation(endpoint) if endpoint != connection.frontend else None

    def close(self) -> None:
        self._backend.close()


class Mode(Protocol):
    """A kernel mechanism as the agent sees it.

    - `probe` checks whether the machine has what the mode requires. It changes nothing that traffic could
      notice.
    - `try_out` does the checks that take too long for `probe`, up to some seconds. It also changes nothing
      that traffic could notice. Call it only if `probe` found the mode usable.
    - `prepare` returns the parts that serve. Raises KernelError.
    - `inspect` opens what the mode has in the kernel, without changing it. Raises KernelError, for example
      NotFound if the mode never served here and leaves nothing to compare.
    - `remove` removes everything that this mode ever left, including kube-proxy's objects, and returns one
      line for each. With `dry_run` it only returns the lines. Connections that depend on the mode end. Raises
      KernelError.
    - `drain` does the same while another mode serves, in several calls. The first call removes everything
      that affects new connections. The last one removes what open connections need, which may take as long as
      they last. `translates(family)` returns whether there are connections whose addresses the kernel
      translates only because of this mode. Returns the removed objects, and whether another call is required.
      Raises KernelError.

    `balancing`: what the mode honors of the load balancing that a Service requests.

    `uses_kernel_nat`: while this mode serves, the kernel continues to translate the connections that it has
    translated so far.
    """

    @property
    def name(self) -> str: ...

    @property
    def uses_kernel_nat(self) -> bool: ...

    @property
    def balancing(self) -> Support: ...

    def probe(self, config: Config) -> tuple[Finding, ...]: ...

    def try_out(self, config: Config) -> tuple[Finding, ...]: ...

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts: ...

    def inspect(self, config: Config) -> Inspection: ...

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]: ...

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]: ...


class DeferredMode:
    """A mode whose package is imported at its first use, so that a start imports only the modes it probes.

    `load` imports the package and returns the mode. Any thread may use it.
    """

    def __init__(self, name: str, uses_kernel_nat: bool, load: Callable[[], Mode]) -> None:
        self.name, self.uses_kernel_nat = name, uses_kernel_nat
        self._mode = functools.cache(load)

    @property
    def balancing(self) -> Support:
        return self._mode().balancing

    def probe(self, config: Config) -> tuple[Finding, ...]:
        return self._mode().probe(config)

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        return self._mode().try_out(config)

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts:
        return self._mode().prepare(config, callbacks)

    def inspect(self, config: Config) -> Inspection:
        return self._mode().inspect(config)

    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        return self._mode().remove(config, dry_run, beside_kube_proxy)

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        return self._mode().drain(config, translates)
