"""A listening TCP socket at one address of a frontend."""

import contextlib
import socket

from ebpfproxy.backends.userspace.messages import Event
from ebpfproxy.backends.userspace.relay.admission import interface_of
from ebpfproxy.backends.userspace.relay.connection import Connection, Connections, reset
from ebpfproxy.backends.userspace.relay.listening import Listener
from ebpfproxy.backends.userspace.relay.target import Target
from ebpfproxy.linux.sockets import socket_filter

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
