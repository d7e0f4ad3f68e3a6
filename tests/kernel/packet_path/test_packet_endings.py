"""Flows that end: their frontend moved or was removed, or their association or connection ended."""

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
def test_a_udp_flow_follows_its_frontend_to_another_service(path: PacketPath, at: Places) -> None:
    """The first Service still has the flow's endpoint."""
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
def test_a_udp_flow_ends_when_its_frontend_is_removed(path: PacketPath, at: Places) -> None:
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
    """Only INIT chunks have no verification tag (RFC 9260, 8.5.1)."""
    serve(path, at, at.there)
    data = sctp(at, SCTPChunkData(data=b"data", tsn=7), tag=0xCAFE)
    assert is_left_alone(path.ingress(data), data)
    assert not path.flows()
    assert path.ingress(sctp(at, SCTPChunkInit())).packet.payload.dst == at.there
    assert path.ingress(data).packet.payload.dst == at.there


@families
@pytest.mark.parametrize("answered", [False, True], ids=["unanswered", "associated"])
def test_an_sctp_init_of_a_flow_to_a_removed_endpoint_selects_another_one(
    path: PacketPath, at: Places, answered: bool
) -> None:
    """As for a SYN: a client with a working association would not send INIT again."""
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
def test_a_direct_connection_after_the_flows_end_is_not_translated(path: PacketPath, at: Places) -> None:
    """The client used a frontend before, and now connects from the same port to the endpoint's own
    address."""
    serve(path, at, at.here)
    got = established(path, at, towards="pod")
    finish(path, at, got, "pod")
    syn = ip(at.client, at.here) / transport(served.TCP, CLIENT_PORT, TARGETS[served.TCP])
    direct = path.forward(syn, "net", "pod")
    assert is_left_alone(direct, syn)
    back = answer(direct)
    assert is_left_alone(path.forward(back, "pod", "net"), back)
