"""Direct server return between three nodes, with real packets."""

import contextlib
import functools
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf import cleanup
from ebpfproxy.lab import Lab, Node, PodNetwork, sockets
from ebpfproxy.linux.netlink import geneve
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import connected
from tests.kernel.cluster import eventually
from tests.kernel.dsr_nodes import NODE_PORTS, PORTS, VIP, DsrNodes, bytes_sent, has_geneve
from tests.kernel.two_nodes import NARROW, name_and_client, streamed
from tests.support import datagrams

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600)]

TCP, UDP = Protocol.TCP, Protocol.UDP
families = pytest.mark.parametrize("family", ["v4", "v6"])
protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
PAYLOAD = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def _nodes() -> Iterator[DsrNodes]:
    if not has_geneve():
        pytest.skip("this kernel has no Geneve")
    with Lab("test-dsr", 202, PodNetwork.ROUTED, nodes=3) as lab:
        nodes = DsrNodes(lab)
        nodes.serve([nodes.pods[1]])
        yield nodes


@pytest.fixture
def nodes(_nodes: DsrNodes) -> DsrNodes:
    """The first node is dialed. The endpoint is the pod of the second one."""
    _nodes.dial(_nodes.nodes[0])
    return _nodes


@contextlib.contextmanager
def serving(nodes: DsrNodes, *args: object, **fields: object) -> Iterator[None]:
    """Within the block, the Service is another one."""
    nodes.serve(*args, **fields)  # type: ignore[arg-type]
    try:
        yield
    finally:
        nodes.serve([nodes.pods[1]])


@families
@protocols
def test_a_remote_endpoint_sees_the_clients_address(nodes: DsrNodes, family: str, protocol: Protocol) -> None:
    answer = nodes.x.ask(protocol, VIP[family], PORTS[protocol])
    assert name_and_client(answer) == ("server-1", getattr(nodes.x, family))


@families
@protocols
def test_a_node_port_of_the_dialed_node_is_served(nodes: DsrNodes, family: str, protocol: Protocol) -> None:
    answer = nodes.x.ask(protocol, getattr(nodes.nodes[0].host, family), NODE_PORTS[protocol])
    assert name_and_client(answer) == ("server-1", getattr(nodes.x, family))


@families
def test_replies_bypass_the_dialed_node(nodes: DsrNodes, family: str) -> None:
    dialed, there = nodes.nodes[0], nodes.nodes[1]
    before = bytes_sent(dialed), bytes_sent(there)
    with socket_to(nodes, family) as client:
        received = nodes.x.call(lambda: len(sockets.exchange(client, PAYLOAD)))
    assert received == len(PAYLOAD)
    sent = bytes_sent(dialed) - before[0], bytes_sent(there) - before[1]
    # The client's data passes the dialed node once, and the echo does not.
    assert len(PAYLOAD) < sent[0] < 1.5 * len(PAYLOAD)
    assert len(PAYLOAD) < sent[1] < 1.5 * len(PAYLOAD)
    assert nodes.counters(dialed)["tunneled"] > 0
    assert "packet_new" not in nodes.counters(dialed)


def socket_to(nodes: DsrNodes, family: str) -> socket.socket:
    """A connection of the client to the TCP frontend."""
    return connected(nodes.x, TCP, VIP[family], PORTS[TCP])


@families
def test_segments_of_the_client_fit_in_the_tunnel(nodes: DsrNodes, family: str) -> None:
    dialed = nodes.nodes[0]
    before = _fragments_sent(dialed)
    assert streamed(nodes.x, VIP[family], PORTS[TCP], PAYLOAD) == PAYLOAD
    assert _fragments_sent(dialed) == before


def _fragments_sent(node: Node) -> int:
    """The fragments that a node has made of the outer packets."""
    lines = [line.split() for line in node.host.run(["cat", "/proc/net/snmp"]).stdout.splitlines()]
    names, values = (words for words in lines if words[0] == "Ip:")
    six = dict(line.split() for line in node.host.run(["cat", "/proc/net/snmp6"]).stdout.splitlines())
    return int(values[names.index("FragCreates")]) + int(six["Ip6FragCreates"])


@families
@pytest.mark.parametrize("size", [1452, 4000])
def test_large_datagrams_arrive(nodes: DsrNodes, family: str, size: int) -> None:
    """A packet of 1500 bytes does not fit in a tunneled packet of that size. The outer packet is fragmented
    if the client permits it, otherwise the client learns the MTU. The larger datagram is fragmented by the
    client already."""
    payload = PAYLOAD[:size]

    def talk() -> bytes:
        with sockets.dial(UDP, VIP[family], PORTS[UDP], 2.0) as client:
            return datagrams.exchange_datagram(client, payload)

    assert nodes.x.call(talk) == payload


@families
def test_a_connection_continues_at_another_node(nodes: DsrNodes, family: str) -> None:
    """The network moves the client's packets when the dialed node fails: to another one, to the endpoint's
    node itself, and back."""
    with socket_to(nodes, family) as client:
        client.settimeout(20)
        for number, node in enumerate((*nodes.nodes, nodes.nodes[0])):
            nodes.dial(node)
            text = f"at node {number}".encode()
            assert nodes.x.call(functools.partial(sockets.exchange, client, text)) == text


@families
def test_a_connection_survives_the_dialed_node(nodes: DsrNodes, family: str) -> None:
    first = nodes.nodes[0]
    with socket_to(nodes, family) as client:
        client.settimeout(30)
        assert nodes.x.call(lambda: sockets.exchange(client, b"before")) == b"before"
        nodes.lab.ip(nodes.lab.router, f"link set {first.cgroup.name} down")
        try:
            nodes.dial(nodes.nodes[2])
            assert nodes.x.call(lambda: sockets.exchange(client, PAYLOAD)) == PAYLOAD
        finally:
            _up_again(nodes, first)


