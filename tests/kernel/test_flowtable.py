"""Clients of Services while a flowtable forwards established flows (--nftables-flowtable-devices).

That packets of a flow are forwarded by the flowtable is shown by rules of another program, which drop all
packets that the node's own stack forwards.
"""

import contextlib
import os
import re
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.lab import Lab, Pod, PodNetwork, sockets
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.linux.netlink.conntrack import Flow
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import FAMILIES, SILENT, TCP, UDP, connected, converse
from tests.kernel.cluster import PATIENCE, TCP_TARGET, eventually
from tests.kernel.flowtable_here import needs_flowtables
from tests.kernel.two_nodes import NARROW, Everywhere, TwoNodes, name_and_client, route_mtu

pytestmark = [pytest.mark.kernel, needs_flowtables]

families = pytest.mark.parametrize("family", ["v4", "v6"])
protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
places = pytest.mark.parametrize("place", ["here", "there"])
frontends = pytest.mark.parametrize("frontend", ["ClusterIP", "NodePort", "ExternalIP", "LoadBalancer"])
OPTION = "--nftables-flowtable-devices=eth*,veth*"
_IP_RECVTTL = 12
STREAM = os.urandom(1 << 20)
DROPPING = (
    "add table inet forwards; "
    "add chain inet forwards dropped { type filter hook forward priority 0; policy drop; }"
)


@pytest.fixture(scope="module")
def lab_pair() -> Iterator[TwoNodes]:
    with Lab("test-flowtable", 71, PodNetwork.ROUTED) as lab, TwoNodes(lab) as made:
        made.mode, made.flags = "nftables", ("--iptables-min-sync-period=0s",)
        made.start(OPTION)
        made.await_second()
        yield made


@pytest.fixture
def pair(lab_pair: TwoNodes) -> Iterator[TwoNodes]:
    with lab_pair.temporary():
        yield lab_pair


@contextlib.contextmanager
def nothing_forwarded(pair: TwoNodes) -> Iterator[None]:
    """Within the block, the node's own stack forwards no packet."""
    pair.node.run(["nft", DROPPING])
    try:
        yield
    finally:
        pair.node.run(["nft", "delete table inet forwards"])


def client_of(pair: TwoNodes, frontend: str) -> Pod:
    return pair.p if frontend == "ClusterIP" else pair.x


def flow_of(pair: TwoNodes, client: socket.socket) -> Flow | None:
    """The node's conntrack entry of a client's connection. An earlier connection to another port may have had
    its source port. A socket whose connection has ended does not know the frontend's port any more."""
    port, frontend_port = client.getsockname()[1], 0
    with contextlib.suppress(OSError):
        frontend_port = client.getpeername()[1]
    protocol = UDP if client.type == socket.SOCK_DGRAM else TCP
    with netns.entered(pair.node.netns):
        found = [each for each in conntrack.flows(protocol) if each.source_port == port]
    return next((each for each in found if each.destination_port == frontend_port or not frontend_port), None)


def is_offloaded(pair: TwoNodes, client: socket.socket) -> bool:
    flow = flow_of(pair, client)
    return flow is not None and flow.is_offloaded


@contextlib.contextmanager
def offloaded(
    pair: TwoNodes, netns_: Pod, address: str, port: int, protocol: Protocol = TCP
) -> Iterator[socket.socket]:
    """A client's connection, which the flowtable has."""
    with connected(netns_, protocol, address, port) as client:
        first = converse(client)
        assert first != SILENT
        # A packet does not add its flow if the node does not know the next hop's link-layer address yet.
        eventually(lambda: converse(client) == first and is_offloaded(pair, client), "the flow is added")
        yield client


def name(client: socket.socket) -> str:
    return name_and_client(converse(client))[0]


def served(pair: TwoNodes, place: str) -> Everywhere:
    return pair.everywhere().to(pair.a if place == "here" else pair.d)


@families
@protocols
@places
@frontends
def test_established_flows_bypass_the_nodes_stack(
    pair: TwoNodes, family: str, protocol: Protocol, place: str, frontend: str
) -> None:
    web, client = served(pair, place), client_of(pair, frontend)
    with offloaded(pair, client, *web.frontend(frontend, family, protocol), protocol) as sock:
        before = converse(sock)
        with nothing_forwarded(pair):
            assert [converse(sock) for _ in range(3)] == 3 * [before]


