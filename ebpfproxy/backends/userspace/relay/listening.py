"""The sockets at which relays receive connections and datagrams, and which clients a frontend admits.

Clients that get no endpoint, and those outside the source ranges, must get no answer. A filter of the
listening socket drops their packets before the kernel answers. What a filter cannot express is decided when
the connection was accepted; it is then reset.

All relays bind each address (SO_REUSEPORT). The address may be missing at that moment (IP_FREEBIND): it may
be removed and added again without a change of the sockets.
"""

import errno
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.backends.userspace.entries import Listening, Pods
from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.backends.userspace.relay.workload import Target, Workload
from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import rtnetlink
from ebpfproxy.linux.sockets import socket_filter
from ebpfproxy.linux.sockets.socket_filter import DROP, PASS, Program
from ebpfproxy.model.address import Family, contains, parse_address

_IP_PKTINFO, _IP_PKTOPTIONS = 8, 9
_IPV6_RECVPKTINFO, _IPV6_2292PKTOPTIONS = 49, 6
_HEADER = socket.CMSG_LEN(0)
_INDEX = struct.Struct("=i")
_OPTIONS_SIZE = 256
LOOPBACK = "lo"


class Client(NamedTuple):
    """Where a connection or datagram comes from. `interface`: the ifindex on which it arrived."""

    address: str
    interface: int


class Admission:
    """The admission of one frontend, as of the entries at the time of construction."""

    def __init__(self, entry: Listening, balancer: Balancer) -> None:
        self._entry = entry
        self._loopback = socket.if_nametoindex(LOOPBACK)
        self._pod, self._node, self._outside = (
            balancer.has_any(local) for local in (entry.pod_local, entry.node_local, entry.outside_local)
        )
        self.program = self._program()
        self._checks_ranges = False
        self.needs_interface = not (entry.pod_local == entry.node_local == entry.outside_local)
        """Whether `scope` needs the interface on which a client arrived."""
        if len(self.program) > socket_filter.LONGEST:
            self.check_ranges()

    def check_ranges(self) -> bool:
        """From now on `scope` checks the source ranges, since the kernel does not take so long a filter.

        Return False if the filter is not longer because of them.
        """
        if self._checks_ranges or self._entry.ranges is None:
            return False
        self._checks_ranges = self.needs_interface = True
        self.program = PASS
        return True

    def _program(self) -> Program:
        """The filter: classifies the client, then looks for it in the ranges."""
        entry = self._entry
        ranges: Program = PASS
        if entry.ranges is not None:
            ranges = [*socket_filter.from_networks(entry.ranges, PASS), *DROP]
        node = PASS if self._node and (entry.ranges is None or entry.node_admitted) else DROP
        program = socket_filter.on_interface(self._loopback, node)
        network = entry.pods.network if entry.pods else None
        if entry.pods and not network and self._pod and not self._outside:
            # Pods that start later have other devices, so the filter contains those of other clients.
            for index in other_interfaces(entry.pods):
                program += socket_filter.on_interface(index, DROP)
            return [*program, *ranges]
        if network and self._pod and not self._outside:
            return [*program, *socket_filter.unless_from_network(network, DROP), *ranges]
        if network and self._outside and not self._pod:
            return [*program, *socket_filter.from_network(network, DROP), *ranges]
        return [*program, *(ranges if self._outside else DROP)]

    def scope(self, client: Client) -> bool | None:
        """Return whether the client may use endpoints of scope Local only; None if it is not admitted, or if
        no file descriptor is left to find out.
        """
        entry = self._entry
        try:
            is_node = client.interface == self._loopback or _is_local(client)
        except OSError:
            return None
        if self._checks_ranges and not self._is_in_ranges(client, is_node):
            return None
        if is_node:
            return entry.node_local
        if entry.pods and _is_pod(entry.pods, client):
            return entry.pod_local
        return entry.outside_local

    def _is_in_ranges(self, client: Client, is_node: bool) -> bool:
        if is_node:
            return self._entry.node_admitted
        address = parse_address(client.address.partition("%")[0])
        return any(contains(each, address) for each in self._entry.ranges or ())


def _is_local(client: Client) -> bool:
    """Return whether this node has the client's address. The kernel reports another interface than loopback
    for a connection of the node to one of its own addresses (ip_route_output_key_hash_rcu()).

    Its route shows that. bind() would not: with the sysctl ip_nonlocal_bind it accepts every address. Raises
    OSError.
    """
    host, _, zone = client.address.partition("%")
    return rtnetlink.is_local(parse_address(host), client.interface if zone else 0)


def other_interfaces(pods: Pods) -> list[int]:
    """Return the ifindexes of the devices that do not lead to pods, in the kernel's order."""
    return [index for index, name in socket.if_nameindex() if not _leads_to_pods(pods, name)]


def _leads_to_pods(pods: Pods, name: str) -> bool:
    return name.startswith(pods.interface) if pods.prefix else name == pods.interface


def _is_pod(pods: Pods, client: Client) -> bool:
    if pods.network:
        return contains(pods.network, parse_address(client.address.partition("%")[0]))
    try:
        name = socket.if_indextoname(client.interface)
    except OSError:
        return False
    return _leads_to_pods(pods, name)


def interface_of(sock: socket.socket) -> int:
    """Return the ifindex on which the first packet of an accepted connection arrived, 0 if it is unknown.

    Source: do_ip_getsockopt() in net/ipv4/ip_sockglue.c, do_ipv6_getsockopt() in net/ipv6/ipv6_sockglue.c.
    """
    try:
        request_interface(sock)
        if sock.family == socket.AF_INET:
            options = sock.getsockopt(socket.IPPROTO_IP, _IP_PKTOPTIONS, _OPTIONS_SIZE)
            return int(_INDEX.unpack_from(options, _HEADER)[0])
        options = sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_2292PKTOPTIONS, _OPTIONS_SIZE)
        return int(_INDEX.unpack_from(options, _HEADER + 16)[0])
    except (OSError, struct.error):
        return 0


def interface_in(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Return the ifindex in the ancillary data of a datagram, 0 if it has none."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
            return int(_INDEX.unpack_from(data)[0])
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
            return int(_INDEX.unpack_from(data, 16)[0])
    return 0


def request_interface(sock: socket.socket) -> None:
    """Make the kernel report the interface with each datagram of a socket."""
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO, 1)


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
