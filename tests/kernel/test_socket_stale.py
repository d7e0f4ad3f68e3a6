"""Connected UDP sockets whose endpoint is removed are reconnected to another one, and keep working.

Regression: cilium #12859 and #48096, where a resolver's socket sent to a dead address as long as its
process ran.
"""

import errno
import select
import socket
import threading
import time
from collections.abc import Callable

import pytest

from tests.kernel.clients import SILENT, UDP, connected, converse, socket_in
from tests.kernel.cluster import Cluster, elsewhere, eventually, terminating
from tests.kernel.differences import DIFFERENCES

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_clients = pytest.mark.parametrize("client", ["pod", "node"])
only_ebpf = pytest.mark.backends("ebpf")
RECONNECTED = "ebpfproxy_sockets_reconnected_total"


def reaches(sock: socket.socket, server: str) -> None:
    """Await that this server answers on the connected socket, which is never opened again."""
    sock.settimeout(0.2)
    eventually(lambda: exchange(sock) == server, f"{server} answers")


def leaves(sock: socket.socket, server: str) -> None:
    """Await that this server does not answer on the connected socket any more."""
    sock.settimeout(0.2)
    eventually(lambda: exchange(sock) != server, f"{server} no longer answers")


def exchange(sock: socket.socket) -> str:
    """The name of the server that answers, or of the error if sending or receiving fails. On two nodes the
    answer has the client's address after the name."""
    try:
        return converse(sock).partition(" ")[0]
    except OSError as failure:
        return errno.errorcode[failure.errno or 0]


def lost_datagrams(sock: socket.socket, until: str) -> int:
    """Send five datagrams a second until one reaches the server `until`. The number of those before it.

    The previous endpoint of this test still answers, and at once. Without the pauses, thousands of datagrams
    would reach it while conntrack's entry exists.
    """
    sock.settimeout(0.2)
    for count in range(100):
        if exchange(sock) == until:
            return count
        time.sleep(0.2)
    raise TimeoutError(f"{until} does not answer")


@both_families
@both_clients
def test_a_socket_keeps_working_when_its_endpoint_is_replaced(
    cluster: Cluster, client: str, family: str
) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.client(client), UDP, dns.address(family), 53) as sock:
        assert converse(sock) == "a"
        local = sock.getsockname()
        for server, pod in (("b", cluster.b), ("c", cluster.c), ("a", cluster.a)):
            dns.to(pod)
            reaches(sock, server)
        assert sock.getsockname() == local
        assert sock.getpeername()[:2] == (dns.address(family), 53)


@only_ebpf
def test_reconnected_sockets_are_counted(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    before = cluster.metric(RECONNECTED)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        dns.to(cluster.b)
        reaches(sock, "b")
        eventually(lambda: cluster.metric(RECONNECTED) == before + 1, "the metric counts it")
        assert cluster.metric("ebpfproxy_sockets_stale") == 0


@only_ebpf
def test_reconnecting_causes_no_error_and_loses_at_most_one_answer(cluster: Cluster) -> None:
    """An answer that the previous endpoint sends while the socket is reconnected is lost."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        sock.settimeout(1.0)
        received: list[str] = []
        done = threading.Event()

        def talk() -> None:
            while not done.is_set():
                received.append(exchange(sock))

        talker = threading.Thread(target=talk)
        talker.start()
        try:
            dns.to(cluster.b)
            eventually(lambda: received[-1:] == ["b"], "the other endpoint answers")
        finally:
            done.set()
            talker.join()
    assert received[0] == "a"
    assert set(received) <= {"a", "b", SILENT}
    assert received.count(SILENT) <= 1
    assert "a" not in received[received.index("b") :]


def test_poll_waits_through_a_reconnection_for_the_next_answer(cluster: Cluster) -> None:
    """The reconnection does not wake a thread that waits in poll(). The next answer does."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock, connected(cluster.p, UDP, dns.v4, 53) as other:
        woken: list[bool] = []
        waiter = threading.Thread(target=lambda: woken.append(bool(select.select([sock], [], [], 60)[0])))
        waiter.start()
        dns.to(cluster.b)
        reaches(other, "b")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        assert not woken
        eventually(lambda: bool(sock.send(b"?")) and bool(select.select([sock], [], [], 0.2)[0]), "an answer")
        waiter.join()
        assert sock.recv(100) == b"b"


@only_ebpf
def test_an_answer_from_before_a_reconnection_has_the_services_address(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock, connected(cluster.p, UDP, dns.v4, 53) as other:
        sock.send(b"?")
        assert select.select([sock], [], [], 3)[0]
        dns.to(cluster.b)
        reaches(other, "b")
        eventually(lambda: len(select.select([sock], [], [], 0)[0]) == 1, "the answer is there")
        assert sock.recvfrom(100) == (b"a", (dns.v4, 53))
        reaches(sock, "b")
        assert sock.getpeername() == (dns.v4, 53)
        sock.connect((cluster.a.v4, 5353))
        sock.send(b"?")
        assert sock.recvfrom(100) == (b"a", (cluster.a.v4, 5353)), "the endpoint is the peer itself now"


def bound_port(sock: socket.socket, cluster: Cluster) -> None:
    sock.bind(("0.0.0.0", 0))


def bound_address(sock: socket.socket, cluster: Cluster) -> None:
    sock.bind((cluster.p.v4, 0))


def bound_device(sock: socket.socket, cluster: Cluster) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")


def shared_port(sock: socket.socket, cluster: Cluster) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("0.0.0.0", 0))


@pytest.mark.parametrize("prepare", [bound_port, bound_address, bound_device, shared_port])
def test_a_reconnected_socket_keeps_its_binding(
    cluster: Cluster, prepare: Callable[[socket.socket, Cluster], None]
) -> None:
    dns = cluster.service().to(cluster.a)
    with socket_in(cluster.p, UDP) as sock:
        prepare(sock, cluster)
        sock.connect((dns.v4, 53))
        assert converse(sock) == "a"
        local = sock.getsockname()
        dns.to(cluster.b)
        reaches(sock, "b")
        assert sock.getsockname() == local


@both_clients
def test_a_socket_with_a_v4_mapped_peer_is_reconnected(cluster: Cluster, client: str) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.client(client), UDP, f"::ffff:{dns.v4}", 53) as sock:
        assert converse(sock) == "a"
        dns.to(cluster.b)
        reaches(sock, "b")
        assert sock.getpeername()[:2] == (f"::ffff:{dns.v4}", 53)


