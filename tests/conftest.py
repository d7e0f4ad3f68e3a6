"""Options of the test run; hypothesis without deadlines, since a busy machine is no failure; and what
becomes of the tests of a level on a machine that cannot run them.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest

from ebpfproxy.backends.ebpf.programs import available_hooks
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import mounts
from tests.vm import machine

hypothesis.settings.register_profile("ebpfproxy", deadline=None)
hypothesis.settings.load_profile("ebpfproxy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--udp-sockets",
        type=int,
        default=3000,
        help="how many connected UDP sockets lose their endpoint at the same time (test_socket_crowd.py)",
    )
    parser.addoption(
        "--all-feature-subsets",
        action="store_true",
        help="compile and load the programs for each of the 64 subsets of helpers (make fuzz), not for 14",
    )
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="rewrite the expected texts in tests/golden/cases instead of comparing them; the input stays",
    )
    parser.addoption(
        "--junk",
        type=int,
        default=2_000,
        metavar="N",
        help="how many broken objects are planned (make fuzz: 200000)",
    )
    parser.addoption(
        "--packets",
        type=int,
        default=1_000_000,
        metavar="N",
        help="how many random packets the classifiers get (make fuzz: 10000000)",
    )
    parser.addoption(
        "--flood",
        type=int,
        default=40_000,
        metavar="N",
        help="packets of each flood (make floods: 400000); more than 40000: with the default sizes of tables",
    )
    parser.addoption(
        "--connects",
        type=int,
        default=10_000,
        metavar="N",
        help="how many connections are made while the API server is away, and twice as many while endpoints "
        "come and go (make soak: 1000000)",
    )
    parser.addoption(
        "--histories",
        type=int,
        metavar="N",
        help="how many random histories all backends are led through (make differential: 500); "
        "default: 15, always the same",
    )
    parser.addoption(
        "--subjects",
        default="",
        metavar="NAMES",
        help="which backends these are, as SUBJECTS in tests/kernel/differential has them; default: all",
    )
    parser.addoption(
        "--image",
        action="store_true",
        help="build the image, too, and run the tests of the DaemonSet's pod with it (make test-image)",
    )
    parser.addoption(
        "--kernels",
        default="",
        metavar="NAMES",
        help="of tests/vm/kernels.toml, or all: run all tests of the vm level on them (make test-vm)",
    )


@functools.cache
def kernel_lacks() -> str:
    """Why the tests marked `kernel` cannot run here; "" where they can."""
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


LEVELS = {"kernel": kernel_lacks, "vm": machine.lacks}
"""By the mark of their tests: what says why this machine cannot run them."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: leave a level's test out, or fail it in CI, whose machines have to have it all."""
    for level, lacks in LEVELS.items():
        if item.get_closest_marker(level) and lacks():
            outcome = pytest.fail if os.environ.get("CI") else pytest.skip
            outcome(f"{level} level: {lacks()}")


_LEFT_TO_TEST_VM = pytest.StashKey[int]()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if "vm" in item.keywords:
            item.config.stash[_LEFT_TO_TEST_VM] = item.config.stash.get(_LEFT_TO_TEST_VM, 0) + 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells its controller, which collects no tests itself."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left to test-vm"] = session.config.stash.get(_LEFT_TO_TEST_VM, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Imported here: without pytest-xdist this hook is not called."""
    from tests.support.workers import Groups

    return Groups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker has told, unless it crashed. All of them collect the same tests."""
    if told := getattr(node, "workeroutput", {}):
        node.config.stash[_LEFT_TO_TEST_VM] = told["left to test-vm"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    lines = []
    for level, lacks in LEVELS.items():
        if lacks() and (count := sum(level in report.keywords for report in skipped)):
            lines.append(f"{count} tests of the {level} level: {lacks()}")
    if long := config.stash.get(_LEFT_TO_TEST_VM, 0):
        lines.append(f"{long} tests of the vm level, and other kernels: make test-vm")
    if lines:
        terminalreporter.section("left out")
    for line in lines:
        terminalreporter.line(line)
