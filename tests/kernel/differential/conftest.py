"""The labs of all modes, made once."""

import contextlib
import itertools
import os
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import Unsupported
from ebpfproxy.modes.choice import MODES
from tests.kernel.differential.places import REMEMBERED
from tests.kernel.differential.subject import Subject

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
def _labs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject | Unsupported]]:
    """What each mode lacks where it has no lab. The lock that iptables takes is the machine's; the rules in a
    lab are nobody else's."""
    modes = {mode.name: mode for mode in MODES}
    processors = itertools.cycle(sorted(os.sched_getaffinity(0)))
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as opened:
        patch.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables"))
        made: dict[str, Subject | Unsupported] = {}
        for name, (mode, texts) in SUBJECTS.items():
            try:
                made[name] = opened.enter_context(Subject(name, modes[mode], texts, next(processors)))
            except Unsupported as lack:
                made[name] = lack
        yield made


@pytest.fixture(scope="module")
def subjects(_labs: dict[str, Subject | Unsupported]) -> tuple[Subject, ...]:
    """All that this kernel has; what it has not is told by the tests of one subject."""
    return tuple(each for each in _labs.values() if isinstance(each, Subject))


@pytest.fixture(scope="module")
def subject(_labs: dict[str, Subject | Unsupported], request: pytest.FixtureRequest) -> Subject:
    """One after the other."""
    found = _labs[request.param]
    if isinstance(found, Unsupported):
        pytest.skip(f"no histories in the mode {request.param}: {found.message}")
    return found
