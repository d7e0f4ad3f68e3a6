"""Compares every case under cases/ with its expected texts: the plan and the flows. Some also have what each
backend renders: so many that together they use every branch of the backends that any case uses.

After a change that is meant to change them: ``pytest tests/golden --update-goldens``, and read the diff.
The same command adds the plan and the flows to a new case that has a rule and input only. To add the rules,
write a line `=== ebpf ===` at its end before.
One case: ``-k '[node_port-'``. One section: ``-k 'ipvs]'``. One section of one case:
``-k '[node_port-ipvs]'``.
"""

from collections.abc import Callable

import pytest

from tests.golden.case_file import check_sections, format_case, parse_case, section_text, with_expected_text
from tests.golden.ebpf_text import ebpf_text
from tests.golden.iptables_text import iptables_text
from tests.golden.ipvs_text import ipvs_text
from tests.golden.nftables_text import nftables_text
from tests.golden.plan_text import flows_text, plan_text
from tests.golden.situation import CASES, Situation, case_text, load, path_of, situations
from tests.golden.userspace_text import userspace_text

PLANNERS: dict[str, Callable[[Situation], str]] = {"plan": plan_text, "flows": flows_text}
RENDERERS: dict[str, Callable[[Situation], str]] = {
    "ebpf": ebpf_text,
    "iptables": iptables_text,
    "nftables": nftables_text,
    "ipvs": ipvs_text,
    "userspace": userspace_text,
}
"""The renderer of each section of rules. A new backend adds a line here."""


def _has_rules(case: str) -> bool:
    return bool(RENDERERS.keys() & parse_case(case_text(case)).sections.keys())


CHECKED = [
    (case, section)
    for case in situations()
    for section in (*PLANNERS, *(RENDERERS if _has_rules(case) else ()))
]


@pytest.mark.parametrize(("case", "section"), CHECKED)
def test_each_section_has_the_expected_text(case: str, section: str, request: pytest.FixtureRequest) -> None:
    text = (PLANNERS | RENDERERS)[section](load(case))
    file = parse_case(case_text(case))
    if request.config.getoption("--update-goldens"):
        file = with_expected_text(file, section, text)
        path_of(case).write_bytes(format_case(file).encode())
    assert text == section_text(file, section)


@pytest.mark.parametrize("case", situations())
def test_a_case_has_all_sections_and_no_others(case: str) -> None:
    text = case_text(case)
    file = parse_case(text)
    check_sections(file.sections, list(PLANNERS), list(RENDERERS))
    assert format_case(file) == text


def test_every_file_is_a_case() -> None:
    assert situations()
    assert sorted(path.name for path in CASES.iterdir()) == [path_of(case).name for case in situations()]
