"""Direct server return on the node of the endpoint: tunneled packets become packets of the device that leads
to the client, and the endpoint's replies go to the client."""

import subprocess
from typing import Any

import pytest
from scapy.layers.inet import TCP as TcpHeader
from scapy.layers.inet import fragment
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path.conversation import answer, error, request
from tests.kernel.packet_path.served import (
    CLIENT_PORT,
    NODE_PORTS,
    PORTS,
    TARGETS,
    TCP,
    UDP,
    families,
    protocols,
    serve,
)
from tests.support.packet_path import (
    MARK_RECEIVED,
    REDIRECT,
    SHOT,
    TUNNEL_NETWORK,
    UNSPEC,
    Outcome,
    PacketPath,
)
from tests.support.packets import HERE, V4, V6, Places, become, ip, transport

pytestmark = pytest.mark.kernel

DEVICE, MTU = 999, 1406
SENDERS = {V4: "192.0.2.20", V6: "2001:db8::20"}
NEIGHBOR = "02:00:00:00:00:33"
FAR = "192.0.2.99"  # accepted from no network


@pytest.fixture
def path(path: PacketPath) -> PacketPath:
    path.set_node(tunnel_device=DEVICE, tunnel_mtu=MTU)
    path.set_tunnel_source("192.0.2.20/32")
    path.set_tunnel_source("2001:db8::20/128")
    return path


def serve_here(path: PacketPath, at: Places, **fields: Any) -> None:
    """An endpoint on this node, and one on another node."""
    serve(path, at, at.here, at.there, tunnels={at.there: SENDERS[at]}, **fields)


def receive(path: PacketPath, at: Places, packet: Packet, protocol: Protocol = TCP, **option: Any) -> Outcome:
    """The packet arrives in a tunnel, for the endpoint on this node unless `option` has another."""
    given: dict[str, Any] = {"sender": SENDERS[at], "endpoint": at.here, "port": TARGETS[protocol]} | option
    return path.receive(packet, given.pop("sender"), given.pop("endpoint"), given.pop("port"), **given)


def enter(path: PacketPath, got: Outcome) -> Outcome:
    """What the device that leads to the client hands to the stack, and the stack to the pod."""
    assert (got.verdict, got.mark) == (REDIRECT, MARK_RECEIVED)
    before = path.ingress(got.raw, "net", got.mark)
    assert before == (UNSPEC, got.raw, 0)
    after = path.egress(before.raw, "pod", came_in="net")
    assert after.raw == got.raw
    return after


