"""The daemon: builds the parts of the agent, and runs the control thread until a signal or a failed source.

The control thread, which calls `run`, owns all state. Sources (`sources.py`), threads of the backend and
signal handlers only put items into its inbox.
"""

import contextlib
import dataclasses
import gc
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ebpfproxy.agent.announcer import Announcer
from ebpfproxy.agent.edge import Edge
from ebpfproxy.agent.ending import Ending
from ebpfproxy.agent.front import Front
from ebpfproxy.agent.inbox import Died, Drain, Inbox, Item, Notified, Received, Reload, Stop
from ebpfproxy.agent.mode_switch import ModeSwitcher
from ebpfproxy.agent.pacing import CheckTimer, Pacer, SliceSize
from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.agent.sources import Sources, tracker_for
from ebpfproxy.agent.sync_log import SyncLog, SyncSummary
from ebpfproxy.agent.verification import Verification
from ebpfproxy.api.event import (
    DISPENSABLE,
    NODE,
    PEER_NODE,
    ChecksChanged,
    EndpointsFull,
    Invalid,
    NetworkNamespacesChanged,
    NodeChanged,
    PodsBypass,
    ServiceChanged,
    Synced,
)
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.config import Config, Loaded
from ebpfproxy.config.derived import least_interval
from ebpfproxy.config.load import CONFIG_REJECTED
from ebpfproxy.config.settings import OF_MODES
from ebpfproxy.errors import ConfigError, EbpfProxyError, KernelError
from ebpfproxy.http.metrics import State
from ebpfproxy.log import DEBUG_VERBOSITY, Logger
from ebpfproxy.model.address import Family
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.namespace import Namespace
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.health_check_node_port import health_check_addresses
from ebpfproxy.plan.service_plan import Role

log = Logger(__name__)

STARTING = "Starting"
"""The agent starts. `node` is the name of the node, `mode` the first mode to open."""
NODE_MISSING = "Cannot read the Node object, continuing without it"
"""Topology hints, the Node's addresses and its readiness apply once it can be read. Until then, `/healthz` is
503, as in kube-proxy."""
NODES_MISSING = "Cannot list the Nodes, continuing without them"
"""There is no direct server return, and an edge checks the health of no node, until they can be listed."""
RESTARTING = "Restarting with the changed configuration"
"""A running agent applies only changes of the mode, and with it of the options of its section. For all other
`options` it restarts, while the kernel continues to forward."""
OOM_SCORE = "Cannot set the OOM score adjustment"
"""The OOM killer may end the agent as early as any process of its size."""
SYNC_FAILED = "Sync failed, retrying"
"""No change is lost. Everything is compared and applied again after 1 s, then twice that, up to 30 s."""
BUSY = "Control thread was busy"
"""Logged with `-v=4`: the control thread read no events for `busy_ms` milliseconds, 5 or more."""
ENDING = "Ending after a signal"
"""The agent received SIGTERM or SIGINT. `forwarding=continues`: by the kernel, with the last state;
`forwarding=ends`: the relays of mode userspace end with the agent."""

_BUSY = 0.005  # seconds from which on BUSY is logged
_COLLECT = 600.0  # seconds between collections of all garbage
_NEVER = 1 << 30  # as a threshold of gc
_BATCH = 10_000  # maximum number of items between two checks whether a sync is due
_NODE_TIMEOUT = 65.0  # seconds that the first sync waits for the Node: longer than a reflector pauses


def run(loaded: Loaded, reread: Callable[[], Loaded], inbox: Inbox, front: Front, ending: Ending) -> None:
    """Run the agent until SIGTERM or SIGINT, or until it must restart. It then sets `ending.restarts`.

    The kernel continues to forward. `reread` returns the current configuration. It is called at SIGHUP and
    when the file has changed. Raises EbpfProxyError.
    """
    _adjust_oom_score(loaded.config.oom_score_adj)
    agent = _Agent(loaded, reread, inbox, front)
    try:
        agent.open()
        ending.restarts = agent.loop()
    finally:
        agent.close(ending)


