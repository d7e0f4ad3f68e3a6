"""What a mode is to an agent that may serve in any of them, and move from one to another."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol

from ebpfproxy.backends.findings import Finding
from ebpfproxy.backends.interface import Backend
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import ServiceTraffic, SocketCounts
from ebpfproxy.model.device import DeviceSide
from ebpfproxy.plan.service_plan import NodePlan, PlanContext, PlanKey, ServicePortPlan


class Callbacks(NamedTuple):
    """What a backend's own threads tell the agent; for any thread.

    `stale_removed`: how many flows of endpoints that are gone were ended, and how many could not be.
    `sockets_counted`: what became of connected UDP sockets whose endpoint is gone. `pods_bypass`: devices
    whose pods' packets have to be looked at. `flows_looked_at`: tracked flows of this family were searched
    for stale ones; how many were ended, and in how many seconds. `changed`: another program may have changed
    what the backend has in the kernel, so its `generation` is to be looked at soon.
    """

    stale_removed: Callable[[int, int], object]
    pods_bypass: Callable[[frozenset[int]], object]
    flows_looked_at: Callable[[Family, int, float], object] = lambda family, ended, seconds: None
    sockets_counted: Callable[[SocketCounts], object] = lambda counts: None
    changed: Callable[[], object] = lambda: None


def _nothing_used() -> Mapping[str, tuple[int, int]]:
    return {}


def _nothing_counted() -> Mapping[str, int]:
    return {}


def _nothing_lacking() -> KernelError | None:
    return None


def _nothing_carried() -> list[ServiceTraffic]:
    return []


def _nothing_bypassed() -> tuple[DeviceSide, ...]:
    return ()


class SyncHooks(Protocol):
    """What goes along with a backend: it is notified of each sync, and closed after it.

    `opened`: the backend is open, and nothing was synced yet. `expect`: these plans, None for one that
    goes, and this node are synced next. `left_over`: an earlier run had these keys in the kernel, and the
    first sync has removed them; called before its `in_force`. `in_force`: what was expected is in the kernel,
    but for those `rejected`; `holds` says whether it has the entries of all these keys. `restored`: what
    others had changed in the kernel is as it was.
    """

    def opened(self) -> None: ...

    def left_over(self, keys: Collection[Any]) -> None: ...

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None) -> None: ...

    def in_force(self, rejected: Collection[PlanKey], holds: Callable[[Collection[Any]], bool]) -> None: ...

    def restored(self) -> None: ...

    def close(self) -> None: ...


class Parts(NamedTuple):
    """A backend that is not open yet, and what goes with it.

    `usage` (by table: entries in use, and room), `counters`, `traffic` and `bypassed` are for metrics and
    health, from any thread, while the backend is open. `owns_namespace`: there can be one such at a time in
    a network namespace. `lacking`: after a sync that succeeded, why the mode forwards nothing; None where it
    forwards. `is_notified`: whether `Callbacks.changed` is called.
    """

    backend: Backend[Any, Any]
    context: PlanContext
    owns_namespace: bool = True
    usage: Callable[[], Mapping[str, tuple[int, int]]] = _nothing_used
    counters: Callable[[], Mapping[str, int]] = _nothing_counted
    traffic: Callable[[], list[ServiceTraffic]] = _nothing_carried
    beside: SyncHooks | None = None
    bypassed: Callable[[], tuple[DeviceSide, ...]] = _nothing_bypassed
    lacking: Callable[[], KernelError | None] = _nothing_lacking
    is_notified: Callable[[], bool] = lambda: False


class Mode(Protocol):
    """A kernel mechanism, from outside.

    - `probe` tries what it needs of this machine; it changes nothing that traffic could notice.
    - `try_out` does what takes too long for `probe`, at most some seconds, and changes as little. It is for a
      mode that `probe` finds usable.
    - `prepare` gives what serves. Raises KernelError.
    - `remove` takes away all that this mode ever left, be it kube-proxy's; what it was, a line each. With
      `dry_run` it only says so. Connections that need it end. Raises KernelError.
    - `drain` does so where another mode serves: at once all that acts on new connections, and at last what
      continues with those that are open, which may take as long as they last. `translates` says of a family
      whether there are any whose addresses the kernel translates only because of this mode. What was removed,
      and whether something is left to be drained by another call. Raises KernelError.

    `uses_kernel_nat`: while it serves, the kernel continues translating what it has translated so far.
    """

    @property
    def name(self) -> str: ...

    @property
    def uses_kernel_nat(self) -> bool: ...

    def probe(self, config: Config) -> tuple[Finding, ...]: ...

    def try_out(self, config: Config) -> tuple[Finding, ...]: ...

    def prepare(self, config: Config, callbacks: Callbacks) -> Parts: ...

    def remove(self, config: Config, dry_run: bool = False) -> list[str]: ...

    def drain(self, config: Config, translates: Callable[[Family], bool]) -> tuple[list[str], bool]: ...
