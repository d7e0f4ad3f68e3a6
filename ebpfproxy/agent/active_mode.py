"""A mode in use: its backend, the reconciler that keeps the backend in sync, and its sync hooks."""

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ebpfproxy.agent.reconciler import Reconciler, SyncResult
from ebpfproxy.backends.mode import Callbacks, Mode
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.counters import ServiceTraffic, SyncCounts
from ebpfproxy.model.device import DeviceSide
from ebpfproxy.plan.service_plan import NodePlan

_NO_CHANGE = SyncResult(put=0, dropped=0, rejected=0, drifted=0)


class Unsettled(Rejected):
    """A second sync of a mode found changed entries, for example because a device was renamed meanwhile."""


class ActiveMode:
    """A mode that is in use from `open` to `close`. Only the control thread may use `reconciler`."""

    def __init__(self, mode: Mode, config: Config, callbacks: Callbacks) -> None:
        """Prepare the mode. Raises KernelError if something that it needs is missing."""
        self.mode = mode
        self._parts = mode.prepare(config, callbacks)
        self.reconciler: Reconciler[Any, Any] = Reconciler(
            self._parts.backend, self._parts.context, mode.balancing
        )
        self._opened = False
        self._reported_node: NodePlan | None = None

    @property
    def owns_namespace(self) -> bool:
        """Whether a network namespace can have only one agent with such a mode at a time."""
        return self._parts.owns_namespace

    @property
    def name(self) -> str:
        """The name of the mode, as in --proxy-mode."""
        return self.mode.name

    def open(self) -> None:
        """Open the backend. Raises KernelError; nothing of the backend is then open."""
        try:
            self._parts.backend.open()
        except BaseException:
            self._parts.backend.close()
            raise
        self._opened = True
        if self._parts.sync_hooks:
            self._parts.sync_hooks.opened()

    def sync(self, verify: bool, retries: int = sys.maxsize) -> SyncResult:
        """Call `Reconciler.sync`, and the sync hooks before and after it. Raises KernelError."""
        hooks = self._parts.sync_hooks
        if hooks:
            node = self.reconciler.node_plan
            hooks.expect(self.reconciler.take_changed(), node if node != self._reported_node else None)
            self._reported_node = node
        result = self.reconciler.sync(verify, retries)
        if hooks:
            leftovers = self.reconciler.take_leftovers()
            if leftovers:
                hooks.left_over(leftovers)
            hooks.in_force(self.reconciler.rejected(), self.reconciler.holds)
            if result.drifted:
                hooks.restored()
        return result

    @property
    def reread_seconds(self) -> float:
        """See `Backend.reread_seconds`."""
        return self._parts.backend.reread_seconds

    def plan_all(self, state: ClusterState) -> None:
        """Plan the complete state, so that the next sync applies it."""
        self.reconciler.plan(state, frozenset(state.services), node_changed=True, host_changed=True)

    def lacking(self) -> KernelError | None:
        """Return why the mode forwards nothing although a sync has succeeded, None if it forwards."""
        return self._parts.lacking()

    def is_notified(self) -> bool:
        """Return whether the backend reports changes by other programs (`Callbacks.changed`)."""
        return self._parts.is_notified()

    def maintain(self) -> bool:
        """Adapt tables to their use, and render plans again that depend on what has changed. Return whether
        there were any: a sync is due then. Call it every few seconds while in sync. Raises KernelError.
        """
        self._parts.maintain()
        outdated = self._parts.outdated(self.reconciler.plans.keys())
        self.reconciler.render_again(outdated)
        return bool(outdated)

    @property
    def binds_sockets(self) -> bool:
        """Whether the mode serves with sockets that are bound to the frontends."""
        return self._parts.binds_sockets

    def free_ports(self) -> None:
        """Let sockets of the node be bound to NodePorts, for another mode. Raises KernelError."""
        self._parts.free_ports()

    def take_over(self, state_now: Callable[[], ClusterState]) -> SyncResult:
        """Open the mode, apply the complete state, and verify that it is in the kernel.

        `state_now` is called after the mode is open, since the state may include what the mode finds of a
        previous run. Raises KernelError; the caller then closes the mode and removes its objects. Raises
        Unsettled if the node may have changed meanwhile.
        """
        self.open()
        self.plan_all(state_now())
        result = self.sync(verify=True)
        second = self.sync(verify=True)
        if second._replace(rejected=0) != _NO_CHANGE:
            raise Unsettled(f"cannot use mode {self.name}: a second sync found changed entries: {second}")
        return result

    def close(self) -> None:
        """Close the backend and the hooks. Does nothing if the mode is not open."""
        if self._opened:
            self._opened = False
            self._parts.backend.close()
            if self._parts.sync_hooks:
                self._parts.sync_hooks.close()

    @property
    def dsr_port(self) -> int:
        """See `Parts.dsr_port`; 0 if the mode is not open."""
        return self._parts.dsr_port() if self._opened else 0

    # Any thread may call the methods below.

    def usage(self) -> Mapping[str, tuple[int, int]]:
        """Return entries and capacity by map. Empty if the mode counts nothing or is not open."""
        return self._parts.usage() if self._opened else {}

    def counters(self) -> Mapping[str, int]:
        """Return datapath events by reason. Empty if the mode is not open."""
        return self._parts.counters() if self._opened else {}

    def traffic(self) -> list[ServiceTraffic]:
        """Return the traffic of each ServicePort. Empty if the mode is not open."""
        return self._parts.traffic() if self._opened else []

    def sync_counts(self) -> Collection[SyncCounts]:
        """Return what only this mode counts in its syncs, by family. Empty if the mode is not open."""
        return self._parts.sync_counts() if self._opened else ()

    def bypassed(self) -> tuple[DeviceSide, ...]:
        """Return the device sides where another program runs first, or that packets pass without the mode."""
        return self._parts.bypassed() if self._opened else ()
