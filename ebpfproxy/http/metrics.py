"""Metrics, and the server that shows them: /metrics, /proxyMode and /healthz on port 10249.

Names, labels and buckets that begin with ``kubeproxy_`` are kube-proxy's (pkg/proxy/metrics/metrics.go,
Kubernetes 1.30: one series for both families), so that dashboards, alerts and clusterloader2 carry over.
What is ours begins with ``ebpfproxy_``. There is no ``kubernetes_build_info`` on purpose: a common alert
takes two values of its git_version in one cluster for an upgrade that got stuck.
"""

import gzip
import os
import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from ebpfproxy import __version__
from ebpfproxy.http.scrape import MapUse as MapUse
from ebpfproxy.http.scrape import Readings
from ebpfproxy.http.server import Listener, Request, Response, not_found, plain
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import ServiceTraffic, SocketCounts
from ebpfproxy.model.device import DeviceSide

SYNC_BUCKETS = tuple(0.001 * 2**n for n in range(15))
"""Seconds: 0.001 to 16.384."""

PROGRAMMING_BUCKETS = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
"""Seconds: fine up to a minute, coarse up to five."""

# SyncHooks each counter the library would show when it was made: a series that kube-proxy has not.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class State(NamedTuple):
    """What is in force after a sync.

    `no_local_internal` and `no_local_external` count the ServicePorts whose policy is Local and which
    have endpoints, but none on this node. `rejected` counts entries that the kernel did not take,
    `conflicts` frontends that more than one ServicePort claims.
    """

    services: int = 0
    endpoints: int = 0
    no_local_internal: int = 0
    no_local_external: int = 0
    rejected: int = 0
    conflicts: int = 0


