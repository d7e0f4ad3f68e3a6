"""Which broken sockets are found does not depend on how many others there were."""

import resource
import socket
from collections.abc import Callable

import pytest

from tests.kernel.clients import UDP, connected, converse
from tests.kernel.cluster import Cluster
from tests.kernel.test_socket_stale import is_broken

pytestmark = pytest.mark.kernel


def crowd_of_connections(address: str) -> int:
    """How many TCP sockets the calling process has connected at once; it keeps them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    held = [socket.create_connection((address, 80)) for _ in range(2000)]
    return len(held)


def come_and_gone(address: str) -> int:
    """How many UDP sockets the calling process connected, each closed before the next."""
    for _ in range(2000):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 53))
    return 2000


@pytest.mark.parametrize("others", [crowd_of_connections, come_and_gone])
def test_a_socket_that_was_connected_long_before_many_others(
    rough: Cluster, others: Callable[[str], int]
) -> None:
    """Regression: cilium #40336, #42649 and #48096: the entry of the first had made room for later ones.

    Only more UDP sockets than --ebpf-sockets-max, all connected at once, displace each other; that is
    counted (peers_full of `ebpfproxy dump all`).
    """
    rough.start("--ebpf-sockets-max=256")
    web, busy = rough.service().to(rough.a), rough.service().to(rough.c)
    with connected(rough.p, UDP, web.v4, 53) as sock:
        crowd = rough.q.start(lambda: others(busy.v4))
        try:
            assert crowd.result() == 2000
        finally:
            crowd.kill()
        web.to(rough.b)
        assert is_broken(sock)
        sock.connect((web.v4, 53))
        assert converse(sock) == "b"
