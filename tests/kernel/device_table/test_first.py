"""The first place at a device: programs of others before, after and around ours, attached either way."""

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from ebpfproxy.dataplanes.ebpf.dataplane import EbpfDataplane
from ebpfproxy.kernel import bpf, tc, tcx
from ebpfproxy.kernel.bpf import Program
from ebpfproxy.kernel.tc import Side
from ebpfproxy.model.device_side import DeviceSide
from tests.kernel.device_table.plane import (
    CLSACT_ONLY,
    NOBODY,
    SCHED_CLS,
    U32,
    bring,
    in_step,
    plan,
    programs,
)
from tests.kernel.test_tc import foreign_filter
from tests.kernel.test_tcx import AFTER, foreign
from tests.support.bpf_place import load_program
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)


@pytest.fixture
def theirs() -> Iterator[Program]:
    with contextlib.closing(load_program(SCHED_CLS, 0)) as loaded:
        yield loaded


@contextlib.contextmanager
def placed(theirs: Program, side: Side, name: str = "net") -> Iterator[None]:
    """Another program at the head, in the way of attaching that ours are attached in."""
    ifindex = socket.if_nametoindex(name)
    if tcx.is_supported():
        with foreign(ifindex, side, theirs):
            yield
    else:
        foreign_filter(ifindex, theirs, handle=1, side=side)
        yield


def order(side: Side, name: str = "net") -> list[int]:
    """Program ids, in running order."""
    ifindex = socket.if_nametoindex(name)
    if tcx.is_supported():
        return [each.program_id for each in tcx.programs(ifindex, side)]
    return [each.program_id for each in tc.filters(ifindex, side)]


@BOTH
def test_ours_is_first_where_others_were_there_before(
    dataplane: EbpfDataplane, theirs: Program, side: Side
) -> None:
    with placed(theirs, side):
        assert not bring(dataplane, plan("net"))
        assert order(side) == [programs("net")[list(Side).index(side)], theirs.id]
        assert dataplane.bypassed() == ()
        bring(dataplane, NOBODY)
        assert order(side) == [theirs.id]


@BOTH
def test_who_comes_to_be_first_is_passed_at_the_next_look(
    dataplane: EbpfDataplane, theirs: Program, side: Side
) -> None:
    bring(dataplane, plan("net"))
    ours = programs("net")[list(Side).index(side)]
    before = dataplane.generation()
    with placed(theirs, side):
        assert order(side) == [theirs.id, ours]
        assert dataplane.generation() != before
        (trouble,) = dataplane.bypassed()
        assert (trouble.device, trouble.side, trouble.position) == ("net", side.name.lower(), 2)
        assert f"program {theirs.id}" in trouble.before[0]
        assert not trouble.is_bypassed
        assert not in_step(dataplane, plan("net"))
        assert not bring(dataplane, plan("net"))
        assert order(side) == [ours, theirs.id]
        assert in_step(dataplane, plan("net"))
        assert dataplane.bypassed() == ()
        bring(dataplane, NOBODY)


def test_who_gets_to_be_first_again_and_again_is_reported_and_passed_less_and_less_often(
    dataplane: EbpfDataplane, clock: list[float], theirs: Program
) -> None:
    bring(dataplane, plan("net"))
    ours = programs("net")[0]
    for wait in (4.0, 8.0, 16.0):
        with contextlib.ExitStack() as stack:
            take_first(stack, theirs)
            assert not bring(dataplane, plan("net"))
            assert order(Side.INGRESS)[0] == ours
            leave(stack)
            take_first(stack, theirs)
            assert in_step(dataplane, plan("net")), "it is not due"
            (trouble,) = dataplane.bypassed()
            assert trouble.contested
            assert trouble.is_bypassed
            clock[0] += wait - 0.1
            assert in_step(dataplane, plan("net"))
            clock[0] += 0.2
            assert not in_step(dataplane, plan("net"))
            leave(stack)
    assert in_step(dataplane, plan("net"))
    assert dataplane.bypassed() == ()
    bring(dataplane, NOBODY)


def take_first(stack: contextlib.ExitStack, theirs: Program) -> None:
    stack.enter_context(placed(theirs, Side.INGRESS))


