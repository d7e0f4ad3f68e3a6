"""What a mode is: `Mode` before it is used, `Backend` while it serves, `Inspection` for readers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from ebpfproxy.backends.delta import Delta
from ebpfproxy.backends.difference import Difference
from ebpfproxy.backends.findings import Finding
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from ebpfproxy.model.address import Family
from ebpfproxy.model.connection import Connection, Translation
from ebpfproxy.model.counters import Report, SocketCounts
from ebpfproxy.model.device import DeviceSide
from ebpfproxy.model.namespace import Namespace
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.balancing import Support
from ebpfproxy.plan.service_plan import NodePlan, PlanContext, PlanKey, ServicePortPlan

K = TypeVar("K")
E = TypeVar("E")

HOUR = 3600.0
"""The interval of full syncs in kube-proxy, in seconds (proxyutil.FullSyncPeriod, pkg/proxy/util)."""


def _ignore(*_: Any) -> None:
    pass


class Callbacks(NamedTuple):
    """What the threads of a backend report to the agent. Each may be called from any thread.

    - `stale_removed(ended, failed)`: how many flows to removed endpoints were ended, and how many could not
      be.
    - `pods_bypass`: interface indexes of the devices of pods whose sockets bypass the hooks. The packet path
      must handle their packets.
    - `flows_looked_at(family, ended, seconds)`: the tracked flows of a family were searched for stale ones.
      Gives how many were ended, and the duration.
    - `sockets_counted`: the results for connected UDP sockets whose endpoint was removed.
    - `connections_reset(reason, reset, failed)`: how many connections were reset, and how many could not be.
    - `endpoints_full(service, family, targets)`: see `ClusterState.full`.
    - `changed`: another program may have changed the backend's objects in the kernel, so the agent should
      check `Backend.generation` soon.
    - `namespaces`: the network namespaces that may be those of pods, sorted by cookie. Called again when they
      change.
    - `repeats`: the agent soon applies again what `apply` postpones (NotYet). Otherwise it must not postpone
      anything.
    """

    stale_removed: Callable[[int, int], object] = _ignore
    pods_bypass: Callable[[frozenset[int]], object] = _ignore
    flows_looked_at: Callable[[Family, int, float], object] = _ignore
    sockets_counted: Callable[[SocketCounts], object] = _ignore
    connections_reset: Callable[[str, int, int], object] = _ignore
    endpoints_full: Callable[[ServicePortName, Family, frozenset[bytes]], object] = _ignore
    changed: Callable[[], object] = _ignore
    namespaces: Callable[[tuple[Namespace, ...]], object] = _ignore
    repeats: bool = False


class Inspection(ABC, Generic[K, E]):
    """A mode's state in the kernel as entries by key, opened to be read. Its methods change nothing
    there; those that `Backend` adds do.

    Unless stated otherwise, a method raises KernelError. Those that are not abstract suit a mode that has
    nothing of the kind.
    """

    is_live: ClassVar[bool] = True
    """It reads the kernel, not a saved dump."""
    context: PlanContext
    """The options on which plans for the mode depend. Set by `Mode.serve` and `Mode.inspect`."""

    @abstractmethod
    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[K, E]:
        """Convert plans into entries. It is pure, and each entry depends on one plan alone. If several plans
        render the same key, their entries are equal."""

    @abstractmethod
    def read(self) -> dict[K, E]:
        """Return the entries that the kernel actually holds."""

    @abstractmethod
    def close(self) -> None:
        """Close file descriptors. Traffic continues."""

    def shown(self, key: K, entry: Any) -> Any:
        """Return an entry in the form for readers. Entries that must not differ are equal."""
        return entry

    def further(self) -> list[Difference]:
        """Return the differences that no entry shows, as of the last `read`."""
        return []

    def bypassing(self) -> frozenset[int]:
        """See `ClusterState.bypassing`, as the mode recorded it in the kernel."""
        return frozenset()

    def namespaces(self) -> tuple[Namespace, ...]:
        """See `ClusterState.namespaces`, as they are now."""
        return ()

    def served_devices(self) -> frozenset[int]:
        """Return the ifindexes of loopback and of pods' devices, if they have programs. They may have them
        only because they were needed before."""
        return frozenset()

    def endpoint_of(self, connection: Connection) -> Translation | None:
        """Return where the kernel sends an open connection, as of now. None if it does not translate it. It
        does not read all connections."""
        return None


class Backend(Inspection[K, E]):
    """A mode that serves. Methods run on the control thread, unless stated otherwise."""

    name: str
    reread_seconds: float = 0.0
    """After this time, everything must be read although `check` found no difference. 0: instead of each
    check."""
    owns_namespace: bool = True
    """A network namespace can have only one such backend at a time."""
    binds_sockets: ClassVar[bool] = False
    """It binds sockets to frontends. They end with the agent."""
    ends_with_agent: ClassVar[bool] = False
    """It serves with nothing else than these sockets."""

    @abstractmethod
    def open(self) -> None:
        """Prepare the kernel and take over the state of the previous run. If that state can continue to
        serve, this does not change traffic. After a failure, `close` must be called."""

    @abstractmethod
    def apply(self, delta: Delta[K, E]) -> Mapping[K, KernelError]:
        """Write a delta to the kernel. Puts take effect before drops.

        Return what the kernel rejected, by key; everything else is in force. Of a rejected put, a part may be
        in force. If it raises an error instead, the state is unknown and the caller must read the kernel
        back."""

    @abstractmethod
    def generation(self) -> Hashable:
        """Return a value that changes when any program, including this one, changes the backend's objects in
        the kernel.

        A change by another program since the last `read` also shows after an `apply`, as yet another value.
        It takes a few milliseconds at any size, so it is called every 2 s. If it changed although the agent
        wrote nothing, everything is read and compared. It may change without need, and it need not notice
        counters."""

    def check(self, expected: Mapping[K, E]) -> Iterator[bool]:
        """Compare the kernel with `expected`, the entries of the last `read` and all later changes, which is
        a live view. Yield after each step of at most a few milliseconds whether it found no difference.

        `apply` may be called between the steps; a `read` ends the check. It may leave out what `generation`
        notices: without steps, that is everything."""
        return iter(())

    # What accompanies the syncs:

    def opened(self) -> None:
        """It is open to serve, and nothing has been synced yet."""

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None) -> None:
        """The next sync applies these plans (None for a plan that is removed) and this node, if not None."""

    def left_over(self, keys: Collection[K]) -> None:
        """The first sync removed these keys, which a previous run had left. Called before `in_force`."""

    def in_force(
        self, rejected: Callable[[], Collection[PlanKey]], holds: Callable[[Collection[K]], bool]
    ) -> None:
        """The expected plans are in the kernel, except those that `rejected` returns. `holds(keys)` returns
        whether the kernel has the entries of all these keys."""

    def restored(self) -> None:
        """Changes that other programs made in the kernel were reverted."""

    def maintain(self) -> None:
        """Adapt tables to their use. Called every few seconds while in sync."""

    def outdated(self, plans: Collection[PlanKey]) -> Collection[PlanKey]:
        """Return which of the current plans would be rendered differently now, since they depend on more than
        plans. Called after `maintain`."""
        return ()

    def free_ports(self) -> None:
        """Another mode, which binds sockets, is about to start: from now on, sockets of the node may be bound
        to NodePorts. A sync that reads everything reverts this."""

    # Any thread may call these while it is open:

    def report(self) -> Report:
        """Return what metrics show. Raises EbpfProxyError."""
        return Report()

    def bypassed(self) -> tuple[DeviceSide, ...]:
        """Return the device sides where another program runs first, or that packets pass without the mode."""
        return ()

    def lacking(self) -> KernelError | None:
        """Return why the mode forwards nothing although a sync has succeeded, None if it forwards."""
        return None

    def is_notified(self) -> bool:
        """Return whether it calls `Callbacks.changed`."""
        return False

    def dsr_port(self) -> int:
        """Return the UDP port at which this node accepts tunneled packets (direct server return) after a
        successful sync, 0 if it accepts none."""
        return 0


class Mode(ABC):
    """A kernel mechanism before it is used: whether it can be, and what it left.

    Methods raise KernelError.
    """

    name: str
    uses_kernel_nat: bool
    """While this mode serves, the kernel continues to translate the connections that it has translated so
    far."""
    balancing: Support
    """What the mode honors of the load balancing that a Service requests."""

    @abstractmethod
    def probe(self, config: Config) -> tuple[Finding, ...]:
        """Return whether the machine has what the mode requires. It changes nothing that traffic could
        notice."""

    def try_out(self, config: Config) -> tuple[Finding, ...]:
        """Do the checks that take too long for `probe`, up to some seconds. It also changes nothing that
        traffic could notice. Call it only if `probe` found the mode usable."""
        return ()

    @abstractmethod
    def serve(self, config: Config, callbacks: Callbacks) -> Backend[Any, Any]:
        """Return the backend that serves. It is not open yet."""

    @abstractmethod
    def inspect(self, config: Config) -> Inspection[Any, Any]:
        """Open what the mode has in the kernel, only to be read. Raises NotFound if the mode never served
        here and leaves nothing to compare."""

    @abstractmethod
    def remove(self, config: Config, dry_run: bool = False, beside_kube_proxy: bool = False) -> list[str]:
        """Remove everything that this mode ever left, including kube-proxy's objects, and return one line for
        each. With `dry_run` only return the lines. Connections that depend on the mode end."""

    @abstractmethod
    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]:
        """Do the same as `remove` while another mode serves, in several calls.

        The first call removes everything that affects new connections. The last one removes what open
        connections need, which may take as long as they last. `translates(family)` returns whether there are
        connections whose addresses the kernel translates only because of this mode. Return the removed
        objects, and whether another call is required."""
