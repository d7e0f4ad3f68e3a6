"""The edge: what the control thread of an edge does besides syncing the kernel.

It announces the addresses that it serves, has nodes checked, and drains before its end. The state belongs to
the control thread, as all state of the agent.
"""

from collections.abc import Callable

from ebpfproxy.agent.edge_view import EdgeView
from ebpfproxy.agent.vip_device import VipDevice
from ebpfproxy.api.event import ChecksChanged, Event
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.http.node_checker import NodeChecker
from ebpfproxy.log import Logger
from ebpfproxy.model.cluster import ClusterState

log = Logger(__name__)

DRAINING = "Draining, all addresses are withdrawn"
"""The edge received SIGTERM or SIGINT. It forwards for `seconds` more, then ends. Another signal ends it at
once."""
NOT_WITHDRAWN = "Cannot withdraw the addresses"
"""The routing daemon may continue to announce them. The edge drains nevertheless."""


class Edge:
    """`put` receives the events of `checker`, in its thread."""

    def __init__(self, config: Config, put: Callable[[Event], object], metrics: Metrics) -> None:
        self.checker = NodeChecker(config.edge_check_interval, lambda down: put(ChecksChanged(down)))
        """Runs in a thread of its own."""
        self._drain_seconds = config.edge_drain_seconds
        self._metrics = metrics
        self._device = VipDevice()
        self._checked: object = None  # the view and version of the checks that `checker` has
        self._applied: object = None  # the addresses and the state of the machine at the last `announce`
        self._drain_ends: float | None = None

    def planned(self, view: EdgeView, state: ClusterState, *, peers_changed: bool) -> None:
        """Have the nodes checked that the current plans use. A Node without an address is not checked."""
        if not peers_changed and self._checked == (view, view.version):
            return
        self._checked = view, view.version
        targets = {}
        for check in view.checks:
            node = state.peers.get(check.node)
            if node and node.addresses:
                targets[check] = node.addresses[0]
        self.checker.set_targets(targets)

    def announce(self, view: EdgeView, state: ClusterState) -> None:
        """Announce the addresses of the plans in force, none while draining. Raises KernelError."""
        wanted = frozenset(view.vips) if self._drain_ends is None else frozenset()
        # Another program may have changed the device, which the state of the machine shows.
        current = wanted, state.local_networks, state.devices
        if self._applied == current:
            return
        self._applied = None
        self._device.apply(wanted)
        self._applied = current
        self._metrics.announced(len(wanted))

    def drain(self, now: float) -> bool:
        """Withdraw all addresses. Return whether there were any. `now`: seconds of the monotonic clock."""
        try:
            withdrawn = self._device.apply(frozenset())
        except KernelError as failure:
            log.error(NOT_WITHDRAWN, reason=failure.message, hint=failure.hint)
            withdrawn = 1
        self._metrics.announced(0)
        self._drain_ends = now + self._drain_seconds
        if withdrawn:
            log.info(DRAINING, seconds=self._drain_seconds)
        return bool(withdrawn)

    def drain_wait(self, now: float) -> float | None:
        """Return the seconds until the end of the drain, 0 if it is over; None while not draining."""
        return None if self._drain_ends is None else max(0.0, self._drain_ends - now)
