"""Both entries of a flow begin and end together, and flows of one kind take no room from another kind."""

import pytest

from ebpfproxy.model.address import Protocol, parse_address
from tests.kernel.packet_path.conversation import answer, established, finish, is_left_alone, request
from tests.kernel.packet_path.served import PORTS, SCTP, TCP, UDP, families, serve
from tests.support.conversations import ACK, RST, SYN, Conversation, End, Segment, frame
from tests.support.packet_path import SIZES, UNSPEC, PacketPath
from tests.support.packets import V4, V6, Places

pytestmark = pytest.mark.kernel

SILENCE = 70
"""Seconds: longer than `tcp_syn`, 60 s."""
SHARE = SIZES.flows - SIZES.flows // 4
"""The most established flows of one kind."""


def _network(at: Places) -> list[str]:
    """Endpoints on other nodes."""
    return [f"10.244.2.{n}" if at is V4 else f"fd00:2::{n:x}" for n in range(1, 21)]


def _conversation(path: PacketPath, at: Places, protocol: Protocol = TCP, number: int = 1) -> Conversation:
    """Of the client with this number. All of them have the same port."""
    client = End(parse_address(f"198.18.0.{number}" if at is V4 else f"2001:2::{number:x}"), 40000)
    return Conversation(path, protocol, client, End(parse_address(at.external), PORTS[protocol]))


@families
def test_repeated_syns_to_endpoints_that_refuse_leave_no_entries(path: PacketPath, at: Places) -> None:
    """Each SYN after a reset selects one of 20 endpoints. Entries of `replies` without a flow were left until
    the agent removed them, so 2,500 SYNs a second from one client filled the map in 43 s."""
    serve(path, at, *_network(at))
    for number in range(40):
        flow = _conversation(path, at)
        flow.client_next += number << 20
        assert flow.begin().verdict == UNSPEC
        assert flow.by_endpoint(RST | ACK)
        assert (len(path.flows()), len(path.replies())) == (1, 1)