@families
@protocols
def test_a_tunneled_packet_reaches_the_endpoint_and_the_reply_the_client(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve_here(path, at)
    packet = request(at, protocol)
    got = enter(path, receive(path, at, packet, protocol))
    assert got.raw == become(packet, destination=at.here, destination_port=TARGETS[protocol])
    assert path.counted() == {"tunnel_received": 1, "packet_new": 1}
    reply = answer(got)
    back = path.forward(reply, "pod", "net")
    assert back.verdict == UNSPEC
    assert back.raw == become(reply, source=at.external, source_port=PORTS[protocol])
    (entry,) = path.flows().values()
    assert entry.value["flags"] == abi.FLOW_DSR
    (entry,) = path.replies().values()
    assert entry.value["device"] == path.indices["net"]


@families
def test_a_received_frame_comes_from_the_next_hop_to_the_client(path: PacketPath, at: Places) -> None:
    """The tunneled frame has the Ethernet addresses of the sender's network. If the neighbor is not known, it
    keeps them.
    """
    serve_here(path, at)
    packet = request(at)
    known = f"ip neigh replace {at.client} lladdr {NEIGHBOR} dev net nud permanent"
    subprocess.run(known.split(), check=True)
    try:
        got = enter(path, receive(path, at, packet))
    finally:
        subprocess.run(["ip", "neigh", "del", at.client, "dev", "net"], check=True)
    assert (got.packet.dst, got.packet.src) == (HERE, NEIGHBOR)
    assert got.raw[12:] == become(packet, destination=at.here, destination_port=TARGETS[TCP])[12:]


def test_tunneled_packets_and_replies_are_counted_by_direction(path: PacketPath) -> None:
    serve_here(path, V4)
    before = path.traffic()
    got = enter(path, receive(path, V4, request(V4)))
    path.forward(answer(got), "pod", "net")
    receive(path, V4, request(V4, flags="A"))
    size = len(bytes(request(V4))) - 14
    assert [b - a for a, b in zip(before, path.traffic(), strict=True)] == [1, 2, 2 * size, 1, size]


@families
def test_a_connection_is_established_and_ends(path: PacketPath, at: Places) -> None:
    serve_here(path, at)
    got = enter(path, receive(path, at, request(at)))
    path.forward(answer(got), "pod", "net")
    receive(path, at, request(at, flags="A"))
    (entry,) = path.flows().values()
    assert not entry.value["half_open"]
    path.forward(answer(got, flags="FA"), "pod", "net")
    receive(path, at, request(at, flags="FA"))
    path.forward(answer(got, flags="A"), "pod", "net")
    (entry,) = path.flows().values()
    assert entry.value["flags"] == abi.FLOW_DSR | abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN
    path.counted()
    receive(path, at, request(at))
    assert path.counted() == {"tunnel_received": 1, "packet_new": 1}


@families
@pytest.mark.parametrize("flags", ["A", "PA", "FA", "R", "SA"])
def test_any_packet_opens_a_flow(path: PacketPath, at: Places, flags: str) -> None:
    """The endpoint ends a connection that it does not know."""
    serve_here(path, at)
    packet = request(at, flags=flags)
    got = enter(path, receive(path, at, packet))
    assert got.raw == become(packet, destination=at.here, destination_port=TARGETS[TCP])
    reset = answer(got, flags="R")
    back = path.forward(reset, "pod", "net")
    assert back.raw == become(reset, source=at.external, source_port=PORTS[TCP])
    (entry,) = path.flows().values()
    assert entry.value["half_open"]
    assert entry.value["flags"] == abi.FLOW_DSR | abi.FLOW_RESET


@families
def test_an_existing_flow_wins_over_the_choice_of_the_sender(path: PacketPath, at: Places) -> None:
    """The sender may have lost its cache while endpoints changed."""
    other = at.here[:-1] + "6"
    serve(path, at, at.here, other, tunnels={})
    receive(path, at, request(at))
    got = receive(path, at, request(at, flags="A"), endpoint=other)
    assert got.packet.payload.dst == at.here
    assert path.counted()["packet_new"] == 1


@families
def test_a_flow_that_the_client_opened_at_this_node_continues_in_the_tunnel(
    path: PacketPath, at: Places
) -> None:
    """And back, when the network moves the client's packets to another node and back."""
    serve(path, at, at.here, tunnels={})
    path.forward(request(at), "net", "pod")
    later = request(at, flags="A")
    translated = become(later, destination=at.here, destination_port=TARGETS[TCP])
    assert enter(path, receive(path, at, later)).raw == translated
    assert path.forward(later, "net", "pod").raw == translated
    assert path.counted()["packet_new"] == 1


@families
def test_a_masqueraded_flow_is_replaced(path: PacketPath, at: Places) -> None:
    """Its endpoint is on another node, but tunneled packets only reach endpoints on this node."""
    path.set_node()
    serve(path, at, at.there)
    path.forward(request(at), "net", "tunnel")
    path.set_node(tunnel_device=DEVICE, tunnel_mtu=MTU)
    serve_here(path, at)
    got = enter(path, receive(path, at, request(at)))
    assert got.packet.payload.dst == at.here
    (entry,) = path.flows().values()
    assert entry.value["flags"] == abi.FLOW_DSR


@families
def test_packets_of_unknown_senders_are_dropped(path: PacketPath, at: Places) -> None:
    serve_here(path, at)
    for sender in (FAR, "2001:db8::99", "198.51.100.7"):
        assert receive(path, at, request(at), sender=sender).verdict == SHOT
    assert path.counted() == {"tunnel_refused": 3}
    assert (path.flows(), path.replies()) == ({}, {})


@families
def test_packets_of_another_virtual_network_are_dropped(path: PacketPath, at: Places) -> None:
    serve_here(path, at)
    for network in 0, TUNNEL_NETWORK + 1, TUNNEL_NETWORK << 16, 0xFFFFFF:
        assert receive(path, at, request(at), network=network).verdict == SHOT, network
    assert path.counted() == {"tunnel_refused": 4}
    assert (path.flows(), path.replies()) == ({}, {})


@pytest.mark.parametrize(
    "option",
    [{"option_class": 0x0102}, {"type": 2}, {"version": 2}, {"length": 4}],
    ids=["class", "type", "version", "length"],
)
def test_packets_with_another_option_are_dropped(path: PacketPath, option: dict[str, int]) -> None:
    serve_here(path, V4)
    assert receive(path, V4, request(V4), TCP, **option).verdict == SHOT
    assert path.counted() == {"tunnel_refused": 1}


@families
def test_only_endpoints_on_this_node_get_packets(path: PacketPath, at: Places) -> None:
    """No packet is tunneled twice, and the sender cannot reach what is no endpoint of the Service."""
    serve_here(path, at)
    for endpoint, port in ((at.there, 8080), (at.pod, 8080), (at.here, 8081), (at.here, 5353)):
        assert receive(path, at, request(at), endpoint=endpoint, port=port).verdict == SHOT
    unserved = ip(at.client, at.external) / transport(TCP, CLIENT_PORT, 81, flags="S")
    assert receive(path, at, unserved).verdict == SHOT
    assert path.counted() == {"tunnel_no_endpoint": 5}
    assert path.flows() == {}


@families
def test_a_service_without_direct_server_return_gets_no_tunneled_packets(
    path: PacketPath, at: Places
) -> None:
    serve(path, at, at.here)
    assert receive(path, at, request(at)).verdict == SHOT
    assert path.counted() == {"tunnel_no_endpoint": 1}


@families
def test_source_ranges_are_checked_again(path: PacketPath, at: Places) -> None:
    serve_here(path, at, ranges=["198.51.100.0/24", "2001:db8:99::/64"])
    packet = ip(at.client, at.balancer) / transport(TCP, CLIENT_PORT, PORTS[TCP], flags="S")
    assert receive(path, at, packet).verdict == REDIRECT
    path.counted()
    other = ip(at.router, at.balancer) / transport(TCP, CLIENT_PORT, PORTS[TCP], flags="S")
    assert receive(path, at, other).verdict == SHOT
    assert path.counted() == {"source_refused": 1}


@families
def test_a_node_port_of_the_sender_is_served(path: PacketPath, at: Places) -> None:
    """Its address belongs to no device of this node. The client gets replies from it."""
    serve_here(path, at)
    packet = ip(at.client, SENDERS[at]) / transport(TCP, CLIENT_PORT, NODE_PORTS[TCP], flags="S")
    got = enter(path, receive(path, at, packet))
    assert got.packet.payload.dst == at.here
    back = path.forward(answer(got), "pod", "net").packet
    assert (back.payload.src, back.sport) == (SENDERS[at], NODE_PORTS[TCP])


@families
def test_what_is_no_packet_of_a_service_is_dropped(path: PacketPath, at: Places) -> None:
    serve_here(path, at)
    echo = ip(at.client, at.external) / transport(UDP, 1, 9)
    assert receive(path, at, echo, UDP).verdict == SHOT
    truncated = bytes(request(at))[: 14 + (40 if at is V6 else 20) + 10]
    assert path.receive(truncated, SENDERS[at], at.here, 8080).verdict == SHOT
    arp = b"\xff" * 12 + b"\x08\x06" + bytes(46)
    assert path.receive(arp, SENDERS[at], at.here, 8080).verdict == SHOT
    assert path.flows() == {}


@families
@protocols
def test_an_icmp_error_about_a_reply_reaches_the_endpoint(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve_here(path, at)
    got = enter(path, receive(path, at, request(at, protocol), protocol))
    reply = answer(got)
    back = path.forward(reply, "pod", "net")
    about = error("too big", at.router, at.external, back.raw, 48)
    received = receive(path, at, about, protocol)
    assert (received.verdict, received.mark) == (REDIRECT, MARK_RECEIVED)
    assert received.raw == bytes(error("too big", at.client, at.here, bytes(reply), 48))


@families
def test_an_icmp_error_about_no_flow_is_dropped(path: PacketPath, at: Places) -> None:
    serve_here(path, at)
    reply = ip(at.external, at.client) / transport(TCP, PORTS[TCP], CLIENT_PORT)
    about = error("too big", at.router, at.external, bytes(reply))
    assert receive(path, at, about).verdict == SHOT
    assert path.counted() == {"tunnel_no_endpoint": 1}


def with_options(packet: Packet, options: list[Any]) -> Packet:
    packet[TcpHeader].options = options
    return packet


def mss_of(packet: Packet) -> int:
    return int(dict(packet[TcpHeader].options)["MSS"])


@families
@pytest.mark.parametrize(
    "options",
    [
        [("MSS", 1460), ("SAckOK", b""), ("Timestamp", (1, 2)), ("NOP", None), ("WScale", 7)],
        [("NOP", None), ("MSS", 1460), ("EOL", None)],
        [("SAckOK", b""), ("NOP", None), ("WScale", 7), ("MSS", 1460)],
    ],
    ids=["first", "odd offset", "last"],
)
def test_the_endpoint_announces_segments_that_fit_the_tunnel(
    path: PacketPath, at: Places, options: list[Any]
) -> None:
    serve_here(path, at)
    got = enter(path, receive(path, at, request(at)))
    reply = with_options(answer(got), options)
    back = path.forward(reply, "pod", "net")
    wanted = MTU - (60 if at is V6 else 40)
    expected = with_options(
        answer(got), [("MSS", wanted) if name == "MSS" else (name, value) for name, value in options]
    )
    assert mss_of(back.packet) == wanted
    assert back.raw == become(expected, source=at.external, source_port=PORTS[TCP])


@families
@pytest.mark.parametrize("options", [[("MSS", 536)], [("SAckOK", b"")], []], ids=["small", "other", "none"])
def test_a_small_segment_size_is_not_changed(path: PacketPath, at: Places, options: list[Any]) -> None:
    serve_here(path, at)
    got = enter(path, receive(path, at, request(at)))
    reply = with_options(answer(got), options)
    back = path.forward(reply, "pod", "net")
    assert back.raw == become(reply, source=at.external, source_port=PORTS[TCP])


@families
def test_other_segments_and_connections_are_not_changed(path: PacketPath, at: Places) -> None:
    serve_here(path, at)
    got = enter(path, receive(path, at, request(at)))
    path.forward(answer(got), "pod", "net")
    data = with_options(answer(got, flags="A"), [("MSS", 1460)])
    back = path.forward(data, "pod", "net")
    assert back.raw == become(data, source=at.external, source_port=PORTS[TCP])
    serve(path, at, at.here)
    got = path.forward(request(at, port=CLIENT_PORT + 1), "net", "pod")
    reply = with_options(answer(got), [("MSS", 1460)])
    back = path.forward(reply, "pod", "net")
    assert back.raw == become(reply, source=at.external, source_port=PORTS[TCP])


@families
def test_without_a_device_to_the_client_the_packet_is_dropped(path: PacketPath, at: Places) -> None:
    """A device without programs would not translate the replies."""
    serve_here(path, at)
    path.maps["devices"].delete(path.indices["net"].to_bytes(4, "little"))
    assert receive(path, at, request(at)).verdict == SHOT
    assert path.counted() == {"tunnel_no_device": 1}
    assert path.flows() == {}


def test_fragments_reach_the_endpoint(path: PacketPath) -> None:
    serve_here(path, V4)
    whole = ip(V4.client, V4.external) / transport(UDP, CLIENT_PORT, PORTS[UDP], bytes(range(200)) * 20)
    for part in fragment(whole, 1200):  # type: ignore[no-untyped-call]
        got = receive(path, V4, part, UDP)
        assert (got.verdict, got.packet.payload.dst) == (REDIRECT, V4.here)
    assert IPv6 not in got.packet
    assert path.counted() == {"tunnel_received": 4, "packet_new": 1}
