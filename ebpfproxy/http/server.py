"""A threaded HTTP server that behaves like Go's net/http, as clients of kube-proxy expect.

Every method is served, as by Go handlers that ignore the method. The response to HEAD has no body. As in
kube-proxy, there is no TLS and no authentication: the content is public, or the server listens on loopback.
"""

import http.server
import io
import math
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from email.message import Message
from http import HTTPStatus
from typing import Any, NamedTuple

from ebpfproxy import log, threads
from ebpfproxy.errors import ConfigError
from ebpfproxy.http.connections import (
    IDLE_SECONDS,
    RESPONSE_SECONDS,
    Connections,
    LimitedReader,
    RequestTooLarge,
)

LISTENING = "Listening"
"""An HTTP server of the agent accepts connections."""
NOT_LISTENING = "Cannot listen, retrying"
"""Another process has port 10256 or 10249: is kube-proxy still running?"""
REQUEST_FAILED = "Failed to answer a request"
"""An error in the agent. The connection is closed without a response. Logged at most once a second."""

_log = log.Logger(__name__)

BODY_BYTES = 64
"""The longest body that is read, of requests with PUT."""

_PLAIN = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}
_QUEUE = 128
_CONNECTIONS = 64  # of a listener
_PAUSE_SECONDS = 0.1  # after accept() has failed, which can be permanent
_STOP_SECONDS = 2.0  # for the thread of a listener to end
_REPORT_SECONDS = 1.0  # between two lines about failed requests, which clients could cause


class Request(NamedTuple):
    """A request. `path` is decoded and has no query. Names of `headers` are case-insensitive.

    `query` has the names of the query's parameters. `body` is empty unless the method is PUT, and if it is
    longer than BODY_BYTES.
    """

    path: str
    headers: Message
    query: frozenset[str] = frozenset()
    method: str = "GET"
    body: bytes = b""


class Response(NamedTuple):
    """A response: status code, body and headers."""

    code: int
    body: bytes
    headers: Mapping[str, str]


def plain(code: int, text: str) -> Response:
    """Return a short text with the headers that Go's http.Error sets."""
    return Response(code, text.encode(), _PLAIN)


def not_found() -> Response:
    """Return the response of Go's http.NotFound."""
    return plain(404, "404 page not found\n")


Handle = Callable[[Request], Response]


class Listener:
    """Serves `handle` on `address` (host, port) from `start` to `stop`. Port 0 selects a free port.

    An unspecified address of either family means both families, as in Go. `handle` is called in a thread of
    its own for each connection, of which there are a limited number (`Connections`). `name` and `flag` appear
    in messages.
    """

    def __init__(
        self,
        name: str,
        flag: str,
        address: tuple[str, int],
        handle: Handle,
        hard_fail: bool = False,
        retry_seconds: float = 5.0,
    ) -> None:
        self.name = name
        self._flag = flag
        self._address = address
        self._handle = handle
        self._hard_fail = hard_fail
        self._retry_seconds = retry_seconds
        self._connections = Connections(_CONNECTIONS)
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.start_failure = ""
        """Why `start` could not listen, "" if it could."""

    @property
    def port(self) -> int | None:
        """The port on which the server listens, None while it does not."""
        server = self._server
        return server.server_address[1] if server else None

    def start(self) -> None:
        """Listen, and serve in the background.

        If the address cannot be bound: raises ConfigError with `hard_fail`, else retries every
        `retry_seconds` until `stop`.
        """
        try:
            self._server = _bind(self._address, self._handle, self._connections)
        except OSError as error:
            if self._hard_fail:
                raise ConfigError(
                    f"{self.name}: cannot listen on {_host_port(self._address)}: {error.strerror}",
                    f"set {self._flag} to another address, or use --bind-address-hard-fail=false",
                ) from error
            self.start_failure = f"cannot listen on {_host_port(self._address)}: {error.strerror}"
            self._log_failure(error)
        self._thread = threads.start(self.name, self._run)

    def stop(self) -> None:
        """Stop listening. Responses in progress are completed. Does nothing if it is not listening."""
        self._stopping.set()
        if self._server:
            self._server.wake()
        if self._thread:
            threads.join(self._thread, _STOP_SECONDS)
        self._server = None

    def _run(self) -> None:
        while self._server is None:
            if self._stopping.wait(self._retry_seconds):
                return
            try:
                self._server = _bind(self._address, self._handle, self._connections)
            except OSError as error:
                self._log_failure(error)
        _log.info(LISTENING, server=self.name, address=_host_port((self._address[0], self.port or 0)))
        self._server.serve(self._stopping)

    def _log_failure(self, error: OSError) -> None:
        _log.error(
            NOT_LISTENING,
            server=self.name,
            address=_host_port(self._address),
            error=error.strerror,
            after=f"{self._retry_seconds:g}s",
        )


