"""Programs on the devices of a namespace of the test's own, by tcx links, beside programs of others."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.kernel import bpf, tcx
from ebpfproxy.kernel.bpf import Link, Program
from ebpfproxy.kernel.tc import Side
from tests.kernel.test_tc import TC_ACT_SHOT, flood_arrives, received
from tests.support.bpf_place import BpfPlace, bpf_place
from tests.support.namespace import Namespace, namespace

TCX_NEXT, TCX_PASS = -1, 0
BEFORE, AFTER = 1 << 3, 1 << 4  # BPF_F_BEFORE, BPF_F_AFTER
ATTACH_TYPES = {Side.INGRESS: 46, Side.EGRESS: 47}
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
    """A namespace with a veth pair n0, n1, both up; the calling thread is in it."""
    with namespace("tcx") as made:
        made.ip("link set lo up", "link add n0 type veth peer name n1")
        made.ip("link set n0 addrgenmode none", "link set n1 addrgenmode none")
        made.ip("link set n0 up", "link set n1 up")
        with made.entered():
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


@contextlib.contextmanager
def program(action: int = TCX_NEXT) -> Iterator[Program]:
    """A classifier that returns `action` for every packet."""
    code = struct.pack("=BBhi", 0xB7, 0, 0, action) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    loaded = Program.load(3, 0, code)
    try:
        yield loaded
    finally:
        loaded.close()


@contextlib.contextmanager
def foreign(device: int, side: Side, theirs: Program, where: int = BEFORE) -> Iterator[None]:
    """A tcx link of others, at the head of the list or at its tail, within the block."""
    attr = struct.pack("=IIIIIIQ", theirs.fd, device, ATTACH_TYPES[side], where, 0, 0, 0)
    fd, _ = bpf.bpf(bpf.LINK_CREATE, attr, "cannot attach")
    try:
        yield
    finally:
        os.close(fd)


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
@pytest.mark.parametrize("where", [BEFORE, AFTER], ids=["head", "tail"])
def test_it_is_first_whoever_was_there_before(device: int, side: Side, pin: Path, where: int) -> None:
    with program() as ours, program() as theirs, foreign(device, side, theirs, where):
        tcx.attach(device, side, ours, pin)
        assert ids(device, side) == [ours.id, theirs.id]


@BOTH
def test_attaching_again_passes_whoever_came_to_be_first(device: int, side: Side, pin: Path) -> None:
    with program() as ours, program() as new, program() as theirs:
        tcx.attach(device, side, ours, pin)
        with foreign(device, side, theirs):
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
        with contextlib.closing(Link.create_first(half, device, ATTACH_TYPES[Side.INGRESS])) as left:
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
    with program(TC_ACT_SHOT) as even, program(TC_ACT_SHOT) as odd, program() as theirs:
        tcx.attach(device, Side.INGRESS, even, pin)
        with flood_arrives(node) as arriving:
            before = received(node)
            for count in range(200):
                with foreign(device, Side.INGRESS, theirs):
                    tcx.attach(device, Side.INGRESS, odd if count % 2 else even, pin)
                    assert ids(device)[1] == theirs.id
            assert received(node) - before > 2_000
            with pytest.raises(BlockingIOError):
                arriving.recv(1)
