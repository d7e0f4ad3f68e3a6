"""Floods of idle and slow clients: they neither use up connections nor keep probes from their responses."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.http import connections, server
from ebpfproxy.http.health_check_node_port import ServiceHealthServer
from ebpfproxy.http.server import Listener, Request, Response, plain
from ebpfproxy.model.address import parse_address
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.health_check_node_port import HealthCheck
from tests.unit.http.http_client import ask
from tests.unit.http.test_health_check_node_port import asked

FLOOD = 400
LIMIT = 64
FLOODER = "127.0.0.2"


def answer(request: Request) -> Response:
    return plain(200, "ok" * 2_000_000 if request.path == "/large" else "ok")


@pytest.fixture
def port() -> Iterator[int]:
    listener = Listener("test", "--test-address", ("127.0.0.1", 0), answer)
    listener.start()
    assert listener.port
    yield listener.port
    listener.stop()


@contextlib.contextmanager
def flood(port: int, sent: bytes, count: int = FLOOD) -> Iterator[list[socket.socket]]:
    """Connections of one client that have sent `sent` and wait."""
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", port), 10, (FLOODER, 0))
            clients.append(stack.enter_context(client))
            with contextlib.suppress(OSError):  # closed already
                client.sendall(sent)
        yield clients


def server_sides() -> int:
    """The number of connections of the flooder that this process has accepted."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            kept = socket.socket(fileno=os.dup(int(path.name)))
            with kept:
                count += kept.family == socket.AF_INET and kept.getpeername()[0] == FLOODER
    return count


def is_closed(client: socket.socket, seconds: float) -> bool:
    client.settimeout(seconds)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize(
    "sent", [b"", b"GET /healthz HT", b"GET / HTTP/1.1\r\n\r\n"], ids=["idle", "slow", "kept"]
)
def test_a_flood_does_not_keep_another_client_from_its_response(port: int, sent: bytes) -> None:
    with flood(port, sent):
        for _ in range(20):
            assert ask(port, "/healthz").code == 200
        assert server_sides() <= 2 * LIMIT
        assert sum(each.name.startswith("Thread-") for each in threading.enumerate()) <= 3 * LIMIT


def test_a_flood_closes_connections_of_the_flooder_only(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as probe, flood(port, b""):
        probe.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert probe.recv(15) == b"HTTP/1.1 200 OK"


def test_clients_that_read_slowly_do_not_block_another_client(port: int) -> None:
    with flood(port, b"GET /large HTTP/1.1\r\n\r\n", 2 * LIMIT):
        assert ask(port, "/healthz").code == 200


def test_a_request_that_arrives_too_slowly_is_given_up(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each byte extended the time limit, so a byte each 29 s kept a thread forever."""
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        for _ in range(100):
            try:
                client.sendall(b"G")
            except OSError:
                break
            if is_closed(client, 0.02):
                break
        else:
            raise AssertionError("the connection is still open")


def test_an_idle_connection_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while client.recv(4096)[-2:] != b"ok":
            pass
        assert is_closed(client, 10)


def test_a_flood_of_a_health_check_node_port_does_not_block_the_load_balancer() -> None:
    health = ServiceHealthServer(lambda: True)
    health.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
        check = HealthCheck(NamespacedName("default", "web"), port, 1)
        health.update([check], [parse_address("127.0.0.1")])
        assert asked(port).code == 200
        with flood(port, b""):
            assert asked(port).code == 200
            assert server_sides() <= 4 * LIMIT
    finally:
        health.stop()


def test_the_server_continues_after_a_shortage_of_descriptors(port: int) -> None:
    """A failing accept() must neither end the server nor use a CPU."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    client = socket.socket()
    with client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            client.connect(("127.0.0.1", port))
            began = time.process_time()
            time.sleep(0.3)
            assert time.process_time() - began < 0.15
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.settimeout(10)
        client.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
