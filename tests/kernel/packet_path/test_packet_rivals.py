"""Who is after the port that a flow is masqueraded with: other clients, spoofed resets, and others on this
node that translate, too."""

import socket
from typing import Any

import pytest
from scapy.layers.inet import TCP
from scapy.layers.sctp import SCTP, SCTPChunkInit

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path import served
from tests.kernel.packet_path.conversation import answer, error, established, finish, is_left_alone, request
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, TARGETS, families, serve, translatable
from tests.support.packet_path import MARK_FORWARD, UNSPEC, Outcome, PacketPath
from tests.support.packets import V4, Places, become, ip, transport

pytestmark = pytest.mark.kernel

SHORT = {"tcp_established": 50, "tcp_fin": 10}
"""Seconds, less than any machine is up that runs tests."""


def receiver(path: PacketPath, got: Outcome) -> str:
    """Who gets what the endpoint sends on the connection that `got` is of."""
    fields = {"flags": "PA"} if TCP in got.packet else {}
    outcome = path.forward(answer(got, **fields), "tunnel", "net")
    return str(outcome.packet.payload.dst)


# Other clients


@families
def test_a_spoofed_reset_does_not_give_a_port_away(path: PacketPath, at: Places) -> None:
    """The endpoint takes no notice of a reset with a wrong sequence number, and would send the connection's
    data to whoever has its port then."""
    serve(path, at, at.there)
    victim = established(path, at)
    path.forward(request(at, flags="R", seq=0xDEADBEEF), "net", "tunnel")
    other = path.forward(request(at, client=at.router), "net", "tunnel")
    assert other.verdict == UNSPEC
    assert other.packet.sport != victim.packet.sport == CLIENT_PORT
    assert receiver(path, victim) == at.client
    assert receiver(path, other) == at.router


@families
@pytest.mark.parametrize("side", ["client", "endpoint"])
def test_a_packet_after_a_reset_makes_the_flow_go_on(path: PacketPath, at: Places, side: str) -> None:
    """With all the time that a connection has, whoever sends it."""
    path.set_node(**SHORT)
    serve(path, at, at.there)
    got = established(path, at)
    path.forward(request(at, flags="R", seq=0xDEADBEEF), "net", "tunnel")
    if side == "client":
        path.forward(request(at, flags="A"), "net", "tunnel")
    else:
        path.forward(answer(got, flags="A"), "tunnel", "net")
    path.age(SHORT["tcp_fin"] + 5)
    assert receiver(path, got) == at.client
    assert path.forward(request(at, flags="A"), "net", "tunnel").packet.payload.dst == at.there


def test_a_reset_that_nothing_follows_is_the_end(path: PacketPath) -> None:
    path.set_node(**SHORT)
    serve(path, V4, V4.there)
    got = established(path, V4)
    path.forward(request(V4, flags="R"), "net", "tunnel")
    path.age(SHORT["tcp_fin"] + 5)
    late = answer(got, flags="PA")
    assert is_left_alone(path.ingress(late, "tunnel"), late)


@families
def test_a_closed_flows_port_is_nobody_elses_until_it_is_over(path: PacketPath, at: Places) -> None:
    """The last FIN may be sent again, and must not come from another client's connection."""
    path.set_node(**SHORT)
    serve(path, at, at.there)
    got = established(path, at)
    finish(path, at, got)
    other = path.forward(request(at, client=at.router), "net", "tunnel")
    assert other.packet.sport != CLIENT_PORT
    again = path.forward(request(at, flags="FA"), "net", "tunnel")
    assert (again.packet.payload.src, again.packet.sport) == (at.masquerade, CLIENT_PORT)
    assert receiver(path, got) == at.client
    path.age(SHORT["tcp_fin"] + 5)
    third = ip(at.pod, at.external) / transport(served.TCP, CLIENT_PORT, PORTS[served.TCP])
    assert path.forward(third, "pod", "tunnel").packet.sport == CLIENT_PORT


@families
def test_who_lost_a_port_by_eviction_gets_another(path: PacketPath, at: Places) -> None:
    """And who has it now keeps it, whatever becomes of the first flow."""
    serve(path, at, at.there)
    first = established(path, at)
    (lost,) = (key for key, flow in path.flows().items() if flow.way == abi.FROM_ENDPOINT)
    path.maps["flows"].delete(lost)
    second = established(path, at, client=at.router)
    assert second.packet.sport == first.packet.sport == CLIENT_PORT
    path.age(2)
    moved = path.forward(request(at, flags="PA"), "net", "tunnel")
    assert moved.packet.payload.dst == at.there
    assert moved.packet.sport != CLIENT_PORT
    assert receiver(path, moved) == at.client
    assert receiver(path, second) == at.router
    path.forward(request(at, flags="R"), "net", "tunnel")
    ours = [flow for flow in path.flows().values() if flow.flags & abi.FLOW_RESET]
    assert ours
    assert {flow.client for flow in ours}.isdisjoint(_clients(path, CLIENT_PORT))
    assert path.forward(request(at, client=at.router, flags="A"), "net", "tunnel").packet.sport == CLIENT_PORT


def _clients(path: PacketPath, port: int) -> set[bytes]:
    """Those who are masqueraded with that port."""
    known = (flow for flow in path.flows().values() if flow.way == abi.FROM_ENDPOINT)
    return {flow.client for flow in known if flow.masquerade_port == socket.htons(port)}


# Others that translate