@only_ebpf
def test_a_reconnected_socket_keeps_its_blocking_mode(cluster: Cluster) -> None:
    """File status flags belong to the open file, which the agent shares during a reconnection."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        for patience, blocking in ((None, True), (0.0, False)):
            sock.settimeout(patience)
            dns.to(cluster.b if blocking else cluster.a)
            with sock.dup() as same:
                reaches(same, "b" if blocking else "a")
                sock.settimeout(patience)
            assert sock.getblocking() is blocking


@both_clients
def test_a_socket_that_connects_before_there_is_an_endpoint_works_later(
    cluster: Cluster, client: str
) -> None:
    """Its datagrams are rejected until there is an endpoint. The socket is never opened again."""
    refused = "EPERM" if DIFFERENCES[cluster.mode].by_packet and client == "node" else "ECONNREFUSED"
    dns = cluster.service().to()
    with connected(cluster.client(client), UDP, dns.v4, 53) as sock:
        sock.settimeout(0.2)
        eventually(lambda: exchange(sock) == refused, "it is rejected")
        dns.to(cluster.a)
        reaches(sock, "a")
        dns.to()
        eventually(lambda: exchange(sock) == refused, "it is rejected again")
        dns.to(cluster.b)
        reaches(sock, "b")
        assert sock.getpeername() == (dns.v4, 53)


@both_families
@only_ebpf
def test_without_endpoints_each_datagram_of_a_pod_is_rejected(cluster: Cluster, family: str) -> None:
    """Beginning with the first one, and without a program on the pod's device."""
    dns = cluster.service().to()
    with connected(cluster.p, UDP, dns.address(family), 53) as sock:
        assert [exchange(sock) for _ in range(5)] == ["ECONNREFUSED"] * 5


@only_ebpf
@both_clients
def test_a_socket_to_a_node_port_without_endpoints_works_once_there_is_one(
    cluster: Cluster, client: str
) -> None:
    dns = cluster.service(node_port=True).to()
    address = cluster.node.v4 if client == "pod" else "127.0.0.1"
    with connected(cluster.client(client), UDP, address, dns.node_port) as sock:
        assert exchange(sock) == "ECONNREFUSED"
        dns.to(cluster.a)
        reaches(sock, "a")


@only_ebpf
def test_a_socket_that_policy_local_drops_works_once_there_is_an_endpoint(cluster: Cluster) -> None:
    dns = cluster.service(internalTrafficPolicy="Local").to(elsewhere(cluster.b))
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        sock.settimeout(0.3)
        assert exchange(sock) == SILENT
        dns.to(cluster.a)
        reaches(sock, "a")


