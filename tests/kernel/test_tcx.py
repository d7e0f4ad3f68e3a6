"""tcx links of ebpfproxy and of other programs on the devices of the test's network namespace."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.bpf import tcx
from ebpfproxy.linux.bpf.bpf import Link
from ebpfproxy.linux.bpf.tc import Side
from tests.kernel.others import HEAD, SHOT, TAIL, linked, program
from tests.kernel.veth_pair import assert_none_arrives, veth_pair
from tests.support.bpf_place import BpfPlace, bpf_place
from tests.support.namespace import Namespace, namespace

INGRESS = 46  # BPF_TCX_INGRESS
BOTH = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)


def _has_tcx() -> bool:
    with contextlib.suppress(KernelError):
        return tcx.is_supported()
    return False


pytestmark = [pytest.mark.kernel, pytest.mark.skipif(not _has_tcx(), reason="this kernel has no tcx")]


@pytest.fixture(scope="module")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture
def node() -> Iterator[Namespace]:
    with veth_pair("tcx") as made:
        yield made


@pytest.fixture
def device(node: Namespace) -> int:
    return socket.if_nametoindex("n0")


@pytest.fixture
def pin(place: BpfPlace) -> Iterator[Path]:
    path = place.bpffs / "n0_side"
    try:
        yield path
    finally:
        tcx.detach(path)


def ids(device: int, side: Side = Side.INGRESS) -> list[int]:
    return [placed.program_id for placed in tcx.programs(device, side)]


@BOTH
def test_a_program_is_attached_found_and_detached_at_once(device: int, side: Side, pin: Path) -> None:
    with program() as own:
        assert ids(device, side) == []
        tcx.attach(device, side, own, pin)
        assert ids(device, side) == [own.id]
        assert [placed.link_id for placed in tcx.programs(device, side)] == [tcx.link_id(pin)]
        assert tcx.detach(pin) is True
        assert ids(device, side) == []
        assert tcx.detach(pin) is False
        assert tcx.link_id(pin) is None


@BOTH
@pytest.mark.parametrize("where", [HEAD, TAIL], ids=["head", "tail"])
def test_the_own_program_is_attached_before_existing_programs(
    device: int, side: Side, pin: Path, where: int
) -> None:
    with program() as own, program() as foreign, linked(device, side, foreign, where):
        tcx.attach(device, side, own, pin)
        assert ids(device, side) == [own.id, foreign.id]


@BOTH
def test_attaching_again_moves_the_own_program_to_the_first_place(device: int, side: Side, pin: Path) -> None:
    with program() as own, program() as new, program() as foreign:
        tcx.attach(device, side, own, pin)
        with linked(device, side, foreign):
            assert ids(device, side) == [foreign.id, own.id]
            tcx.attach(device, side, own, pin)
            assert ids(device, side) == [own.id, foreign.id]
            tcx.attach(device, side, new, pin)
            assert ids(device, side) == [new.id, foreign.id]
        assert ids(device, side) == [new.id]
        assert [path.name for path in pin.parent.glob("n0_*")] == [pin.name]


def test_a_program_is_replaced_by_the_same_link(device: int, pin: Path) -> None:
    with program() as old, program() as new:
        tcx.attach(device, Side.INGRESS, old, pin)
        link = tcx.link_id(pin)
        tcx.attach(device, Side.INGRESS, new, pin)
        assert (ids(device), tcx.link_id(pin)) == ([new.id], link)


@pytest.mark.parametrize("detached", [False, True])
def test_attaching_repairs_the_state_of_a_process_killed_during_an_attach(
    device: int, pin: Path, detached: bool
) -> None:
    with program() as own, program() as unfinished:
        tcx.attach(device, Side.INGRESS, own, pin)
        fresh = pin.with_name(f"{pin.name}_new")
        with contextlib.closing(Link.create_first(unfinished, device, INGRESS)) as left:
            left.pin(fresh)
        if detached:
            with contextlib.closing(Link.pinned(pin)) as link:
                link.detach()
        tcx.attach(device, Side.INGRESS, own, pin)
        assert ids(device) == [own.id]
        assert not fresh.exists()


def test_the_pin_of_a_removed_device_is_replaced_for_a_new_device(
    node: Namespace, device: int, pin: Path
) -> None:
    with program() as own:
        tcx.attach(device, Side.INGRESS, own, pin)
        node.ip("link del n0")
        assert ids(device) == []
        with pytest.raises(NotFound, match=f"device number {device}"):
            tcx.attach(device, Side.INGRESS, own, pin)
        node.ip(f"link add n0 index {device} type veth peer name n1")
        tcx.attach(device, Side.INGRESS, own, pin)
        assert ids(device) == [own.id]


def test_a_device_in_another_namespace_loses_its_program_with_the_pin(
    node: Namespace, device: int, pin: Path
) -> None:
    """The kernel keeps the program attached when the device moves."""
    with namespace("tcx-other") as other, program() as own:
        tcx.attach(device, Side.INGRESS, own, pin)
        node.ip(f"link set n0 netns {other.name}")
        assert ids(device) == []
        with other.entered():
            there = socket.if_nametoindex("n0")
            assert ids(there) == [own.id]
            assert tcx.detach(pin) is True
            assert ids(there) == []


def test_no_packet_misses_the_program_while_it_is_replaced_and_moved_first(
    node: Namespace, device: int, pin: Path, pytestconfig: pytest.Config
) -> None:
    """Both own programs drop all packets, and foreign ones pass them on: a packet that arrives met
    neither."""
    with program(SHOT) as even, program(SHOT) as odd, program() as foreign:
        tcx.attach(device, Side.INGRESS, even, pin)

        def replace(count: int) -> None:
            with linked(device, Side.INGRESS, foreign):
                tcx.attach(device, Side.INGRESS, odd if count % 2 else even, pin)
                assert ids(device)[1] == foreign.id

        times = 20 if pytestconfig.getoption("sample") else 200
        assert_none_arrives(node, replace, times=times, least=10 * times)
