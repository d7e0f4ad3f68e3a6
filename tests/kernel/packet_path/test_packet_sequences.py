"""Sequence numbers: which resets and SYNs end a TCP flow, as in connection tracking and RFC 5961."""

import time
from socket import IPPROTO_TCP

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.state import FlowState, state
from ebpfproxy.model.address import parse_address
from tests.kernel.packet_path.served import PORTS, TCP, families, serve
from tests.support.conversations import ACK, FIN, PSH, RST, SYN, Conversation, End, Segment, ends, frame
from tests.support.packet_path import PacketPath
from tests.support.packets import V4, Places

pytestmark = pytest.mark.kernel

FAR = 1 << 30
"""A distance from the next sequence number that is outside every window."""
NEAR = 1 << 17
"""NEAR of flow_tcp.h: successive segments of one side are seldom further apart."""
OVER = 3.0
"""Seconds after which a closed flow has expired if `tcp_fin` is 1 s. Times have a resolution of about a
second, and each packet restarts them."""


senders = pytest.mark.parametrize("sender", ["client", "endpoint"])
wheres = pytest.mark.parametrize("where", ["here", "there"])


def _established(path: PacketPath, at: Places, where: str = "there") -> Conversation:
    serve(path, at, getattr(at, where))
    client = End(parse_address(at.client), 40000)
    flow = Conversation(path, TCP, client, End(parse_address(at.external), PORTS[TCP]))
    assert flow.open()
    assert flow.exchange()
    return flow


def _send(flow: Conversation, sender: str, flags: int, distance: int) -> None:
    """Send a segment of either end with this distance from the next sequence number."""
    assert flow.endpoint
    assert flow.seen
    if sender == "client":
        segment = Segment(flags, (flow.client_next + distance) % (1 << 32))
        flow.path.forward(frame(TCP, flow.client, flow.frontend, segment), "net", flow.towards)
    else:
        segment = Segment(flags, (flow.endpoint_next + distance) % (1 << 32))
        flow.path.forward(frame(TCP, flow.endpoint, flow.seen, segment), flow.towards, "net")


@families
@wheres
@senders
@pytest.mark.parametrize(
    "distance", [FAR, -FAR, 1, 1000], ids=["ahead", "behind", "next but one", "in window"]
)
def test_a_reset_without_the_next_sequence_number_ends_nothing(
    path: PacketPath, at: Places, where: str, sender: str, distance: int
) -> None:
    """A following SYN gets no other endpoint. RFC 5961, 3.2: only the next number ends a connection; within
    the window the receiver requests a confirmation."""
    flow = _established(path, at, where)
    _send(flow, sender, RST, distance)
    serve(path, at, at.there if where == "here" else at.here)
    _send(flow, "client", SYN, FAR)
    assert flow.exchange()


@families
@senders
def test_a_reset_without_the_next_number_does_not_shorten_the_timeout(
    path: PacketPath, at: Places, sender: str
) -> None:
    """An idle connection has not expired after the timeout of a reset one."""
    path.set_node(tcp_fin=1)
    flow = _established(path, at)
    _send(flow, sender, RST, FAR)
    time.sleep(OVER)  # the tested condition: a packet would restart the timeout
    assert flow.exchange()


@families
@senders
def test_a_reset_with_the_next_number_ends_the_flow(path: PacketPath, at: Places, sender: str) -> None:
    """A SYN from the same port gets a current endpoint instead of the removed one."""
    flow = _established(path, at)
    _send(flow, sender, RST | ACK if sender == "client" else RST, 0)
    serve(path, at, at.here)
    syn = frame(TCP, flow.client, flow.frontend, Segment(SYN, (flow.client_next + FAR) % (1 << 32)))
    assert ends(path.ingress(syn).raw)[1].address == parse_address(at.here)


@families
def test_the_fins_of_both_sides_end_the_flow(path: PacketPath, at: Places) -> None:
    flow = _established(path, at)
    flow.close()
    serve(path, at, at.here)
    again = Conversation(path, TCP, flow.client, flow.frontend, client_next=flow.client_next + FAR)
    assert again.open()
    assert again.endpoint
    assert again.endpoint.address == parse_address(at.here)
    assert again.exchange()


@families
@senders
def test_a_fin_out_of_the_window_does_not_close_a_side(path: PacketPath, at: Places, sender: str) -> None:
    """One side closes, and an attacker sends a FIN with the other side's address."""
    flow = _established(path, at)
    other = "endpoint" if sender == "client" else "client"
    assert flow.by_endpoint(FIN | ACK) if sender == "endpoint" else flow.by_client(FIN | ACK)
    _send(flow, other, FIN | ACK, FAR)
    serve(path, at, at.here)
    _send(flow, "client", SYN, FAR)
    assert flow.by_endpoint(ACK)
    assert flow.by_client(ACK)


