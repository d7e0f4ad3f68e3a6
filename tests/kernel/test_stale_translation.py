"""Stale UDP sockets of pods that the agent cannot reconnect: the packet path translates their datagrams."""

import pytest

from ebpfproxy.backends.ebpf.sockets.stale_sockets import NOT_RECONNECTED, TRANSLATED
from ebpfproxy.lab import Pod
from tests.kernel.clients import UDP, connected, converse, socket_in
from tests.kernel.cluster import START_PATIENCE, UDP_TARGET, Cluster, eventually
from tests.kernel.test_agent_stale import WITHOUT_PTRACE
from tests.kernel.test_socket_stale import both_families, exchange, reaches
from tests.kernel.two_nodes import TwoNodes

pytestmark = pytest.mark.kernel

_TRANSLATED, _STALE = "ebpfproxy_sockets_translated", "ebpfproxy_sockets_stale"


@pytest.fixture
def cluster(rough: Cluster) -> Cluster:
    """A node whose agent cannot duplicate descriptors of other processes."""
    rough.launch(before=WITHOUT_PTRACE).await_sync(timeout=START_PATIENCE)
    return rough


@both_families
def test_a_translated_socket_keeps_working_when_its_endpoint_is_replaced(
    cluster: Cluster, family: str
) -> None:
    dns = cluster.service().to(cluster.a)
    frontend = dns.address(family), 53
    with connected(cluster.p, UDP, *frontend) as sock:
        assert converse(sock) == "a"
        local = sock.getsockname()
        for server, pod in (("b", cluster.b), ("c", cluster.c), ("a", cluster.a)):
            dns.to(pod)
            reaches(sock, server)
            sock.send(b"?")
            assert sock.recvfrom(100)[1][:2] == frontend
        assert sock.getsockname() == local
        assert sock.getpeername()[:2] == frontend
        eventually(lambda: cluster.metric(_TRANSLATED) == 1, "it is counted")
        assert cluster.metric(_STALE) == 0
        line = cluster.agent.await_line(lambda line: TRANSLATED in line.text)
        assert "CAP_SYS_PTRACE" in line.values["hint"]
    eventually(lambda: cluster.metric(_TRANSLATED) == 0, "it is no longer counted")


@both_families
def test_a_socket_whose_endpoints_pod_was_deleted_keeps_working(cluster: Cluster, family: str) -> None:
    gone = cluster.lab.pod(f"gone-{family}")
    cluster.serve(gone)
    dns = cluster.service().to(gone)
    with connected(cluster.p, UDP, dns.address(family), 53) as sock:
        assert converse(sock) == gone.name
        cluster.lab.forget_pod(gone)
        dns.to(cluster.b)
        reaches(sock, "b")


@both_families
def test_a_translated_socket_is_rejected_while_there_are_no_endpoints(cluster: Cluster, family: str) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.address(family), 53) as sock:
        sock.settimeout(0.2)
        dns.to()
        eventually(lambda: exchange(sock) == "ECONNREFUSED", "it is rejected")
        dns.to(cluster.b)
        reaches(sock, "b")


@both_families
def test_a_socket_that_needs_its_endpoint_as_a_neighbor_is_reported_as_stale(
    cluster: Cluster, family: str
) -> None:
    """As with pods on one bridge: no host answers ARP or neighbor requests for a removed endpoint."""
    gone = cluster.lab.pod(f"near-{family}")
    cluster.serve(gone)
    cluster.lab.ip(cluster.p, f"route add {getattr(gone, family)} dev eth0")
    dns = cluster.service().to(gone)
    with connected(cluster.p, UDP, dns.address(family), 53) as sock:
        cluster.lab.forget_pod(gone)
        dns.to(cluster.b)
        cluster.agent.await_line(lambda line: NOT_RECONNECTED in line.text)
        eventually(lambda: cluster.metric(_STALE) == 1, "it is counted")
        assert cluster.metric(_TRANSLATED) == 0
        sock.settimeout(0.2)
        assert exchange(sock) != "b"


