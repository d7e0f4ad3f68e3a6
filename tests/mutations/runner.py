"""Applies each mutation to a copy of the checkout and runs its test there."""

import enum
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.mutations.catalog import ROOT, Mutation

NOT_COPIED = (".git", ".venv", "build", "dist", ".*_cache", ".hypothesis")
_FAILED = re.compile(r"^.*\b\d+ failed\b", re.MULTILINE)
_LINES_SHOWN = 15


class Verdict(enum.Enum):
    """Only CAUGHT is a success."""

    CAUGHT = "caught"
    SURVIVED = "SURVIVED"
    NOT_APPLICABLE = "NOT APPLICABLE"  # the text does not occur exactly once
    TEST_FAILS = "TEST FAILS"  # also without the mutation
    TEST_BREAKS = "TEST BREAKS"  # the mutated code does not compile or load, so no test function ran


class Result(NamedTuple):
    """`details`: the end of the test's output, empty for CAUGHT and SURVIVED."""

    verdict: Verdict
    details: str = ""


class _Run(NamedTuple):
    passed: bool
    failed: bool
    output: str


class Runner:
    """Runs each test without a mutation only once."""

    def __init__(self) -> None:
        self._unmutated: dict[str, _Run] = {}

    def run(self, mutation: Mutation) -> Result:
        occurrences = mutation.occurrences(ROOT)
        if occurrences != 1:
            return Result(
                Verdict.NOT_APPLICABLE, f"its text occurs {occurrences} times in {mutation.file}, not once"
            )
        if mutation.test not in self._unmutated:
            self._unmutated[mutation.test] = _run_test(mutation, mutated=False)
        unmutated = self._unmutated[mutation.test]
        if not unmutated.passed:
            return Result(Verdict.TEST_FAILS, unmutated.output)
        mutated = _run_test(mutation, mutated=True)
        if mutated.passed:
            return Result(Verdict.SURVIVED)
        return Result(Verdict.CAUGHT) if mutated.failed else Result(Verdict.TEST_BREAKS, mutated.output)


def _run_test(mutation: Mutation, *, mutated: bool) -> _Run:
    with _copy() as root:
        if mutated:
            mutation.apply(root)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        # With CI set, a test of the kernel level fails where the machine cannot run it.
        environment = os.environ | {"PYTHONPATH": str(root), "CI": "1"}
        done = subprocess.run(
            [*command, *mutation.test_arguments],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    end = "\n".join(done.stdout.splitlines()[-_LINES_SHOWN:])
    # An error of a fixture has the same exit code as a failure.
    return _Run(done.returncode == 0, done.returncode == 1 and bool(_FAILED.search(end)), end)


@contextmanager
def _copy() -> Iterator[Path]:
    """A new folder each time: Python takes a compiled file for current if size and second are equal."""
    with tempfile.TemporaryDirectory(prefix="ebpfproxy-mutation-") as folder:
        root = Path(folder) / "checkout"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED, "__pycache__"))
        yield root
