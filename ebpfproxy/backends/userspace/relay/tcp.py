"""Listening TCP sockets, and connections of clients. Each connects to an endpoint, and then relays bytes
between both sides.

A relay holds at most `_BUFFER` of each direction, and only while the sink does not take it. So a slow reader
stops the sender. Decision 0068: why bytes are copied.
"""

import contextlib
import errno
import socket
import struct
from asyncio import TimerHandle
from itertools import islice

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.messages import Event
from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.backends.userspace.relay.listening import Listener, interface_of
from ebpfproxy.backends.userspace.relay.workload import Relayed, Target, Workload
from ebpfproxy.linux.sockets import socket_filter

TIMEOUTS = (0.25, 0.5, 1.0, 2.0)
"""How long each attempt may take, in seconds (endpointDialTimeouts in pkg/proxy/userspace/proxysocket.go of
Kubernetes 1.25). Each attempt is for another endpoint, if there are several."""

_SWEEP = 30.0  # seconds between two searches for idle connections
_BUFFER = memoryview(bytearray(64 << 10))
_LINGER_ZERO = struct.pack("ii", 1, 0)


class _Direction:
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
        self._connection.work.loop.add_reader(self._source, self._read)

    def _read(self) -> None:
        connection = self._connection
        connection.used = connection.work.loop.time()
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
        loop, waited = self._connection.work.loop, bool(self._rest)
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
        self.has_ended = True
        self._connection.work.loop.remove_reader(self._source)
        with contextlib.suppress(OSError):  # the sink was reset, which its own direction notices
            self._sink.shutdown(socket.SHUT_WR)
        self._connection.direction_ended()


