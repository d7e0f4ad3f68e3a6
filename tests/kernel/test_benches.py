"""Every benchmark with its smallest size: it measures each metric in every mode. Results are not judged."""

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ebpfproxy.backends import selection
from ebpfproxy.bench import (
    churn,
    compare,
    compare_cases,
    connect,
    crossing,
    kube_proxy,
    nodeport,
    packet,
    proxies,
    report,
    results,
    source,
    sync,
)
from ebpfproxy.bench.agent_runner import FaultSchedule
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.results import LeftOut, Method
from ebpfproxy.bench.samples import Result
from ebpfproxy.bench.sides import side_by_side
from ebpfproxy.cli import bench_compare
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Lab, Netns, Pod, PodNetwork
from tests.kernel.cluster import eventually
from tests.kernel.dsr_nodes import bytes_sent, has_geneve
from tests.kernel.ipvs_here import lacks_ipvs

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600)]


long = pytest.mark.long
"""The measured behavior has tests of its own, or another benchmark's test covers the same code."""


@pytest.fixture(scope="module")
def modes(request: pytest.FixtureRequest) -> list[str]:
    """All modes; without ipvs if the kernel does not support it. In `make test`, one with BPF maps and one
    without."""
    if request.config.getoption("sample"):
        return ["ebpf", "nftables"]
    return [mode.name for mode in selection.MODES if mode.name != "ipvs" or not lacks_ipvs()]


def by_key(results: Iterable[Result]) -> dict[tuple[str, str, str], Result]:
    return {(each.mode, each.path, each.metric): each for each in results}


Downloading = tuple[Load, "subprocess.Popen[bytes]", "subprocess.Popen[bytes]"]


def silent(text: str, done: float | None = None, /) -> None:
    """Discard progress messages."""


def test_connections_are_measured_in_every_mode(modes: list[str]) -> None:
    found = by_key(connect.run([connect.Size(2, 1, 20, 1)], modes, silent))
    for mode in modes:
        for suffix in connect.CLIENT_SUFFIXES:
            for metric in connect.METRICS.values():
                service = found[mode, f"clusterip{suffix}", metric]
                assert service.n == 20
                assert service.of_direct
                assert found[mode, f"direct{suffix}", metric].of_first
    assert {path for mode, path, _ in found if mode == "none"} == {"direct", "direct-host"}


def test_a_nodeport_and_pods_are_measured_on_every_path_while_connections_are_held() -> None:
    size = nodeport.Size(2, 1, 20, 1, megabytes=2, held=50)
    found = by_key(nodeport.run([size], ["ebpf-redirect", "nftables"], silent))
    for metric in nodeport.METRICS:
        for path in crossing.INSIDE_PATHS if metric.inside else crossing.PATHS:
            for mode in ("ebpf-redirect", "nftables"):
                assert found[mode, path, metric.name].p50 > 0
            assert (("none", path, metric.name) in found) is (metric.inside or path in crossing.DIRECT_PATHS)
    ratio = found["nftables", "nodeport-remote", "tcp_mbit_s"]
    assert ratio.of_direct
    assert ratio.of_first
    assert found["nftables", "pods-two-nodes", "sent_ns"].of_first
    for mode in ("none", "ebpf-redirect", "nftables"):
        for failure in nodeport.FAILURES:
            assert (found[mode, "", failure].p50, found[mode, "", failure].n) == (0, 50)
    assert found["nftables", "", "agents_rss_mb"].p50 > 10


def test_connections_that_end_while_they_are_held_are_counted() -> None:
    with Lab("test-held", 66, PodNetwork.ROUTED) as lab:
        found = crossing.Crossing(lab, Load(lab.folder), held=10)
        pod = found.pods[crossing.LOCAL]
        server = found.load.serve(pod, 8081)
        held = found.hold(found.load.targets("pod", [(pod.v4, 8081)]), 10)
        server.kill()
        server.wait()
        assert (held.unopened, held.attempts) == (0, 10)
        assert [each["failed"] for each in found.end(held)] == [10]


