"""What is remembered: ports to masquerade with, entries that are lost, flows that end, clients that stay."""

import socket
from collections.abc import Iterator
from socket import htons
from typing import Any

import pytest

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.flow_state import Flow
from ebpfproxy.model.address import Protocol, parse_address
from tests.kernel.packet_path import served
from tests.kernel.packet_path.conversation import answer, established, request
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, TARGETS, UDP, families, serve, translatable
from tests.support.packet_path import MARK_FORWARD, SHOT, UNSPEC, PacketPath
from tests.support.packets import V4, Places, become, ip, transport

pytestmark = pytest.mark.kernel


# Ports to masquerade with


@families
@translatable
def test_the_clients_port_is_kept_where_it_is_free(path: PacketPath, at: Places, protocol: Protocol) -> None:
    serve(path, at, at.there)
    assert path.forward(request(at, protocol), "net", "tunnel").packet.sport == CLIENT_PORT


@families
@translatable
def test_two_clients_with_one_port_are_told_apart(path: PacketPath, at: Places, protocol: Protocol) -> None:
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
@translatable
@pytest.mark.parametrize("where", ["here", "there"])
def test_one_client_port_reaches_one_endpoint_by_two_frontends(
    path: PacketPath, at: Places, protocol: Protocol, where: str
) -> None:
    """cilium #11810, #47396: behind the translation both are one tuple, unless a port is changed."""
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


def test_sctp_flows_that_would_need_another_port_are_dropped(path: PacketPath) -> None:
    """Its checksum covers the ports (RFC 9260, 6.8), so none is changed."""
    serve(path, V4, V4.there)
    assert path.forward(request(V4, served.SCTP), "net", "tunnel").verdict == UNSPEC
    assert path.forward(request(V4, served.SCTP, to=V4.balancer), "net", "tunnel").verdict == SHOT
    assert path.counted()["ports_exhausted"] == 1


