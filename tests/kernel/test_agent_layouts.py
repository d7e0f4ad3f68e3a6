"""The agent starts with maps of other sizes: sockets and clients are served as if nothing had happened."""

import socket

import pytest

from tests.kernel.clients import TCP, UDP, answers, ask_from, connected, converse, socket_in
from tests.kernel.cluster import UDP_TARGET, Cluster, Exposed, eventually
from tests.kernel.test_socket_stale import reaches

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])


@pytest.fixture
def served(rough: Cluster) -> Exposed:
    """A Service of the endpoints a and b, with ids that no new layout gives it: there was another before."""
    rough.start()
    first = rough.service().to(rough.a, rough.b, rough.c)
    web = rough.service().to(rough.a, rough.b)
    rough.write(first.name)
    return web


OTHER_SIZES = ("--ebpf-affinity-max=4096", "--ebpf-sockets-max=1024")


def change_layout(rough: Cluster, *flags: str) -> None:
    """The agent crashes, and comes back with other sizes; the previous maps are gone when this returns."""
    previous = {path.name for path in rough.lab.bpffs.glob("programs-*")}
    rough.agent.kill()
    rough.start(*flags)

    def is_replaced() -> bool:
        present = {path.name for path in rough.lab.bpffs.glob("programs-*")}
        return len(present) == 1 and present.isdisjoint(previous)

    eventually(is_replaced, "the previous programs go")


@both_families
def test_connected_sockets_keep_their_service(rough: Cluster, served: Exposed, family: str) -> None:
    address = served.address(family)
    with (
        connected(rough.p, TCP, address, 80) as stream,
        connected(rough.p, UDP, address, 53) as datagrams,
        connected(rough.node, UDP, address, 53) as of_node,
    ):
        sockets = ((stream, 80), (datagrams, 53), (of_node, 53))
        before = [converse(sock) for sock, _ in sockets]
        change_layout(rough, *OTHER_SIZES)
        assert [converse(sock) for sock, _ in sockets] == before
        for sock, port in sockets:
            assert sock.getpeername()[:2] == (address, port)
        assert datagrams.send(b"?")
        answer, source = datagrams.recvfrom(1 << 16)
        assert (answer.decode(), source[:2]) == (before[1], (address, 53))


@both_families
def test_a_connected_socket_whose_endpoint_goes_later_is_reconnected(
    rough: Cluster, served: Exposed, family: str
) -> None:
    served.to(rough.a)
    with (
        connected(rough.p, UDP, served.address(family), 53) as lost,
        connected(rough.p, TCP, served.address(family), 80) as stream,
    ):
        assert (converse(lost), converse(stream)) == ("a", "a")
        change_layout(rough, *OTHER_SIZES)
        assert converse(lost) == "a"
        served.to(rough.a, rough.b)
        with connected(rough.p, UDP, served.address(family), 53) as kept:
            while converse(kept) != "b":
                kept.connect((served.address(family), 53))
            served.to(rough.b)
            reaches(lost, "b")
            assert converse(kept) == "b"
            assert converse(stream) == "a"


def test_a_connected_socket_whose_endpoint_went_meanwhile(rough: Cluster, served: Exposed) -> None:
    served.to(rough.a)
    with connected(rough.p, UDP, served.v4, 53) as sock:
        assert converse(sock) == "a"
        rough.end()
        served.to(rough.b)
        rough.start("--ebpf-affinity-max=2048")
        reaches(sock, "b")


@both_families
def test_an_answer_on_its_way_comes_from_the_service(rough: Cluster, served: Exposed, family: str) -> None:
    """The question is asked before, and answered after."""
    served.to(rough.q)
    address = served.address(family)
    kind = {"v4": socket.AF_INET, "v6": socket.AF_INET6}[family]
    with socket_in(rough.q, UDP, kind) as server, socket_in(rough.p, UDP, kind) as client:
        server.bind(("", UDP_TARGET))
        client.sendto(b"?", (address, 53))
        _, asker = server.recvfrom(1 << 16)
        change_layout(rough, *OTHER_SIZES)
        server.sendto(b"late", asker)
        answer, source = client.recvfrom(1 << 16)
        assert (answer, source[:2]) == (b"late", (address, 53))
        served.to(rough.b)
        assert ask_from(client, address, 53) == ("b", (address, 53))


@both_families
def test_a_client_keeps_its_endpoint(rough: Cluster, served: Exposed, family: str) -> None:
    """Were three clients to draw anew twice, they would do so alike once in 729 runs."""
    served.to(rough.a, rough.b, rough.c, sessionAffinity="ClientIP")
    clients = (rough.p, rough.q, rough.node)
    address = served.address(family)
    before = [set(answers(client, TCP, address, 80, 3)) for client in clients]
    assert all(len(found) == 1 for found in before)
    for flags in (OTHER_SIZES, ()):
        change_layout(rough, *flags)
        assert [set(answers(client, TCP, address, 80, 10)) for client in clients] == before