def test_a_download_with_direct_server_return_bypasses_the_dialed_node() -> None:
    if not has_geneve():
        pytest.skip("this kernel has no Geneve")
    with side_by_side(["ebpf-dsr"], _crossing, silent, flags=crossing.FLAGS, pods=PodNetwork.ROUTED) as (
        side,
    ):
        dialed, targets = side.lab.nodes[0], side.testbed.targets(["nodeport-remote"], 2, 1)
        before = bytes_sent(dialed)
        side.testbed.load.measure(side.testbed.client, "get", targets, 1, megabytes=20)
        passed = bytes_sent(dialed) - before
    assert 0 < passed < 2_000_000  # acknowledgments of 20 MiB


def _crossing(lab: Lab) -> crossing.Crossing:
    found = crossing.Crossing(lab, Load(lab.folder))
    found.write(2, 1)
    return found


@long
def test_packets_are_measured_in_every_mode_and_in_the_bpf_programs(modes: list[str]) -> None:
    found = by_key(packet.run([packet.Size(10, 2, 60, 1, 1000)], modes, silent))
    for mode in modes:
        for metric in packet.METRICS.values():
            assert found[mode, "nodeport", metric].n == 60
            assert found[mode, "direct", metric].of_first
    floor = found["ebpf", "", "floor_ns"].p50
    assert 0 < floor < found["ebpf", "ingress-v4", "flow_port_ns"].p50
    assert {path for _, path, metric in found if metric == "reply_ns"} == {"egress-v4", "egress-v6"}
    assert found["ebpf", "ingress-v4", "new_flow_ns"].p50 > 0


def test_every_datagram_of_the_packet_benchmark_reaches_its_pod() -> None:
    """Otherwise the benchmark would not time a packet's complete path."""
    with Lab("test-sent", 67) as lab:
        load = Load(lab.folder)
        pod = lab.pod("server")
        load.serve(pod, 8080)
        before = received(pod)
        (took,) = load.measure(lab.outside, "packet", load.targets("pod", [(pod.v4, 8080)]), 1000)
        after = received(pod)
    assert len(took) == 1000
    assert after - before >= 1000


def protocol_counters(netns: Netns, protocol: str) -> dict[str, int]:
    """The kernel's counters (proc_net_snmp)."""
    lines = netns.run(["cat", "/proc/net/snmp"]).stdout.splitlines()
    names, figures = (line.split()[1:] for line in lines if line.startswith(f"{protocol}:"))
    return dict(zip(names, map(int, figures), strict=True))


def received(pod: Pod) -> int:
    """Datagrams that reached a socket: delivered, or dropped by its filter."""
    udp = protocol_counters(pod, "Udp")
    return udp["InDatagrams"] + udp["InErrors"]


def test_starts_and_changes_are_measured_in_every_mode(modes: list[str]) -> None:
    found = by_key(sync.run(sync.Size(1, 1, 3, 1, sync_period=0.2), modes, silent))
    for mode in modes:
        assert found[mode, "clusterip", "change_ms"].n == 3
        assert found[mode, "", "agent_latency_ms"].n >= 3
        assert found[mode, "", "stall_ms"].n == 1
        assert 0 <= found[mode, "", "idle_cores"].p50 < 2
        for metric in (
            "healthz_s",
            "first_sync_s",
            "restart_sync_s",
            "rss_first_mb",
            "rss_mb",
            "peak_rss_mb",
        ):
            assert found[mode, "", metric].p50 > 0
        assert found[mode, "", "healthz_s"].p50 < found[mode, "", "first_sync_s"].p50
        assert found[mode, "clusterip", "first_answer_s"].p50 > 0


