"""A process of the node cannot bind a NodePort: it would receive no connections without any error."""

import contextlib
import errno
import socket

import pytest

from ebpfproxy.lab import Netns
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, UDP, family_of, socket_in
from tests.kernel.cluster import Cluster

pytestmark = [pytest.mark.kernel, pytest.mark.backends("ebpf")]

both_protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])


def bind_errno(netns: Netns, protocol: Protocol, address: str, port: int) -> int:
    """The errno of bind(); 0 if it succeeds."""
    with socket_in(netns, protocol, family_of(address)) as sock:
        try:
            sock.bind((address, port))
        except OSError as error:
            return error.errno or -1
    return 0


def own_addresses(cluster: Cluster) -> list[str]:
    return ["0.0.0.0", "127.0.0.1", cluster.node.v4, "::", "::1", cluster.node.v6, "::ffff:127.0.0.1"]


@both_protocols
def test_the_node_cannot_bind_a_node_port(cluster: Cluster, protocol: Protocol) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    for address in own_addresses(cluster):
        assert bind_errno(cluster.node, protocol, address, web.node_port) == errno.EADDRINUSE, address


@both_protocols
def test_the_node_can_bind_other_ports(cluster: Cluster, protocol: Protocol) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    for address in own_addresses(cluster):
        assert bind_errno(cluster.node, protocol, address, web.node_port + 1000) == 0, address
        assert bind_errno(cluster.node, protocol, address, 0) == 0, address


@both_protocols
def test_a_pod_can_bind_the_number_of_a_node_port(cluster: Cluster, protocol: Protocol) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    for address in ("0.0.0.0", cluster.p.v4, "::", cluster.p.v6):
        assert bind_errno(cluster.p, protocol, address, web.node_port) == 0, address


def test_a_dual_stack_ipv6_socket_cannot_bind_an_ipv4_node_port(cluster: Cluster) -> None:
    web = cluster.service(node_port=True, ipFamilies=["IPv4"])
    web.to(cluster.a, clusterIPs=[web.v4])
    assert bind_errno(cluster.node, TCP, "::", web.node_port) == errno.EADDRINUSE
    assert bind_errno(cluster.node, TCP, "::1", web.node_port) == 0


def test_a_node_port_can_be_bound_once_its_service_is_deleted(cluster: Cluster) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    cluster.write(web.name)
    assert bind_errno(cluster.node, TCP, "0.0.0.0", web.node_port) == 0


def test_a_socket_that_was_bound_before_the_service_stays_bound(cluster: Cluster) -> None:
    """The socket cannot be unbound. Clients on the node and in pods reach the Service nevertheless."""
    web = cluster.service(node_port=True)
    with contextlib.closing(socket_in(cluster.node, TCP)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("0.0.0.0", web.node_port))
        sock.listen()
        web.to(cluster.a)
        assert sock.getsockname() == ("0.0.0.0", web.node_port)


def test_the_kernel_does_not_pick_a_node_port_as_ephemeral_port(cluster: Cluster) -> None:
    """NodePorts may lie in the ephemeral range."""
    web = cluster.service(node_port=True)
    web.node_port = 32999
    web.to(cluster.a)
    with socket_in(cluster.node, TCP) as sock:
        sock.bind(("127.0.0.1", 0))
        assert sock.getsockname()[1] != web.node_port
