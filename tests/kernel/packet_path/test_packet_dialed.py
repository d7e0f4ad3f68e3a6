"""Direct server return on the node that a client dials: which packets it sends to which other node.

The Geneve header itself is not visible in test runs: test_dsr.py has real packets.
"""

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from scapy.layers.inet import ICMP, IP, fragment
from scapy.layers.inet6 import ICMPv6PacketTooBig, IPv6, IPv6ExtHdrFragment, fragment6
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from ebpfproxy.linux.bpf import tc
from ebpfproxy.model.address import Address, Protocol, format_address
from tests.kernel.packet_path.conversation import error, request
from tests.kernel.packet_path.served import (
    CLIENT_PORT,
    PORTS,
    SCTP,
    TARGETS,
    TCP,
    UDP,
    families,
    protocols,
    serve,
)
from tests.support.bpf_place import bpf_place
from tests.support.packet_path import (
    MARK_DONE,
    REDIRECT,
    SHOT,
    UNSPEC,
    Entry,
    Outcome,
    PacketPath,
    packet_path,
)
from tests.support.packets import HERE, THERE, V4, V6, Places, ip, transport

pytestmark = pytest.mark.kernel

DEVICE, MTU = 999, 1406
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # include/uapi/linux/if_tun.h
_ALL = 3  # ETH_P_ALL
NODES = {V4: "192.0.2.20", V6: "2001:db8::20"}


@pytest.fixture
def path(path: PacketPath) -> PacketPath:
    path.set_node(tunnel_device=DEVICE, tunnel_mtu=MTU)
    return path


def serve_there(path: PacketPath, at: Places, *more: str, **fields: Any) -> None:
    """Endpoints on another node that accepts tunneled packets."""
    targets = (at.there, *more)
    serve(path, at, *targets, tunnels=dict.fromkeys(targets, NODES[at]) | {at.here: None}, **fields)


def others_there(at: Places) -> list[str]:
    """Three further endpoints on that node."""
    return [at.there[:-1] + str(number) for number in (6, 7, 8)]


def endpoint_of(entry: Entry) -> str:
    """The address of the endpoint in the entry of a flow."""
    return format_address(Address(entry.value["endpoint"]))


def forwarded(packet: Packet) -> bytes:
    """The packet after one more hop."""
    copy = packet.copy()
    if IP in copy:
        copy[IP].ttl -= 1
        del copy[IP].chksum
    else:
        copy[IPv6].hlim -= 1
    return bytes(copy)


def is_sent(outcome: Outcome, packet: Packet) -> bool:
    return outcome == (REDIRECT, forwarded(packet), MARK_DONE)


def target(path: PacketPath) -> tuple[str, int, str]:
    """Endpoint and node of the only tunneled flow."""
    (entry,) = path.tunneled().values()
    node = format_address(Address(entry.value["node"]))
    return endpoint_of(entry), socket.ntohs(entry.value["endpoint_port"]), node


