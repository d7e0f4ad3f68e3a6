"""Flows that do not go on: their frontend moved or went, their association or connection is over."""

from typing import Any

import pytest
from scapy.layers.sctp import SCTP, SCTPChunkData, SCTPChunkInit, SCTPChunkInitAck
from scapy.packet import Packet

from tests.kernel.packet_path import served
from tests.kernel.packet_path.conversation import answer, established, finish, is_left_alone, request
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, TARGETS, families, serve
from tests.support.packet_path import PacketPath
from tests.support.packets import V4, Places, ip, transport

pytestmark = pytest.mark.kernel


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
