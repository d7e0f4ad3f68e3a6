"""Options of the test run, and skipping of test levels that this machine cannot run."""

import functools
import gc
import importlib.util
import itertools
import os
import shutil
import signal
from typing import Any

import hypothesis
import pytest

from ebpfproxy.backends.ebpf.programs import available_hooks
from ebpfproxy.errors import KernelError
from ebpfproxy.lab.agent import Agent
from ebpfproxy.linux import mounts
from tests.support import examples, missing, preloaded, summary
from tests.support.left_out import counts, leave_out
from tests.support.sample import Case, sample, without
from tests.vm import machine

# Otherwise programs that tests start would ignore SIGINT if the test run is a background process.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
        metavar="N",
        help="number of broken objects to plan (make fuzz: 200000)",
    )
    parser.addoption(
        "--tenant",
        type=int,
        metavar="N",
        help="number of changes of a random tenant (make fuzz: 10000)",
    )
    parser.addoption(
        "--requests",
        type=int,
        metavar="N",
        help="number of malformed HTTP requests (make fuzz: 100000)",
    )
    parser.addoption(
        "--packets",
        type=int,
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
        metavar="N",
        help="number of connections while the API server is unreachable or the node changes at random; "
        "twice as many while endpoints change (make soak: 1000000)",
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
        help="number of random histories (make differential: 500); default: a few, always the same",
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
        metavar="N",
        help="number of random connections that explain predicts, of each backend (make explained: 1000)",
    )
    parser.addoption(
        "--faults",
        type=int,
        metavar="N",
        help="number of failing calls in each mode (make faults: 2500), and of faults of the API server",
    )
    parser.addoption(
        "--kills",
        type=int,
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
        help="repeat the faults or changes of a run, which printed its seed; default: those of make test",
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


_AMOUNTS = {
    "connects": (4_000, 10_000),
    "explained": (10, 60),
    "faults": (10, 60),
    "junk": (1_000, 2_000),
    "kills": (1, 3),
    "packets": (40_000, 1_000_000),
    "requests": (2_000, 10_000),
    "tenant": (20, 400),
}
"""By option: the default with `--sample`, and without."""


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile(examples.SAMPLE if config.getoption("sample") else examples.ALL)
    for name, (few, many) in _AMOUNTS.items():
        if config.getoption(name) is None:
            setattr(config.option, name, few if config.getoption("sample") else many)
    Agent.popen = staticmethod(preloaded.popen)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--sample`, leave out tests marked `long`, and most cases of tests marked `kernel`."""
    if not config.getoption("sample"):
        return
    leave_out(config, items, "test-all", lambda item: item.get_closest_marker("long") is not None)
    cases = {
        item.nodeid: Case(item.nodeid.partition("[")[0], item.nodeid, _parameters(item))
        for item in items
        if isinstance(item, pytest.Function) and item.get_closest_marker("kernel")
    }
    same = {item.nodeid: each.args for item in items if (each := item.get_closest_marker("same_for"))}
    relevant = (without(same.get(case.id, ()), [case]) for case in cases.values())
    others = cases.keys() - sample(itertools.chain.from_iterable(relevant))
    leave_out(config, items, "test-all", lambda item: item.nodeid in others)


def _parameters(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def pytest_collection_finish() -> None:
    """Exempt what exists now from garbage collection, which would write to it in each forked child."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A pytest-xdist worker passes the numbers to its controller, which collects no tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = counts(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The import is local because pytest calls this hook only with pytest-xdist."""
    from tests.support.workers import Groups

    return Groups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over a worker's numbers, unless it crashed. All workers collect the same tests."""
    if output := getattr(node, "workeroutput", {}):
        counts(node.config).update(output["left out"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = summary.skipped(terminalreporter.stats.get("skipped", ()))
    if left_out := counts(config):
        lines.append("left out: " + ", ".join(f"{n} (make {target})" for target, n in left_out.items()))
    if lines:
        terminalreporter.section("not run")
    for line in lines:
        terminalreporter.line(line)
    failed = [each for kind in ("failed", "error") for each in terminalreporter.stats.get(kind, ())]
    if failed:
        terminalreporter.section("to repeat what failed")
        terminalreporter.line(summary.rerun(list(dict.fromkeys(each.nodeid for each in failed))))
