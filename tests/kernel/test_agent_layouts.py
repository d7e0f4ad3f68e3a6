"""The agent restarts with other map sizes: sockets and clients keep their Services and endpoints."""

import socket

import pytest

from tests.kernel.clients import TCP, UDP, answers, ask_from, connected, converse, socket_in
from tests.kernel.cluster import UDP_TARGET, Cluster, Exposed, eventually
from tests.kernel.test_socket_stale import reaches

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])


@pytest.fixture
def web(restartable: Cluster) -> Exposed:
    """A Service with the endpoints a and b. An older Service existed, so new maps would assign other ids."""
    restartable.start()
    first = restartable.service().to(restartable.a, restartable.b, restartable.c)
    web = restartable.service().to(restartable.a, restartable.b)
    restartable.write(first.name)
    return web


OTHER_SIZES = ("--ebpf-affinity-max=4096", "--ebpf-sockets-max=1024")


def restart_with_other_sizes(restartable: Cluster, *flags: str) -> None:
    """The agent crashes and restarts with other map sizes. Returns once the previous maps are removed."""
    previous = {path.name for path in restartable.lab.bpffs.glob("programs-*")}
    restartable.agent.kill()
    restartable.start(*flags)

    def is_replaced() -> bool:
        present = {path.name for path in restartable.lab.bpffs.glob("programs-*")}
        return len(present) == 1 and present.isdisjoint(previous)

    eventually(is_replaced, "the previous programs are removed")


@both_families
def test_connected_sockets_keep_their_endpoint_and_peer_address(
    restartable: Cluster, web: Exposed, family: str
) -> None:
    address = web.address(family)
    with (
        connected(restartable.p, TCP, address, 80) as stream,
        connected(restartable.p, UDP, address, 53) as datagrams,
        connected(restartable.node, UDP, address, 53) as of_node,
    ):
        sockets = ((stream, 80), (datagrams, 53), (of_node, 53))
        before = [converse(sock) for sock, _ in sockets]
        restart_with_other_sizes(restartable, *OTHER_SIZES)
        assert [converse(sock) for sock, _ in sockets] == before
        for sock, port in sockets:
            assert sock.getpeername()[:2] == (address, port)
        assert datagrams.send(b"?")
        answer, source = datagrams.recvfrom(1 << 16)
        assert (answer.decode(), source[:2]) == (before[1], (address, 53))


@pytest.mark.same_for("family")
@both_families
def test_a_connected_socket_is_reconnected_when_its_endpoint_is_removed_later(
    restartable: Cluster, web: Exposed, family: str
) -> None:
    web.to(restartable.a)
    with (
        connected(restartable.p, UDP, web.address(family), 53) as lost,
        connected(restartable.p, TCP, web.address(family), 80) as stream,
    ):
        assert (converse(lost), converse(stream)) == ("a", "a")
        restart_with_other_sizes(restartable, *OTHER_SIZES)
        assert converse(lost) == "a"
        web.to(restartable.a, restartable.b)
        with connected(restartable.p, UDP, web.address(family), 53) as kept:
            while converse(kept) != "b":
                kept.connect((web.address(family), 53))
            web.to(restartable.b)
            reaches(lost, "b")
            assert converse(kept) == "b"
            assert converse(stream) == "a"


def test_a_connected_socket_is_reconnected_when_its_endpoint_was_removed_while_stopped(
    restartable: Cluster, web: Exposed
) -> None:
    web.to(restartable.a)
    with connected(restartable.p, UDP, web.v4, 53) as sock:
        assert converse(sock) == "a"
        restartable.end()
        web.to(restartable.b)
        restartable.start("--ebpf-affinity-max=2048")
        reaches(sock, "b")


@both_families
def test_a_late_reply_comes_from_the_service_address(restartable: Cluster, web: Exposed, family: str) -> None:
    """The request is sent before the change of sizes, the reply after it."""
    web.to(restartable.q)
    address = web.address(family)
    kind = {"v4": socket.AF_INET, "v6": socket.AF_INET6}[family]
    with socket_in(restartable.q, UDP, kind) as server, socket_in(restartable.p, UDP, kind) as client:
        server.bind(("", UDP_TARGET))
        client.sendto(b"?", (address, 53))
        _, client_address = server.recvfrom(1 << 16)
        restart_with_other_sizes(restartable, *OTHER_SIZES)
        server.sendto(b"late", client_address)
        answer, source = client.recvfrom(1 << 16)
        assert (answer, source[:2]) == (b"late", (address, 53))
        web.to(restartable.b)
        assert ask_from(client, address, 53) == ("b", (address, 53))


@pytest.mark.same_for("family")
@both_families
def test_a_client_with_session_affinity_keeps_its_endpoint(
    restartable: Cluster, web: Exposed, family: str
) -> None:
    """If three clients chose again twice, they would choose the same endpoints in one of 729 runs."""
    web.to(restartable.a, restartable.b, restartable.c, sessionAffinity="ClientIP")
    clients = (restartable.p, restartable.q, restartable.node)
    address = web.address(family)
    before = [set(answers(client, TCP, address, 80, 3)) for client in clients]
    assert all(len(found) == 1 for found in before)
    for flags in (OTHER_SIZES, ()):
        restart_with_other_sizes(restartable, *flags)
        assert [set(answers(client, TCP, address, 80, 10)) for client in clients] == before