@families
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
def test_established_flows_that_are_opened_again_leave_no_entries(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    for number, endpoint in enumerate(_network(at)):
        serve(path, at, endpoint)
        flow = _conversation(path, at, protocol)
        flow.client_next += number << 20
        assert flow.open()
        if protocol is TCP:
            flow.close()
        assert (len(path.flows()), len(path.replies())) == (1, 1)
        assert path.established() == 1


@families
def test_a_new_connection_of_the_endpoint_with_the_same_tuple_removes_both_entries(
    path: PacketPath, at: Places
) -> None:
    serve(path, at, at.here)
    got = established(path, at, "pod")
    finish(path, at, got, "pod")
    path.forward(answer(got, flags="S"), "pod", "net")
    assert (path.flows(), path.replies(), path.established()) == ({}, {}, 0)


@families
@pytest.mark.parametrize("where", ["here", "there"])
def test_datagrams_of_a_removed_endpoint_are_not_translated_after_the_flow_has_another_one(
    path: PacketPath, at: Places, where: str
) -> None:
    serve(path, at, getattr(at, where))
    flow = _conversation(path, at, UDP)
    assert flow.open()
    assert flow.exchange()
    serve(path, at, getattr(at, "there" if where == "here" else "here"))
    assert _conversation(path, at, UDP).open()
    assert flow.endpoint
    assert flow.seen
    packet = frame(UDP, flow.endpoint, flow.seen, Segment(data=b"late"))
    assert is_left_alone(path.forward(packet, flow.towards, "net"), packet)


# A SYN of a flow whose endpoint was removed


@families
def test_a_syn_to_a_silent_endpoint_that_was_removed_gets_another_one(path: PacketPath, at: Places) -> None:
    """The client has crashed, and its next connection has the same port. SYNs had gone to the removed
    endpoint's address, which may belong to another pod by now, and each one had renewed the flow for a day.
    """
    serve(path, at, at.there)
    flow = _conversation(path, at)
    assert flow.open()
    path.age(SILENCE)
    again = _conversation(path, at)
    again.client_next += 1 << 30
    serve(path, at, at.here)
    assert again.open()
    assert again.endpoint
    assert again.endpoint.address == parse_address(at.here)
    assert again.exchange()


@families
def test_a_syn_does_not_keep_a_flow_alive(path: PacketPath, at: Places) -> None:
    """Neither does the reset or the SYN of another pod that has the endpoint's address now."""
    serve(path, at, at.there)
    flow = _conversation(path, at)
    assert flow.open()
    path.age(SILENCE - 20)
    serve(path, at, at.here)
    syn = _conversation(path, at)
    syn.client_next += 1 << 30
    for flags in (RST | ACK, SYN | ACK):
        assert syn.begin().verdict == UNSPEC
        flow.endpoint_next, flow.client_next = 77, syn.client_next
        flow.by_endpoint(flags)
    path.age(20)
    assert syn.open()
    assert syn.endpoint
    assert syn.endpoint.address == parse_address(at.here)


@families
@pytest.mark.parametrize("removed", [False, True], ids=["listed", "removed"])
def test_a_syn_does_not_end_a_flow_whose_endpoint_sends(path: PacketPath, at: Places, removed: bool) -> None:
    serve(path, at, at.there)
    flow = _conversation(path, at)
    assert flow.open()
    path.age(SILENCE)
    assert flow.exchange()
    serve(path, at, at.here if removed else at.there)
    for _ in range(3):
        syn = _conversation(path, at)
        syn.client_next += 1 << 30
        assert syn.begin().verdict == UNSPEC
    assert flow.exchange()


# Shares of the maps


@families
def test_established_datagram_flows_take_no_room_from_connections(path: PacketPath, at: Places) -> None:
    """Datagrams have spoofed sources: a connection without room had ended after a minute of silence."""
    serve(path, at, at.there)
    path.set_established(0, SHARE)
    connection, datagrams = _conversation(path, at), _conversation(path, at, UDP)
    assert connection.open()
    assert datagrams.open()
    path.age(SILENCE)
    assert connection.exchange()
    assert path.counted()["flows_full"] == 1


@families
@pytest.mark.parametrize("protocol", [UDP, SCTP], ids=["udp", "sctp"])
def test_connections_take_no_room_from_established_datagram_flows(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.there)
    path.set_established(SHARE, 0)
    established(path, at)
    assert path.counted()["flows_full"] == 1
    established(path, at, protocol=protocol)
    assert "flows_full" not in path.counted()


# Without an agent


@pytest.mark.parametrize("at", [V4, V6], ids=["v4", "v6"])
@pytest.mark.parametrize(("protocol", "seconds"), [(TCP, 40), (UDP, 200)], ids=["closed", "datagrams"])
def test_the_port_of_a_flow_that_is_over_is_used_again_without_an_agent(
    path: PacketPath, at: Places, protocol: Protocol, seconds: int
) -> None:
    """Both clients have the same port. The previous flow's entries are removed, too."""
    serve(path, at, at.there)
    first, second, third = (_conversation(path, at, protocol, number) for number in (1, 2, 3))
    assert first.open()
    if protocol is TCP:
        first.close()
    assert second.open()
    assert second.seen
    assert second.seen.port != 40000
    path.age(seconds)
    assert third.open()
    assert third.seen
    assert third.seen.port == 40000
    assert third.exchange()
    clients = {entry.key["source"] for entry in path.flows().values()}
    assert clients == {second.client.address, third.client.address}
    assert len(path.replies()) == len(path.flows()) == path.established() == 2


@pytest.mark.parametrize("at", [V4, V6], ids=["v4", "v6"])
def test_the_port_of_a_closed_flow_is_not_used_while_one_side_sends(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    first, second = (_conversation(path, at, number=number) for number in (1, 2))
    assert first.open()
    first.close()
    path.age(40)
    assert first.by_client(ACK)
    assert second.open()
    assert second.seen
    assert second.seen.port != 40000


def test_a_half_open_flow_is_not_counted_as_established(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    path.forward(request(V4), "net", "tunnel")
    assert (len(path.flows()), len(path.replies()), path.established()) == (1, 1, 0)
