"""The daemon: builds the parts of the agent, and runs the control thread until a signal or a failed source.

The control thread, which calls `run`, owns all state. Sources (`sources.py`), threads of the backend and
signal handlers only put items into its inbox.
"""

import contextlib
import dataclasses
import gc
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ebpfproxy.agent.mode_switch import ModeSwitcher
from ebpfproxy.agent.pacing import CheckTimer, Pacer
from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.agent.sources import Died, Item, Notified, Received, Reload, Sources, Stop
from ebpfproxy.api.event import (
    NODE,
    Invalid,
    NodeChanged,
    PodsBypass,
    Synced,
)
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.backends.mode import Callbacks
from ebpfproxy.config import Config
from ebpfproxy.config.derived import least_interval
from ebpfproxy.config.settings import OF_MODES
from ebpfproxy.errors import ConfigError, EbpfProxyError, KernelError
from ebpfproxy.http.health_check_node_port import ServiceHealthServer
from ebpfproxy.http.healthz import HealthServer, ProxierHealth
from ebpfproxy.http.metrics import MapUse, Metrics, MetricsServer, State
from ebpfproxy.log import Logger
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.counters import ServiceTraffic
from ebpfproxy.model.device import DeviceSide
from ebpfproxy.plan.health_check_node_port import health_check_addresses

log = Logger(__name__)

STARTING = "Starting"
"""The agent starts. `node` is the name of the node, `mode` the first mode to open."""
NODE_MISSING = "Cannot read the Node object, continuing without it"
"""Topology hints, the Node's addresses and its readiness apply once it can be read."""
SYNCED = "Synced services"
"""All changes so far are in the kernel, except `rejected` entries."""
AT_NEXT_START = "Changed options take effect at the next start"
"""A running agent applies only changes of the mode, and with it of the options of its section."""
OOM_SCORE = "Cannot set the OOM score adjustment"
"""The OOM killer may end the agent as early as any process of its size."""
SYNC_FAILED = "Sync failed, retrying"
"""No change is lost. Everything is compared and applied again after 1 s, then twice that, up to 30 s."""
CONFIG_REJECTED = "Cannot apply the changed configuration, keeping the current one"
"""`reason` names the flag or field."""
ENDING = "Ending, the kernel continues to forward"
"""The agent received SIGTERM or SIGINT."""

_BATCH = 10_000  # maximum number of items between two checks whether a sync is due
_NODE_TIMEOUT = 65.0  # seconds that the first sync waits for the Node: longer than a reflector pauses


def run(config: Config, reread: Callable[[], Config] | None = None, content: bytes | None = None) -> None:
    """Run the agent until SIGTERM or SIGINT; the kernel continues to forward. Raises EbpfProxyError.

    `reread` returns the current configuration. It is called at SIGHUP and when the file has changed.
    `content` is that of the file from which `config` was made, so that earlier changes of the file are found.
    """
    _adjust_oom_score(config.oom_score_adj)
    gc.disable()  # the first state has no garbage, and collection would take longer than parsing
    agent = _Agent(config, reread or (lambda: config), content)
    try:
        agent.open()
        agent.loop()
    finally:
        agent.close()


