"""The end of a test run: a line for each reason of skips, and the command that repeats failures."""

import pytest

from tests.support import summary


def skip(reason: str) -> pytest.TestReport:
    return pytest.TestReport(
        "tests/test_x.py::test_y", ("", 0, ""), {}, "skipped", ("test_x.py", 1, f"Skipped: {reason}"), "setup"
    )


def test_skips_are_one_line_for_each_reason_with_what_runs_them() -> None:
    reports = [skip("this kernel has no IPVS"), skip("no program zsh: apt-get install zsh")]
    reports += [skip("this kernel has no IPVS\nand more")] * 2
    assert summary.skipped(reports) == [
        "    3 skipped: this kernel has no IPVS (make test-user-mode)",
        "    1 skipped: no program zsh: apt-get install zsh",
    ]


def test_a_reason_that_names_its_target_is_not_extended() -> None:
    assert summary.skipped([skip("software emulation: make test-all (no KVM)")]) == [
        "    1 skipped: software emulation: make test-all (no KVM)"
    ]


def test_a_missing_program_is_a_package() -> None:
    assert summary.skipped([skip("no program bpftool")]) == [
        "    1 skipped: no program bpftool (apt-get install bpftool)"
    ]


def test_nothing_skipped_is_no_line() -> None:
    assert summary.skipped([]) == []


def test_few_failures_are_named_for_a_shell() -> None:
    assert summary.rerun(["a.py::test_b[v4 tcp]", "a.py::test_c"]) == (
        ".venv/bin/python -m pytest 'a.py::test_b[v4 tcp]' a.py::test_c"
    )


def test_many_failures_are_those_of_the_last_run() -> None:
    assert summary.rerun([f"a.py::test_{n}" for n in range(20)]) == ".venv/bin/python -m pytest --last-failed"
