"""Forged and foreign packets: ICMP errors and redirects about other flows, invalid source addresses, frames
for other hosts, and fragments of another datagram."""

import socket
import sys

import pytest
from scapy.layers.inet import ICMP, UDP
from scapy.layers.inet6 import (
    ICMPv6ND_Redirect,
    ICMPv6NDOptRedirectedHdr,
    ICMPv6PacketTooBig,
    IPv6,
    IPv6ExtHdrFragment,
)
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Packet, Raw

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.netlink import on_link_routes
from ebpfproxy.model.address import Family, Protocol, format_address, parse_address
from tests.kernel.cluster import eventually
from tests.kernel.packet_path import served
from tests.kernel.packet_path.conversation import answer, is_left_alone, request
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, families, protocols, serve
from tests.support.packet_path import REDIRECT, SHOT, PacketPath
from tests.support.packets import HERE, THERE, V4, V6, Places, become, ip, ping, transport

pytestmark = pytest.mark.kernel

OTHER, NO_BRIDGE = "02:00:00:00:00:99", "00:00:00:00:00:00"


# ICMP


def too_big(source: str, destination: str, about: bytes) -> Packet:
    """A "too big" error about the frame `about`."""
    kind = ICMPv6PacketTooBig(mtu=1280) if ":" in destination else ICMP(type=3, code=4, nexthopmtu=1280)
    return ip(source, destination) / kind / Raw(about[14:])


@families
@protocols
def test_an_icmp_error_not_addressed_to_the_quoted_sender_is_left_alone(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """An attacker could forge such errors, and have them forwarded to a client or endpoint of their
    choice."""
    serve(path, at, at.here)
    got = path.forward(request(at, protocol=protocol), "net", "pod")
    back = path.forward(answer(got), "pod", "net")
    strangers = ("192.0.2.77", "8.8.8.8", at.router) if at is V4 else ("2001:db8::77", at.router)
    for stranger in strangers:
        to_endpoint = too_big(at.router, stranger, back.raw)
        assert is_left_alone(path.ingress(to_endpoint), to_endpoint)
        to_client = too_big(at.router, stranger, got.raw)
        assert is_left_alone(path.forward(to_client, "pod", "net"), to_client)
    assert path.ingress(too_big(at.router, at.external, back.raw)).packet.payload.dst == at.here
    right = path.forward(too_big(at.router, at.client, got.raw), "pod", "net")
    assert right.packet.payload.src == at.external


@protocols
def test_an_icmp_error_that_quotes_v4_mapped_addresses_is_left_alone(
    path: PacketPath, protocol: Protocol
) -> None:
    """An IPv4 flow has these addresses in its key."""
    serve(path, V4, V4.here)
    got = path.forward(request(V4, protocol=protocol), "net", "pod")
    path.forward(answer(got), "pod", "net")
    ports = transport(protocol, PORTS[protocol], CLIENT_PORT)
    mapped = f"::ffff:{V4.external}", f"::ffff:{V4.client}"
    quoted = bytes(Ether() / IPv6(src=mapped[0], dst=mapped[1]) / ports)
    for destination in ("2001:db8:55::1", V6.external, *mapped):
        packet = too_big(V6.router, destination, quoted)
        assert is_left_alone(path.ingress(packet), packet)
        assert is_left_alone(path.egress(packet), packet)
    assert "icmp_error" not in path.counted()


def redirect(at: Places, about: bytes, gateway: str = "") -> Packet:
    """A redirect of this node's stack to the client: there is a better route for this frame."""
    if at is V4:
        of_node = ip(at.node, at.client) / ICMP(type=5, code=1, gw=gateway or "192.0.2.77")
        return of_node / Raw(about[14:][:28])
    kind = ICMPv6ND_Redirect(tgt=gateway or "fe80::77", dst=at.there)
    return ip("fe80::1", at.client) / kind / ICMPv6NDOptRedirectedHdr(pkt=about[14:])


def test_a_redirect_of_this_nodes_stack_about_a_flow_is_dropped(path: PacketPath) -> None:
    """The client does not know the endpoint that the route leads to. IPv6 redirects are passed."""
    at = V4
    serve(path, at, at.there)
    post_dnat = path.ingress(request(at, protocol=served.UDP))
    about_it = redirect(at, post_dnat.raw)
    assert path.egress(about_it, came_in="").verdict == SHOT
    other = become(post_dnat.packet, source_port=CLIENT_PORT + 1)
    about_another = redirect(at, other)
    assert is_left_alone(path.egress(about_another, came_in=""), about_another)


@families
def test_a_redirect_that_names_the_gateway_of_on_link_frontends_is_dropped(
    path: PacketPath, at: Places
) -> None:
    """No other machine can use it."""
    gateway = on_link_routes.GATEWAYS[Family.IPV4 if at is V4 else Family.IPV6]
    frame = bytes(request(at))
    assert path.egress(redirect(at, frame, format_address(gateway)), came_in="").verdict == SHOT
    other = redirect(at, frame)
    assert is_left_alone(path.egress(other, came_in=""), other)


INVALID_SOURCES = [
    (V4, "224.0.0.1"),
    (V4, "239.1.2.3"),
    (V4, "240.0.0.1"),
    (V4, "255.255.255.255"),
    (V4, "0.0.0.0"),
    (V4, "127.0.0.1"),
    (V4, "127.9.9.9"),
    (V6, "ff02::1"),
    (V6, "ff0e::7"),
    (V6, "::"),
    (V6, "::1"),
]


@pytest.mark.parametrize(("at", "source"), INVALID_SOURCES, ids=[source for _, source in INVALID_SOURCES])
def test_packets_with_an_invalid_source_are_neither_rejected_nor_answered(
    path: PacketPath, at: Places, source: str
) -> None:
    """An answer would go to all hosts, or to this node (RFC 1122, 3.2.2)."""
    serve(path, at)
    for protocol in PORTS:
        packet = ip(source, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol])
        assert path.ingress(packet).verdict == SHOT
    echo = ping(source, at.cluster)
    assert is_left_alone(path.ingress(echo), echo)
    assert path.ingress(request(at)).verdict == path.ingress(ping(at.client, at.cluster)).verdict == REDIRECT


