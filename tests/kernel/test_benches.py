"""Every benchmark of the packet path in its smallest form: that it measures, not what."""

from collections.abc import Iterable

import pytest

from ebpfproxy.bench import churn, crossing, flows, nodeport, overhead, packet
from ebpfproxy.bench.connect import Size
from ebpfproxy.bench.report import Result

pytestmark = pytest.mark.kernel


def by_metric(results: Iterable[Result]) -> dict[tuple[str, str], Result]:
    return {(each.path, each.metric): each for each in results}


def silent(text: str) -> None:
    """Nobody looks at the progress."""


def test_a_nodeport_is_measured_on_every_path() -> None:
    found = by_metric(nodeport.run([Size(2, 1, 20, 1)], ["ebpf"], [False], 2, silent))
    for path in crossing.PATHS:
        for metric in ("connect_us", "crr_us", "rr_us", "rr_per_s", "tcp_mbit_s"):
            assert found[path, metric].p50 > 0
    assert found["nodeport-remote", "tcp_mbit_s_ratio"].p50 > 0


def test_a_packet_is_measured_only_where_it_is_translated_as_meant() -> None:
    found = by_metric(packet.run([10], 2, 1000, 1, silent))
    floor = found["", "floor_ns"].p50
    assert 0 < floor < found["ingress-v4", "flow_port_ns"].p50
    assert {path for path, metric in found if metric == "reply_ns"} == {"egress-v4", "egress-v6"}
    assert found["ingress-v4", "new_flow_ns"].p50 > 0


def test_overhead_is_measured_with_and_without_programs_on_both_ways() -> None:
    found = by_metric(overhead.run(1, 2, 320, "ebpf", silent))
    for way in ("one-node", "two-nodes"):
        for state in overhead.STATES:
            for metric in ("tcp_mbit_s", "udp_per_s", "rr_per_s"):
                assert found[f"{way}-{state}", f"{metric}_ratio"].p50 > 0


def test_flows_are_held_opened_and_lost_by_nobody() -> None:
    found = by_metric(flows.run(500, 1.0, 0.2, 0, "ebpf", silent))
    assert found["nodeport", "flow_entries"].p50 >= 2 * 500
    for metric in ("held_unopened", "held_silent", "new_failed"):
        assert found["nodeport", metric].p50 == 0
    assert found["nodeport", "event_packet_new"].p50 > 500


def test_no_connection_from_outside_fails_while_agents_die() -> None:
    found = by_metric(churn.run(0, 2.0, 10.0, churn.Fate(crash_s=0.5), ["ebpf"], silent, ["outside"]))
    assert found["nodeport", "crashes"].p50 >= 1
    for metric in churn.FAILURES:
        assert found["nodeport", metric].p50 == 0
