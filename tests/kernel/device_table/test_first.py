"""The first place at a device: programs of others before, after and around ours, attached either way."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf.backend import EbpfBackend
from ebpfproxy.linux.bpf import tcx
from ebpfproxy.linux.bpf.bpf import Program
from ebpfproxy.linux.bpf.tc import Side
from ebpfproxy.model.device import DeviceSide
from tests.kernel import others
from tests.kernel.device_table.plane import (
    CLSACT_ONLY,
    NOBODY,
    U32,
    bring,
    in_step,
    plan,
    programs,
)
from tests.kernel.others import HEAD, filtered, linked, program
from tests.kernel.plugins import PLUGINS, Plugin
from tests.support.namespace import Namespace

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)


@pytest.fixture
def theirs() -> Iterator[Program]:
    with program() as loaded:
        yield loaded


def placed(theirs: Program, side: Side) -> contextlib.AbstractContextManager[None]:
    """Another program at the head, in the way of attaching that ours are attached in."""
    return (linked if tcx.is_supported() else filtered)(socket.if_nametoindex("net"), side, theirs, HEAD)


def order(side: Side, name: str = "net") -> list[int]:
    """Program ids, in running order."""
    return others.order(socket.if_nametoindex(name), side)


@BOTH
def test_ours_is_first_where_others_were_there_before(
    backend: EbpfBackend, theirs: Program, side: Side
) -> None:
    with placed(theirs, side):
        assert not bring(backend, plan("net"))
        assert order(side) == [programs("net")[list(Side).index(side)], theirs.id]
        assert backend.bypassed() == ()
        bring(backend, NOBODY)
        assert order(side) == [theirs.id]


@BOTH
def test_who_comes_to_be_first_is_passed_at_the_next_look(
    backend: EbpfBackend, theirs: Program, side: Side
) -> None:
    bring(backend, plan("net"))
    ours = programs("net")[list(Side).index(side)]
    before = backend.generation()
    with placed(theirs, side):
        assert order(side) == [theirs.id, ours]
        assert backend.generation() != before
        (trouble,) = backend.bypassed()
        assert (trouble.device, trouble.side, trouble.position) == ("net", side.name.lower(), 2)
        assert f"program {theirs.id}" in trouble.before[0]
        assert not trouble.is_bypassed
        assert not in_step(backend, plan("net"))
        assert not bring(backend, plan("net"))
        assert order(side) == [ours, theirs.id]
        assert in_step(backend, plan("net"))
        assert backend.bypassed() == ()
        bring(backend, NOBODY)


def test_who_gets_to_be_first_again_and_again_is_reported_and_passed_less_and_less_often(
    backend: EbpfBackend, clock: list[float], theirs: Program
) -> None:
    bring(backend, plan("net"))
    ours = programs("net")[0]
    for wait in (4.0, 8.0, 16.0):
        with contextlib.ExitStack() as stack:
            stack.enter_context(placed(theirs, Side.INGRESS))
            assert not bring(backend, plan("net"))
            assert order(Side.INGRESS)[0] == ours
            stack.close()
            stack.enter_context(placed(theirs, Side.INGRESS))
            assert in_step(backend, plan("net")), "it is not due"
            (trouble,) = backend.bypassed()
            assert trouble.contested
            assert trouble.is_bypassed
            clock[0] += wait - 0.1
            assert in_step(backend, plan("net"))
            clock[0] += 0.2
            assert not in_step(backend, plan("net"))
            stack.close()
    assert in_step(backend, plan("net"))
    assert backend.bypassed() == ()
    bring(backend, NOBODY)


@CLSACT_ONLY
@pytest.mark.parametrize("protocol", ["all", "ip"])
def test_a_filter_that_has_priority_1_for_itself_is_reported_and_not_contested(
    backend: EbpfBackend, node: Namespace, protocol: str
) -> None:
    node.tc("qdisc add dev net clsact", f"filter add dev net egress prio 1 protocol {protocol} {U32}")
    assert not bring(backend, plan("net"))
    assert in_step(backend, plan("net"))
    assert backend.bypassed() == (DeviceSide("net", "egress", ("u32 filter, priority 1",)),)
    assert not backend.bypassed()[0].is_bypassed
    bring(backend, NOBODY)
    assert backend.bypassed() == ()


KINDS = {
    "bridge": "link add made type bridge",
    "vxlan": "link add made type vxlan id 7 dstport 4789 dev net",
    "tap": "tuntap add made mode tap",
    "veth": "link add made type veth peer name other",
}


@BOTH
@pytest.mark.parametrize("plugin", PLUGINS.values(), ids=PLUGINS)
@pytest.mark.parametrize("comes", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_beside_network_plugins_ours_is_first_on_every_kind_of_device(
    backend: EbpfBackend, node: Namespace, side: Side, plugin: Plugin, comes: str, kind: str
) -> None:
    node.ip(KINDS[kind])
    ifindex = socket.if_nametoindex("made")
    if comes == "after":
        bring(backend, plan("made"))
    with plugin.loaded() as theirs, plugin.attached(ifindex, side, theirs):
        bring(backend, plan("made"))
        assert in_step(backend, plan("made"))
        assert backend.bypassed() == ()
        ours = programs("made")[list(Side).index(side)]
        assert order(side, "made") == [ours, theirs.id]
        bring(backend, NOBODY)
