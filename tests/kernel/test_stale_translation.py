"""Stale UDP sockets of pods that the agent cannot reconnect: the packet path translates their datagrams."""

import pytest

from ebpfproxy.backends.ebpf.sockets.stale_sockets import NOT_RECONNECTED, TRANSLATED
from ebpfproxy.lab import Pod, manifests
from tests.kernel.clients import UDP, connected, converse, socket_in
from tests.kernel.cluster import START_PATIENCE, UDP_TARGET, Cluster, eventually
from tests.kernel.test_agent_stale import WITHOUT_PTRACE
from tests.kernel.test_socket_stale import both_families, exchange, reaches
from tests.kernel.two_nodes import TwoNodes

pytestmark = pytest.mark.kernel

_TRANSLATED, _STALE = "ebpfproxy_sockets_translated", "ebpfproxy_sockets_stale"


@pytest.fixture
def unprivileged(restartable: Cluster) -> Cluster:
    """A node whose agent cannot duplicate descriptors of other processes.

    It cannot read their network namespaces either, so it recognizes pods by their addresses.
    """
    node = manifests.node(restartable.lab.node_name, [restartable.node.v4, restartable.node.v6])
    node["spec"] = {"podCIDRs": list(restartable.lab.addresses.pods(0))}
    manifests.write(restartable.folder / "node.yaml", node)
    restartable.launch(before=WITHOUT_PTRACE).await_sync(timeout=START_PATIENCE)
    return restartable


@both_families
def test_a_translated_socket_keeps_working_when_its_endpoint_is_replaced(
    unprivileged: Cluster, family: str
) -> None:
    dns = unprivileged.service().to(unprivileged.a)
    frontend = dns.address(family), 53
    with connected(unprivileged.p, UDP, *frontend) as sock:
        assert converse(sock) == "a"
        local = sock.getsockname()
        for server, pod in (("b", unprivileged.b), ("c", unprivileged.c), ("a", unprivileged.a)):
            dns.to(pod)
            reaches(sock, server)
            sock.send(b"?")
            assert sock.recvfrom(100)[1][:2] == frontend
        assert sock.getsockname() == local
        assert sock.getpeername()[:2] == frontend
        eventually(lambda: unprivileged.metric(_TRANSLATED) == 1, "it is counted")
        assert unprivileged.metric(_STALE) == 0
        line = unprivileged.agent.await_line(lambda line: TRANSLATED in line.text)
        assert "CAP_SYS_PTRACE" in line.values["hint"]
    eventually(lambda: unprivileged.metric(_TRANSLATED) == 0, "it is no longer counted")


@both_families
def test_a_socket_whose_endpoints_pod_was_deleted_keeps_working(unprivileged: Cluster, family: str) -> None:
    gone = unprivileged.lab.pod(f"gone-{family}")
    unprivileged.serve(gone)
    dns = unprivileged.service().to(gone)
    with connected(unprivileged.p, UDP, dns.address(family), 53) as sock:
        assert converse(sock) == gone.name
        unprivileged.lab.remove_pod(gone)
        dns.to(unprivileged.b)
        reaches(sock, "b")


@both_families
def test_a_translated_socket_is_rejected_while_there_are_no_endpoints(
    unprivileged: Cluster, family: str
) -> None:
    dns = unprivileged.service().to(unprivileged.a)
    with connected(unprivileged.p, UDP, dns.address(family), 53) as sock:
        sock.settimeout(0.2)
        dns.to()
        eventually(lambda: exchange(sock) == "ECONNREFUSED", "it is rejected")
        dns.to(unprivileged.b)
        reaches(sock, "b")


@both_families
def test_a_socket_that_needs_its_endpoint_as_a_neighbor_is_reported_as_stale(
    unprivileged: Cluster, family: str
) -> None:
    """As with pods on one bridge: no host answers ARP or neighbor requests for a removed endpoint."""
    gone = unprivileged.lab.pod(f"near-{family}")
    unprivileged.serve(gone)
    unprivileged.lab.ip(unprivileged.p, f"route add {getattr(gone, family)} dev eth0")
    dns = unprivileged.service().to(gone)
    with connected(unprivileged.p, UDP, dns.address(family), 53) as sock:
        unprivileged.lab.remove_pod(gone)
        dns.to(unprivileged.b)
        unprivileged.agent.await_line(lambda line: NOT_RECONNECTED in line.text)
        eventually(lambda: unprivileged.metric(_STALE) == 1, "it is counted")
        assert unprivileged.metric(_TRANSLATED) == 0
        sock.settimeout(0.2)
        assert exchange(sock) != "b"


