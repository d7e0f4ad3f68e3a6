"""Every rewrite, compared byte by byte with the packet that scapy builds.

Only addresses, ports and checksums change. The stack decrements the TTL.
"""

from typing import Any, NamedTuple

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


class Way(NamedTuple):
    """Who dials what, the endpoint, and the client's address that it sees: names of addresses of `Places`."""

    client: str
    frontend: str
    target: str
    seen: str


DEVICES = {"client": "net", "pod": "pod", "here": "pod", "there": "tunnel"}
HERE = Way("client", "external", "here", "client")
THERE = Way("client", "external", "there", "masquerade")
WAYS = {
    "to this node": HERE,
    "to another node": THERE,
    "node port": Way("client", "node", "there", "masquerade"),
    # A pod keeps its address on the way to a ClusterIP.
    "pod": Way("pod", "cluster", "there", "pod"),
    # A pod that is its own endpoint sees the node: otherwise the reply would not pass the node.
    "hairpin": Way("here", "cluster", "here", "gateway"),
}
wheres = pytest.mark.parametrize("way", [HERE, THERE], ids=["here", "there"])


def check(path: PacketPath, at: Places, way: Way, request: Packet, reply: Packet) -> None:
    """Check both directions. `request` is from the client to a frontend, `reply` from the frontend to the
    client. Scapy derives the endpoint's packets from them. The ingress program changes the destination, and
    the egress program the source."""
    target, seen, port = getattr(at, way.target), getattr(at, way.seen), TARGETS[_protocol(request)]
    came_in, towards = DEVICES[way.client], DEVICES[way.target]
    sent = path.ingress(request, came_in)
    assert sent == (UNSPEC, become(request, destination=target, destination_port=port), 0)
    arrived = path.egress(sent.raw, towards, sent.mark, came_in)
    assert arrived[:2] == (UNSPEC, become(request, seen, target, destination_port=port))
    back = path.ingress(become(reply, target, seen, source_port=port), towards)
    assert back == (UNSPEC, become(reply, target, source_port=port), 0)
    assert path.egress(back.raw, came_in, back.mark, towards)[:2] == (UNSPEC, bytes(reply))


def _protocol(packet: Packet) -> Protocol:
    return next(each for each in Protocol if each.name in packet)


def conversation(
    at: Places,
    protocol: Protocol,
    before: dict[str, Any] | None = None,
    *extensions: Packet,
    data: bytes = b"data",
    way: Way = THERE,
) -> tuple[Packet, Packet]:
    """A request and its reply, as the client sees them. `before` and `extensions` belong to the IP header."""
    client, frontend = getattr(at, way.client), getattr(at, way.frontend)
    port = (NODE_PORTS if way.frontend == "node" else PORTS)[protocol]
    reply = {"flags": "SA"} if protocol is TCP else {}
    packets = []
    for source, destination, end in (
        (client, frontend, transport(protocol, CLIENT_PORT, port, data)),
        (frontend, client, transport(protocol, port, CLIENT_PORT, data, **reply)),
    ):
        packet = ip(source, destination, **before or {})
        for header in extensions:
            packet = packet / header.copy()
        packets.append(packet / end)
    return packets[0], packets[1]


@families
@protocols
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_packets_are_translated(path: PacketPath, at: Places, protocol: Protocol, way: Way) -> None:
    serve(path, at, getattr(at, way.target))
    check(path, at, way, *conversation(at, protocol, way=way))


@pytest.mark.parametrize("header", HEADERS)
@protocols
@wheres
def test_packets_with_headers_before_the_transport_header_are_translated(
    path: PacketPath, header: str, protocol: Protocol, way: Way
) -> None:
    at, fields, extensions = HEADERS[header]
    serve(path, at, getattr(at, way.target))
    check(path, at, way, *conversation(at, protocol, fields, *extensions))


@families
@protocols
@pytest.mark.parametrize("size", [0, 4, 1400])
def test_payloads_of_many_sizes_are_translated(
    path: PacketPath, at: Places, protocol: Protocol, size: int
) -> None:
    serve(path, at, at.there)
    check(path, at, THERE, *conversation(at, protocol, data=bytes(range(4)) * (size // 4)))


@families
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
def test_payloads_of_odd_length_are_translated(path: PacketPath, at: Places, protocol: Protocol) -> None:
    serve(path, at, at.there)
    check(path, at, THERE, *conversation(at, protocol, data=b"odd"))


@families
@wheres
def test_udp_without_a_checksum_stays_without_one(path: PacketPath, at: Places, way: Way) -> None:
    """The value 0 means "no checksum" (RFC 768; RFC 6935 for IPv6 tunnels), and must not become a wrong
    one."""
    serve(path, at, getattr(at, way.target))
    request, reply = conversation(at, UDP)
    for packet in (request, reply):
        packet["UDP"].chksum = 0
    check(path, at, way, request, reply)


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
