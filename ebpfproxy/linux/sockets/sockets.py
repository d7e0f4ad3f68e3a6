"""Lists and destroys sockets of the calling thread's network namespace: sock_diag(7).

A connected UDP socket continues to send to its endpoint after the endpoint is gone, and no hook sees its
packets. SOCK_DESTROY disconnects it: the process gets an error and must connect again. The callers select
the sockets to destroy.

To act in another namespace, use `namespaces.in_namespace`. Sources: include/uapi/linux/inet_diag.h,
sock_diag.h; net/ipv4/inet_diag.c, udp_diag.c; c1e64e298b8c ("net: diag: Support destroying TCP sockets."),
5d77dca82839 ("net: diag: support SOCK_DESTROY for UDP sockets").
"""

import enum
import errno
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.errors import KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.model.address import V4_PREFIX, Address, Family, Protocol, family, format_endpoint

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
SOCK_DESTROY = 21

Destinations = Collection[tuple[Address, int]]
"""Addresses and ports (host order) of peers."""

KERNEL_FILTER_LIMIT = 100
"""With up to this many destinations the kernel filters, with more of them Python does.

Measured with 20 000 connected sockets of which none match: 3 ms for 1 destination, 11 ms for 32, 27 ms for
128, 80 ms for 256. Python takes 36 ms.
"""


class State(enum.IntEnum):
    """The states of include/net/tcp_states.h. A UDP socket is ESTABLISHED if it is connected, else CLOSE."""

    ESTABLISHED = 1
    SYN_SENT = 2
    SYN_RECV = 3
    FIN_WAIT1 = 4
    FIN_WAIT2 = 5
    TIME_WAIT = 6
    CLOSE = 7
    CLOSE_WAIT = 8
    LAST_ACK = 9
    LISTEN = 10
    CLOSING = 11
    NEW_SYN_RECV = 12


OPEN = State.ESTABLISHED, State.SYN_SENT, State.CLOSE_WAIT
"""The states of a TCP socket whose process still uses or opens a connection."""


class DiagSocket(NamedTuple):
    """One socket, from struct inet_diag_msg. It has all fields that SOCK_DESTROY needs.

    `family` is AF_INET or AF_INET6. An AF_INET6 socket may have v4-mapped addresses. Ports are in host order.
    `cookie` is the value of SO_COOKIE and bpf_get_socket_cookie(). `interface` is the ifindex of the device
    that it is bound to, 0 for none. `inode` is its number in /proc/PID/fd. `v6_only`: IPV6_V6ONLY, which the
    kernel reports in the states LISTEN and CLOSE.
    """

    family: int
    protocol: Protocol
    source: Address
    source_port: int
    destination: Address
    destination_port: int
    cookie: int
    interface: int
    state: State = State.ESTABLISHED
    inode: int = 0
    v6_only: bool = False


def connected_udp(destinations: Destinations | None = None) -> Iterator[DiagSocket]:
    """Connected UDP sockets of both families whose peer is one of `destinations`. None: all of them."""
    return read(Protocol.UDP, [State.ESTABLISHED], destinations)


def tcp(states: Iterable[State]) -> Iterator[DiagSocket]:
    """TCP sockets of both families that are in one of `states`."""
    return read(Protocol.TCP, states)


def read(
    protocol: Protocol, states: Iterable[State], destinations: Destinations | None = None
) -> Iterator[DiagSocket]:
    """Sockets of a protocol, both families, in one of `states`, whose peer is one of `destinations`.

    The dump is complete when this function returns, so the thread may change its namespace before it
    iterates. A dump is not a snapshot. A socket that is created or changed during it may be missing or appear
    twice. To find all of them, repeat until the result is empty.

    Raises Unsupported if the kernel cannot list sockets of the protocol, else Rejected.
    """
    mask = sum(1 << state for state in set(states))
    found: list[DiagSocket] = []
    for number in (socket.AF_INET, socket.AF_INET6):
        found.extend(_socket(payload, protocol) for payload in _dump(number, protocol, mask, destinations))
    return iter(found)


