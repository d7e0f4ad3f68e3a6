"""Every situation in every mode: the same flows, compared with kube-proxy."""

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from tests.kernel.conftest import MODES
from tests.kernel.differences import DIFFERENCES
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.kernel.zoo.base import Zoo, zoo
from tests.kernel.zoo.flows import DEFAULTS, Flow, in_mode, translated
from tests.kernel.zoo.known_failures import KNOWN_FAILURES
from tests.kernel.zoo.page import rows
from tests.kernel.zoo.situations import SITUATIONS

pytestmark = pytest.mark.kernel

WAYS = MODES | {"ebpf-off": ("ebpf", ("--socket-lb=off",))}
OTHER_MODES = ("nftables", "iptables", "userspace")
ABOUT_NETFILTER = {"marks_of_cni", "closed_before_nat"}
"""The situations that `make test` tries in each of the other modes."""


def cases(ways: Sequence[str], all_ways: Collection[str], each: int = 1) -> list[object]:
    """All situations in all ways. `make test` tries those of `all_ways`, and of the others every `each`-th
    one, each in one way, by turns."""
    turns = itertools.cycle(ways)
    in_turn = {situation: next(turns) for situation in tuple(SITUATIONS)[::each]}
    return [
        pytest.param(
            situation,
            way,
            marks=() if situation in all_ways or in_turn.get(situation) == way else pytest.mark.long,
        )
        for situation in SITUATIONS
        for way in ways
    ]


@pytest.mark.parametrize(("situation", "way"), cases(("ebpf", "ebpf-off"), {"plain"}))
def test_mode_ebpf(situation: str, way: str) -> None:
    check(situation, way)


@pytest.mark.parametrize(("situation", "way"), cases(OTHER_MODES, ABOUT_NETFILTER, each=2))
def test_other_modes(situation: str, way: str) -> None:
    """Netfilter is the same in most situations."""
    check(situation, way)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_mode_ipvs(situation: str) -> None:
    skip_without_ipvs("ipvs")
    check(situation, "ipvs")


def check(situation: str, way: str) -> None:
    """Assert that each flow has the expected result, or exactly the one of KNOWN_FAILURES."""
    mode, flags = WAYS[way]
    with zoo(SITUATIONS[situation]) as node:
        results = expected(node, situation, way)
        with node.agent(mode, flags):
            found = node.results(results)
            for change in node.changes:
                change()
                found = node.results_in_time(results)
    wrong = [f"{flow}: {found[flow]}, not {text}" for flow, text in results.items() if found[flow] != text]
    assert not wrong, "\n".join(wrong)


def expected(node: Zoo, situation: str, way: str) -> dict[Flow, str]:
    """By flow, the result: kube-proxy's, with differences of the situation and the mode, and failures."""
    differences = DIFFERENCES[WAYS[way][0]]
    known = [row for row in KNOWN_FAILURES if way in row.ways and situation in row.situations]
    results = {}
    for flow, usual in DEFAULTS.items():
        if flow.family not in node.families:
            continue
        special = [text for pattern, text in node.expected.items() if flow.matches(pattern)]
        result = special[-1] if special else usual
        by_socket = way == "ebpf" and flow.client not in node.by_packet
        result = translated(flow, result, by_socket, flow.client in node.source, differences)
        result = in_mode(flow, result, node.beyond, differences)
        for row in known:
            if flow.matches(row.flows):
                assert result != row.result, f"{row}: {flow} does not fail"
                result = row.result
        results[flow] = result
    return results


def test_the_documentation_has_the_present_table() -> None:
    page = Path("docs/node-situations.md").read_text()
    assert "\n".join(rows()) in page, "python -m tests.kernel.zoo.page prints the table"
