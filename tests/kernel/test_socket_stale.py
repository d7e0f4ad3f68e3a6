"""Connected UDP sockets whose endpoint goes: they are broken, so that their process dials anew.

Regression: cilium #12859 and #48096, where a resolver's socket went on asking a dead address for as long
as its process lived.
"""

import errno
import select
import socket

import pytest

from tests.kernel.clients import UDP, connected, converse
from tests.kernel.cluster import PATIENCE, Cluster, eventually, terminating

pytestmark = [pytest.mark.kernel, pytest.mark.dataplanes("ebpf")]

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_clients = pytest.mark.parametrize("client", ["pod", "node"])
DESTROYED = "ebpfproxy_sockets_destroyed_total"


def is_broken(sock: socket.socket, patience: float = PATIENCE) -> bool:
    """Whether the kernel ended the socket within `patience` seconds: a poll wakes up with ECONNABORTED."""
    if not select.select([sock], [], [], patience)[0]:
        return False
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNABORTED


@both_families
@both_clients
def test_a_socket_connected_to_an_endpoint_that_goes_is_broken(
    cluster: Cluster, client: str, family: str
) -> None:
    dns = cluster.service().to(cluster.a)
    address = dns.address(family)
    before = cluster.metric(DESTROYED)
    with connected(cluster.client(client), UDP, address, 53) as sock:
        assert converse(sock) == "a"
        dns.to(cluster.b)
        assert is_broken(sock)
        sock.connect((address, 53))
        assert converse(sock) == "b"
        eventually(lambda: cluster.metric(DESTROYED) == before + 1, "the metric counts it")


def test_a_socket_that_was_connected_with_a_v4_mapped_address(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, f"::ffff:{dns.v4}", 53) as sock:
        dns.to(cluster.b)
        assert is_broken(sock)


def test_a_socket_of_a_service_that_is_deleted_is_broken(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        cluster.write(dns.name)
        assert is_broken(sock)


def test_sockets_that_have_nothing_to_do_with_it_stay(cluster: Cluster) -> None:
    """Another endpoint of the Service, another Service of the endpoint, and the endpoint dialed directly."""
    dns = cluster.service().to(cluster.a, cluster.b)
    other = cluster.service().to(cluster.a)
    doomed = []
    with (
        connected(cluster.p, UDP, cluster.a.v4, 5353) as direct,
        connected(cluster.p, UDP, other.v4, 53) as elsewhere,
        connected(cluster.a, UDP, other.v4, 53) as hairpin,
    ):
        socks = [connected(cluster.p, UDP, dns.v4, 53) for _ in range(20)]
        try:
            whose = {sock: converse(sock) for sock in socks}
            doomed = [sock for sock in socks if whose[sock] == "a"]
            assert 0 < len(doomed) < 20
            dns.to(cluster.b)
            assert all(is_broken(sock) for sock in doomed)
            for sock in (direct, elsewhere, hairpin):
                assert converse(sock) == "a"
            for sock in set(socks) - set(doomed):
                assert converse(sock) == "b"
        finally:
            for sock in socks:
                sock.close()


def test_a_socket_that_went_over_to_a_direct_connection_stays(cluster: Cluster) -> None:
    """It knew the same endpoint through the Service before: that is over."""
    dns = cluster.service().to(cluster.a)
    with (
        connected(cluster.p, UDP, dns.v4, 53) as sock,
        connected(cluster.p, UDP, dns.v4, 53) as doomed,
    ):
        sock.connect((cluster.a.v4, 5353))
        dns.to(cluster.b)
        assert is_broken(doomed)
        assert converse(sock) == "a"


def test_a_socket_of_an_endpoint_that_only_became_unused_stays(cluster: Cluster) -> None:
    """A terminating endpoint still answers those who are with it; new clients go elsewhere."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        dns.to(terminating(cluster.a), cluster.b)
        assert converse(sock) == "a"