@families
def test_the_drop_rule_of_these_tests_affects_other_flows(pair: TwoNodes, family: str) -> None:
    """The client connects to a pod directly."""
    with connected(pair.x, UDP, getattr(pair.a, family), 5353, 0.5) as sock:
        assert name(sock) == name(sock) == "a"
        assert not is_offloaded(pair, sock)
        with nothing_forwarded(pair):
            assert converse(sock) == SILENT


@families
def test_flows_that_another_program_translates_are_not_offloaded(pair: TwoNodes, family: str) -> None:
    """As the CNI plugin portmap does for hostPorts."""
    of, target = ("ip", pair.a.v4) if family == "v4" else ("ip6", f"[{pair.a.v6}]")
    table = f"{of} portmap"
    hook = "type nat hook prerouting priority -100;"
    rule = f"fib daddr type local tcp dport 12345 dnat to {target}:{TCP_TARGET}"
    pair.node.run(
        ["nft", f"add table {table}; add chain {table} pre {{ {hook} }}; add rule {table} pre {rule}"]
    )
    try:
        with connected(pair.x, TCP, getattr(pair.node, family), 12345) as sock:
            assert name(sock) == name(sock) == "a"
            flow = flow_of(pair, sock)
            assert flow
            assert (flow.is_dnated, flow.is_offloaded) == (True, False)
    finally:
        pair.node.run(["nft", f"delete table {table}"])


@families
@places
def test_connections_end_at_both_sides(pair: TwoNodes, family: str, place: str) -> None:
    """Their last packets pass conntrack, which then counts them as ended."""
    web = served(pair, place)
    with offloaded(pair, pair.x, *web.frontend("NodePort", family, TCP)) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
        eventually(lambda: not is_offloaded(pair, sock), "the connection leaves the flowtable")
        flow = flow_of(pair, sock)
        assert not flow or flow.tcp_state != conntrack.TCP_CONNTRACK_ESTABLISHED


