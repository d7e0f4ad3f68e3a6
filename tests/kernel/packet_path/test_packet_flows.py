"""Flow entries: masquerade ports, establishment, lost entries, ends and timeouts of flows, affinity."""

import socket
from collections.abc import Iterator
from socket import htons
from typing import Any

import pytest
from scapy.packet import Packet

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.model.address import Address, Protocol, format_address, parse_address
from tests.kernel.packet_path import served
from tests.kernel.packet_path.conversation import NEXT, SEARCHES, answer, established, is_left_alone, request
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, TARGETS, UDP, families, protocols, serve
from tests.support import headers, xdp_path
from tests.support.packet_path import REDIRECT, SHOT, SIZES, UNSPEC, Entry, Outcome, PacketPath
from tests.support.packets import V4, V6, Places, become, ip, transport

pytestmark = pytest.mark.kernel


# Masquerade ports


@families
@protocols
def test_the_clients_port_is_kept_if_it_is_free(path: PacketPath, at: Places, protocol: Protocol) -> None:
    serve(path, at, at.there)
    assert path.forward(request(at, protocol), "net", "tunnel").packet.sport == CLIENT_PORT


@families
@protocols
def test_two_clients_with_the_same_port_get_different_masquerade_ports(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.there)
    other = ip(at.router, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    first = path.forward(request(at, protocol), "net", "tunnel")
    second = path.forward(other, "net", "tunnel")
    assert first.packet.sport == CLIENT_PORT != second.packet.sport
    assert second.raw == become(other, at.masquerade, at.there, source_port=second.packet.sport,
                                destination_port=TARGETS[protocol])  # fmt: skip
    for got, client in ((first, at.client), (second, at.router)):
        back = path.forward(answer(got), "tunnel", "net").packet
        assert (back.payload.src, back.payload.dst, back.dport) == (at.external, client, CLIENT_PORT)


@families
@protocols
@pytest.mark.parametrize("where", ["here", "there"])
def test_one_client_port_reaches_one_endpoint_by_two_frontends(
    path: PacketPath, at: Places, protocol: Protocol, where: str
) -> None:
    """cilium #11810, #47396: after the translation both have the same tuple, unless a port is changed."""
    serve(path, at, getattr(at, where))
    towards = "tunnel" if where == "there" else "pod"
    frontends = at.external, at.balancer, at.cluster
    got = [path.forward(request(at, protocol, to=each), "net", towards) for each in frontends]
    assert len({each.packet.sport for each in got}) == 3
    for frontend, each in zip(frontends, got, strict=True):
        back = path.forward(answer(each), towards, "net").packet
        assert (back.payload.src, back.sport) == (frontend, PORTS[protocol])
        assert (back.payload.dst, back.dport) == (at.client, CLIENT_PORT)
    assert path.counted()["port_changed"] == 2


@pytest.mark.parametrize("word", range(4))
def test_a_packet_to_an_address_other_than_the_masquerade_address_is_no_reply(
    path: PacketPath, word: int
) -> None:
    """The entry has only a digest of the address, which covers all of its words."""
    serve(path, V6, V6.there)
    got = path.forward(request(V6, UDP), "net", "tunnel")
    other = bytearray(parse_address(V6.masquerade))
    other[4 * word + 1] ^= 0x40
    addresses = V6.there, format_address(Address(bytes(other)))
    packet = ip(*addresses) / transport(UDP, TARGETS[UDP], got.packet.sport)
    assert is_left_alone(path.ingress(packet, "tunnel"), packet)


@families
@pytest.mark.parametrize("protocol", [served.TCP, UDP], ids=["tcp", "udp"])
def test_a_port_that_a_socket_of_this_node_uses_is_not_used(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    kind = socket.SOCK_STREAM if protocol is served.TCP else socket.SOCK_DGRAM
    of = socket.AF_INET if at is V4 else socket.AF_INET6
    serve(path, at, at.there)
    with socket.socket(of, kind) as sock:
        sock.setblocking(False)
        sock.bind((at.masquerade, CLIENT_PORT))
        sock.connect_ex((at.there, TARGETS[protocol]))
        got = path.forward(request(at, protocol), "net", "tunnel")
    assert got.verdict == UNSPEC
    assert got.packet.sport != CLIENT_PORT


@families
@protocols
def test_without_a_free_port_a_new_flow_is_dropped_and_counted(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """cilium #8740. Existing flows keep their ports."""
    serve(path, at, at.there)
    first = established(path, at, protocol=protocol)
    (entry,) = path.replies().items()
    path.maps["replies"].update_all(list(_every_port(*entry, client=at.router)))
    path.counted()
    assert path.forward(request(at, protocol, CLIENT_PORT + 1), "net", "tunnel").verdict == SHOT
    assert path.counted() == {"packet_new": 1, "ports_exhausted": 1}
    assert path.forward(answer(first), "tunnel", "net").packet.dport == CLIENT_PORT


@families
@protocols
@pytest.mark.parametrize("free", [1024, 33333, 65535])
def test_the_last_free_port_is_found(path: PacketPath, at: Places, protocol: Protocol, free: int) -> None:
    """The search covers all 64,512 ports in four packets. Then the last one arrives again, and its flow has a
    port."""
    serve(path, at, at.there)
    established(path, at, protocol=protocol)
    (entry,) = path.replies().items()
    entries = dict(_every_port(*entry, client=at.router))
    at_port = abi.FLOW_KEY.offset("destination_port")
    path.maps["replies"].update_all(
        [(key, value) for key, value in entries.items() if key[at_port : at_port + 2] != free.to_bytes(2)]
    )
    first = request(at, protocol, CLIENT_PORT + 1)
    again = searched(path, first)
    assert again == (REDIRECT, bytes(first), 0)
    got = path.forward(again.packet, "net", "tunnel")
    assert (got.packet.payload.src, got.packet.sport) == (at.masquerade, free)
    assert path.forward(answer(got), "tunnel", "net").packet.dport == CLIENT_PORT + 1


def searched(path: PacketPath, packet: Packet) -> Outcome:
    """Send the packet until a port is found for its flow, or all ports were searched."""
    for _ in range(SEARCHES):
        got = path.ingress(packet)
        if got.verdict != SHOT:
            break
    return got


@families
def test_ports_are_not_searched_again_within_a_second(path: PacketPath, at: Places) -> None:
    """A search takes milliseconds, and in the first second it would most likely find no port either. Packets
    that arrive meanwhile do not delay it."""
    serve(path, at, at.there)
    established(path, at, protocol=UDP)
    (entry,) = path.replies().items()
    entries = dict(_every_port(*entry, client=at.router))
    path.maps["replies"].update_all(list(entries.items()))
    new = request(at, UDP, CLIENT_PORT + 1)
    assert searched(path, new).verdict == SHOT
    ((key, value),) = path.maps["exhausted_ports"].items()
    following, left, _ = abi.EXHAUSTED.unpack(value)
    assert not left
    path.maps["replies"].delete(next(iter(entries)))
    within = abi.EXHAUSTED.pack(following, 0, xdp_path.unit() + 1)
    path.maps["exhausted_ports"].update(key, within)
    assert searched(path, new).verdict == SHOT
    assert path.maps["exhausted_ports"].lookup(key) == within
    path.maps["exhausted_ports"].update(key, abi.EXHAUSTED.pack(following, 0, xdp_path.unit() - 1))
    assert searched(path, new).verdict == REDIRECT
    assert not path.maps["exhausted_ports"].lookup(key)


def _every_port(key: bytes, entry: Entry, client: str) -> Iterator[tuple[bytes, bytes]]:
    """Entries as if `client` had opened a flow for each port."""
    for port in range(1024, 65536):
        if htons(port) != entry.key["destination_port"]:
            fields = entry.key | {"destination_port": htons(port)}
            value = entry.value | {"client": parse_address(client), "client_port": htons(port)}
            yield abi.FLOW_KEY.pack(*fields.values()), abi.REPLY.pack(*value.values())


def test_a_masquerade_on_a_device_without_an_address_is_dropped_and_counted(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    path.set_device("tunnel")
    assert path.forward(request(V4), "net", "tunnel").verdict == SHOT
    assert path.counted()["no_address"] == 1


# Half-open and established


def _half_open(path: PacketPath) -> set[int]:
    """The values of the half-open flag in all entries."""
    return {each.value["half_open"] for of in (path.flows(), path.replies()) for each in of.values()}


HALF_OPEN, ESTABLISHED = {1}, {0}


@families
@pytest.mark.parametrize("where", ["here", "there"])
def test_the_acknowledgment_of_the_endpoints_syn_establishes_a_tcp_flow(
    path: PacketPath, at: Places, where: str
) -> None:
    serve(path, at, getattr(at, where))
    towards = "tunnel" if where == "there" else "pod"
    got = path.forward(request(at), "net", towards)
    path.forward(request(at, flags="A"), "net", towards)  # acknowledges data that was not sent yet
    path.forward(answer(got), towards, "net")
    path.forward(request(at, flags="A", ack=77), "net", towards)
    assert _half_open(path) == HALF_OPEN
    path.forward(request(at, flags="A"), "net", towards)
    assert _half_open(path) == ESTABLISHED


@families
def test_a_datagram_after_an_answer_establishes_a_udp_flow(path: PacketPath, at: Places) -> None:
    serve(path, at, at.there)
    got = path.forward(request(at, UDP), "net", "tunnel")
    path.forward(answer(got), "tunnel", "net")
    assert _half_open(path) == HALF_OPEN
    path.forward(request(at, UDP), "net", "tunnel")
    assert _half_open(path) == ESTABLISHED


@families
def test_a_flow_of_datagrams_without_replies_is_established_after_a_second(
    path: PacketPath, at: Places
) -> None:
    """For example statistics: more senders than half-open flows would evict each other."""
    serve(path, at, at.there)
    got = path.forward(request(at, UDP), "net", "tunnel")
    assert _half_open(path) == HALF_OPEN
    path.age(2)
    path.forward(request(at, UDP), "net", "tunnel")
    assert _half_open(path) == ESTABLISHED
    assert {each.value["flags"] & abi.FLOW_REPLIED for each in path.replies().values()} == {0}
    path.age(2)
    path.forward(answer(got), "tunnel", "net")
    assert {each.value["flags"] & abi.FLOW_REPLIED for each in path.replies().values()} == {abi.FLOW_REPLIED}


@families
@protocols
def test_a_flow_stays_half_open_and_works_if_the_flow_map_is_full(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.there)
    path.set_established(SIZES.flows)
    got = established(path, at, protocol=protocol)
    assert path.counted()["flows_full"] == 1
    assert _half_open(path) == HALF_OPEN
    more: dict[str, Any] = {"flags": "PA"} if protocol is served.TCP else {}
    assert path.forward(request(at, protocol, **more), "net", "tunnel").packet.payload.dst == at.there
    assert path.forward(answer(got, **more), "tunnel", "net").packet.payload.src == at.external


@families
@protocols
def test_a_flood_of_half_open_flows_does_not_evict_established_flows(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """There are more half-open flows than the map has room for. The idle established flow works
    afterwards."""
    serve(path, at, at.there)
    got = established(path, at, protocol=protocol)
    run = path.runs_in("net").run
    room = SIZES.half_open
    flood = bytearray(bytes(request(at, protocol, CLIENT_PORT, client=at.router)))
    ports = headers.parts(bytes(flood)).outer.l4
    for number in range(room + room // 4):
        flood[ports : ports + 2] = (1024 + number % 64000).to_bytes(2)
        run(bytes(flood))
    assert room * 0.8 < len(path.flows()) <= room + 1
    assert len(path.replies()) == len(path.flows())
    more: dict[str, Any] = {"flags": "PA"} if protocol is served.TCP else {}
    assert path.forward(request(at, protocol, **more), "net", "tunnel").packet.payload.dst == at.there
    assert path.forward(answer(got, **more), "tunnel", "net").packet.payload.dst == at.client


@families
@protocols
@pytest.mark.parametrize("lost", ["flows", "replies"])
def test_a_half_open_flow_that_lost_one_entry_is_completed_again(
    path: PacketPath, at: Places, protocol: Protocol, lost: str
) -> None:
    """cilium #34833, #31643: a map evicted one entry of a flow, but not the other one."""
    serve(path, at, at.there)
    got = path.forward(request(at, protocol), "net", "tunnel")
    (key,) = getattr(path, lost)()
    path.maps[lost].delete(key)
    assert path.forward(request(at, protocol), "net", "tunnel").raw == got.raw
    assert path.forward(answer(got), "tunnel", "net").packet.payload.src == at.external


# Ends of flows, and new flows


def test_a_reset_after_unacknowledged_data_ends_the_flow(path: PacketPath) -> None:
    """As in conntrack: the endpoint has not acknowledged the data yet."""
    serve(path, V4, V4.there)
    established(path, V4)
    path.forward(request(V4, flags="PA"), "net", "tunnel")
    path.forward(request(V4, flags="R", seq=NEXT + 4), "net", "tunnel")
    serve(path, V4, V4.here)
    assert path.ingress(request(V4)).packet.payload.dst == V4.here


def test_a_connection_that_the_endpoint_rejected_can_get_another_endpoint(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    got = path.forward(request(V4), "net", "tunnel")
    path.forward(answer(got, flags="RA", seq=0), "tunnel", "net")
    serve(path, V4, V4.here)
    assert path.ingress(request(V4)).packet.payload.dst == V4.here


def test_a_syn_to_a_removed_endpoint_that_never_answered_gets_another_one(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    path.forward(request(V4), "net", "tunnel")
    serve(path, V4, V4.here)
    assert path.ingress(request(V4)).packet.payload.dst == V4.here


@families
def test_a_udp_flow_of_a_removed_endpoint_gets_another_one_at_once(path: PacketPath, at: Places) -> None:
    """Also before the agent deletes any entry."""
    serve(path, at, at.there)
    got = path.forward(request(at, UDP), "net", "tunnel")
    path.forward(answer(got), "tunnel", "net")
    serve(path, at, at.here)
    again = path.forward(request(at, UDP), "net", "pod")
    assert again.packet.payload.dst == at.here
    back = path.forward(answer(again), "pod", "net").packet
    assert (back.payload.src, back.payload.dst) == (at.external, at.client)


@families
def test_a_datagram_to_a_service_that_lost_all_endpoints_is_rejected(path: PacketPath, at: Places) -> None:
    """As when a Service is scaled to zero: kube-proxy's conntrack reconciler kept such flows (kubernetes
    #139628)."""
    serve(path, at, at.there)
    path.forward(request(at, UDP), "net", "tunnel")
    serve(path, at)
    assert path.ingress(request(at, UDP)).packet.haslayer("UDPerror")
    assert path.counted()["packet_rejected"] == 1


def test_a_rejected_udp_flow_reaches_the_first_endpoint_at_once(path: PacketPath) -> None:
    serve(path, V4)
    assert path.ingress(request(V4, UDP)).verdict != UNSPEC
    serve(path, V4, V4.here)
    assert path.ingress(request(V4, UDP)).packet.payload.dst == V4.here


SHORT = {
    "tcp_established": 50,
    "tcp_close_wait": 40,
    "tcp_syn": 20,
    "tcp_fin": 10,
    "udp": 15,
    "udp_stream": 30,
}
"""Timeouts in seconds. Flows are timed by the uptime, so each is less than the uptime of any test machine."""


@families
@protocols
def test_a_half_open_flow_ends_after_its_timeout(path: PacketPath, at: Places, protocol: Protocol) -> None:
    path.set_node(**SHORT)
    serve(path, at, at.there)
    timeout = SHORT["tcp_syn" if protocol is served.TCP else "udp"]
    path.forward(request(at, protocol), "net", "tunnel")
    path.counted()
    path.age(timeout + 2)
    path.ingress(request(at, protocol))
    assert path.counted() == {"packet_new": 1}
    path.age(timeout - 3)
    path.ingress(request(at, protocol))
    assert not path.counted()


@families
@protocols
def test_replies_restart_the_timeout_of_a_half_open_flow(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """Both entries expire at the same time."""
    path.set_node(**SHORT)
    serve(path, at, at.there)
    timeout = SHORT["tcp_syn" if protocol is served.TCP else "udp"]
    got = path.forward(request(at, protocol), "net", "tunnel")
    path.counted()
    for _ in range(3):
        path.age(timeout - 3)
        assert path.forward(answer(got), "tunnel", "net").packet.payload.src == at.external
    (flow,), (reply,) = path.flows().values(), path.replies().values()
    assert flow.value["last_seen"] == reply.value["last_seen"]
    path.age(timeout - 3)
    assert path.forward(request(at, protocol), "net", "tunnel").raw == got.raw
    assert not path.counted()


@families
def test_an_established_udp_flow_ends_after_its_timeout_without_packets(path: PacketPath, at: Places) -> None:
    path.set_node(**SHORT)
    serve(path, at, at.there)
    got = established(path, at, protocol=UDP)
    path.counted()
    path.forward(request(at, UDP), "net", "tunnel")
    assert not path.counted()
    path.age(SHORT["udp_stream"] + 2)
    path.forward(answer(got), "tunnel", "net")
    path.forward(request(at, UDP), "net", "tunnel")
    assert not path.counted()
    path.age(SHORT["udp_stream"] + 2)
    path.forward(request(at, UDP), "net", "tunnel")
    assert path.counted()["packet_new"] == 1


@families
@protocols
def test_a_port_is_free_again_after_its_half_open_flow_timed_out(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    path.set_node(**SHORT)
    serve(path, at, at.there)
    path.forward(request(at, protocol), "net", "tunnel")
    path.age(SHORT["tcp_syn"] + 2)
    other = ip(at.router, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    assert path.forward(other, "net", "tunnel").packet.sport == CLIENT_PORT


# Session affinity


@families
@protocols
def test_a_client_with_affinity_keeps_its_endpoint(path: PacketPath, at: Places, protocol: Protocol) -> None:
    """For all frontends of the Service, and from all ports of the client."""
    serve(path, at, at.here, at.there, affinity=600)
    chosen = {
        path.ingress(request(at, protocol, CLIENT_PORT + i, to=to)).packet.payload.dst
        for i, to in enumerate([at.external, at.balancer, at.cluster] * 10)
    }
    assert len(chosen) == 1


@families
@protocols
def test_a_client_with_affinity_leaves_an_endpoint_that_is_removed(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    serve(path, at, at.there, affinity=600)
    assert path.ingress(request(at, protocol)).packet.payload.dst == at.there
    serve(path, at, at.here, affinity=600)
    chosen = {path.ingress(request(at, protocol, CLIENT_PORT + i)).packet.payload.dst for i in range(1, 5)}
    assert chosen == {at.here}


# Other tests


def test_packets_and_bytes_are_counted_by_service_and_direction(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    before = path.traffic()
    got = path.forward(request(V4), "net", "tunnel")
    path.forward(answer(got), "tunnel", "net")
    path.forward(request(V4, flags="A"), "net", "tunnel")
    after = path.traffic()
    new, packets_in, bytes_in, packets_out, bytes_out = (b - a for a, b in zip(before, after, strict=True))
    size = len(bytes(request(V4))) - 14
    assert (new, packets_in, bytes_in, packets_out, bytes_out) == (1, 2, 2 * size, 1, size)


@families
def test_a_packet_translated_on_a_bridge_port_is_left_alone_on_the_bridge(
    path: PacketPath, at: Places
) -> None:
    """The programs do not use a mark for this, since other programs may overwrite it."""
    serve(path, at, at.there)
    once = path.ingress(request(at))
    assert is_left_alone(path.ingress(once.packet, "pod"), once.packet)
    gone = path.egress(once.packet, "tunnel", came_in="net")
    back = path.ingress(answer(gone), "tunnel")
    assert is_left_alone(path.ingress(back.packet, "tunnel"), back.packet)


@families
@protocols
def test_a_packet_needs_no_mark_to_be_masqueraded(path: PacketPath, at: Places, protocol: Protocol) -> None:
    """Other classifiers that return TC_ACT_OK overwrite tc_index."""
    serve(path, at, at.there)
    before = path.ingress(request(at, protocol), mark=0xEB02)
    assert before.mark == 0
    gone = path.egress(before.raw, "tunnel", mark=0x1234, came_in="net")
    assert gone.packet.payload.src == at.masquerade
    back = path.ingress(answer(gone), "tunnel", mark=0x77)
    assert path.egress(back.raw, "net", mark=0, came_in="tunnel").packet.payload.src == at.external


@families
@protocols
def test_a_flow_by_a_device_without_a_program_is_established_unmasqueraded(
    path: PacketPath, at: Places, protocol: Protocol
) -> None:
    """For example a flow to an endpoint without this node's name whose pod is on this node."""
    serve(path, at, at.there)
    later: dict[str, Any] = {"flags": "A"} if protocol is served.TCP else {}
    got = path.ingress(request(at, protocol))
    back = path.egress(answer(got), "net", came_in="tunnel")
    assert back.packet.payload.src == at.external
    path.ingress(request(at, protocol, **later))
    assert _half_open(path) == ESTABLISHED
    assert path.egress(answer(got, **later), "net", came_in="tunnel").packet.payload.src == at.external
