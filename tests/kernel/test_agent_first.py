"""Programs of others at the node's uplink, while an agent serves clients outside."""

import contextlib
import json
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpfproxy.dataplanes.ebpf.positions import FIRST_AGAIN, PROGRAMS_BEFORE
from ebpfproxy.kernel import bpf, tc, tcx
from ebpfproxy.kernel.bpf import Link, Program
from ebpfproxy.kernel.tc import Side
from tests.kernel import attached
from tests.kernel.clients import TCP, answers, outcome
from tests.kernel.cluster import START_PATIENCE, Cluster, Exposed, eventually
from tests.kernel.test_tc import foreign_filter
from tests.kernel.two_nodes import Everywhere, TwoNodes, told

pytestmark = pytest.mark.kernel

PASS, NEXT = 0, -1  # TCX_PASS and TC_ACT_OK, TCX_NEXT and TC_ACT_UNSPEC
BEFORE, AFTER = 1 << 3, 1 << 4  # BPF_F_BEFORE, BPF_F_AFTER
MARK = 0x200  # within the bits that Cilium (0x0f00) and others use


@contextlib.contextmanager
def program(action: int, mark: int = 0) -> Iterator[Program]:
    """Returns `action` for every packet; with `mark` it writes skb->mark first."""
    writing = struct.pack("=BBhi", 0xB7, 2, 0, mark) + struct.pack("=BBhi", 0x63, 2 << 4 | 1, 8, 0)
    leaving = struct.pack("=BBhi", 0xB7, 0, 0, action) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    with contextlib.closing(Program.load(3, 0, (writing if mark else b"") + leaving)) as loaded:
        yield loaded


@contextlib.contextmanager
def by_tcx(cluster: Cluster, side: Side, theirs: Program, where: int) -> Iterator[None]:
    """At the head or at the tail of the list of eth0."""
    pin = cluster.lab.bpffs / f"foreign_{side.name}_{theirs.id}"

    def attach() -> None:
        attach_type = 46 if side is Side.INGRESS else 47
        where_ = (theirs.fd, socket.if_nametoindex("eth0"), attach_type, where, 0, 0, 0)
        fd, _ = bpf.bpf(bpf.LINK_CREATE, struct.pack("=IIIIIIQ", *where_), "cannot attach")
        with contextlib.closing(Link(fd, "foreign")) as link:
            link.pin(pin)

    cluster.node.call(attach)
    try:
        yield
    finally:
        tcx.detach(pin)


@contextlib.contextmanager
def by_tc(cluster: Cluster, side: Side, theirs: Program, where: int) -> Iterator[None]:
    """A filter at priority 1, or at one that comes later."""
    priority = 1 if where == BEFORE else 9

    def attach() -> None:
        ifindex = socket.if_nametoindex("eth0")
        foreign_filter(ifindex, theirs, handle=9, side=side, priority=priority)

    cluster.node.call(attach)
    try:
        yield
    finally:
        filters = ["tc", "filter", "del", "dev", "eth0", side.name.lower(), "prio", str(priority)]
        cluster.node.run([*filters, "handle", "9", "bpf"])


def served(cluster: Cluster, web: Exposed) -> bool:
    return outcome(cluster.lab.outside, TCP, cluster.node.v4, web.node_port, 0.3) == "a"


def ready(cluster: Cluster) -> tuple[int, list[dict[str, Any]]]:
    """The status of /readyz, and the devices in its body."""

    def ask() -> tuple[int, bytes]:
        try:
            answer = urllib.request.urlopen("http://127.0.0.1:10256/readyz", timeout=60)
            return int(answer.status), answer.read()
        except urllib.error.HTTPError as refusal:
            return refusal.code, refusal.read()

    code, body = cluster.node.call(ask)
    return code, json.loads(body).get("devices", [])


def first(cluster: Cluster, side: Side) -> bool:
    """Whether a program of ours is the first one at eth0."""

    def look() -> bool:
        ifindex = socket.if_nametoindex("eth0")
        placed = [each.program_id for each in tcx.programs(ifindex, side)] if tcx.is_supported() else []
        placed += [each.program_id for each in tc.filters(ifindex, side)]
        return bool(placed) and placed[0] == attached.program_id(ifindex, side)

    return cluster.node.call(look)


@pytest.fixture(scope="module")
def serving(_rough: Cluster) -> Iterator[tuple[Cluster, Exposed]]:
    """An agent whose NodePort a client outside dials."""
    _rough.start("--sync-period=1h")
    web = _rough.service(node_port=True).to(_rough.a)
    yield _rough, web
    _rough.end()
    _rough.forget()


WAYS = [by_tcx, by_tc] if Path("/proc/self/ns/net").exists() else []