@long
def test_changes_at_an_api_server_are_measured_with_session_affinity() -> None:
    size = sync.Size(10, 2, 3, 1, sync_period=1.0, affinity=50, source=source.API)
    found = by_key(sync.run(size, ["ebpf", "nftables"], silent))
    for mode in ("ebpf", "nftables"):
        assert found[mode, "clusterip", "change_ms"].n == 3
        assert found[mode, "", "restart_sync_s"].p50 > 0


@long
def test_a_comparison_has_every_case_in_every_mode(tmp_path: Path) -> None:
    """`bench compare --quick` with tiny numbers."""
    outputs = [tmp_path / name for name in ("report.json", "report.csv")]
    arguments = "--quick --services=1,11 --endpoints=2 --rounds=2 --seconds=0.02 --starts=1 --changes=2"
    result = CliRunner().invoke(
        bench_compare.command, [*arguments.split(), *(f"--output={path}" for path in outputs)]
    )
    assert result.exit_code == 0, result.output
    found = results.from_json(outputs[0].read_bytes(), "report.json")
    measured = {(each.metric, each.mode, each.services): each for each in found.figures}
    others = found.method.modes[1:]
    assert {"ebpf", "nftables", "iptables"} <= set(others)
    assert not found.left_out
    for services in (1, 11):
        for case in compare_cases.TRAFFIC.values():
            for mode in ("none", *others):
                assert measured[case.metric, mode, services].median > 0
            for mode in others:
                figure = measured[case.metric, mode, services]
                assert figure.base == "none"
                assert figure.ratio
        for metric in compare_cases.OF_STARTS.values():
            for mode in others:
                assert measured[metric, mode, services].median > 0
        assert measured["change_ms", "ebpf", services].n == 2
    assert len(outputs[1].read_text().splitlines()) == 1 + len(found.figures)


def test_a_mode_that_starts_too_slowly_is_left_out() -> None:
    method = Method("", ("ebpf",), ("connect", "startup"), (1,), 1, 1, 0.02, 1, 1, limit=0.01)
    found = compare.run(method, silent)
    assert found.left_out == (LeftOut("ebpf", 1),)
    assert {each.mode for each in found.figures} == {"none"}


