"""Every situation under cases/, as text, through every stage that has a renderer.

After a change that is meant to change them: ``pytest tests/golden --update-goldens``, and read the diff.
"""

from collections.abc import Callable

import pytest

from tests.golden.ebpf_text import ebpf_text
from tests.golden.iptables_text import iptables_text
from tests.golden.ipvs_text import ipvs_text
from tests.golden.nftables_text import nftables_text
from tests.golden.plan_text import flows_text, plan_text
from tests.golden.situation import CASES, Situation, load, situations

RENDERERS: dict[str, Callable[[Situation], str]] = {
    "plan.txt": plan_text,
    "flows.txt": flows_text,
    "ebpf.txt": ebpf_text,
    "iptables.txt": iptables_text,
    "nftables.txt": nftables_text,
    "ipvs.txt": ipvs_text,
}
"""Name of a golden file to what makes its text. A backend adds a line here."""


@pytest.mark.parametrize("golden", RENDERERS)
@pytest.mark.parametrize("case", situations())
def test_the_text_of_each_situation_is_as_it_was(
    case: str, golden: str, request: pytest.FixtureRequest
) -> None:
    text = RENDERERS[golden](load(case))
    path = CASES / case / golden
    if request.config.getoption("--update-goldens"):
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: run with --update-goldens"
    assert text == path.read_text()


def test_every_file_of_a_case_is_known() -> None:
    known = {"cluster.yaml", "node.yaml", *RENDERERS}
    assert situations()
    for folder in CASES.iterdir():
        assert {path.name for path in folder.iterdir()} == known, folder.name
