"""The sockets of a network namespace, and destroying one of them: sock_diag(7).

A connected UDP socket keeps sending to its endpoint after that endpoint is gone, and no hook sees its
packets. SOCK_DESTROY disconnects it: the process gets an error, and has to connect again. Which sockets
are destroyed is decided elsewhere.

Everything here acts in the network namespace that the calling thread is in (`namespaces.in_namespace`).
Sources: include/uapi/linux/inet_diag.h, sock_diag.h; net/ipv4/inet_diag.c, udp_diag.c; c1e64e298b8c
("net: diag: Support destroying TCP sockets."), 5d77dca82839 ("net: diag: support SOCK_DESTROY for UDP
sockets").
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
"""Up to how many destinations the kernel filters. Measured with 20 000 connected sockets, none of which
match: 3 ms for 1 destination, 11 ms for 32, 27 ms for 128, 80 ms for 256; 36 ms where Python filters."""


class State(enum.IntEnum):
    """enum of include/net/tcp_states.h; a UDP socket is ESTABLISHED where it is connected, else CLOSE."""

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


class DiagSocket(NamedTuple):
    """One socket as struct inet_diag_msg shows it; enough to name it to SOCK_DESTROY.

    `family` is AF_INET or AF_INET6: the socket's, so AF_INET6 also where its addresses are v4-mapped.
    Ports are in host order. `cookie` is what SO_COOKIE and bpf_get_socket_cookie() give. `interface` is
    the index of the device it is bound to, 0 for none. `inode` is its number in /proc/PID/fd.
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


def connected_udp(destinations: Destinations | None = None) -> Iterator[DiagSocket]:
    """Connected UDP sockets of both families: those whose peer is one of `destinations`, or all for None."""
    return read(Protocol.UDP, [State.ESTABLISHED], destinations)


def tcp(states: Iterable[State]) -> Iterator[DiagSocket]:
    """TCP sockets of both families that are in one of `states`."""
    return read(Protocol.TCP, states)


def read(
    protocol: Protocol, states: Iterable[State], destinations: Destinations | None = None
) -> Iterator[DiagSocket]:
    """Sockets of a protocol, both families, in one of `states`, with one of `destinations` as peer.

    The kernel has been asked, in the thread's namespace of the moment, when this returns. A dump is no
    snapshot: a socket made or moved meanwhile may be missing or come twice, so who has to be sure reads
    again until nothing is left.

    Raises Unsupported where the kernel lists no sockets of that protocol, else Rejected.
    """
    mask = sum(1 << state for state in set(states))
    found: list[DiagSocket] = []
    for number in (socket.AF_INET, socket.AF_INET6):
        found.extend(_socket(payload, protocol) for payload in _dump(number, protocol, mask, destinations))
    return iter(found)


def destroy(sock: DiagSocket) -> None:
    """Break one socket: reading gives its process ECONNABORTED, and a poll wakes up.

    A UDP socket is unconnected from then on (sending gives EDESTADDRREQ) and can be connected again.

    The cookie is compared, so a socket that has taken the same addresses since is left alone.

    Raises NotFound where it is gone (or where it shares both addresses with another socket, which the
    kernel finds in its place), Unsupported without CONFIG_INET_DIAG_DESTROY or CAP_NET_ADMIN.
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

# Where the peer's port and address are in struct inet_diag_msg.
_PEER_PORT = slice(6, 8)
_PEER_V4 = slice(24, 28)
_PEER_V6 = slice(24, 40)

_REQ_BYTECODE = 1  # INET_DIAG_REQ_BYTECODE
_BC_JMP = 1
_BC_D_COND = 8
_OPERATION = struct.Struct("=BBH")  # struct inet_diag_bc_op: code, yes, no
_CONDITION = struct.Struct("=BBxxi")  # struct inet_diag_hostcond: family, prefix_len, port; then the address


def _dump(number: int, protocol: Protocol, mask: int, destinations: Destinations | None) -> list[bytes]:
    """Payloads of one family's dump, those of other peers left out.

    A short list of destinations is a program for the kernel, which then sends only what matches. It
    runs down that list for each socket, so a long one is looked up here instead.
    """
    body = _REQUEST.pack(number, protocol, 0, 0, mask) + _ANY_SOCKET
    if destinations is None:
        return _asked(protocol, body)
    four = [(address, port) for address, port in destinations if family(address) is Family.IPV4]
    sought = four if number == socket.AF_INET else list(destinations)
    if not sought:
        return []
    if len(sought) <= KERNEL_FILTER_LIMIT:
        return _asked(protocol, body + netlink.attribute(_REQ_BYTECODE, bytecode(sought)))
    return _with_peer(_asked(protocol, body), number, sought)


def _asked(protocol: Protocol, body: bytes) -> list[bytes]:
    try:
        return netlink.dump(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, body)
    except OSError as error:
        raise _read_error(protocol, error) from error


def _with_peer(payloads: list[bytes], number: int, sought: list[tuple[Address, int]]) -> list[bytes]:
    if number == socket.AF_INET:
        keys = {address[12:] + port.to_bytes(2) for address, port in sought}
        return [one for one in payloads if one[_PEER_V4] + one[_PEER_PORT] in keys]
    keys = {address + port.to_bytes(2) for address, port in sought}
    return [one for one in payloads if one[_PEER_V6] + one[_PEER_PORT] in keys]


def bytecode(destinations: Destinations) -> bytes:
    """The program by which the kernel accepts sockets whose peer is one of `destinations`.

    Each destination is a condition; "yes" continues to a jump to the end (accepted), "no" around that to
    the next condition. The last one has no jump after it: its "yes" is the end, its "no" is four bytes
    past the end, which is how a program rejects. A condition of AF_INET matches v4-mapped peers of IPv6
    sockets too. See inet_diag_bc_run(), inet_diag_bc_audit(). Jumps have 16 bits: at most 2 047.
    """
    program = b""
    for address, port in reversed(list(destinations)):
        one = _condition(address, port)
        length = _OPERATION.size + len(one)
        jump = _OPERATION.pack(_BC_JMP, _OPERATION.size, _OPERATION.size + len(program)) if program else b""
        program = _OPERATION.pack(_BC_D_COND, length, length + _OPERATION.size) + one + jump + program
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
    )


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
    """ENOENT is what the kernel answers for a protocol it has no handler for (inet_diag_lock_handler())."""
    what = f"the {protocol.name} sockets cannot be listed: {error.strerror or error}"
    if error.errno in (errno.ENOENT, errno.EPROTONOSUPPORT):
        return Unsupported(
            what, f"modprobe {protocol.name.lower()}_diag, or use a kernel with CONFIG_INET_DIAG"
        )
    return Rejected(what)


def _destroy_error(sock: DiagSocket, error: OSError) -> KernelError:
    peer = format_endpoint(sock.destination, sock.destination_port)
    what = f"the {sock.protocol.name} socket to {peer} cannot be destroyed: {error.strerror or error}"
    if error.errno == errno.ENOENT:
        return NotFound(what)
    if error.errno in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT):
        return Unsupported(what, "it takes a kernel with CONFIG_INET_DIAG_DESTROY")
    if error.errno in (errno.EPERM, errno.EACCES):
        return Unsupported(what, "it takes the capability CAP_NET_ADMIN")
    return Rejected(what)
