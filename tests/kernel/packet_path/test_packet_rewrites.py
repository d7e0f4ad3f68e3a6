"""Every rewrite, compared byte by byte with the packet that scapy builds.

Only addresses, ports and checksums change. The stack decrements the TTL.
"""

from typing import Any

import pytest
from scapy.layers.inet import IPOption_NOP, IPOption_Router_Alert
from scapy.layers.inet6 import (
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path.served import (
    CLIENT_PORT,
    NODE_PORTS,
    PORTS,
    SCTP,
    TARGETS,
    TCP,
    UDP,
    families,
    protocols,
    serve,
)
from tests.support.headers import defects, parts
from tests.support.packet_path import UNSPEC, PacketPath
from tests.support.packets import V4, V6, Places, become, ip, transport

pytestmark = pytest.mark.kernel

HEADERS: dict[str, tuple[Places, dict[str, Any], tuple[Packet, ...]]] = {
    "v4 options": (V4, {"options": [IPOption_NOP(), IPOption_Router_Alert()]}, ()),
    "v4 all options": (V4, {"options": [IPOption_NOP()] * 40}, ()),
    "v6 hop-by-hop": (V6, {}, (IPv6ExtHdrHopByHop(),)),
    "v6 destination options": (V6, {}, (IPv6ExtHdrDestOpt(),)),
    "v6 fragment that is whole": (V6, {}, (IPv6ExtHdrFragment(id=5),)),
    "v6 routing, at its end": (V6, {}, (IPv6ExtHdrRouting(segleft=0),)),
    "v6 six of them": (V6, {}, (IPv6ExtHdrHopByHop(), *[IPv6ExtHdrDestOpt()] * 5)),
}


def check(path: PacketPath, at: Places, request: Packet, reply: Packet, target: str) -> None:
    """Check both directions, for an endpoint on this node or on another one. `request` is from the client to
    a frontend, `reply` from the frontend to the client. Scapy derives the endpoint's packet from `reply`."""
    elsewhere = target == at.there
    towards = "tunnel" if elsewhere else "pod"
    ports: dict[str, Any] = {"destination_port": TARGETS[_protocol(request)]}
    sent = path.ingress(request)
    assert (sent.verdict, sent.mark) == (UNSPEC, 0)
    assert sent.raw == become(request, destination=target, **ports)
    arrived = path.egress(sent.raw, towards, sent.mark, "net")
    source = at.masquerade if elsewhere else None
    assert arrived.verdict == UNSPEC
    assert arrived.raw == become(request, source, target, **ports)
    _check_back(path, at, reply, target, towards)


def _check_back(path: PacketPath, at: Places, reply: Packet, target: str, towards: str) -> None:
    elsewhere = towards == "tunnel"
    ports: dict[str, Any] = {"source_port": TARGETS[_protocol(reply)]}
    answer = become(reply, target, at.masquerade if elsewhere else None, **ports)
    back = path.ingress(answer, towards)
    assert (back.verdict, back.mark) == (UNSPEC, 0)
    assert back.raw == become(reply, target, **ports)
    seen = path.egress(back.raw, "net", back.mark, towards)
    assert seen.verdict == UNSPEC
    assert seen.raw == bytes(reply)


def _protocol(packet: Packet) -> Protocol:
    return next(each for each in Protocol if each.name in packet)


def conversation(
    at: Places,
    protocol: Protocol,
    before: dict[str, Any] | None = None,
    *extensions: Packet,
    data: bytes = b"data",
) -> tuple[Packet, Packet]:
    """A request and its reply, as the client sees them. `before` and `extensions` belong to the IP header."""
    fields, reply = before or {}, {"flags": "SA"} if protocol is TCP else {}
    packets = []
    for packet, end in (
        (ip(at.client, at.external, **fields), transport(protocol, CLIENT_PORT, PORTS[protocol], data)),
        (
            ip(at.external, at.client, **fields),
            transport(protocol, PORTS[protocol], CLIENT_PORT, data, **reply),
        ),
    ):
        for header in extensions:
            packet = packet / header.copy()
        packets.append(packet / end)
    return packets[0], packets[1]


@families
@protocols
@pytest.mark.parametrize("where", ["here", "there"])
def test_packets_of_an_external_client_are_translated(
    path: PacketPath, at: Places, protocol: Protocol, where: str
) -> None:
    target = getattr(at, where)
    serve(path, at, target)
    check(path, at, *conversation(at, protocol), target)


@pytest.mark.parametrize("header", HEADERS)
@protocols
@pytest.mark.parametrize("where", ["here", "there"])
def test_packets_with_headers_before_the_transport_header_are_translated(
    path: PacketPath, header: str, protocol: Protocol, where: str
) -> None:
    at, fields, extensions = HEADERS[header]
    target = getattr(at, where)
    serve(path, at, target)
    check(path, at, *conversation(at, protocol, fields, *extensions), target)


@families
@protocols
@pytest.mark.parametrize("size", [0, 4, 1400])
def test_payloads_of_many_sizes_are_translated(
    path: PacketPath, at: Places, protocol: Protocol, size: int
) -> None:
    serve(path, at, at.there)
    check(path, at, *conversation(at, protocol, data=bytes(range(4)) * (size // 4)), at.there)


@families
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
def test_payloads_of_odd_length_are_translated(path: PacketPath, at: Places, protocol: Protocol) -> None:
    serve(path, at, at.there)
    check(path, at, *conversation(at, protocol, data=b"odd"), at.there)


@families
@pytest.mark.parametrize("where", ["here", "there"])
def test_udp_without_a_checksum_stays_without_one(path: PacketPath, at: Places, where: str) -> None:
    """The value 0 means "no checksum" (RFC 768; RFC 6935 for IPv6 tunnels), and must not become a wrong
    one."""
    target = getattr(at, where)
    serve(path, at, target)
    request, reply = conversation(at, UDP)
    for packet in (request, reply):
        packet["UDP"].chksum = 0
    check(path, at, request, reply, target)


@families
def test_a_udp_checksum_never_becomes_0(path: PacketPath, at: Places) -> None:
    """A computed 0 is sent as 0xffff (RFC 768), as scapy does."""
    serve(path, at, at.here)
    request, _ = conversation(at, UDP, data=bytes(4))
    base = become(request, destination=at.here, destination_port=TARGETS[UDP])
    word = int.from_bytes(base[-6:-4])  # this additional data makes the checksum 0
    request, _ = conversation(at, UDP, data=word.to_bytes(2) + b"\0\0")
    sent = path.ingress(request)
    assert sent.raw[-6:-4] == b"\xff\xff"
    assert sent.raw == become(request, destination=at.here, destination_port=TARGETS[UDP])


@families
def test_the_crc_of_sctp_is_right_for_every_length(path: PacketPath, at: Places) -> None:
    """Each hexadecimal digit of the length selects another factor (bpf/crc32c.h)."""
    serve(path, at, at.there)
    for size in (*range(20), *range(20, 300, 4), *range(300, 3400, 256), 3400):
        packet = ip(at.client, at.external) / transport(SCTP, CLIENT_PORT, PORTS[SCTP], bytes(size))
        there = path.forward(packet, "net", "tunnel")
        assert there.raw == become(packet, at.masquerade, at.there, destination_port=TARGETS[SCTP]), size


@families
def test_the_crc_of_sctp_is_right_for_packets_longer_than_a_test_run_permits(
    path: PacketPath, at: Places
) -> None:
    """As if all further bytes were zeros: the programs read no payload."""
    serve(path, at, at.there)
    for length in (*(digit << 12 | digit << 8 for digit in range(1, 16)), 65500):
        packet = ip(at.client, at.external) / transport(SCTP, CLIENT_PORT, PORTS[SCTP])
        setattr(packet.payload, "len" if at is V4 else "plen", length + (20 if at is V4 else 0))
        there = path.forward(packet, "net", "tunnel").raw
        assert defects(there, parts(there)) == defects(bytes(packet), parts(bytes(packet)))
        assert Ether(there).dport == TARGETS[SCTP]


@families
def test_a_wrong_crc_of_sctp_stays_wrong_by_the_same_bits(path: PacketPath, at: Places) -> None:
    """Also 0, which stands for a CRC that the device computes if the kernel says so, and not otherwise."""
    serve(path, at, at.there)
    for wrong in (0, 1, 0xFFFFFFFF):
        packet = ip(at.client, at.external) / transport(SCTP, CLIENT_PORT, PORTS[SCTP])
        packet["SCTP"].chksum = wrong
        there = path.forward(packet, "net", "tunnel").raw
        assert defects(there, parts(there)) == defects(bytes(packet), parts(bytes(packet)))
        assert there != bytes(packet)


@families
@protocols
def test_packets_to_a_node_port_are_translated(path: PacketPath, at: Places, protocol: Protocol) -> None:
    serve(path, at, at.there)
    request = ip(at.client, at.node) / transport(protocol, CLIENT_PORT, NODE_PORTS[protocol])
    there = path.forward(request, "net", "tunnel")
    assert there.raw == become(request, at.masquerade, at.there, destination_port=TARGETS[protocol])
    reply = ip(at.node, at.client) / transport(protocol, NODE_PORTS[protocol], CLIENT_PORT)
    answer = become(reply, at.there, at.masquerade, source_port=TARGETS[protocol])
    assert path.forward(answer, "tunnel", "net").raw == bytes(reply)


@families
@protocols
def test_a_pod_keeps_its_address_on_the_way_to_a_cluster_ip(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.there)
    request = ip(at.pod, at.cluster) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    there = path.forward(request, "pod", "tunnel")
    assert there.raw == become(request, destination=at.there, destination_port=TARGETS[protocol])
    reply = ip(at.cluster, at.pod) / transport(protocol, PORTS[protocol], CLIENT_PORT)
    answer = become(reply, at.there, source_port=TARGETS[protocol])
    assert path.forward(answer, "tunnel", "pod").raw == bytes(reply)


@families
@protocols
def test_a_pod_that_is_its_own_endpoint_sees_the_node_as_the_client(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """Hairpin: otherwise the reply would not pass the node."""
    serve(path, at, at.here)
    request = ip(at.here, at.cluster) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    there = path.forward(request, "pod", "pod")
    assert there.raw == become(request, at.gateway, at.here, destination_port=TARGETS[protocol])
    reply = ip(at.cluster, at.here) / transport(protocol, PORTS[protocol], CLIENT_PORT)
    answer = become(reply, at.here, at.gateway, source_port=TARGETS[protocol])
    assert path.forward(answer, "pod", "pod").raw == bytes(reply)


@families
def test_packets_to_no_service_are_left_alone(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    for packet in (
        ip(at.client, at.external) / transport(TCP, CLIENT_PORT, PORTS[TCP] + 1),
        ip(at.client, at.external) / transport(UDP, CLIENT_PORT, PORTS[TCP]),
        ip(at.client, at.there) / transport(TCP, CLIENT_PORT, TARGETS[TCP]),
        ip(at.there, at.client) / transport(TCP, TARGETS[TCP], CLIENT_PORT),
        ip(at.client, at.external) / transport(TCP, CLIENT_PORT, PORTS[TCP], flags="A"),
    ):
        for outcome in (path.ingress(packet), path.egress(packet)):
            assert outcome == (UNSPEC, bytes(packet), 0)
    assert not path.flows()