def test_a_translated_socket_keeps_its_endpoint(cluster: Cluster) -> None:
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        dns.to(cluster.b, cluster.c)
        sock.settimeout(0.2)
        eventually(lambda: exchange(sock) in ("b", "c"), "another endpoint answers")
        sock.settimeout(3.0)
        assert len({converse(sock) for _ in range(20)}) == 1


def test_a_socket_whose_own_pod_becomes_the_endpoint_is_translated(cluster: Cluster) -> None:
    """The endpoint sees the node's address, as with every pod that is its own client."""
    dns = cluster.service().to(cluster.b)
    with connected(cluster.a, UDP, dns.v4, 53) as sock:
        dns.to(cluster.a)
        reaches(sock, "a")


@both_families
def test_a_socket_to_a_node_port_is_translated(cluster: Cluster, family: str) -> None:
    dns = cluster.service(node_port=True).to(cluster.a)
    with connected(cluster.p, UDP, getattr(cluster.node, family), dns.node_port) as sock:
        assert converse(sock) == "a"
        dns.to(cluster.b)
        reaches(sock, "b")
        dns.to(cluster.c)
        reaches(sock, "c")


@pytest.mark.parametrize("to", ["a", "b"])
def test_the_port_of_a_closed_socket_is_no_longer_translated(cluster: Cluster, to: str) -> None:
    """Neither datagrams of the next socket to the previous endpoint are, nor replies of the current one."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        dns.to(cluster.b)
        reaches(sock, "b")
        local = sock.getsockname()
    server: Pod = getattr(cluster, to)
    with socket_in(cluster.p, UDP) as direct:
        direct.bind(local)
        direct.connect((server.v4, UDP_TARGET))
        reaches(direct, to)


def test_a_translated_socket_is_reconnected_by_a_later_agent(cluster: Cluster) -> None:
    """An agent with the capability reconnects it to the endpoint that it was translated to."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as sock:
        dns.to(cluster.b)
        reaches(sock, "b")
        cluster.start()
        eventually(lambda: cluster.metric("ebpfproxy_sockets_reconnected_total") == 1, "it is reconnected")
        reaches(sock, "b")
        assert cluster.metric(_TRANSLATED) == 0


def test_the_entry_of_a_socket_closed_without_an_agent_is_removed_later(cluster: Cluster) -> None:
    """The next agent removes the entry, and keeps the entries of other sockets."""
    dns = cluster.service().to(cluster.a)
    with connected(cluster.p, UDP, dns.v4, 53) as stays:
        with connected(cluster.p, UDP, dns.v4, 53) as sock:
            dns.to(cluster.b)
            reaches(sock, "b")
            cluster.end()
            assert converse(sock) == "b", "the programs translate it"
            local = sock.getsockname()
        cluster.launch(before=WITHOUT_PTRACE).await_sync(timeout=START_PATIENCE)
        with socket_in(cluster.p, UDP) as direct:
            direct.bind(local)
            direct.connect((cluster.a.v4, UDP_TARGET))
            reaches(direct, "a")
        reaches(stays, "b")


def test_a_direct_socket_to_the_previous_endpoint_is_not_translated(cluster: Cluster) -> None:
    """The direct socket is in the same pod."""
    dns = cluster.service().to(cluster.a)
    with (
        connected(cluster.p, UDP, dns.v4, 53) as sock,
        connected(cluster.p, UDP, cluster.a.v4, UDP_TARGET) as direct,
    ):
        dns.to(cluster.b)
        reaches(sock, "b")
        assert [converse(direct) for _ in range(5)] == ["a"] * 5


@pytest.mark.ways("ebpf-on")
@both_families
def test_a_socket_is_translated_to_endpoints_on_another_node(two_nodes: TwoNodes, family: str) -> None:
    two_nodes.launch(*two_nodes.flags, before=WITHOUT_PTRACE).await_sync(timeout=START_PATIENCE)
    two_nodes.await_second()
    try:
        dns = two_nodes.service().to(two_nodes.a)
        with connected(two_nodes.p, UDP, dns.address(family), 53) as sock:
            assert exchange(sock) == "a"
            for server, pod in (("d", two_nodes.d), ("e", two_nodes.e), ("b", two_nodes.b)):
                dns.to(pod)
                reaches(sock, server)
    finally:
        two_nodes.start()
