"""A mode in use: its backend, and the reconciler that keeps the backend in sync."""

import sys
from collections.abc import Callable
from typing import Any

from ebpfproxy.agent.reconciler import Reconciler, SyncResult
from ebpfproxy.backends.interface import Callbacks, Mode
from ebpfproxy.config import Config
from ebpfproxy.errors import Rejected
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.counters import Report
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
        self.backend = mode.serve(config, callbacks)
        self.reconciler: Reconciler[Any, Any] = Reconciler(self.backend, self.backend.context, mode.balancing)
        self._opened = False
        self._reported_node: NodePlan | None = None

    @property
    def name(self) -> str:
        """The name of the mode, as in --proxy-mode."""
        return self.mode.name

    def open(self) -> None:
        """Open the backend. Raises KernelError; nothing of the backend is then open."""
        try:
            self.backend.open()
        except BaseException:
            self.backend.close()
            raise
        self._opened = True
        self.backend.opened()

    def sync(self, verify: bool, retries: int = sys.maxsize) -> SyncResult:
        """Call `Reconciler.sync`, and tell the backend before and after it. Raises KernelError."""
        if verify or self.reconciler.must_read:
            self.reconciler.render()
        node = self.reconciler.node_plan
        self.backend.expect(self.reconciler.take_changed(), node if node != self._reported_node else None)
        self._reported_node = node
        result = self.reconciler.sync(verify, retries)
        leftovers = self.reconciler.take_leftovers()
        if leftovers:
            self.backend.left_over(leftovers)
        self.backend.in_force(self.reconciler.rejected, self.reconciler.holds)
        if result.drifted:
            self.backend.restored()
        return result

    def plan_all(self, state: ClusterState) -> None:
        """Plan the complete state, so that the next sync applies it."""
        self.reconciler.plan(state, frozenset(state.services), node_changed=True, host_changed=True)

    def maintain(self) -> bool:
        """Adapt tables to their use, and render plans again that depend on what has changed. Return whether
        there were any: a sync is due then. Call it every few seconds while in sync. Raises KernelError.
        """
        self.backend.maintain()
        outdated = self.backend.outdated(self.reconciler.plans.keys())
        self.reconciler.render_again(outdated)
        return bool(outdated)

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
        """Close the backend. Does nothing if the mode is not open."""
        if self._opened:
            self._opened = False
            self.backend.close()

    @property
    def dsr_port(self) -> int:
        """See `Backend.dsr_port`; 0 if the mode is not open."""
        return self.backend.dsr_port() if self._opened else 0

    # Any thread may call the methods below.

    def report(self) -> Report:
        """See `Backend.report`; empty if the mode is not open."""
        return self.backend.report() if self._opened else Report()

    def bypassed(self) -> tuple[DeviceSide, ...]:
        """See `Backend.bypassed`; empty if the mode is not open."""
        return self.backend.bypassed() if self._opened else ()
