"""Packets without an endpoint: rejected by a packet built in place, dropped, or left alone. And pings."""

import pytest
from scapy.layers.inet import ICMP, IP, TCP
from scapy.layers.inet6 import ICMPv6DestUnreach, ICMPv6EchoReply, IPv6, IPv6ExtHdrDestOpt
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP, SCTPChunkInit
from scapy.packet import Packet, Raw

from ebpfproxy.model.address import Protocol
from ebpfproxy.model.service import TrafficPolicy
from tests.kernel.packet_path import served
from tests.kernel.packet_path.served import (
    CLIENT_PORT,
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
    """As in the kernel (icmp_global_allow()). TCP resets are not limited."""
    path.set_node(icmp_rate=0)
    serve(path, at)
    path.counted()
    assert path.ingress(to(at, at.external, served.UDP)).verdict == SHOT
    assert path.counted()["icmp_limited"] == 1
    assert path.ingress(to(at, at.external)).verdict == REDIRECT


@families
@pytest.mark.parametrize("data", [b"", b"more than a SYN has"])
def test_a_syn_to_no_endpoint_is_reset(path: PacketPath, at: Places, data: bytes) -> None:
    """RFC 9293, 3.10.7.1: the reset has sequence 0, and acknowledges the SYN with its data."""
    serve(path, at)
    syn = to(at, at.external, data=data)
    syn[TCP].seq, syn[TCP].options, syn[TCP].window = 4294967295, [("MSS", 1460)], 512
    _set_low_ttl(syn)
    outcome = path.ingress(syn)
    assert (outcome.verdict, outcome.mark) == (REDIRECT, MARK_DONE)
    reset = outcome.packet
    _check_addresses(at, reset, at.external)
    assert (reset[TCP].sport, reset[TCP].dport) == (PORTS[served.TCP], CLIENT_PORT)
    assert (str(reset[TCP].flags), reset[TCP].seq, reset[TCP].ack) == ("RA", 0, len(data))
    assert headers.is_good(outcome.raw)
    assert outcome.raw == bytes(_rebuilt(reset))
    assert not path.flows()


def _set_low_ttl(packet: Packet) -> None:
    """Set a low TTL: an answer has a TTL of its own."""
    packet.payload.setfieldval("hlim" if IPv6 in packet else "ttl", 3)


def _check_addresses(at: Places, packet: Ether, frontend: str) -> None:
    assert (packet.src, packet.dst) == (HERE, THERE)
    layer = packet.payload
    assert (layer.src, layer.dst) == (frontend, at.client)
    assert (layer.hlim if IPv6 in packet else layer.ttl) == 64


def _rebuilt(packet: Ether) -> Ether:
    """The packet with lengths and checksums by scapy."""
    copy = packet.copy()
    layer: Packet | None = copy
    while layer:
        for field in ("chksum", "cksum", "len", "plen"):
            if field in getattr(layer, "fields", {}) and not isinstance(layer, Ether):
                delattr(layer, field)
        layer = layer.payload or None
    return copy


@families
@pytest.mark.parametrize("options", [0, 1, 3], ids=["plain", "a header more", "three"])
@pytest.mark.parametrize("size", [0, 600])
def test_an_init_to_no_endpoint_is_aborted(path: PacketPath, at: Places, options: int, size: int) -> None:
    """RFC 9260, 8.4: the ABORT has the tag that the client has chosen, so that it accepts it."""
    serve(path, at)
    packet = ip(at.client, at.external)
    if at is V4 and options:
        packet[IP].options = [b"\x01" * 4] * options
    for _ in range(options if at is V6 else 0):
        packet = packet / IPv6ExtHdrDestOpt()
    packet = packet / _init(tag=0xCAFE0001, size=size)
    _set_low_ttl(packet)
    outcome = path.ingress(packet)
    assert (outcome.verdict, outcome.mark) == (REDIRECT, MARK_DONE)
    _check_addresses(at, outcome.packet, at.external)
    found = headers.parts(outcome.raw).outer
    ports = PORTS[served.SCTP].to_bytes(2) + CLIENT_PORT.to_bytes(2)
    assert outcome.raw[found.l4 : found.l4 + 8] == ports + b"\xca\xfe\0\1"
    assert outcome.raw[found.l4 + 12 :] == b"\x06\0\0\x04"
    assert found.end == len(outcome.raw)
    assert headers.is_good(outcome.raw)
    assert not path.flows()


def _init(tag: int, size: int = 0) -> Packet:
    chunk = SCTPChunkInit(init_tag=tag, a_rwnd=1, n_out_streams=1, n_in_streams=1, init_tsn=7)
    return SCTP(sport=CLIENT_PORT, dport=PORTS[served.SCTP]) / chunk / Raw(bytes(size))


@families
def test_a_malformed_association_to_no_endpoint_gets_no_answer(path: PacketPath, at: Places) -> None:
    """An INIT whose tag is 0, and another chunk without a verification tag (RFC 9260, 3.3.2 and 8.5.1)."""
    serve(path, at)
    assert path.ingress(ip(at.client, at.external) / _init(tag=0)).verdict == SHOT
    assert path.ingress(to(at, at.external, served.SCTP)).verdict == SHOT


@families
@pytest.mark.parametrize("options", [0, 1, 3], ids=["plain", "a header more", "three"])
@pytest.mark.parametrize("size", [0, 4, 600])
def test_a_datagram_to_no_endpoint_is_answered_by_port_unreachable(
    path: PacketPath, at: Places, options: int, size: int
) -> None:
    """The error quotes the IP header and 8 bytes (RFC 792). In IPv6 it may quote more (RFC 4443, 3.1)."""
    serve(path, at)
    packet = ip(at.client, at.external)
    if at is V4 and options:
        packet[IP].options = [b"\x01" * 4] * options
    for _ in range(options if at is V6 else 0):
        packet = packet / IPv6ExtHdrDestOpt()
    packet = packet / transport(served.UDP, CLIENT_PORT, PORTS[served.UDP], bytes(size))
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
def test_segments_other_than_syn_are_not_rejected(path: PacketPath, at: Places) -> None:
    """Neither resets nor other segments without a connection get an answer."""
    serve(path, at)
    for flags in ("R", "RA", "A", "FA", "SA"):
        packet = ip(at.client, at.external) / transport(served.TCP, CLIENT_PORT, 80, flags=flags)
        assert path.ingress(packet) == (UNSPEC, bytes(packet), 0)


@families
def test_host_originated_connections_are_rejected(path: PacketPath, at: Places) -> None:
    """The rejection returns to the node's stack by the device of its route."""
    serve(path, at)
    outcome = path.egress(ip(at.node, at.external) / transport(served.TCP, CLIENT_PORT, 80), came_in="")
    assert outcome.verdict == REDIRECT
    assert str(outcome.packet[TCP].flags) == "RA"
    assert headers.is_good(outcome.raw)


# Dropped


@families
@protocols
def test_policy_local_without_a_local_endpoint_drops(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """A load balancer shall see no rejection. Pods of this node are not restricted."""
    serve(path, at, at.there, external_policy=TrafficPolicy.LOCAL)
    assert path.ingress(to(at, at.external, protocol)).verdict == SHOT
    assert path.counted() == {"packet_dropped": 1}
    inside = ip(at.pod, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    assert path.ingress(inside, "pod").raw == become(
        inside, destination=at.there, destination_port=TARGETS[protocol]
    )


@pytest.mark.parametrize(("at", "inside", "outside"), [
    (V4, "198.51.100.0/24", "198.51.101.0/24"), (V6, "2001:db8:99::/64", "2001:db8:98::/64"),
], ids=["v4", "v6"])  # fmt: skip
@protocols
def test_source_ranges_apply_only_to_the_load_balancer_address(
    path: PacketPath, at: Places, inside: str, outside: str, protocol: Protocol
) -> None:
    """They do not apply to external IPs (cilium #44718)."""
    serve(path, at, at.there, ranges=[inside])
    assert translated(path.ingress(to(at, at.balancer, protocol)))
    pod = ip(at.pod, at.balancer) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    assert path.ingress(pod, "pod").verdict == SHOT, "source ranges apply to pods, too"
    serve(path, at, at.there, ranges=[outside])
    other = ip(at.client, at.balancer) / transport(protocol, CLIENT_PORT + 1, PORTS[protocol])
    path.counted()
    assert path.ingress(other).verdict == SHOT
    assert path.counted() == {"source_refused": 1}
    another = ip(at.client, at.external) / transport(protocol, CLIENT_PORT + 2, PORTS[protocol])
    assert translated(path.ingress(another))


def test_source_ranges_of_two_services_are_independent(path: PacketPath) -> None:
    serve(path, V4, V4.there, ranges=["198.51.100.0/24"])
    serve(path, V4, V4.there, called="other", ips=["10.96.0.77"], external=[], balancer=["10.97.0.77"],
          ranges=["203.0.113.0/24"], node_ports=False)  # fmt: skip
    assert translated(path.ingress(to(V4, V4.balancer)))
    assert path.ingress(to(V4, "10.97.0.77")).verdict == SHOT


# Addresses


@families
@pytest.mark.parametrize("frontend", ["cluster", "external", "balancer"])
def test_a_ping_to_a_frontend_is_answered(path: PacketPath, at: Places, frontend: str) -> None:
    serve(path, at, at.there)
    address = getattr(at, frontend)
    request = ping(at.client, address)
    _set_low_ttl(request)
    outcome = path.ingress(request)
    assert (outcome.verdict, outcome.mark) == (REDIRECT, MARK_DONE)
    reply = outcome.packet
    _check_addresses(at, reply, address)
    if at is V4:
        assert (reply[ICMP].type, reply[ICMP].id, reply[ICMP].seq) == (0, 7, 1)
    else:
        assert (reply[ICMPv6EchoReply].id, reply[ICMPv6EchoReply].seq) == (7, 1)
    assert outcome.raw.endswith(b"ping pong")
    assert outcome.raw == bytes(_rebuilt(reply))
    assert path.counted() == {"echo_answered": 1}


@families
def test_a_ping_to_an_address_without_a_frontend_is_left_alone(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    for address in (at.there, at.node):
        request = ping(at.client, address)
        assert path.ingress(request) == (UNSPEC, bytes(request), 0)
