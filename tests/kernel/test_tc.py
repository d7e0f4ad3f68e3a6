"""Filters of ebpfproxy and of other programs on the devices of the test's network namespace."""

import socket
import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import NotFound, Rejected, Unsupported
from ebpfproxy.linux.bpf import tc
from ebpfproxy.linux.bpf.tc import Filter, Side
from ebpfproxy.linux.netlink import links
from tests.kernel.others import SHOT, add_filter, program
from tests.kernel.veth_pair import assert_none_arrives, veth_pair
from tests.support.bpf_place import CONNECT4, SOCK_ADDR, load_program
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel

U32 = "u32 match u32 0 0 flowid 1:1"
"""A filter of another program. The kernel lists it as two: the filter and its hash table."""

BOTH = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)


@pytest.fixture
def node() -> Iterator[Namespace]:
    with veth_pair("tc") as made:
        yield made


@pytest.fixture
def device(node: Namespace) -> int:
    return socket.if_nametoindex("n0")


@BOTH
def test_a_program_is_attached_found_by_its_id_and_detached(device: int, side: Side) -> None:
    with program() as own:
        assert tc.program_id(device, side) is None
        assert tc.attach(device, side, own) is True
        assert tc.program_id(device, side) == own.id
        assert tc.filters(device, side) == [Filter(1, 0xEB, 3, "bpf", "ebpfproxy", own.id)]
    assert tc.detach(device, side) is True
    assert tc.filters(device, side) == []
    assert tc.detach(device, side) is False


def test_both_sides_have_separate_programs_below_one_clsact(device: int) -> None:
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


def test_the_tc_command_lists_the_filter(node: Namespace, device: int) -> None:
    with program() as own:
        tc.attach(device, Side.EGRESS, own)
    shown = subprocess.run(
        ["tc", "filter", "show", "dev", "n0", "egress"], capture_output=True, text=True, check=True
    ).stdout
    assert "filter protocol all pref 1 bpf" in shown
    assert "handle 0xeb ebpfproxy direct-action" in shown


