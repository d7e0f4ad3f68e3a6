"""Conflicts about a flow's masquerade port: other clients, spoofed resets, and other programs that translate
on this node."""

from typing import Any

import pytest
from scapy.layers.inet import TCP

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.model.address import Protocol, parse_address
from tests.kernel.packet_path import served
from tests.kernel.packet_path.conversation import answer, error, established, finish, is_left_alone, request
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, TARGETS, families, protocols, serve
from tests.support.packet_path import UNSPEC, Outcome, PacketPath
from tests.support.packets import Places, become, ip, transport

pytestmark = pytest.mark.kernel


def receiver(path: PacketPath, got: Outcome) -> str:
    """The address that receives the endpoint's packet on the connection of `got`."""
    fields = {"flags": "PA"} if TCP in got.packet else {}
    outcome = path.forward(answer(got, **fields), "tunnel", "net")
    return str(outcome.packet.payload.dst)


# Other clients


@families
def test_a_spoofed_reset_does_not_free_the_masquerade_port(path: PacketPath, at: Places) -> None:
    """The endpoint ignores a reset with a wrong sequence number, and would send the connection's data to
    another client that had the port."""
    serve(path, at, at.there)
    victim = established(path, at)
    path.forward(request(at, flags="R", seq=0xDEADBEEF), "net", "tunnel")
    other = path.forward(request(at, client=at.router), "net", "tunnel")
    assert other.verdict == UNSPEC
    assert other.packet.sport != victim.packet.sport == CLIENT_PORT
    assert receiver(path, victim) == at.client
    path.forward(answer(other), "tunnel", "net")
    assert receiver(path, other) == at.router


@families
def test_the_port_of_a_closed_flow_is_not_used_by_another_client(path: PacketPath, at: Places) -> None:
    """The last FIN may be retransmitted, and must not arrive in another client's connection. The agent's
    collector removes the flow after its timeout."""
    serve(path, at, at.there)
    got = established(path, at)
    finish(path, at, got)
    other = path.forward(request(at, client=at.router), "net", "tunnel")
    assert other.packet.sport != CLIENT_PORT
    again = path.forward(request(at, flags="FA"), "net", "tunnel")
    assert (again.packet.payload.src, again.packet.sport) == (at.masquerade, CLIENT_PORT)
    assert receiver(path, got) == at.client


# Other connections of the client


@families
def test_a_segment_of_an_older_connection_is_no_reply_to_a_syn(path: PacketPath, at: Places) -> None:
    """The endpoint replies to the SYN for a connection that it already has. The other end of that connection
    gets the reply, and the next SYN another port."""
    serve(path, at, at.there)
    first = path.forward(request(at), "net", "tunnel")
    older = answer(first, flags="A")
    assert is_left_alone(path.forward(older, "tunnel", "net"), older)
    again = path.forward(request(at), "net", "tunnel")
    assert again.packet.sport != first.packet.sport == CLIENT_PORT
    path.forward(answer(again), "tunnel", "net")
    assert receiver(path, again) == at.client
    assert is_left_alone(path.forward(older, "tunnel", "net"), older)


@families
@protocols
def test_a_direct_packet_with_the_tuple_of_a_flow_gets_another_port(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.here)
    established(path, at, "pod", protocol=protocol)
    first = ip(at.client, at.here) / transport(protocol, CLIENT_PORT, TARGETS[protocol])
    got = path.forward(first, "net", "pod")
    assert got.raw == become(first, source_port=got.packet.sport) != bytes(first)
    reply = answer(got)
    assert path.forward(reply, "pod", "net").raw == become(reply, destination_port=CLIENT_PORT)
    other = ip(at.client, at.here) / transport(protocol, CLIENT_PORT + 1, TARGETS[protocol])
    assert is_left_alone(path.forward(other, "net", "pod"), other)


# Other programs that translate