def _up_again(nodes: DsrNodes, node: Node) -> None:
    """A device that goes down loses its routes and IPv6 addresses."""
    router, device = nodes.lab.router, node.cgroup.name
    gateway, pods = nodes.lab.addresses.router, nodes.lab.addresses.pods(node.index)
    nodes.lab.ip(
        router,
        f"link set {device} up",
        f"addr replace {gateway.v6}/128 dev {device} nodad",
        f"route replace {node.host.v4}/32 dev {device} src {gateway.v4}",
        f"route replace {node.host.v6}/128 dev {device}",
        f"route replace {pods.v4} via {node.host.v4}",
        f"route replace {pods.v6} via {node.host.v6}",
    )


@families
@protocols
def test_a_node_that_announces_nothing_gets_masqueraded_packets(
    nodes: DsrNodes, family: str, protocol: Protocol
) -> None:
    dialed, _, third = nodes.nodes
    with serving(nodes, [nodes.pods[2]], announcing=nodes.nodes[:2]):
        answer = nodes.x.ask(protocol, VIP[family], PORTS[protocol])
        assert name_and_client(answer) == ("server-2", getattr(dialed.host, family))
        assert third.host.call(geneve.find) == 0
    assert third.host.call(geneve.find) != 0


@families
def test_the_endpoint_learns_the_mtu_of_the_path_to_the_client(nodes: DsrNodes, family: str) -> None:
    """The router sends its ICMP error to the frontend, and so to the dialed node."""
    route = f"{getattr(nodes.x, family)}/{128 if family == 'v6' else 32} dev outside"
    nodes.lab.ip(nodes.lab.router, f"route replace {route} mtu lock {NARROW}")
    try:
        assert streamed(nodes.x, VIP[family], PORTS[TCP], PAYLOAD, 30.0) == PAYLOAD
        found = nodes.pods[1].run(["ip", "route", "get", getattr(nodes.x, family)]).stdout
        assert f"mtu {NARROW}" in found
    finally:
        nodes.lab.ip(nodes.lab.router, f"route replace {route}")
        for each in (nodes.pods[1], nodes.x):
            each.run(["ip", "-4", "route", "flush", "cache"])
            each.run(["ip", "-6", "route", "flush", "cache"])


@families
def test_filters_of_other_programs_change_nothing(nodes: DsrNodes, family: str) -> None:
    """Filters that let packets pass overwrite the mark that the Geneve device's program sets."""
    hosts = [node.host for node in nodes.nodes[:2]]
    try:
        for host in hosts:
            host.run(["tc", "qdisc", "add", "dev", "eth0", "clsact"], check=False)
            for side in ("ingress", "egress"):
                text = f"tc filter add dev eth0 {side} prio 9 protocol all matchall action ok"
                host.run(text.split())
        answer = nodes.x.ask(TCP, VIP[family], PORTS[TCP])
        assert name_and_client(answer) == ("server-1", getattr(nodes.x, family))
    finally:
        for host in hosts:
            for side in ("ingress", "egress"):
                host.run(f"tc filter del dev eth0 {side} prio 9".split(), check=False)


@families
def test_tunneled_packets_of_unknown_senders_are_dropped(nodes: DsrNodes, family: str) -> None:
    """The sender is the client, which is no node."""
    node = nodes.nodes[1]
    before = nodes.counters(node).get("tunnel_refused", 0)
    inner = b"\x02" * 12 + b"\x08\x00" + bytes(60)
    frame = b"\x00\x00\x65\x58\x00\x00\x01\x00" + inner  # no option, Ethernet, network 1

    def send() -> None:
        kind = socket.AF_INET6 if family == "v6" else socket.AF_INET
        with socket.socket(kind, socket.SOCK_DGRAM) as sender:
            sender.sendto(frame, (getattr(node.host, family), geneve.PORT))

    nodes.x.call(send)
    eventually(lambda: nodes.counters(node).get("tunnel_refused", 0) > before, "the packet is dropped")


def test_a_deleted_device_is_made_again(nodes: DsrNodes) -> None:
    for node in nodes.nodes[:2]:
        before = node.host.call(geneve.find)
        node.host.run(["ip", "link", "del", geneve.DEVICE])
        nodes.serve([nodes.pods[1]], [node])
        assert node.host.call(geneve.find) == before
    answer = nodes.x.ask(TCP, VIP["v4"], PORTS[TCP])
    assert name_and_client(answer) == ("server-1", nodes.x.v4)


def test_another_port_makes_another_device(nodes: DsrNodes) -> None:
    with serving(nodes, [nodes.pods[1]], ports=dict.fromkeys(nodes.nodes, 7777)):
        shown = nodes.nodes[1].host.run(["ip", "-d", "link", "show", geneve.DEVICE]).stdout
        assert "dstport 7777" in shown
        answer = nodes.x.ask(TCP, VIP["v4"], PORTS[TCP])
        assert name_and_client(answer) == ("server-1", nodes.x.v4)


def test_cleanup_removes_the_device(nodes: DsrNodes) -> None:
    node = nodes.nodes[2]

    def remove(dry_run: bool) -> list[str]:
        return cleanup.remove(node.bpffs, node.cgroup, dry_run)

    try:
        would = node.host.call(lambda: remove(True))
        assert f"device {geneve.DEVICE}" in would
        assert node.host.call(geneve.find)
        assert node.host.call(lambda: remove(False)) == would
        assert not node.host.call(geneve.find)
    finally:
        nodes.serve([nodes.pods[1]], [node])