# Frames


@families
@pytest.mark.parametrize("to", ["02:00:00:00:00:99", "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01"],
                         ids=["another host", "broadcast", "multicast"])  # fmt: skip
@pytest.mark.parametrize("targets", [0, 1], ids=["refused", "served"])
def test_a_frame_that_is_not_for_this_node_opens_no_flow(
    path: PacketPath, at: Places, to: str, targets: int
) -> None:
    """The host that the frame is for gets it, too, and serves or rejects it."""
    serve(path, at, *[at.there] * targets)
    for protocol in PORTS:
        packet = request(at, protocol=protocol)
        packet.dst = to
        assert is_left_alone(path.ingress(packet), packet)
    assert not path.flows()
    assert not path.counted()


@families
@pytest.mark.parametrize(
    ("bridge", "flags", "is_for_node"),
    [(OTHER, 0, True), (THERE, 0, False), (NO_BRIDGE, 0, False), (NO_BRIDGE, abi.DEVICE_SWITCHED, True)],
    ids=["bridge", "another bridge", "no port", "another switch"],
)
@pytest.mark.parametrize(("device", "role"), [("pod", 0), ("net", abi.DEVICE_GUEST)], ids=["pod", "guest"])
def test_a_frame_at_a_port_is_for_this_node_if_it_is_addressed_to_its_bridge(
    path: PacketPath, at: Places, bridge: str, flags: int, is_for_node: bool, device: str, role: int
) -> None:
    """A guest's frames to the network's router pass the bridge. What the router does is not this node's."""
    serve(path, at, at.there)
    path.set_device(device, bridge=bridge, flags=flags | role)
    for protocol in PORTS:
        packet = request(at, protocol=protocol, client=at.pod)
        packet.dst = OTHER
        assert is_left_alone(path.ingress(packet, device), packet) is not is_for_node
    assert bool(path.flows()) is is_for_node


