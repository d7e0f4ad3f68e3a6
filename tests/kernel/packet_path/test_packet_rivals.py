"""Who is after the port that a flow is masqueraded with: other clients, spoofed resets, and others on this
node that translate, too."""

from typing import Any

import pytest
from scapy.layers.inet import TCP
from scapy.layers.sctp import SCTP, SCTPChunkInit

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.model.address import Protocol, parse_address
from tests.kernel.packet_path import served
from tests.kernel.packet_path.conversation import answer, error, established, finish, is_left_alone, request
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, TARGETS, families, serve, translatable
from tests.support.packet_path import UNSPEC, Outcome, PacketPath
from tests.support.packets import Places, become, ip, transport

pytestmark = pytest.mark.kernel


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
def test_a_closed_flows_port_is_nobody_elses(path: PacketPath, at: Places) -> None:
    """The last FIN may be sent again, and must not come from another client's connection. The agent's
    collector removes the flow when its time is up."""
    serve(path, at, at.there)
    got = established(path, at)
    finish(path, at, got)
    other = path.forward(request(at, client=at.router), "net", "tunnel")
    assert other.packet.sport != CLIENT_PORT
    again = path.forward(request(at, flags="FA"), "net", "tunnel")
    assert (again.packet.payload.src, again.packet.sport) == (at.masquerade, CLIENT_PORT)
    assert receiver(path, got) == at.client


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
    masqueraded = become(before.packet, at.masquerade, source_port=51234)
    gone = path.egress(masqueraded, "tunnel", came_in="net")
    assert (gone.verdict, gone.raw) == (UNSPEC, masqueraded)
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
    (entry,) = path.replies().values()
    to = {"destination": parse_address(at.masquerade), "side": abi.AT_INGRESS}
    key = abi.FLOW_KEY.pack(*(entry.key | to).values())
    path.forget_flows()
    path.set_node(abi.NODE_NETFILTER_FLOWS)
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
        gone = path.egress(ip(at.masquerade, at.there) / masqueraded, "tunnel", came_in="net")
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
