"""The labs of all modes, created once."""

import contextlib
import itertools
import os
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.selection import MODES
from tests.kernel.differential.places import REMEMBERED
from tests.kernel.differential.subject import Subject
from tests.kernel.ipvs_here import lacks_ipvs, skip_without_ipvs

SUBJECTS = {
    "ebpf": ("ebpf", {}),
    "ebpf-off": ("ebpf", {"socket_lb": "off"}),
    "iptables": ("iptables", {"iptables_backend": "legacy"}),
    "iptables-nft": ("iptables", {"iptables_backend": "nft"}),
    "nftables": ("nftables", {}),
    "ipvs": ("ipvs", {"iptables_backend": "legacy", "ipvs_udp_timeout": f"{REMEMBERED}s"}),
    "userspace": ("userspace", {"udp_timeout": f"{REMEMBERED}s", "userspace_relays": "1"}),
}
"""A mode, and its configuration. Its differences from the reference are in differences.py."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        metafunc.parametrize("subject", _chosen(metafunc.config), indirect=True, scope="module")


def _chosen(config: pytest.Config) -> list[str]:
    """Raises UsageError."""
    named: str = config.getoption("--subjects")
    if not named:
        return [*SUBJECTS]
    if unknown := set(named.split(",")) - SUBJECTS.keys():
        raise pytest.UsageError(f"--subjects: no {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    return named.split(",")


class _Labs:
    """Each lab is created on demand. The labs use a separate iptables lock, since no other program changes
    their rules."""

    def __init__(self, opened: contextlib.ExitStack) -> None:
        self._opened = opened
        self._modes = {mode.name: mode for mode in MODES}
        self._made: dict[str, Subject] = {}
        self._processors = itertools.cycle(sorted(os.sched_getaffinity(0)))

    def get(self, name: str) -> Subject:
        if name not in self._made:
            mode, texts = SUBJECTS[name]
            made = Subject(name, self._modes[mode], texts, next(self._processors))
            self._made[name] = self._opened.enter_context(made)
        return self._made[name]


@pytest.fixture(scope="module")
def _labs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Labs]:
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as opened:
        patch.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables"))
        yield _Labs(opened)


@pytest.fixture(scope="module")
def subjects(_labs: _Labs, pytestconfig: pytest.Config) -> tuple[Subject, ...]:
    """All subjects that the kernel supports. A missing one causes a skip if it is the only one, and in the
    tests of single subjects."""
    lacking = "ipvs" if lacks_ipvs() else ""
    names = [name for name in _chosen(pytestconfig) if name != lacking]
    if not names:
        skip_without_ipvs(lacking)
    return tuple(map(_labs.get, names))


@pytest.fixture(scope="module")
def subject(_labs: _Labs, request: pytest.FixtureRequest) -> Subject:
    """One subject after the other."""
    skip_without_ipvs(request.param)
    return _labs.get(request.param)
