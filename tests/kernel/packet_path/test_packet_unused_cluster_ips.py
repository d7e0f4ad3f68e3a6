"""First packets that leave the node for a ClusterIP and port that no Service has."""

from typing import Any

import pytest
from scapy.layers.inet import ICMP
from scapy.layers.inet6 import ICMPv6DestUnreach
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP, SCTPChunkAbort, SCTPChunkInit
from scapy.packet import Packet

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path import served
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, families, protocols, serve
from tests.support import headers
from tests.support.packet_path import MARK_DONE, REDIRECT, SHOT, UNSPEC, Outcome, PacketPath
from tests.support.packets import THERE, V4, V6, Places, ip, ping, transport

pytestmark = pytest.mark.kernel

CIDRS = "10.96.0.0/12", "fd00:10:96::/112"
UNUSED = {V4: "10.99.7.7", V6: "fd00:10:96::7777"}
OUTSIDE = {V4: "10.112.0.1", V6: "fd00:10:96::1:0"}


def first(source: str, address: str, protocol: Protocol = served.TCP, port: int = 0, **fields: Any) -> Packet:
    port = port or PORTS[protocol]
    if protocol is served.SCTP:
        init = SCTPChunkInit(init_tag=7)
        return ip(source, address) / SCTP(sport=CLIENT_PORT, dport=port) / init
    return ip(source, address) / transport(protocol, CLIENT_PORT, port, **fields)


def passes(outcome: Outcome, packet: Packet) -> bool:
    return outcome == (UNSPEC, bytes(packet), 0)


def rejects(outcome: Outcome, protocol: Protocol, address: str) -> bool:
    """Whether the address answers, and the answer is sent to the ingress side of the device."""
    packet = outcome.packet
    assert (outcome.verdict, outcome.mark, packet.payload.src) == (REDIRECT, 0, address)
    assert headers.is_good(outcome.raw)
    if protocol is served.UDP:
        return ICMP in packet or ICMPv6DestUnreach in packet
    return SCTPChunkAbort in packet if protocol is served.SCTP else str(packet.payload.payload.flags) == "RA"


@families
@protocols
@pytest.mark.parametrize("came_in", ["pod", "net", "tunnel", ""])
def test_they_are_rejected_wherever_they_come_from(
    path: PacketPath, at: Places, protocol: Protocol, came_in: str
) -> None:
    path.set_service_cidrs(*CIDRS)
    source = {"pod": at.pod, "net": at.client, "tunnel": at.there, "": at.node}[came_in]
    outcome = path.egress(first(source, UNUSED[at], protocol), came_in=came_in)
    assert rejects(outcome, protocol, UNUSED[at])
    assert path.counted() == {"cluster_ip_unused": 1}
    assert not path.flows()


@families
@protocols
def test_a_port_that_the_service_does_not_have_is_rejected_and_one_that_it_has_is_not(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """No program saw the packet at ingress, so the agent attaches one."""
    path.set_service_cidrs("10.96.0.0/12", "fd00:96::/112")
    serve(path, at, at.there)
    packet = first(at.pod, at.cluster, protocol)
    assert passes(path.egress(packet, came_in="pod"), packet)
    path.maps["devices"].delete(path.indices["pod"].to_bytes(4, "little"))
    assert passes(path.egress(packet, came_in="pod"), packet)
    assert path.counted() == {"bypassed": 1}
    assert rejects(path.egress(first(at.pod, at.cluster, protocol, 81), came_in="pod"), protocol, at.cluster)
    assert path.counted() == {"cluster_ip_unused": 1}


@families
@protocols
def test_addresses_outside_the_ranges_and_packets_that_open_nothing_pass(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """With two ranges, the network around both contains addresses of neither."""
    path.set_service_cidrs(*CIDRS, "10.1.0.0/16", "fd00:10:90::/112")
    packets = [first(at.pod, OUTSIDE[at], protocol), ping(at.pod, UNUSED[at])]
    if protocol is served.TCP:
        packets.append(first(at.pod, UNUSED[at], flags="A"))
    for packet in packets:
        for came_in in ("pod", "net"):
            assert passes(path.egress(packet, came_in=came_in), packet)
    assert path.counted() == {}


@families
@protocols
def test_packets_that_the_stack_of_the_node_has_not_routed_pass(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """A frame that a bridge forwards is for another host, and so may be one of a macvlan guest."""
    path.set_service_cidrs(*CIDRS)
    bridged = first(at.pod, UNUSED[at], protocol)
    bridged[Ether].dst = THERE
    assert passes(path.egress(bridged, came_in="pod"), bridged)
    guest = first(at.client, UNUSED[at], protocol)
    assert passes(path.egress(guest, came_in=""), guest)
    assert path.counted() == {}


@families
@protocols
def test_a_pod_or_the_node_may_have_an_address_of_a_range(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    path.set_service_cidrs(*CIDRS)
    packet = first(at.client, UNUSED[at], protocol)
    path.set_device("pod", flags=abi.DEVICE_POD)
    assert passes(path.egress(packet, "pod", came_in="net"), packet)
    path.set_local(UNUSED[at], node_ports=False)
    assert passes(path.egress(packet, came_in="pod"), packet)


@families
def test_a_marked_packet_passes(path: PacketPath, at: Places) -> None:
    """A program of this mode has translated it at another device: an endpoint has such an address."""
    path.set_service_cidrs(*CIDRS)
    packet = first(at.pod, UNUSED[at])
    assert path.egress(packet, mark=MARK_DONE, came_in="pod").verdict == UNSPEC


@families
def test_no_icmp_error_is_sent_over_the_rate(path: PacketPath, at: Places) -> None:
    path.set_node(icmp_rate=0)
    path.set_service_cidrs(*CIDRS)
    assert path.egress(first(at.pod, UNUSED[at], served.UDP)).verdict == SHOT
    assert path.counted() == {"cluster_ip_unused": 1, "icmp_limited": 1}