class _Agent:
    """The parts of the agent, and the loop of the control thread."""

    def __init__(self, loaded: Loaded, reread: Callable[[], Loaded], inbox: Inbox, front: Front) -> None:
        self._config = config = loaded.config
        self._reread = reread
        self._inbox = inbox
        self._front = front
        self._thread = threading.get_ident()
        self._tracker = tracker_for(config)
        self._health, self._metrics = front.health, front.metrics
        # Without a Node of the API server, load balancers must not use the node. Manifests need no Node.
        self._needs_node = config.role is not Role.EDGE and config.manifests is None
        self._health.node_eligible(not self._needs_node)
        self._edge = (
            Edge(config, lambda event: self._sources.put(event), self._metrics)
            if config.role is Role.EDGE
            else None
        )
        callbacks = Callbacks(
            self._metrics.sockets_destroyed,
            self._pods_bypass,
            self._metrics.flows_searched,
            self._metrics.sockets_counted,
            self._metrics.connections_reset,
            self._endpoints_full,
            lambda: self._inbox.put(Notified()),
            self._namespaces_changed,
            repeats=True,
        )
        further = {"node-checks": self._edge.checker.run} if self._edge else {}
        self._sources = Sources(config, self._inbox, self._metrics, loaded.seen, further)
        connect = None if config.manifests else self._sources.connect
        self._announcer = Announcer(config.node_name, connect)
        if not config.ebpf_dsr_port:
            self._announcer.accept(0)
        self._reported_mode: tuple[str, Mapping[str, str]] = ("", {})  # and the modes that `auto` prefers
        self._modes = ModeSwitcher(config, callbacks, self._metrics, self._fell_back)
        self._pacer = Pacer(least_interval(config, self._modes.serving.name), config.sync_period)
        self._verification = Verification()
        self._slice = SliceSize()
        self._state = ClusterState({}, {})  # the state of the last plans
        self._check_timer = CheckTimer(time.monotonic())
        self._sync_log = SyncLog(each=config.verbosity >= DEBUG_VERBOSITY)
        self._oldest: float | None = None  # receive time of the first event that is not in the kernel yet
        # The families and trigger times of changes that are not in the kernel yet.
        self._triggers: list[tuple[Family, float]] = []
        self._late_triggers: list[tuple[Family, float]] = []  # of plans that may not be rendered yet
        self._answered: tuple[object, ...] = ()  # reconciler, version and node of the served health checks
        self._is_first_sync = True
        self._collect_at = time.monotonic() + _COLLECT
        self._drained_by = ""  # the signal that began the drain of an edge
        self._node_deadline: float | None = None  # for the Node, before the first sync
        self._woken: float | None = None  # when the last wait for items ended

    def open(self) -> None:
        """Start the sources, and open the first mode. Raises EbpfProxyError."""
        log.info(STARTING, node=self._config.node_name, mode=self._modes.serving.name)
        self._front.show(lambda: self._modes.serving, self._sources.report_health_checks)
        self._sources.start()
        self._modes.open()  # meanwhile the sources read the first state
        self._update_intervals()

    def close(self, ending: Ending) -> None:
        """Stop all parts. The kernel continues to forward."""
        self._sync_log.flush(time.monotonic())
        ending.begin()
        with ending.part("sources"):
            self._sources.stop()
        for name, server in self._front.servers.items():
            with ending.part(name):
                server.stop()
        with ending.part("mode"):
            self._modes.close()

    def loop(self) -> bool:
        """Process items and sync when due, until a signal, or until the agent must restart: return whether.

        Raises the error of a source that has ended.
        """
        while True:
            for item in self._items():
                if isinstance(item, Stop):
                    self._log_end(item.signal)
                    return False
                if isinstance(item, Drain):
                    if not self._drain(item.signal):
                        self._log_end(item.signal)
                        return False
                    continue
                if isinstance(item, Died):
                    raise _error_of(item)
                if isinstance(item, Reload):
                    # A restart would end the drain, and the process with it.
                    if not self._drained_by and self._reload(item.reason):
                        return True
                elif isinstance(item, Notified):
                    self._check_timer.hasten()
                else:
                    self._fold(item)
            now = time.monotonic()
            if self._edge and self._edge.drain_wait(now) == 0.0:
                self._log_end(self._drained_by)
                return False
            if self._sync_log.wait(now) == 0.0:
                self._sync_log.flush(now)
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
            elif self._verification.is_running or self._pacer.check_due(now):
                self._verify_slice()

    def _log_end(self, signal: str) -> None:
        forwarding = "ends" if self._modes.serving.backend.ends_with_agent else "continues"
        log.info(ENDING, signal=signal, forwarding=forwarding)

    def _drain(self, signal: str) -> bool:
        """Withdraw the addresses of an edge. Return whether to continue for some time."""
        self._drained_by = signal
        self._health.node_eligible(False)
        return self._edge is not None and self._edge.drain(time.monotonic())

    def _check(self, now: float) -> None:
        """Make the next sync verify if another program has changed the kernel."""
        began = time.thread_time()
        if self._modes.is_modified_externally():
            self._pacer.verify_soon()
        if now >= self._collect_at:
            gc.collect()
            self._collect_at = now + _COLLECT
        self._check_timer.checked(now, time.thread_time() - began, self._modes.serving.backend.is_notified())

    def _verify_slice(self) -> None:
        """Continue or begin to compare the kernel with what was written. Make the next sync verify after a
        difference."""
        if not self._verification.is_running:
            self._verification.start(self._modes.serving.reconciler.check())
        is_right = self._verification.run_slice()
        if is_right:
            self._pacer.checked(time.monotonic())
            self._record_verification(differences=0)
        elif is_right is False:
            self._pacer.verify_soon()

    def _record_verification(self, differences: int) -> None:
        self._front.readiness.verified(time.monotonic(), differences)
        self._metrics.verified(time.time(), differences)

    def _fell_back(self, unavailable: Mapping[str, str]) -> None:
        """Show the modes that `auto` could not select. An Event names them, too, at the start or now."""
        self._front.readiness.fell_back(unavailable)
        previous, self._reported_mode = self._reported_mode, (self._modes.serving.name, unavailable)
        if self._reported_mode != previous and not self._is_first_sync:
            self._sources.report_mode(*self._reported_mode)

    def _may_sync(self, now: float) -> bool:
        """Return whether everything is known that the first sync needs.

        A sync without the Node would remove what depends on it. But the wait is limited, since the agent may
        have no permission to read the Node.
        """
        missing = self._tracker.lacking
        if not missing or missing - DISPENSABLE:
            return not missing
        if self._node_deadline is None:
            self._node_deadline = now + _NODE_TIMEOUT
        if now < self._node_deadline:
            return False
        if NODE in missing:
            log.warning(NODE_MISSING, node=self._config.node_name, after_s=_NODE_TIMEOUT)
        if PEER_NODE in missing:
            log.warning(NODES_MISSING, after_s=_NODE_TIMEOUT)
        for kind in missing:
            self._tracker.fold(Synced(kind))
        return True

    def _items(self) -> Iterator[Item]:
        """Wait for an item or the time of the next sync, then yield all waiting items."""
        now = time.monotonic()
        if self._woken is not None and now - self._woken >= _BUSY:
            log.debug(BUSY, busy_ms=round(1000 * (now - self._woken), 3))
        if self._tracker.synced:
            wait = self._pacer.wait(now)
            if wait is not None:
                wait = min(wait, self._check_timer.wait(now))
                log_wait = self._sync_log.wait(now)
                wait = wait if log_wait is None else min(wait, log_wait)
                wait = 0.0 if self._verification.is_running else wait
        else:
            wait = None if self._node_deadline is None else max(0.0, self._node_deadline - now)
        drain_wait = self._edge.drain_wait(now) if self._edge else None
        if drain_wait is not None:
            wait = drain_wait if wait is None else min(wait, drain_wait)
        with contextlib.suppress(queue.Empty):
            yield self._inbox_item(wait)
            for _ in range(_BATCH):
                yield self._inbox.get_nowait()

    def _inbox_item(self, wait: float | None) -> Item:
        """Return the next item. Raises queue.Empty after `wait` seconds."""
        try:
            return self._inbox.get(timeout=wait)
        finally:
            self._woken = time.monotonic()

    def _fold(self, received: Received) -> None:
        event = received.event
        self._tracker.fold(event)
        match event:
            case NodeChanged(node):
                self._health.node_eligible(node.eligible if node else not self._needs_node)
                self._announcer.seen(node)
            case ChecksChanged(down):
                self._metrics.nodes_down(len({each.node for each in down}))
            case ServiceChanged():
                self._sources.service_changed(event)
            case Invalid(kind):
                self._metrics.invalid(kind)
            case _:
                pass
        if self._oldest is None and self._tracker.pending:
            self._oldest = received.moment

    def _sync(self, now: float) -> None:
        """Plan pending changes and apply them. A failure is logged and retried later."""
        verify = self._pacer.verify_due(now)
        remaining = False
        reconciler, most = self._modes.serving.reconciler, math.inf if verify else self._slice.most
        if self._tracker.pending or self._is_first_sync:
            remaining = self._plan(most)
        else:
            reconciler.render(most)
        if reconciler.unrendered:
            remaining = True
        else:
            self._triggers += self._late_triggers
            self._late_triggers.clear()
        if verify:
            self._verification.cancel()
        if not gc.isenabled():  # disabled in __main__; the first attempt: failed ones leave garbage
            gc.freeze()  # the state stays in use, so collections can skip it
            # Collections of all objects take 0.3 s with 10,000 Services: `_check` makes them, seldom.
            gc.set_threshold(*gc.get_threshold()[:2], _NEVER)
            gc.enable()
        try:
            result = self._modes.sync(verify, self._slice.retries)
            self._announce()
        except KernelError as failure:
            ended = time.monotonic()
            self._pacer.failed(ended)
            self._metrics.sync_failed(ended - now, verify)
            log.error(SYNC_FAILED, reason=failure.message, hint=failure.hint)
            self._modes.fall_back(failure, self._state_now)
            self._update_intervals()
            return
        ended = time.monotonic()
        if result.rejected:  # space in maps may become free later, so rejected entries are retried
            self._pacer.rejected(ended, verified=verify)
        else:
            self._pacer.succeeded(ended, verified=verify)
        if remaining or result.remaining:
            self._pacer.remaining()
        if not verify:
            self._slice.took(ended - now, full=remaining, retrying=result.remaining)
        # Changes that the other program made during the repair may not have been noticed.
        if result.drifted:
            self._pacer.verify_soon()
        self._health.updated(ended)
        self._answer_health_checks()
        self._announcer.accept(self._modes.serving.dsr_port)
        self._report(result, now, ended, verify)
        self._oldest, self._triggers = self._oldest if remaining else None, []
        if self._is_first_sync:
            self._is_first_sync = False
            unavailable = self._front.readiness.unavailable
            self._sources.report_start(self._front.failures, self._modes.serving.name, unavailable)
            gc.freeze()  # the plan, too, stays in use
        if self._modes.pending_config:
            self._follow(self._modes.pending_config)

    def _plan(self, most: float = math.inf) -> bool:
        """Plan pending changes, with `most` only some (`Tracker.drain`). Return whether others remain."""
        drained = self._tracker.drain(most, self._modes.serving.reconciler.unrendered)
        self._state = drained.state
        self._front.full = drained.state.full
        self._metrics.changes(drained.service_changes, drained.slice_changes)
        self._modes.serving.reconciler.plan(
            drained.state,
            drained.services,
            node_changed=drained.node_changed,
            host_changed=drained.host_changed,
            peers_changed=drained.peers_changed,
            most=most,
        )
        for claim in self._modes.serving.reconciler.protected_claims.take_rejected():
            self._sources.report_rejected(claim)
        view = self._modes.serving.reconciler.edge
        if self._edge and view:
            self._edge.planned(view, drained.state, peers_changed=drained.peers_changed)
        unrendered = self._modes.serving.reconciler.unrendered
        is_late = any(name.namespace in unrendered for name in drained.services)
        (self._late_triggers if is_late else self._triggers).extend(drained.trigger_times)
        return drained.remaining

    def _announce(self) -> None:
        """Announce what an edge serves, after it is in the kernel. Raises KernelError."""
        view = self._modes.serving.reconciler.edge
        if self._edge and view:
            self._edge.announce(view, self._state)

    def _answer_health_checks(self) -> None:
        """Serve health checks for what is in force, as kube-proxy does."""
        reconciler = self._modes.serving.reconciler
        node = reconciler.node_plan
        current = reconciler, reconciler.health_version, node
        if node is not None and current != self._answered:
            self._front.service_health.update(reconciler.health_checks.values(), health_check_addresses(node))
            self._answered = current

    def _report(self, result: SyncResult, began: float, ended: float, verified: bool) -> None:
        """Update the metrics after a sync, and log it if it changed something or is the first."""
        reconciler = self._modes.serving.reconciler
        state = State(
            services=reconciler.services,
            endpoints=reconciler.endpoints,
            no_local=reconciler.no_local,
            rejected=result.rejected,
            conflicts=reconciler.conflicts,
            protected=reconciler.protected_claims.count,
        )
        self._metrics.synced(ended - began, time.time(), self._triggers, state, verified)
        self._front.readiness.synced(result.rejected)
        if verified:
            self._record_verification(result.drifted)
        if result.drifted:
            self._metrics.repaired(self._modes.serving.name, result.drifted)
        if result.put or result.dropped or self._is_first_sync:
            summary = SyncSummary(
                services=reconciler.services,
                endpoints=reconciler.endpoints,
                put=result.put,
                dropped=result.dropped,
                rejected=result.rejected,
                latency=ended - (self._oldest or began),
                duration=ended - began,
            )
            self._sync_log.add(summary, ended)

    def _reload(self, reason: str) -> bool:
        """Read the configuration again. Apply a changed mode; return whether the rest needs a restart."""
        try:
            config = self._reread().config
        except ConfigError as failure:
            log.error(CONFIG_REJECTED, why=reason, reason=failure.message)
            return False
        previous = self._modes.pending_config or self._modes.config
        changeable = ("proxy_mode", *OF_MODES) if config.proxy_mode != previous.proxy_mode else ()
        wanted = dataclasses.replace(previous, **{name: getattr(config, name) for name in changeable})
        if wanted == config:
            self._follow(wanted)
            wanted = self._modes.pending_config or self._modes.config
            if wanted.proxy_mode != config.proxy_mode:
                return False  # the switch failed, and the current mode continues
        if wanted != config:
            log.info(RESTARTING, why=reason, options=",".join(_differing(config, previous)))
        return wanted != config

    def _follow(self, config: Config) -> None:
        if not self._modes.follow(config, self._state_now):
            self._pacer.failed(time.monotonic())
        elif not self._is_first_sync:
            self._announcer.accept(self._modes.serving.dsr_port)
        self._update_intervals()

    def _update_intervals(self) -> None:
        """Use the intervals of the current mode, which may have changed."""
        config, serving = self._modes.config, self._modes.serving
        interval = least_interval(config, serving.name)
        self._pacer.set_intervals(interval, config.sync_period, serving.backend.reread_seconds)
        self._verification.cancel()
        self._health.set_period(config.sync_period)

    def _state_now(self) -> ClusterState:
        if self._tracker.pending:
            self._plan()
        return self._state

    def _pods_bypass(self, devices: frozenset[int]) -> None:
        """Record devices whose pods bypass the socket path. Any thread may call it.

        The control thread records them at once, since its next plan must include what a previous run served.
        """
        self._fold_or_put(PodsBypass(devices))

    def _namespaces_changed(self, namespaces: tuple[Namespace, ...]) -> None:
        """Record the network namespaces, as `_pods_bypass` does with devices."""
        self._fold_or_put(NetworkNamespacesChanged(namespaces))

    def _endpoints_full(self, service: ServicePortName, family: Family, targets: frozenset[bytes]) -> None:
        """Record which endpoints get no new connections for now. Any thread may call it."""
        self._sources.put(EndpointsFull(service, family, targets))

    def _fold_or_put(self, event: PodsBypass | NetworkNamespacesChanged) -> None:
        if threading.get_ident() == self._thread:
            self._tracker.fold(event)
        else:
            self._sources.put(event)


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
