"""Floods from clients that never answer: established connections survive, and new clients connect."""

import contextlib
import json
import socket
import time

import pytest

from ebpfproxy.bench.load import Load
from ebpfproxy.lab import Lab
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import SILENT, TCP, UDP, connected, converse, outcome
from tests.kernel.cluster import elsewhere
from tests.kernel.floods.testbed import FLOWS_MAX, SHORT, Target, both_families, in_modes
from tests.support.flood import Sender, Size, Sources

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300)]

IDLE = 10
"""Connections, and as many UDP flows, that have no packet during the flood."""
AFTERWARDS = 5.0
"""Seconds between the end of a flood in the long form and the next packet of the idle connections."""
ASSURED = 2.5
"""Seconds after which connection tracking treats a continuing UDP flow as a stream (2 s,
nf_conntrack_udp_packet()). Before that it may be evicted, and it ends after 30 s without a packet."""
THIRD_SYN = 4.0
"""Seconds in which a client sends three SYNs. On a busy machine, a full queue may drop one of them."""
CLIENTS_APART = 0.02
"""Seconds between new clients. Thousands of them would fill the table of flows, which is small here."""
ATTEMPTS = 5
"""Attempts of a UDP client: the endpoints' sockets drop datagrams during a flood."""


@both_families
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
@in_modes()
def test_a_flood_ends_no_established_flow(
    target: Target, sender: Sender, size: Size, family: str, protocol: Protocol
) -> None:
    """A flood to the NodePort of the idle connections. In mode ebpf a separate map has half-open and
    unreplied flows, so that they never evict an established one. Other modes never evict an established flow
    either, see `Target.has_room_for`."""
    target.forget_connections()
    room = target.has_room_for(size.packets)
    address, port = getattr(target.node, family), target.node_port().node_port
    with contextlib.ExitStack() as stack:
        idle, answers = _established(stack, target, address, port, room)
        flood = sender.start(target.lab.outside, protocol, address, port, size)
        connected_meanwhile = [_new_client(target, address, port)]
        while flood.poll() is None:
            connected_meanwhile.append(_new_client(target, address, port))
        took = sender.finish(flood)
        print(f"{size.packets} packets in {took} s; {len(connected_meanwhile)} new clients meanwhile")
        assert not room or set(connected_meanwhile) <= {"a", "b", "c"}
        if size.packets > SHORT:
            time.sleep(AFTERWARDS)  # the tested condition: the connections stay idle
        assert not room or _new_client(target, address, port) in {"a", "b", "c"}
        assert [_answer(sock) for sock in idle] == answers


def _established(
    stack: contextlib.ExitStack, target: Target, address: str, port: int, room: bool
) -> tuple[list[socket.socket], list[str]]:
    """Connections and flows that will be idle, and each endpoint's answer. `room`: no table will be full."""
    try:
        idle = [
            stack.enter_context(connected(target.lab.outside, protocol, address, port, THIRD_SYN))
            for protocol in (TCP, UDP)
            for _ in range(IDLE)
        ]
    except TimeoutError as failure:
        failure.add_note(target.counters())
        raise
    answers = [_answer(sock) for sock in idle]
    assert SILENT not in answers
    if not room:
        time.sleep(ASSURED)  # the tested condition
    assert [_answer(sock) for sock in idle] == answers  # UDP is established by this exchange
    return idle, answers


def _answer(sock: socket.socket) -> str:
    """The endpoint's answer, SILENT, or "closed" if the connection has ended."""
    if sock.type == socket.SOCK_STREAM:
        try:
            return converse(sock) or "closed"
        except ConnectionError:
            return "closed"
    sock.settimeout(1.0)
    return next((answer for _ in range(ATTEMPTS) if (answer := converse(sock)) != SILENT), SILENT)


def _new_client(target: Target, address: str, port: int) -> str:
    """The endpoint that answers a new TCP client; SILENT if none answers until its third SYN."""
    time.sleep(CLIENTS_APART)
    return outcome(target.lab.outside, TCP, address, port, THIRD_SYN).partition(" ")[0]