@families
@translatable
def test_a_port_that_a_socket_of_this_node_uses_is_not_taken(
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
@translatable
def test_no_port_left_drops_the_flow_and_counts_it(path: PacketPath, at: Places, protocol: Protocol) -> None:
    """cilium #8740. Whoever has a port keeps it."""
    serve(path, at, at.there)
    first = path.forward(request(at, protocol), "net", "tunnel")
    (key, flow), = ((k, f) for k, f in path.flows().items() if f.way == abi.FROM_ENDPOINT)  # fmt: skip
    path.maps["flows"].update_all(list(_every_port(key, flow._replace(client=parse_address(at.router)))))
    path.counted()
    assert path.forward(request(at, protocol, CLIENT_PORT + 1), "net", "tunnel").verdict == SHOT
    assert path.counted() == {"packet_new": 1, "ports_exhausted": 1}
    assert path.forward(answer(first), "tunnel", "net").packet.dport == CLIENT_PORT


def _every_port(key: bytes, flow: Flow) -> Iterator[tuple[bytes, bytes]]:
    """As if the client of `flow` had opened as many."""
    at = abi.FLOW_KEY.offset("destination_port")
    for port in range(1, 65536):
        if htons(port) != flow.masquerade_port:
            value = flow._replace(
                masquerade_port=htons(port), client_port=htons(port), between_port=htons(port)
            )
            packed = htons(port).to_bytes(2, "little")
            yield key[:at] + packed + key[at + 2 :], value.pack()


def test_a_device_without_an_address_drops_and_counts_it(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    path.set_device("tunnel")
    assert path.forward(request(V4), "net", "tunnel").verdict == SHOT
    assert path.counted()["no_address"] == 1


# Entries that are lost


LOSSES = [
    # The endpoint is; the entry that is lost; who sends next. Without masquerade the client's packets have
    # no entry but FROM_CLIENT, the endpoint's none but BETWEEN: then nobody could know whose they are.
    ("here", "FROM_CLIENT", "endpoint"),
    ("here", "BETWEEN", "client"),
    ("there", "FROM_CLIENT", "endpoint"),
    ("there", "BETWEEN", "client"),
    ("there", "BETWEEN", "endpoint"),
    ("there", "FROM_ENDPOINT", "client"),
]


@families
@translatable
@pytest.mark.parametrize(("where", "way", "sender"), LOSSES)
def test_a_flow_that_lost_an_entry_is_healed_by_the_next_packet(
    path: PacketPath, at: Places, protocol: Protocol, where: str, way: str, sender: str
) -> None:
    """cilium #34833, #31643: an LRU map evicts one entry of a flow and not the others, the longest unused."""
    serve(path, at, getattr(at, where))
    towards = "tunnel" if where == "there" else "pod"
    got = path.forward(request(at, protocol), "net", towards)
    back = path.forward(answer(got), towards, "net")
    later: dict[str, Any] = {"flags": "A"} if protocol is served.TCP else {}
    path.age(2)
    before = path.flows()
    (lost,) = (key for key, flow in before.items() if flow.way == getattr(abi, way))
    path.maps["flows"].delete(lost)
    if sender == "client":
        again = path.forward(request(at, protocol, **later), "net", towards)
        assert again.packet.payload.dst == getattr(at, where)
        assert again.packet.sport == got.packet.sport
    else:
        again = path.forward(answer(got, **later), towards, "net")
        assert again.packet.payload.src == at.external
    assert path.flows().keys() == before.keys()
    assert path.counted()["healed"] == 1
    assert path.forward(answer(got), towards, "net").raw == back.raw
    assert path.forward(request(at, protocol, **later), "net", towards).packet.sport == got.packet.sport


def test_a_client_whose_entry_is_lost_begins_anew_where_it_was(path: PacketPath) -> None:
    """A datagram: its other entries are found to be its own, and none is left behind."""
    serve(path, V4, V4.there)
    got = path.forward(request(V4, UDP), "net", "tunnel")
    before = path.flows()
    (lost,) = (key for key, flow in before.items() if flow.way == abi.FROM_CLIENT)
    path.maps["flows"].delete(lost)
    assert path.forward(request(V4, UDP), "net", "tunnel").raw == got.raw
    assert path.flows().keys() == before.keys()


# Flows that end, and new ones


@families
def test_a_new_syn_on_a_finished_flow_chooses_anew(path: PacketPath, at: Places) -> None:
    """By the client's FIN and the endpoint's; the port is the same as before."""
    serve(path, at, at.there)
    established(path, at)
    got = path.forward(request(at, flags="FA"), "net", "tunnel")
    path.forward(answer(got, flags="FA"), "tunnel", "net")
    serve(path, at, at.here)
    path.counted()
    assert path.ingress(request(at)).packet.payload.dst == at.here
    assert path.counted()["packet_new"] == 1


@families
@pytest.mark.parametrize("side", ["client", "endpoint"])
def test_a_new_syn_after_a_reset_chooses_anew(path: PacketPath, at: Places, side: str) -> None:
    serve(path, at, at.there)
    established(path, at)
    got = path.forward(request(at, flags="R" if side == "client" else "A"), "net", "tunnel")
    if side == "endpoint":
        path.forward(answer(got, flags="R"), "tunnel", "net")
    serve(path, at, at.here)
    assert path.ingress(request(at)).packet.payload.dst == at.here


def test_one_fin_does_not_end_a_flow(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    established(path, V4)
    path.forward(request(V4, flags="FA"), "net", "tunnel")
    serve(path, V4, V4.here)
    assert path.ingress(request(V4, flags="A")).packet.payload.dst == V4.there


def test_a_syn_of_an_open_flow_whose_endpoint_is_gone_chooses_anew(path: PacketPath) -> None:
    """A client behind a small pool of ports uses one again, long after: cilium re-selects there, too."""
    serve(path, V4, V4.there)
    established(path, V4)
    assert path.ingress(request(V4)).packet.payload.dst == V4.there, "a stray SYN"
    serve(path, V4, V4.here)
    assert path.ingress(request(V4)).packet.payload.dst == V4.here


@families
def test_a_tcp_flow_outlives_its_endpoint(path: PacketPath, at: Places) -> None:
    """As conntrack has it: kube-proxy flushes UDP only."""
    serve(path, at, at.there)
    established(path, at)
    serve(path, at, at.here)
    assert path.ingress(request(at, flags="A")).packet.payload.dst == at.there
    got = path.forward(request(at, flags="PA"), "net", "tunnel")
    assert path.forward(answer(got, flags="A"), "tunnel", "net").packet.payload.src == at.external


def test_a_syn_to_a_retired_endpoint_that_never_answered_chooses_anew(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    path.forward(request(V4), "net", "tunnel")
    serve(path, V4, V4.here)
    assert path.ingress(request(V4)).packet.payload.dst == V4.here


@families
def test_a_datagram_to_a_retired_endpoint_chooses_anew(path: PacketPath, at: Places) -> None:
    """At once, without waiting for the agent to delete anything."""
    serve(path, at, at.there)
    got = path.forward(request(at, UDP), "net", "tunnel")
    path.forward(answer(got), "tunnel", "net")
    serve(path, at, at.here)
    again = path.forward(request(at, UDP), "net", "pod")
    assert again.packet.payload.dst == at.here
    back = path.forward(answer(again), "pod", "net").packet
    assert (back.payload.src, back.payload.dst) == (at.external, at.client)


@families
def test_a_datagram_to_a_service_that_lost_all_endpoints_is_refused(path: PacketPath, at: Places) -> None:
    """Scaled to zero: kube-proxy's conntrack reconciler left such flows alone (kubernetes #139628)."""
    serve(path, at, at.there)
    path.forward(request(at, UDP), "net", "tunnel")
    serve(path, at)
    assert path.ingress(request(at, UDP)).packet.haslayer("UDPerror")
    assert path.counted()["packet_rejected"] == 1


def test_a_service_that_gets_its_first_endpoint_serves_datagrams_at_once(path: PacketPath) -> None:
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
"""Seconds, less than any machine is up that runs tests: its clock is what flows are timed by."""


@pytest.mark.parametrize("state", ["tcp_syn", "tcp_established", "tcp_close_wait", "tcp_fin"])
def test_a_tcp_flow_counts_as_over_when_its_time_is_up(path: PacketPath, state: str) -> None:
    """Before the collector comes round; to two seconds."""
    path.set_node(**SHORT)
    serve(path, V4, V4.there)
    got = path.forward(request(V4), "net", "tunnel")
    if state != "tcp_syn":
        established(path, V4)
    if state in ("tcp_close_wait", "tcp_fin"):
        path.forward(request(V4, flags="FA"), "net", "tunnel")
    if state == "tcp_fin":
        path.forward(answer(got, flags="FA"), "tunnel", "net")
    more = request(V4, flags="A")
    path.age(SHORT[state] - 2)
    flows = path.flows()
    assert path.ingress(more).raw != bytes(more)
    for key, flow in flows.items():  # as if it had not been seen
        path.maps["flows"].update(key, flow.pack())
    path.age(4)
    assert path.ingress(more).raw == bytes(more)


@pytest.mark.parametrize(("answered", "timeout"), [(False, "udp"), (True, "udp_stream")])
def test_a_udp_flow_counts_as_over_when_its_time_is_up(
    path: PacketPath, answered: bool, timeout: str
) -> None:
    path.set_node(**SHORT)
    serve(path, V4, V4.there)
    got = path.forward(request(V4, UDP), "net", "tunnel")
    if answered:
        path.forward(answer(got), "tunnel", "net")
    path.counted()
    path.age(SHORT[timeout] - 2)
    path.ingress(request(V4, UDP))
    assert not path.counted()
    path.age(SHORT[timeout] + 2)
    path.ingress(request(V4, UDP))
    assert path.counted() == {"packet_new": 1}


@families
@translatable
def test_a_port_is_free_again_when_its_flow_is_over(path: PacketPath, at: Places, protocol: Protocol) -> None:
    path.set_node(**SHORT)
    serve(path, at, at.there)
    path.forward(request(at, protocol), "net", "tunnel")
    path.age(SHORT["tcp_established"] + 2)
    other = ip(at.router, at.external) / transport(protocol, CLIENT_PORT, PORTS[protocol])
    assert path.forward(other, "net", "tunnel").packet.sport == CLIENT_PORT


# Clients that stay


@families
@translatable
def test_a_client_with_affinity_stays(path: PacketPath, at: Places, protocol: Protocol) -> None:
    """On all frontends of the Service, by all its ports."""
    serve(path, at, at.here, at.there, affinity=600)
    chosen = {
        path.ingress(request(at, protocol, CLIENT_PORT + i, to=to)).packet.payload.dst
        for i, to in enumerate([at.external, at.balancer, at.cluster] * 10)
    }
    assert len(chosen) == 1


@families
@translatable
def test_without_affinity_all_endpoints_are_chosen(path: PacketPath, at: Places, protocol: Protocol) -> None:
    serve(path, at, at.here, at.there)
    chosen = {path.ingress(request(at, protocol, CLIENT_PORT + i)).packet.payload.dst for i in range(40)}
    assert chosen == {at.here, at.there}


# The rest


def test_a_flow_is_counted_by_service_and_way(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    before = _sums(path)
    got = path.forward(request(V4), "net", "tunnel")
    path.forward(answer(got), "tunnel", "net")
    path.forward(request(V4, flags="A"), "net", "tunnel")
    after = _sums(path)
    new, packets_in, bytes_in, packets_out, bytes_out = (b - a for a, b in zip(before, after, strict=True))
    size = len(bytes(request(V4))) - 14
    assert (new, packets_in, bytes_in, packets_out, bytes_out) == (1, 2, 2 * size, 1, size)


def _sums(path: PacketPath) -> list[int]:
    sums = [0] * 5
    for _, value in path.maps["traffic"].items():
        for row in abi.TRAFFIC.iter_unpack(value):
            sums = [a + b for a, b in zip(sums, row, strict=True)]
    return sums


def test_marks_of_another_node_of_this_machine_mean_nothing(path: PacketPath) -> None:
    """In a test, or with kind: one node's egress is the other's ingress, and the packet is the same."""
    serve(path, V4, V4.here)
    packet = ip(V4.client, V4.router) / transport(served.TCP, 1, 2)
    another = MARK_FORWARD + 0x100
    assert path.ingress(packet, mark=another) == (UNSPEC, bytes(packet), another)
    assert path.ingress(request(V4), mark=another).packet.payload.dst == V4.here


def test_what_a_port_of_a_bridge_has_translated_the_bridge_leaves_alone(path: PacketPath) -> None:
    serve(path, V4, V4.there)
    once = path.ingress(request(V4))
    assert once.mark == MARK_FORWARD
    assert path.ingress(once.packet, mark=once.mark) == once._replace(verdict=UNSPEC)
