"""Options of the test run, hypothesis settings, and skipping of test levels that this machine cannot run.

Hypothesis has no deadlines, because a busy machine is no failure.
"""

import functools
import importlib.util
import os
import shutil
import signal
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest

from ebpfproxy.backends.ebpf.programs import available_hooks
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import mounts
from tests.support import missing, summary
from tests.support.sample import Case, sample
from tests.vm import machine

# Otherwise programs that tests start would ignore SIGINT if the test run is a background process.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("ebpfproxy", deadline=None)
hypothesis.settings.load_profile("ebpfproxy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        action="store_true",
        help="run a sample of the cases of kernel tests (make test); see tests/support/sample.py",
    )
    parser.addoption(
        "--udp-sockets",
        type=int,
        default=3000,
        help="number of UDP sockets that lose their endpoint at the same time (test_socket_crowd.py)",
    )
    parser.addoption(
        "--all-feature-subsets",
        action="store_true",
        help="compile and load the programs for each of the 64 subsets of helpers (make fuzz), not for 14",
    )
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="rewrite the expected texts in tests/golden/cases instead of comparing them; keep the input",
    )
    parser.addoption(
        "--junk",
        type=int,
        default=2_000,
        metavar="N",
        help="number of broken objects to plan (make fuzz: 200000)",
    )
    parser.addoption(
        "--packets",
        type=int,
        default=1_000_000,
        metavar="N",
        help="number of random packets for the classifiers (make fuzz: 10000000)",
    )
    parser.addoption(
        "--flood",
        type=int,
        default=40_000,
        metavar="N",
        help="packets of each flood (make floods: 400000); more than 40000: with the default map sizes",
    )
    parser.addoption(
        "--connects",
        type=int,
        default=10_000,
        metavar="N",
        help="number of connections while the API server is unreachable; twice as many while endpoints "
        "change (make soak: 1000000)",
    )
    parser.addoption(
        "--sync-period",
        default="2s",
        metavar="DURATION",
        help="how often the agents of shared clusters verify; less often in a VM, where it takes seconds",
    )
    parser.addoption(
        "--histories",
        type=int,
        metavar="N",
        help="number of random histories (make differential: 500); default: 15, always the same",
    )
    parser.addoption(
        "--verify-changes",
        type=int,
        metavar="N",
        help="number of changes in the kernel that verify must find in each mode; default: one of each kind",
    )
    parser.addoption(
        "--subjects",
        default="",
        metavar="NAMES",
        help="the backends, as named by SUBJECTS in tests/kernel/differential; default: all",
    )
    parser.addoption(
        "--explained",
        type=int,
        default=60,
        metavar="N",
        help="number of random connections that explain predicts, of each backend (make explained: 1000)",
    )
    parser.addoption(
        "--faults",
        type=int,
        default=60,
        metavar="N",
        help="number of failing calls in each mode (make faults: 2500), and of faults of the API server",
    )
    parser.addoption(
        "--kills",
        type=int,
        default=3,
        metavar="N",
        help="number of kills in each mode (make faults: 125)",
    )
    parser.addoption(
        "--faults-seconds",
        type=float,
        default=3600.0,
        metavar="S",
        help="end the faults of each mode after this time",
    )
    parser.addoption(
        "--faults-seed",
        default="",
        metavar="SEED",
        help="repeat the faults of a run, which printed its seed; default: those of make test",
    )
    parser.addoption(
        "--image",
        action="store_true",
        help="also build the image and run the tests of the DaemonSet's pod with it (make test-image)",
    )
    parser.addoption(
        "--kernels",
        default="",
        metavar="NAMES",
        help="kernels of tests/vm/kernels.toml, or all: run all tests of the vm level on them (make test-vm)",
    )


@functools.cache
def why_not_kernel() -> str:
    """The reason why tests marked `kernel` cannot run on this machine; "" if they can."""
    if os.geteuid() != 0:
        return "not root"
    if importlib.util.find_spec("bcc") is None:
        return "no bcc: apt-get install python3-bpfcc, and .venv with --system-site-packages"
    for program in ("ip", "mount", "cc"):
        if shutil.which(program) is None:
            return f"no program {program}"
    try:
        mounts.cgroup2_root()
        available_hooks()
    except KernelError as failure:
        return failure.message
    return ""


LEVELS = {"kernel": why_not_kernel, "vm": machine.lacks}
"""By mark: a function that returns why this machine cannot run these tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, skip tests that this machine cannot run. In CI, where it must, fail them."""
    for level, why_not in LEVELS.items():
        if item.get_closest_marker(level) and why_not():
            missing.skip_or_fail(f"{level} level: {why_not()}")


_LEFT_OUT = pytest.StashKey[dict[str, int]]()
"""By target of make: the number of tests that only it runs."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LEFT_OUT] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--sample`, deselect the other cases of tests marked `kernel`."""
    if not config.getoption("sample"):
        return
    files: dict[str, list[Case]] = {}
    for item in items:
        if item.get_closest_marker("kernel"):
            parameters = (
                item.callspec.params if isinstance(item, pytest.Function) and _has_cases(item) else {}
            )
            case = Case(item.nodeid.partition("[")[0], item.nodeid, parameters)
            files.setdefault(item.nodeid.partition("::")[0], []).append(case)
    cases = {case.id for of_file in files.values() for case in of_file}
    left_out = cases.difference(*map(sample, files.values()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def _has_cases(item: pytest.Function) -> bool:
    return hasattr(item, "callspec")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        left_out = item.config.stash[_LEFT_OUT]
        target = "test-vm" if "vm" in item.keywords else "test-all"
        left_out[target] = left_out.get(target, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A pytest-xdist worker passes the numbers to its controller, which collects no tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash[_LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The import is local because pytest calls this hook only with pytest-xdist."""
    from tests.support.workers import Groups

    return Groups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over a worker's numbers, unless it crashed. All workers collect the same tests."""
    if output := getattr(node, "workeroutput", {}):
        node.config.stash[_LEFT_OUT] = output["left out"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = summary.skipped(terminalreporter.stats.get("skipped", ()))
    if left_out := config.stash[_LEFT_OUT]:
        lines.append("left out: " + ", ".join(f"{n} (make {target})" for target, n in left_out.items()))
    if lines:
        terminalreporter.section("not run")
    for line in lines:
        terminalreporter.line(line)
    failed = [each for kind in ("failed", "error") for each in terminalreporter.stats.get(kind, ())]
    if failed:
        terminalreporter.section("to repeat what failed")
        terminalreporter.line(summary.rerun(list(dict.fromkeys(each.nodeid for each in failed))))
