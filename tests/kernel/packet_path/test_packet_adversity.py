"""Strangers, spoofed packets, ports that are used again, and others on this node that translate, too."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scapy.layers.inet import ICMP, TCP, UDP
from scapy.layers.inet6 import (
    ICMPv6ND_Redirect,
    ICMPv6NDOptRedirectedHdr,
    ICMPv6PacketTooBig,
    IPv6,
    IPv6ExtHdrFragment,
)
from scapy.layers.l2 import Dot1Q, Ether
from scapy.layers.sctp import SCTP, SCTPChunkData, SCTPChunkInit, SCTPChunkInitAck
from scapy.packet import Packet, Raw

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.kernel import tc
from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path import served
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, TARGETS, serve
from tests.support.packet_path import MARK_FORWARD, REDIRECT, SHOT, UNSPEC, Outcome, PacketPath
from tests.support.packets import HERE, THERE, V4, V6, Places, become, ip, ping, transport

pytestmark = pytest.mark.kernel

families = pytest.mark.parametrize("at", [V4, V6], ids=["v4", "v6"])
translatable = pytest.mark.parametrize("protocol", [served.TCP, served.UDP], ids=["tcp", "udp"])

SHORT = {"tcp_established": 50, "tcp_fin": 10}
"""Seconds, less than any machine is up that runs tests."""


def request(at: Places, client: str = "", protocol: Protocol = served.TCP, **fields: Any) -> Packet:
    """All clients have one port."""
    return ip(client or at.client, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol], **fields)


def answer(got: Outcome, **fields: Any) -> Packet:
    """The endpoint's, to the packet that it got."""
    packet = got.packet
    protocol = served.TCP if TCP in packet else served.UDP
    if protocol is served.TCP:
        fields = {"flags": "SA"} | fields
    back = ip(packet.payload.dst, packet.payload.src)
    return back / transport(protocol, packet.dport, packet.sport, **fields)


def established(path: PacketPath, at: Places, client: str = "", towards: str = "tunnel") -> Outcome:
    """A connection; the SYN, as the endpoint got it."""
    got = path.forward(request(at, client), "net", towards)
    path.forward(answer(got), towards, "net")
    path.forward(request(at, client, flags="A"), "net", towards)
    return got


def finish(path: PacketPath, at: Places, got: Outcome, towards: str = "tunnel") -> None:
    """By both sides."""
    path.forward(answer(got, flags="FA"), towards, "net")
    path.forward(request(at, flags="FA"), "net", towards)
    path.forward(answer(got, flags="A"), towards, "net")


def receiver(path: PacketPath, got: Outcome) -> str:
    """Who gets what the endpoint sends on the connection that `got` is of."""
    outcome = path.forward(answer(got, flags="PA"), "tunnel", "net")
    return str(outcome.packet.payload.dst)


def is_left_alone(outcome: Outcome, packet: Packet | bytes) -> bool:
    return outcome == (UNSPEC, bytes(packet), 0)


# Ports to masquerade with, and who is after them


@families
def test_a_spoofed_reset_does_not_give_a_port_away(path: PacketPath, at: Places) -> None:
    """The endpoint takes no notice of a reset with a wrong sequence number, and would send the connection's
    data to whoever has its port then."""
    serve(path, at, at.there)
    victim = established(path, at)
    path.forward(request(at, flags="R", seq=0xDEADBEEF), "net", "tunnel")
    other = path.forward(request(at, at.router), "net", "tunnel")
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
    other = path.forward(request(at, at.router), "net", "tunnel")
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
    second = established(path, at, at.router)
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
    assert path.forward(request(at, at.router, flags="A"), "net", "tunnel").packet.sport == CLIENT_PORT


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
def test_a_forwarded_syn_with_a_tuple_that_is_a_flows_masquerade_gets_another_port(
    path: PacketPath, at: Places
) -> None:
    """cilium #23604: netfilter's own masquerade does not know which ports ours has taken."""
    serve(path, at, at.there)
    ours = established(path, at)
    syn = ip(at.masquerade, at.there) / transport(served.TCP, CLIENT_PORT, TARGETS[served.TCP])
    gone = path.egress(syn, "tunnel", came_in="pod")
    assert gone.verdict == UNSPEC
    port = gone.packet.sport
    assert port != CLIENT_PORT
    assert gone.raw == become(syn, source_port=port)
    reply = answer(gone)
    assert path.ingress(reply, "tunnel")[:2] == (UNSPEC, become(reply, destination_port=CLIENT_PORT))
    more = syn.copy()
    more[TCP].flags = "A"
    assert path.egress(more, "tunnel", came_in="pod").raw == become(more, source_port=port)
    assert receiver(path, ours) == at.client


