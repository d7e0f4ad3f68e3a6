"""The labs of all modes, made once."""

import contextlib
import itertools
import os
from collections.abc import Iterator

import pytest

from ebpfproxy.modes.choice import MODES
from tests.kernel.differential.places import REMEMBERED
from tests.kernel.differential.subject import Subject
from tests.kernel.ipvs_here import lacks_ipvs, skip_without_ipvs

SUBJECTS = {
    "ebpf": ("ebpf", {}),
    "ebpf-off": ("ebpf", {"socket_lb": "off"}),
    "iptables": ("iptables", {"iptables_flavour": "legacy"}),
    "iptables-nft": ("iptables", {"iptables_flavour": "nft"}),
    "nftables": ("nftables", {}),
    "ipvs": ("ipvs", {"iptables_flavour": "legacy", "ipvs_udp_timeout": f"{REMEMBERED}s"}),
}
"""A mode, and texts of its configuration. What it does otherwise than the reference is in differences.py."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        metafunc.parametrize("subject", SUBJECTS, indirect=True, scope="module")


@pytest.fixture(scope="module")
def _labs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject]]:
    """By name; without ipvs where the kernel lacks it. The lock that iptables takes is the machine's; the
    rules in a lab are nobody else's."""
    modes = {mode.name: mode for mode in MODES}
    lacking = "ipvs" if lacks_ipvs() else ""
    processors = itertools.cycle(sorted(os.sched_getaffinity(0)))
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as opened:
        patch.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables"))
        yield {
            name: opened.enter_context(Subject(name, modes[mode], texts, next(processors)))
            for name, (mode, texts) in SUBJECTS.items()
            if mode != lacking
        }


@pytest.fixture(scope="module")
def subjects(_labs: dict[str, Subject]) -> tuple[Subject, ...]:
    """All at once; one that is left out is told by the tests of one subject."""
    return tuple(_labs.values())


@pytest.fixture(scope="module")
def subject(_labs: dict[str, Subject], request: pytest.FixtureRequest) -> Subject:
    """One after the other."""
    skip_without_ipvs(request.param)
    return _labs[request.param]