@families
@protocols
def test_a_packet_that_another_program_masqueraded_is_not_masqueraded_again(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """As rules of a CNI plugin in POSTROUTING, before the egress program. They translate the reply back after
    the ingress program."""
    serve(path, at, at.there)
    dialed = request(at, protocol=protocol)
    before = path.ingress(dialed)
    masqueraded = become(before.packet, at.masquerade, source_port=51234)
    gone = path.egress(masqueraded, "tunnel", came_in="net")
    assert (gone.verdict, gone.raw) == (UNSPEC, masqueraded)
    reply = answer(gone)
    assert is_left_alone(path.ingress(reply, "tunnel"), reply)
    undone = answer(before)
    back = path.egress(undone, "net", came_in="tunnel")
    assert back.raw == become(undone, at.external, source_port=PORTS[protocol])


@families
@protocols
def test_a_forwarded_packet_with_the_tuple_of_a_masqueraded_flow_gets_another_port(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """cilium #23604: netfilter's masquerade does not know the ports that the programs use."""
    serve(path, at, at.there)
    own = established(path, at, protocol=protocol)
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
    assert receiver(path, own) == at.client


@families
@protocols
def test_a_masquerade_port_of_netfilter_is_not_used(path: PacketPath, at: Places, protocol: Protocol) -> None:
    """As long as conntrack has the connection. Replies to that connection are left alone."""
    serve(path, at, at.there)
    foreign = path.forward(request(at, protocol=protocol), "net", "tunnel")
    (entry,) = path.replies().values()
    to = {"destination": parse_address(at.masquerade), "side": abi.AT_INGRESS}
    key = abi.FLOW_KEY.pack(*(entry.key | to).values())
    path.forget_flows()
    path.set_node(abi.NODE_NETFILTER_FLOWS)
    path.maps["netfilter_flows"].update(key, bytes(4))
    own = path.forward(request(at, protocol=protocol), "net", "tunnel")
    assert own.packet.sport != foreign.packet.sport == CLIENT_PORT
    assert path.forward(answer(own), "tunnel", "net").packet.payload.dst == at.client
    reply = answer(foreign)
    assert is_left_alone(path.ingress(reply, "tunnel"), reply)
    path.forget_flows()
    path.maps["netfilter_flows"].delete(key)
    assert path.forward(request(at, protocol=protocol), "net", "tunnel").packet.sport == CLIENT_PORT


@families
@protocols
def test_a_flow_that_another_program_masqueraded_with_a_used_port_gets_another(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """As flannel's rule, which masquerades all traffic to pods from other networks."""
    serve(path, at, at.there)
    own = established(path, at, protocol=protocol)
    for flags in "SA":
        fields: dict[str, Any] = {"flags": flags} if protocol is served.TCP else {}
        masqueraded = transport(protocol, CLIENT_PORT, TARGETS[protocol], **fields)
        gone = path.egress(ip(at.masquerade, at.there) / masqueraded, "tunnel", came_in="net")
        assert gone.verdict == UNSPEC
        assert gone.packet.sport != CLIENT_PORT
    reply = answer(gone)
    assert path.ingress(reply, "tunnel")[:2] == (UNSPEC, become(reply, destination_port=CLIENT_PORT))
    assert receiver(path, own) == at.client


@families
@protocols
def test_an_icmp_error_about_a_reply_to_a_changed_port_reaches_the_endpoint(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """Path MTU discovery: the quotation has the port that the endpoint knows."""
    serve(path, at, at.there)
    established(path, at, protocol=protocol)
    first = ip(at.masquerade, at.there) / transport(protocol, CLIENT_PORT, TARGETS[protocol])
    reply = answer(path.egress(first, "tunnel", came_in="pod"))
    given_back = path.ingress(reply, "tunnel").raw
    outcome = path.egress(error("too big", at.router, at.there, given_back), "tunnel", came_in="pod")
    assert outcome.verdict == UNSPEC
    assert outcome.raw == bytes(error("too big", at.masquerade, at.there, bytes(reply)))


@families
@protocols
def test_a_forwarded_packet_with_an_unused_tuple_is_left_alone(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.there)
    established(path, at, protocol=protocol)
    first = ip(at.masquerade, at.there) / transport(protocol, CLIENT_PORT + 1, TARGETS[protocol])
    outcome = path.egress(first, "tunnel", came_in="pod")
    assert is_left_alone(outcome, first)
