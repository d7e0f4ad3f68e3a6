"""One mode at work: its backend, and the proxier that keeps that in step."""

from collections.abc import Callable, Mapping
from typing import Any

from ebpfproxy.agent.reconciler import Reconciler, SyncResult
from ebpfproxy.backends.mode import Callbacks, Mode
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device_side import DeviceSide
from ebpfproxy.model.traffic import ServiceTraffic
from ebpfproxy.plan.service_plan import NodePlan

_HOLDS = SyncResult(put=0, dropped=0, rejected=0, drifted=0)


class ActiveMode:
    """From `open` to `close` the mode is at work. `proxier` is for the thread that owns the state."""

    def __init__(self, mode: Mode, config: Config, callbacks: Callbacks) -> None:
        """Raises KernelError where what it needs is not to be found."""
        self.mode = mode
        self._parts = mode.prepare(config, callbacks)
        self.proxier: Reconciler[Any, Any] = Reconciler(self._parts.backend, self._parts.context)
        self._opened = False
        self._reported_node: NodePlan | None = None

    @property
    def owns_namespace(self) -> bool:
        """Whether there can be one such at a time in a network namespace."""
        return self._parts.owns_namespace

    @property
    def name(self) -> str:
        return self.mode.name

    def open(self) -> None:
        """Raises KernelError."""
        self._parts.backend.open()
        self._opened = True
        if self._parts.sync_hooks:
            self._parts.sync_hooks.opened()

    def sync(self, verify: bool) -> SyncResult:
        """As `Reconciler.sync`, with what goes along with a sync that succeeded."""
        hooks = self._parts.sync_hooks
        if hooks:
            node = self.proxier.node_plan
            hooks.expect(self.proxier.take_changed(), node if node != self._reported_node else None)
            self._reported_node = node
        done = self.proxier.sync(verify)
        if hooks:
            left = self.proxier.take_left_over()
            if left:
                hooks.left_over(left)
            hooks.in_force(self.proxier.rejected(), self.proxier.holds)
            if done.drifted:
                hooks.restored()
        return done

    def plan_all(self, state: ClusterState) -> None:
        """Have the next sync bring all of the state into the kernel."""
        self.proxier.plan(state, frozenset(state.services), node_changed=True, host_changed=True)

    def lacking(self) -> KernelError | None:
        """After a sync that succeeded: why the mode forwards nothing all the same; None where it forwards."""
        return self._parts.lacking()

    def is_notified(self) -> bool:
        """See `Parts`."""
        return self._parts.is_notified()

    def take_over(self, state_now: Callable[[], ClusterState]) -> SyncResult:
        """Open it, bring all of the state into the kernel, and see that it is there. The state is asked for
        once it is open: what it finds of a previous run may be a part of it.

        Raises KernelError; then the caller closes it, and removes what it left.
        """
        self.open()
        self.plan_all(state_now())
        done = self.sync(verify=True)
        held = self.sync(verify=True)
        if held._replace(rejected=0) != _HOLDS:
            raise Rejected(f"mode {self.name}: what was programmed did not last: {held}")
        return done

    def close(self) -> None:
        """Nothing happens where it is not open."""
        if self._opened:
            self._opened = False
            self._parts.backend.close()
            if self._parts.sync_hooks:
                self._parts.sync_hooks.close()

    # For any thread:

    def usage(self) -> Mapping[str, tuple[int, int]]:
        """By table: entries in use, and room; empty where nothing is counted, or it is not open."""
        return self._parts.usage() if self._opened else {}

    def counters(self) -> Mapping[str, int]:
        return self._parts.counters() if self._opened else {}

    def traffic(self) -> list[ServiceTraffic]:
        return self._parts.traffic() if self._opened else []

    def bypassed(self) -> tuple[DeviceSide, ...]:
        """Where programs of others run first, or packets do not reach the mode's own."""
        return self._parts.bypassed() if self._opened else ()