@families
@translatable
def test_what_somebody_else_masqueraded_is_passed_on_and_its_reply_translated(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """As a CNI's rules in POSTROUTING do, which run before our egress; they undo it after our ingress."""
    serve(path, at, at.there)
    dialed = request(at, protocol=protocol)
    before = path.ingress(dialed)
    assert before.mark == MARK_FORWARD
    masqueraded = become(before.packet, at.masquerade, source_port=51234)
    gone = path.egress(masqueraded, "tunnel", before.mark, "net")
    assert (gone.verdict, gone.raw) == (UNSPEC, masqueraded)
    assert "inconsistent" not in path.counted()
    reply = answer(gone)
    assert is_left_alone(path.ingress(reply, "tunnel"), reply)
    undone = answer(before)
    back = path.egress(undone, "net", came_in="tunnel")
    assert back.raw == become(undone, at.external, source_port=PORTS[protocol])


@families
@translatable
def test_what_is_forwarded_with_a_tuple_that_is_a_flows_masquerade_gets_another_port(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """cilium #23604: netfilter's own masquerade does not know which ports ours has taken."""
    serve(path, at, at.there)
    ours = established(path, at, protocol=protocol)
    first = ip(at.masquerade, at.there) / transport(protocol, CLIENT_PORT, TARGETS[protocol])
    gone = path.egress(first, "tunnel", came_in="pod")
    assert gone.verdict == UNSPEC
    port = gone.packet.sport
    assert port != CLIENT_PORT
    assert gone.raw == become(first, source_port=port)
    reply = answer(gone)
    assert path.ingress(reply, "tunnel")[:2] == (UNSPEC, become(reply, destination_port=CLIENT_PORT))
    more = first.copy()
    if TCP in more:
        more[TCP].flags = "A"
    assert path.egress(more, "tunnel", came_in="pod").raw == become(more, source_port=port)
    assert receiver(path, ours) == at.client


@families
@translatable
def test_a_port_with_which_netfilter_masquerades_an_older_connection_is_given_to_nobody(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """Until conntrack has forgotten it; and what the endpoint sends on that connection passes by."""
    serve(path, at, at.there)
    theirs = path.forward(request(at, protocol=protocol), "net", "tunnel")
    (key,) = (key for key, flow in path.flows().items() if flow.way == abi.FROM_ENDPOINT)
    path.forget_flows()
    path.maps["netfilter_flows"].update(key, bytes(4))
    ours = path.forward(request(at, protocol=protocol), "net", "tunnel")
    assert ours.packet.sport != theirs.packet.sport == CLIENT_PORT
    assert path.forward(answer(ours), "tunnel", "net").packet.payload.dst == at.client
    reply = answer(theirs)
    assert is_left_alone(path.ingress(reply, "tunnel"), reply)
    path.forget_flows()
    path.maps["netfilter_flows"].delete(key)
    assert path.forward(request(at, protocol=protocol), "net", "tunnel").packet.sport == CLIENT_PORT


@families
@translatable
def test_a_flow_of_ours_that_somebody_else_masqueraded_with_anothers_port_gets_a_third(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """As flannel's rule does, which is for all that comes to pods from elsewhere."""
    serve(path, at, at.there)
    ours = established(path, at, protocol=protocol)
    for flags in "SA":
        fields: dict[str, Any] = {"flags": flags} if protocol is served.TCP else {}
        masqueraded = transport(protocol, CLIENT_PORT, TARGETS[protocol], **fields)
        gone = path.egress(ip(at.masquerade, at.there) / masqueraded, "tunnel", MARK_FORWARD, "net")
        assert gone.verdict == UNSPEC
        assert gone.packet.sport != CLIENT_PORT
    reply = answer(gone)
    assert path.ingress(reply, "tunnel")[:2] == (UNSPEC, become(reply, destination_port=CLIENT_PORT))
    assert receiver(path, ours) == at.client


@families
def test_an_sctp_association_with_a_tuple_that_is_a_flows_masquerade_is_left_alone(
    path: PacketPath, at: Places
) -> None:
    """Its checksum covers the ports."""
    serve(path, at, at.there)
    association = SCTP(sport=CLIENT_PORT, dport=PORTS[served.SCTP]) / SCTPChunkInit()
    path.forward(ip(at.client, at.external) / association, "net", "tunnel")
    before = path.flows()
    rival = SCTP(sport=CLIENT_PORT, dport=TARGETS[served.SCTP]) / SCTPChunkInit()
    first = ip(at.masquerade, at.there) / rival
    assert is_left_alone(path.egress(first, "tunnel", came_in="pod"), first)
    assert path.flows() == before


@families
@translatable
def test_an_error_about_what_got_another_port_for_a_flow_of_ours_reaches_the_endpoint(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """Path MTU discovery: the endpoint knows it by that port."""
    serve(path, at, at.there)
    established(path, at, protocol=protocol)
    first = ip(at.masquerade, at.there) / transport(protocol, CLIENT_PORT, TARGETS[protocol])
    reply = answer(path.egress(first, "tunnel", came_in="pod"))
    given_back = path.ingress(reply, "tunnel").raw
    outcome = path.egress(error("too big", at.router, at.there, given_back), "tunnel", came_in="pod")
    assert outcome.verdict == UNSPEC
    assert outcome.raw == bytes(error("too big", at.masquerade, at.there, bytes(reply)))


@families
@translatable
def test_what_is_forwarded_with_a_tuple_of_nobody_is_left_alone(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.there)
    established(path, at, protocol=protocol)
    first = ip(at.masquerade, at.there) / transport(protocol, CLIENT_PORT + 1, TARGETS[protocol])
    outcome = path.egress(first, "tunnel", came_in="pod")
    assert is_left_alone(outcome, first)
