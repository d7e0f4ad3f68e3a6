"""Programs on the devices of a namespace of the test's own, by tcx links, beside programs of others."""

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
    with program() as ours:
        assert ids(device, side) == []
        tcx.attach(device, side, ours, pin)
        assert ids(device, side) == [ours.id]
        assert [placed.link_id for placed in tcx.programs(device, side)] == [tcx.link_id(pin)]
        assert tcx.detach(pin) is True
        assert ids(device, side) == []
        assert tcx.detach(pin) is False
        assert tcx.link_id(pin) is None


@BOTH
@pytest.mark.parametrize("where", [HEAD, TAIL], ids=["head", "tail"])
def test_it_is_first_whoever_was_there_before(device: int, side: Side, pin: Path, where: int) -> None:
    with program() as ours, program() as theirs, linked(device, side, theirs, where):
        tcx.attach(device, side, ours, pin)
        assert ids(device, side) == [ours.id, theirs.id]


@BOTH
def test_attaching_again_passes_whoever_came_to_be_first(device: int, side: Side, pin: Path) -> None:
    with program() as ours, program() as new, program() as theirs:
        tcx.attach(device, side, ours, pin)
        with linked(device, side, theirs):
            assert ids(device, side) == [theirs.id, ours.id]
            tcx.attach(device, side, ours, pin)
            assert ids(device, side) == [ours.id, theirs.id]
            tcx.attach(device, side, new, pin)
            assert ids(device, side) == [new.id, theirs.id]
        assert ids(device, side) == [new.id]
        assert [path.name for path in pin.parent.glob("n0_*")] == [pin.name]


def test_a_program_is_replaced_by_the_same_link(device: int, pin: Path) -> None:
    with program() as old, program() as new:
        tcx.attach(device, Side.INGRESS, old, pin)
        link = tcx.link_id(pin)
        tcx.attach(device, Side.INGRESS, new, pin)
        assert (ids(device), tcx.link_id(pin)) == ([new.id], link)


@pytest.mark.parametrize("detached", [False, True])
def test_what_a_process_left_that_was_killed_in_between_is_repaired(
    device: int, pin: Path, detached: bool
) -> None:
    with program() as ours, program() as half:
        tcx.attach(device, Side.INGRESS, ours, pin)
        fresh = pin.with_name(f"{pin.name}_new")
        with contextlib.closing(Link.create_first(half, device, INGRESS)) as left:
            left.pin(fresh)
        if detached:
            with contextlib.closing(Link.pinned(pin)) as link:
                link.detach()
        tcx.attach(device, Side.INGRESS, ours, pin)
        assert ids(device) == [ours.id]
        assert not fresh.exists()


def test_a_device_that_is_gone_has_no_programs_and_its_pin_is_of_no_use(
    node: Namespace, device: int, pin: Path
) -> None:
    with program() as ours:
        tcx.attach(device, Side.INGRESS, ours, pin)
        node.ip("link del n0")
        assert ids(device) == []
        with pytest.raises(NotFound, match=f"device number {device}"):
            tcx.attach(device, Side.INGRESS, ours, pin)
        node.ip(f"link add n0 index {device} type veth peer name n1")
        tcx.attach(device, Side.INGRESS, ours, pin)
        assert ids(device) == [ours.id]


def test_a_device_that_moved_to_another_namespace_loses_its_program_with_the_pin(
    node: Namespace, device: int, pin: Path
) -> None:
    """The kernel leaves it attached."""
    with namespace("tcx-other") as other, program() as ours:
        tcx.attach(device, Side.INGRESS, ours, pin)
        node.ip(f"link set n0 netns {other.name}")
        assert ids(device) == []
        with other.entered():
            there = socket.if_nametoindex("n0")
            assert ids(there) == [ours.id]
            assert tcx.detach(pin) is True
            assert ids(there) == []


def test_no_packet_misses_the_program_while_it_is_replaced_and_gets_first(
    node: Namespace, device: int, pin: Path
) -> None:
    """Both programs drop everything, others pass on; so a packet that arrives has met neither of both."""
    with program(SHOT) as even, program(SHOT) as odd, program() as theirs:
        tcx.attach(device, Side.INGRESS, even, pin)

        def replace(count: int) -> None:
            with linked(device, Side.INGRESS, theirs):
                tcx.attach(device, Side.INGRESS, odd if count % 2 else even, pin)
                assert ids(device)[1] == theirs.id

        assert_none_arrives(node, replace, times=200, least=2_000)
