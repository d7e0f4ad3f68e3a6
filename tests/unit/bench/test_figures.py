"""What becomes of samples: pairs of the same turn, and what other programs report."""

import resource
from typing import Any

import pytest
from rich.console import Console

from ebpfproxy.bench import flows, iperf, overhead, packet, report
from ebpfproxy.bench.report import Result


def test_a_ratio_is_of_the_same_turn_so_that_a_machine_that_drifts_does_no_harm() -> None:
    found = {
        ("one-node", "bare", "rr_per_s"): [100.0, 200.0, 400.0],
        ("one-node", "pods", "rr_per_s"): [98.0, 196.0, 392.0],
    }
    by_metric = {(each.path, each.metric): each for each in overhead.results(found, "ebpf")}
    assert by_metric["one-node-pods", "rr_per_s_ratio"].p50 == 0.98
    assert ("one-node-bare", "rr_per_s_ratio") not in by_metric


def test_a_ratio_is_shown_to_the_thousandth_and_beside_its_baseline() -> None:
    results = [
        Result("ebpf", "one-node-bare", 10, "rr_per_s", 1000.0, 1000.0, 1000.0, 1),
        Result("ebpf", "one-node-pods", 10, "rr_per_s", 970.0, 970.0, 970.0, 1),
        Result("ebpf", "one-node-pods", 10, "rr_per_s_ratio", 0.9712, 0.9712, 0.9712, 1),
    ]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report.as_table("overhead", results))
    assert "0.971" in capture.get()
    assert "0.97 " in capture.get()


def test_datagrams_that_were_lost_did_not_arrive() -> None:
    total: dict[str, Any] = {"packets": 1000, "lost_packets": 400, "seconds": 2.0}
    assert iperf.arrived({"end": {"sum": total}}) == 300.0


def test_throughput_is_what_the_receiver_counts() -> None:
    end = {"sum_sent": {"bits_per_second": 9e9}, "sum_received": {"bits_per_second": 8e9}}
    assert iperf.received_megabits({"end": end}) == 8000.0


def test_other_metrics_are_no_events() -> None:
    text = (
        'ebpfproxy_map_entries{map="flows"} 7.0\nebpfproxy_datapath_events_total{reason="healed"} 1.5e+06\n'
    )
    assert flows.events(text) == {"healed": 1.5e6}


@pytest.mark.parametrize("held", [1, 200_000])
def test_connections_are_shared_by_processes_that_may_have_as_many_files(held: int) -> None:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert -(-held // flows.processes(held)) < limit


def test_every_translation_goes_to_and_fro() -> None:
    """Two entries each, and no entry of one case is another one's."""
    translating = [case for case in packet.cases() if case.flows]
    assert all(len(case.flows) == 2 for case in translating)
    assert len({key for case in translating for key in case.flows}) == 2 * len(translating)
    assert len({(case.metric, case.path) for case in packet.cases()}) == len(list(packet.cases()))
