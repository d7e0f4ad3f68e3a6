"""The HTTP server: methods, connections, families, and addresses that are in use."""

import contextlib
import http.client
import logging
import math
import socket
import threading
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import ConfigError
from ebpfproxy.http import server
from ebpfproxy.http.server import (
    LISTENING,
    NOT_LISTENING,
    REQUEST_FAILED,
    Listener,
    Request,
    Response,
    Server,
    plain,
)
from tests.unit.http.http_client import ask


def echo(request: Request) -> Response:
    if request.path == "/fault":
        raise RuntimeError("a bug in a handler")
    return plain(200, request.path)


@contextlib.contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[int]:
    listener = Listener("test", "--test-address", (host, 0), echo)
    listener.start()
    try:
        assert listener.port
        yield listener.port
    finally:
        listener.stop()


@pytest.fixture
def port() -> Iterator[int]:
    with listening() as number:
        yield number


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A socket that listens on loopback, so that its port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "FROB"])
def test_every_method_is_served(port: int, method: str) -> None:
    answer = ask(port, "/a", method)
    assert (answer.code, answer.body) == (200, b"/a")


def exchange(port: int, request: bytes) -> bytes:
    """Return everything until the server closes. The request must have `Connection: close`."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # a body that was never read
            while part := client.recv(4096):
                answer += part
        return answer


def test_a_head_response_has_the_length_but_no_body(port: int) -> None:
    head, _, body = exchange(port, b"HEAD /abc HTTP/1.1\r\nConnection: close\r\n\r\n").partition(b"\r\n\r\n")
    assert b"Content-Length: 4" in head.splitlines()
    assert body == b""


def test_the_headers_are_exactly_those_of_go(port: int) -> None:
    headers = ask(port, "/a").headers
    assert headers.pop("Date").endswith(" GMT")
    assert headers == {
        "Content-Type": "text/plain; charset=utf-8",
        "X-Content-Type-Options": "nosniff",
        "Content-Length": "2",
    }


@pytest.mark.parametrize("path", ["/a?verbose=1", "/%61", "http://elsewhere/a"])
def test_the_path_is_decoded_and_has_no_query(port: int, path: str) -> None:
    assert ask(port, path).body == b"/a"


def test_a_connection_is_kept_for_the_next_request(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/1")
    assert connection.getresponse().read() == b"/1"
    kept = connection.sock
    connection.request("GET", "/2")
    assert connection.getresponse().read() == b"/2"
    assert kept is not None
    assert connection.sock is kept
    connection.close()


def test_a_request_body_is_not_parsed_as_the_next_request(port: int) -> None:
    body = b"GET /smuggled HTTP/1.1\r\n\r\n"
    answer = exchange(port, b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert answer.count(b"HTTP/1.1") == 1
    assert b"Connection: close\r\n" in answer


def test_an_error_in_a_handler_closes_only_that_connection(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "_reported", -math.inf)
    with caplog.at_level(logging.ERROR), pytest.raises(http.client.RemoteDisconnected):
        ask(port, "/fault")
    assert [record.message for record in caplog.records] == [REQUEST_FAILED]
    assert ask(port, "/a").code == 200


def test_a_slow_client_does_not_delay_others(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /a")
        assert ask(port, "/b").body == b"/b"


@needs_ipv6
@pytest.mark.parametrize("unspecified", ["0.0.0.0", "::"])
def test_an_unspecified_address_accepts_both_families(unspecified: str) -> None:
    with listening(unspecified) as port:
        assert ask(port, "/a", host="127.0.0.1").body == b"/a"
        assert ask(port, "/a", host="::1").body == b"/a"


@needs_ipv6
def test_ipv6_loopback_does_not_accept_ipv4() -> None:
    with listening("::1") as port:
        assert ask(port, "/a", host="::1").code == 200
        with pytest.raises(ConnectionRefusedError):
            ask(port, "/a", host="127.0.0.1")


def test_after_stop_the_port_is_free_and_can_be_listened_on_again() -> None:
    first = Listener("test", "--test-address", ("127.0.0.1", 0), echo)
    first.start()
    port = first.port
    assert port is not None
    ask(port, "/a")
    first.stop()
    assert first.port is None
    with pytest.raises(ConnectionRefusedError):
        ask(port, "/a")
    second = Listener("test", "--test-address", ("127.0.0.1", port), echo, hard_fail=True)
    second.start()
    second.stop()


def test_no_thread_is_left_after_stop() -> None:
    before = set(threading.enumerate())
    with listening():
        assert set(threading.enumerate()) - before
    assert set(threading.enumerate()) <= before


def test_a_taken_address_is_an_error_with_hard_fail(taken: socket.socket) -> None:
    address = taken.getsockname()
    listener = Listener("test", "--test-address", address, echo, hard_fail=True)
    with pytest.raises(ConfigError) as caught:
        listener.start()
    assert caught.value.message == f"test: cannot listen on 127.0.0.1:{address[1]}: Address already in use"
    assert "--test-address" in caught.value.hint
    listener.stop()


def test_a_taken_address_is_retried_until_it_is_free(
    taken: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    address = taken.getsockname()
    listener = Listener("test", "--test-address", address, echo, retry_seconds=0.01)
    listening_now = threading.Event()

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == LISTENING:
                listening_now.set()

    logger, notice = logging.getLogger("ebpfproxy.http.server"), Notice()
    logger.addHandler(notice)
    try:
        with caplog.at_level(logging.INFO, "ebpfproxy"):
            listener.start()
            assert listener.port is None
            taken.close()
            assert listening_now.wait(10)
        assert ask(address[1], "/a").code == 200
        assert caplog.records[0].message == NOT_LISTENING
    finally:
        logger.removeHandler(notice)
        listener.stop()


def test_stop_ends_the_retries(taken: socket.socket) -> None:
    listener = Listener("test", "--test-address", taken.getsockname(), echo, retry_seconds=3600.0)
    listener.start()
    listener.stop()  # does not come back before the hour is over if it waited
    assert listener.port is None


def until_closed(port: int, sent: bytes) -> bytes:
    """What the server answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 10) as client, contextlib.suppress(ConnectionError):
        client.sendall(sent)
        return b"".join(iter(lambda: client.recv(65536), b""))
    return b""


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 60_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 90 + b"z: " + b"a" * 16_000 + b"\r\n\r\n",
        b"a" * 10_000_000,
    ],
    ids=["line", "header", "headers", "endless"],
)
def test_a_request_of_more_than_16_kb_is_refused(port: int, sent: bytes) -> None:
    answer = until_closed(port, sent)
    # Empty if the client's unread bytes reset the connection first.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert ask(port, "/a").code == 200


def test_a_request_of_16_kb_is_answered(port: int) -> None:
    assert ask(port, "/a", x="y" * 16_000).code == 200


@pytest.mark.parametrize("target", ["http://[", "http://[::1"])
def test_a_target_that_is_no_url_is_a_bad_request_and_not_logged(
    port: int, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = until_closed(port, f"GET {target} HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert not caplog.records


def test_failed_requests_are_logged_once_a_second(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_REPORT_SECONDS", 3600.0)
    for lines in (1, 2):
        monkeypatch.setattr(Server, "_reported", -math.inf)
        for _ in range(5):
            until_closed(port, b"GET /fault HTTP/1.1\r\n\r\n")
        assert [record.message for record in caplog.records] == [REQUEST_FAILED] * lines