def leave(stack: contextlib.ExitStack) -> None:
    stack.close()
    if not tcx.is_supported():
        where = {"parent": int(Side.INGRESS), "prio": 1, "handle": 1, "protocol": 3}
        from pyroute2 import IPRoute

        with IPRoute() as changes:
            changes.tc("del-filter", "bpf", socket.if_nametoindex("net"), **where)


@CLSACT_ONLY
@pytest.mark.parametrize("protocol", ["all", "ip"])
def test_a_filter_that_has_priority_1_for_itself_is_reported_and_not_contested(
    dataplane: EbpfDataplane, node: Namespace, protocol: str
) -> None:
    node.tc("qdisc add dev net clsact", f"filter add dev net egress prio 1 protocol {protocol} {U32}")
    assert not bring(dataplane, plan("net"))
    assert in_step(dataplane, plan("net"))
    assert dataplane.bypassed() == (DeviceSide("net", "egress", ("u32 filter, priority 1",)),)
    assert not dataplane.bypassed()[0].is_bypassed
    bring(dataplane, NOBODY)
    assert dataplane.bypassed() == ()


KINDS = {
    "bridge": "link add made type bridge",
    "vxlan": "link add made type vxlan id 7 dstport 4789 dev net",
    "tap": "tuntap add made mode tap",
    "veth": "link add made type veth peer name other",
}


def _cilium(ifindex: int, side: Side, theirs: Program) -> Callable[[], None]:
    """cilium/cilium pkg/datapath/loader: tcx at the tail (tcx.go), else handle 1 at priority 1 (tc.go)."""
    if tcx.is_supported():
        return _links(ifindex, side, theirs, AFTER)
    foreign_filter(ifindex, theirs, handle=1, side=side, name="cil_from_netdev-made")
    return lambda: None


def _aws(ifindex: int, side: Side, theirs: Program) -> Callable[[], None]:
    """aws/aws-ebpf-sdk-go pkg/tc/tc.go: handle 1 at priority 1, also where the kernel has tcx."""
    foreign_filter(ifindex, theirs, handle=1, side=side, name="handle_ingress")
    return lambda: None


def _calico(ifindex: int, side: Side, theirs: Program) -> Callable[[], None]:
    """projectcalico/calico felix/bpf/tc/attach.go: a priority that the kernel chooses."""
    from pyroute2 import IPRoute

    with IPRoute() as changes:
        if not tc.has_clsact(ifindex):
            changes.tc("add", "clsact", ifindex)
        where = {"parent": int(side), "protocol": 3, "name": "cali_tc_preamble"}
        changes.tc("add-filter", "bpf", ifindex, fd=theirs.fd, direct_action=True, **where)
    return lambda: None


def _links(ifindex: int, side: Side, theirs: Program, where: int) -> Callable[[], None]:
    attach_type = 46 if side is Side.INGRESS else 47
    attr = struct.pack("=IIIIIIQ", theirs.fd, ifindex, attach_type, where, 0, 0, 0)
    fd, _ = bpf.bpf(bpf.LINK_CREATE, attr, "cannot attach")
    return lambda: os.close(fd)


@BOTH
@pytest.mark.parametrize("plugin", [_cilium, _aws, _calico], ids=["cilium", "aws", "calico"])
@pytest.mark.parametrize("comes", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_beside_network_plugins_ours_is_first_on_every_kind_of_device(
    dataplane: EbpfDataplane,
    node: Namespace,
    theirs: Program,
    side: Side,
    plugin: Callable[[int, Side, Program], Callable[[], None]],
    comes: str,
    kind: str,
) -> None:
    node.ip(KINDS[kind])
    ifindex = socket.if_nametoindex("made")
    if comes == "after":
        bring(dataplane, plan("made"))
    leave = plugin(ifindex, side, theirs)
    try:
        bring(dataplane, plan("made"))
        assert in_step(dataplane, plan("made"))
        assert dataplane.bypassed() == ()
        ours = programs("made")[list(Side).index(side)]
        everything = [each.program_id for each in _tcx(ifindex, side)]
        everything += [each.program_id for each in tc.filters(ifindex, side)]
        assert everything == [ours, theirs.id]
    finally:
        leave()
        bring(dataplane, NOBODY)


def _tcx(ifindex: int, side: Side) -> tuple[tcx.Placed, ...]:
    return tcx.programs(ifindex, side) if tcx.is_supported() else ()