@families
@protocols
def test_packets_of_a_client_are_sent_unchanged_to_the_node_of_the_endpoint(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve_there(path, at)
    fields: list[dict[str, Any]] = [{"flags": flags} for flags in ("S", "A", "PA", "FA")]
    for each in fields if protocol is TCP else [{}, {}]:
        packet = request(at, protocol, **each)
        assert is_sent(path.ingress(packet), packet)
    assert path.counted() == {"tunneled": 4 if protocol is TCP else 2}
    assert (path.flows(), path.replies()) == ({}, {})
    assert target(path) == (at.there, TARGETS[protocol], NODES[at])


@families
@pytest.mark.parametrize("to", ["external", "balancer", "cluster", "node"])
def test_every_kind_of_frontend_is_tunneled(path: PacketPath, at: Places, to: str) -> None:
    serve_there(path, at)
    port = 30080 if to == "node" else PORTS[TCP]
    packet = ip(at.client, getattr(at, to)) / transport(TCP, CLIENT_PORT, port, flags="S")
    assert is_sent(path.ingress(packet), packet)


@families
def test_a_packet_in_mid_flow_selects_by_the_hash_of_the_client(path: PacketPath, at: Places) -> None:
    """This node got the flow from another one, or has evicted its entry."""
    others = others_there(at)
    serve_there(path, at, *others)
    chosen = {}
    for port in range(40000, 40040):
        assert path.ingress(request(at, port=port)).verdict == REDIRECT
        chosen[port] = target(path)
        path.forget_flows()
        assert path.ingress(request(at, port=port, flags="A")).verdict == REDIRECT
        assert target(path) == chosen[port]
        path.forget_flows()
    assert len(set(chosen.values())) > 1


@families
def test_a_flow_stays_at_its_endpoint_when_endpoints_are_added(path: PacketPath, at: Places) -> None:
    serve_there(path, at)
    ports = range(40000, 40040)
    for port in ports:
        path.ingress(request(at, port=port))
    serve_there(path, at, *others_there(at))
    for port in ports:
        path.ingress(request(at, port=port, flags="A"))
    endpoints = {endpoint_of(each) for each in path.tunneled().values()}
    assert endpoints == {at.there}


@families
def test_a_connection_continues_at_a_removed_endpoint_and_a_new_one_does_not(
    path: PacketPath, at: Places
) -> None:
    """The endpoint may still close its connections."""
    other = at.there[:-1] + "6"
    serve_there(path, at)
    path.ingress(request(at))
    path.ingress(request(at, UDP))
    serve(path, at, other, tunnels={other: NODES[at]})
    path.ingress(request(at, flags="A"))
    path.ingress(request(at, UDP))
    found = {each.key["protocol"]: endpoint_of(each) for each in path.tunneled().values()}
    assert found == {TCP: at.there, UDP: other}
    path.ingress(request(at, flags="S"))
    assert {endpoint_of(each) for each in path.tunneled().values()} == {other}


@families
@protocols
def test_a_node_that_accepts_no_tunneled_packets_any_more_gets_no_new_flow(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """The client reuses its port, or continues to send datagrams. Other endpoints still have a tunnel."""
    others = others_there(at)
    serve_there(path, at, *others)
    ports = range(40000, 40040)
    for port in ports:
        path.ingress(request(at, protocol, port))
    there = [e for e in path.tunneled().values() if endpoint_of(e) == at.there]
    path.counted()
    serve(path, at, at.there, *others, tunnels=dict.fromkeys(others, NODES[at]) | {at.there: None})
    for port in ports:
        path.ingress(request(at, protocol, port))
    assert path.counted()["tunneled"] == len(ports) - len(there)
    flows = [endpoint_of(each) for each in path.flows().values()]
    assert flows == [at.there] * len(there) != []


@families
@protocols
def test_an_endpoint_without_a_tunnel_gets_the_ordinary_translation(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """On this node, and on one that does not announce direct server return."""
    serve(path, at, at.here, at.there, tunnels={at.there: NODES[at]})
    verdicts = {path.ingress(request(at, protocol, port)).verdict for port in range(40000, 40040)}
    assert verdicts == {UNSPEC, REDIRECT}
    flows = {endpoint_of(each) for each in path.flows().values()}
    assert flows == {at.here}
    path.forget_flows()
    serve(path, at, at.there, tunnels={at.there: None})
    got = path.forward(request(at, protocol), "net", "tunnel")
    assert (got.packet.payload.dst, got.packet.payload.src) == (at.there, at.masquerade)
    assert path.tunneled() == {}


@families
def test_a_packet_in_mid_flow_without_a_tunnel_is_left_alone(path: PacketPath, at: Places) -> None:
    serve(path, at, at.here, at.there, tunnels={at.there: NODES[at]})
    packets = [request(at, port=port, flags="A") for port in range(40000, 40040)]
    outcomes = [path.ingress(each) for each in packets]
    left = [o for o, p in zip(outcomes, packets, strict=True) if o == (UNSPEC, bytes(p), 0)]
    assert 0 < len(left) < len(packets)
    assert path.flows() == {}


@families
def test_a_node_without_a_tunnel_device_masquerades(path: PacketPath, at: Places) -> None:
    serve_there(path, at)
    path.set_node()
    assert path.forward(request(at), "net", "tunnel").packet.payload.src == at.masquerade
    packet = request(at, port=CLIENT_PORT + 1, flags="A")
    assert path.ingress(packet) == (UNSPEC, bytes(packet), 0)


@families
@pytest.mark.parametrize("device", ["pod", "net"])
def test_pods_and_nodes_are_not_tunneled(path: PacketPath, at: Places, device: str) -> None:
    """A node may run the endpoint itself. Then it would get its own packet, and keep the reply."""
    serve_there(path, at)
    path.set_tunnel_source(f"{at.client}/{128 if at is V6 else 32}")
    got = path.forward(request(at), device, "tunnel")
    assert got.packet.payload.dst == at.there
    assert path.tunneled() == {}


@families
def test_source_ranges_are_checked(path: PacketPath, at: Places) -> None:
    serve_there(path, at, ranges=["198.51.100.0/24", "2001:db8:99::/64"])
    packet = ip(at.client, at.balancer) / transport(TCP, CLIENT_PORT, PORTS[TCP], flags="S")
    assert is_sent(path.ingress(packet), packet)
    path.counted()
    other = ip(at.router, at.balancer) / transport(TCP, CLIENT_PORT, PORTS[TCP], flags="S")
    assert path.ingress(other).verdict == SHOT
    assert path.counted() == {"source_refused": 1}
    later = ip(at.router, at.balancer) / transport(TCP, CLIENT_PORT, PORTS[TCP], flags="A")
    assert path.ingress(later) == (UNSPEC, bytes(later), 0)


@families
def test_a_packet_at_the_end_of_its_way_is_not_tunneled(path: PacketPath, at: Places) -> None:
    serve_there(path, at)
    packet = request(at)
    packet.payload.setfieldval("hlim" if at is V6 else "ttl", 1)
    assert path.ingress(packet).verdict == UNSPEC
    assert path.tunneled() == {}


@families
def test_fragments_follow_their_first_fragment(path: PacketPath, at: Places) -> None:
    serve_there(path, at)
    datagram = transport(UDP, CLIENT_PORT, PORTS[UDP], bytes(range(200)) * 20)
    if at is V4:
        whole = ip(at.client, at.external) / datagram
        parts = fragment(whole, 1200)  # type: ignore[no-untyped-call]
    else:
        whole = ip(at.client, at.external) / IPv6ExtHdrFragment(id=7) / datagram
        pieces = fragment6(whole[IPv6], 1280)  # type: ignore[no-untyped-call]
        parts = [Ether(bytes(whole)[:14] + bytes(each)) for each in pieces]
    assert len(parts) > 2
    for part in parts:
        assert is_sent(path.ingress(part), part)
    assert path.counted()["tunneled"] == len(parts)


def large(at: Places, protocol: Protocol, length: int, **fields: Any) -> Packet:
    """A packet of this length."""
    packet = ip(at.client, at.external, **fields) / transport(protocol, CLIENT_PORT, PORTS[protocol], b"")
    return packet / Raw(bytes(length - len(packet.payload)))


@families
@pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
def test_a_client_learns_the_mtu_of_the_tunnel(path: PacketPath, at: Places, protocol: Protocol) -> None:
    serve_there(path, at)
    fields = {"flags": "DF"} if at is V4 else {}
    packet = large(at, protocol, MTU + 1, **fields)
    got = path.ingress(packet)
    assert (got.verdict, got.mark) == (REDIRECT, MARK_DONE)
    quoted = bytes(packet)[14:][: (20 if at is V4 else 40) + 8]
    wanted: Packet = Ether(src=HERE, dst=THERE)
    if at is V4:
        wanted /= IP(src=at.external, dst=at.client, id=0) / ICMP(type=3, code=4, nexthopmtu=MTU)
    else:
        wanted /= IPv6(src=at.external, dst=at.client) / ICMPv6PacketTooBig(mtu=MTU)
    assert got.raw == bytes(wanted / Raw(quoted))
    assert path.counted() == {"tunnel_too_big": 1}
    fits = large(at, protocol, MTU, **fields)
    assert is_sent(path.ingress(fits), fits)


def test_an_ipv6_packet_of_the_minimum_mtu_is_always_tunneled(path: PacketPath) -> None:
    """No smaller MTU can be announced (RFC 8201, 4)."""
    path.set_node(tunnel_device=DEVICE, tunnel_mtu=1200)
    serve_there(path, V6)
    fits = large(V6, UDP, 1280)
    assert is_sent(path.ingress(fits), fits)
    path.counted()
    assert path.ingress(large(V6, UDP, 1281)).packet[ICMPv6PacketTooBig].mtu == 1280
    assert path.counted() == {"tunnel_too_big": 1}


def test_a_packet_that_may_be_fragmented_is_tunneled(path: PacketPath) -> None:
    serve_there(path, V4)
    packet = large(V4, UDP, MTU + 1)
    assert is_sent(path.ingress(packet), packet)


@families
@pytest.mark.parametrize("protocol", [TCP, UDP, SCTP], ids=["tcp", "udp", "sctp"])
@pytest.mark.parametrize("cached", [True, False])
def test_an_icmp_error_about_a_reply_is_sent_to_the_endpoints_node(
    path: PacketPath, at: Places, protocol: Protocol, cached: bool
) -> None:
    serve_there(path, at, *others_there(at))
    if cached:
        path.ingress(request(at, protocol))
    before = path.tunneled()
    reply = ip(at.external, at.client) / transport(protocol, PORTS[protocol], CLIENT_PORT)
    packet = error("too big", at.router, at.external, bytes(reply))
    assert is_sent(path.ingress(packet), packet)
    assert path.tunneled() == before


def test_a_client_that_is_its_own_endpoint_is_masqueraded(path: PacketPath) -> None:
    serve_there(path, V4)
    packet = request(V4, client=V4.there)
    assert path.forward(packet, "net", "tunnel").packet.payload.src == V4.masquerade


def test_session_affinity_selects_the_endpoint(path: PacketPath) -> None:
    serve_there(path, V4, *others_there(V4), affinity=600)
    for port in range(40000, 40020):
        path.ingress(request(V4, port=port))
    assert len({each.value["endpoint"] for each in path.tunneled().values()}) == 1


def test_without_endpoints_the_client_is_rejected(path: PacketPath) -> None:
    serve_there(path, V4)
    serve(path, V4, tunnels={})
    assert path.ingress(request(V4)).verdict == REDIRECT
    assert path.counted() == {"packet_rejected": 1}


@families
def test_a_packet_of_a_device_without_ethernet_gets_a_header(at: Places) -> None:
    """The Geneve device encapsulates Ethernet frames. Here another device sends the frame as it is."""
    with bpf_place() as place, packet_path(place, at_devices=True) as path, _tun() as (tun, ifindex):
        path.set_node(tunnel_device=path.indices["tunnel"], tunnel_mtu=MTU)
        serve_there(path, at)
        tc.attach(ifindex, tc.Side.INGRESS, path.program("from_any_l3"))
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) as receiver:
            receiver.bind(("tunnel-peer", _ALL))
            receiver.settimeout(20)
            packet = request(at)
            os.write(tun, bytes(packet)[14:])
            wanted = bytes(12) + forwarded(packet)[12:]
            while receiver.recv(2048) != wanted:
                pass


@contextlib.contextmanager
def _tun() -> Iterator[tuple[int, int]]:
    """A tun device in this namespace: its file descriptor and ifindex."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14x", b"tun0", _IFF_TUN | _IFF_NO_PI))
        subprocess.run(["ip", "link", "set", "tun0", "up"], check=True)
        yield tun, socket.if_nametoindex("tun0")
    finally:
        os.close(tun)
