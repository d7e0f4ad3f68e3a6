"""A socket that connects to a Service: which peer address it sees, and ways to connect."""

import errno
import select
import socket

import pytest

from ebpfproxy.model.address import Protocol
from tests.kernel.clients import (
    FAMILIES,
    TCP,
    UDP,
    answers,
    ask_from,
    connected,
    converse,
    family_of,
    socket_in,
)
from tests.kernel.cluster import Cluster

pytestmark = pytest.mark.kernel

PORTS = {TCP: 80, UDP: 53}
both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_clients = pytest.mark.parametrize("client", ["pod", "node"])
both_protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])


@pytest.mark.backends("ebpf")
@both_families
@both_clients
@both_protocols
def test_a_socket_sees_the_service_as_its_peer_and_its_own_address(
    cluster: Cluster, client: str, family: str, protocol: Protocol
) -> None:
    web = cluster.service().to(cluster.a)
    netns, address = cluster.client(client), web.address(family)
    with connected(netns, protocol, address, PORTS[protocol]) as sock:
        assert converse(sock) == "a"
        assert sock.getpeername()[:2] == (address, PORTS[protocol])
        own = sock.getsockname()[0]
    if client == "pod":
        assert own == (netns.v4 if family == "v4" else netns.v6)
    else:
        assert own.startswith("10.244.1.1" if family == "v4" else "fd00:")


@pytest.mark.backends("ebpf")
@both_clients
@both_protocols
def test_an_ipv6_socket_can_connect_to_an_ipv4_service(
    cluster: Cluster, client: str, protocol: Protocol
) -> None:
    web = cluster.service().to(cluster.a)
    mapped = f"::ffff:{web.v4}"
    with connected(cluster.client(client), protocol, mapped, PORTS[protocol]) as sock:
        assert converse(sock) == "a"
        assert sock.getpeername()[:2] == (mapped, PORTS[protocol])


@pytest.mark.backends("ebpf")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_client_on_the_node_sees_the_loopback_address_as_its_peer(cluster: Cluster, address: str) -> None:
    web = cluster.service(node_port=True).to(cluster.a)
    with connected(cluster.node, TCP, address, web.node_port) as sock:
        assert converse(sock) == "a"
        assert sock.getpeername()[:2] == (address, web.node_port)
    with socket_in(cluster.node, UDP, family_of(address)) as sock:
        assert ask_from(sock, address, web.node_port) == ("a", (address, web.node_port))


@both_families
def test_a_nonblocking_connect_succeeds(cluster: Cluster, family: str) -> None:
    web = cluster.service().to(cluster.a)
    with socket_in(cluster.p, TCP, FAMILIES[family]) as sock:
        sock.setblocking(False)
        assert sock.connect_ex((web.address(family), 80)) in (0, errno.EINPROGRESS)
        assert select.select([], [sock], [], 3.0)[1] == [sock]
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        sock.setblocking(True)
        sock.settimeout(3.0)
        assert converse(sock) == "a"


@both_families
@both_clients
def test_a_connection_by_tcp_fast_open_succeeds(cluster: Cluster, client: str, family: str) -> None:
    """sendto() connects, and connect() is never called."""
    web = cluster.service().to(cluster.a)
    address = web.address(family)
    with socket_in(cluster.client(client), TCP, FAMILIES[family]) as sock:
        sock.setblocking(True)  # without a cookie the data is sent after the handshake
        assert sock.sendto(b"?", socket.MSG_FASTOPEN, (address, 80)) == 1
        assert sock.recv(100) == b"a"
        assert sock.getpeername()[:2] == (address, 80)


@pytest.mark.backends("iptables", "ipvs", "userspace")
@both_families
def test_udp_clients_are_spread_evenly_over_three_endpoints(cluster: Cluster, family: str) -> None:
    """Chi-square with two degrees of freedom: P(X > x) = exp(-x/2), so that 42 fails once in 10^9 runs. The
    other modes: test_socket_balancing.py, test_nftables_balancing.py."""
    web = cluster.service().to(cluster.a, cluster.b, cluster.c)
    counts = answers(cluster.p, UDP, web.address(family), 53, 3000)
    expected = 3000 / 3
    assert sum((counts[pod] - expected) ** 2 / expected for pod in "abc") < 42, counts
