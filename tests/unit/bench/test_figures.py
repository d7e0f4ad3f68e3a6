"""Evaluation of samples: ratios of the same turn, and counts."""

import resource

import pytest
from rich.console import Console

from ebpfproxy.bench import crossing, report
from ebpfproxy.bench.samples import Ratio, Result, Samples

MODES = ("none", "ebpf", "nftables")


def by_key(samples: Samples) -> dict[tuple[str, str, str], Result]:
    return {(each.mode, each.path, each.metric): each for each in samples.results()}


def drifting() -> Samples:
    """Return samples of a machine that halves its speed each turn, and modes that cost 2 % and 10 %."""
    samples = Samples(MODES, 10)
    for turn, speed in enumerate((100.0, 200.0, 400.0)):
        samples.add("none", "direct", "rr_us", turn, [speed])
        samples.add("ebpf", "direct", "rr_us", turn, [speed * 1.02])
        samples.add("ebpf", "nodeport", "rr_us", turn, [speed * 1.02 * 1.1])
        samples.add("nftables", "nodeport", "rr_us", turn, [speed * 1.02 * 1.1 * (1.5 + turn / 10)])
    return samples


def test_ratios_compare_samples_of_the_same_turn_so_that_a_change_of_speed_has_no_effect() -> None:
    found = by_key(drifting())
    assert found["ebpf", "direct", "rr_us"].of_first == Ratio(1.02, 1.02, 1.02)
    assert found["ebpf", "nodeport", "rr_us"].of_direct == Ratio(1.1, 1.1, 1.1)


def test_modes_are_compared_with_the_first_that_has_the_path() -> None:
    found = by_key(drifting())
    assert found["none", "direct", "rr_us"].of_first is None
    assert found["ebpf", "nodeport", "rr_us"].of_first is None
    assert found["nftables", "nodeport", "rr_us"].of_first == Ratio(1.6, 1.5, 1.7)
    assert found["nftables", "nodeport", "rr_us"].of_direct is None  # it was not measured there


def test_results_of_a_path_are_in_the_order_of_modes() -> None:
    assert [(each.path, each.mode) for each in drifting().results()] == [
        ("direct", "none"),
        ("direct", "ebpf"),
        ("nodeport", "ebpf"),
        ("nodeport", "nftables"),
    ]


def test_counts_add_up_over_rounds_and_have_no_ratio() -> None:
    samples = Samples(MODES, 10)
    for mode in MODES:
        samples.count(mode, "nodeport", "new_failed", 0, 500)
        samples.count(mode, "nodeport", "new_failed", 2, 700)
    found = by_key(samples)["ebpf", "nodeport", "new_failed"]
    assert (found.p50, found.n, found.of_first, found.of_direct) == (2, 1200, None, None)


def shown(*results: Result) -> str:
    console = Console(width=170)
    with console.capture() as capture:
        console.print(report.as_table("nodeport", results))
    return capture.get()


def test_a_ratio_is_shown_with_three_decimals_and_its_range() -> None:
    ratio = Ratio(0.9712, 0.94, 1.013)
    one = Result("rr_per_s", "one-node", "ebpf", 10, 970.0, 970.0, 970.0, 3, of_first=ratio)
    assert "0.971 0.94–1.01" in shown(one)


def test_an_empty_column_is_left_out() -> None:
    text = shown(Result("first_sync_s", "", "ebpf", 10, 3.25, 3.25, 3.25, 1))
    assert "3.25" in text
    assert not any(word in text.splitlines()[2] for word in ("path", "of direct", "of first"))


def test_ratios_are_objects_in_json() -> None:
    samples = drifting()
    (ebpf,) = (
        each
        for each in report.as_object("nodeport", samples.results())["results"]
        if (each["mode"], each["path"]) == ("ebpf", "nodeport")
    )
    assert ebpf["of_direct"] == {"median": 1.1, "least": 1.1, "most": 1.1}
    assert ebpf["of_first"] is None


@pytest.mark.parametrize("held", [1, 200_000])
def test_held_connections_are_distributed_so_that_no_process_exceeds_its_file_limit(held: int) -> None:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert -(-held // crossing.processes(held)) < limit
