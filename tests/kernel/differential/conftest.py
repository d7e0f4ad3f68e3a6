"""The labs of all modes, made once."""

import contextlib
from collections.abc import Iterator

import pytest

from ebpfproxy.modes.choice import MODES
from tests.kernel.differential.subject import Subject

SUBJECTS = {
    "ebpf": ("ebpf", {}),
    "iptables": ("iptables", {"iptables_flavour": "legacy"}),
    "iptables-nft": ("iptables", {"iptables_flavour": "nft"}),
    "nftables": ("nftables", {}),
}
"""A mode, and texts of its configuration."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--histories",
        type=int,
        default=0,
        metavar="N",
        help="how many random histories all dataplanes are led through",
    )


@pytest.fixture(scope="module")
def subjects(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[tuple[Subject, ...]]:
    """The lock that iptables takes is the machine's; the rules in a lab are nobody else's."""
    if not pytestconfig.getoption("--histories"):
        pytest.skip("random histories of all dataplanes are asked for with --histories=N")
    modes = {mode.name: mode for mode in MODES}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as opened:
        patch.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables"))
        yield tuple(
            opened.enter_context(Subject(name, modes[mode], texts))
            for name, (mode, texts) in SUBJECTS.items()
        )
