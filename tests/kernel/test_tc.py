"""Filters of ours, and of others, on the devices of a namespace of the test's own."""

import contextlib
import ctypes
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import NotFound, Rejected, Unsupported
from ebpfproxy.kernel import bpf, links, tc
from ebpfproxy.kernel.bpf import Program
from ebpfproxy.kernel.tc import Filter, Side
from tests.kernel.cluster import eventually
from tests.support.bpf_place import CONNECT4, SOCK_ADDR, load_program
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

SCHED_CLS = 3
TC_ACT_UNSPEC, TC_ACT_SHOT = -1, 2

U32 = "u32 match u32 0 0 flowid 1:1"
"""A filter as others have them; the kernel shows it as two, itself and its hash table."""

BOTH = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)


@pytest.fixture
def node() -> Iterator[Namespace]:
    """A namespace with a veth pair n0, n1, both up; the calling thread is in it."""
    with namespace("tc") as made:
        made.ip("link set lo up", "link add n0 type veth peer name n1")
        made.ip("link set n0 addrgenmode none", "link set n1 addrgenmode none")
        made.ip("link set n0 up", "link set n1 up")
        with made.entered():
            yield made


@pytest.fixture
def device(node: Namespace) -> int:
    return socket.if_nametoindex("n0")


@contextlib.contextmanager
def program(action: int = TC_ACT_UNSPEC) -> Iterator[Program]:
    """A classifier that says `action` to every packet."""
    code = struct.pack("=BBhi", 0xB7, 0, 0, action) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    instructions, license_ = (ctypes.create_string_buffer(text, len(text)) for text in (code, b"GPL\0"))
    attr = struct.pack(
        "=IIQQIIQII16s",
        *(SCHED_CLS, len(code) // 8, ctypes.addressof(instructions), ctypes.addressof(license_)),
        *(0, 0, 0, 0, 0, b"test"),
    )
    loaded = Program(bpf.bpf(bpf.PROG_LOAD, attr, "cannot load")[0], "test")
    try:
        yield loaded
    finally:
        loaded.close()


@BOTH
def test_a_program_is_attached_found_by_its_id_and_detached(device: int, side: Side) -> None:
    with program() as ours:
        assert tc.program_id(device, side) is None
        assert tc.attach(device, side, ours) is True
        assert tc.program_id(device, side) == ours.id
        assert tc.filters(device, side) == [Filter(1, 0xEB, 3, "bpf", "ebpfproxy", ours.id)]
    assert tc.detach(device, side) is True
    assert tc.filters(device, side) == []
    assert tc.detach(device, side) is False


def test_the_two_sides_have_programs_of_their_own_below_one_clsact(device: int) -> None:
    with program() as first, program() as second:
        assert tc.attach(device, Side.INGRESS, first) is True
        assert tc.attach(device, Side.EGRESS, second) is False
        assert tc.program_id(device, Side.INGRESS) == first.id
        assert tc.program_id(device, Side.EGRESS) == second.id
    tc.detach(device, Side.INGRESS)
    assert tc.program_id(device, Side.EGRESS) is not None


@BOTH
def test_attaching_again_replaces_the_program_and_adds_no_filter(device: int, side: Side) -> None:
    with program() as old, program() as new:
        tc.attach(device, side, old)
        assert tc.attach(device, side, new) is False
        assert [one.program_id for one in tc.filters(device, side)] == [new.id]


def test_the_filter_is_as_the_command_tc_shows_it(node: Namespace, device: int) -> None:
    with program() as ours:
        tc.attach(device, Side.EGRESS, ours)
    shown = subprocess.run(
        ["tc", "filter", "show", "dev", "n0", "egress"], capture_output=True, text=True, check=True
    ).stdout
    assert "filter protocol all pref 1 bpf" in shown
    assert "handle 0xeb ebpfproxy direct-action" in shown


@BOTH
def test_filters_of_others_survive_attach_replace_detach_and_cleanup(
    node: Namespace, device: int, side: Side
) -> None:
    node.tc(
        "qdisc add dev n0 clsact",
        f"filter add dev n0 {side.name.lower()} prio 1 protocol ip {U32}",
        f"filter add dev n0 {side.name.lower()} prio 400 protocol all {U32}",
        f"filter add dev n0 {side.name.lower()} chain 7 prio 2 protocol ipv6 {U32}",
    )
    others = tc.filters(device, side)
    assert {(one.chain, one.priority, one.kind, one.protocol) for one in others} == {
        (0, 1, "u32", 0x0800),
        (0, 400, "u32", 3),
        (7, 2, "u32", 0x86DD),
    }
    with program() as first, program() as second:
        assert tc.attach(device, side, first) is False
        tc.attach(device, side, second)
        assert sorted(tc.filters(device, side)) == sorted(
            [*others, Filter(2, 0xEB, 3, "bpf", "ebpfproxy", second.id)]
        )
    assert tc.detach(device, side) is True
    assert tc.remove_clsact(device) is False
    assert tc.filters(device, side) == others


@BOTH
def test_ours_is_first_before_bpf_filters_that_were_there(device: int, side: Side) -> None:
    with program() as theirs, program() as ours:
        foreign_filter(device, theirs, handle=1, side=side)
        tc.attach(device, side, ours)
        assert [one.program_id for one in tc.filters(device, side)] == [ours.id, theirs.id]
        tc.detach(device, side)
        assert [one.program_id for one in tc.filters(device, side)] == [theirs.id]


def test_a_handle_that_is_taken_is_left_to_its_owner(device: int) -> None:
    with program() as theirs, program() as ours:
        foreign_filter(device, theirs, handle=tc.HANDLES[0])
        assert tc.program_id(device, Side.INGRESS) is None
        assert tc.detach(device, Side.INGRESS) is False
        tc.attach(device, Side.INGRESS, ours)
        assert {one.handle: one.program_id for one in tc.filters(device, Side.INGRESS)} == {
            tc.HANDLES[1]: ours.id,
            tc.HANDLES[0]: theirs.id,
        }


def test_a_filter_that_came_to_be_before_ours_is_passed_by_attaching_again(device: int) -> None:
    with program() as theirs, program() as ours, program() as next_one:
        tc.attach(device, Side.INGRESS, ours)
        foreign_filter(device, theirs, handle=1)
        found = tc.filters(device, Side.INGRESS)
        assert [one.name for one in tc.before(found)] == ["theirs"]
        assert tc.can_advance(found)
        tc.attach(device, Side.INGRESS, next_one)
        found = tc.filters(device, Side.INGRESS)
        assert [one.program_id for one in found] == [next_one.id, theirs.id]
        assert not tc.can_advance(found)


def test_a_filter_of_a_former_version_is_replaced_by_one_at_the_first_place(device: int) -> None:
    """Version 0.1 has priority 235."""
    with program() as former, program() as theirs, program() as ours:
        foreign_filter(device, former, handle=0xEB, name=tc.NAME, priority=235)
        foreign_filter(device, theirs, handle=1)
        assert tc.program_id(device, Side.INGRESS) == former.id
        assert tc.attach(device, Side.INGRESS, ours) is False
        assert [one.program_id for one in tc.filters(device, Side.INGRESS)] == [ours.id, theirs.id]


@pytest.mark.parametrize("kind", [f"protocol ip {U32}", f"protocol all {U32}"])
def test_where_priority_1_takes_no_bpf_filter_ours_is_the_next_and_tells_so(
    node: Namespace, device: int, kind: str
) -> None:
    node.tc("qdisc add dev n0 clsact", f"filter add dev n0 egress prio 1 {kind}")
    with program() as ours:
        tc.attach(device, Side.EGRESS, ours)
    found = tc.filters(device, Side.EGRESS)
    assert {str(one) for one in tc.before(found)} == {"u32 filter, priority 1"}
    assert not tc.can_advance(found)
    assert found[-1].priority == 2


def test_a_filter_without_a_priority_comes_after_ours(node: Namespace, device: int) -> None:
    with program() as ours:
        tc.attach(device, Side.INGRESS, ours)
    node.tc(f"filter add dev n0 ingress protocol all {U32}")
    found = tc.filters(device, Side.INGRESS)
    assert found[0].is_ours
    assert {one.priority for one in found[1:]} == {49152}


def foreign_filter(
    device: int,
    theirs: Program,
    handle: int,
    side: Side = Side.INGRESS,
    name: str = "theirs",
    priority: int = tc.FIRST,
) -> None:
    """A bpf filter, by default of another name at our priority."""
    from pyroute2 import IPRoute

    with IPRoute() as changes:
        if not tc.has_clsact(device):
            changes.tc("add", "clsact", device)
        where = {"parent": int(side), "prio": priority, "handle": handle, "protocol": 3}
        changes.tc("add-filter", "bpf", device, fd=theirs.fd, name=name, direct_action=True, **where)


def test_an_empty_clsact_goes_and_one_with_a_filter_on_the_other_side_stays(device: int) -> None:
    assert tc.has_clsact(device) is False
    assert tc.remove_clsact(device) is False
    with program() as ours:
        tc.attach(device, Side.INGRESS, ours)
        tc.attach(device, Side.EGRESS, ours)
    tc.detach(device, Side.INGRESS)
    assert tc.remove_clsact(device) is False
    assert tc.has_clsact(device) is True
    tc.detach(device, Side.EGRESS)
    assert tc.remove_clsact(device) is True
    assert tc.has_clsact(device) is False


def test_a_clsact_that_was_there_is_told_from_one_that_was_made(node: Namespace, device: int) -> None:
    node.tc("qdisc add dev n0 clsact")
    with program() as ours:
        assert tc.attach(device, Side.INGRESS, ours) is False
        assert tc.attach(socket.if_nametoindex("n1"), Side.INGRESS, ours) is True


def test_an_ingress_qdisc_of_somebody_else_serves_ingress(node: Namespace, device: int) -> None:
    node.tc("qdisc add dev n0 ingress", f"filter add dev n0 ingress prio 9 {U32}")
    with program() as ours:
        assert tc.attach(device, Side.INGRESS, ours) is False
        assert tc.program_id(device, Side.INGRESS) == ours.id
    tc.detach(device, Side.INGRESS)
    assert {one.priority for one in tc.filters(device, Side.INGRESS)} == {9}


def test_an_ingress_qdisc_takes_no_program_for_egress(node: Namespace, device: int) -> None:
    """The kernel would take it, and run it at ingress."""
    node.tc("qdisc add dev n0 ingress")
    with program() as ours:
        tc.attach(device, Side.INGRESS, ours)
        with pytest.raises(Unsupported, match="egress of n0: there is an ingress qdisc") as refused:
            tc.attach(device, Side.EGRESS, ours)
    assert "clsact" in refused.value.hint
    assert tc.filters(device, Side.EGRESS) == []
    assert tc.program_id(device, Side.INGRESS) is not None
    assert tc.has_clsact(device) is False
    assert tc.remove_clsact(device) is False


def test_a_program_that_is_no_classifier_is_rejected_and_leaves_nothing_behind(device: int) -> None:
    loaded = load_program(SOCK_ADDR, CONNECT4)
    try:
        with pytest.raises(Rejected, match="cannot attach to ingress of n0"):
            tc.attach(device, Side.INGRESS, loaded)
    finally:
        loaded.close()
    assert tc.has_clsact(device) is False


def test_a_device_that_is_gone_is_not_found_and_has_no_filters(node: Namespace, device: int) -> None:
    with program() as ours:
        tc.attach(device, Side.INGRESS, ours)
        node.ip("link del n0")
        with pytest.raises(NotFound, match=f"device number {device}"):
            tc.attach(device, Side.INGRESS, ours)
    assert tc.filters(device, Side.INGRESS) == []
    assert tc.program_id(device, Side.EGRESS) is None
    assert tc.detach(device, Side.INGRESS) is False
    assert tc.has_clsact(device) is False
    assert tc.remove_clsact(device) is False


def test_a_device_made_anew_under_its_old_index_has_lost_its_filters(node: Namespace, device: int) -> None:
    """So who watches devices by index has to look at their filters, too."""
    with program() as ours:
        tc.attach(device, Side.INGRESS, ours)
        node.ip("link del n0", f"link add n0 index {device} type veth peer name n1", "link set n0 up")
        assert tc.program_id(device, Side.INGRESS) is None
        assert tc.attach(device, Side.INGRESS, ours) is True
        assert tc.program_id(device, Side.INGRESS) == ours.id


KINDS = {
    "bridge": "link add made type bridge",
    "veth": "link add made type veth peer name other",
    "vxlan": "link add made type vxlan id 7 dstport 4789 dev n0",
    "tap": "tuntap add made mode tap",
    "tun": "tuntap add made mode tun",
    "ipip": "link add made type ipip local 10.0.0.1 remote 10.0.0.2",
    "geneve": "link add made type geneve id 7 remote 10.0.0.2",
    "wireguard": "link add made type wireguard",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_device_takes_programs_on_both_sides(node: Namespace, kind: str) -> None:
    if node.lacks(KINDS[kind]):
        pytest.skip(f"this kernel has no {kind}")
    index = next(device.ifindex for device in links.read() if device.name == "made")
    with program() as ours:
        for side in Side:
            tc.attach(index, side, ours)
            assert tc.program_id(index, side) == ours.id


def test_loopback_takes_a_program(node: Namespace) -> None:
    with program() as ours:
        tc.attach(1, Side.EGRESS, ours)
        assert tc.program_id(1, Side.EGRESS) == ours.id


FLOOD = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.connect(("10.255.20.1", 9))
    for _ in range(20_000_000):  # a minute, should nobody end it
        sock.send(b"x")
"""


@contextlib.contextmanager
def flooded(peer: Namespace) -> Iterator[None]:
    """Packets from there to 10.255.20.1 port 9 without end, as fast as one process makes them."""
    command = ["ip", "netns", "exec", peer.name, sys.executable, "-c", FLOOD]
    sender = subprocess.Popen(command)
    try:
        yield
        assert sender.poll() is None
    finally:
        sender.kill()
        sender.wait()


def received(node: Namespace) -> int:
    """How many packets have come in by n0."""
    command = ["ip", "-n", node.name, "-json", "-stats", "link", "show", "dev", "n0"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return int(shown[0]["stats64"]["rx"]["packets"])


@contextlib.contextmanager
def flood_arrives(node: Namespace) -> Iterator[socket.socket]:
    """A flood comes in by n0 within the block; the socket gets each packet that no program drops."""
    with namespace("tc-peer") as peer:
        node.ip(
            "link set n0 address 02:00:00:00:20:01",
            "addr add 10.255.20.1/24 dev n0",
            f"link set n1 netns {peer.name}",
        )
        peer.ip("link set n1 up", "addr add 10.255.20.2/24 dev n1")
        peer.ip("neigh add 10.255.20.1 lladdr 02:00:00:00:20:01 dev n1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as arriving:
            arriving.bind(("10.255.20.1", 9))
            arriving.setblocking(False)
            with flooded(peer):
                eventually(lambda: received(node) > 1_000, "the flood begins")
                yield arriving


def test_no_packet_misses_the_program_while_it_is_replaced(node: Namespace, device: int) -> None:
    """Both programs drop everything, so that one packet which arrives has met neither."""
    with program(TC_ACT_SHOT) as even, program(TC_ACT_SHOT) as odd:
        tc.attach(device, Side.INGRESS, even)
        with flood_arrives(node) as arriving:
            before = received(node)
            for count in range(200):
                tc.attach(device, Side.INGRESS, odd if count % 2 else even)
            assert received(node) - before > 5_000
            with pytest.raises(BlockingIOError):
                arriving.recv(1)


def test_no_packet_misses_the_program_while_it_gets_to_the_first_place(node: Namespace, device: int) -> None:
    """The programs that come before it pass everything on; one packet that arrives has met only those."""
    with program(TC_ACT_SHOT) as ours, program() as theirs:
        tc.attach(device, Side.INGRESS, ours)
        with flood_arrives(node) as arriving:
            before = received(node)
            for count in range(1, 101):
                foreign_filter(device, theirs, handle=count)
                assert tc.can_advance(tc.filters(device, Side.INGRESS))
                tc.attach(device, Side.INGRESS, ours)
                assert not tc.before(tc.filters(device, Side.INGRESS))
            assert received(node) - before > 2_000
            with pytest.raises(BlockingIOError):
                arriving.recv(1)
