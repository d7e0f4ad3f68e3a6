"""Stale UDP sockets of pods that the agent cannot reconnect: the packet path translates what they send."""

import pytest

from ebpfproxy.backends.ebpf.sockets.stale_sockets import NOT_RECONNECTED, TRANSLATED
from ebpfproxy.lab import Pod
from tests.kernel.clients import UDP, connected, converse, socket_in
from tests.kernel.cluster import START_PATIENCE, UDP_TARGET, Cluster, eventually
from tests.kernel.test_agent_stale import WITHOUT_PTRACE
from tests.kernel.test_socket_stale import both_families, reaches, said
from tests.kernel.two_nodes import TwoNodes

pytestmark = pytest.mark.kernel

_TRANSLATED, _STALE = "ebpfproxy_sockets_translated", "ebpfproxy_sockets_stale"


@pytest.fixture
def unable(restartable: Cluster) -> Cluster:
    """A node whose agent cannot duplicate descriptors of other processes."""
    restartable.launch(before=WITHOUT_PTRACE).await_sync(timeout=START_PATIENCE)
    return restartable


@both_families
def test_a_socket_keeps_working_when_its_endpoint_is_replaced(unable: Cluster, family: str) -> None:
    dns = unable.service().to(unable.a)
    frontend = dns.address(family), 53
    with connected(unable.p, UDP, *frontend) as sock:
        assert converse(sock) == "a"
        local = sock.getsockname()
        for server, pod in (("b", unable.b), ("c", unable.c), ("a", unable.a)):
            dns.to(pod)
            reaches(sock, server)
            sock.send(b"?")
            assert sock.recvfrom(100)[1][:2] == frontend
        assert sock.getsockname() == local
        assert sock.getpeername()[:2] == frontend
        eventually(lambda: unable.metric(_TRANSLATED) == 1, "it is counted")
        assert unable.metric(_STALE) == 0
        line = unable.agent.await_line(lambda line: TRANSLATED in line.text)
        assert "CAP_SYS_PTRACE" in line.values["hint"]
    eventually(lambda: unable.metric(_TRANSLATED) == 0, "it is counted no more")


@both_families
def test_a_socket_whose_endpoint_is_gone_from_the_node(unable: Cluster, family: str) -> None:
    gone = unable.lab.pod(f"gone-{family}")
    unable.serve(gone)
    dns = unable.service().to(gone)
    with connected(unable.p, UDP, dns.address(family), 53) as sock:
        assert converse(sock) == gone.name
        unable.lab.forget_pod(gone)
        dns.to(unable.b)
        reaches(sock, "b")


@both_families
def test_a_socket_without_endpoints_for_a_while_is_rejected_then(unable: Cluster, family: str) -> None:
    dns = unable.service().to(unable.a)
    with connected(unable.p, UDP, dns.address(family), 53) as sock:
        sock.settimeout(0.2)
        dns.to()
        eventually(lambda: said(sock) == "ECONNREFUSED", "it is rejected")
        dns.to(unable.b)
        reaches(sock, "b")


@both_families
def test_a_socket_that_needs_its_endpoint_as_a_neighbor_is_not_counted(unable: Cluster, family: str) -> None:
    """As with pods of one bridge: nobody answers for the address of an endpoint that is gone."""
    gone = unable.lab.pod(f"near-{family}")
    unable.serve(gone)
    unable.lab.ip(unable.p, f"route add {getattr(gone, family)} dev eth0")
    dns = unable.service().to(gone)
    with connected(unable.p, UDP, dns.address(family), 53) as sock:
        unable.lab.forget_pod(gone)
        dns.to(unable.b)
        unable.agent.await_line(lambda line: NOT_RECONNECTED in line.text)
        eventually(lambda: unable.metric(_STALE) == 1, "it is counted")
        assert unable.metric(_TRANSLATED) == 0
        sock.settimeout(0.2)
        assert said(sock) != "b"


def test_one_endpoint_serves_a_socket_as_long_as_it_is_there(unable: Cluster) -> None:
    dns = unable.service().to(unable.a)
    with connected(unable.p, UDP, dns.v4, 53) as sock:
        dns.to(unable.b, unable.c)
        sock.settimeout(0.2)
        eventually(lambda: said(sock) in ("b", "c"), "another endpoint answers")
        sock.settimeout(3.0)
        assert len({converse(sock) for _ in range(20)}) == 1


