"""Sockets of other processes, through duplicates of their descriptors: pidfd_open(2) and pidfd_getfd(2).

A duplicate refers to the same open file as the original, so connect(2) on the duplicate of a socket
connects the socket of the other process. The other process is not stopped and is not notified.

pidfd_open exists since Linux 5.3 (32fcb426ec00), pidfd_getfd since 5.6 (8649c322f75c). pidfd_getfd requires
PTRACE_MODE_ATTACH_REALCREDS: CAP_SYS_PTRACE in the user namespace of the process, and with Yama
kernel.yama.ptrace_scope below 3. Process ids are those of the caller's PID namespace.

A second connect(2) of a UDP socket replaces its peer (__ip4_datagram_connect(), __ip6_datagram_connect()):
- The local port stays.
- The local address stays if it is set. The first connect(2) has set it.
- The receive queue and a pending error (SO_ERROR) stay.
- A thread that waits in recv(2) or poll(2) is not woken.
- The hooks of the cgroup in which the socket was created run, not those of the caller's cgroup
  (BPF_CGROUP_RUN_PROG_INET4_CONNECT: sock_cgroup_ptr(&sk->sk_cgrp_data)).

Both descriptors share the file status flags. Never set a timeout on a duplicate: Python would make the
socket non-blocking for the other process, too.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator

from ebpfproxy.errors import KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.sockets.sockets import DiagSocket
from ebpfproxy.model.address import V4_PREFIX, Address, format_endpoint

_PIDFD_GETFD = 438  # the same number on all architectures but alpha
_NO_DESCRIPTOR = 1 << 30  # larger than any descriptor (fs.nr_open)
_GONE = (errno.ESRCH, errno.EBADF)
_SO_COOKIE = 57
_COOKIE = struct.Struct("=Q")
_V4 = socket.AF_INET
_UNSPECIFIED = struct.pack("=H26x", socket.AF_UNSPEC)

_libc = ctypes.CDLL(None, use_errno=True)


def open_process(pid: int) -> int:
    """A descriptor of a process. The caller closes it.

    Raises NotFound if the process does not exist, else Unsupported or Rejected.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as failure:
        raise _error("pidfd_open", failure.errno or errno.EINVAL) from failure


def duplicate(process: int, descriptor: int) -> int:
    """A duplicate of a descriptor of the process, with close-on-exec. The caller closes it.

    `process` is what `open_process` returns. Raises NotFound if the process has ended or has closed the
    descriptor, Unsupported before Linux 5.6 or if it is not permitted, else Rejected.
    """
    result = int(_libc.syscall(_PIDFD_GETFD, process, descriptor, 0))
    if result < 0:
        raise _error("pidfd_getfd", ctypes.get_errno())
    return result


def close(descriptor: int) -> None:
    """Close what `open_process` or `duplicate` returned."""
    os.close(descriptor)


def try_out() -> None:
    """Test both calls with a descriptor that this process does not have. Raises Unsupported.

    A process may always duplicate its own descriptors, so this does not test the permissions.
    """
    process = open_process(os.getpid())
    try:
        close(duplicate(process, _NO_DESCRIPTOR))
    except NotFound:
        pass  # EBADF: the kernel has the call
    finally:
        close(process)


@contextlib.contextmanager
def duplicated(process: int, descriptor: int, found: DiagSocket) -> Iterator[socket.socket]:
    """A duplicate of the UDP socket `found`, which is descriptor `descriptor` of `process`.

    `process` is what `open_process` returns. Raises NotFound if the descriptor is now another file, and
    the errors of `duplicate`.
    """
    copy = duplicate(process, descriptor)
    try:
        made = socket.socket(found.family, socket.SOCK_DGRAM, socket.IPPROTO_UDP, fileno=copy)
    except OSError as failure:  # with `fileno`, it is not a socket
        os.close(copy)
        raise NotFound("the descriptor is no longer a socket") from failure
    with made:
        if _cookie(made) != found.cookie:
            raise NotFound("the descriptor is another socket by now")
        yield made


def peer(sock: socket.socket) -> tuple[Address, int] | None:
    """Address and port (host order) as getpeername(2) returns them after its hooks; None without a peer."""
    try:
        name = sock.getpeername()
    except OSError as failure:
        if failure.errno == errno.ENOTCONN:
            return None
        raise Rejected(f"cannot read the peer of a socket: {failure.strerror}") from failure
    packed = socket.inet_pton(sock.family, name[0].partition("%")[0])
    return Address(V4_PREFIX + packed if sock.family == _V4 else packed), name[1]


def connect(sock: socket.socket, address: Address, port: int) -> None:
    """Connect to an address and port (host order). An IPv6 socket connects to the v4-mapped form of an IPv4
    address.

    Raises Rejected; the socket then keeps its peer.
    """
    packed = address[len(V4_PREFIX) :] if sock.family == _V4 else address
    try:
        sock.connect((socket.inet_ntop(sock.family, packed), port))
    except OSError as failure:
        what = f"cannot connect to {format_endpoint(address, port)}: {failure.strerror or failure}"
        raise Rejected(what) from failure


def choose_source_again(sock: socket.socket) -> None:
    """Disconnect the socket, so that the next connect(2) selects its local address.

    A local address to which the process has bound the socket stays. Until the next connect(2) the socket has
    no peer, and send(2) returns EDESTADDRREQ to its process. The local port stays unless another socket takes
    it at this moment. Raises Rejected.
    """
    port = sock.getsockname()[1]
    if _libc.connect(sock.fileno(), _UNSPECIFIED, len(_UNSPECIFIED)):
        raise Rejected(f"cannot disconnect a socket: {os.strerror(ctypes.get_errno())}")
    if not sock.getsockname()[1]:  # __udp_disconnect() releases a port that connect(2) selected
        with contextlib.suppress(OSError):
            sock.bind(("", port))


def _cookie(sock: socket.socket) -> int | None:
    """The cookie of a socket; None if the file is not a socket."""
    try:
        return int(_COOKIE.unpack(sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, _COOKIE.size))[0])
    except OSError:
        return None


def _error(call: str, number: int) -> KernelError:
    what = f"cannot call {call}: {os.strerror(number)}"
    if number in _GONE:
        failure: KernelError = NotFound(what)
    elif number == errno.ENOSYS:
        failure = Unsupported(what, "use Linux 5.6 or newer, and a seccomp profile that permits the call")
    elif number in (errno.EPERM, errno.EACCES):
        failure = Unsupported(what, "grant CAP_SYS_PTRACE, and set kernel.yama.ptrace_scope below 3")
    else:
        failure = Rejected(what)
    failure.__cause__ = OSError(number, os.strerror(number))
    return failure
