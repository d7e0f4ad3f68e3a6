"""An HTTP server in threads, with the manners of Go's net/http that kube-proxy's clients know.

Any method is served, as Go's handlers do that never look at it; a HEAD is answered without the body. No
TLS and no authentication: as in kube-proxy, what is served is public, and bound to loopback if it is not.
"""

import http.server
import socket
import socketserver
import sys
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from email.message import Message
from typing import Any, NamedTuple

from ebpfproxy import log
from ebpfproxy.errors import ConfigError

LISTENING = "Listening"
"""An HTTP server of the agent."""
NOT_LISTENING = "Cannot listen, retrying"
"""Another process has port 10256 or 10249: is kube-proxy still running?"""
REQUEST_FAILED = "Failed to answer a request"
"""An error in the agent; the client got status 500."""

_log = log.Logger(__name__)

_PLAIN = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}
_IDLE_SECONDS = 30
_QUEUE = 128


class Request(NamedTuple):
    """`path` is decoded and has no query. `headers` are looked up in any case."""

    path: str
    headers: Message


class Response(NamedTuple):
    code: int
    body: bytes
    headers: Mapping[str, str]


def plain(code: int, text: str) -> Response:
    """A short text, with the headers that Go gives one."""
    return Response(code, text.encode(), _PLAIN)


def not_found() -> Response:
    """What Go's http.NotFound answers."""
    return plain(404, "404 page not found\n")


Handle = Callable[[Request], Response]


class Listener:
    """Serves `handle` on `address` (host, port) from `start` to `stop`; port 0 takes a free one.

    An unspecified address of either family is both families, as in Go. `handle` is called in a thread
    for each connection. `name` and `flag` are for messages.
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
        self._name = name
        self._flag = flag
        self._address = address
        self._handle = handle
        self._hard_fail = hard_fail
        self._retry_seconds = retry_seconds
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def port(self) -> int | None:
        """The port listened on; None while there is none."""
        server = self._server
        return server.server_address[1] if server else None

    def start(self) -> None:
        """Listen, and serve in the background.

        Where the address is not to be had: ConfigError if `hard_fail`, else it is tried again every
        `retry_seconds` until `stop`.
        """
        try:
            self._server = _bind(self._address, self._handle)
        except OSError as error:
            if self._hard_fail:
                raise ConfigError(
                    f"{self._name}: cannot listen on {_joined(self._address)}: {error.strerror}",
                    f"{self._flag} takes another address; --bind-address-hard-fail=false continues without",
                ) from error
            self._failed(error)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; answers under way end by themselves. Does nothing if it is not listening."""
        self._stopping.set()
        if self._server:
            self._server.end()
        if self._thread:
            self._thread.join()
        self._server = None

    def _run(self) -> None:
        while self._server is None:
            if self._stopping.wait(self._retry_seconds):
                return
            try:
                self._server = _bind(self._address, self._handle)
            except OSError as error:
                self._failed(error)
        _log.info(LISTENING, server=self._name, address=_joined((self._address[0], self.port or 0)))
        self._server.serve(self._stopping)

    def _failed(self, error: OSError) -> None:
        _log.error(
            NOT_LISTENING,
            server=self._name,
            address=_joined(self._address),
            error=error.strerror,
            after=f"{self._retry_seconds:g}s",
        )


def _joined(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bind(address: tuple[str, int], handle: Handle) -> "Server":
    """Raises OSError."""
    host, port = address
    if host in ("0.0.0.0", "::"):
        try:
            return Server(socket.AF_INET6, ("::", port), handle)
        except OSError:
            if host == "::":
                raise
            # No IPv6 in this kernel, or the port is taken in IPv6 alone; IPv4 says which.
    return Server(socket.AF_INET6 if ":" in host else socket.AF_INET, address, handle)


class Server(socketserver.ThreadingTCPServer):
    """A socket that listens, and a thread for each connection. To be made raises OSError.

    A socket of IPv6 is both families, where its address is unspecified and it is not `v6_only`.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _QUEUE
    server_address: tuple[str, int]

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        handle: Handle,
        v6_only: bool = False,
    ) -> None:
        self.address_family = family
        self.handle = handle
        self._v6_only = v6_only
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, self._v6_only)
        super().server_bind()

    def serve(self, stopping: threading.Event) -> None:
        """Until `end`. Blocks in accept, so that an idle server never wakes."""
        while not stopping.is_set():
            self.handle_request()
        self.server_close()

    def end(self) -> None:
        """Wake `serve`, whose event is set, out of accept."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The connection is closed without an answer, as Go does where a handler panics."""
        error = sys.exception()
        if not isinstance(error, OSError):  # that is a client that went away
            _log.error(REQUEST_FAILED, client=client_address[0], error=repr(error))


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    wbufsize = -1  # head and body leave in one segment
    server: Server

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        response = self.server.handle(Request(path, self.headers))
        self.send_response_only(response.code)
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.send_header("Date", self.date_time_string())
        self.send_header("Content-Length", str(len(response.body)))
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.send_header("Connection", "close")  # an unread body would pass for the next request
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged; kube-proxy does not either."""
