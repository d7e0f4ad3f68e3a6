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
from tests.support import missing
from tests.vm import machine

# Otherwise programs that tests start would ignore SIGINT if the test run is a background process.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("ebpfproxy", deadline=None)
hypothesis.settings.load_profile("ebpfproxy")


def pytest_addoption(parser: pytest.Parser) -> None:
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


_ONLY_IN_TEST_VM = pytest.StashKey[int]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if "vm" in item.keywords:
            item.config.stash[_ONLY_IN_TEST_VM] = item.config.stash.get(_ONLY_IN_TEST_VM, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A pytest-xdist worker passes the number to its controller, which collects no tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left to test-vm"] = session.config.stash.get(_ONLY_IN_TEST_VM, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The import is local because pytest calls this hook only with pytest-xdist."""
    from tests.support.workers import Groups

    return Groups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over a worker's number, unless it crashed. All workers collect the same tests."""
    if output := getattr(node, "workeroutput", {}):
        node.config.stash[_ONLY_IN_TEST_VM] = output["left to test-vm"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    lines = []
    for level, why_not in LEVELS.items():
        if why_not() and (count := sum(level in report.keywords for report in skipped)):
            lines.append(f"{count} tests of the {level} level: {why_not()}")
    if long := config.stash.get(_ONLY_IN_TEST_VM, 0):
        lines.append(f"{long} tests of the vm level, and other kernels: make test-vm")
    if lines:
        terminalreporter.section("not run")
    for line in lines:
        terminalreporter.line(line)
