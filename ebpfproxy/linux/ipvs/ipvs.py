"""IPVS: virtual servers and their real servers, by generic netlink, without ipvsadm(8).

Many changes go in one system call, and each rejection is reported separately. Measured with 10 000 virtual
servers of 10 real ones on Linux 6.1, in software emulation, which makes all of it some twenty times slower:
added in 33 s, by `ipvsadm --restore` in 290 s; read in 11 s, by `ipvsadm --save` in 13 s.

Everything here acts in the network namespace that the calling thread is in. The kernel takes no real server
of IPv4 in one where loopback was never up.

Sources: include/uapi/linux/ip_vs.h; net/netfilter/ipvs/ip_vs_ctl.c; ipvsadm(8).
"""

import contextlib
import errno
import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.ipvs import messages, proc_table
from ebpfproxy.linux.ipvs.messages import Command, Listed, RealServer, ServerKey, VirtualServer
from ebpfproxy.linux.netlink import genetlink, netlink
from ebpfproxy.model.address import V4_PREFIX, Address, Protocol, format_endpoint

_TIMEOUTS = (4, 5, 6)  # IPVS_CMD_ATTR_TIMEOUT_TCP, _TCP_FIN, _UDP
_U32 = struct.Struct("=I")
_PROBED = ServerKey(Address(V4_PREFIX + bytes((198, 51, 100, 0))), 20000, Protocol.TCP)


class Operation(NamedTuple):
    """One change, as the functions below make it. `key` and `place` (of a real server): its subject.

    `scheduler`: "" where it names none.
    """

    command: Command
    body: bytes
    key: ServerKey | None = None
    place: tuple[Address, int] | None = None
    scheduler: str = ""

    def __str__(self) -> str:
        if self.key is None:
            return "timeouts of IPVS"
        if self.place is None:
            return f"virtual server {self.key}"
        return f"real server {format_endpoint(*self.place)} of {self.key}"


class Rejection(NamedTuple):
    """Why the kernel rejected the operation at that position."""

    position: int
    error: KernelError


class Timeouts(NamedTuple):
    """Seconds after which a connection without packets is forgotten; `tcp_fin`: one that has been closed."""

    tcp: int
    tcp_fin: int
    udp: int


def add_server(server: VirtualServer) -> Operation:
    """Rejections as AlreadyExists, and as Unsupported where the kernel has no such scheduler."""
    return _of_server(Command.NEW_SERVER, server)


def change_server(server: VirtualServer) -> Operation:
    """All but its key; its real servers stay. Rejections as NotFound, and Unsupported as by `add_server`."""
    return _of_server(Command.SET_SERVER, server)


def delete_server(key: ServerKey) -> Operation:
    """With its real servers; connections end with their next packet. Rejections as NotFound."""
    return Operation(Command.DELETE_SERVER, messages.name_server(key), key)


def add_real(key: ServerKey, real: RealServer) -> Operation:
    """Rejections as AlreadyExists; as NotFound where there is no such virtual server."""
    return _of_real(Command.NEW_REAL, key, real)


def change_real(key: ServerKey, real: RealServer) -> Operation:
    """Its weight and forwarding; connections stay. Rejections as NotFound."""
    return _of_real(Command.SET_REAL, key, real)


def delete_real(key: ServerKey, address: Address, port: int) -> Operation:
    """Connections to it are dropped or end, as the sysctl expire_nodest_conn says. Rejections as NotFound."""
    body = messages.name_server(key) + messages.name_real(address, port)
    return Operation(Command.DELETE_REAL, body, key, (address, port))


def apply(operations: Sequence[Operation]) -> list[Rejection]:
    """Carry them out in their order; what the kernel rejects, by position. All the others are in force.

    Raises Unsupported where the kernel has no IPVS, or we may not; Rejected where the socket fails.
    """
    if not operations:
        return []
    with _worded("IPVS cannot be changed"):
        number = _family()
        requests = [
            netlink.Request(number, 0, messages.head(each.command) + each.body) for each in operations
        ]
        rejected = netlink.changes(genetlink.NETLINK_GENERIC, requests)
    return [
        Rejection(position, _rejection(operations[position], why))
        for position, why in sorted(rejected.items())
    ]


def read() -> dict[ServerKey, Listed]:
    """Every virtual server of TCP, UDP or SCTP, but none by firewall mark, which are another program's.

    Virtual servers and real servers are two readings, so that of a change made meanwhile one may have half.

    Raises Unsupported where the kernel has no IPVS, Rejected.
    """
    servers = map(messages.read_server, _dump(Command.GET_SERVER))
    reals = proc_table.real_servers(proc_table.read())
    return {server.key: Listed(server, reals.get(server.key, {})) for server in servers if server}


