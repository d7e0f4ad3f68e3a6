"""Options of the test run; hypothesis without deadlines, since a busy machine is no failure; and what
becomes of the kernel's tests on a machine that cannot run them.
"""

import functools
import importlib.util
import os
import shutil

import hypothesis
import pytest

from ebpfproxy.dataplanes.ebpf.programs import available_hooks
from ebpfproxy.errors import KernelError
from ebpfproxy.kernel import mounts

hypothesis.settings.register_profile("ebpfproxy", deadline=None)
hypothesis.settings.load_profile("ebpfproxy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="write the texts under tests/golden/cases anew instead of comparing them",
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
        "--connects",
        type=int,
        default=10_000,
        metavar="N",
        help="how many connections are made while the API server is away (make soak: 1000000)",
    )
    parser.addoption(
        "--histories",
        type=int,
        metavar="N",
        help="how many random histories all dataplanes are led through (make differential: 500); "
        "default: 15, always the same",
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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: leave a kernel test out, or fail it in CI, whose machines have to have it all."""
    if item.get_closest_marker("kernel") and kernel_lacks():
        outcome = pytest.fail if os.environ.get("CI") else pytest.skip
        outcome(f"kernel level: {kernel_lacks()}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if "kernel" in report.keywords]
    if skipped:
        terminalreporter.section("left out")
        terminalreporter.line(f"{len(skipped)} tests of the kernel level: {kernel_lacks()}")
