"""A target for each mode, and the sender of floods."""

from collections.abc import Iterator

import pytest

from ebpfproxy.lab import Lab
from tests.kernel.floods.testbed import FLOWS_MAX, LAB_NUMBER, MODES, SHORT, Target
from tests.kernel.ipvs_here import skip_without_ipvs
from tests.support.flood import Sender, Size

_SECONDS = 11.0
"""The duration of a flood in the long form."""
_SHORT_SECONDS = 1.0


@pytest.fixture(scope="session")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Sender:
    return Sender(tmp_path_factory.mktemp("flood"))


@pytest.fixture(scope="session")
def size(pytestconfig: pytest.Config) -> Size:
    """The size of a flood, by the option --flood."""
    packets: int = pytestconfig.getoption("flood")
    return Size(packets, int(packets / (_SECONDS if packets > SHORT else _SHORT_SECONDS)))


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest, size: Size) -> Iterator[Target]:
    """A node with a running agent of one mode. In the short form its table of flows is small."""
    mode = request.param
    skip_without_ipvs(mode)
    flags = [*MODES[mode], "--sync-period=2s"]
    if mode == "ebpf" and size.packets <= SHORT:
        flags.append(f"--ebpf-flows-max={FLOWS_MAX}")
    with Lab("test-floods", LAB_NUMBER) as lab, Target(lab, mode) as made:
        made.start(*flags)
        yield made
