"""The own programs run first on a device, with other programs before and after, by both ways of attaching."""

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
    EMPTY_PLAN,
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
def foreign() -> Iterator[Program]:
    with program() as loaded:
        yield loaded


def placed(foreign: Program, side: Side) -> contextlib.AbstractContextManager[None]:
    """Another program at the head, by the same way of attaching as the own programs."""
    return (linked if tcx.is_supported() else filtered)(socket.if_nametoindex("net"), side, foreign, HEAD)


def order(side: Side, name: str = "net") -> list[int]:
    """Program ids, in the order in which they run."""
    return others.order(socket.if_nametoindex(name), side)


@BOTH
def test_the_own_program_is_attached_before_existing_programs(
    backend: EbpfBackend, foreign: Program, side: Side
) -> None:
    with placed(foreign, side):
        assert not bring(backend, plan("net"))
        assert order(side) == [programs("net")[list(Side).index(side)], foreign.id]
        assert backend.bypassed() == ()
        bring(backend, EMPTY_PLAN)
        assert order(side) == [foreign.id]


@BOTH
def test_a_program_that_is_attached_first_is_overtaken_at_the_next_check(
    backend: EbpfBackend, foreign: Program, side: Side
) -> None:
    bring(backend, plan("net"))
    own = programs("net")[list(Side).index(side)]
    before = backend.generation()
    with placed(foreign, side):
        assert order(side) == [foreign.id, own]
        assert backend.generation() != before
        (trouble,) = backend.bypassed()
        assert (trouble.device, trouble.side, trouble.position) == ("net", side.name.lower(), 2)
        assert f"program {foreign.id}" in trouble.before[0]
        assert not trouble.is_bypassed
        assert not in_step(backend, plan("net"))
        assert not bring(backend, plan("net"))
        assert order(side) == [own, foreign.id]
        assert in_step(backend, plan("net"))
        assert backend.bypassed() == ()
        bring(backend, EMPTY_PLAN)


def test_a_program_that_keeps_moving_first_is_overtaken_with_increasing_delays(
    backend: EbpfBackend, clock: list[float], foreign: Program
) -> None:
    bring(backend, plan("net"))
    own = programs("net")[0]
    for wait in (4.0, 8.0, 16.0):
        with contextlib.ExitStack() as stack:
            stack.enter_context(placed(foreign, Side.INGRESS))
            assert not bring(backend, plan("net"))
            assert order(Side.INGRESS)[0] == own
            stack.close()
            stack.enter_context(placed(foreign, Side.INGRESS))
            assert in_step(backend, plan("net")), "the next attempt is not due"
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
    bring(backend, EMPTY_PLAN)


@CLSACT_ONLY
@pytest.mark.parametrize("protocol", ["all", "ip"])
def test_a_non_bpf_filter_with_priority_1_is_reported_and_not_contested(
    backend: EbpfBackend, node: Namespace, protocol: str
) -> None:
    node.tc("qdisc add dev net clsact", f"filter add dev net egress prio 1 protocol {protocol} {U32}")
    assert not bring(backend, plan("net"))
    assert in_step(backend, plan("net"))
    assert backend.bypassed() == (DeviceSide("net", "egress", ("u32 filter, priority 1",)),)
    assert not backend.bypassed()[0].is_bypassed
    bring(backend, EMPTY_PLAN)
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
def test_with_network_plugins_the_own_program_is_first_on_every_kind_of_device(
    backend: EbpfBackend, node: Namespace, side: Side, plugin: Plugin, comes: str, kind: str
) -> None:
    node.ip(KINDS[kind])
    ifindex = socket.if_nametoindex("made")
    if comes == "after":
        bring(backend, plan("made"))
    with plugin.loaded() as foreign, plugin.attached(ifindex, side, foreign):
        bring(backend, plan("made"))
        assert in_step(backend, plan("made"))
        assert backend.bypassed() == ()
        own = programs("made")[list(Side).index(side)]
        assert order(side, "made") == [own, foreign.id]
        bring(backend, EMPTY_PLAN)
