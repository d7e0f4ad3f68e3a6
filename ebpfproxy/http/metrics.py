"""Metrics that the agent updates, and their server on port 10249.

Its pages are /metrics, /metrics/slis, /proxyMode, /healthz, /healthz/ping and /readyz.

Metrics that begin with ``kubeproxy_`` have the names, labels and buckets of kube-proxy
(pkg/proxy/metrics/metrics.go, Kubernetes 1.34: with label `ip_family`). One sync programs both families, so
the series of both get its duration and time. So dashboards, alerts and
clusterloader2 work unchanged. Other metrics begin with ``ebpfproxy_``.
"""

import gzip
import os
import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition

from ebpfproxy import __version__
from ebpfproxy.http import component_metrics
from ebpfproxy.http.component_metrics import HealthCheckMetrics
from ebpfproxy.http.rest_client_metrics import RestClientMetrics
from ebpfproxy.http.scrape import Readings
from ebpfproxy.http.server import Listener, Request, Response, not_found, plain
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import Report, SocketCounts
from ebpfproxy.model.device import DeviceSide
from ebpfproxy.plan.counts import NoLocalEndpoints

SYNC_BUCKETS = tuple(0.001 * 2**n for n in range(15))
"""Seconds: 0.001 to 16.384."""

PROGRAMMING_BUCKETS = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
"""Seconds: fine up to one minute, coarse up to five minutes."""

# Otherwise the library adds a `_created` series for each counter, which kube-proxy does not have.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class State(NamedTuple):
    """Counts of what is in force after a sync.

    - `no_local`: by family, the ServicePorts with traffic policy Local that have endpoints, but none on this
      node.
    - `rejected`: entries that the kernel rejected.
    - `conflicts`: frontends that more than one ServicePort claims.
    - `protected`: external and load balancer IPs with ports that are not served, since another program has
      them, or the namespace may not have the address.
    """

    services: int = 0
    endpoints: int = 0
    no_local: Mapping[Family, NoLocalEndpoints] = MappingProxyType({})
    rejected: int = 0
    conflicts: int = 0
    protected: int = 0


