"""A listening TCP socket at one address of a frontend."""

import contextlib
import socket

from ebpfproxy.backends.userspace.entries import Listening
from ebpfproxy.backends.userspace.relay import connection, listening
from ebpfproxy.backends.userspace.relay.admission import Admission, Client, interface_of
from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.backends.userspace.relay.connection import Ends
from ebpfproxy.backends.userspace.relay.counts import Event
from ebpfproxy.backends.userspace.relay.dialing import Dialing
from ebpfproxy.backends.userspace.relay.target import Target
from ebpfproxy.backends.userspace.relay.workload import Workload
from ebpfproxy.linux.sockets import socket_filter

_BACKLOG = 4096
_BURST = 64  # accepted connections before others get their turn
_PAUSE = 1.0  # seconds until connections are accepted again after an error


class TcpListener:
    """Accepts connections until `close`."""

    def __init__(self, work: Workload, address: Target, frontend: Target) -> None:
        """`address`: where to listen. `frontend`: to which clients connect."""
        self._work = work
        self._address, self._frontend = address, frontend
        self._sock: socket.socket | None = None

    def open(self, entry: Listening, service: Balancer) -> None:
        """Listen; if it listens already, use these entries from now on. Raises OSError."""
        self._entry, self._service = entry, service
        self._admission = Admission(entry, service)
        relays = self._work.start.relays
        if self._sock and self.is_open():
            listening.admit(self._sock, self._admission)
            listening.distribute(self._sock, service, relays)
            return
        self.close()
        sock = listening.bound(self._address, socket.SOCK_STREAM, self._admission)
        try:
            sock.listen(_BACKLOG)
            listening.distribute(sock, service, relays)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self._work.loop.add_reader(sock, self._accept)

    def is_open(self) -> bool:
        """Return whether the socket listens. Another program may have destroyed it (`ss --kill`)."""
        return bool(self._sock and self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    def close(self) -> None:
        """Stop listening. Open connections continue."""
        if self._sock:
            self._work.loop.remove_reader(self._sock)
            self._sock.close()
            self._sock = None

    def _accept(self) -> None:
        sock, work = self._sock, self._work
        for _ in range(_BURST):
            if sock is None:
                return
            try:
                client, peer = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._pause()
                return
            work.counts[Event.ACCEPTED] += 1
            client.setblocking(False)
            self._relay(client, peer)

    def _relay(self, client: socket.socket, peer: tuple[str, int]) -> None:
        admission = self._admission
        socket_filter.detach(client)  # it inherits the filter, which is for new connections
        local: bool | None = self._entry.outside_local
        if admission.needs_interface:
            local = admission.scope(Client(peer[0], interface_of(client)))
        if local is None or not self._service.has_any(local):
            self._work.counts[Event.REJECTED] += 1
            connection.reset(client)
            return
        source = Target(self._address.number, peer[0], peer[1])
        ends = Ends(source, self._frontend)
        Dialing(self._work, client, ends, self._entry.service.service, self._service).start(local)

    def _pause(self) -> None:
        """No file descriptors are left, for example: connections wait in the kernel. Or the socket was
        destroyed: then it stays unused until the agent puts the listener again.
        """
        self._work.counts[Event.NOT_ACCEPTED] += 1
        sock = self._sock
        assert sock
        self._work.loop.remove_reader(sock)
        if self.is_open():
            self._work.loop.call_later(_PAUSE, self._resume, sock)

    def _resume(self, sock: socket.socket) -> None:
        if sock is self._sock:
            with contextlib.suppress(OSError):
                self._work.loop.add_reader(sock, self._accept)
