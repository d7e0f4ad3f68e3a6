"""The agent restarts with other map sizes: sockets and clients keep their Services and endpoints."""

import socket

import pytest

from tests.kernel.clients import TCP, UDP, answers, ask_from, connected, converse, socket_in
from tests.kernel.cluster import UDP_TARGET, Cluster, Exposed, eventually
from tests.kernel.test_socket_stale import reaches

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])


@pytest.fixture
def web(rough: Cluster) -> Exposed:
    """A Service with the endpoints a and b. An older Service existed, so new maps would assign other ids."""
    rough.start()
    first = rough.service().to(rough.a, rough.b, rough.c)
    web = rough.service().to(rough.a, rough.b)
    rough.write(first.name)
    return web


OTHER_SIZES = ("--ebpf-affinity-max=4096", "--ebpf-sockets-max=1024")


def restart_with_other_sizes(rough: Cluster, *flags: str) -> None:
    """The agent crashes and restarts with other map sizes. Returns once the previous maps are removed."""
    previous = {path.name for path in rough.lab.bpffs.glob("programs-*")}
    rough.agent.kill()
    rough.start(*flags)

    def is_replaced() -> bool:
        present = {path.name for path in rough.lab.bpffs.glob("programs-*")}
        return len(present) == 1 and present.isdisjoint(previous)

    eventually(is_replaced, "the previous programs are removed")


@both_families
def test_connected_sockets_keep_their_endpoint_and_peer_address(
    rough: Cluster, web: Exposed, family: str
) -> None:
    address = web.address(family)
    with (
        connected(rough.p, TCP, address, 80) as stream,
        connected(rough.p, UDP, address, 53) as datagrams,
        connected(rough.node, UDP, address, 53) as of_node,
    ):
        sockets = ((stream, 80), (datagrams, 53), (of_node, 53))
        before = [converse(sock) for sock, _ in sockets]
        restart_with_other_sizes(rough, *OTHER_SIZES)
        assert [converse(sock) for sock, _ in sockets] == before
        for sock, port in sockets:
            assert sock.getpeername()[:2] == (address, port)
        assert datagrams.send(b"?")
        answer, source = datagrams.recvfrom(1 << 16)
        assert (answer.decode(), source[:2]) == (before[1], (address, 53))


@both_families
def test_a_connected_socket_is_reconnected_when_its_endpoint_is_removed_later(
    rough: Cluster, web: Exposed, family: str
) -> None:
    web.to(rough.a)
    with (
        connected(rough.p, UDP, web.address(family), 53) as lost,
        connected(rough.p, TCP, web.address(family), 80) as stream,
    ):
        assert (converse(lost), converse(stream)) == ("a", "a")
        restart_with_other_sizes(rough, *OTHER_SIZES)
        assert converse(lost) == "a"
        web.to(rough.a, rough.b)
        with connected(rough.p, UDP, web.address(family), 53) as kept:
            while converse(kept) != "b":
                kept.connect((web.address(family), 53))
            web.to(rough.b)
            reaches(lost, "b")
            assert converse(kept) == "b"
            assert converse(stream) == "a"


def test_a_connected_socket_is_reconnected_when_its_endpoint_was_removed_while_stopped(
    rough: Cluster, web: Exposed
) -> None:
    web.to(rough.a)
    with connected(rough.p, UDP, web.v4, 53) as sock:
        assert converse(sock) == "a"
        rough.end()
        web.to(rough.b)
        rough.start("--ebpf-affinity-max=2048")
        reaches(sock, "b")


@both_families
def test_a_late_reply_comes_from_the_service_address(rough: Cluster, web: Exposed, family: str) -> None:
    """The request is sent before the change of sizes, the reply after it."""
    web.to(rough.q)
    address = web.address(family)
    kind = {"v4": socket.AF_INET, "v6": socket.AF_INET6}[family]
    with socket_in(rough.q, UDP, kind) as server, socket_in(rough.p, UDP, kind) as client:
        server.bind(("", UDP_TARGET))
        client.sendto(b"?", (address, 53))
        _, client_address = server.recvfrom(1 << 16)
        restart_with_other_sizes(rough, *OTHER_SIZES)
        server.sendto(b"late", client_address)
        answer, source = client.recvfrom(1 << 16)
        assert (answer, source[:2]) == (b"late", (address, 53))
        web.to(rough.b)
        assert ask_from(client, address, 53) == ("b", (address, 53))


@both_families
def test_a_client_with_session_affinity_keeps_its_endpoint(rough: Cluster, web: Exposed, family: str) -> None:
    """If three clients chose again twice, they would choose the same endpoints in one of 729 runs."""
    web.to(rough.a, rough.b, rough.c, sessionAffinity="ClientIP")
    clients = (rough.p, rough.q, rough.node)
    address = web.address(family)
    before = [set(answers(client, TCP, address, 80, 3)) for client in clients]
    assert all(len(found) == 1 for found in before)
    for flags in (OTHER_SIZES, ()):
        restart_with_other_sizes(rough, *flags)
        assert [set(answers(client, TCP, address, 80, 10)) for client in clients] == before