@families
def test_a_forwarded_syn_with_a_tuple_of_nobody_is_left_alone(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    established(path, at)
    syn = ip(at.masquerade, at.there) / transport(served.TCP, CLIENT_PORT + 1, TARGETS[served.TCP])
    outcome = path.egress(syn, "tunnel", came_in="pod")
    assert is_left_alone(outcome, syn)


# Flows that do not go on


@families
def test_a_udp_flow_whose_frontend_moved_goes_to_the_other_service(path: PacketPath, at: Places) -> None:
    """Its endpoint is still there, and still the first Service's."""
    moved, own = "10.244.2.66" if at is V4 else "fd00:2::66", "10.96.0.11" if at is V4 else "fd00:96::11"
    others: dict[str, Any] = {"called": "other", "ips": [own], "balancer": [], "node_ports": False}
    serve(path, at, at.there)
    serve(path, at, moved, **others, external=[])
    packet = request(at, protocol=served.UDP)
    assert path.forward(packet, "net", "tunnel").packet.payload.dst == at.there
    serve(path, at, at.there, external=[])
    serve(path, at, moved, **others, external=[at.external])
    again = path.forward(packet, "net", "tunnel")
    assert again.packet.payload.dst == moved
    back = path.forward(answer(again), "tunnel", "net").packet
    assert (back.payload.src, back.payload.dst) == (at.external, at.client)


@families
def test_a_udp_flow_whose_frontend_went_does_not_go_on(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    packet = request(at, protocol=served.UDP)
    assert path.forward(packet, "net", "tunnel").packet.payload.dst == at.there
    serve(path, at, at.there, external=[])
    assert is_left_alone(path.ingress(packet), packet)


def sctp(at: Places, chunk: Packet, tag: int = 0) -> Packet:
    port = PORTS[served.SCTP]
    return ip(at.client, at.external) / SCTP(sport=CLIENT_PORT, dport=port, tag=tag) / chunk


@families
def test_an_sctp_packet_with_a_verification_tag_opens_no_flow(path: PacketPath, at: Places) -> None:
    """Of all chunks INIT alone has none (RFC 9260, 8.5.1)."""
    serve(path, at, at.there)
    data = sctp(at, SCTPChunkData(data=b"data", tsn=7), tag=0xCAFE)
    assert is_left_alone(path.ingress(data), data)
    assert not path.flows()
    assert path.ingress(sctp(at, SCTPChunkInit())).packet.payload.dst == at.there
    assert path.ingress(data).packet.payload.dst == at.there


@families
@pytest.mark.parametrize("answered", [False, True], ids=["unanswered", "associated"])
def test_an_init_to_a_retired_endpoint_chooses_anew(path: PacketPath, at: Places, answered: bool) -> None:
    """As a SYN does: of an association that has lived the client would not begin again."""
    serve(path, at, at.there)
    data = sctp(at, SCTPChunkData(data=b"data", tsn=7), tag=0xCAFE)
    path.forward(sctp(at, SCTPChunkInit()), "net", "tunnel")
    if answered:
        header = SCTP(sport=TARGETS[served.SCTP], dport=CLIENT_PORT, tag=0xBEEF)
        path.forward(ip(at.there, at.masquerade) / header / SCTPChunkInitAck(), "tunnel", "net")
        path.forward(data, "net", "tunnel")
    serve(path, at, at.here)
    assert path.ingress(data).packet.payload.dst == at.there
    assert path.ingress(sctp(at, SCTPChunkInit())).packet.payload.dst == at.here


@families
def test_a_syn_ack_of_a_direct_connection_after_the_flows_end_is_left_alone(
    path: PacketPath, at: Places
) -> None:
    """The client reached its endpoint through a frontend, and dials it by its own address from that port."""
    serve(path, at, at.here)
    got = established(path, at, towards="pod")
    finish(path, at, got, "pod")
    syn = ip(at.client, at.here) / transport(served.TCP, CLIENT_PORT, TARGETS[served.TCP])
    direct = path.forward(syn, "net", "pod")
    assert is_left_alone(direct, syn)
    back = answer(direct)
    assert is_left_alone(path.forward(back, "pod", "net"), back)


# ICMP


def too_big(source: str, destination: str, about: bytes) -> Packet:
    """About the frame `about`."""
    kind = ICMPv6PacketTooBig(mtu=1280) if ":" in destination else ICMP(type=3, code=4, nexthopmtu=1280)
    return ip(source, destination) / kind / Raw(about[14:])


@families
@translatable
def test_an_error_to_another_than_the_quoted_packets_sender_is_left_alone(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """Such errors anybody can make up, and would have them sent on to a client or endpoint of his choice."""
    serve(path, at, at.here)
    got = path.forward(request(at, protocol=protocol), "net", "pod")
    back = path.forward(answer(got), "pod", "net")
    strangers = ("192.0.2.77", "8.8.8.8", at.router) if at is V4 else ("2001:db8::77", at.router)
    for stranger in strangers:
        to_endpoint = too_big(at.router, stranger, back.raw)
        assert is_left_alone(path.ingress(to_endpoint), to_endpoint)
        to_client = too_big(at.router, stranger, got.raw)
        assert is_left_alone(path.forward(to_client, "pod", "net"), to_client)
    assert path.ingress(too_big(at.router, at.external, back.raw)).packet.payload.dst == at.here
    right = path.forward(too_big(at.router, at.client, got.raw), "pod", "net")
    assert right.packet.payload.src == at.external


@translatable
def test_an_error_that_quotes_v4_mapped_addresses_is_left_alone(path: PacketPath, protocol: Protocol) -> None:
    """A flow of IPv4 has just these addresses in its key."""
    serve(path, V4, V4.here)
    got = path.forward(request(V4, protocol=protocol), "net", "pod")
    path.forward(answer(got), "pod", "net")
    ports = transport(protocol, PORTS[protocol], CLIENT_PORT)
    mapped = f"::ffff:{V4.external}", f"::ffff:{V4.client}"
    quoted = bytes(Ether() / IPv6(src=mapped[0], dst=mapped[1]) / ports)
    for destination in ("2001:db8:55::1", V6.external, *mapped):
        packet = too_big(V6.router, destination, quoted)
        assert is_left_alone(path.ingress(packet), packet)
        assert is_left_alone(path.egress(packet), packet)
    assert "icmp_error" not in path.counted()


def redirect(at: Places, about: bytes) -> Packet:
    """Of this node's stack to the client: there is a better way to where it sent this frame."""
    if at is V4:
        return ip(at.node, at.client) / ICMP(type=5, code=1, gw="192.0.2.77") / Raw(about[14:][:28])
    kind = ICMPv6ND_Redirect(tgt="fe80::77", dst=at.there)
    return ip("fe80::1", at.client) / kind / ICMPv6NDOptRedirectedHdr(pkt=about[14:])


def test_a_redirect_of_this_nodes_stack_about_a_flow_is_dropped(path: PacketPath) -> None:
    """The client knows no endpoint that there could be a better way to. Of IPv6 it is let pass."""
    at = V4
    serve(path, at, at.there)
    between = path.ingress(request(at, protocol=served.UDP))
    about_it = redirect(at, between.raw)
    assert path.egress(about_it, came_in="").verdict == SHOT
    other = become(between.packet, source_port=CLIENT_PORT + 1)
    about_another = redirect(at, other)
    assert is_left_alone(path.egress(about_another, came_in=""), about_another)


NOBODY = [
    (V4, "224.0.0.1"),
    (V4, "239.1.2.3"),
    (V4, "240.0.0.1"),
    (V4, "255.255.255.255"),
    (V4, "0.0.0.0"),
    (V4, "127.0.0.1"),
    (V4, "127.9.9.9"),
    (V6, "ff02::1"),
    (V6, "ff0e::7"),
    (V6, "::"),
    (V6, "::1"),
]


@pytest.mark.parametrize(("at", "source"), NOBODY, ids=[source for _, source in NOBODY])
def test_nobody_is_neither_refused_nor_answered(path: PacketPath, at: Places, source: str) -> None:
    """What seems to come from there would be answered to all, or to this node (RFC 1122, 3.2.2)."""
    serve(path, at)
    for protocol in PORTS:
        packet = ip(source, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol])
        assert path.ingress(packet).verdict == SHOT
    echo = ping(source, at.cluster)
    assert is_left_alone(path.ingress(echo), echo)
    assert path.ingress(request(at)).verdict == path.ingress(ping(at.client, at.cluster)).verdict == REDIRECT


# Frames


@families
@pytest.mark.parametrize("to", ["02:00:00:00:00:99", "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01"],
                         ids=["another host", "broadcast", "multicast"])  # fmt: skip
@pytest.mark.parametrize("targets", [0, 1], ids=["refused", "served"])
def test_a_frame_that_is_not_for_this_node_opens_no_flow(
    path: PacketPath, at: Places, to: str, targets: int
) -> None:
    """It is overheard: who it is for has it, too, and serves or refuses it."""
    serve(path, at, *[at.there] * targets)
    for protocol in PORTS:
        packet = request(at, protocol=protocol)
        packet.dst = to
        assert is_left_alone(path.ingress(packet), packet)
    assert not path.flows()
    assert not path.counted()


@contextlib.contextmanager
def _attached(path: PacketPath, device: str) -> Iterator[socket.socket]:
    """The classifier at the device's ingress; what the socket is given comes in there."""
    tc.attach(path.indices[device], tc.Side.INGRESS, path._programs._loaded["from_any"])
    try:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
            sock.bind((f"{device}-peer", 0))
            yield sock
    finally:
        tc.detach(path.indices[device], tc.Side.INGRESS)


def _eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "not within 5 s"
        time.sleep(0.01)


@families
def test_a_frame_that_has_no_vlan_but_a_priority_is_translated(path: PacketPath, at: Places) -> None:
    """IEEE 802.1Q, 6.9: VLAN 0 is none. Of a VLAN it is its own device that translates. By a real device,
    since a test run cannot have a tag."""
    serve(path, at, at.there)
    with _attached(path, "net") as wire:
        for vlan, port in ((5, CLIENT_PORT + 1), (0, CLIENT_PORT)):
            packet = ip(at.client, at.external) / transport(served.UDP, port, PORTS[served.UDP])
            wire.send(bytes(Ether(src=THERE, dst=HERE) / Dot1Q(vlan=vlan, prio=3) / packet.payload))
        _eventually(lambda: bool(path.flows()))
    assert {flow.client_port for flow in path.flows().values()} == {socket.htons(CLIENT_PORT)}


# Fragments


def fragment(at: Places, offset: int, more: bool) -> Packet:
    """Of one datagram, all of whose fragments have 64 bytes; `offset` in units of eight bytes."""
    payload = Raw(bytes(UDP(sport=CLIENT_PORT, dport=PORTS[served.UDP], len=128, chksum=0xBEEF)) + bytes(56))
    if offset:
        payload = Raw(bytes(64))
    if at is V4:
        flags = "MF" if more else 0
        return ip(at.client, at.external, id=77, flags=flags, frag=offset, proto=17) / payload
    header = IPv6ExtHdrFragment(id=77, offset=offset, m=more, nh=17)
    return ip(at.client, at.external) / header / payload


@families
@pytest.mark.parametrize(("seconds", "known"), [(25, True), (35, False)])
def test_a_fragment_whose_first_one_is_long_gone_is_an_orphan(
    path: PacketPath, at: Places, seconds: int, known: bool
) -> None:
    """Ids are used again: after net.ipv4.ipfrag_time it is of another datagram."""
    serve(path, at, at.there)
    path.ingress(fragment(at, 0, True))
    _age_fragments(path, seconds)
    path.counted()
    later = fragment(at, 8, False)
    outcome = path.ingress(later)
    if known:
        assert outcome.packet.payload.dst == at.there
    else:
        assert is_left_alone(outcome, later)
        assert path.counted() == {"fragment_orphan": 1}


def _age_fragments(path: PacketPath, seconds: int) -> None:
    known = list(path.maps["fragments"].items())
    assert known
    for key, value in known:
        *fields, seen = abi.FRAGMENT.unpack(value)
        path.maps["fragments"].update(key, abi.FRAGMENT.pack(*fields, seen - seconds * 10**9))
