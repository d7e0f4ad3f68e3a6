"""Opens and configures the sockets at which relays receive connections and datagrams.

All relays bind each address (SO_REUSEPORT). The address may be missing at that moment (IP_FREEBIND): it may
be removed and added again without a change of the sockets.
"""

import errno
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable

from ebpfproxy.backends.userspace.entries import Listening
from ebpfproxy.backends.userspace.relay.admission import Admission, Client
from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.backends.userspace.relay.target import Target
from ebpfproxy.backends.userspace.relay.workload import Workload
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.sockets import socket_filter
from ebpfproxy.linux.sockets.socket_filter import PASS
from ebpfproxy.model.address import Family

_IP_FREEBIND, _IPV6_FREEBIND = 15, 78


class Listener(ABC):
    """A socket at one address of a frontend, from `open` until `close`. `kind`: SOCK_STREAM or SOCK_DGRAM."""

    kind: int

    def __init__(self, work: Workload, address: Target, frontend: Target) -> None:
        """`address`: where to listen. `frontend`: to which clients connect."""
        self._work = work
        self._address, self._frontend = address, frontend
        self._sock: socket.socket | None = None

    def open(self, entry: Listening, service: Balancer) -> None:
        """Listen; if it listens already, use these entries from now on. Raises OSError or KernelError."""
        self._entry, self._service = entry, service
        self._admission = Admission(entry, service)
        relays = self._work.start.settings.relays
        if self._sock and self.is_open():
            admit(self._sock, self._admission)
            distribute(self._sock, service, relays)
            return
        self.close()
        sock = bound(self._address, self.kind, self._admission)
        try:
            self._prepare(sock)
            distribute(sock, service, relays)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self._work.loop.add_reader(sock, self._receive)

    def _scope(self, address: str, interface: Callable[[], int]) -> bool | None:
        """As `Admission.scope`, for a client that arrived on this interface."""
        if not self._admission.needs_interface:
            return self._entry.outside_local
        return self._admission.scope(Client(address, interface()))

    @abstractmethod
    def is_open(self) -> bool:
        """Return whether the socket receives. Another program may have destroyed it (`ss --kill`)."""

    @abstractmethod
    def _prepare(self, sock: socket.socket) -> None:
        """Prepare a bound socket. Raises OSError."""

    @abstractmethod
    def _receive(self) -> None:
        """Something has arrived."""

    def close(self) -> None:
        """Stop listening."""
        if self._sock:
            self._work.loop.remove_reader(self._sock)
            self._sock.close()
            self._sock = None


def bound(address: Target, kind: int, admission: Admission) -> socket.socket:
    """Return a non-blocking socket of this kind (SOCK_STREAM, SOCK_DGRAM) that is bound.

    Raises OSError or KernelError.
    """
    sock = socket.socket(address.number, kind | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.number == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        admit(sock, admission)
        sock.bind(address[1:])
    except BaseException:
        sock.close()
        raise
    return sock


def admit(sock: socket.socket, admission: Admission) -> None:
    """Set the filter for new connections. Call it before the socket is bound, too.

    A filter that takes more memory than a socket may have (net.core.optmem_max, 20 KiB before Linux 6.8) is
    replaced by checks of accepted clients, if possible. Raises Rejected.
    """
    if admission.program != PASS:
        try:
            socket_filter.attach(sock, admission.program)
            return
        except Rejected as failure:
            if getattr(failure.__cause__, "errno", None) != errno.ENOMEM or not admission.check_ranges():
                raise
    socket_filter.detach(sock)


def distribute(sock: socket.socket, service: Balancer, relays: int) -> None:
    """With session affinity, make the kernel select the relay by the client's address.

    Call it for a socket that listens or is bound: with such a program it could not join the other sockets
    (sk_reuseport_match() in net/ipv4/inet_connection_sock.c).
    """
    if service.entry.affinity_timeout and relays > 1:
        family = Family.IPV4 if sock.family == socket.AF_INET else Family.IPV6
        socket_filter.attach_choice(sock, socket_filter.by_source(family, relays))
