"""Sockets of other processes, by duplicates of their descriptors (pidfd.py).

A second connect(2) of a UDP socket replaces its peer (__ip4_datagram_connect(), __ip6_datagram_connect()):
- the local port stays;
- the local address stays where it is set, as the first connect(2) has done;
- the receive queue and a pending error (SO_ERROR) stay;
- a thread that waits in recv(2) or poll(2) is not woken;
- cgroup hooks run are those of the cgroup in which the socket was made, and not the caller's
  (BPF_CGROUP_RUN_PROG_INET4_CONNECT: sock_cgroup_ptr(&sk->sk_cgrp_data)).

The file status flags are shared with the process, so no timeout is ever set on a duplicate: Python's
implementation would make the socket non-blocking.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator

from ebpfproxy.errors import NotFound, Rejected
from ebpfproxy.linux.sockets import pidfd
from ebpfproxy.linux.sockets.sockets import DiagSocket
from ebpfproxy.model.address import V4_PREFIX, Address, format_endpoint

_SO_COOKIE = 57
_COOKIE = struct.Struct("=Q")
_V4 = socket.AF_INET
_UNSPECIFIED = struct.pack("=H26x", socket.AF_UNSPEC)

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def duplicated(process: int, descriptor: int, found: DiagSocket) -> Iterator[socket.socket]:
    """The UDP socket that `found` describes, as descriptor `descriptor` of a process (`pidfd.open_process`).

    Raises NotFound where that descriptor is another file now, and what `pidfd.duplicate` raises.
    """
    duplicate = pidfd.duplicate(process, descriptor)
    try:
        made = socket.socket(found.family, socket.SOCK_DGRAM, socket.IPPROTO_UDP, fileno=duplicate)
    except OSError as failure:  # with `fileno`, it is not a socket
        os.close(duplicate)
        raise NotFound("the descriptor is no socket any more") from failure
    with made:
        if _cookie(made) != found.cookie:
            raise NotFound("the descriptor is another socket by now")
        yield made


def peer(sock: socket.socket) -> tuple[Address, int] | None:
    """Address and port (host order) as getpeername(2) returns them, hooks included; None without a peer."""
    try:
        name = sock.getpeername()
    except OSError as failure:
        if failure.errno == errno.ENOTCONN:
            return None
        raise Rejected(f"cannot read the peer of a socket: {failure.strerror}") from failure
    packed = socket.inet_pton(sock.family, name[0].partition("%")[0])
    return Address(V4_PREFIX + packed if sock.family == _V4 else packed), name[1]


def connect(sock: socket.socket, address: Address, port: int) -> None:
    """Connect to an address and port (host order); an IPv6 socket to an IPv4 address as v4-mapped one.

    Raises Rejected, and the socket keeps the peer that it had.
    """
    packed = address[len(V4_PREFIX) :] if sock.family == _V4 else address
    try:
        sock.connect((socket.inet_ntop(sock.family, packed), port))
    except OSError as failure:
        what = f"cannot connect to {format_endpoint(address, port)}: {failure.strerror or failure}"
        raise Rejected(what) from failure


def choose_source_again(sock: socket.socket) -> None:
    """Have the next connect(2) choose the local address, unless the process has bound the socket to one.

    Until then the socket has no peer, and the process gets EDESTADDRREQ where it sends. The local port stays,
    unless another socket takes it in this moment. Raises Rejected.
    """
    port = sock.getsockname()[1]
    if _libc.connect(sock.fileno(), _UNSPECIFIED, len(_UNSPECIFIED)):
        raise Rejected(f"cannot disconnect a socket: {os.strerror(ctypes.get_errno())}")
    if not sock.getsockname()[1]:  # __udp_disconnect() has given back a port that connect(2) had chosen
        with contextlib.suppress(OSError):
            sock.bind(("", port))


def _cookie(sock: socket.socket) -> int | None:
    """None where it is no socket."""
    try:
        return int(_COOKIE.unpack(sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, _COOKIE.size))[0])
    except OSError:
        return None