def test_a_translated_socket_keeps_its_endpoint(unprivileged: Cluster) -> None:
    dns = unprivileged.service().to(unprivileged.a)
    with connected(unprivileged.p, UDP, dns.v4, 53) as sock:
        dns.to(unprivileged.b, unprivileged.c)
        sock.settimeout(0.2)
        eventually(lambda: exchange(sock) in ("b", "c"), "another endpoint answers")
        sock.settimeout(3.0)
        assert len({converse(sock) for _ in range(20)}) == 1


def test_a_socket_whose_own_pod_becomes_the_endpoint_is_translated(unprivileged: Cluster) -> None:
    """The endpoint sees the node's address, as with every pod that is its own client."""
    dns = unprivileged.service().to(unprivileged.b)
    with connected(unprivileged.a, UDP, dns.v4, 53) as sock:
        dns.to(unprivileged.a)
        reaches(sock, "a")


@both_families
def test_a_socket_to_a_node_port_is_translated(unprivileged: Cluster, family: str) -> None:
    dns = unprivileged.service(node_port=True).to(unprivileged.a)
    with connected(unprivileged.p, UDP, getattr(unprivileged.node, family), dns.node_port) as sock:
        assert converse(sock) == "a"
        dns.to(unprivileged.b)
        reaches(sock, "b")
        dns.to(unprivileged.c)
        reaches(sock, "c")


@pytest.mark.parametrize("to", ["a", "b"])
def test_the_port_of_a_closed_socket_is_no_longer_translated(unprivileged: Cluster, to: str) -> None:
    """Neither datagrams of the next socket to the previous endpoint are, nor replies of the current one."""
    dns = unprivileged.service().to(unprivileged.a)
    with connected(unprivileged.p, UDP, dns.v4, 53) as sock:
        dns.to(unprivileged.b)
        reaches(sock, "b")
        local = sock.getsockname()
    server: Pod = getattr(unprivileged, to)
    with socket_in(unprivileged.p, UDP) as direct:
        direct.bind(local)
        direct.connect((server.v4, UDP_TARGET))
        reaches(direct, to)


def test_a_translated_socket_is_reconnected_by_a_later_agent(unprivileged: Cluster) -> None:
    """An agent with the capability reconnects it to the endpoint that it was translated to."""
    dns = unprivileged.service().to(unprivileged.a)
    with connected(unprivileged.p, UDP, dns.v4, 53) as sock:
        dns.to(unprivileged.b)
        reaches(sock, "b")
        unprivileged.start()
        eventually(
            lambda: unprivileged.metric("ebpfproxy_sockets_reconnected_total") == 1, "it is reconnected"
        )
        reaches(sock, "b")
        assert unprivileged.metric(_TRANSLATED) == 0


def test_the_entry_of_a_socket_closed_without_an_agent_is_removed_later(unprivileged: Cluster) -> None:
    """The next agent removes the entry, and keeps the entries of other sockets."""
    dns = unprivileged.service().to(unprivileged.a)
    with connected(unprivileged.p, UDP, dns.v4, 53) as stays:
        with connected(unprivileged.p, UDP, dns.v4, 53) as sock:
            dns.to(unprivileged.b)
            reaches(sock, "b")
            unprivileged.end()
            assert converse(sock) == "b", "the programs translate it"
            local = sock.getsockname()
        unprivileged.launch(before=WITHOUT_PTRACE).await_sync(timeout=START_PATIENCE)
        with socket_in(unprivileged.p, UDP) as direct:
            direct.bind(local)
            direct.connect((unprivileged.a.v4, UDP_TARGET))
            reaches(direct, "a")
        reaches(stays, "b")


def test_a_direct_socket_to_the_previous_endpoint_is_not_translated(unprivileged: Cluster) -> None:
    """The direct socket is in the same pod."""
    dns = unprivileged.service().to(unprivileged.a)
    with (
        connected(unprivileged.p, UDP, dns.v4, 53) as sock,
        connected(unprivileged.p, UDP, unprivileged.a.v4, UDP_TARGET) as direct,
    ):
        dns.to(unprivileged.b)
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