def test_kube_proxy_that_ends_is_reported_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has the version of kube-proxy, and ends."""
    monkeypatch.setattr(proxies, "_SLICE", 0.2)
    binary = tmp_path / "kube-proxy"
    binary.write_text(
        "#!/bin/sh\ncase $1 in --version) echo Kubernetes v1.34.0;; *) echo broken; exit 3;; esac\n"
    )
    binary.chmod(0o755)
    method = Method("", ("kube-proxy-iptables",), ("startup",), (1,), 1, 1, 0.02, 1, 1, limit=30.0)
    with pytest.raises(kube_proxy.KubeProxyFailed, match="ended with status 3") as raised:
        compare.run(method, silent, binary)
    assert raised.value.hint == "broken"


def test_more_held_connections_than_conntrack_can_track_are_rejected_at_once() -> None:
    most = report.conntrack("max") or pytest.skip("the kernel tracks no connections")
    size = nodeport.Size(2, 1, 20, 1, megabytes=2, held=most)
    with pytest.raises(ConfigError, match="nf_conntrack_max is too small for nftables"):
        list(nodeport.run([size], ["ebpf", "nftables"], silent))


@long
def test_no_external_connection_fails_while_agents_are_killed() -> None:
    size = churn.Size(0, 2.0, 10.0)
    found = by_key(churn.run(size, FaultSchedule(crash_s=0.5), ["ebpf"], silent, ["outside"]))
    assert found["ebpf", "nodeport", "crashes"].p50 >= 1
    for metric in (*churn.FAILURES, *churn.LEAKS):
        assert found["ebpf", "nodeport", metric].p50 == 0


@long
def test_no_connection_or_download_fails_while_the_mode_switches_through_all() -> None:
    """One round: in the end, the first mode serves again."""
    modes = ["ebpf", "iptables-legacy", "nftables"]
    size = churn.Size(0, 2.0 * len(modes) + 3.0, 50.0)
    found = by_key(churn.run(size, FaultSchedule(switch_s=2.0), modes, silent, churn.CLIENTS))
    label = ",".join(modes)
    assert found[label, "both", "switches"].p50 >= len(modes)
    assert found[label, "both", "download_failed"].n == len(churn.CLIENTS)
    assert found[label, "both", "download_mb"].p50 > 0
    for metric in churn.FAILURES:
        assert found[label, "both", metric].p50 == 0


@long
def test_modes_without_switches_have_one_churn_each() -> None:
    found = by_key(
        churn.run(churn.Size(200, 60.0, 10.0), FaultSchedule(), ["nftables", "iptables"], silent, ["pod"])
    )
    for mode in ("nftables", "iptables"):
        assert found[mode, "clusterip", "connects_failed"].n >= 200


@long
@pytest.mark.parametrize("where", source.NAMES)
def test_changes_of_other_services_have_a_lag_and_leave_nothing_behind(where: str) -> None:
    size = churn.Size(0, 5.0, 50.0, rate=20.0, services=120, endpoints=3, changes=100.0, source=where)
    found = by_key(churn.run(size, FaultSchedule(), ["ebpf"], silent, ["pod"]))
    assert 50 < found["ebpf", "", "changes_per_s"].p50 <= 100
    lag = found["ebpf", "", "lag_ms"]
    assert lag.n > 50
    assert 0 < lag.p50 <= lag.p99
    cores, without = (
        found["ebpf", "", metric].p50 for metric in ("agent_cores", "agent_cores_without_manifests")
    )
    assert 0 < without < cores if where == source.MANIFESTS else without == cores > 0
    assert found["ebpf", "", "rss_begin_mb"].p50 > 0
    assert found["ebpf", "", "descriptors_end"].p50 > 0
    for metric in (*churn.FAILURES, *churn.LEAKS):
        assert found["ebpf", "clusterip", metric].p50 == 0


def test_lag_of_changes_is_measured_in_a_mode_without_bpf_maps() -> None:
    size = churn.Size(0, 1.0, 50.0, rate=20.0, services=20, endpoints=3, changes=20.0, source=source.API)
    found = by_key(churn.run(size, FaultSchedule(), ["nftables"], silent, ["pod"]))
    assert found["nftables", "", "lag_ms"].n > 5
    assert ("nftables", "clusterip", "leaked_slots") not in found


def test_clients_keep_to_the_given_connection_rate() -> None:
    size = churn.Size(0, 0.5, 100.0, rate=20.0)
    found = by_key(churn.run(size, FaultSchedule(), ["nftables"], silent, ["pod"]))
    made = found["nftables", "clusterip", "connects_failed"].n
    assert 0 < made < 250, "without a rate, a thousand in this time"


@pytest.fixture
def downloading() -> Iterator[Downloading]:
    """The load, a server and a client during a download."""
    with Lab("test-download", 68) as lab:
        load = Load(lab.folder)
        pod, client = lab.pod("server"), lab.pod("client")
        server = load.serve(pod, 8080)
        download = load.start_download(client, load.targets("pod", [(pod.v4, 8080)]), 10.0)
        eventually(lambda: sent(pod) > 100, "a hundred segments of the download")
        yield load, server, download


def sent(pod: Pod) -> int:
    """The number of TCP segments."""
    return protocol_counters(pod, "Tcp")["OutSegs"]


def test_a_download_whose_server_ends_counts_as_failed(downloading: Downloading) -> None:
    load, server, download = downloading
    server.kill()
    server.wait()
    report = load.end_churn(download)
    assert report["failed"] == 1
    assert set(report["errors"]) <= {"ENODATA", "ECONNRESET", "EPIPE"}


def test_a_download_ended_by_its_client_counts_as_complete(downloading: Downloading) -> None:
    load, _, download = downloading
    report = load.end_churn(download)
    assert (report["failed"], report["errors"]) == (0, {})
    assert report["bytes"] > 0