def destroy(sock: DiagSocket) -> None:
    """Destroy one socket: its process gets ECONNABORTED from reads, and poll(2) returns.

    A UDP socket becomes unconnected: sends fail with EDESTADDRREQ until the process connects it again. The
    kernel compares the cookie, so another socket that has the same addresses by now is not affected.

    Raises NotFound if the socket is gone, or if it shares both addresses with another socket, which the
    kernel finds first. Raises Unsupported without CONFIG_INET_DIAG_DESTROY or CAP_NET_ADMIN.
    """
    try:
        netlink.change(NETLINK_SOCK_DIAG, SOCK_DESTROY, _request_for(sock))
    except OSError as error:
        raise _destroy_error(sock, error) from error


# struct inet_diag_req_v2: family, protocol, ext, pad, states; then struct inet_diag_sockid: ports and
# addresses in network order, interface and the cookie's low and high word in host order.
_REQUEST = struct.Struct("=BBBBI")
_SOCKID = struct.Struct("=2s2s16s16sIII")
_ANY_SOCKET = bytes(_SOCKID.size)
_MESSAGE_HEAD = struct.Struct("=BBBB")  # struct inet_diag_msg: family, state, timer, retrans; then the id

_INODE = struct.Struct("=I")  # at the end of struct inet_diag_msg, after expires, queues and uid
_INODE_AT = _MESSAGE_HEAD.size + _SOCKID.size + 16
_ATTRIBUTES_AT = _INODE_AT + _INODE.size
_V6_ONLY = 11  # INET_DIAG_SKV6ONLY

# The position of the peer's port and address in struct inet_diag_msg.
_PEER_PORT = slice(6, 8)
_PEER_V4 = slice(24, 28)
_PEER_V6 = slice(24, 40)

_REQ_BYTECODE = 1  # INET_DIAG_REQ_BYTECODE
_BC_JMP = 1
_BC_D_COND = 8
_OPERATION = struct.Struct("=BBH")  # struct inet_diag_bc_op: code, yes, no
_CONDITION = struct.Struct("=BBxxi")  # struct inet_diag_hostcond: family, prefix_len, port; then the address


def _dump(number: int, protocol: Protocol, mask: int, destinations: Destinations | None) -> list[bytes]:
    """Payloads of one family's dump, filtered by peer.

    A short list of destinations becomes a filter program for the kernel. The kernel walks the program for
    each socket, so this module filters a long list itself, with a set.
    """
    body = _REQUEST.pack(number, protocol, 0, 0, mask) + _ANY_SOCKET
    if destinations is None:
        return _payloads(protocol, body)
    v4 = [(address, port) for address, port in destinations if family(address) is Family.IPV4]
    sought = v4 if number == socket.AF_INET else list(destinations)
    if not sought:
        return []
    if len(sought) <= KERNEL_FILTER_LIMIT:
        return _payloads(protocol, body + netlink.attribute(_REQ_BYTECODE, bytecode(sought)))
    return _with_peer(_payloads(protocol, body), number, sought)


def _payloads(protocol: Protocol, body: bytes) -> list[bytes]:
    try:
        return netlink.dump(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, body)
    except OSError as error:
        raise _read_error(protocol, error) from error


def _with_peer(payloads: list[bytes], number: int, sought: list[tuple[Address, int]]) -> list[bytes]:
    if number == socket.AF_INET:
        keys = {address[12:] + port.to_bytes(2) for address, port in sought}
        return [each for each in payloads if each[_PEER_V4] + each[_PEER_PORT] in keys]
    keys = {address + port.to_bytes(2) for address, port in sought}
    return [each for each in payloads if each[_PEER_V6] + each[_PEER_PORT] in keys]