@both_families
@in_modes()
def test_a_flood_of_one_service_ends_no_flow_of_another(
    target: Target, sender: Sender, size: Size, family: str
) -> None:
    """A new UDP client is answered after the flood."""
    target.forget_connections()
    room = target.has_room_for(2 * size.packets)
    address, port = getattr(target.node, family), target.node_port().node_port
    flooded = target.node_port().node_port
    with contextlib.ExitStack() as stack:
        idle, answers = _established(stack, target, address, port, room)
        for protocol in (TCP, UDP):
            sender.finish(sender.start(target.lab.outside, protocol, address, flooded, size))
        assert [_answer(sock) for sock in idle] == answers
        with connected(target.lab.outside, UDP, address, flooded) as sock:
            answer = _answer(sock).partition(" ")[0]
        assert not room or answer in {"a", "b", "c"}


SHORT_CONNECTIONS, A_SECOND = 7500, 300.0
"""More than the share of TCP in the table of flows (6,144) before the first of them are over (30 s)."""


def test_closed_connections_leave_room_for_new_ones(load: Load) -> None:
    """The node has an agent of its own: floods fill the table of the others."""
    with Lab("test-room", 96) as lab, Target(lab, "ebpf") as target:
        target.start(f"--ebpf-flows-max={FLOWS_MAX}")
        to = load.targets("short", [(target.node.v4, target.node_port().node_port)])
        running = load.start_churn(lab.outside, to, count=SHORT_CONNECTIONS, rate=A_SECOND)
        report = load.end_churn(running, terminate=False, timeout=200.0)
        assert (report["attempts"], report["failed"]) == (SHORT_CONNECTIONS, 0)
        assert _flows_full(target) == 0


def _flows_full(target: Target) -> int:
    counters = json.loads(target.ebpfproxy("dump", "counters", "--output=json").stdout)["counters"]
    return next(int(each["value"]) for each in counters if each["counter"] == "flows_full")


# Floods with answers

FEW = 2000
"""Clients that send at the same time: fewer than half-open flows have slots, so that the endpoint's answer
arrives before a client's next packet."""


@both_families
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
@in_modes()
def test_repeated_packets_to_endpoints_that_refuse_end_no_flow_of_another_service(
    target: Target, sender: Sender, size: Size, family: str, protocol: Protocol
) -> None:
    """Each SYN after a reset selects an endpoint and a source port again. No process of these pods has the
    port of the endpoint."""
    target.forget_connections()
    sources = Sources(addresses=FEW, repeats=5)
    room = target.has_room_for(size.packets // 5)
    address, port = getattr(target.node, family), target.node_port().node_port
    refusing = target.service(node_port=True).to(elsewhere(target.p), elsewhere(target.q)).node_port
    with contextlib.ExitStack() as stack:
        idle, answers = _established(stack, target, address, port, room)
        sender.finish(sender.start(target.lab.outside, protocol, address, refusing, size, sources))
        clients = [_new_client(target, address, port) for _ in range(20)]
        assert not room or set(clients) <= {"a", "b", "c"}
        assert [_answer(sock) for sock in idle] == answers


@both_families
@in_modes()
def test_datagrams_that_are_answered_take_no_room_from_connections(
    target: Target, sender: Sender, size: Size, family: str
) -> None:
    """The endpoints answer each client, whose next datagram then establishes the flow. A connection that is
    opened afterwards survives a flood of SYNs."""
    target.forget_connections()
    sources = Sources(addresses=FEW, repeats=2)
    room = target.has_room_for(2 * size.packets)
    address, port = getattr(target.node, family), target.node_port().node_port
    slow = Size(size.packets, size.rate // 2)
    sender.finish(sender.start(target.lab.outside, UDP, address, port, slow, sources))
    if not room:
        target.forget_connections()
    with contextlib.ExitStack() as stack:
        idle, answers = _established(stack, target, address, port, room)
        sender.finish(sender.start(target.lab.outside, TCP, address, port, size))
        assert [_answer(sock) for sock in idle[:IDLE]] == answers[:IDLE]


@both_families
@pytest.mark.parametrize("target", ["ebpf"], indirect=True, scope="session")
def test_segments_of_an_attacker_who_knows_the_ports_end_no_connection(
    target: Target, sender: Sender, size: Size, family: str
) -> None:
    """Segments with data at random sequence numbers, each with resets, a FIN and a SYN after it. Connection
    tracking does not withstand that in each run."""
    address, port = getattr(target.node, family), target.node_port().node_port
    with connected(target.lab.outside, TCP, address, port) as sock:
        answer = _answer(sock)
        client, client_port, *_ = sock.getsockname()
        sources = Sources(client, 1, client_port, size.packets)
        sender.finish(sender.start(target.lab.outside, "segments", address, port, size, sources))
        assert [_answer(sock) for _ in range(3)] == [answer] * 3
