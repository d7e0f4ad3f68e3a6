"""Every situation in every mode: the same flows, compared with kube-proxy."""

import pytest

from tests.kernel.conftest import MODES
from tests.kernel.differences import DIFFERENCES
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.kernel.zoo.base import Zoo, zoo
from tests.kernel.zoo.flows import DEFAULTS, Flow, in_mode, translated
from tests.kernel.zoo.known_failures import KNOWN_FAILURES
from tests.kernel.zoo.situations import SITUATIONS

pytestmark = pytest.mark.kernel

WAYS = MODES | {"ebpf-off": ("ebpf", ("--socket-lb=off",))}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_mode_ebpf(situation: str) -> None:
    check(situation, "ebpf")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "ebpf"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_other_modes(situation: str, way: str) -> None:
    skip_without_ipvs(way)
    check(situation, way)


def check(situation: str, way: str) -> None:
    """Assert that each flow has the expected result, or exactly the one of KNOWN_FAILURES."""
    mode, flags = WAYS[way]
    with zoo(SITUATIONS[situation]) as node:
        results = expected(node, situation, way)
        with node.agent(mode, flags):
            found = node.results(results)
    wrong = [f"{flow}: {found[flow]}, not {text}" for flow, text in results.items() if found[flow] != text]
    assert not wrong, "\n".join(wrong)


def expected(node: Zoo, situation: str, way: str) -> dict[Flow, str]:
    """By flow, the result: kube-proxy's, with differences of the situation and the mode, and failures."""
    differences = DIFFERENCES[WAYS[way][0]]
    known = [row for row in KNOWN_FAILURES if way in row.ways and situation in row.situations]
    results = {}
    for flow, usual in DEFAULTS.items():
        special = [text for pattern, text in node.expected.items() if flow.matches(pattern)]
        result = special[-1] if special else usual
        result = in_mode(flow, translated(flow, result, way == "ebpf", differences), differences)
        for row in known:
            if flow.matches(row.flows):
                assert result != row.result, f"{row}: {flow} does not fail"
                result = row.result
        results[flow] = result
    return results
