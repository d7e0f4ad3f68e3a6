"""Which clients a frontend admits, and which endpoints they may use.

Clients that get no endpoint, and those outside the source ranges, must get no answer. A filter of the
listening socket drops their packets before the kernel answers. What a filter cannot express is decided when
the connection was accepted; it is then reset.
"""

import socket
import struct
from typing import NamedTuple

from ebpfproxy.backends.userspace.entries import Listening, Pods
from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.linux.netlink import rtnetlink
from ebpfproxy.linux.sockets import socket_filter
from ebpfproxy.linux.sockets.socket_filter import DROP, PASS, Program
from ebpfproxy.model.address import contains, parse_address

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
    number = socket.AF_INET6 if ":" in host else socket.AF_INET
    return rtnetlink.is_local(number, socket.inet_pton(number, host), client.interface if zone else 0)


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
