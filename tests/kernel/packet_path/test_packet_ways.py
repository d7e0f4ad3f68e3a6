"""Packets that bypass the node's stack: both translations in one step, and host-originated packets."""

from typing import Any

import pytest
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path import served
from tests.kernel.packet_path.served import (
    CLIENT_PORT,
    PORTS,
    TARGETS,
    families,
    protocols,
    serve,
)
from tests.support.packet_path import MARK_DONE, MARK_STRIPPED, REDIRECT, SHOT, UNSPEC, PacketPath
from tests.support.packets import V6, Places, become, ip, transport

pytestmark = pytest.mark.kernel


def with_decremented_ttl(frame: bytes) -> bytes:
    """The frame with a decremented TTL, and with scapy's checksum."""
    packet = Ether(frame)
    if IPv6 in packet:
        packet.payload.hlim -= 1
    else:
        packet.payload.ttl -= 1
        del packet.payload.chksum
    return bytes(packet)


@families
@protocols
def test_a_packet_that_bypasses_the_stack_is_translated_and_its_ttl_decremented(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    path.set_node(abi.NODE_REDIRECT)
    serve(path, at, at.there)
    request = ip(at.client, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    outcome = path.ingress(request)
    assert (outcome.verdict, outcome.mark) == (REDIRECT, MARK_DONE)
    arrived = become(request, at.masquerade, at.there, destination_port=TARGETS[protocol])
    assert outcome.raw == with_decremented_ttl(arrived)
    fields: dict[str, Any] = {"flags": "SA"} if protocol is served.TCP else {}
    reply = ip(at.external, at.client) / transport(protocol, PORTS[protocol], CLIENT_PORT, **fields)
    answer = become(reply, at.there, at.masquerade, source_port=TARGETS[protocol])
    back = path.ingress(answer, "tunnel")
    assert (back.verdict, back.mark) == (REDIRECT, MARK_DONE)
    assert back.raw == with_decremented_ttl(bytes(reply))
    assert path.counted()["redirected"] == 2


@families
@protocols
def test_a_local_pods_reply_bypasses_the_stack_only_from_its_own_device(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """A packet with the endpoint's source from another device is not translated."""
    path.set_node(abi.NODE_REDIRECT)
    serve(path, at, at.here)
    request = ip(at.client, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    path.ingress(request)
    fields: dict[str, Any] = {"flags": "SA"} if protocol is served.TCP else {}
    reply = ip(at.external, at.client) / transport(protocol, PORTS[protocol], CLIENT_PORT, **fields)
    answer = become(reply, at.here, at.client, source_port=TARGETS[protocol])
    outside = path.ingress(answer)
    assert (outside.verdict, outside.raw) == (UNSPEC, bytes(answer))
    back = path.ingress(answer, "pod")
    assert (back.verdict, back.mark, back.raw) == (REDIRECT, MARK_DONE, with_decremented_ttl(bytes(reply)))


@families
def test_a_packet_with_an_expiring_ttl_is_left_to_the_stack(path: PacketPath, at: Places) -> None:
    """The stack sends "time exceeded" to the client, so that traceroute through a Service works."""
    path.set_node(abi.NODE_REDIRECT)
    serve(path, at, at.there)
    life = {"hlim": 1} if at is V6 else {"ttl": 1}
    request = ip(at.client, at.external, **life) / transport(served.UDP, CLIENT_PORT, PORTS[served.UDP])
    outcome = path.ingress(request)
    assert outcome.verdict == UNSPEC
    assert outcome.raw == become(request, destination=at.there, destination_port=TARGETS[served.UDP])


@families
def test_packets_of_external_clients_to_local_endpoints_bypass_the_stack(
    path: PacketPath, at: Places
) -> None:
    path.set_node(abi.NODE_REDIRECT)
    serve(path, at, at.here)
    request = ip(at.client, at.external) / transport(served.TCP, CLIENT_PORT, PORTS[served.TCP])
    outcome = path.ingress(request)
    assert outcome.verdict == REDIRECT
    assert outcome.raw == with_decremented_ttl(
        become(request, destination=at.here, destination_port=TARGETS[served.TCP])
    )


@families
def test_packets_of_pods_to_local_endpoints_pass_the_stack(path: PacketPath, at: Places) -> None:
    path.set_node(abi.NODE_REDIRECT)
    serve(path, at, at.here)
    request = ip(at.pod, at.cluster) / transport(served.TCP, CLIENT_PORT, PORTS[served.TCP])
    outcome = path.ingress(request, "pod")
    assert outcome.verdict == UNSPEC
    assert outcome.raw == become(request, destination=at.here, destination_port=TARGETS[served.TCP])


@families
@protocols
@pytest.mark.parametrize("where", ["here", "there"])
def test_a_host_originated_packet_leaves_by_the_route_to_the_endpoint(
    path: PacketPath, at: Places, protocol: Protocol, where: str
) -> None:
    """The packet is of a socket that no hook handled. The reply returns to its source address and port."""
    path.set_node(inner=path.indices["net"])
    target, out = getattr(at, where), {"here": "pod", "there": "tunnel"}[where]
    serve(path, at, target)
    request = ip(at.node, at.cluster) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    outcome = path.egress(request, came_in="")
    source = at.gateway if where == "here" else at.masquerade
    assert (outcome.verdict, outcome.mark) == (REDIRECT, MARK_DONE)
    assert outcome.raw == become(request, source, target, destination_port=TARGETS[protocol])
    reply = ip(at.cluster, at.node) / transport(protocol, PORTS[protocol], CLIENT_PORT)
    answer = become(reply, target, source, source_port=TARGETS[protocol])
    back = path.ingress(answer, out)
    assert back.verdict == REDIRECT
    assert back.raw[14:] == bytes(reply)[14:], "the Ethernet header is that of the reinjection device"


@families
def test_without_a_route_to_the_endpoint_a_host_originated_packet_is_dropped(
    path: PacketPath, at: Places
) -> None:
    target = "fd00:7::1" if at is V6 else "127.0.0.9"
    serve(path, at, target)
    request = ip(at.node, at.cluster) / transport(served.UDP, CLIENT_PORT, PORTS[served.UDP])
    outcome = path.egress(request, came_in="")
    assert outcome.verdict in (SHOT, REDIRECT)


@families
@protocols
def test_the_device_of_a_pod_that_bypasses_the_programs_is_recorded(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """The agent then attaches a program to the device. Until then the packet is not translated."""
    serve(path, at, at.there)
    path.maps["devices"].delete(path.indices["pod"].to_bytes(4, "little"))
    request = ip(at.pod, at.cluster) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    assert path.egress(request, came_in="pod") == (UNSPEC, bytes(request), 0)
    assert path.counted() == {"bypassed": 1}
    assert dict(path.maps["bypassing"].items()).keys() == {path.indices["pod"].to_bytes(4, "little")}


@families
def test_a_header_before_the_packet_from_a_tunnel_is_removed_by_a_redirect(
    path: PacketPath, at: Places
) -> None:
    serve(path, at, at.here)
    request = ip(at.client, at.external) / transport(served.UDP, CLIENT_PORT, PORTS[served.UDP])
    first = path.ingress(request, "tunnel", program="from_any_l3")
    assert first == (REDIRECT, bytes(request), MARK_STRIPPED)


@families
def test_a_packet_that_kept_its_header_after_the_redirect_is_left_alone(path: PacketPath, at: Places) -> None:
    serve(path, at, at.here)
    request = ip(at.client, at.external) / transport(served.UDP, CLIENT_PORT, PORTS[served.UDP])
    again = path.ingress(request, "tunnel", MARK_STRIPPED, program="from_any_l3")
    assert again[:2] == (UNSPEC, bytes(request))
    assert not path.flows()