@senders
@pytest.mark.parametrize(
    ("distance", "closes"), [(-NEAR - 1, False), (-NEAR, True), (NEAR - 1, True), (NEAR, False)]
)
def test_a_fin_closes_its_side_if_its_number_is_near_the_next_one(
    path: PacketPath, sender: str, distance: int, closes: bool
) -> None:
    """A window of 2^18 numbers: more would be easier to guess."""
    flow = _established(path, V4)
    _send(flow, sender, FIN | ACK, distance)
    closed = abi.FLOW_CLIENT_FIN if sender == "client" else abi.FLOW_ENDPOINT_FIN
    (entry,) = path.flows().values()
    assert bool(entry.value["flags"] & closed) is closes


@families
def test_a_syn_of_an_open_flow_whose_endpoint_was_removed_keeps_the_endpoint(
    path: PacketPath, at: Places
) -> None:
    flow = _established(path, at)
    serve(path, at, at.here)
    for distance in (FAR, -FAR, 0):
        _send(flow, "client", SYN, distance)
    assert flow.exchange()


# An attacker who knows addresses and ports, but no sequence numbers

STEP = 1 << 22
"""A distance between guesses: each number is in the window of one of them, for any usual window."""


@families
@senders
def test_guessed_segments_end_no_connection(path: PacketPath, at: Places, sender: str) -> None:
    """Each guess is a segment with data, then a reset and a FIN that follow it. Programs that recorded each
    segment took one of 1,024 such resets for the sender's own, and the next SYN selected another endpoint."""
    flow = _established(path, at)
    at_client = sender == "client"
    source, to = (flow.client, flow.frontend) if at_client else (flow.endpoint, flow.seen)
    assert source
    assert to
    run = path.runs_in("net" if at_client else flow.towards).run
    for guess in range(0, 1 << 32, STEP):
        for flags, seq, data in (
            (ACK, guess, b"data"),
            (RST, guess + 4, b""),
            (RST | ACK, guess, b""),
            (FIN | ACK, guess + 4, b""),
        ):
            run(frame(TCP, source, to, Segment(flags, seq % (1 << 32), (seq * 5 + FAR) % (1 << 32), data)))
    serve(path, at, at.here)
    _send(flow, "client", SYN, FAR)
    assert flow.exchange()
    (entry,) = path.flows().values()
    closed = abi.FLOW_RESET | abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN
    assert not entry.value["flags"] & closed


# The numbers of a connection are known after losses


def _far(flow: Conversation, sender: str, length: int) -> None:
    """The sender's segments of so many bytes are lost before they reach this node. The next one arrives."""
    side = "client_next" if sender == "client" else "endpoint_next"
    setattr(flow, side, (getattr(flow, side) + length) % (1 << 32))
    by = flow.by_client if sender == "client" else flow.by_endpoint
    assert by(ACK | PSH, b"data")


@families
@senders
@pytest.mark.parametrize("length", [1 << 16, 1 << 20, 3 << 20], ids=["64 KiB", "1 MiB", "3 MiB"])
def test_a_connection_is_closed_after_many_segments_were_lost(
    path: PacketPath, at: Places, sender: str, length: int
) -> None:
    """The other side then acknowledges all of them at once."""
    flow = _established(path, at)
    for _ in range(3):
        _far(flow, sender, length)
        assert flow.by_endpoint(ACK) if sender == "client" else flow.by_client(ACK)
    flow.close()
    assert _is_closed(path)


@families
@senders
def test_a_connection_is_reset_after_many_segments_were_lost(
    path: PacketPath, at: Places, sender: str
) -> None:
    """No acknowledgment arrives before the reset."""
    flow = _established(path, at)
    _far(flow, sender, 1 << 20)
    _send(flow, sender, RST, 0)
    assert _is_closed(path)


@senders
def test_a_stream_of_more_than_four_gibibytes_is_closed(path: PacketPath, sender: str) -> None:
    """The numbers start again at 0."""
    flow = _established(path, V4)
    for _ in range((1 << 32) // (1 << 21) + 10):
        _far(flow, sender, 1 << 21)
        assert flow.by_endpoint(ACK) if sender == "client" else flow.by_client(ACK)
    flow.close()
    assert _is_closed(path)


@families
@senders
def test_repeated_and_reordered_segments_change_no_number(path: PacketPath, at: Places, sender: str) -> None:
    flow = _established(path, at)
    _far(flow, sender, 0)
    for distance in (-4, -100, -4000, -4):
        _send(flow, sender, ACK, distance)
    _send(flow, sender, RST, 0)
    assert _is_closed(path)


def _is_closed(path: PacketPath) -> bool:
    (entry,), (reply,) = path.flows().values(), path.replies().values()
    found = {state(IPPROTO_TCP, each.value["flags"]) for each in (entry, reply)}
    return found == {FlowState.FIN}
