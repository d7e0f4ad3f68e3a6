"""Stale UDP sockets and the agent: with many other sockets, and without CAP_SYS_PTRACE."""

import errno
import resource
import select
import socket
from collections.abc import Callable

import pytest

from ebpfproxy.backends.ebpf.sockets.stale_sockets import NOT_RECONNECTED, RECONNECTED
from tests.kernel.clients import UDP, connected, converse
from tests.kernel.cluster import PATIENCE, Cluster, eventually
from tests.kernel.test_socket_stale import reaches

pytestmark = pytest.mark.kernel

WITHOUT_PTRACE = "setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"
"""The sockets belong to the test process, which has more capabilities than this agent."""


def is_destroyed(sock: socket.socket, patience: float = PATIENCE) -> bool:
    """Whether the kernel ends the socket within `patience` seconds: a poll wakes up with ECONNABORTED."""
    if not select.select([sock], [], [], patience)[0]:
        return False
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNABORTED


def many_open_tcp_sockets(address: str) -> int:
    """Connect 2000 TCP sockets in the calling process and keep them open; their number."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    held = [socket.create_connection((address, 80)) for _ in range(2000)]
    return len(held)


def many_closed_udp_sockets(address: str) -> int:
    """Connect 2000 UDP sockets, each closed before the next; their number."""
    for _ in range(2000):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 53))
    return 2000


@pytest.mark.parametrize("others", [many_open_tcp_sockets, many_closed_udp_sockets])
def test_a_stale_socket_is_reconnected_after_many_other_sockets(
    restartable: Cluster, others: Callable[[str], int]
) -> None:
    """Regression: cilium #40336, #42649 and #48096, where later sockets evicted the entry of the first.

    Entries are evicted only by more than --ebpf-sockets-max UDP sockets that are connected at the same time.
    This is counted (peers_full of `ebpfproxy dump all`).
    """
    restartable.start("--ebpf-sockets-max=256")
    web, busy = restartable.service().to(restartable.a), restartable.service().to(restartable.c)
    with connected(restartable.p, UDP, web.v4, 53) as sock:
        clients = restartable.q.start(lambda: others(busy.v4))
        try:
            assert clients.result() == 2000
        finally:
            clients.kill()
        web.to(restartable.b)
        reaches(sock, "b")


def test_without_sys_ptrace_stale_sockets_of_the_node_are_reported_and_reconnected_later(
    restartable: Cluster,
) -> None:
    """Datagrams of pods' sockets are translated instead: test_stale_translation.py."""
    restartable.launch(before=WITHOUT_PTRACE).await_sync(timeout=PATIENCE)
    dns = restartable.service().to(restartable.a)
    with connected(restartable.node, UDP, dns.v4, 53) as sock:
        assert converse(sock) == "a"
        dns.to(restartable.b)
        line = restartable.agent.await_line(lambda line: NOT_RECONNECTED in line.text)
        assert line.values["frontend"] == f"{dns.v4}:53"
        assert line.values["service"] == f"default/{dns.name}:udp"
        assert "CAP_SYS_PTRACE" in line.values["hint"]
        assert restartable.metric("ebpfproxy_sockets_stale") == 1
        assert converse(sock) == "a", "the socket keeps its endpoint"
        agent = restartable.start()
        reaches(sock, "b")
        agent.await_line(lambda line: RECONNECTED in line.text)


def test_without_sys_ptrace_stale_udp_destroy_destroys_sockets_of_the_node(restartable: Cluster) -> None:
    restartable.launch("--ebpf-stale-udp=destroy", before=WITHOUT_PTRACE).await_sync(timeout=PATIENCE)
    dns = restartable.service().to(restartable.a)
    with (
        connected(restartable.node, UDP, dns.v4, 53) as sock,
        connected(restartable.node, UDP, restartable.a.v4, 5353) as direct,
        connected(restartable.p, UDP, dns.v4, 53) as of_pod,
    ):
        dns.to(restartable.b)
        assert is_destroyed(sock)
        assert not is_destroyed(direct, 0.0)
        reaches(of_pod, "b")
        sock.connect((dns.v4, 53))
        assert converse(sock) == "b"
        eventually(
            lambda: restartable.metric("ebpfproxy_sockets_destroyed_total") == 1,
            "the destroyed socket is counted",
        )
        assert restartable.metric("ebpfproxy_sockets_stale") == 0


def test_stale_udp_destroy_keeps_sockets_that_can_be_reconnected(restartable: Cluster) -> None:
    restartable.start("--ebpf-stale-udp=destroy")
    dns = restartable.service().to(restartable.a)
    with connected(restartable.p, UDP, dns.v4, 53) as sock:
        dns.to(restartable.b)
        reaches(sock, "b")
    assert restartable.metric("ebpfproxy_sockets_destroyed_total") == 0