def read_one(key: ServerKey) -> Listed:
    """What `read` returns for that one. Raises NotFound, Unsupported, Rejected."""
    name = messages.name_server(key)
    with _worded(f"virtual server {key}"):
        payload = _get(Command.GET_SERVER, name)
    server = messages.read_server(payload)
    if server is None:
        raise Rejected(f"virtual server {key}: the kernel returned another one")
    return Listed(server, dict(map(messages.read_real, _dump(Command.GET_REAL, name))))


def fingerprint() -> bytes:
    """Changes with every change of a virtual or a real server, but for one of its `Flag` alone; not with
    connections.

    The kernel counts no changes, so this takes its time by the size, a third of what `read` does. b"" where
    the kernel has no IPVS, or it is not loaded; asking does not load it. Raises Rejected.
    """
    table = proc_table.read()
    return hashlib.blake2b(proc_table.without_counters(table), digest_size=16).digest() if table else b""


def timeouts() -> Timeouts:
    """Raises Unsupported, Rejected."""
    with _worded("the timeouts of IPVS cannot be read"):
        payload = _get(Command.GET_CONFIG)
    found = dict(netlink.attributes(payload, genetlink.HEAD.size))
    return Timeouts(*(netlink.number(found[each]) for each in _TIMEOUTS))


def set_timeouts(wanted: Timeouts) -> None:
    """0 leaves one as it is, as `ipvsadm --set` does. Connections that are there keep theirs until their next
    packet. Raises Unsupported, Rejected."""
    body = b"".join(
        netlink.attribute(kind, _U32.pack(value))
        for kind, value in zip(_TIMEOUTS, wanted, strict=True)
        if value
    )
    rejections = apply([Operation(Command.SET_CONFIG, body)])
    for rejection in rejections:
        raise rejection.error


def available() -> None:
    """Load IPVS where it is a module. Raises Unsupported where the kernel has none, Rejected."""
    with _worded("IPVS cannot be used"):
        _family()


def probe_scheduler(name: str) -> None:
    """Find out whether the kernel has it, by a virtual server with it at 198.51.100.0:20000/TCP (RFC 5737).

    As CanUseIPVSProxier() of kube-proxy does, which looks whether it is really there, too. One that an
    earlier probe left is used. Best in a network namespace of its own: `netns.throw_away`.

    Raises Unsupported where there is no such scheduler, or no IPVS; Rejected.
    """
    apply([delete_server(_PROBED)])
    rejections = apply([add_server(VirtualServer(_PROBED, name))])
    try:
        for rejection in rejections:
            raise rejection.error
        found = read_one(_PROBED).server.scheduler
        if found != name:
            raise Unsupported(f"this kernel took {found} for the scheduler {name} of IPVS")
    finally:
        apply([delete_server(_PROBED)])


def _of_server(command: Command, server: VirtualServer) -> Operation:
    body = messages.describe_server(server)
    return Operation(command, body, server.key, scheduler=server.scheduler)


def _of_real(command: Command, key: ServerKey, real: RealServer) -> Operation:
    body = messages.name_server(key) + messages.describe_real(real)
    return Operation(command, body, key, (real.address, real.port))


def _family() -> int:
    try:
        return genetlink.family(messages.FAMILY_NAME)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise Unsupported("this kernel has no IPVS", "modprobe ip_vs") from error
        raise


def _get(command: Command, body: bytes = b"") -> bytes:
    return netlink.get(genetlink.NETLINK_GENERIC, _family(), messages.head(command) + body)[0]


def _dump(command: Command, body: bytes = b"") -> list[bytes]:
    with _worded("IPVS cannot be read"):
        return netlink.dump(genetlink.NETLINK_GENERIC, _family(), messages.head(command) + body)


@contextlib.contextmanager
def _worded(what: str) -> Iterator[None]:
    """What fails within, as our error."""
    try:
        yield
    except OSError as error:
        raise _failure(what, error.errno or 0, error.strerror or str(error)) from error


def _rejection(operation: Operation, why: netlink.Rejection) -> KernelError:
    if why.errno == errno.ENOENT and operation.scheduler:
        return Unsupported(
            f"{operation}: this kernel has no scheduler {operation.scheduler}",
            f"modprobe ip_vs_{operation.scheduler}",
        )
    return _failure(str(operation), why.errno, why.reason)


def _failure(what: str, number: int, reason: str) -> KernelError:
    """ESRCH is for a virtual server, ENOENT for a real one."""
    if number in (errno.ESRCH, errno.ENOENT):
        return NotFound(f"{what}: there is none")
    if number == errno.EEXIST:
        return AlreadyExists(f"{what}: there is one already")
    if number in (errno.EPERM, errno.EACCES):
        return Unsupported(f"{what}: {reason}", "run as root, or with CAP_NET_ADMIN")
    if number in (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT):
        return Unsupported(f"{what}: {reason}", "use a kernel with CONFIG_IP_VS_IPV6, and enable IPv6")
    return Rejected(f"{what}: {reason}")
