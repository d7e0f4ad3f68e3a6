"""The table of kernels, and what is made of a VM's report, without a VM."""

from pathlib import Path

import pytest

from tests.vm.kernels import Kernel, kernels
from tests.vm.level import CHECKOUT, Report, report, unexpected
from tests.vm.table import written

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.kernel.test_a" name="test_good" time="1"/>
<testcase classname="tests.kernel.test_a" name="test_bad[1]">
<failure message="E  one&#10;two">long</failure></testcase>
<testcase classname="tests.kernel.test_a" name="test_broken"><error message="fixture">long</error></testcase>
<testcase classname="tests.kernel.test_a" name="test_out"><skipped message="no dummy"/></testcase>
<testcase classname="tests.kernel.test_a" name="test_known"><skipped type="pytest.xfail"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("name", kernels())
def test_what_a_kernel_cannot_names_tests_that_exist_and_says_why(name: str) -> None:
    for test, why in kernels()[name].cannot.items():
        path, _, function = test.partition("::")
        assert (CHECKOUT / path).exists()
        assert not function or f"def {function.partition('[')[0]}(" in (CHECKOUT / path).read_text()
        assert why


def test_each_outcome_of_a_report_is_told_from_the_others(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    found = report(tmp_path / "junit.xml")
    assert found.passed == {"tests/kernel/test_a.py::test_good"}
    assert found.failed == {
        "tests/kernel/test_a.py::test_bad[1]": "E  one",
        "tests/kernel/test_a.py::test_broken": "fixture",
    }
    assert found.skipped == {"tests/kernel/test_a.py::test_out": "no dummy"}


def test_a_skipped_test_is_unexpected_unless_the_table_has_its_reason() -> None:
    found = Report(frozenset(), {"a": "E  one"}, {"b": "no tcx", "c": "no dummy"})
    kernel = Kernel("6.1", "bookworm", "linux-image-amd64", [], ["no tcx"], {})
    assert unexpected(found, kernel) == ["a: E  one", "c: skipped: no dummy"]


def test_a_rejected_program_is_marked_in_the_tables() -> None:
    cost = {"instructions": 7, "verified": 1234, "load_ms": 2.4, "rejection": ""}
    costs = {"5.10.0": {"connect4": cost}, "6.1.0": {"connect4": cost | {"rejection": "no"}}}
    text = written(costs, {"5.10.0": {"mode": "ebpf", "missing": {"ebpf": ["bpf_set_retval"]}}})
    assert "| `connect4` | 1,234 | rejected |" in text
    assert "| 5.10.0 | `ebpf` | `bpf_set_retval` |" in text
