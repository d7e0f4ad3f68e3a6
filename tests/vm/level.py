"""Kernel tests, run by pytest in a VM, and the result of each."""

import json
import sys
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.backends.ebpf.programs import object_file
from tests.vm.acceleration import accelerator_of
from tests.vm.boot import Order, Outcome, run
from tests.vm.debian import installed
from tests.vm.kernels import Kernel

CHECKOUT = Path(__file__).parents[2]
_LAST_LINES = 40


@dataclass(frozen=True, slots=True)
class Selection:
    """The tests of one VM."""

    tests: Sequence[str]
    """Arguments of pytest: files, folders, ids, options."""
    modules: Sequence[str] = ()
    """Modules that are loaded before, except those that the kernel loads by itself."""
    seconds: float = 1800
    """The time limit in software emulation. With KVM it is shorter."""
    cpus: int = 2


@dataclass(frozen=True, slots=True)
class Report:
    """The results of the tests that ran in a VM, by their ids."""

    passed: frozenset[str]
    failed: Mapping[str, str]
    """By test: the first line of the failure."""
    skipped: Mapping[str, str]
    """By test: the reason."""


def run_python(
    kernel: Kernel,
    arguments: Sequence[str],
    scratch: Path,
    modules: Sequence[str] = (),
    seconds: float = 900,
    cpus: int = 2,
) -> Outcome:
    """`python ARGUMENTS` in this checkout on a kernel. `seconds`: as in Selection. Raises Unavailable."""
    found = installed(kernel)
    object_file()  # the VM reads this machine's; the compiler takes minutes in software emulation
    limit = accelerator_of(found).limit(seconds)
    return run(found, Order((sys.executable, *arguments), CHECKOUT, modules, limit, cpus=cpus), scratch)


def answer_of(kernel: Kernel, module: str, scratch: Path) -> Any:
    """The JSON that this module writes when it runs on the kernel."""
    outcome = run_python(kernel, ["-m", module, "/run/scratch/answer.json"], scratch)
    assert outcome.status == 0, f"kernel {kernel.name}: {outcome.verdict()}\n{outcome.output}"
    return json.loads((scratch / "answer.json").read_text())


def assert_passes(kernel: Kernel, selection: Selection, scratch: Path) -> None:
    """Assert that all tests of the selection pass on the kernel, except those in the table: tests that the
    kernel cannot pass, and tests that are skipped for a reason in the table. If the table excludes the
    complete selection, the test is skipped.

    Raises AssertionError with the failures and the end of the VM's output, and Unavailable.
    """
    if all(test in kernel.cannot for test in selection.tests if not test.startswith("-")):
        pytest.skip("; ".join(kernel.cannot[test] for test in selection.tests if test in kernel.cannot))
    left_out = [f"--deselect={test}" for test in kernel.cannot]
    options = ["-p", "no:cacheprovider", "--timeout=900", "--junitxml=/run/scratch/junit.xml", "-q"]
    arguments = ["-m", "pytest", *options, *left_out, *selection.tests]
    outcome = run_python(kernel, arguments, scratch, selection.modules, selection.seconds, selection.cpus)
    end = "\n".join(outcome.output.splitlines()[-_LAST_LINES:])
    assert outcome.status is not None, f"kernel {kernel.name}: {outcome.verdict()}\n{end}"
    found = report(scratch / "junit.xml") if (scratch / "junit.xml").exists() else None
    assert found, f"kernel {kernel.name}: {outcome.verdict()}\n{end}"
    wrong = unexpected(found, kernel)
    assert not wrong, "\n".join((f"kernel {kernel.name}:", *wrong, "", end))
    assert found.passed, f"kernel {kernel.name}: no test ran\n{end}"
    assert outcome.status == 0, f"kernel {kernel.name}: {outcome.verdict()}\n{end}"


def unexpected(found: Report, kernel: Kernel) -> list[str]:
    """A line for each test that failed, or was skipped for a reason that the kernel's table does not have."""
    skipped = {test: f"skipped: {why}" for test, why in found.skipped.items() if why not in kernel.skips}
    return [f"{test}: {why}" for test, why in (*found.failed.items(), *skipped.items())]


def report(path: Path) -> Report:
    """Read the file of pytest's --junitxml. Tests that are marked xfail and fail are in no list."""
    passed, failed, skipped = set(), {}, {}
    for case in xml.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        outcomes = {each.tag: each.get("message") or "" for each in case}
        if why := [text for tag, text in outcomes.items() if tag in ("failure", "error")]:
            failed[name] = (why[0].splitlines() or ["no message"])[0]
        elif any(each.get("type") == "pytest.xfail" for each in case):
            continue
        elif "skipped" in outcomes:
            skipped[name] = outcomes["skipped"]
        else:
            passed.add(name)
    return Report(frozenset(passed), failed, skipped)
