"""Every situation in every mode: the same flows, compared with kube-proxy."""

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
OTHER_WAYS = [way for way in WAYS if way not in ("ebpf", "ipvs")]
NOT_EBPF = {"marks_of_cni"}
IN_OTHER_WAYS = {*tuple(SITUATIONS)[::4], *NOT_EBPF}
"""The situations in which `make test` tries other modes: netfilter is the same in most."""


def situations(left_to_test_all: set[str]) -> list[object]:
    return [
        pytest.param(each, marks=[pytest.mark.long] if each in left_to_test_all else [])
        for each in SITUATIONS
    ]


@pytest.mark.parametrize("situation", situations(NOT_EBPF))
def test_mode_ebpf(situation: str) -> None:
    check(situation, "ebpf")


@pytest.mark.parametrize("way", OTHER_WAYS)
@pytest.mark.parametrize("situation", situations(set(SITUATIONS) - IN_OTHER_WAYS))
def test_other_modes(situation: str, way: str) -> None:
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