class Metrics:
    """Events of the control thread, counted.

    `maps`, `events`, `traffic` and `bypassed` are called at each scrape, in the scraping thread: how full the
    BPF maps are, what the programs did, what they carried, and where they are not first. They may raise
    EbpfProxyError: the scrape shows all the rest then.
    """

    def __init__(
        self,
        maps: Callable[[], Mapping[str, MapUse]] = dict,
        events: Callable[[], Mapping[str, int]] = dict,
        traffic: Callable[[], Collection[ServiceTraffic]] = tuple,
        bypassed: Callable[[], Collection[DeviceSide]] = tuple,
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        self.registry.register(Readings(maps, events, traffic, bypassed))
        self._make_kube_proxys()
        self._make_own()

    def _make_kube_proxys(self) -> None:
        self._sync_seconds = self._histogram(
            "kubeproxy_sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds", SYNC_BUCKETS
        )
        self._programming_seconds = self._histogram(
            "kubeproxy_network_programming_duration_seconds",
            "In Cluster Network Programming Latency in seconds",
            PROGRAMMING_BUCKETS,
        )
        self._last_sync = self._gauge(
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
            "The last time proxy rules were successfully synced",
        )
        self._last_queued = self._gauge(
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
            "The last time a sync of proxy rules was queued",
        )
        self._services_pending = self._gauge(
            "kubeproxy_sync_proxy_rules_service_changes_pending", "Pending proxy rules Service changes"
        )
        self._services_changed = self._counter(
            "kubeproxy_sync_proxy_rules_service_changes_total", "Cumulative proxy rules Service changes"
        )
        self._endpoints_pending = self._gauge(
            "kubeproxy_sync_proxy_rules_endpoint_changes_pending", "Pending proxy rules Endpoint changes"
        )
        self._endpoints_changed = self._counter(
            "kubeproxy_sync_proxy_rules_endpoint_changes_total", "Cumulative proxy rules Endpoint changes"
        )
        self._no_local = self._gauge(
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            "Number of services with a Local traffic policy and no endpoints",
            "traffic_policy",
        )
        self._healthz = self._counter(
            "kubeproxy_proxy_healthz_total", "Cumulative proxy healthz HTTP status", "code"
        )
        self._livez = self._counter(
            "kubeproxy_proxy_livez_total", "Cumulative proxy livez HTTP status", "code"
        )
        self._look_seconds = self._histogram(
            "kubeproxy_conntrack_reconciler_sync_duration_seconds",
            "Conntrack reconciler sync latency in seconds",
            SYNC_BUCKETS,
            "ip_family",
        )
        self._flows_ended = self._counter(
            "kubeproxy_conntrack_reconciler_deleted_entries_total",
            "Cumulative conntrack flows deleted by the conntrack reconciler",
            "ip_family",
        )

    def _make_own(self) -> None:
        self._mode = self._gauge(
            "ebpfproxy_info", "1; the version and the proxy mode in force", "version", "mode"
        )
        build = self._gauge(
            "ebpfproxy_build_info",
            "1; what this process runs on",
            "version",
            "python_version",
            "kernel",
            "architecture",
        )
        host = os.uname()
        build.labels(__version__, platform.python_version(), host.release, host.machine).set(1)
        self._failures = self._counter("ebpfproxy_sync_failures_total", "Syncs that failed")
        self._services = self._gauge("ebpfproxy_services", "Services in force")
        self._endpoints = self._gauge("ebpfproxy_endpoints", "Endpoints in force")
        self._rejected = self._gauge("ebpfproxy_rejected_entries", "Entries that the kernel rejected")
        self._rejected_in_0_1 = self._gauge(
            "ebpfproxy_refused_entries", "Previous name of ebpfproxy_rejected_entries, until 0.3"
        )
        self._conflicts = self._gauge(
            "ebpfproxy_frontend_conflicts", "Frontends that more than one ServicePort claims"
        )
        self._invalid = self._counter(
            "ebpfproxy_invalid_objects_total",
            "Objects that could not be served, each time one was seen",
            "kind",
        )
        self._relists = self._counter(
            "ebpfproxy_source_relists_total",
            "Times all objects of a kind were listed, the first included",
            "kind",
        )
        self._watch_errors = self._counter(
            "ebpfproxy_source_watch_errors_total", "Lists and watches that ended with an error", "kind"
        )
        self._repairs = self._counter(
            "ebpfproxy_repairs_total", "What was found changed in the kernel by others, and put right", "what"
        )
        self._reconnected = self._counter(
            "ebpfproxy_sockets_reconnected_total",
            "Connected UDP sockets that got another endpoint when theirs was gone, or their first one",
        )
        self._stale_sockets = self._gauge(
            "ebpfproxy_sockets_stale",
            "Connected UDP sockets that send to an endpoint that is gone, and are not translated",
        )
        self._translated_sockets = self._gauge(
            "ebpfproxy_sockets_translated",
            "Connected UDP sockets whose endpoint is gone, and whose packets are sent to another one",
        )
        self._destroyed = self._counter(
            "ebpfproxy_sockets_destroyed_total", "Sockets closed because their endpoint is gone"
        )
        self._not_destroyed = self._counter(
            "ebpfproxy_sockets_destroy_failed_total", "Sockets that should have been closed and could not be"
        )

        self._leftovers = self._counter(
            "ebpfproxy_leftovers_removed_total", "What other modes, and kube-proxy, had left", "mode"
        )
        self._moves_failed = self._counter(
            "ebpfproxy_mode_moves_failed_total", "Moves to this mode that failed", "mode"
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def mode(self, name: str) -> None:
        """The proxy mode that is in force from now on."""
        self._mode.clear()
        self._mode.labels(__version__, name).set(1)

    def changes(self, services: int, slices: int) -> None:
        """So many Services and EndpointSlices have changed, and wait for a sync."""
        self._services_changed.inc(services)
        self._services_pending.inc(services)
        self._endpoints_changed.inc(slices)
        self._endpoints_pending.inc(slices)

    def queued(self, wall: float) -> None:
        """A sync was asked for, at this Unix time in seconds."""
        self._last_queued.set(wall)

    def synced(self, duration: float, wall: float, triggers: Iterable[float], state: State) -> None:
        """A sync has ended well: after `duration` seconds, at the Unix time `wall`.

        `triggers` are the moments, in Unix seconds, at which the pods changed whose EndpointSlices this
        sync brought into force.
        """
        self._sync_seconds.observe(duration)
        self._last_sync.set(wall)
        self._services_pending.set(0)
        self._endpoints_pending.set(0)
        for trigger in triggers:
            self._programming_seconds.observe(wall - trigger)
        self._services.set(state.services)
        self._endpoints.set(state.endpoints)
        self._no_local.labels("internal").set(state.no_local_internal)
        self._no_local.labels("external").set(state.no_local_external)
        self._rejected.set(state.rejected)
        self._rejected_in_0_1.set(state.rejected)
        self._conflicts.set(state.conflicts)

    def sync_failed(self, duration: float) -> None:
        """A sync has ended badly, after `duration` seconds."""
        self._sync_seconds.observe(duration)
        self._failures.inc()

    def invalid(self, kind: str) -> None:
        """An object of `kind` cannot be served."""
        self._invalid.labels(kind).inc()

    def relisted(self, kind: str) -> None:
        """All objects of `kind` were listed; the first time included."""
        self._relists.labels(kind).inc()

    def watch_failed(self, kind: str) -> None:
        """A list or watch of `kind` ended with an error."""
        self._watch_errors.labels(kind).inc()

    def repaired(self, what: str, count: int = 1) -> None:
        """So many of `what` (entries, links, filters) were found changed by others, and put right."""
        self._repairs.labels(what).inc(count)

    def sockets_destroyed(self, destroyed: int, failed: int) -> None:
        self._destroyed.inc(destroyed)
        self._not_destroyed.inc(failed)

    def sockets_counted(self, counts: SocketCounts) -> None:
        """A search of connected UDP sockets whose endpoint is gone has ended."""
        self._reconnected.inc(counts.reconnected)
        self._stale_sockets.set(counts.left)
        self._translated_sockets.set(counts.translated)
        self.sockets_destroyed(counts.destroyed, counts.not_destroyed)

    def flows_looked_at(self, family: Family, ended: int, seconds: float) -> None:
        """Tracked flows of a family were searched for stale ones, of which so many were ended."""
        self._look_seconds.labels(family.value).observe(seconds)
        self._flows_ended.labels(family.value).inc(ended)

    def drained(self, mode: str, count: int) -> None:
        """So many things that `mode` had left in the kernel were removed."""
        self._leftovers.labels(mode).inc(count)

    def move_failed(self, mode: str) -> None:
        """Switching to `mode`, or starting with it, has failed, and another one serves."""
        self._moves_failed.labels(mode).inc()

    def healthz(self, code: int) -> None:
        """/healthz has answered so."""
        self._healthz.labels(str(code)).inc()

    def livez(self, code: int) -> None:
        """/livez has answered so."""
        self._livez.labels(str(code)).inc()


class MetricsServer(Listener):
    """Serves `metrics` on `address`; `proxy_mode` is asked for the mode in force, in any thread."""

    def __init__(
        self,
        address: tuple[str, int],
        metrics: Metrics,
        proxy_mode: Callable[[], str],
        hard_fail: bool = False,
        retry_seconds: float = 5.0,
    ) -> None:
        super().__init__("metrics", "--metrics-bind-address", address, self._handle, hard_fail, retry_seconds)
        self._registry = metrics.registry
        self._proxy_mode = proxy_mode

    def _handle(self, request: Request) -> Response:
        match request.path:
            case "/metrics":
                return self._scrape(request)
            case "/proxyMode":
                return plain(200, self._proxy_mode())
            case "/healthz":
                return plain(200, "ok")
            case _:
                return not_found()

    def _scrape(self, request: Request) -> Response:
        encode, content_type = exposition.choose_encoder(request.headers.get("Accept", ""))
        body, headers = encode(self._registry), {"Content-Type": content_type}
        if exposition.gzip_accepted(request.headers.get("Accept-Encoding", "")):
            body, headers["Content-Encoding"] = gzip.compress(body, compresslevel=1), "gzip"
        return Response(200, body, headers)
