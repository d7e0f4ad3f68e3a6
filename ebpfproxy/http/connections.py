"""A limit on the open connections of servers, which idle or slow clients cannot use up for others."""

import collections
import contextlib
import io
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

IDLE_SECONDS = 30.0
"""How long a connection may be idle between two requests."""
REQUEST_SECONDS = 5.0
"""How long a request may take to arrive, from its first byte; and a new connection until that byte."""
RESPONSE_SECONDS = 10.0
"""How long a client may take to receive a response."""
REQUEST_BYTES = 16_384
"""The longest request line with headers. Go's servers accept 1 MB (net/http, DefaultMaxHeaderBytes), but any
client can open many connections at a time, and a Python object for each header takes many times its length.
No health check of a load balancer comes near."""


class _Open(NamedTuple):
    """An open connection; `client` is the address of its client."""

    connection: socket.socket
    client: str


class Connections:
    """The open connections of one or more servers, at most `limit`.

    A connection beyond the limit replaces another one: the oldest that waits for a request, of the client
    with the most connections. So a client that opens many closes only its own, and a probe of another client
    gets its response. If all connections have a request in progress, the oldest of them is closed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}  # by id of the socket, the oldest first
        self._busy: set[int] = set()
        self._closing: set[int] = set()  # closed here; their threads still run

    def admit(self, connection: socket.socket, client: str) -> bool:
        """Count a new connection. Return whether it is admitted; False while too many are being closed."""
        with self._lock:
            if len(self._open) + len(self._closing) >= 2 * self._limit:
                return False
            if len(self._open) >= self._limit:
                self._close_one()
            self._open[id(connection)] = _Open(connection, client)
            return True

    def release(self, connection: socket.socket) -> None:
        """Forget a connection whose thread ends."""
        with self._lock:
            self._open.pop(id(connection), None)
            self._busy.discard(id(connection))
            self._closing.discard(id(connection))

    @contextlib.contextmanager
    def busy(self, connection: socket.socket) -> Iterator[None]:
        """A request of this connection is in progress within the block."""
        with self._lock:
            self._busy.add(id(connection))
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(id(connection))

    def _close_one(self) -> None:
        candidates = [number for number in self._open if number not in self._busy] or list(self._open)
        counts = collections.Counter(each.client for each in self._open.values())
        most = max(counts[self._open[number].client] for number in candidates)
        chosen = next(number for number in candidates if counts[self._open[number].client] == most)
        self._closing.add(chosen)
        with contextlib.suppress(OSError):  # the client has closed it
            self._open.pop(chosen).connection.shutdown(socket.SHUT_RDWR)


class RequestTooLarge(Exception):
    """A request has more than REQUEST_BYTES before its body."""


class LimitedReader(io.RawIOBase):
    """Reads requests from a connection, in limited time and of limited length.

    Raises TimeoutError after the deadline, however many bytes arrive, and RequestTooLarge.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.expect(REQUEST_SECONDS)

    def expect(self, first: float) -> None:
        """Expect a request: its first byte within `first` seconds, the rest within REQUEST_SECONDS of it."""
        self._deadline = time.monotonic() + first
        self._begun = False
        self._left = REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise RequestTooLarge
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        if not self._begun:
            self._begun, self._deadline = True, time.monotonic() + REQUEST_SECONDS
        return count