class Metrics:
    """All metrics. The agent calls a method for each event.

    These functions are called at each scrape, in the thread of the scrape. They may raise EbpfProxyError; the
    scrape then lacks only their metrics.

    - `report`: what the current mode counts.
    - `bypassed`: the device sides where another program runs first, or that packets pass without ebpfproxy.
    """

    def __init__(
        self,
        report: Callable[[], Report] = Report,
        bypassed: Callable[[], Collection[DeviceSide]] = tuple,
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        prometheus_client.ProcessCollector(registry=self.registry)
        prometheus_client.PlatformCollector(registry=self.registry)
        self.registry.register(Readings(report, bypassed))
        self._features = component_metrics.register(self.registry)
        self.rest_client = RestClientMetrics(self.registry)
        self._make_kube_proxy_metrics()
        self._make_own_metrics()

    def _make_kube_proxy_metrics(self) -> None:
        self._sync_seconds = self._histogram(
            "kubeproxy_sync_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds",
            SYNC_BUCKETS,
            "ip_family",
        )
        self._full_seconds = self._histogram(
            "kubeproxy_sync_full_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for full resyncs",
            SYNC_BUCKETS,
            "ip_family",
        )
        self._partial_seconds = self._histogram(
            "kubeproxy_sync_partial_proxy_rules_duration_seconds",
            "SyncProxyRules latency in seconds for partial resyncs",
            SYNC_BUCKETS,
            "ip_family",
        )
        self._programming_seconds = self._histogram(
            "kubeproxy_network_programming_duration_seconds",
            "In Cluster Network Programming Latency in seconds",
            PROGRAMMING_BUCKETS,
            "ip_family",
        )
        self._last_sync = self._gauge(
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
            "The last time proxy rules were successfully synced",
            "ip_family",
        )
        self._last_queued = self._gauge(
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
            "The last time a sync of proxy rules was queued",
            "ip_family",
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
            "ip_family",
            "traffic_policy",
        )
        self._healthz = self._counter(
            "kubeproxy_proxy_healthz_total", "Cumulative proxy healthz HTTP status", "code"
        )
        self._livez = self._counter(
            "kubeproxy_proxy_livez_total", "Cumulative proxy livez HTTP status", "code"
        )
        self._search_seconds = self._histogram(
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

    def _make_own_metrics(self) -> None:
        self._mode = self._gauge(
            "ebpfproxy_info", "1; the version and the proxy mode in force", "version", "mode"
        )
        build = self._gauge(
            "ebpfproxy_build_info",
            "1; the version, Python, kernel and architecture of this process",
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
        self._protected = self._gauge(
            "ebpfproxy_protected_frontends",
            "Frontends with an external or load balancer IP that are not served: it is an address of a node "
            "or of the API server, or one that the namespace may not have",
        )
        self._conflicts = self._gauge(
            "ebpfproxy_frontend_conflicts", "Frontends that more than one ServicePort claims"
        )
        self._invalid = self._counter(
            "ebpfproxy_invalid_objects_total",
            "Invalid objects, counted each time one was read",
            "kind",
        )
        self._relists = self._counter(
            "ebpfproxy_source_relists_total",
            "Lists of all objects of a kind, including the first",
            "kind",
        )
        self._watch_errors = self._counter(
            "ebpfproxy_source_watch_errors_total", "Lists and watches that failed", "kind"
        )
        self._repairs = self._counter(
            "ebpfproxy_repairs_total",
            "Entries in the kernel that other programs had changed and that were restored",
            "what",
        )
        self._verifications = self._counter(
            "ebpfproxy_verifications_total",
            "Complete comparisons of the kernel with what the agent wrote",
        )
        self._verified = self._gauge(
            "ebpfproxy_last_verification_timestamp_seconds",
            "When the last complete comparison of the kernel ended",
        )
        self._differences = self._gauge(
            "ebpfproxy_last_verification_differences",
            "Entries that the last complete comparison of the kernel found changed, and that were restored",
        )
        self._fallback = self._gauge(
            "ebpfproxy_mode_fallback",
            "1 for each mode that auto prefers to the current one, but that is unavailable",
            "mode",
        )
        self._reconnected = self._counter(
            "ebpfproxy_sockets_reconnected_total",
            "Connected UDP sockets that got another endpoint after theirs was removed, or their first one",
        )
        self._stale_sockets = self._gauge(
            "ebpfproxy_sockets_stale",
            "Connected UDP sockets that send to a removed endpoint and are not translated",
        )
        self._translated_sockets = self._gauge(
            "ebpfproxy_sockets_translated",
            "Connected UDP sockets of removed endpoints whose packets are translated to another one",
        )
        self._destroyed = self._counter(
            "ebpfproxy_sockets_destroyed_total",
            "Stale sockets, or with kernel NAT stale flows, that were destroyed",
        )
        self._not_destroyed = self._counter(
            "ebpfproxy_sockets_destroy_failed_total",
            "Stale sockets, or with kernel NAT stale flows, that could not be destroyed",
        )
        self._connections_reset = self._counter(
            "ebpfproxy_connections_reset_total",
            "Connections that were reset, by the option that requests it",
            "reason",
        )
        self._connections_not_reset = self._counter(
            "ebpfproxy_connections_reset_failed_total",
            "Failed attempts to reset a connection, by the option that requests it",
            "reason",
        )
        self._nodes_down = self._gauge(
            "ebpfproxy_edge_nodes_down",
            "Nodes that failed health checks of this edge, so that their endpoints get no new connections",
        )
        self._announced = self._gauge(
            "ebpfproxy_edge_announced_addresses", "External and load balancer IPs that this edge announces"
        )
        self._leftovers = self._counter(
            "ebpfproxy_leftovers_removed_total",
            "Objects of other modes and of kube-proxy that were removed",
            "mode",
        )
        self._switches_failed = self._counter(
            "ebpfproxy_mode_switches_failed_total", "Failed switches to this mode", "mode"
        )
        self._switches_failed_in_0_1 = self._counter(
            "ebpfproxy_mode_moves_failed_total",
            "Previous name of ebpfproxy_mode_switches_failed_total, until 0.3",
            "mode",
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def mode(self, name: str) -> None:
        """Set the current proxy mode."""
        self._mode.clear()
        self._mode.labels(__version__, name).set(1)

    def changes(self, services: int, slices: int) -> None:
        """Count changed Services and EndpointSlices, which now wait for a sync."""
        self._services_changed.inc(services)
        self._services_pending.inc(services)
        self._endpoints_changed.inc(slices)
        self._endpoints_pending.inc(slices)

    def queued(self, wall: float) -> None:
        """Record that a sync was requested at the Unix time `wall`, in seconds."""
        for family in Family:
            self._last_queued.labels(family.value).set(wall)

    def synced(
        self,
        duration: float,
        wall: float,
        triggers: Iterable[tuple[Family, float]],
        state: State,
        full: bool = False,
    ) -> None:
        """Record a successful sync that took `duration` seconds and ended at the Unix time `wall`.

        `triggers` are the families and trigger times of the EndpointSlices that this sync programmed, in Unix
        seconds (`EndpointSlice.trigger_time`). `full`: the sync read the kernel back completely.
        """
        self._took(duration, full)
        for family in Family:
            self._last_sync.labels(family.value).set(wall)
        self._services_pending.set(0)
        self._endpoints_pending.set(0)
        for family, moment in triggers:
            self._programming_seconds.labels(family.value).observe(wall - moment)
        self._services.set(state.services)
        self._endpoints.set(state.endpoints)
        for family, no_local in state.no_local.items():
            self._no_local.labels(family.value, "internal").set(no_local.internal)
            self._no_local.labels(family.value, "external").set(no_local.external)
        self._rejected.set(state.rejected)
        self._protected.set(state.protected)
        self._rejected_in_0_1.set(state.rejected)
        self._conflicts.set(state.conflicts)

    def sync_failed(self, duration: float, full: bool = False) -> None:
        """Record a sync that failed after `duration` seconds; see `synced`."""
        self._took(duration, full)
        self._failures.inc()

    def _took(self, duration: float, full: bool) -> None:
        for family in Family:
            self._sync_seconds.labels(family.value).observe(duration)
            (self._full_seconds if full else self._partial_seconds).labels(family.value).observe(duration)

    def invalid(self, kind: str) -> None:
        """Count an invalid object of `kind`."""
        self._invalid.labels(kind).inc()

    def relisted(self, kind: str) -> None:
        """Count a list of all objects of `kind`, including the first."""
        self._relists.labels(kind).inc()

    def watch_failed(self, kind: str) -> None:
        """Count a failed list or watch of `kind`."""
        self._watch_errors.labels(kind).inc()

    def repaired(self, mode: str, count: int = 1) -> None:
        """Count entries of `mode` that other programs had changed in the kernel and that were restored."""
        self._repairs.labels(mode).inc(count)

    def verified(self, wall: float, differences: int) -> None:
        """Record a complete comparison of the kernel that ended at the Unix time `wall`, in seconds."""
        self._verifications.inc()
        self._verified.set(wall)
        self._differences.set(differences)

    def fell_back(self, unavailable: Collection[str]) -> None:
        """Set the modes that `auto` prefers to the current one, but that are unavailable."""
        self._fallback.clear()
        for mode in unavailable:
            self._fallback.labels(mode).set(1)

    def sockets_destroyed(self, destroyed: int, failed: int) -> None:
        """Count stale sockets, or with kernel NAT stale flows, that were destroyed or could not be."""
        self._destroyed.inc(destroyed)
        self._not_destroyed.inc(failed)

    def sockets_counted(self, counts: SocketCounts) -> None:
        """Record a search for connected UDP sockets of removed endpoints."""
        self._reconnected.inc(counts.reconnected)
        self._stale_sockets.set(counts.left)
        self._translated_sockets.set(counts.translated)
        self.sockets_destroyed(counts.destroyed, counts.not_destroyed)

    def connections_reset(self, reason: str, reset: int, failed: int) -> None:
        """Count connections that were reset, or that could not be."""
        self._connections_reset.labels(reason).inc(reset)
        self._connections_not_reset.labels(reason).inc(failed)

    def external_ips(self, served: bool) -> None:
        """Set the feature gate for external IPs."""
        self._features.labels(*component_metrics.EXTERNAL_IPS).set(served)

    def nodes_down(self, count: int) -> None:
        """Set the number of nodes that are down, for an edge."""
        self._nodes_down.set(count)

    def announced(self, count: int) -> None:
        """Set the number of addresses that an edge announces."""
        self._announced.set(count)

    def flows_searched(self, family: Family, ended: int, seconds: float) -> None:
        """Record a search for stale conntrack flows of a family: how many were ended, and its duration."""
        self._search_seconds.labels(family.value).observe(seconds)
        self._flows_ended.labels(family.value).inc(ended)

    def drained(self, mode: str, count: int) -> None:
        """Count objects of another mode that were removed from the kernel."""
        self._leftovers.labels(mode).inc(count)

    def switch_failed(self, mode: str) -> None:
        """Count a failed switch to `mode`, or a failed start with it, after which another mode is current."""
        self._switches_failed.labels(mode).inc()
        self._switches_failed_in_0_1.labels(mode).inc()

    def healthz(self, code: int) -> None:
        """Count a response of /healthz."""
        self._healthz.labels(str(code)).inc()

    def livez(self, code: int) -> None:
        """Count a response of /livez."""
        self._livez.labels(str(code)).inc()


class MetricsServer(Listener):
    """Serves `metrics` on `address`. `proxy_mode` returns the current mode, "" before one is selected.

    It is called in any thread, as are `page`, which returns the responses of further paths, and `ready`,
    which responds at /readyz.
    """

    def __init__(
        self,
        address: tuple[str, int],
        metrics: Metrics,
        proxy_mode: Callable[[], str],
        hard_fail: bool = False,
        retry_seconds: float = 5.0,
        page: Callable[[Request], Response | None] = lambda request: None,
        ready: Callable[[Request], Response] = lambda request: not_found(),
    ) -> None:
        super().__init__("metrics", "--metrics-bind-address", address, self._handle, hard_fail, retry_seconds)
        self._registry = metrics.registry
        self._checks = HealthCheckMetrics()
        self._proxy_mode = proxy_mode
        self._page = page
        self._ready = ready

    def _handle(self, request: Request) -> Response:
        match request.path:
            case "/metrics":
                return _scrape(request, self._registry)
            case "/metrics/slis":
                return _scrape(request, self._checks.registry)
            case "/proxyMode":
                mode = self._proxy_mode()
                return plain(200, mode) if mode else plain(503, "no proxy mode is selected yet")
            case "/healthz":
                self._checks.passed("ping", "healthz")
                return plain(200, "ok")
            case "/healthz/ping":
                return plain(200, "ok")
            case "/readyz":
                return self._ready(request)
            case _:
                return self._page(request) or not_found()


def _scrape(request: Request, registry: CollectorRegistry) -> Response:
    encode, content_type = exposition.choose_encoder(request.headers.get("Accept", ""))
    body, headers = encode(registry), {"Content-Type": content_type}
    if exposition.gzip_accepted(request.headers.get("Accept-Encoding", "")):
        body, headers["Content-Encoding"] = gzip.compress(body, compresslevel=1), "gzip"
    return Response(200, body, headers)
