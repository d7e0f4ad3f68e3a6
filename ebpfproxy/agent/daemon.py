"""The agent: builds the parts, runs them, and ends at a signal or when a part dies.

One thread, the one that calls `run`, owns all state. Sources, the monitors of local addresses, of devices
and of the configuration file, the backend's own threads and signal handlers only put something into its
queue.
"""

import contextlib
import dataclasses
import functools
import gc
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.agent.mode_switch import ModeSwitcher
from ebpfproxy.agent.pacing import Looks, Pacer
from ebpfproxy.agent.reconciler import SyncResult
from ebpfproxy.api.event import (
    ADDRESSES,
    DEVICES,
    NODE,
    AddressesChanged,
    DevicesChanged,
    Event,
    Invalid,
    NodeChanged,
    PodsBypass,
    Synced,
)
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.backends.mode import Callbacks
from ebpfproxy.config import Config
from ebpfproxy.config.derived import least_interval
from ebpfproxy.config.follow import follow
from ebpfproxy.config.settings import OF_MODES
from ebpfproxy.errors import ConfigError, EbpfProxyError, KernelError
from ebpfproxy.http.health_check_node_port import ServiceHealthServer
from ebpfproxy.http.healthz import HealthServer, ProxierHealth
from ebpfproxy.http.metrics import MapUse, Metrics, MetricsServer, State
from ebpfproxy.linux.netlink import links, local_addresses
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Network
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.counters import ServiceTraffic
from ebpfproxy.model.device import Device, DeviceSide
from ebpfproxy.plan.health_check_node_port import health_check_addresses

log = Logger(__name__)

STARTING = "Starting"
"""The agent starts: `node` is its name, `mode` the first mode to open."""
NODE_MISSING = "Cannot read the Node object, continuing without it"
"""Topology hints, the Node's addresses and its readiness apply once it can be read."""
SYNCED = "Synced services"
"""Every change up to this moment is in the kernel, except `rejected` entries."""
AT_NEXT_START = "Changed options take effect at the next start"
"""A running agent follows only the mode and the options of its section."""
OOM_SCORE = "Cannot set the OOM score adjustment"
"""The kernel may end the agent as early as any process of its size."""
SYNC_FAILED = "Sync failed, retrying"
"""Nothing is lost: everything is compared and applied again after 1 s, then twice that, up to 30 s."""
CONFIG_REJECTED = "Cannot apply the changed configuration, keeping the current one"
"""`reason` names the flag or field."""
ENDING = "Ending, the kernel continues to forward"
"""SIGTERM or SIGINT."""

_BATCH = 10_000  # events folded before a sync that is due is looked at
_NODE_PATIENCE = 45.0  # seconds that the first sync waits for our Node alone: longer than a reflector pauses


class _Received(NamedTuple):
    moment: float
    event: Event


class _Died(NamedTuple):
    part: str
    error: BaseException


class _Stop(NamedTuple):
    reason: str


class _Reload(NamedTuple):
    reason: str


class _Changed(NamedTuple):
    """Another program may have changed what is in the kernel."""


_Item = _Received | _Died | _Stop | _Reload | _Changed


def run(config: Config, reread: Callable[[], Config] | None = None, content: bytes | None = None) -> None:
    """Run until a signal comes; the kernel continues to forward. Raises EbpfProxyError.

    `reread` gives the configuration as it is now; it is asked at SIGHUP, and where the file has changed.
    `content`: of the file, as `config` was made from it: what has become of it since is a change, too.
    """
    _adjust_oom_score(config.oom_score_adj)
    gc.disable()  # nothing of the first state is garbage; collecting it costs more than parsing it
    agent = _Agent(config, reread or (lambda: config), content)
    try:
        agent.open()
        agent.loop()
    finally:
        agent.close()