@BOTH
def test_filters_of_other_programs_survive_attach_replace_detach_and_cleanup(
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
def test_the_own_filter_is_attached_before_existing_bpf_filters(device: int, side: Side) -> None:
    with program() as foreign, program() as own:
        add_filter(device, side, foreign)
        tc.attach(device, side, own)
        assert [one.program_id for one in tc.filters(device, side)] == [own.id, foreign.id]
        tc.detach(device, side)
        assert [one.program_id for one in tc.filters(device, side)] == [foreign.id]


def test_a_handle_of_another_program_is_not_reused(device: int) -> None:
    with program() as foreign, program() as own:
        add_filter(device, Side.INGRESS, foreign, handle=tc.HANDLES[0])
        assert tc.program_id(device, Side.INGRESS) is None
        assert tc.detach(device, Side.INGRESS) is False
        tc.attach(device, Side.INGRESS, own)
        assert {one.handle: one.program_id for one in tc.filters(device, Side.INGRESS)} == {
            tc.HANDLES[1]: own.id,
            tc.HANDLES[0]: foreign.id,
        }


def test_attaching_again_moves_the_own_filter_before_a_later_one(device: int) -> None:
    with program() as foreign, program() as own, program() as next_one:
        tc.attach(device, Side.INGRESS, own)
        add_filter(device, Side.INGRESS, foreign)
        found = tc.filters(device, Side.INGRESS)
        assert [one.name for one in tc.before(found)] == ["foreign"]
        assert tc.can_advance(found)
        tc.attach(device, Side.INGRESS, next_one)
        found = tc.filters(device, Side.INGRESS)
        assert [one.program_id for one in found] == [next_one.id, foreign.id]
        assert not tc.can_advance(found)


def test_an_own_filter_behind_another_is_replaced_by_one_in_first_place(device: int) -> None:
    with program() as previous, program() as foreign, program() as own:
        add_filter(device, Side.INGRESS, previous, handle=0xEB, name=tc.NAME, priority=235)
        add_filter(device, Side.INGRESS, foreign)
        assert tc.program_id(device, Side.INGRESS) == previous.id
        assert tc.attach(device, Side.INGRESS, own) is False
        assert [one.program_id for one in tc.filters(device, Side.INGRESS)] == [own.id, foreign.id]


@pytest.mark.parametrize("kind", [f"protocol ip {U32}", f"protocol all {U32}"])
def test_a_non_bpf_filter_with_priority_1_is_reported_as_running_first(
    node: Namespace, device: int, kind: str
) -> None:
    node.tc("qdisc add dev n0 clsact", f"filter add dev n0 egress prio 1 {kind}")
    with program() as own:
        tc.attach(device, Side.EGRESS, own)
    found = tc.filters(device, Side.EGRESS)
    assert {str(one) for one in tc.before(found)} == {"u32 filter, priority 1"}
    assert not tc.can_advance(found)
    assert found[-1].priority == 2


def test_a_filter_without_a_priority_comes_after_the_own_filter(node: Namespace, device: int) -> None:
    with program() as own:
        tc.attach(device, Side.INGRESS, own)
    node.tc(f"filter add dev n0 ingress protocol all {U32}")
    found = tc.filters(device, Side.INGRESS)
    assert found[0].is_own
    assert {one.priority for one in found[1:]} == {49152}


def test_only_an_empty_clsact_is_removed(device: int) -> None:
    assert tc.has_clsact(device) is False
    assert tc.remove_clsact(device) is False
    with program() as own:
        tc.attach(device, Side.INGRESS, own)
        tc.attach(device, Side.EGRESS, own)
    tc.detach(device, Side.INGRESS)
    assert tc.remove_clsact(device) is False
    assert tc.has_clsact(device) is True
    tc.detach(device, Side.EGRESS)
    assert tc.remove_clsact(device) is True
    assert tc.has_clsact(device) is False


def test_attach_reports_whether_it_created_the_clsact(node: Namespace, device: int) -> None:
    node.tc("qdisc add dev n0 clsact")
    with program() as own:
        assert tc.attach(device, Side.INGRESS, own) is False
        assert tc.attach(socket.if_nametoindex("n1"), Side.INGRESS, own) is True


def test_an_existing_ingress_qdisc_is_used_for_ingress(node: Namespace, device: int) -> None:
    node.tc("qdisc add dev n0 ingress", f"filter add dev n0 ingress prio 9 {U32}")
    with program() as own:
        assert tc.attach(device, Side.INGRESS, own) is False
        assert tc.program_id(device, Side.INGRESS) == own.id
    tc.detach(device, Side.INGRESS)
    assert {one.priority for one in tc.filters(device, Side.INGRESS)} == {9}


def test_attaching_at_egress_is_rejected_if_there_is_an_ingress_qdisc(node: Namespace, device: int) -> None:
    """The kernel would accept the program, and run it at ingress."""
    node.tc("qdisc add dev n0 ingress")
    with program() as own:
        tc.attach(device, Side.INGRESS, own)
        with pytest.raises(Unsupported, match="another program has an ingress qdisc there") as rejected:
            tc.attach(device, Side.EGRESS, own)
    assert "clsact" in rejected.value.hint
    assert tc.filters(device, Side.EGRESS) == []
    assert tc.program_id(device, Side.INGRESS) is not None
    assert tc.has_clsact(device) is False
    assert tc.remove_clsact(device) is False


def test_a_program_that_is_no_classifier_is_rejected_and_no_clsact_stays(device: int) -> None:
    loaded = load_program(SOCK_ADDR, CONNECT4)
    try:
        with pytest.raises(Rejected, match="cannot attach to ingress of n0"):
            tc.attach(device, Side.INGRESS, loaded)
    finally:
        loaded.close()
    assert tc.has_clsact(device) is False


def test_a_device_that_is_gone_is_not_found_and_has_no_filters(node: Namespace, device: int) -> None:
    with program() as own:
        tc.attach(device, Side.INGRESS, own)
        node.ip("link del n0")
        with pytest.raises(NotFound, match=f"device number {device}"):
            tc.attach(device, Side.INGRESS, own)
    assert tc.filters(device, Side.INGRESS) == []
    assert tc.program_id(device, Side.EGRESS) is None
    assert tc.detach(device, Side.INGRESS) is False
    assert tc.has_clsact(device) is False
    assert tc.remove_clsact(device) is False


def test_a_recreated_device_with_the_same_index_has_no_filters(node: Namespace, device: int) -> None:
    """So a watch of device indexes is not sufficient: the filters have to be read, too."""
    with program() as own:
        tc.attach(device, Side.INGRESS, own)
        node.ip("link del n0", f"link add n0 index {device} type veth peer name n1", "link set n0 up")
        assert tc.program_id(device, Side.INGRESS) is None
        assert tc.attach(device, Side.INGRESS, own) is True
        assert tc.program_id(device, Side.INGRESS) == own.id


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
    with program() as own:
        for side in Side:
            tc.attach(index, side, own)
            assert tc.program_id(index, side) == own.id


def test_loopback_takes_a_program(node: Namespace) -> None:
    with program() as own:
        tc.attach(1, Side.EGRESS, own)
        assert tc.program_id(1, Side.EGRESS) == own.id


def test_no_packet_misses_the_program_while_it_is_replaced(node: Namespace, device: int) -> None:
    """Both programs drop everything: a packet that arrives has met neither."""
    with program(SHOT) as even, program(SHOT) as odd:
        tc.attach(device, Side.INGRESS, even)

        def replace(count: int) -> None:
            tc.attach(device, Side.INGRESS, odd if count % 2 else even)

        assert_none_arrives(node, replace, times=200, least=5_000)


def test_no_packet_misses_the_program_while_it_moves_to_the_first_place(
    node: Namespace, device: int, pytestconfig: pytest.Config
) -> None:
    """The programs before it pass all packets on: a packet that arrives has met only those."""
    with program(SHOT) as own, program() as foreign:
        tc.attach(device, Side.INGRESS, own)

        def advance(count: int) -> None:
            add_filter(device, Side.INGRESS, foreign, handle=count + 1)
            assert tc.can_advance(tc.filters(device, Side.INGRESS))
            tc.attach(device, Side.INGRESS, own)
            assert not tc.before(tc.filters(device, Side.INGRESS))

        times = 20 if pytestconfig.getoption("sample") else 100
        assert_none_arrives(node, advance, times=times, least=20 * times)