@families
@pytest.mark.parametrize("targets", [0, 1], ids=["refused", "served"])
@pytest.mark.parametrize("ranges", [[], ["192.0.2.0/24", "2001:db8::/64"]], ids=["open", "restricted"])
def test_a_packet_of_a_guest_that_shares_a_device_with_the_node_is_left_alone(
    path: PacketPath, at: Places, targets: int, ranges: list[str]
) -> None:
    """As with macvlan and ipvlan: the packet has no ingress device, as those of the node."""
    serve(path, at, *[at.there] * targets, ranges=ranges)
    guest = "192.0.2.77" if at is V4 else "2001:db8::77"
    for protocol in PORTS:
        packet = request(at, protocol=protocol, client=guest, to=at.balancer)
        assert is_left_alone(path.egress(packet, "net", came_in=""), packet)
        own = request(at, protocol=protocol, client=at.node, to=at.balancer)
        assert not is_left_alone(path.egress(own, "net", came_in=""), own)
    assert all(flow.key["source"] == parse_address(at.node) for flow in path.flows().values())


@families
@pytest.mark.parametrize("targets", [0, 1], ids=["refused", "served"])
def test_a_frame_that_a_bridge_forwards_is_left_alone_at_egress(
    path: PacketPath, at: Places, targets: int
) -> None:
    """The ingress device has no program, as a bridge."""
    serve(path, at, *[at.there] * targets)
    path.maps["devices"].delete(path.indices["pod"].to_bytes(4, sys.byteorder))
    for protocol in PORTS:
        packet = request(at, protocol=protocol, client=at.pod)
        packet.dst = OTHER
        assert is_left_alone(path.egress(packet, "net", came_in="pod"), packet)
    assert not path.counted()


@families
def test_a_frame_with_a_priority_but_without_a_vlan_is_translated(path: PacketPath, at: Places) -> None:
    """IEEE 802.1Q, 6.9: VLAN 0 means no VLAN. Frames of a VLAN are translated on the VLAN's device. The test
    uses a real device, since a test run cannot have a tag."""
    serve(path, at, at.there)
    with path.wire("net") as wire:
        for vlan, port in ((5, CLIENT_PORT + 1), (0, CLIENT_PORT)):
            packet = ip(at.client, at.external) / transport(served.UDP, port, PORTS[served.UDP])
            wire.send(bytes(Ether(src=THERE, dst=HERE) / Dot1Q(vlan=vlan, prio=3) / packet.payload))
        eventually(lambda: bool(path.flows()), "a flow is opened")
    assert {flow.key["source_port"] for flow in path.flows().values()} == {socket.htons(CLIENT_PORT)}


# Fragments


def fragment(at: Places, offset: int, more: bool) -> Packet:
    """A fragment of one datagram with fragments of 64 bytes; `offset` in units of eight bytes."""
    payload = Raw(bytes(UDP(sport=CLIENT_PORT, dport=PORTS[served.UDP], len=128, chksum=0xBEEF)) + bytes(56))
    if offset:
        payload = Raw(bytes(64))
    if at is V4:
        flags = "MF" if more else 0
        return ip(at.client, at.external, id=77, flags=flags, frag=offset, proto=17) / payload
    header = IPv6ExtHdrFragment(id=77, offset=offset, m=more, nh=17)
    return ip(at.client, at.external) / header / payload


@families
@pytest.mark.parametrize(("seconds", "known"), [(25, True), (35, False)])
def test_a_fragment_long_after_the_first_one_is_not_translated(
    path: PacketPath, at: Places, seconds: int, known: bool
) -> None:
    """Ids are reused: after net.ipv4.ipfrag_time the id belongs to another datagram."""
    serve(path, at, at.there)
    path.ingress(fragment(at, 0, True))
    _age_fragments(path, seconds)
    path.counted()
    later = fragment(at, 8, False)
    outcome = path.ingress(later)
    if known:
        assert outcome.packet.payload.dst == at.there
    else:
        assert is_left_alone(outcome, later)
        assert path.counted() == {"fragment_orphan": 1}


def _age_fragments(path: PacketPath, seconds: int) -> None:
    known = list(path.maps["fragments"].items())
    assert known
    for key, value in known:
        *fields, seen = abi.FRAGMENT.unpack(value)
        path.maps["fragments"].update(key, abi.FRAGMENT.pack(*fields, seen - seconds * 10**9))