class _Agent:
    """The parts, and the loop of the thread that owns them."""

    def __init__(self, config: Config, reread: Callable[[], Config], content: bytes | None) -> None:
        self._config = config
        self._reread = reread
        self._content = content
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.get_ident()
        self._tracker = Tracker(time.time())
        self._health = ProxierHealth(config.sync_period)
        self._metrics = Metrics(self._map_use, self._counters, self._traffic, self._bypassed)
        callbacks = Callbacks(
            self._metrics.sockets_destroyed,
            self._pods_bypass,
            self._metrics.flows_searched,
            self._metrics.sockets_counted,
            lambda: self._inbox.put(_Changed()),
        )
        self._modes = ModeSwitcher(config, callbacks, self._metrics)
        self._pacer = Pacer(least_interval(config, self._modes.serving.name), config.sync_period)
        self._state = ClusterState({}, {})  # as it was planned last
        self._looks = Looks(time.monotonic())
        self._oldest: float | None = None  # when the first event not yet in the kernel was received
        self._triggers: list[float] = []  # of changes not yet in the kernel
        self._first = True
        self._node_by: float | None = None  # when the first sync comes without our Node
        self._service_health = ServiceHealthServer(lambda: self._health.at(time.monotonic()).healthy)
        self._servers = [self._service_health, *self._make_servers()]

    def open(self) -> None:
        log.info(STARTING, node=self._config.node_name, mode=self._modes.serving.name)
        for signal_ in (signal.SIGTERM, signal.SIGINT):
            # A SimpleQueue may be put to from a handler even while this thread gets from it.
            signal.signal(signal_, lambda number, _: self._inbox.put(_Stop(signal.Signals(number).name)))
        signal.signal(signal.SIGHUP, lambda number, _: self._inbox.put(_Reload("SIGHUP")))
        for part, run_part in self._sources():
            threading.Thread(target=self._supervised, args=(part, run_part), name=part, daemon=True).start()
        self._modes.open()  # while the sources read
        self._follow_pace()
        for server in self._servers:
            server.start()

    def close(self) -> None:
        self._stop.set()
        for server in self._servers:
            server.stop()
        self._modes.close()

    def loop(self) -> None:
        """Take in events and sync when it is time, until a signal comes. Raises what killed a part."""
        while True:
            for item in self._items():
                if isinstance(item, _Stop):
                    log.info(ENDING, signal=item.reason)
                    return
                if isinstance(item, _Died):
                    raise _unforeseen(item)
                if isinstance(item, _Reload):
                    self._reload(item.reason)
                elif isinstance(item, _Changed):
                    self._looks.hasten()
                else:
                    self._fold(item)
            now = time.monotonic()
            if not self._may_sync(now):
                continue
            if self._tracker.pending or self._first:
                self._pacer.changed(now)
                self._health.queued(now)
                self._metrics.queued(time.time())
            if not self._looks.wait(now):
                self._look(now)
            if self._pacer.due(now):
                self._sync(now)

    def _look(self, now: float) -> None:
        """Have a sync verify if another program has changed what is in the kernel."""
        began = time.thread_time()
        if self._modes.is_disturbed():
            self._pacer.disturbed()
        self._looks.looked(now, time.thread_time() - began, self._modes.serving.is_notified())

    def _may_sync(self, now: float) -> bool:
        """Whether all is known that a first sync needs. Our Node is waited for, since what depends on it
        would be taken away until it comes, but not without end: an agent may have no right to read it.
        """
        lacking = self._tracker.lacking
        if lacking != {NODE}:
            return not lacking
        if self._node_by is None:
            self._node_by = now + _NODE_PATIENCE
        if now < self._node_by:
            return False
        log.warning(NODE_MISSING, node=self._config.node_name, after_s=_NODE_PATIENCE)
        self._tracker.fold(Synced(NODE))
        return True

    def _items(self) -> Iterator[_Item]:
        """Everything that is there, after waiting for the first, or for the time of the next sync."""
        now = time.monotonic()
        if self._tracker.synced:
            wait = self._pacer.wait(now)
            if wait is not None:
                wait = min(wait, self._looks.wait(now))
        else:
            wait = None if self._node_by is None else max(0.0, self._node_by - now)
        with contextlib.suppress(queue.Empty):
            yield self._inbox.get(timeout=wait)
            for _ in range(_BATCH):
                yield self._inbox.get_nowait()

    def _fold(self, received: _Received) -> None:
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
        """Plan what is pending and bring it into the kernel; a failure is logged, and tried again later."""
        if self._tracker.pending or self._first:
            self._plan()
        verify = self._pacer.verify_due(now)
        try:
            done = self._modes.sync(verify)
        except KernelError as failure:
            ended = time.monotonic()
            self._pacer.failed(ended)
            self._metrics.sync_failed(ended - now)
            log.error(SYNC_FAILED, reason=failure.message, hint=failure.hint)
            self._modes.leave_failing(failure, self._state_now)
            self._follow_pace()
            return
        ended = time.monotonic()
        if done.rejected:  # what had no room may have it once ranges that rest are free again
            self._pacer.rejected(ended, verified=verify)
        else:
            self._pacer.succeeded(ended, verified=verify)
        self._health.updated(ended)
        self._answer_health_checks()
        self._report(done, now, ended)
        self._oldest, self._triggers = None, []
        if self._first:
            self._first = False
            gc.freeze()  # the state stays in use: later collections need not look at it
            gc.enable()
        if self._modes.asked:
            self._follow(self._modes.asked)

    def _plan(self) -> None:
        drained = self._tracker.drain()
        self._state = drained.state
        self._metrics.changes(drained.service_changes, drained.slice_changes)
        self._modes.serving.proxier.plan(
            drained.state,
            drained.services,
            node_changed=drained.node_changed,
            host_changed=drained.host_changed,
        )
        self._triggers += drained.trigger_times

    def _answer_health_checks(self) -> None:
        """By what is in force, as kube-proxy does."""
        proxier = self._modes.serving.proxier
        if proxier.node_plan is not None:
            addresses = health_check_addresses(proxier.node_plan)
            self._service_health.update(proxier.health_checks.values(), addresses)

    def _report(self, done: SyncResult, began: float, ended: float) -> None:
        """Metrics of a sync, and a line of the log where it changed something."""
        proxier = self._modes.serving.proxier
        state = State(
            services=proxier.services,
            endpoints=proxier.endpoints,
            no_local_internal=proxier.no_local_internal,
            no_local_external=proxier.no_local_external,
            rejected=done.rejected,
            conflicts=proxier.conflicts,
        )
        self._metrics.synced(ended - began, time.time(), self._triggers, state)
        if done.drifted:
            self._metrics.repaired(self._modes.serving.name, done.drifted)
        if done.put or done.dropped or self._first:
            log.info(
                SYNCED,
                services=proxier.services,
                endpoints=proxier.endpoints,
                put=done.put,
                dropped=done.dropped,
                rejected=done.rejected,
                latency_ms=round(1000 * (ended - (self._oldest or began)), 3),
                duration_ms=round(1000 * (ended - began), 3),
            )

    def _reload(self, reason: str) -> None:
        """Read the configuration again, and follow it as far as an agent that runs can."""
        try:
            config = self._reread()
        except ConfigError as failure:
            log.error(CONFIG_REJECTED, why=reason, reason=failure.message)
            return
        previous = self._modes.config
        with_mode = ("proxy_mode", *OF_MODES) if config.proxy_mode != previous.proxy_mode else ()
        self._follow(dataclasses.replace(previous, **{name: getattr(config, name) for name in with_mode}))
        known = self._modes.asked or self._modes.config
        later = [name for name in _differing(config, known) if name != "proxy_mode"]
        if later:
            log.warning(AT_NEXT_START, options=",".join(later))

    def _follow(self, config: Config) -> None:
        if not self._modes.follow(config, self._state_now):
            self._pacer.failed(time.monotonic())
        self._follow_pace()

    def _follow_pace(self) -> None:
        """That of the mode that serves, which may be another one than before."""
        config = self._modes.config
        self._pacer.keep_to(least_interval(config, self._modes.serving.name), config.sync_period)
        self._health.set_period(config.sync_period)

    def _state_now(self) -> ClusterState:
        if self._tracker.pending:
            self._plan()
        return self._state

    def _pods_bypass(self, devices: frozenset[int]) -> None:
        """In our own thread, as at the start, at once: no plan may leave out what a previous run served."""
        if threading.get_ident() == self._thread:
            self._tracker.fold(PodsBypass(devices))
        else:
            self._put(PodsBypass(devices))

    def _put(self, event: Event) -> None:
        self._inbox.put(_Received(time.monotonic(), event))

    def _sources(self) -> Iterator[tuple[str, Callable[[threading.Event], object]]]:
        yield "local-addresses", self._watch_addresses
        yield "devices", self._watch_devices
        if self._config.config is not None:
            yield "configuration", functools.partial(self._watch_file, self._config.config)
        if self._config.manifests is not None:
            from ebpfproxy.api.manifest_folder import FileSource

            yield "manifests", FileSource(self._config.manifests, self._config.node_name, self._put).run
        else:
            from ebpfproxy.api.watch import ApiSource, load_configuration

            kubeconfig = str(self._config.kubeconfig or "")
            configuration = load_configuration(kubeconfig, self._config.master)
            yield "api", ApiSource(configuration, self._config.node_name, self._put, self._metrics).run

    def _watch_addresses(self, stop: threading.Event) -> None:
        def changed(networks: frozenset[Network]) -> None:
            self._put(AddressesChanged(networks))
            self._put(Synced(ADDRESSES))

        local_addresses.watch(changed, stop)

    def _watch_file(self, path: Path, stop: threading.Event) -> None:
        follow(path, stop, lambda: self._inbox.put(_Reload(f"{path} has changed")), self._content)

    def _watch_devices(self, stop: threading.Event) -> None:
        def changed(devices: tuple[Device, ...]) -> None:
            self._put(DevicesChanged(devices))
            self._put(Synced(DEVICES))

        links.watch(changed, stop)

    def _supervised(self, part: str, run_part: Callable[[threading.Event], object]) -> None:
        """A part that ends by itself ends the agent, so that no state becomes stale unnoticed."""
        try:
            run_part(self._stop)
        except BaseException as error:
            self._inbox.put(_Died(part, error))
        else:
            if not self._stop.is_set():
                self._inbox.put(_Died(part, RuntimeError("it ended by itself")))

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


def _differing(one: Config, other: Config) -> list[str]:
    """The names of the options whose values differ."""
    names = [field.name for field in dataclasses.fields(Config)]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _unforeseen(died: _Died) -> BaseException:
    if isinstance(died.error, EbpfProxyError):
        return died.error
    failure = RuntimeError(f"{died.part} died: {died.error!r}")
    failure.__cause__ = died.error
    return failure


def _adjust_oom_score(score: int) -> None:
    try:
        Path("/proc/self/oom_score_adj").write_text(str(score))
    except OSError as failure:
        log.warning(OOM_SCORE, value=score, reason=failure.strerror)
