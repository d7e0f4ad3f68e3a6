"""Relays the bytes of one TCP connection between a client and an endpoint.

A relay process holds at most `_SMALL` bytes of each direction, so a slow reader costs its own kernel buffers
and no memory here. The bytes of large transfers stay in the kernel: they pass through a pipe, which takes
less than half of the CPU time of copying. If no pipe is free, the relay looks at the bytes (MSG_PEEK), sends
them, and then discards what was sent (MSG_TRUNC).
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.backends.userspace.relay.pipes import POOL, Pipe
from ebpfproxy.backends.userspace.relay.target import Target

_SMALL = 16 << 10
_LARGE = 256 << 10
_ROUNDS = 8
"""How often a large transfer is continued before other connections get their turn."""
_BUFFER = memoryview(bytearray(_LARGE))
_LINGER_ZERO = struct.pack("ii", 1, 0)


class Direction:
    """The bytes from one socket to the other one."""

    __slots__ = ("_connection", "_is_large", "_pipe", "_rest", "_sink", "_source", "has_ended")

    def __init__(self, connection: "Connection", source: socket.socket, sink: socket.socket) -> None:
        self._connection = connection
        self._source = source
        self._sink = sink
        self._rest = b""
        self._is_large = False
        self._pipe: Pipe | None = None  # while it holds bytes
        self.has_ended = False

    def start(self) -> None:
        """Begin to relay."""
        self._connection.loop.add_reader(self._source, self._read)

    def _read(self) -> None:
        try:
            self._is_large = self._relay_large() if self._is_large else self._relay_small()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._connection.reset()

    def _relay_small(self) -> bool:
        """Return whether the transfer is large."""
        count = self._source.recv_into(_BUFFER, _SMALL)
        self._connection.used = self._connection.loop.time()
        if not count:
            self._end()
            return False
        try:
            sent = self._sink.send(_BUFFER[:count])
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent < count:
            self._rest = bytes(_BUFFER[sent:count])
            self._connection.loop.remove_reader(self._source)
            self._connection.loop.add_writer(self._sink, self._send_rest)
        return count == _SMALL

    def _relay_large(self) -> bool:
        self._connection.used = self._connection.loop.time()
        pipe = POOL.take()
        return self._copy() if pipe is None else self._splice(pipe)

    def _splice(self, pipe: Pipe) -> bool:
        """Relay through a pipe."""
        try:
            for _ in range(_ROUNDS):
                if not pipe.fill(self._source.fileno()):
                    self._end()
                    return False
                is_large = pipe.count >= _SMALL
                try:
                    pipe.drain(self._sink.fileno())
                except (BlockingIOError, InterruptedError):
                    self._pipe = pipe
                    self._connection.loop.remove_reader(self._source)
                    self._connection.loop.add_writer(self._sink, self._drain)
                    return True
                if not is_large:
                    return False
            return True
        finally:
            if self._pipe is None:
                POOL.give_back(pipe)

    def _drain(self) -> None:
        """The sink has room for the bytes in the pipe."""
        assert self._pipe
        try:
            self._pipe.drain(self._sink.fileno())
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._connection.reset()
            return
        self.discard()
        self._resume()

    def discard(self) -> None:
        """Give up the bytes in the pipe, if there are any."""
        if self._pipe:
            POOL.give_back(self._pipe)
            self._pipe = None

    def _copy(self) -> bool:
        connection = self._connection
        for _ in range(_ROUNDS):
            count = self._source.recv_into(_BUFFER, _LARGE, socket.MSG_PEEK)
            if not count:
                self._end()
                return False
            try:
                sent = self._sink.send(_BUFFER[:count])
            except (BlockingIOError, InterruptedError):
                sent = 0
            if sent:
                self._source.recv_into(_BUFFER, sent, socket.MSG_TRUNC)
            if sent < count:
                connection.loop.remove_reader(self._source)
                connection.loop.add_writer(self._sink, self._resume)
                return True
            if count < _SMALL:
                return False
        return True

    def _resume(self) -> None:
        """The sink has room again."""
        connection = self._connection
        connection.loop.remove_writer(self._sink)
        connection.loop.add_reader(self._source, self._read)
        self._read()

    def _send_rest(self) -> None:
        try:
            sent = self._sink.send(self._rest)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._connection.reset()
            return
        self._rest = self._rest[sent:]
        if self._rest:
            self._connection.loop.add_writer(self._sink, self._send_rest)
        else:
            self._resume()

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
        self._to_server.discard()
        self._to_client.discard()
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