class _Agent:
    """The parts of the agent, and the loop of the control thread."""

    def __init__(self, config: Config, reread: Callable[[], Config], content: bytes | None) -> None:
        self._config = config
        self._reread = reread
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._thread = threading.get_ident()
        self._tracker = Tracker(time.time())
        self._health = ProxierHealth(config.sync_period)
        self._metrics = Metrics(self._map_use, self._counters, self._traffic, self._bypassed)
        callbacks = Callbacks(
            self._metrics.sockets_destroyed,
            self._pods_bypass,
            self._metrics.flows_searched,
            self._metrics.sockets_counted,
            lambda: self._inbox.put(Notified()),
            self._metrics.map_grown,
        )
        self._sources = Sources(config, self._inbox, self._metrics, content)
        self._modes = ModeSwitcher(config, callbacks, self._metrics)
        self._pacer = Pacer(least_interval(config, self._modes.serving.name), config.sync_period)
        self._state = ClusterState({}, {})  # the state of the last plans
        self._check_timer = CheckTimer(time.monotonic())
        self._oldest: float | None = None  # receive time of the first event that is not in the kernel yet
        self._triggers: list[float] = []  # trigger times of changes that are not in the kernel yet
        self._is_first_sync = True
        self._node_deadline: float | None = None  # for the Node, before the first sync
        self._service_health = ServiceHealthServer(lambda: self._health.at(time.monotonic()).healthy)
        self._servers = [self._service_health, *self._make_servers()]

    def open(self) -> None:
        """Start the sources and servers, and open the first mode. Raises EbpfProxyError."""
        log.info(STARTING, node=self._config.node_name, mode=self._modes.serving.name)
        for signal_ in (signal.SIGTERM, signal.SIGINT):
            # SimpleQueue.put is safe in a signal handler, even while this thread is in get().
            signal.signal(signal_, lambda number, _: self._inbox.put(Stop(signal.Signals(number).name)))
        signal.signal(signal.SIGHUP, lambda number, _: self._inbox.put(Reload("SIGHUP")))
        self._sources.start()
        self._modes.open()  # meanwhile the sources read the first state
        self._update_intervals()
        for server in self._servers:
            server.start()

    def close(self) -> None:
        """Stop all parts. The kernel continues to forward."""
        self._sources.stop()
        for server in self._servers:
            server.stop()
        self._modes.close()

    def loop(self) -> None:
        """Process items and sync when due, until a signal. Raises the error of a source that has ended."""
        while True:
            for item in self._items():
                if isinstance(item, Stop):
                    log.info(ENDING, signal=item.signal)
                    return
                if isinstance(item, Died):
                    raise _error_of(item)
                if isinstance(item, Reload):
                    self._reload(item.reason)
                elif isinstance(item, Notified):
                    self._check_timer.hasten()
                else:
                    self._fold(item)
            now = time.monotonic()
            if not self._may_sync(now):
                continue
            if self._tracker.pending or self._is_first_sync:
                self._pacer.changed(now)
                self._health.queued(now)
                self._metrics.queued(time.time())
            if not self._check_timer.wait(now):
                self._check(now)
            if self._pacer.due(now):
                self._sync(now)

    def _check(self, now: float) -> None:
        """Make the next sync verify if another program has changed the kernel."""
        began = time.thread_time()
        if self._modes.is_modified_externally():
            self._pacer.verify_soon()
        self._check_timer.checked(now, time.thread_time() - began, self._modes.serving.is_notified())

    def _may_sync(self, now: float) -> bool:
        """Return whether everything is known that the first sync needs.

        A sync without the Node would remove what depends on it. But the wait is limited, since the agent may
        have no permission to read the Node.
        """
        missing = self._tracker.lacking
        if missing != {NODE}:
            return not missing
        if self._node_deadline is None:
            self._node_deadline = now + _NODE_TIMEOUT
        if now < self._node_deadline:
            return False
        log.warning(NODE_MISSING, node=self._config.node_name, after_s=_NODE_TIMEOUT)
        self._tracker.fold(Synced(NODE))
        return True

    def _items(self) -> Iterator[Item]:
        """Wait for an item or the time of the next sync, then yield all waiting items."""
        now = time.monotonic()
        if self._tracker.synced:
            wait = self._pacer.wait(now)
            if wait is not None:
                wait = min(wait, self._check_timer.wait(now))
        else:
            wait = None if self._node_deadline is None else max(0.0, self._node_deadline - now)
        with contextlib.suppress(queue.Empty):
            yield self._inbox.get(timeout=wait)
            for _ in range(_BATCH):
                yield self._inbox.get_nowait()

    def _fold(self, received: Received) -> None:
        event = received.event
        self._tracker.fold(event)
        match event:
            case NodeChanged(node):
                self._health.node_eligible(node is None or node.eligible)
            case Invalid(kind):
                self._metrics.invalid(kind)
            case _:
                pass
        if self._oldest is None and self._tracker.pending:
            self._oldest = received.moment

    def _sync(self, now: float) -> None:
        """Plan pending changes and apply them. A failure is logged and retried later."""
        if self._tracker.pending or self._is_first_sync:
            self._plan()
        verify = self._pacer.verify_due(now)
        try:
            result = self._modes.sync(verify)
        except KernelError as failure:
            ended = time.monotonic()
            self._pacer.failed(ended)
            self._metrics.sync_failed(ended - now)
            log.error(SYNC_FAILED, reason=failure.message, hint=failure.hint)
            self._modes.fall_back(failure, self._state_now)
            self._update_intervals()
            return
        ended = time.monotonic()
        if result.rejected:  # space in maps may become free later, so rejected entries are retried
            self._pacer.rejected(ended, verified=verify)
        else:
            self._pacer.succeeded(ended, verified=verify)
        self._health.updated(ended)
        self._answer_health_checks()
        self._report(result, now, ended)
        self._oldest, self._triggers = None, []
        if self._is_first_sync:
            self._is_first_sync = False
            gc.freeze()  # the state stays in use, so later collections can skip it
            gc.enable()
        if self._modes.pending_config:
            self._follow(self._modes.pending_config)

    def _plan(self) -> None:
        drained = self._tracker.drain()
        self._state = drained.state
        self._metrics.changes(drained.service_changes, drained.slice_changes)
        self._modes.serving.reconciler.plan(
            drained.state,
            drained.services,
            node_changed=drained.node_changed,
            host_changed=drained.host_changed,
        )
        self._triggers += drained.trigger_times

    def _answer_health_checks(self) -> None:
        """Serve health checks for what is in force, as kube-proxy does."""
        reconciler = self._modes.serving.reconciler
        if reconciler.node_plan is not None:
            addresses = health_check_addresses(reconciler.node_plan)
            self._service_health.update(reconciler.health_checks.values(), addresses)

    def _report(self, result: SyncResult, began: float, ended: float) -> None:
        """Update the metrics after a sync, and log it if it changed something or is the first."""
        reconciler = self._modes.serving.reconciler
        state = State(
            services=reconciler.services,
            endpoints=reconciler.endpoints,
            no_local_internal=reconciler.no_local_internal,
            no_local_external=reconciler.no_local_external,
            rejected=result.rejected,
            conflicts=reconciler.conflicts,
        )
        self._metrics.synced(ended - began, time.time(), self._triggers, state)
        if result.drifted:
            self._metrics.repaired(self._modes.serving.name, result.drifted)
        if result.put or result.dropped or self._is_first_sync:
            log.info(
                SYNCED,
                services=reconciler.services,
                endpoints=reconciler.endpoints,
                put=result.put,
                dropped=result.dropped,
                rejected=result.rejected,
                latency_ms=round(1000 * (ended - (self._oldest or began)), 3),
                duration_ms=round(1000 * (ended - began), 3),
            )

    def _reload(self, reason: str) -> None:
        """Read the configuration again, and apply the options that a running agent can change."""
        try:
            config = self._reread()
        except ConfigError as failure:
            log.error(CONFIG_REJECTED, why=reason, reason=failure.message)
            return
        previous = self._modes.config
        changeable = ("proxy_mode", *OF_MODES) if config.proxy_mode != previous.proxy_mode else ()
        self._follow(dataclasses.replace(previous, **{name: getattr(config, name) for name in changeable}))
        current = self._modes.pending_config or self._modes.config
        later = [name for name in _differing(config, current) if name != "proxy_mode"]
        if later:
            log.warning(AT_NEXT_START, options=",".join(later))

    def _follow(self, config: Config) -> None:
        if not self._modes.follow(config, self._state_now):
            self._pacer.failed(time.monotonic())
        self._update_intervals()

    def _update_intervals(self) -> None:
        """Use the intervals of the current mode, which may have changed."""
        config = self._modes.config
        self._pacer.set_intervals(least_interval(config, self._modes.serving.name), config.sync_period)
        self._health.set_period(config.sync_period)

    def _state_now(self) -> ClusterState:
        if self._tracker.pending:
            self._plan()
        return self._state

    def _pods_bypass(self, devices: frozenset[int]) -> None:
        """Record devices whose pods bypass the socket path. Any thread may call it.

        The control thread records them at once, since its next plan must include what a previous run served.
        """
        if threading.get_ident() == self._thread:
            self._tracker.fold(PodsBypass(devices))
        else:
            self._sources.put(PodsBypass(devices))

    def _make_servers(self) -> Iterator[HealthServer | MetricsServer]:
        hard = self._config.bind_address_hard_fail
        if self._config.healthz_listen:
            listen = self._config.healthz_listen
            yield HealthServer(listen, self._health, self._metrics, hard, bypassed=self._bypassed)
        if self._config.metrics_listen:
            listen = self._config.metrics_listen
            yield MetricsServer(listen, self._metrics, lambda: self._modes.serving.name, hard)

    def _map_use(self) -> dict[str, MapUse]:
        return {name: MapUse(*use) for name, use in self._modes.serving.usage().items()}

    def _counters(self) -> Mapping[str, int]:
        return self._modes.serving.counters()

    def _traffic(self) -> list[ServiceTraffic]:
        return self._modes.serving.traffic()

    def _bypassed(self) -> tuple[DeviceSide, ...]:
        return self._modes.serving.bypassed()


def _differing(config: Config, other: Config) -> list[str]:
    """Return the names of the options whose values differ."""
    names = [field.name for field in dataclasses.fields(Config)]
    return [name for name in names if getattr(config, name) != getattr(other, name)]


def _error_of(died: Died) -> BaseException:
    if isinstance(died.error, EbpfProxyError):
        return died.error
    failure = RuntimeError(f"source {died.source} failed: {died.error!r}")
    failure.__cause__ = died.error
    return failure


def _adjust_oom_score(score: int) -> None:
    try:
        Path("/proc/self/oom_score_adj").write_text(str(score))
    except OSError as failure:
        log.warning(OOM_SCORE, value=score, reason=failure.strerror)