@pytest.mark.parametrize("way", WAYS, ids=["tcx", "tc"])
@pytest.mark.parametrize("side", list(Side), ids=lambda side: side.name)
@pytest.mark.parametrize("where", [BEFORE, AFTER], ids=["head", "tail"])
@pytest.mark.parametrize(("action", "mark"), [(PASS, 0), (PASS, MARK), (NEXT, MARK)])
def test_clients_are_served_beside_any_program_at_the_uplink(
    serving: tuple[Cluster, Exposed], way: Any, side: Side, where: int, action: int, mark: int
) -> None:
    """Within seconds, be it that ours have to get to the first place again."""
    cluster, web = serving
    if way is by_tcx and not cluster.node.call(tcx.is_supported):
        pytest.skip("this kernel has no tcx")
    eventually(lambda: served(cluster, web), "served before")
    with program(action, mark) as theirs, way(cluster, side, theirs, where):
        eventually(lambda: first(cluster, side), "ours is first")
        eventually(lambda: served(cluster, web), "served")
        assert set(answers(cluster.lab.outside, TCP, cluster.node.v4, web.node_port, 20)) == {"a"}


def test_a_place_that_others_take_again_and_again_is_named_and_the_node_is_not_ready(rough: Cluster) -> None:
    agent = rough.start("--sync-period=1h")
    web = rough.service(node_port=True).to(rough.a)
    assert ready(rough) == (200, [])
    way = by_tcx if rough.node.call(tcx.is_supported) else by_tc
    since, stop = len(agent.lines), threading.Event()

    def regained() -> bool:
        return stop.is_set() or first(rough, Side.INGRESS)

    def fight() -> None:
        with program(PASS) as theirs:
            while not stop.is_set():
                with way(rough, Side.INGRESS, theirs, BEFORE):
                    # The agent waits longer before each attempt, up to 5 minutes.
                    eventually(regained, "ours is first", START_PATIENCE)

    fighter = threading.Thread(target=fight)
    fighter.start()
    try:
        agent.await_line(lambda line: PROGRAMS_BEFORE in line.text and "device=eth0" in line.text, since, 60)
        eventually(lambda: ready(rough)[0] == 503, "not ready")
        (device, *_) = ready(rough)[1] or [{"device": "eth0", "side": "ingress"}]
        assert (device["device"], device["side"]) == ("eth0", "ingress")
        eventually(lambda: rough.metric("ebpfproxy_bypassed_device_sides") == 1, "the metric has it")
        eventually(
            lambda: "first place at ingress of eth0" in doctor(rough), "doctor names it", START_PATIENCE
        )
    finally:
        stop.set()
        fighter.join()
    agent.await_line(lambda line: FIRST_AGAIN in line.text, since, 60)
    eventually(lambda: ready(rough) == (200, []), "ready again")
    assert served(rough, web)


@pytest.fixture(scope="module")
def forwarding(_rough_pair: TwoNodes) -> Iterator[tuple[TwoNodes, Everywhere]]:
    """Two nodes, of which the first one sends a client's connections to a pod of the second, masqueraded."""
    _rough_pair.start("--sync-period=1h")
    web = _rough_pair.everywhere().to(_rough_pair.d)
    yield _rough_pair, web
    _rough_pair.end()
    _rough_pair.forget()


@pytest.mark.parametrize("way", WAYS, ids=["tcx", "tc"])
@pytest.mark.parametrize(
    ("side", "action"),
    [
        pytest.param(Side.INGRESS, PASS, id="ingress-pass"),
        pytest.param(Side.INGRESS, NEXT, id="ingress-next"),
        pytest.param(Side.EGRESS, PASS, id="egress-pass"),
        pytest.param(Side.EGRESS, NEXT, id="egress-next"),
    ],
)
def test_what_is_masqueraded_to_another_node_is_served_beside_any_program_after_ours(
    forwarding: tuple[TwoNodes, Everywhere], way: Any, side: Side, action: int
) -> None:
    pair, web = forwarding
    if way is by_tcx and not pair.node.call(tcx.is_supported):
        pytest.skip("this kernel has no tcx")
    dial = pair.node.v4, web.node_port
    assert answers_of_d(pair, *dial, count=5)
    with program(action, MARK) as theirs, way(pair, side, theirs, AFTER):
        assert answers_of_d(pair, *dial, count=5)


def answers_of_d(pair: TwoNodes, address: str, port: int, count: int) -> bool:
    return all(told(outcome(pair.x, TCP, address, port, 1.0))[0] == "d" for _ in range(count))


def doctor(cluster: Cluster) -> str:
    return str(cluster.ebpfproxy("doctor", check=False).stdout)
