"""Checks of nodes: real servers on loopback addresses, which answer as those of nodes do, or badly."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ebpfproxy.http.node_checker import FAILURES, NodeChecker
from ebpfproxy.http.server import Listener, Response, plain
from ebpfproxy.model.address import Address, parse_address
from ebpfproxy.model.node_check import NodeCheck
from tests.unit.http.test_server import needs_ipv6

INTERVAL = 0.02
HERE = parse_address("127.0.0.1")
NONE: frozenset[NodeCheck] = frozenset()
ANSWERED = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Reports = queue.SimpleQueue[frozenset[NodeCheck]]


class Node:
    """The health server of a node: its status can be changed, and it counts requests."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.status = 200
        self.requests = 0
        self.server = Listener("healthz", "", (address, 0), self._answer)
        self.server.start()

    def _answer(self, request: object) -> Response:
        self.requests += 1
        return plain(self.status, "as requested")

    @property
    def check(self) -> NodeCheck:
        assert self.server.port
        return NodeCheck("n1", self.server.port)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.server.stop()


@contextlib.contextmanager
def checking(*checks: NodeCheck, address: Address = HERE) -> Iterator[tuple[NodeChecker, Reports]]:
    """Run a checker of these nodes in the block; yield it, and a queue of its reports."""
    reports: Reports = queue.SimpleQueue()
    checker, stop = NodeChecker(INTERVAL, reports.put), threading.Event()
    checker.set_targets(dict.fromkeys(checks, address))
    thread = threading.Thread(target=checker.run, args=(stop,))
    thread.start()
    try:
        yield checker, reports
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def serving(*behaviors: Callable[[socket.socket], object]) -> Iterator[tuple[NodeCheck, list[int]]]:
    """Serve connections in the block, the last behavior for all further ones. Yield also their numbers."""
    connections: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    connections.append(len(connections))
                    with connection, contextlib.suppress(OSError):
                        behaviors[min(connections[-1], len(behaviors) - 1)](connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield NodeCheck("n1", server.getsockname()[1]), connections
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def answer(
    data: bytes, times: int = 1_000_000, answered: list[int] | None = None
) -> Callable[[socket.socket], None]:
    """Answer so many requests of a connection, then close it. `answered` gets the number of each request."""

    def behave(connection: socket.socket) -> None:
        for number in range(times):
            if not connection.recv(4096):
                return
            connection.sendall(data)
            if answered is not None:
                answered.append(number)

    return behave


def wait_for_end(connection: socket.socket) -> None:
    """Answer nothing until the client closes the connection."""
    while connection.recv(4096):
        pass


def await_more(count: Callable[[], int], more: int) -> None:
    """Wait until a number has grown by `more`."""
    until, deadline = count() + more, time.monotonic() + 10
    while count() < until:
        assert time.monotonic() < deadline
        time.sleep(INTERVAL / 4)


def test_a_node_is_down_after_failed_checks_in_succession_and_up_after_one_that_passes(node: Node) -> None:
    with checking(node.check) as (_, reports):
        await_more(lambda: node.requests, 3)
        assert reports.empty()
        node.status, node.requests = 503, 0
        assert reports.get(timeout=10) == {node.check}
        assert node.requests >= FAILURES - 1  # one request may have been counted before
        node.status = 200
        assert reports.get(timeout=10) == NONE


def test_nodes_that_come_up_together_are_reported_together(node: Node) -> None:
    other = Node()
    try:
        node.status = other.status = 503
        with checking(node.check, other.check) as (_, reports):
            both = {node.check, other.check}
            while reports.get(timeout=10) != both:
                pass
            node.status = 200
            await_more(lambda: node.requests, 3)
            assert reports.empty()
            other.status = 200
            assert reports.get(timeout=10) == NONE
    finally:
        other.server.stop()


def test_a_node_that_goes_down_is_reported_while_another_one_comes_up(node: Node) -> None:
    other = Node()
    try:
        node.status = 503
        with checking(node.check, other.check) as (_, reports):
            assert reports.get(timeout=10) == {node.check}
            node.status, other.status = 200, 503
            assert reports.get(timeout=10) == {node.check, other.check}
            assert reports.get(timeout=10) == {other.check}
    finally:
        other.server.stop()


def test_fewer_failures_than_that_change_nothing(node: Node) -> None:
    with checking(node.check) as (_, reports):
        for _ in range(3):
            node.status = 503
            await_more(lambda: node.requests, 1)
            node.status = 200
            await_more(lambda: node.requests, 2)
        assert reports.empty()


def test_a_port_where_nothing_listens_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = NodeCheck("n1", server.getsockname()[1])
    with checking(closed) as (_, reports):
        assert reports.get(timeout=10) == {closed}


def test_a_node_that_does_not_answer_in_time_is_down_and_others_are_not_affected(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebpfproxy.http.node_checker.TIMEOUT", 0.1)
    with serving(wait_for_end) as (check, _), checking(check, node.check) as (_, reports):
        assert reports.get(timeout=10) == {check}
        await_more(lambda: node.requests, 3)
        assert reports.empty()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 4000,
        b"\xff" * 100,
    ],
)
def test_any_other_answer_is_a_failure(data: bytes) -> None:
    with serving(answer(data)) as (check, _), checking(check) as (_, reports):
        assert reports.get(timeout=10) == {check}


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.0 200 OK\r\n\r\nbody until the end",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        ANSWERED,
    ],
)
def test_a_node_that_closes_each_connection_is_up(data: bytes) -> None:
    with serving(answer(data, times=1)) as (check, connections), checking(check) as (_, reports):
        await_more(lambda: len(connections), 2 * FAILURES)
        assert reports.empty()


def test_an_open_connection_is_used_again() -> None:
    answered: list[int] = []
    behavior = answer(ANSWERED, answered=answered)
    with serving(behavior) as (check, connections), checking(check) as (_, reports):
        await_more(lambda: len(answered), 2 * FAILURES)
        assert len(connections) == 1
        assert reports.empty()


def test_a_removed_node_is_not_checked_and_a_new_one_counts_as_up(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = NodeCheck("n2", server.getsockname()[1])
    with checking(closed) as (checker, reports):
        assert reports.get(timeout=10) == {closed}
        checker.set_targets({node.check: HERE})
        assert reports.get(timeout=10) == NONE
        await_more(lambda: node.requests, 2)
        assert reports.empty()


def test_a_node_with_another_address_is_checked_there_and_stays_down_until_it_passes(node: Node) -> None:
    with checking(node.check, address=parse_address("127.0.0.9")) as (checker, reports):
        assert reports.get(timeout=10) == {node.check}
        checker.set_targets({node.check: HERE})
        assert reports.get(timeout=10) == NONE


@needs_ipv6
def test_an_ipv6_address_is_checked() -> None:
    node = Node("::1")
    try:
        with checking(node.check, address=parse_address("::1")) as (_, reports):
            await_more(lambda: node.requests, 2 * FAILURES)
            assert reports.empty()
    finally:
        node.server.stop()
