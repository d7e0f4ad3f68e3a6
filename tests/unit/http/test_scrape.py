"""Metrics that are read at each scrape."""

import logging

import pytest

from ebpfproxy.errors import NotFound
from ebpfproxy.http.metrics import Metrics
from ebpfproxy.http.scrape import SCRAPE_FAILED
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.model.counters import (
    OTHER,
    IptablesCounts,
    LocalhostCounts,
    NftablesCounts,
    PacketCounts,
    Report,
    ServiceTraffic,
    SyncCounts,
)
from ebpfproxy.model.device import DeviceSide

WEB = ServiceTraffic("default/web:http", "TCP", "IPv4", 1, 2, 300, 4, 500)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def carried(*traffic: ServiceTraffic) -> Metrics:
    return Metrics(lambda: Report(traffic=traffic))


def names(metrics: Metrics) -> set[str]:
    """Return the Services that have series."""
    return {
        sample.labels["service"]
        for family in metrics.registry.collect()
        if family.name == "ebpfproxy_service_packets"
        for sample in family.samples
    }


def test_events_have_a_reason_and_are_read_at_each_scrape() -> None:
    counts = {"source_refused": 3}
    metrics = Metrics(lambda: Report(events=counts))
    assert value(metrics, "ebpfproxy_datapath_events_total", reason="source_refused") == 3
    counts["source_refused"] = 4
    assert value(metrics, "ebpfproxy_datapath_events_total", reason="source_refused") == 4


def test_traffic_of_a_service_has_a_direction() -> None:
    metrics = carried(WEB)
    labels = {"namespace": "default", "service": "web", "port": "http", "protocol": "TCP", "family": "IPv4"}
    assert value(metrics, "ebpfproxy_service_new_flows_total", **labels) == 1
    assert value(metrics, "ebpfproxy_service_packets_total", **labels, direction="in") == 2
    assert value(metrics, "ebpfproxy_service_bytes_total", **labels, direction="in") == 300
    assert value(metrics, "ebpfproxy_service_packets_total", **labels, direction="out") == 4
    assert value(metrics, "ebpfproxy_service_bytes_total", **labels, direction="out") == 500


def test_an_unnamed_port_has_an_empty_label() -> None:
    metrics = carried(WEB._replace(service="default/web"))
    labels = {"namespace": "default", "service": "web", "port": "", "protocol": "TCP", "family": "IPv4"}
    assert value(metrics, "ebpfproxy_service_new_flows_total", **labels) == 1


def test_services_that_are_not_counted_separately_have_series_without_a_namespace() -> None:
    metrics = carried(WEB, WEB._replace(service=OTHER, protocol="", family="", packets_in=7))
    labels = {"namespace": "", "service": "other", "port": "", "protocol": "", "family": ""}
    assert value(metrics, "ebpfproxy_service_packets_total", **labels, direction="in") == 7
    assert names(metrics) == {"web", "other"}


def test_a_failed_read_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    def closed() -> Report:
        raise NotFound("map traffic is closed")

    metrics = Metrics(closed, lambda: (DeviceSide("eth0", "ingress", ("other",)),))
    metrics.invalid("Service")
    assert value(metrics, "ebpfproxy_invalid_objects_total", kind="Service") == 1
    assert value(metrics, "ebpfproxy_device_position", device="eth0", side="ingress") == 2
    with caplog.at_level(logging.WARNING):
        assert names(metrics) == set()
    assert set(caplog.messages) == {SCRAPE_FAILED}


def test_devices_with_another_program_first_and_bypassed_devices_have_series() -> None:
    sides = [
        DeviceSide("eth0", "ingress", ("cil_from_netdev (tcx program 7)",)),
        DeviceSide("eth1", "egress", ("one", "two"), contested=True),
        DeviceSide("eth1", "egress", unreached=True),
    ]
    metrics = Metrics(bypassed=lambda: sides)
    assert value(metrics, "ebpfproxy_device_position", device="eth0", side="ingress") == 2
    assert value(metrics, "ebpfproxy_device_position", device="eth1", side="egress") == 3
    assert value(metrics, "ebpfproxy_device_unreached", device="eth1", side="egress") == 1
    assert value(metrics, "ebpfproxy_device_unreached", device="eth0", side="ingress") is None
    assert value(metrics, "ebpfproxy_bypassed_device_sides") == 1
    assert value(Metrics(), "ebpfproxy_bypassed_device_sides") == 0


SYNCS = "kubeproxy_sync_proxy_rules_"


def series(*counts: SyncCounts) -> dict[str, float]:
    """Return the values of the metrics that depend on the mode."""
    registry = Metrics(lambda: Report(syncs=counts)).registry
    return {
        f"{sample.name.removeprefix(SYNCS)} {' '.join(sample.labels.values())}": sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith((f"{SYNCS}iptables", f"{SYNCS}nftables"))
    }


def test_only_the_metrics_of_the_current_mode_exist() -> None:
    rules = {"filter": 3, "nat": 9}
    iptables = IptablesCounts(Family.IPV4, 2, 1, rules, {"filter": 0, "nat": 4})
    assert series(iptables) == {
        "iptables_restore_failures_total IPv4": 2,
        "iptables_partial_restore_failures_total IPv4": 1,
        "iptables_total filter IPv4": 3,
        "iptables_total nat IPv4": 9,
        "iptables_last filter IPv4": 0,
        "iptables_last nat IPv4": 4,
    }
    of_ipvs = IptablesCounts(Family.IPV6, 2, partial_failures=None)
    assert series(of_ipvs) == {"iptables_restore_failures_total IPv6": 2}
    assert series(NftablesCounts(Family.IPV6, 5, 6)) == {
        "nftables_sync_failures_total IPv6": 5,
        "nftables_cleanup_failures_total IPv6": 6,
    }
    assert series() == {}


def test_node_ports_on_loopback_have_the_metrics_of_kube_proxy() -> None:
    of_v6 = LocalhostCounts(Family.IPV6, 2, 3, {Protocol.UDP: 4, Protocol.SCTP: 5})
    registry = Metrics(lambda: Report(syncs=(of_v6,))).registry
    prefix, family = "kubeproxy_nftables_localhost_nodeport", {"ip_family": "IPv6"}
    assert registry.get_sample_value(f"{prefix}_listeners", family) == 2
    assert registry.get_sample_value(f"{prefix}_listener_creation_failures_total", family) == 3
    rejected = f"{prefix}_rejected_packets_total"
    assert registry.get_sample_value(rejected, family | {"protocol": "UDP"}) == 4
    assert registry.get_sample_value(rejected, family | {"protocol": "SCTP"}) == 5
    names = {family.name for family in Metrics().registry.collect()}
    assert not any(name.startswith(prefix) for name in names)


def test_packets_that_rules_count_have_the_names_of_kube_proxy() -> None:
    metrics = Metrics(lambda: Report(syncs=(PacketCounts(3, None),)))
    assert value(metrics, "kubeproxy_iptables_ct_state_invalid_dropped_packets_total") == 3
    assert value(metrics, "kubeproxy_iptables_localhost_nodeports_accepted_packets_total") is None
    assert value(Metrics(), "kubeproxy_iptables_ct_state_invalid_dropped_packets_total") is None
