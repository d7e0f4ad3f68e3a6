"""Relays the bytes of one TCP connection between a client and an endpoint.

A relay holds at most `_BUFFER` of each direction, and only while the sink does not take it. So a slow reader
stops the sender. Decision 0084: why bytes are copied.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.backends.userspace.relay.target import Target

_BUFFER = memoryview(bytearray(64 << 10))
_LINGER_ZERO = struct.pack("ii", 1, 0)


class Direction:
    """The bytes from one socket to the other one."""

    __slots__ = ("_connection", "_rest", "_sink", "_source", "has_ended")

    def __init__(self, connection: "Connection", source: socket.socket, sink: socket.socket) -> None:
        self._connection = connection
        self._source = source
        self._sink = sink
        self._rest = b""  # what the sink has not taken
        self.has_ended = False

    def start(self) -> None:
        """Read the source whenever it has bytes."""
        self._connection.loop.add_reader(self._source, self._read)

    def _read(self) -> None:
        connection = self._connection
        connection.used = connection.loop.time()
        try:
            count = self._source.recv_into(_BUFFER)
        except BlockingIOError:
            return
        except OSError:
            connection.reset()
            return
        if count:
            self._send(_BUFFER[:count])
        else:
            self._end()

    def _send(self, content: bytes | memoryview) -> None:
        """Send to the sink. The source is not read until the sink has taken everything."""
        loop, waited = self._connection.loop, bool(self._rest)
        try:
            sent = self._sink.send(content)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._connection.reset()
            return
        self._rest = bytes(content[sent:])
        if self._rest and not waited:
            loop.remove_reader(self._source)
            loop.add_writer(self._sink, self._send_rest)
        elif waited and not self._rest:
            loop.remove_writer(self._sink)
            self.start()

    def _send_rest(self) -> None:
        self._send(self._rest)

    def _end(self) -> None:
        """The source has sent everything: so the sink may not wait for more (half-close)."""
        connection = self._connection
        self.has_ended = True
        connection.loop.remove_reader(self._source)
        with contextlib.suppress(OSError):  # the sink was reset, which its own direction notices
            self._sink.shutdown(socket.SHUT_WR)
        connection.direction_ended()


class Ends(NamedTuple):
    """The client of a connection, and the frontend to which it connected."""

    client: Target
    frontend: Target


class Info(NamedTuple):
    """What a connection belongs to: the ServicePort, its ends for the client, the endpoint, and the balancer
    that counts it.
    """

    service: str
    ends: Ends
    target: Target
    balancer: Balancer


class Connection:
    """Two sockets that are connected, and both directions between them.

    `used`: when bytes last arrived, in the time of the event loop. `ended` is called once.
    """

    __slots__ = ("_client", "_ended", "_server", "_to_client", "_to_server", "info", "loop", "used")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        client: socket.socket,
        server: socket.socket,
        info: Info,
        ended: Callable[["Connection", bool], object],
    ) -> None:
        """`ended(connection, was_reset)`."""
        self.loop = loop
        self.info = info
        self.used = loop.time()
        self._client, self._server = client, server
        self._ended = ended
        self._to_server = Direction(self, client, server)
        self._to_client = Direction(self, server, client)

    def start(self) -> None:
        """Begin to relay."""
        self._to_client.start()
        self._to_server.start()

    @property
    def is_half_closed(self) -> bool:
        """Whether one side has sent everything."""
        return self._to_server.has_ended or self._to_client.has_ended

    def direction_ended(self) -> None:
        if self._to_server.has_ended and self._to_client.has_ended:
            self._close(was_reset=False)

    def reset(self) -> None:
        """Reset both sides: one of them was reset, or the connection must end."""
        for each in (self._client, self._server):
            _reset_on_close(each)
        self._close(was_reset=True)

    def _close(self, was_reset: bool) -> None:
        if self._client.fileno() < 0:
            return
        for each in (self._client, self._server):
            if each.fileno() >= 0:
                self.loop.remove_reader(each)
                self.loop.remove_writer(each)
                each.close()
        self._ended(self, was_reset)


def reset(sock: socket.socket) -> None:
    """Close a connected socket so that its peer gets a reset."""
    _reset_on_close(sock)
    sock.close()


def _reset_on_close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
