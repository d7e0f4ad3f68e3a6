"""Runs the stages of tests in copies of the checkout, each up to the first failure."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

STAGES = (1, 2, 3)
_NOT_COPIED = (".git", ".venv", "build", "dist", ".*_cache", ".hypothesis")
_QUICK = ("ebpfproxy", "tests/unit", "tests/golden", "tests/contract")
_PACKETS = (
    "tests/kernel/packet_path",
    "tests/kernel/test_socket_*.py",
    "tests/kernel/test_packet_scenarios.py",
)
_OF_TEXTS = (
    "tests/unit/test_mutations.py",
    "tests/unit/test_contributing.py",
    "tests/unit/test_docs.py",
)
"""Tests that compare the source code with a text. They would catch a mutation that changes no behavior."""
_LIMIT_S = 2 * 3600
_FAILED = re.compile(r"^(?:FAILED|ERROR) ((?:tests|ebpfproxy)/.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """Of the stages up to `stage`. `test`: the first that failed, "" if no test could start.

    `not_repeated`: tests that failed, but passed when they were repeated alone.
    """

    stage: int
    caught: bool = False
    test: str = ""
    not_repeated: tuple[str, ...] = ()
    output: str = ""


def copy(source: Path, target: Path) -> Path:
    """Copy a checkout. Compiled Python files are copied, too: that of a mutated file has another time."""
    return Path(shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED)))


def run_stage(root: Path, file: str, stage: int, workers: int | None = None) -> Outcome:
    """Run a stage of the tests for a mutation of `file` in the copy `root`. `workers`: of pytest."""
    options = [f"-n{workers or (2 if stage == 1 else 4)}", *_ignore(_OF_TEXTS)]
    options += ["--sample"] if stage < max(STAGES) else []
    passed_alone: list[str] = []
    for tests in _steps(root, file, stage):
        while True:
            status, output = _pytest(root, *options, *(f"--deselect={test}" for test in passed_alone), *tests)
            if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                break
            test = first_failed(output)
            if not test or test in passed_alone or _pytest(root, test)[0]:
                return Outcome(stage, True, test, tuple(passed_alone), output)
            passed_alone.append(test)
    return Outcome(stage, not_repeated=tuple(passed_alone))


def _steps(root: Path, file: str, stage: int) -> list[list[str]]:
    """The arguments of pytest for each of its runs: first the tests that are likely to fail."""
    if file.endswith((".c", ".h")):
        first = [str(path.relative_to(root)) for each in _PACKETS for path in sorted(root.glob(each))]
        steps = [first]
    else:
        first = [*_QUICK]
        of_package = str(Path(file.replace("ebpfproxy", "tests/unit", 1)).parent)
        likely = ["ebpfproxy", "tests/golden"]
        likely += [of_package] if file and (root / of_package).is_dir() else []
        steps = [likely, [*_QUICK, *_ignore(likely)]]
    return {1: steps, 2: [["tests", *_ignore(first)]], 3: [["tests"]]}[stage]


def first_failed(output: str) -> str:
    """The first test in pytest's summary, "" if there is none. Log messages may begin with ERROR, too.

    >>> first_failed("ERROR    log.py:51 Cannot read\\nFAILED tests/a.py::test_b[c d] - assert 0\\n")
    'tests/a.py::test_b[c d]'
    """
    failed = _FAILED.search(output)
    return failed[1] if failed else ""


def _ignore(paths: Sequence[str]) -> list[str]:
    return [f"--ignore={path}" for path in paths]


def _pytest(root: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the output. No process is left afterwards: with a mutation, some hang."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()
