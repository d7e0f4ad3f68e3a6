"""Open TCP connections to endpoints that leave their Service, with and without the annotation.

In mode ebpf, those of sockets that the hooks redirect and those of the packet path; in the other modes, those
that conntrack translates.
"""

import contextlib
import errno
import select
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ebpfproxy.lab import Pod
from ebpfproxy.linux.netns import netns
from ebpfproxy.linux.sockets import sockets
from tests.kernel.clients import TCP, connected, converse
from tests.kernel.cluster import PATIENCE, TCP_TARGET, eventually, terminating
from tests.kernel.two_nodes import Everywhere, TwoNodes, name_and_client

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.ways("ebpf-on", "ebpf-off", "nftables", "iptables", "ipvs"),
    pytest.mark.parametrize("family", ["v4", "v6"]),
]

CLIENTS = {"pod": "ClusterIP", "node": "ClusterIP", "outside": "NodePort"}
"""By client: the frontend to which it connects."""
LEAST, MOST = 4, 100
"""Each client opens at least LEAST connections, and up to MOST until each endpoint has one."""


def resets(two_nodes: TwoNodes) -> Everywhere:
    web = two_nodes.everywhere()
    web.annotations["ebpfproxy/removed-endpoints"] = "reset"
    return web


class Opened(NamedTuple):
    client: str
    endpoint: str
    sock: socket.socket


@contextlib.contextmanager
def connections(two_nodes: TwoNodes, web: Everywhere, family: str) -> Iterator[list[Opened]]:
    """Some idle connections of each client, to all endpoints."""
    with contextlib.ExitStack() as stack:
        made: list[Opened] = []
        for client, frontend in CLIENTS.items():
            netns_ = two_nodes.x if client == "outside" else two_nodes.client(client)
            reached: list[str] = []
            while len(reached) < LEAST or (len(set(reached)) < len(web.backends) and len(reached) < MOST):
                sock = stack.enter_context(connected(netns_, TCP, *web.frontend(frontend, family, TCP)))
                reached.append(name(sock))
                made.append(Opened(client, reached[-1], sock))
        yield made


def name(sock: socket.socket) -> str:
    return name_and_client(converse(sock))[0]


def end_of(sock: socket.socket, patience: float = PATIENCE) -> str:
    """The error with which an idle connection ends; "" if it does not within `patience` seconds."""
    if not select.select([sock], [], [], patience)[0]:
        return ""
    try:
        sock.recv(1)
    except OSError as failure:
        return errno.errorcode[failure.errno or 0]
    return "closed"


def open_at(server: Pod) -> int:
    """The number of open connections of a server."""
    with netns.entered(server.netns):
        return sum(each.source_port == TCP_TARGET for each in sockets.tcp([sockets.State.ESTABLISHED]))


def split(opened: list[Opened], leaving: Pod) -> tuple[list[Opened], list[Opened]]:
    """The connections to the endpoint that leaves, and all others."""
    ending = [each for each in opened if each.endpoint == leaving.name]
    others = [each for each in opened if each.endpoint != leaving.name]
    assert {each.client for each in ending} == {each.client for each in others} == set(CLIENTS)
    return ending, others


def still_answer(opened: list[Opened]) -> bool:
    return all(name(each.sock) == each.endpoint for each in opened)


@pytest.mark.parametrize("place", ["here", "there"])
def test_connections_to_a_removed_endpoint_are_reset_and_others_stay(
    two_nodes: TwoNodes, family: str, place: str
) -> None:
    """Both sides of an idle connection notice it."""
    leaving, staying = (two_nodes.a, two_nodes.b) if place == "here" else (two_nodes.d, two_nodes.e)
    web, kept = resets(two_nodes).to(leaving, staying), two_nodes.everywhere().to(leaving, staying)
    before = open_at(leaving)
    with connections(two_nodes, kept, family) as without:
        with connections(two_nodes, web, family) as opened:
            ending, others = split(opened, leaving)
            of_kept = open_at(leaving) - before - len(ending)
            kept.to(staying)
            web.to(staying)
            ends = {(each.client, end_of(each.sock)) for each in ending}
            assert ends <= {(each, end) for each in CLIENTS for end in ("ECONNRESET", "ECONNABORTED")}
            eventually(lambda: open_at(leaving) == before + of_kept, "the endpoint's side is reset")
            assert still_answer(others)
        assert still_answer(without)


def test_connections_to_a_terminating_endpoint_stay_until_it_does_not_serve(
    two_nodes: TwoNodes, family: str
) -> None:
    web = resets(two_nodes).to(two_nodes.a, two_nodes.b)
    with connections(two_nodes, web, family) as opened:
        ending, others = split(opened, two_nodes.a)
        web.to(terminating(two_nodes.a), two_nodes.b)
        assert not end_of(ending[0].sock, 2.5)
        assert still_answer(opened)
        web.to(terminating(two_nodes.a, serving=False), two_nodes.b)
        assert all(end_of(each.sock) for each in ending)
        assert still_answer(others)


@pytest.mark.ways("ebpf-on", "ebpf-off", "nftables", "iptables")
def test_connections_of_a_deleted_service_are_reset(two_nodes: TwoNodes, family: str) -> None:
    """In mode ipvs the kernel forgets them together with the virtual server."""
    web = resets(two_nodes).to(two_nodes.a)
    with connections(two_nodes, web, family) as opened:
        two_nodes.write(web.name)
        assert all(end_of(each.sock) for each in opened)


def test_an_endpoint_that_is_back_within_the_grace_period_keeps_its_connections(
    restartable_pair: TwoNodes, family: str
) -> None:
    pair = restartable_pair
    pair.start("--removed-endpoints-grace=5s", "--removed-endpoints=reset")
    web = pair.everywhere().to(pair.a)
    with connections(pair, web, family) as opened:
        web.to(pair.b)
        web.to(pair.a, pair.b)
        assert not end_of(opened[0].sock, 7.0)
        assert still_answer(opened)
