"""Responses at healthCheckNodePorts, through real sockets."""

import contextlib
import http.client
import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from ebpfproxy import threads
from ebpfproxy.http.health_check_node_port import ServiceHealthServer
from ebpfproxy.model.address import parse_address
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.health_check_node_port import HealthCheck
from tests.unit.http.http_client import Answer, ask
from tests.unit.http.test_server import needs_ipv6

V4, V6, LOOPBACK = map(parse_address, ("0.0.0.0", "::", "127.0.0.1"))
WEB, API = NamespacedName("default", "web"), NamespacedName("default", "api")


class Server:
    def __init__(self) -> None:
        self.healthy = True
        self.reasons: list[Mapping[NamespacedName, str]] = []
        self.of = ServiceHealthServer(lambda: self.healthy, self.reasons.append, retry_seconds=0.01)
        self.of.start()

    def has(self, port: int, endpoints: int = 1, service: NamespacedName = WEB, *addresses: str) -> None:
        places = [parse_address(address) for address in addresses] or [LOOPBACK]
        self.of.update([HealthCheck(service, port, endpoints)], places)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.of.stop()


@pytest.fixture
def port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def asked(port: int, host: str = "127.0.0.1") -> Answer:
    """Return the first response, waiting until the server listens."""
    return eventually(lambda: ask(port, "/", host=host))


def eventually(get: Callable[[], Answer]) -> Answer:
    deadline = time.monotonic() + 10
    while True:
        try:
            return get()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.001)  # between two attempts


def rejected(port: int, host: str = "127.0.0.1") -> bool:
    with contextlib.suppress(ConnectionResetError, http.client.HTTPException):
        try:
            ask(port, "/", host=host)
        except ConnectionRefusedError:
            return True
    return False


def await_rejected(port: int) -> None:
    deadline = time.monotonic() + 10
    while not rejected(port):
        assert time.monotonic() < deadline
        time.sleep(0.001)  # between two attempts


def values(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    """Return the values of each log line."""
    return [record.__dict__["values"] for record in caplog.records]


def test_the_response_for_local_endpoints_equals_kube_proxys(server: Server, port: int) -> None:
    server.has(port, endpoints=2)
    answer = asked(port)
    assert (answer.code, answer.body.decode()) == (
        200,
        '{\n\t"service": {\n\t\t"namespace": "default",\n\t\t"name": "web"\n\t},\n'
        '\t"localEndpoints": 2,\n\t"serviceProxyHealthy": true\n}',
    )
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == "2"


def test_every_path_has_the_same_response(server: Server, port: int) -> None:
    server.has(port)
    asked(port)
    assert ask(port, "/any/path?at=all").code == 200


def test_without_local_endpoints_the_status_is_503(server: Server, port: int) -> None:
    server.has(port, endpoints=0)
    answer = asked(port)
    assert answer.code == 503
    assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == "0"
    assert b'"localEndpoints": 0,\n\t"serviceProxyHealthy": true' in answer.body


def test_an_unhealthy_agent_responds_503(server: Server, port: int) -> None:
    """Regression: kubernetes issues 111661, 115825: a stalled proxy continued to get traffic."""
    server.has(port)
    server.healthy = False
    answer = asked(port)
    assert answer.code == 503
    assert b'"localEndpoints": 1,\n\t"serviceProxyHealthy": false' in answer.body


def test_open_connections_see_changes(server: Server, port: int) -> None:
    server.has(port)
    asked(port)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        server.has(port, endpoints=0)
        connection.request("GET", "/")
        assert connection.getresponse().status == 503


def test_the_port_of_a_removed_service_is_closed_and_free(server: Server, port: int) -> None:
    server.has(port)
    asked(port)
    server.of.update([], [LOOPBACK])
    await_rejected(port)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_changed_port_replaces_the_previous_one(server: Server, port: int) -> None:
    server.has(port)
    asked(port)
    with socket.create_server(("127.0.0.1", 0)) as held:
        other = held.getsockname()[1]
    server.has(other)
    assert asked(other).code == 200
    await_rejected(port)


def test_a_taken_port_is_logged_once_and_served_once_it_is_free(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        server.has(port)
        deadline = time.monotonic() + 10
        while not caplog.records:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        server.of.update([HealthCheck(WEB, port, 3)], [LOOPBACK])
    assert asked(port).headers["X-Load-Balancing-Endpoint-Weight"] == "3"
    (logged,) = values(caplog)
    assert (logged["service"], logged["address"]) == ("default/web", f"127.0.0.1:{port}")
    reason = f"cannot listen for health checks on 127.0.0.1:{port}: Address already in use"
    assert server.reasons == [{WEB: reason}]


def test_a_taken_port_does_not_affect_other_ports(server: Server, port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        taken = held.getsockname()[1]
        server.of.update([HealthCheck(API, taken, 1), HealthCheck(WEB, port, 1)], [LOOPBACK])
        assert b'"name": "web"' in asked(port).body


def test_of_two_services_with_the_same_port_the_first_by_name_is_served(
    server: Server, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    both = [HealthCheck(WEB, port, 1), HealthCheck(API, port, 2)]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            server.of.update(both, [LOOPBACK])
        assert b'"name": "api"' in asked(port).body
    (logged,) = values(caplog)
    assert (logged["served"], logged["rejected"]) == ("default/api", "default/web")
    assert server.reasons == [{WEB: f"healthCheckNodePort {port} is that of Service default/api"}]
    server.of.update(both[:1], [LOOPBACK])
    assert b'"name": "web"' in asked(port).body


@needs_ipv6
def test_each_family_has_a_separate_socket(server: Server, port: int) -> None:
    """Regression: kubernetes issue 114702: sockets of the two families conflicted."""
    server.of.update([HealthCheck(WEB, port, 1)], [V4, V6])
    for host in ("127.0.0.1", "::1"):
        assert asked(port, host).code == 200
    server.of.update([HealthCheck(WEB, port, 1)], [V6])
    await_rejected(port)
    assert asked(port, "::1").code == 200


def test_addresses_without_node_ports_do_not_respond(server: Server, port: int) -> None:
    """Regression: kubernetes issue 82163."""
    server.has(port, 1, WEB, "127.0.0.2")
    assert asked(port, "127.0.0.2").code == 200
    assert rejected(port)


def test_a_server_that_was_not_started_can_be_stopped() -> None:
    ServiceHealthServer(lambda: True).stop()


def test_the_ports_are_served_again_after_an_error_of_the_thread(
    server: Server, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as ENOSPC, if fs.epoll.max_user_watches is reached."""
    monkeypatch.setattr(threads, "_PAUSE_SECONDS", 0.0)
    server.has(port)
    assert asked(port).code == 200
    update, failures = server.of._update_sockets, [OSError(28, "No space left on device")]

    def fail_once(selector: selectors.BaseSelector) -> bool:
        if failures:
            raise failures.pop()
        return update(selector)

    monkeypatch.setattr(server.of, "_update_sockets", fail_once)
    server.has(port, 2)
    server.has(port, 2, API, "127.0.0.1", "127.0.0.2")
    assert asked(port, "127.0.0.2").code == 200
    assert not failures
