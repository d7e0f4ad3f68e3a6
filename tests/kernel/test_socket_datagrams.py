"""UDP sockets: connected, unconnected, and connected to one peer after another."""

import ctypes
import errno
import socket
import struct

import pytest

from tests.kernel.clients import SILENT, UDP, ask_from, connected, converse, family_of, socket_in
from tests.kernel.cluster import Cluster, elsewhere, terminating
from tests.kernel.differences import DIFFERENCES

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_clients = pytest.mark.parametrize("client", ["pod", "node"])
but_ipvs = pytest.mark.backends("ebpf", "nftables", "iptables")
"""IPVS identifies a reply's connection by client and endpoint (ip_vs_conn_out_get), and does not change the
source port to make flows distinct. So a reply may come from another Service, or from a Service instead of
its endpoint."""


def disconnect(sock: socket.socket) -> None:
    """connect(2) to AF_UNSPEC, which Python's sockets do not support."""
    libc = ctypes.CDLL(None, use_errno=True)
    unspecified = struct.pack("=H26x", socket.AF_UNSPEC)
    if libc.connect(sock.fileno(), unspecified, len(unspecified)):
        raise OSError(ctypes.get_errno(), "connect")


@both_families
@both_clients
def test_a_reply_has_the_service_as_its_source(cluster: Cluster, client: str, family: str) -> None:
    dns = cluster.service().to(cluster.a, cluster.b)
    address = dns.address(family)
    found = set()
    for _ in range(12):
        with socket_in(cluster.client(client), UDP, family_of(address)) as sock:
            answer, source = ask_from(sock, address, 53)
        assert source == (address, 53)
        found.add(answer)
    assert found == {"a", "b"}


@both_clients
def test_an_ipv6_socket_can_send_to_an_ipv4_service(cluster: Cluster, client: str) -> None:
    dns = cluster.service().to(cluster.a)
    mapped = f"::ffff:{dns.v4}"
    with socket_in(cluster.client(client), UDP, socket.AF_INET6) as sock:
        assert ask_from(sock, mapped, 53) == ("a", (mapped, 53))
        assert ask_from(sock, dns.v6, 53) == ("a", (dns.v6, 53))


@pytest.mark.backends("ebpf")
@both_families
@both_clients
def test_sending_fails_without_endpoints_and_succeeds_if_policy_local_drops(
    cluster: Cluster, client: str, family: str
) -> None:
    dns = cluster.service(internalTrafficPolicy="Local").to()
    address = dns.address(family)
    with socket_in(cluster.client(client), UDP, family_of(address)) as sock:
        with pytest.raises(ConnectionRefusedError):
            sock.sendto(b"?", (address, 53))
        dns.to(elsewhere(cluster.b))
        assert sock.sendto(b"?", (address, 53)) == 1


@but_ipvs
def test_one_socket_can_use_two_services_of_one_endpoint(cluster: Cluster) -> None:
    one, two = cluster.service().to(cluster.a), cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        for service in (one, two, one, one, two):
            assert ask_from(sock, service.v4, 53) == ("a", (service.v4, 53))


@but_ipvs
def test_one_socket_can_use_a_service_and_its_endpoint_directly(cluster: Cluster) -> None:
    """A direct reply has the endpoint as its source, also after a reply for the Service."""
    dns = cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        assert ask_from(sock, dns.v4, 53) == ("a", (dns.v4, 53))
        assert ask_from(sock, cluster.a.v4, 5353) == ("a", (cluster.a.v4, 5353))
        assert ask_from(sock, dns.v4, 53) == ("a", (dns.v4, 53))


def test_recvfrom_of_a_connected_socket_returns_the_service(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        sock.sendall(b"?")
        assert sock.recvfrom(100) == (b"a", (dns.v4, 53))


@both_families
@both_clients
def test_a_socket_can_disconnect_and_connect_to_another_service(
    cluster: Cluster, client: str, family: str
) -> None:
    one, two = cluster.service().to(cluster.a), cluster.service().to(cluster.b)
    with connected(cluster.client(client), UDP, one.address(family), 53) as sock:
        assert converse(sock) == "a"
        disconnect(sock)
        with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOTCONN):
            sock.getpeername()
        if family == "v4":  # an IPv6 socket accepts only its previous peer's datagrams: __udp_disconnect()
            assert ask_from(sock, two.v4, 53) == ("b", (two.v4, 53))
        sock.connect((two.address(family), 53))
        assert sock.getpeername()[:2] == (two.address(family), 53)
        assert converse(sock) == "b"


