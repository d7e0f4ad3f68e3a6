"""A namespace with devices, and a backend whose programs do nothing."""

import shutil
import time
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.backend import EbpfBackend
from ebpfproxy.backends.ebpf.hooks import CLASSIFIERS, TAIL_CALLS
from ebpfproxy.backends.ebpf.settings import EbpfSettings
from ebpfproxy.linux.bpf import tcx
from tests.kernel.device_table.plane import EMPTY_PLAN, SIZES, bring, running
from tests.support.bpf_place import BpfPlace, bpf_place
from tests.support.namespace import Namespace, namespace


@pytest.fixture(scope="module", autouse=True)
def _simple_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Replaces the real programs, which take seconds to compile, since their behavior is not tested here."""
    sources = tmp_path_factory.mktemp("sources") / "bpf"
    shutil.copytree(abi.source_directory(), sources)
    passing = "(struct __sk_buff *skb) { return -1; }"
    (sources / "tc.c").write_text("".join(f"int {name}{passing}\n" for name in (*CLASSIFIERS, *TAIL_CALLS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(abi, "source_directory", lambda: sources)
        yield


@pytest.fixture(autouse=True, params=["tcx", "clsact"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How programs are attached: by tcx links, and by filters as on kernels before Linux 6.6."""
    if request.param == "clsact":
        monkeypatch.setattr(tcx, "is_supported", lambda: False)
    elif not tcx.is_supported():
        pytest.skip("this kernel has no tcx")
    return str(request.param)


@pytest.fixture(scope="module")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture
def node() -> Iterator[Namespace]:
    """A namespace with the veths net and pod; the calling thread is in it."""
    with namespace("devices") as made:
        made.ip("link set lo up", "link add net type veth", "link add pod type veth")
        with made.entered():
            yield made


@pytest.fixture
def settings(place: BpfPlace) -> EbpfSettings:
    return EbpfSettings(place.cgroup, place.bpffs, sizes=SIZES)


@pytest.fixture
def clock() -> list[float]:
    """The time of `backend`, in seconds: its one element."""
    return [time.monotonic()]


@pytest.fixture
def backend(settings: EbpfSettings, node: Namespace, clock: list[float]) -> Iterator[EbpfBackend]:
    """An open backend without programs on any device. Entries of earlier tests may be in the maps."""
    with running(settings, clock=lambda: clock[0]) as opened:
        assert not bring(opened, EMPTY_PLAN)
        yield opened
