"""UDP sockets: with a peer, without one, and with one peer after another."""

import ctypes
import errno
import socket
import struct

import pytest

from tests.kernel.clients import SILENT, UDP, ask_from, connected, converse, family_of, socket_in
from tests.kernel.cluster import Cluster, terminating
from tests.kernel.differences import DIFFERENCES

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_clients = pytest.mark.parametrize("client", ["pod", "node"])
but_ipvs = pytest.mark.backends("ebpf", "nftables", "iptables")
"""IPVS knows an answer's connection by the client and the endpoint (ip_vs_conn_out_get), so that one of two
Services answers, or a Service where its endpoint was asked; and no source port of NAT is changed for it."""


def disconnect(sock: socket.socket) -> None:
    """connect(2) to AF_UNSPEC, which Python's sockets have not."""
    libc = ctypes.CDLL(None, use_errno=True)
    unspecified = struct.pack("=H26x", socket.AF_UNSPEC)
    if libc.connect(sock.fileno(), unspecified, len(unspecified)):
        raise OSError(ctypes.get_errno(), "connect")


@both_families
@both_clients
def test_an_answer_comes_from_the_service_that_was_asked(cluster: Cluster, client: str, family: str) -> None:
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
def test_an_ipv6_socket_may_send_to_an_ipv4_service(cluster: Cluster, client: str) -> None:
    dns = cluster.service().to(cluster.a)
    mapped = f"::ffff:{dns.v4}"
    with socket_in(cluster.client(client), UDP, socket.AF_INET6) as sock:
        assert ask_from(sock, mapped, 53) == ("a", (mapped, 53))
        assert ask_from(sock, dns.v6, 53) == ("a", (dns.v6, 53))


@but_ipvs
def test_one_socket_asks_two_services_of_one_endpoint(cluster: Cluster) -> None:
    one, two = cluster.service().to(cluster.a), cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        for service in (one, two, one, one, two):
            assert ask_from(sock, service.v4, 53) == ("a", (service.v4, 53))


@but_ipvs
def test_one_socket_asks_a_service_and_its_endpoint(cluster: Cluster) -> None:
    """What was asked directly answers as itself, also after it answered for a Service."""
    dns = cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        assert ask_from(sock, dns.v4, 53) == ("a", (dns.v4, 53))
        assert ask_from(sock, cluster.a.v4, 5353) == ("a", (cluster.a.v4, 5353))
        assert ask_from(sock, dns.v4, 53) == ("a", (dns.v4, 53))


def test_a_connected_socket_names_the_service_as_a_datagrams_source(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        sock.sendall(b"?")
        assert sock.recvfrom(100) == (b"a", (dns.v4, 53))


@both_families
@both_clients
def test_a_socket_goes_from_one_service_to_another(cluster: Cluster, client: str, family: str) -> None:
    one, two = cluster.service().to(cluster.a), cluster.service().to(cluster.b)
    with connected(cluster.client(client), UDP, one.address(family), 53) as sock:
        assert converse(sock) == "a"
        disconnect(sock)
        with pytest.raises(OSError, check=lambda error: error.errno == errno.ENOTCONN):
            sock.getpeername()
        if family == "v4":  # an IPv6 socket takes only its previous peer's datagrams: __udp_disconnect()
            assert ask_from(sock, two.v4, 53) == ("b", (two.v4, 53))
        sock.connect((two.address(family), 53))
        assert sock.getpeername()[:2] == (two.address(family), 53)
        assert converse(sock) == "b"


def test_a_socket_that_left_its_service_hears_the_endpoint_as_itself(cluster: Cluster) -> None:
    """connect() to AF_UNSPEC meets no hook: what the socket was connected to is only known to be over
    when it sends."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        assert converse(sock) == "a"
        disconnect(sock)
        assert ask_from(sock, cluster.a.v4, 5353) == ("a", (cluster.a.v4, 5353))


def test_a_connected_socket_that_sends_elsewhere_keeps_its_service(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        sock.sendto(b"?", (cluster.b.v4, 5353))
        assert sock.getpeername() == (dns.v4, 53)
        sock.sendall(b"?")
        assert sock.recvfrom(100) == (b"a", (dns.v4, 53))


def test_a_connected_socket_may_connect_anew_without_disconnecting(cluster: Cluster) -> None:
    one, two = cluster.service().to(cluster.a), cluster.service().to(cluster.b)
    with connected(cluster.p, UDP, one.v4, 53) as sock:
        sock.connect((two.v4, 53))
        assert (converse(sock), sock.getpeername()) == ("b", (two.v4, 53))
        sock.connect((cluster.a.v4, 5353))
        assert (converse(sock), sock.getpeername()) == ("a", (cluster.a.v4, 5353))


def test_a_socket_without_peer_keeps_its_endpoint_while_others_come_and_go(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a, cluster.b)
    with socket_in(cluster.p, UDP) as sock:
        mine, _ = ask_from(sock, dns.v4, 53)
        own = cluster.lab.pods[mine]
        for others in ([cluster.c], [cluster.b, cluster.c], [], [cluster.a, cluster.b]):
            dns.to(own, *(pod for pod in others if pod is not own))
            assert {ask_from(sock, dns.v4, 53)[0] for _ in range(20)} == {mine}


def test_a_socket_without_peer_leaves_an_endpoint_that_is_gone(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        assert ask_from(sock, dns.v4, 53)[0] == "a"
        dns.to(cluster.b)
        DIFFERENCES[cluster.mode].await_flow(lambda: ask_from(sock, dns.v4, 53)[0], "b")
        assert ask_from(sock, dns.v4, 53) == ("b", (dns.v4, 53))


def test_a_socket_without_peer_leaves_a_terminating_endpoint_for_a_ready_one(cluster: Cluster) -> None:
    """Regression: cilium #48714, terminating UDP endpoints went on being used for 20 to 45 seconds."""
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


def test_a_socket_without_peer_is_refused_when_the_last_endpoint_goes(cluster: Cluster) -> None:
    differences = DIFFERENCES[cluster.mode]
    dns = cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        assert ask_from(sock, dns.v4, 53)[0] == "a"
        dns.to()
        if differences.by_packet:
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