class Connection(Relayed):
    """One connection, from accept() of the client's socket until both sides are closed."""

    __slots__ = ("_all", "_attempts", "_balancer", "_directions", "_local", "_sockets", "_timer", "work")
    protocol = "TCP"

    def __init__(
        self, connections: "Connections", sock: socket.socket, client: Target, frontend: Target
    ) -> None:
        self.work = connections.work
        self.client, self.frontend = client, frontend
        self.used = self.work.loop.time()
        self._all = connections
        self._sockets = [sock]  # of the client, and of the endpoint that has accepted the connection
        self._directions: tuple[_Direction, ...] = ()
        self._attempts = 0
        connections.add(self)

    @property
    def is_open(self) -> bool:
        """Whether an endpoint has accepted the connection."""
        return bool(self._directions)

    @property
    def is_half_closed(self) -> bool:
        """Whether one side has sent everything."""
        return any(each.has_ended for each in self._directions)

    def dial(self, service: str, balancer: Balancer, local: bool) -> None:
        """Connect to an endpoint of scope Local or Cluster. If none accepts, the client gets a reset."""
        self.service, self._balancer, self._local = service, balancer, local
        self._try_next(None)

    def _try_next(self, failed: Target | None) -> None:
        """Try endpoints until an attempt is in progress or done. `failed`: the endpoint of the last one."""
        while self._attempts < len(TIMEOUTS):
            timeout = TIMEOUTS[self._attempts]
            self._attempts += 1
            now = self.work.loop.time()
            chosen = self._balancer.choose(self.client.address, self._local, now, failed)
            if chosen is None:
                continue
            self.work.counts[Event.RETRIED] += failed is not None
            self.target = failed = chosen
            if self._try(timeout):
                return
        self._fail()

    def _try(self, timeout: float) -> bool:
        """Return whether the attempt to connect to `target` is in progress or done."""
        try:
            server = socket.socket(self.target.number, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:  # no file descriptors are left
            return False
        number = server.connect_ex(self.target[1:])
        if number not in (0, errno.EINPROGRESS):
            server.close()
            return False
        self._balancer.began(self.target)
        if number:
            self._timer: TimerHandle = self.work.loop.call_later(timeout, self._finished, server, True)
            self.work.loop.add_writer(server, self._finished, server, False)
        else:
            self._start(server)
        return True

    def _finished(self, server: socket.socket, too_late: bool) -> None:
        """The attempt is done, has failed or takes too long."""
        self._timer.cancel()
        self.work.loop.remove_writer(server)
        if too_late or server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            server.close()
            self._balancer.ended(self.target)
            self._try_next(self.target)
        else:
            self._start(server)

    def _start(self, server: socket.socket) -> None:
        """Begin to relay."""
        (client,) = self._sockets
        self._sockets.append(server)
        try:
            for each in self._sockets:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:  # the client has reset the connection meanwhile
            self._fail()
            return
        self.work.counts[Event.CONNECTED] += 1
        self.used = self.work.loop.time()
        self._directions = _Direction(self, server, client), _Direction(self, client, server)
        for direction in self._directions:
            direction.start()

    def _fail(self) -> None:
        self.work.counts[Event.FAILED] += 1
        self.reset()

    def direction_ended(self) -> None:
        """One direction has ended."""
        if all(each.has_ended for each in self._directions):
            self._close()

    def reset(self) -> None:
        """Reset both sides: one of them was reset, or the connection must end."""
        if self in self._all:
            self.work.counts[Event.RESET] += self.is_open
            for each in self._sockets:
                _reset_on_close(each)
            self._close()

    def _close(self) -> None:
        self._all.remove(self)
        for each in self._sockets:
            self.work.loop.remove_reader(each)
            self.work.loop.remove_writer(each)
            each.close()
        if len(self._sockets) > 1:
            self._balancer.ended(self.target)


class Connections(set[Connection]):
    """All connections, also those that no endpoint has accepted yet."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.work = work
        work.loop.call_later(_SWEEP, self._sweep)

    def count(self) -> int:
        """Return how many are open."""
        return sum(each.is_open for each in self)

    def listed(self, most: int) -> list[messages.Connection]:
        """Return up to `most` open connections."""
        now = self.work.loop.time()
        return [each.shown(now) for each in islice((each for each in self if each.is_open), most)]

    def found(self, client: str, frontend: str) -> messages.Connections:
        """Return the connection with these ends, as texts with ports. Empty without one."""
        now = self.work.loop.time()
        found = [each for each in self if each.is_between(client, frontend)]
        return messages.Connections(
            [each.shown(now) for each in found if each.is_open], not all(each.is_open for each in found)
        )

    def _sweep(self) -> None:
        """End connections on which nothing arrived for too long."""
        now, settings = self.work.loop.time(), self.work.start.settings
        for each in list(self):
            timeout = settings.tcp_closing_timeout if each.is_half_closed else settings.tcp_timeout
            if each.is_open and now - each.used > timeout:
                each.reset()
                self.work.counts[Event.IDLE] += 1
        self.work.loop.call_later(_SWEEP, self._sweep)


def reset(sock: socket.socket) -> None:
    """Close a connected socket so that its peer gets a reset."""
    _reset_on_close(sock)
    sock.close()


def _reset_on_close(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)


_BACKLOG = 4096
_BURST = 64  # accepted connections before others get their turn
_PAUSE = 1.0  # seconds until connections are accepted again after an error


class TcpListener(Listener):
    """Accepts connections. They continue after `close`."""

    kind = socket.SOCK_STREAM

    def __init__(self, connections: Connections, address: Target, frontend: Target) -> None:
        super().__init__(connections.work, address, frontend)
        self._connections = connections

    def is_open(self) -> bool:
        return bool(self._sock and self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    def _prepare(self, sock: socket.socket) -> None:
        sock.listen(_BACKLOG)

    def _receive(self) -> None:
        sock, work = self._sock, self._work
        for _ in range(_BURST):
            if sock is None:
                return
            try:
                client, peer = sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                self._pause(sock)
                return
            work.counts[Event.ACCEPTED] += 1
            client.setblocking(False)
            self._relay(client, peer)

    def _relay(self, client: socket.socket, peer: tuple[str, int]) -> None:
        socket_filter.detach(client)  # it inherits the filter, which is for new connections
        local = self._scope(peer[0], lambda: interface_of(client))
        if local is None or not self._service.has_any(local):
            self._work.counts[Event.REJECTED] += 1
            reset(client)
            return
        source = Target(self._address.number, peer[0], peer[1])
        connection = Connection(self._connections, client, source, self._frontend)
        connection.dial(self._entry.service.service, self._service, local)

    def _pause(self, sock: socket.socket) -> None:
        """No file descriptors are left, for example: connections wait in the kernel. Or the socket was
        destroyed: then it stays unused until the agent puts the listener again.
        """
        self._work.counts[Event.NOT_ACCEPTED] += 1
        self._work.loop.remove_reader(sock)
        if self.is_open():
            self._work.loop.call_later(_PAUSE, self._resume, sock)

    def _resume(self, sock: socket.socket) -> None:
        if sock is self._sock:
            with contextlib.suppress(OSError):
                self._work.loop.add_reader(sock, self._receive)
