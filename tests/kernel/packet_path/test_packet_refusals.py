"""What gets no endpoint: rejected by a packet made in place, dropped, or none of our business. And pings."""

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6DestUnreach, ICMPv6EchoReply, IPv6, IPv6ExtHdrDestOpt
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from ebpfproxy.model.address import Protocol
from ebpfproxy.model.service import TrafficPolicy
from tests.kernel.packet_path import served
from tests.kernel.packet_path.served import (
    CLIENT_PORT,
    NODE_PORTS,
    PORTS,
    TARGETS,
    families,
    protocols,
    serve,
)
from tests.support import headers
from tests.support.packet_path import MARK_DONE, REDIRECT, SHOT, UNSPEC, Outcome, PacketPath
from tests.support.packets import HERE, THERE, V4, V6, Places, become, ip, ping, transport

pytestmark = pytest.mark.kernel


def to(at: Places, address: str, protocol: Protocol = served.TCP, data: bytes = b"data") -> Packet:
    return ip(at.client, address) / transport(protocol, CLIENT_PORT, PORTS[protocol], data)


def translated(outcome: Outcome) -> bool:
    return outcome.verdict == UNSPEC and outcome.packet.dport in TARGETS.values()


# Rejections


@families
def test_no_icmp_error_is_sent_at_a_rate_of_0(path: PacketPath, at: Places) -> None:
    """As the kernel does (icmp_global_allow()). TCP is reset all the same."""
    path.set_node(icmp_rate=0)
    serve(path, at)
    path.counted()
    assert path.ingress(to(at, at.external, served.UDP)).verdict == SHOT
    assert path.counted()["icmp_limited"] == 1
    assert path.ingress(to(at, at.external)).verdict == REDIRECT


@families
@pytest.mark.parametrize("data", [b"", b"more than a SYN has"])
def test_a_syn_to_no_endpoint_is_reset(path: PacketPath, at: Places, data: bytes) -> None:
    """RFC 9293, 3.10.7.1: sequence 0, and what was sent is acknowledged, its data included."""
    serve(path, at)
    syn = to(at, at.external, data=data)
    syn[TCP].seq, syn[TCP].options, syn[TCP].window = 4294967295, [("MSS", 1460)], 512
    _grow_old(syn)
    outcome = path.ingress(syn)
    assert (outcome.verdict, outcome.mark) == (REDIRECT, MARK_DONE)
    reset = outcome.packet
    _check_addresses(at, reset, at.external)
    assert (reset[TCP].sport, reset[TCP].dport) == (PORTS[served.TCP], CLIENT_PORT)
    assert (str(reset[TCP].flags), reset[TCP].seq, reset[TCP].ack) == ("RA", 0, len(data))
    assert headers.is_good(outcome.raw)
    assert outcome.raw == bytes(_made_anew(reset))
    assert not path.flows()


def _grow_old(packet: Packet) -> None:
    """It has come a long way: an answer has a TTL of its own."""
    packet.payload.setfieldval("hlim" if IPv6 in packet else "ttl", 3)


def _check_addresses(at: Places, packet: Ether, frontend: str) -> None:
    assert (packet.src, packet.dst) == (HERE, THERE)
    layer = packet.payload
    assert (layer.src, layer.dst) == (frontend, at.client)
    assert (layer.hlim if IPv6 in packet else layer.ttl) == 64


def _made_anew(packet: Ether) -> Ether:
    """With lengths and checksums by scapy."""
    copy = packet.copy()
    layer: Packet | None = copy
    while layer:
        for field in ("chksum", "cksum", "len", "plen"):
            if field in getattr(layer, "fields", {}) and not isinstance(layer, Ether):
                delattr(layer, field)
        layer = layer.payload or None
    return copy


@families
@pytest.mark.parametrize("protocol", [served.UDP, served.SCTP], ids=["udp", "sctp"])
@pytest.mark.parametrize("options", [0, 1, 3], ids=["plain", "a header more", "three"])
@pytest.mark.parametrize("size", [0, 4, 600])
def test_a_datagram_to_no_endpoint_is_answered_by_port_unreachable(
    path: PacketPath, at: Places, protocol: Protocol, options: int, size: int
) -> None:
    """It quotes the IP header and 8 bytes (RFC 792). In IPv6 it may be more (RFC 4443, 3.1)."""
    serve(path, at)
    packet = ip(at.client, at.external)
    if at is V4 and options:
        packet[IP].options = [b"\x01" * 4] * options
    for _ in range(options if at is V6 else 0):
        packet = packet / IPv6ExtHdrDestOpt()
    packet = packet / transport(protocol, CLIENT_PORT, PORTS[protocol], bytes(size))
    outcome = path.ingress(packet)
    assert (outcome.verdict, outcome.mark) == (REDIRECT, MARK_DONE)
    error = outcome.packet
    _check_addresses(at, error, at.external)
    if at is V4:
        assert (error[ICMP].type, error[ICMP].code) == (3, 3)
    else:
        assert error[ICMPv6DestUnreach].code == 4
    found = headers.parts(outcome.raw)
    assert found.outer.end == len(outcome.raw)
    assert found.inner
    original = headers.parts(bytes(packet)).outer
    assert found.inner.tuple == original.tuple
    assert outcome.raw[found.inner.l3 :] == bytes(packet)[original.l3 : original.l4 + 8]
    assert headers.is_good(outcome.raw)


@families
def test_a_refusal_is_not_rejected(path: PacketPath, at: Places) -> None:
    """A reset, or whatever is no SYN, is answered by nothing; nor is an ICMP error."""
    serve(path, at)
    for flags in ("R", "RA", "A", "FA", "SA"):
        packet = ip(at.client, at.external) / transport(served.TCP, CLIENT_PORT, 80, flags=flags)
        assert path.ingress(packet) == (UNSPEC, bytes(packet), 0)