def test_a_disconnected_socket_sees_the_endpoints_own_address(cluster: Cluster) -> None:
    """connect() to AF_UNSPEC runs no hook: the programs notice the end of the connection when the socket
    sends."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        assert converse(sock) == "a"
        disconnect(sock)
        assert ask_from(sock, cluster.a.v4, 5353) == ("a", (cluster.a.v4, 5353))


def test_a_connected_socket_that_sends_to_another_address_keeps_its_service(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        sock.sendto(b"?", (cluster.b.v4, 5353))
        assert sock.getpeername() == (dns.v4, 53)
        sock.sendall(b"?")
        assert sock.recvfrom(100) == (b"a", (dns.v4, 53))


def test_a_connected_socket_can_connect_again_without_disconnecting(cluster: Cluster) -> None:
    one, two = cluster.service().to(cluster.a), cluster.service().to(cluster.b)
    with connected(cluster.p, UDP, one.v4, 53) as sock:
        sock.connect((two.v4, 53))
        assert (converse(sock), sock.getpeername()) == ("b", (two.v4, 53))
        sock.connect((cluster.a.v4, 5353))
        assert (converse(sock), sock.getpeername()) == ("a", (cluster.a.v4, 5353))


def test_an_unconnected_socket_keeps_its_endpoint_while_others_change(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a, cluster.b)
    with socket_in(cluster.p, UDP) as sock:
        chosen, _ = ask_from(sock, dns.v4, 53)
        own = cluster.lab.pods[chosen]
        for others in ([cluster.c], [cluster.b, cluster.c], [], [cluster.a, cluster.b]):
            dns.to(own, *(pod for pod in others if pod is not own))
            assert {ask_from(sock, dns.v4, 53)[0] for _ in range(20)} == {chosen}


def test_an_unconnected_socket_leaves_a_removed_endpoint(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        assert ask_from(sock, dns.v4, 53)[0] == "a"
        dns.to(cluster.b)
        DIFFERENCES[cluster.mode].await_flow(lambda: ask_from(sock, dns.v4, 53)[0], "b")
        assert ask_from(sock, dns.v4, 53) == ("b", (dns.v4, 53))


def test_an_unconnected_socket_leaves_a_terminating_endpoint_for_a_ready_one(cluster: Cluster) -> None:
    """Regression: cilium #48714, where terminating UDP endpoints were used for another 20 to 45 seconds."""
    dns = cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        assert ask_from(sock, dns.v4, 53)[0] == "a"
        dns.to(terminating(cluster.a))
        assert ask_from(sock, dns.v4, 53)[0] == "a"
        dns.to(terminating(cluster.a), cluster.b)
        expected = "b" if DIFFERENCES[cluster.mode].leaves_terminating else "a"
        assert {ask_from(sock, dns.v4, 53)[0] for _ in range(10)} == {expected}
        dns.to(terminating(cluster.a, serving=False), cluster.b)
        DIFFERENCES[cluster.mode].await_flow(lambda: ask_from(sock, dns.v4, 53)[0], "b")


def test_an_unconnected_socket_is_rejected_when_the_last_endpoint_is_removed(cluster: Cluster) -> None:
    differences = DIFFERENCES[cluster.mode]
    dns = cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        assert ask_from(sock, dns.v4, 53)[0] == "a"
        dns.to()
        if differences.by_packet or differences.by_relay:
            sock.settimeout(0.3)
            differences.await_flow(lambda: _asked(sock, dns.v4), SILENT)
            sock.settimeout(3.0)
        else:
            with pytest.raises(ConnectionRefusedError):
                sock.sendto(b"?", (dns.v4, 53))
        dns.to(cluster.b)
        assert ask_from(sock, dns.v4, 53)[0] == "b"


def _asked(sock: socket.socket, address: str) -> str:
    try:
        return ask_from(sock, address, 53)[0]
    except TimeoutError:
        return SILENT