@families
def test_a_reset_ends_a_connection(pair: TwoNodes, family: str) -> None:
    web = served(pair, "there")
    with offloaded(pair, pair.x, *web.frontend("NodePort", family, TCP)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        flow = flow_of(pair, sock)
    assert flow

    def is_open() -> bool:
        with netns.entered(pair.node.netns):
            return any(
                each.id == flow.id and each.tcp_state == conntrack.TCP_CONNTRACK_ESTABLISHED
                for each in conntrack.flows(TCP)
            )

    eventually(lambda: not is_open(), "conntrack sees the reset")


@families
@places
def test_packets_above_the_path_mtu_of_an_open_connection(pair: TwoNodes, family: str, place: str) -> None:
    """The router on the path to the client becomes narrow."""
    web = served(pair, place)
    with connected(pair.x, TCP, *web.frontend("NodePort", family, TCP), PATIENCE) as sock:
        assert sockets.exchange(sock, STREAM) == STREAM
        assert is_offloaded(pair, sock)
        with pair.narrow_to_outside():
            assert sockets.exchange(sock, STREAM) == STREAM
            assert is_offloaded(pair, sock)


@families
def test_packets_above_the_path_mtu_of_the_node(pair: TwoNodes, family: str) -> None:
    """The node's own route to the endpoint becomes narrow, and it sends the ICMP error."""
    web = served(pair, "here")
    address, port = web.frontend("NodePort", family, TCP)
    with connected(pair.x, TCP, address, port, PATIENCE) as sock:
        assert sockets.exchange(sock, STREAM) == STREAM
        assert is_offloaded(pair, sock)
        with pair.narrow_to(pair.a):
            assert sockets.exchange(sock, STREAM) == STREAM
            assert route_mtu(pair.x, address) == NARROW


@families
def test_each_packet_loses_one_hop(pair: TwoNodes, family: str) -> None:
    """By the flowtable as by the node's stack."""
    web = served(pair, "here")
    level, option, kind = {
        "v4": (socket.IPPROTO_IP, _IP_RECVTTL, socket.IP_TTL),
        "v6": (socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, socket.IPV6_HOPLIMIT),
    }[family]
    with connected(pair.x, UDP, *web.frontend("NodePort", family, UDP)) as sock:
        sock.setsockopt(level, option, 1)
        hops = []
        for _ in range(3):
            sock.send(b"?")
            _, ancillary, _, _ = sock.recvmsg(100, 100)
            hops += [
                int.from_bytes(value, "little")
                for of, name_, value in ancillary
                if (of, name_) == (level, kind)
            ]
        assert is_offloaded(pair, sock)
        assert len(hops) == 3
        assert len(set(hops)) == 1


@families
@places
def test_connections_to_a_removed_endpoint_are_reset(pair: TwoNodes, family: str, place: str) -> None:
    web = pair.everywhere()
    web.annotations["ebpfproxy/removed-endpoints"] = "reset"
    leaving, staying = (pair.a, pair.b) if place == "here" else (pair.d, pair.e)
    web.to(leaving)
    with offloaded(pair, pair.x, *web.frontend("NodePort", family, TCP)) as sock:
        web.to(staying)
        sock.settimeout(30)
        with pytest.raises(OSError, match=r"reset|abort"):
            sock.recv(1)


@families
@pytest.mark.parametrize("frontend", ["ClusterIP", "NodePort"])
def test_a_udp_flow_to_a_removed_endpoint_gets_another_one(
    pair: TwoNodes, family: str, frontend: str
) -> None:
    web, client = served(pair, "there"), client_of(pair, frontend)
    with offloaded(pair, client, *web.frontend(frontend, family, UDP), UDP) as sock:
        assert name(sock) == "d"
        web.to(pair.a)
        sock.settimeout(0.5)
        eventually(lambda: name(sock) == "a", "the flow reaches the endpoint that is left")
        assert name(sock) == name(sock) == "a"


def test_connections_survive_restarts_with_and_without_the_option(pair: TwoNodes) -> None:
    """Without it, there is no flowtable."""
    web = served(pair, "there")
    address, port = web.frontend("NodePort", "v4", TCP)
    with offloaded(pair, pair.x, address, port) as first:
        pair.restart(OPTION)
        with nothing_forwarded(pair):
            assert name(first) == "d"
        try:
            pair.restart()
            assert "flowtable" not in pair.node.run(["nft", "list", "ruleset"]).stdout
            eventually(lambda: not is_offloaded(pair, first), "the flow is conntrack's again")
            with connected(pair.x, TCP, address, port) as second:
                assert name(first) == name(second) == "d"
                assert not is_offloaded(pair, second)
                pair.restart(OPTION)
                assert name(first) == name(second) == name(second) == "d"
                eventually(lambda: is_offloaded(pair, second), "the flow is added")
        finally:
            pair.restart(OPTION)


def test_connections_survive_a_switch_to_another_mode(pair: TwoNodes) -> None:
    web = served(pair, "there")
    with offloaded(pair, pair.x, *web.frontend("NodePort", "v4", TCP)) as sock:
        try:
            pair.mode = "iptables"
            pair.restart(OPTION)
            eventually(
                lambda: "flowtable" not in pair.node.run(["nft", "list", "flowtables"]).stdout,
                "the flowtable is removed",
            )
            assert name(sock) == name(sock) == "d"
        finally:
            pair.mode = "nftables"
            pair.restart(OPTION)
        assert name(sock) == "d"


def test_a_device_that_is_added_later_is_in_the_flowtable(pair: TwoNodes) -> None:
    """The client is a new pod."""
    late = pair.lab.pod("late")
    web = served(pair, "there")

    def is_listed() -> bool:
        listed = pair.node.run(["nft", "list", "flowtables"]).stdout
        return len(re.findall(rf"\b{late.device}\b", listed)) == len(FAMILIES)

    eventually(is_listed, "the device is added")
    with offloaded(pair, late, web.v4, 80) as sock, nothing_forwarded(pair):
        assert name(sock) == "d"


def test_verify_finds_no_difference(pair: TwoNodes) -> None:
    served(pair, "there")
    flags = (
        "--proxy-mode=nftables",
        "--detect-local-mode=InterfaceNamePrefix",
        "--pod-interface-name-prefix=veth",
        f"--manifests={pair.folder}",
        f"--hostname-override={pair.lab.node_name}",
        OPTION,
    )
    done = pair.ebpfproxy("verify", *flags, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