@only_ebpf
def test_a_socket_works_again_after_its_service_is_deleted_and_recreated(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        assert converse(sock) == "a"
        sock.settimeout(0.2)
        cluster.write(dns.name)
        eventually(lambda: exchange(sock) == "ECONNREFUSED", "no server answers")
        dns.to(cluster.b)
        reaches(sock, "b")


@only_ebpf
def test_unrelated_sockets_are_not_reconnected(cluster: Cluster) -> None:
    """Sockets to another endpoint of the Service, to another Service, and to the endpoint itself."""
    dns = cluster.service().to(cluster.a, cluster.b)
    other = cluster.service().to(cluster.a)
    with (
        connected(cluster.p, UDP, cluster.a.v4, 5353) as direct,
        connected(cluster.p, UDP, other.v4, 53) as another,
        connected(cluster.a, UDP, other.v4, 53) as hairpin,
    ):
        socks = [connected(cluster.p, UDP, dns.v4, 53) for _ in range(20)]
        try:
            stale = [sock for sock in socks if converse(sock) == "a"]
            assert 0 < len(stale) < 20
            before = cluster.metric(RECONNECTED)
            dns.to(cluster.b)
            for sock in stale:
                reaches(sock, "b")
            for sock in (direct, another, hairpin):
                assert converse(sock) == "a"
            for sock in set(socks) - set(stale):
                assert converse(sock) == "b"
            eventually(lambda: cluster.metric(RECONNECTED) >= before + len(stale), "they are counted")
            assert cluster.metric(RECONNECTED) == before + len(stale)
        finally:
            for sock in socks:
                sock.close()


@only_ebpf
def test_a_socket_that_connects_to_the_endpoint_itself_is_not_reconnected(cluster: Cluster) -> None:
    """The socket was connected to the same endpoint through the Service before."""
    dns = cluster.service().to(cluster.a)
    with (
        connected(cluster.p, UDP, dns.v4, 53) as sock,
        connected(cluster.p, UDP, dns.v4, 53) as other,
    ):
        sock.connect((cluster.a.v4, 5353))
        dns.to(cluster.b)
        reaches(other, "b")
        assert converse(sock) == "a"


@only_ebpf
def test_a_socket_of_a_terminating_endpoint_is_not_reconnected(cluster: Cluster) -> None:
    """A terminating endpoint still serves its existing clients. New clients get other endpoints."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        dns.to(terminating(cluster.a), cluster.b)
        assert converse(sock) == "a"


@only_ebpf
def test_a_socket_that_several_processes_share_is_reconnected_once(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    before = cluster.metric(RECONNECTED)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        holder = cluster.q.start(lambda: threading.Event().wait(60))
        try:
            dns.to(cluster.b)
            reaches(sock, "b")
            eventually(lambda: cluster.metric(RECONNECTED) == before + 1, "it is reconnected once")
        finally:
            holder.kill()


@only_ebpf
def test_a_socket_in_an_unread_message_is_reconnected_once_it_is_received(cluster: Cluster) -> None:
    """No process has a descriptor of a socket in a message that was not received yet. Until one has, the
    packet path translates the socket's datagrams."""
    dns = cluster.service().to(cluster.a)
    receiver, sender = socket.socketpair()
    with receiver, sender:
        sock = connected(cluster.p, UDP, dns.v4, 53)
        socket.send_fds(sender, [b"!"], [sock.fileno()])
        sock.close()
        dns.to(cluster.b)
        eventually(lambda: cluster.metric("ebpfproxy_sockets_translated") == 1, "it is translated")
        assert "Translating packets of stale UDP sockets" in cluster.agent.log()
        _, (fd,), _, _ = socket.recv_fds(receiver, 1, 1)
        with socket.socket(fileno=fd) as received:
            reaches(received, "b")
        eventually(lambda: cluster.metric("ebpfproxy_sockets_translated") == 0, "it is reconnected")
    assert cluster.metric("ebpfproxy_sockets_stale") == 0


def test_no_more_datagrams_are_lost_than_by_kube_proxys_rules(cluster: Cluster) -> None:
    """The endpoint ends before it is replaced. Lost datagrams are counted from the moment that the change is
    in force.

    The netfilter modes, which have kube-proxy's rules, delete the conntrack entry after that moment.
    Datagrams sent before the deletion are lost: mostly none, at most those within one sync.
    """
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        assert converse(sock) == "a"
        dns.to(cluster.b)
        count = lost_datagrams(sock, "b")
    assert count <= 2