@families
def test_the_node_itself_is_refused_too(path: PacketPath, at: Places) -> None:
    """Back into its own stack, by the device that it would have left by."""
    serve(path, at)
    outcome = path.egress(ip(at.node, at.external) / transport(served.TCP, CLIENT_PORT, 80), came_in="")
    assert outcome.verdict == REDIRECT
    assert str(outcome.packet[TCP].flags) == "RA"
    assert headers.is_good(outcome.raw)


# Dropped


@families
@protocols
def test_a_policy_that_leaves_this_node_no_endpoint_drops(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """A load balancer shall see silence, not a rejection; pods of this node are let through."""
    serve(path, at, at.there, external_policy=TrafficPolicy.LOCAL)
    assert path.ingress(to(at, at.external, protocol)).verdict == SHOT
    assert path.counted() == {"packet_dropped": 1}
    inside = ip(at.pod, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    assert path.ingress(inside, "pod").raw == become(
        inside, destination=at.there, destination_port=TARGETS[protocol]
    )


@families
def test_with_policy_local_the_client_is_seen_as_it_is(path: PacketPath, at: Places) -> None:
    serve(path, at, at.here, at.there, external_policy=TrafficPolicy.LOCAL)
    for port in range(20):
        packet = ip(at.client, at.external) / transport(served.TCP, CLIENT_PORT + port, 80)
        outcome = path.forward(packet, "net", "pod")
        assert outcome.raw == become(packet, at.client, at.here, destination_port=TARGETS[served.TCP])


@pytest.mark.parametrize(("at", "inside", "outside"), [
    (V4, "198.51.100.0/24", "198.51.101.0/24"), (V6, "2001:db8:99::/64", "2001:db8:98::/64"),
], ids=["v4", "v6"])  # fmt: skip
@protocols
def test_source_ranges_hold_for_the_load_balancers_address_alone(
    path: PacketPath, at: Places, inside: str, outside: str, protocol: Protocol
) -> None:
    """Not for external IPs (cilium #44718), where nobody said so."""
    serve(path, at, at.there, ranges=[inside])
    assert translated(path.ingress(to(at, at.balancer, protocol)))
    pod = ip(at.pod, at.balancer) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    assert path.ingress(pod, "pod").verdict == SHOT, "pods, too"
    serve(path, at, at.there, ranges=[outside])
    other = ip(at.client, at.balancer) / transport(protocol, CLIENT_PORT + 1, PORTS[protocol])
    path.counted()
    assert path.ingress(other).verdict == SHOT
    assert path.counted() == {"source_refused": 1}
    another = ip(at.client, at.external) / transport(protocol, CLIENT_PORT + 2, PORTS[protocol])
    assert translated(path.ingress(another))


def test_ranges_of_many_services_do_not_mix(path: PacketPath) -> None:
    serve(path, V4, V4.there, ranges=["198.51.100.0/24"])
    serve(path, V4, V4.there, called="other", ips=["10.96.0.77"], external=[], balancer=["10.97.0.77"],
          ranges=["203.0.113.0/24"], node_ports=False)  # fmt: skip
    assert translated(path.ingress(to(V4, V4.balancer)))
    assert path.ingress(to(V4, "10.97.0.77")).verdict == SHOT


# Whose address it is


@families
def test_node_ports_answer_at_chosen_addresses_only(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    for address, answers in ((at.node, True), (at.gateway, False), (at.client, False)):
        packet = ip(at.router, address) / transport(served.TCP, CLIENT_PORT, NODE_PORTS[served.TCP])
        assert translated(path.ingress(packet)) == answers, address


def test_a_load_balancer_whose_address_is_the_nodes(path: PacketPath) -> None:
    """cilium #44430: the more special frontend wins, and pings are the node's own."""
    serve(path, V4, V4.there, balancer=[V4.node])
    assert translated(path.ingress(to(V4, V4.node)))
    request = ping(V4.client, V4.node)
    assert path.ingress(request) == (UNSPEC, bytes(request), 0)


@families
@pytest.mark.parametrize("frontend", ["cluster", "external", "balancer"])
def test_a_ping_to_a_frontend_is_answered(path: PacketPath, at: Places, frontend: str) -> None:
    serve(path, at, at.there)
    address = getattr(at, frontend)
    request = ping(at.client, address)
    _grow_old(request)
    outcome = path.ingress(request)
    assert (outcome.verdict, outcome.mark) == (REDIRECT, MARK_DONE)
    reply = outcome.packet
    _check_addresses(at, reply, address)
    if at is V4:
        assert (reply[ICMP].type, reply[ICMP].id, reply[ICMP].seq) == (0, 7, 1)
    else:
        assert (reply[ICMPv6EchoReply].id, reply[ICMPv6EchoReply].seq) == (7, 1)
    assert outcome.raw.endswith(b"ping pong")
    assert outcome.raw == bytes(_made_anew(reply))
    assert path.counted() == {"echo_answered": 1}


@families
def test_a_ping_to_nobodys_address_is_left_alone(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    for address in (at.there, at.node):
        request = ping(at.client, address)
        assert path.ingress(request) == (UNSPEC, bytes(request), 0)


def test_udp_and_tcp_on_one_port_are_two_services(path: PacketPath) -> None:
    """kpng mixed up their keys."""
    serve(path, V4, V4.there)
    packet = ip(V4.client, V4.external) / transport(served.UDP, CLIENT_PORT, PORTS[served.TCP])
    assert path.ingress(packet) == (UNSPEC, bytes(packet), 0)
    assert UDP in path.ingress(to(V4, V4.external, served.UDP)).packet
