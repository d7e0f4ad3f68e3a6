"""The comparison without a kernel: its evaluation, formats, objects and the flags of kube-proxy."""

import csv
import io
import json
from pathlib import Path

import pytest

from ebpfproxy.api.event import ServiceChanged, SliceChanged
from ebpfproxy.api.parse import parse_service, parse_slice
from ebpfproxy.bench import compare_cases, kube_proxy, results
from ebpfproxy.bench.results import Collector, Comparison, Interval
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab.manifests import Object
from tests.unit.bench.comparisons import comparison


def test_modes_are_compared_with_the_first_turn_by_turn() -> None:
    """The machine halves its speed each turn; the mode always costs 50 %."""
    collector = Collector(10, ["none", "ebpf"])
    for turn, speed in enumerate((100.0, 200.0, 400.0)):
        collector.add("dns", "dns_us", "ebpf", turn, [speed * 1.5] * 3)
        collector.add("dns", "dns_us", "none", turn, [speed])
    none, ebpf = collector.figures()
    assert (none.mode, none.ratio, none.base, none.n) == ("none", None, "", 3)
    assert (ebpf.base, ebpf.ratio, ebpf.n) == ("none", Interval(1.5, 1.5, 1.5), 9)
    assert (ebpf.median, ebpf.at(0.01), ebpf.at(0.99)) == (300.0, 150.0, 600.0)


def test_a_mode_is_compared_with_the_first_that_has_the_metric() -> None:
    collector = Collector(10, ["none", "ebpf", "nftables"])
    collector.add("change", "change_ms", "ebpf", 0, [2.0])
    collector.add("change", "change_ms", "nftables", 0, [5.0])
    assert [(each.mode, each.base) for each in collector.figures()] == [("ebpf", ""), ("nftables", "ebpf")]


def test_a_mode_without_a_common_turn_has_no_ratio() -> None:
    collector = Collector(10, ["none", "ebpf"])
    collector.add("dns", "dns_us", "none", 0, [1.0])
    collector.add("dns", "dns_us", "ebpf", 1, [1.0])
    assert [each.ratio for each in collector.figures()] == [None, None]


def test_the_confidence_interval_is_within_the_values_and_narrower_with_equal_ones() -> None:
    wide = results.interval([1.0, 1.1, 1.2, 1.3, 3.0])
    assert wide
    assert 1.0 <= wide.low < wide.median == 1.2 < wide.high <= 3.0
    assert results.interval([1.0, 1.1, 1.2, 1.3, 3.0]) == wide, "it does not depend on chance"
    narrow = results.interval([1.0, *[1.2] * 20, 3.0])
    assert narrow == Interval(1.2, 1.2, 1.2)
    assert results.interval([]) is None


def test_json_is_read_back_as_it_was() -> None:
    found = comparison()
    assert results.from_json(found.to_json(), "report.json") == found


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"figures": []}'])
def test_other_json_is_rejected_with_the_name_of_the_file(raw: bytes) -> None:
    with pytest.raises(ConfigError, match=r"cannot read report\.json"):
        results.from_json(raw, "report.json")


def test_csv_has_a_line_for_each_figure() -> None:
    found = comparison()
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert len(rows) == len(found.figures)
    for row, figure in zip(rows, found.figures, strict=True):
        assert (row["metric"], row["mode"], int(row["services"])) == (
            figure.metric,
            figure.mode,
            figure.services,
        )
        assert float(row["p50"]) == figure.median
        assert row["ratio"] == (str(figure.ratio.median) if figure.ratio else "")


def test_figures_of_a_metric_are_ordered_by_services() -> None:
    found = comparison()
    by_mode = Comparison(found.environment, found.method, found.figures[::-1]).of("connect_us")
    assert list(by_mode) == list(found.method.modes)
    assert [each.services for each in by_mode["ebpf"]] == [1, 1000]


def test_each_tenth_service_has_udp_and_node_ports_and_its_slice_serves_them() -> None:
    count = 21
    parsed = [parse_service(_encoded(each)) for each in compare_cases.services(count)]
    slices = [parse_slice(_encoded(each)) for each in compare_cases.slices(count, 2)]
    assert len(parsed) == len(slices) == count
    for index, (changed, of_slice) in enumerate(zip(parsed, slices, strict=True)):
        assert isinstance(changed, ServiceChanged)
        assert isinstance(of_slice, SliceChanged)
        assert changed.service
        assert of_slice.slice
        ports = {(port.protocol.name, port.node_port) for port in changed.service.ports}
        if index % 10:
            assert ports == {("TCP", 0)}
        else:
            assert ports == {("TCP", 15000 + index), ("UDP", 15000 + index)}
        served = {(port.name, port.protocol) for port in of_slice.slice.ports}
        assert {(port.name, port.protocol) for port in changed.service.ports} <= served


def _encoded(value: Object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("version", "mode", "gated"),
    [
        ("v1.30.5", "nftables", True),
        ("v1.29.0", "nftables", True),
        ("v1.30.5", "iptables", False),
        ("v1.31.0", "nftables", False),
        ("v1.34.1", "nftables", False),
    ],
)
def test_kube_proxy_gets_the_gate_of_mode_nftables_only_where_it_is_needed(
    version: str, mode: str, gated: bool
) -> None:
    settings = kube_proxy.configuration(mode, "node-1", "10.244.0.0/15", Path("/kubeconfig"), version)
    assert settings["mode"] == mode
    assert ("featureGates" in settings) is gated


def test_kube_proxy_changes_no_limit_of_the_machine() -> None:
    settings = kube_proxy.configuration("iptables", "node-1", "10.244.0.0/15", Path("/k"), "v1.34.0")
    assert set(settings["conntrack"].values()) == {0, "0s"}
    assert settings["oomScoreAdj"] == 0


def test_a_file_that_is_not_kube_proxy_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not kube-proxy"):
        kube_proxy.version(Path("/bin/true"))
    with pytest.raises(ConfigError, match="cannot run"):
        kube_proxy.version(tmp_path / "missing")


def test_the_version_of_kube_proxy_is_read(tmp_path: Path) -> None:
    binary = tmp_path / "kube-proxy"
    binary.write_text("#!/bin/sh\necho Kubernetes v1.34.2\n")
    binary.chmod(0o755)
    assert kube_proxy.version(binary) == "v1.34.2"