def _host_port(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(address: tuple[str, int], handle: Handle, connections: Connections) -> "Server":
    """Raises OSError."""
    host, port = address
    if host in ("0.0.0.0", "::"):
        try:
            return Server(socket.AF_INET6, ("::", port), handle, connections)
        except OSError:
            if host == "::":
                raise
            # The kernel has no IPv6, or only the IPv6 port is taken. IPv4 may still work.
    return Server(socket.AF_INET6 if ":" in host else socket.AF_INET, address, handle, connections)


class Server(socketserver.ThreadingTCPServer):
    """A listening socket, and a thread for each connection. The constructor raises OSError.

    `connections` limits their number; servers may share it.
    An IPv6 socket with the unspecified address accepts both families unless `v6_only`.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _QUEUE
    server_address: tuple[str, int]
    _reported = -math.inf  # when a server logged a failed request

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        handle: Handle,
        connections: Connections,
        v6_only: bool = False,
    ) -> None:
        self.address_family = family
        self.handle = handle
        self.connections = connections
        self._v6_only = v6_only
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, self._v6_only)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Raises OSError, which the caller ignores: after a pause, as a shortage of descriptors can last."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection if it is admitted, else close it."""
        if not self.connections.admit(request, client_address[0]):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self.shutdown_request(request)
            raise

    def shutdown_request(self, request: Any) -> None:
        self.connections.release(request)
        super().shutdown_request(request)

    def serve(self, stopping: threading.Event) -> None:
        """Serve until `stopping` is set and `wake` is called. An idle server blocks in accept()."""
        while not stopping.is_set():
            self.handle_request()
        self.server_close()

    def wake(self) -> None:
        """Make accept() return in `serve`. The caller has set the event of `serve`."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the error. The connection is closed without a response, as in Go after a panic of a handler."""
        error = sys.exception()
        if isinstance(error, OSError):  # the client closed the connection
            return
        if time.monotonic() - Server._reported >= _REPORT_SECONDS:
            Server._reported = time.monotonic()
            _log.error(REQUEST_FAILED, client=client_address[0], error=repr(error))


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self._reader = LimitedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)
        self._output = io.BytesIO()
        self.wfile = self._output  # so that a response is sent as a unit, in limited time

    def handle(self) -> None:
        """Answer requests until one is incomplete, or the connection is closed."""
        self.close_connection = True
        self._handle_one()
        while not self.close_connection:
            self._reader.expect(IDLE_SECONDS)
            self._handle_one()

    def _handle_one(self) -> None:
        try:
            self.handle_one_request()
        except RequestTooLarge:
            self.close_connection = True
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        self.connection.settimeout(RESPONSE_SECONDS)
        self.connection.sendall(self._output.getvalue())
        self._output.seek(0)
        self._output.truncate()

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _refuse(self, status: HTTPStatus) -> None:
        """The response of Go's server to a request that it cannot read; it closes the connection."""
        text = f"{status.value} {status.phrase}"
        head = "Content-Type: text/plain; charset=utf-8\r\nConnection: close"
        self.wfile.write(f"HTTP/1.1 {text}\r\n{head}\r\n\r\n{text}".encode())

    def _answer(self) -> None:
        try:
            parts = urllib.parse.urlsplit(self.path)
        except ValueError:  # such as http://[
            self.close_connection = True
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        path = urllib.parse.unquote(parts.path)
        query = frozenset(each.partition("=")[0] for each in parts.query.split("&") if each)
        with self.server.connections.busy(self.connection):
            request = Request(path, self.headers, query, self.command, self._body())
            response = self.server.handle(request)
        self.send_response_only(response.code)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Date", self.date_time_string())
        self.send_header("Content-Length", str(len(response.body)))
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.send_header("Connection", "close")  # an unread body would be parsed as a request
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def _body(self) -> bytes:
        """Raises TimeoutError if the client does not send it in time."""
        length = self.headers.get("Content-Length", "")
        if self.command != "PUT" or not (length.isascii() and length.isdigit() and len(length) <= 2):
            return b""
        return self.rfile.read(int(length)) if int(length) <= BODY_BYTES else b""

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests, as kube-proxy."""