def bytecode(destinations: Destinations) -> bytes:
    """A filter program with which the kernel accepts sockets whose peer is one of `destinations`.

    Each destination is a condition. "yes" continues with a jump to the end, which accepts the socket. "no"
    skips this jump and continues with the next condition. The last condition has no jump after it: its "yes"
    is the end, its "no" is four bytes past the end, which rejects the socket. A condition of AF_INET also
    matches v4-mapped peers of IPv6 sockets. See inet_diag_bc_run(), inet_diag_bc_audit(). A jump has 16 bits,
    so at most 2 047 destinations are possible.
    """
    program = b""
    for address, port in reversed(list(destinations)):
        condition = _condition(address, port)
        length = _OPERATION.size + len(condition)
        jump = _OPERATION.pack(_BC_JMP, _OPERATION.size, _OPERATION.size + len(program)) if program else b""
        program = _OPERATION.pack(_BC_D_COND, length, length + _OPERATION.size) + condition + jump + program
    return program


def _condition(address: Address, port: int) -> bytes:
    if family(address) is Family.IPV4:
        return _CONDITION.pack(socket.AF_INET, 32, port) + address[12:]
    return _CONDITION.pack(socket.AF_INET6, 128, port) + address


def _socket(payload: bytes, protocol: Protocol) -> DiagSocket:
    number, state, _, _ = _MESSAGE_HEAD.unpack_from(payload)
    fields = _SOCKID.unpack_from(payload, _MESSAGE_HEAD.size)
    source_port, destination_port, source, destination, interface, low, high = fields
    if number == socket.AF_INET:
        source, destination = V4_PREFIX + source[:4], V4_PREFIX + destination[:4]
    return DiagSocket(
        family=number,
        protocol=protocol,
        source=Address(source),
        source_port=int.from_bytes(source_port),
        destination=Address(destination),
        destination_port=int.from_bytes(destination_port),
        cookie=low | high << 32,
        interface=interface,
        state=State(state),
        inode=_INODE.unpack_from(payload, _INODE_AT)[0],
        v6_only=number == socket.AF_INET6 and _is_v6_only(payload, state),
    )


def _is_v6_only(payload: bytes, state: int) -> bool:
    if state not in (State.LISTEN, State.CLOSE):
        return False
    return any(kind == _V6_ONLY and any(value) for kind, value in netlink.attributes(payload, _ATTRIBUTES_AT))


def _request_for(sock: DiagSocket) -> bytes:
    source, destination = sock.source, sock.destination
    if sock.family == socket.AF_INET:
        source, destination = Address(source[12:] + bytes(12)), Address(destination[12:] + bytes(12))
    return _REQUEST.pack(sock.family, sock.protocol, 0, 0, 1 << sock.state) + _SOCKID.pack(
        sock.source_port.to_bytes(2),
        sock.destination_port.to_bytes(2),
        source,
        destination,
        sock.interface,
        sock.cookie & 0xFFFFFFFF,
        sock.cookie >> 32,
    )


def _read_error(protocol: Protocol, error: OSError) -> KernelError:
    """The kernel returns ENOENT for a protocol without a handler (inet_diag_lock_handler())."""
    message = f"cannot list {protocol.name} sockets: {error.strerror or error}"
    if error.errno in (errno.ENOENT, errno.EPROTONOSUPPORT):
        module = f"{protocol.name.lower()}_diag"
        return Unsupported(message, f"use a kernel with CONFIG_INET_DIAG, or load the module {module}")
    return Rejected(message)


def _destroy_error(sock: DiagSocket, error: OSError) -> KernelError:
    peer = format_endpoint(sock.destination, sock.destination_port)
    message = f"cannot destroy the {sock.protocol.name} socket to {peer}: {error.strerror or error}"
    if error.errno == errno.ENOENT:
        return NotFound(message)
    if error.errno in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT):
        return Unsupported(message, "use a kernel with CONFIG_INET_DIAG_DESTROY")
    if error.errno in (errno.EPERM, errno.EACCES):
        return Unsupported(message, "run with the capability CAP_NET_ADMIN")
    return Rejected(message)