def test_a_socket_whose_own_pod_becomes_the_endpoint(unable: Cluster) -> None:
    """The endpoint sees the node's address, as with every pod that is a client of itself."""
    dns = unable.service().to(unable.b)
    with connected(unable.a, UDP, dns.v4, 53) as sock:
        dns.to(unable.a)
        reaches(sock, "a")


@both_families
def test_a_node_port(unable: Cluster, family: str) -> None:
    dns = unable.service(node_port=True).to(unable.a)
    with connected(unable.p, UDP, getattr(unable.node, family), dns.node_port) as sock:
        assert converse(sock) == "a"
        dns.to(unable.b)
        reaches(sock, "b")
        dns.to(unable.c)
        reaches(sock, "c")


@pytest.mark.parametrize("to", ["a", "b"])
def test_the_port_of_a_socket_that_was_closed_is_translated_no_more(unable: Cluster, to: str) -> None:
    """Neither what the next socket sends to the previous endpoint, nor what the present one answers it."""
    dns = unable.service().to(unable.a)
    with connected(unable.p, UDP, dns.v4, 53) as sock:
        dns.to(unable.b)
        reaches(sock, "b")
        local = sock.getsockname()
    server: Pod = getattr(unable, to)
    with socket_in(unable.p, UDP) as direct:
        direct.bind(local)
        direct.connect((server.v4, UDP_TARGET))
        reaches(direct, to)


def test_a_socket_that_can_be_reconnected_later(unable: Cluster) -> None:
    """By an agent with the capability, to the same endpoint that it was translated to."""
    dns = unable.service().to(unable.a)
    with connected(unable.p, UDP, dns.v4, 53) as sock:
        dns.to(unable.b)
        reaches(sock, "b")
        unable.start()
        eventually(lambda: unable.metric("ebpfproxy_sockets_reconnected_total") == 1, "it is reconnected")
        reaches(sock, "b")
        assert unable.metric(_TRANSLATED) == 0


def test_a_socket_that_is_closed_while_no_agent_runs(unable: Cluster) -> None:
    """The next agent removes its entry, though other sockets still need theirs."""
    dns = unable.service().to(unable.a)
    with connected(unable.p, UDP, dns.v4, 53) as stays:
        with connected(unable.p, UDP, dns.v4, 53) as sock:
            dns.to(unable.b)
            reaches(sock, "b")
            unable.end()
            assert converse(sock) == "b", "the programs translate it"
            local = sock.getsockname()
        unable.launch(before=WITHOUT_PTRACE).await_sync(timeout=START_PATIENCE)
        with socket_in(unable.p, UDP) as direct:
            direct.bind(local)
            direct.connect((unable.a.v4, UDP_TARGET))
            reaches(direct, "a")
        reaches(stays, "b")


def test_another_socket_is_not_translated(unable: Cluster) -> None:
    """One that asks the previous endpoint itself, from the same pod."""
    dns = unable.service().to(unable.a)
    with (
        connected(unable.p, UDP, dns.v4, 53) as sock,
        connected(unable.p, UDP, unable.a.v4, UDP_TARGET) as direct,
    ):
        dns.to(unable.b)
        reaches(sock, "b")
        assert [converse(direct) for _ in range(5)] == ["a"] * 5


@pytest.mark.ways("ebpf-on")
@both_families
def test_endpoints_on_another_node(two_nodes: TwoNodes, family: str) -> None:
    two_nodes.launch(*two_nodes.flags, before=WITHOUT_PTRACE).await_sync(timeout=START_PATIENCE)
    two_nodes.await_second()
    try:
        dns = two_nodes.service().to(two_nodes.a)
        with connected(two_nodes.p, UDP, dns.address(family), 53) as sock:
            assert said(sock) == "a"
            for server, pod in (("d", two_nodes.d), ("e", two_nodes.e), ("b", two_nodes.b)):
                dns.to(pod)
                reaches(sock, server)
    finally:
        two_nodes.start()
