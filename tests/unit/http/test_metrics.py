"""Metrics: names, types, labels, buckets, and the server that shows them."""

import gzip
import math
import re
from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from ebpfproxy import __version__
from ebpfproxy.http.metrics import Metrics, MetricsServer, State
from ebpfproxy.model.address import Family
from ebpfproxy.model.counters import Report, SocketCounts, TableUse
from ebpfproxy.plan.counts import NoLocalEndpoints
from tests.unit.http.http_client import ask

V4 = Family.IPV4
IPV4 = {"ip_family": "IPv4"}

KUBE_PROXYS = {
    "kubeproxy_sync_proxy_rules_duration_seconds": "histogram",
    "kubeproxy_sync_full_proxy_rules_duration_seconds": "histogram",
    "kubeproxy_sync_partial_proxy_rules_duration_seconds": "histogram",
    "kubeproxy_network_programming_duration_seconds": "histogram",
    "kubeproxy_sync_proxy_rules_last_timestamp_seconds": "gauge",
    "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds": "gauge",
    "kubeproxy_sync_proxy_rules_service_changes_pending": "gauge",
    "kubeproxy_sync_proxy_rules_service_changes_total": "counter",
    "kubeproxy_sync_proxy_rules_endpoint_changes_pending": "gauge",
    "kubeproxy_sync_proxy_rules_endpoint_changes_total": "counter",
    "kubeproxy_sync_proxy_rules_no_local_endpoints_total": "gauge",
    "kubeproxy_proxy_healthz_total": "counter",
    "kubeproxy_proxy_livez_total": "counter",
    "kubeproxy_conntrack_reconciler_sync_duration_seconds": "histogram",
    "kubeproxy_conntrack_reconciler_deleted_entries_total": "counter",
}
OURS = {
    "ebpfproxy_edge_announced_addresses": "gauge",
    "ebpfproxy_edge_nodes_down": "gauge",
    "ebpfproxy_info": "gauge",
    "ebpfproxy_last_verification_differences": "gauge",
    "ebpfproxy_last_verification_timestamp_seconds": "gauge",
    "ebpfproxy_mode_fallback": "gauge",
    "ebpfproxy_verifications_total": "counter",
    "ebpfproxy_build_info": "gauge",
    "ebpfproxy_services": "gauge",
    "ebpfproxy_endpoints": "gauge",
    "ebpfproxy_rejected_entries": "gauge",
    "ebpfproxy_refused_entries": "gauge",
    "ebpfproxy_frontend_conflicts": "gauge",
    "ebpfproxy_device_position": "gauge",
    "ebpfproxy_device_unreached": "gauge",
    "ebpfproxy_bypassed_device_sides": "gauge",
    "ebpfproxy_map_entries": "gauge",
    "ebpfproxy_map_capacity": "gauge",
    "ebpfproxy_datapath_events_total": "counter",
    "ebpfproxy_service_packets_total": "counter",
    "ebpfproxy_service_bytes_total": "counter",
    "ebpfproxy_service_new_flows_total": "counter",
    "ebpfproxy_sync_failures_total": "counter",
    "ebpfproxy_invalid_objects_total": "counter",
    "ebpfproxy_source_relists_total": "counter",
    "ebpfproxy_source_watch_errors_total": "counter",
    "ebpfproxy_repairs_total": "counter",
    "ebpfproxy_connections_reset_total": "counter",
    "ebpfproxy_protected_frontends": "gauge",
    "ebpfproxy_connections_reset_failed_total": "counter",
    "ebpfproxy_sockets_destroyed_total": "counter",
    "ebpfproxy_sockets_reconnected_total": "counter",
    "ebpfproxy_sockets_stale": "gauge",
    "ebpfproxy_sockets_translated": "gauge",
    "ebpfproxy_sockets_destroy_failed_total": "counter",
    "ebpfproxy_leftovers_removed_total": "counter",
    "ebpfproxy_mode_switches_failed_total": "counter",
    "ebpfproxy_mode_moves_failed_total": "counter",
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def server(metrics: Metrics) -> Iterator[MetricsServer]:
    one = MetricsServer(("127.0.0.1", 0), metrics, lambda: "ebpf")
    one.start()
    yield one
    one.stop()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def bounds(metrics: Metrics, name: str) -> list[float]:
    for family in metrics.registry.collect():
        if family.name == name:
            return [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
    raise AssertionError(name)


def test_every_metric_has_its_name_and_type(server: MetricsServer) -> None:
    text = ask(server.port, "/metrics").body.decode()
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert {n: t for n, t in types.items() if n.startswith("kubeproxy_")} == KUBE_PROXYS
    assert {n: t for n, t in types.items() if n.startswith("ebpfproxy_")} == OURS
    assert {"process_resident_memory_bytes", "python_info"} <= set(types)


KUBERNETES = {
    "kubernetes_build_info": "gauge",
    "kubernetes_feature_enabled": "gauge",
    "rest_client_request_duration_seconds": "histogram",
    "rest_client_request_size_bytes": "histogram",
    "rest_client_requests_total": "counter",
    "rest_client_response_size_bytes": "histogram",
    "rest_client_rate_limiter_duration_seconds": "histogram",
    "rest_client_transport_cache_entries": "gauge",
    "rest_client_transport_create_calls_total": "counter",
}


def test_metrics_of_every_kubernetes_component_are_present(server: MetricsServer) -> None:
    text = ask(server.port, "/metrics").body.decode()
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert {n: t for n, t in types.items() if n.startswith(("kubernetes_", "rest_client_"))} == KUBERNETES
    families = {each.name: each for each in text_string_to_metric_families(text)}
    (build,) = families["kubernetes_build_info"].samples
    assert build.value == 1
    assert (build.labels["major"], build.labels["minor"]) == ("1", "36")
    assert re.fullmatch(rf"v1\.36\.[0-9]+\+ebpfproxy\.{re.escape(__version__)}", build.labels["git_version"])
    assert set(build.labels) == {
        "major", "minor", "git_version", "git_commit", "git_tree_state", "build_date", "go_version",
        "compiler", "platform",
    }  # fmt: skip
    features = [(each.labels, each.value) for each in families["kubernetes_feature_enabled"].samples]
    assert ({"name": "ComponentFlagz", "stage": "BETA"}, 1) in features


def test_the_gate_of_external_ips_is_that_of_the_configuration(metrics: Metrics) -> None:
    metrics.external_ips(False)
    gate = {"name": "AllowServiceExternalIPs", "stage": "DEPRECATED"}
    assert metrics.registry.get_sample_value("kubernetes_feature_enabled", gate) == 0


def test_requests_wait_for_no_rate_limiter(metrics: Metrics) -> None:
    metrics.rest_client.transport_created()
    metrics.rest_client.requested("GET", "a:1", 200)
    limiter = "rest_client_rate_limiter_duration_seconds"
    assert value(metrics, f"{limiter}_count", verb="GET", host="a:1") == 1
    assert value(metrics, f"{limiter}_sum", verb="GET", host="a:1") == 0
    assert value(metrics, "rest_client_transport_create_calls_total", result="uncacheable") == 1


def test_metrics_slis_has_the_results_of_health_checks_only(server: MetricsServer) -> None:
    """KEP-3466."""
    assert ask(server.port, "/metrics/slis").code == 200
    for path in ("/healthz", "/healthz", "/healthz/ping"):  # as in kube-proxy, the last is not counted
        assert (ask(server.port, path).code, ask(server.port, path).body) == (200, b"ok")
    text = ask(server.port, "/metrics/slis").body.decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    assert {(each.name, each.labels.get("status"), each.value) for each in samples} == {
        ("kubernetes_healthcheck", None, 1.0),
        ("kubernetes_healthchecks_total", "success", 4.0),
    }
    assert {(each.labels["name"], each.labels["type"]) for each in samples} == {("ping", "healthz")}


def test_counters_have_no_created_series(server: MetricsServer) -> None:
    assert b"_created" not in ask(server.port, "/metrics").body


def test_the_sync_buckets_double_from_one_millisecond(metrics: Metrics) -> None:
    metrics.sync_failed(1.0)
    expected = [0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512]
    expected += [1.024, 2.048, 4.096, 8.192, 16.384, math.inf]
    assert bounds(metrics, "kubeproxy_sync_proxy_rules_duration_seconds")[:16] == expected


def test_the_network_programming_buckets_are_fine_up_to_one_minute(metrics: Metrics) -> None:
    metrics.synced(1.0, 1.0, [(V4, 0.0)], State())
    found = bounds(metrics, "kubeproxy_network_programming_duration_seconds")
    assert found[:4] == [0.25, 0.5, 1.0, 2.0]
    assert found[60:63] == [59.0, 60.0, 65.0]
    assert found[-9:] == [115.0, 120.0, 150.0, 180.0, 210.0, 240.0, 270.0, 300.0, math.inf]
    assert len(found) == 81


def test_changes_are_pending_until_the_next_sync(metrics: Metrics) -> None:
    name = "kubeproxy_sync_proxy_rules_{}_changes_{}"
    metrics.changes(services=2, slices=3)
    metrics.changes(services=1, slices=0)
    assert value(metrics, name.format("service", "pending")) == 3
    assert value(metrics, name.format("endpoint", "pending")) == 3
    metrics.synced(0.01, 1000.0, [], State())
    assert value(metrics, name.format("service", "pending")) == 0
    assert value(metrics, name.format("endpoint", "pending")) == 0
    assert value(metrics, name.format("service", "total")) == 3
    assert value(metrics, name.format("endpoint", "total")) == 3


def test_a_sync_updates_its_duration_and_the_counts_in_force(metrics: Metrics) -> None:
    metrics.queued(1000.0)
    state = State(services=5, endpoints=7, no_local={V4: NoLocalEndpoints(1, 2)}, rejected=3, conflicts=4)
    metrics.synced(0.3, 1001.0, [(V4, 1000.6), (V4, 990.0)], state, full=True)
    assert value(metrics, "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", **IPV4) == 1000.0
    assert value(metrics, "kubeproxy_sync_proxy_rules_last_timestamp_seconds", **IPV4) == 1001.0
    assert value(metrics, "kubeproxy_sync_proxy_rules_duration_seconds_sum", **IPV4) == 0.3
    assert value(metrics, "kubeproxy_network_programming_duration_seconds_count", **IPV4) == 2
    assert value(metrics, "kubeproxy_network_programming_duration_seconds_bucket", **IPV4, le="0.5") == 1
    assert value(metrics, "kubeproxy_network_programming_duration_seconds_bucket", **IPV4, le="11.0") == 2
    no_local = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
    assert value(metrics, no_local, **IPV4, traffic_policy="internal") == 1
    assert value(metrics, no_local, **IPV4, traffic_policy="external") == 2
    assert value(metrics, "ebpfproxy_services") == 5
    assert value(metrics, "ebpfproxy_endpoints") == 7
    assert value(metrics, "ebpfproxy_rejected_entries") == 3
    assert value(metrics, "ebpfproxy_refused_entries") == 3
    assert value(metrics, "ebpfproxy_frontend_conflicts") == 4
    full, partial = (
        f"kubeproxy_sync_{kind}_proxy_rules_duration_seconds_count" for kind in ("full", "partial")
    )
    assert (value(metrics, full, ip_family="IPv6"), value(metrics, partial, ip_family="IPv6")) == (1, None)


def test_a_failed_sync_is_counted_and_leaves_changes_pending(metrics: Metrics) -> None:
    metrics.changes(services=1, slices=0)
    metrics.sync_failed(0.5)
    assert value(metrics, "ebpfproxy_sync_failures_total") == 1
    assert value(metrics, "kubeproxy_sync_proxy_rules_duration_seconds_count", **IPV4) == 1
    assert value(metrics, "kubeproxy_sync_proxy_rules_last_timestamp_seconds", **IPV4) is None
    assert value(metrics, "kubeproxy_sync_proxy_rules_service_changes_pending") == 1


def test_only_the_mode_in_force_is_shown(metrics: Metrics) -> None:
    metrics.mode("ebpf")
    metrics.mode("iptables")
    assert value(metrics, "ebpfproxy_info", version=__version__, mode="iptables") == 1
    assert value(metrics, "ebpfproxy_info", version=__version__, mode="ebpf") is None


def test_other_events_are_counted_by_label(metrics: Metrics) -> None:
    metrics.invalid("Service")
    metrics.relisted("EndpointSlice")
    metrics.watch_failed("Node")
    metrics.repaired("entries", 3)
    metrics.repaired("links")
    metrics.sockets_destroyed(5, 1)
    assert value(metrics, "ebpfproxy_invalid_objects_total", kind="Service") == 1
    assert value(metrics, "ebpfproxy_source_relists_total", kind="EndpointSlice") == 1
    assert value(metrics, "ebpfproxy_source_watch_errors_total", kind="Node") == 1
    assert value(metrics, "ebpfproxy_repairs_total", what="entries") == 3
    assert value(metrics, "ebpfproxy_repairs_total", what="links") == 1
    metrics.drained("iptables", 49)
    metrics.switch_failed("nftables")
    assert value(metrics, "ebpfproxy_leftovers_removed_total", mode="iptables") == 49
    assert value(metrics, "ebpfproxy_mode_switches_failed_total", mode="nftables") == 1
    assert value(metrics, "ebpfproxy_mode_moves_failed_total", mode="nftables") == 1
    assert value(metrics, "ebpfproxy_sockets_destroyed_total") == 5
    assert value(metrics, "ebpfproxy_sockets_destroy_failed_total") == 1


def test_stale_sockets_are_those_of_the_last_search(metrics: Metrics) -> None:
    metrics.sockets_counted(SocketCounts(reconnected=3, left=2))
    metrics.sockets_counted(SocketCounts(reconnected=1, destroyed=1, not_destroyed=1, left=1, translated=4))
    assert value(metrics, "ebpfproxy_sockets_reconnected_total") == 4
    assert value(metrics, "ebpfproxy_sockets_stale") == 1
    assert value(metrics, "ebpfproxy_sockets_translated") == 4
    assert value(metrics, "ebpfproxy_sockets_destroyed_total") == 1
    assert value(metrics, "ebpfproxy_sockets_destroy_failed_total") == 1


def test_maps_are_read_at_each_scrape_and_not_before() -> None:
    reads: list[int] = []

    def report() -> Report:
        reads.append(1)
        return Report({"services": TableUse(len(reads), 64)})

    metrics = Metrics(report)
    assert not reads
    for scrape in (1, 2):
        families = {family.name: family for family in metrics.registry.collect()}
        assert families["ebpfproxy_map_entries"].samples[0].value == scrape
        assert families["ebpfproxy_map_capacity"].samples[0].value == 64


def test_two_metrics_objects_share_no_state() -> None:
    one, other = Metrics(), Metrics()
    one.invalid("Service")
    assert value(other, "ebpfproxy_invalid_objects_total", kind="Service") is None


def test_metrics_have_the_prometheus_text_format_by_default(server: MetricsServer) -> None:
    answer = ask(server.port, "/metrics")
    assert answer.code == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(answer.body.decode())
    assert "kubeproxy_proxy_livez" in {family.name for family in families}


def test_openmetrics_is_returned_if_requested(server: MetricsServer) -> None:
    answer = ask(server.port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.body.endswith(b"# EOF\n")
    families = parse_openmetrics(answer.body.decode())  # type: ignore[no-untyped-call]
    assert "kubeproxy_sync_proxy_rules_duration_seconds" in {family.name for family in families}


def test_metrics_are_compressed_if_requested(server: MetricsServer) -> None:
    answer = ask(server.port, "/metrics", Accept_Encoding="deflate, gzip;q=0.9")
    assert answer.headers["Content-Encoding"] == "gzip"
    assert b"ebpfproxy_build_info" in gzip.decompress(answer.body)


def test_the_response_of_proxy_mode_is_only_its_name(server: MetricsServer) -> None:
    answer = ask(server.port, "/proxyMode")
    assert (answer.code, answer.body) == (200, b"ebpf")
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_the_proxy_mode_is_read_at_each_request(metrics: Metrics) -> None:
    modes = iter(["auto", "ebpf"])
    server = MetricsServer(("127.0.0.1", 0), metrics, lambda: next(modes))
    server.start()
    try:
        assert [ask(server.port, "/proxyMode").body for _ in range(2)] == [b"auto", b"ebpf"]
    finally:
        server.stop()


def test_healthz_of_the_metrics_server_is_always_ok(server: MetricsServer) -> None:
    answer = ask(server.port, "/healthz")
    assert (answer.code, answer.body) == (200, b"ok")


@pytest.mark.parametrize("path", ["/", "/livez", "/metrics/", "/configz", "/proxymode"])
def test_every_other_path_is_not_found(server: MetricsServer, path: str) -> None:
    answer = ask(server.port, path)
    assert (answer.code, answer.body) == (404, b"404 page not found\n")


def test_a_search_for_stale_flows_is_recorded_by_family(metrics: Metrics) -> None:
    metrics.flows_searched(Family.IPV6, 3, 0.002)
    name = "kubeproxy_conntrack_reconciler"
    assert value(metrics, f"{name}_deleted_entries_total", ip_family="IPv6") == 3
    assert value(metrics, f"{name}_sync_duration_seconds_count", ip_family="IPv6") == 1
    assert value(metrics, f"{name}_deleted_entries_total", **IPV4) is None
