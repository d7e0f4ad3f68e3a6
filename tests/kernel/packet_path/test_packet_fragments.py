"""Fragments follow the first fragment of their datagram (cilium #8185)."""

import pytest
from scapy.layers.inet import IP, fragment
from scapy.layers.inet6 import IPv6, IPv6ExtHdrDestOpt, IPv6ExtHdrFragment, fragment6
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from ebpfproxy.model.address import Protocol
from ebpfproxy.model.endpoint import EndpointPort
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, SCTP, TARGETS, TCP, UDP, families, serve
from tests.support.build import HERE as HERE_NODE
from tests.support.build import endpoint, port, service, slice_of
from tests.support.packet_path import SHOT, UNSPEC, PacketPath
from tests.support.packets import HERE, THERE, V6, Places, become, ip, transport

pytestmark = pytest.mark.kernel

DATA = bytes(range(250)) * 8


def complete_datagram(at: Places, protocol: Protocol = UDP, port: int = CLIENT_PORT) -> Packet:
    return ip(at.client, at.external) / transport(protocol, port, PORTS[protocol], DATA)


def cut(packet: bytes, number: int = 77) -> list[bytes]:
    """The fragments of a packet, each in a frame. The first one has the complete transport header."""
    parsed = Ether(packet)
    if IPv6 in parsed:
        parsed[IPv6].payload = IPv6ExtHdrFragment(id=number, nh=parsed[IPv6].nh) / parsed[IPv6].payload
        parsed[IPv6].nh = 44
        del parsed[IPv6].plen
        pieces = fragment6(parsed[IPv6], 600)  # type: ignore[no-untyped-call]
    else:
        parsed[IP].id = number
        del parsed[IP].chksum
        pieces = fragment(parsed[IP], 560)  # type: ignore[no-untyped-call]
    assert len(pieces) > 3
    return [bytes(Ether(src=THERE, dst=HERE) / piece) for piece in pieces]


@families
@pytest.mark.parametrize("protocol", [UDP, TCP], ids=["udp", "tcp"])
@pytest.mark.parametrize("where", ["here", "there"])
def test_all_fragments_of_a_datagram_are_translated_in_both_directions(
    path: PacketPath, at: Places, protocol: Protocol, where: str
) -> None:
    target = getattr(at, where)
    towards, seen = ("pod", at.client) if where == "here" else ("tunnel", at.masquerade)
    serve(path, at, target)
    request = complete_datagram(at, protocol)
    arrived = become(request, seen, target, destination_port=TARGETS[protocol])
    for piece, expected in zip(cut(bytes(request)), cut(arrived), strict=True):
        assert path.forward(piece, "net", towards).raw == expected
    reply = ip(at.external, at.client) / transport(protocol, PORTS[protocol], CLIENT_PORT, DATA)
    answer = become(reply, target, seen, source_port=TARGETS[protocol])
    for piece, expected in zip(cut(answer), cut(bytes(reply)), strict=True):
        assert path.forward(piece, towards, "net").raw == expected


def _serve_sctp(path: PacketPath, at: Places, target: int) -> None:
    path.serve(
        service("web", port(PORTS[SCTP], protocol=SCTP), ips=[at.cluster], external=[at.external]),
        slice_of("web", endpoint(at.here, HERE_NODE), ports=[EndpointPort("", SCTP, target)]),
    )


@families
def test_fragments_of_sctp_are_translated_if_the_port_stays(path: PacketPath, at: Places) -> None:
    """The CRC does not cover addresses."""
    _serve_sctp(path, at, PORTS[SCTP])
    request = complete_datagram(at, SCTP)
    for piece, expected in zip(cut(bytes(request)), cut(become(request, destination=at.here)), strict=True):
        assert path.forward(piece, "net", "pod").raw == expected


@families
def test_fragments_of_sctp_are_dropped_if_the_port_changes(path: PacketPath, at: Places) -> None:
    """The change of the CRC depends on the length of the complete packet, which the first fragment lacks."""
    _serve_sctp(path, at, TARGETS[SCTP])
    pieces = cut(bytes(complete_datagram(at, SCTP)))
    assert {path.ingress(piece).verdict for piece in pieces} == {SHOT}
    assert path.counted()["sctp_fragment"] == len(pieces)


@families
def test_a_later_fragment_that_arrives_first_is_left_alone(path: PacketPath, at: Places) -> None:
    serve(path, at, at.here)
    first, second, *_ = cut(bytes(complete_datagram(at)))
    assert path.ingress(second) == (UNSPEC, second, 0)
    assert path.counted() == {"fragment_orphan": 1}
    assert path.ingress(first).raw != first
    assert path.ingress(second).raw != second


@families
def test_fragments_are_assigned_by_the_id_of_their_datagram(path: PacketPath, at: Places) -> None:
    serve(path, at, at.here)
    first, other = complete_datagram(at), complete_datagram(at)
    other["UDP"].dport += 1
    pieces, others = cut(bytes(first), 1), cut(bytes(other), 2)
    for piece, unknown in zip(pieces, others, strict=True):
        assert path.ingress(piece).raw != piece
        assert path.ingress(unknown).raw == unknown


@families
def test_a_reused_fragment_id_refers_to_the_later_datagram(path: PacketPath, at: Places) -> None:
    serve(path, at, at.here)
    other = complete_datagram(at)
    other["UDP"].dport += 1
    for piece in cut(bytes(complete_datagram(at))):
        assert path.ingress(piece).raw != piece
    for piece in cut(bytes(other)):
        assert path.ingress(piece).raw == piece


def test_fragments_with_options_between_fragment_header_and_transport_work(path: PacketPath) -> None:
    """RFC 8200, 4.5: each fragment header names the first header of the fragmentable part: here the
    options."""
    serve(path, V6, V6.here)
    request = ip(V6.client, V6.external) / IPv6ExtHdrDestOpt() / complete_datagram(V6)["UDP"]
    arrived = become(request, destination=V6.here, destination_port=TARGETS[UDP])
    for piece, expected in zip(cut(bytes(request)), cut(arrived), strict=True):
        assert path.forward(piece, "net", "pod").raw == expected
