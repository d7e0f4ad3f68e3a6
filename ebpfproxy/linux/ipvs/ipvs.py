"""IPVS: virtual servers and their real servers, through generic netlink, without ipvsadm(8).

One system call sends many changes, and each rejection is reported separately. Measured with 10 000 virtual
servers of 10 real servers each, on Linux 6.1 in software emulation (about twenty times slower): adding takes
33 s (`ipvsadm --restore`: 290 s), reading takes 11 s (`ipvsadm --save`: 13 s).

Netlink lists real servers for one virtual server at a time. /proc/net/ip_vs shows all in one read. It lacks
flags and netmasks, but those are properties of the virtual servers, which netlink lists in one dump. Its form
is unchanged since Linux 2.6.28 (ip_vs_info_seq_show()).

All functions act in the calling thread's network namespace. The kernel accepts a real server of IPv4 only
after loopback was up once in the namespace.

Sources: include/uapi/linux/ip_vs.h; net/netfilter/ipvs/ip_vs_ctl.c; ipvsadm(8).
"""

import contextlib
import errno
import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.ipvs import messages
from ebpfproxy.linux.ipvs.messages import (
    Command,
    Connections,
    Listed,
    Method,
    RealServer,
    ServerKey,
    VirtualServer,
)
from ebpfproxy.linux.netlink import netlink
from ebpfproxy.model.address import V4_PREFIX, Address, Protocol, format_endpoint

_PATH = Path("/proc/thread-self/net/ip_vs")
_HEADER_LINES = 3
_ARROW = b"->"
_PROTOCOLS = {protocol.name.encode(): protocol for protocol in Protocol}
_METHODS = {
    b"Masq": Method.MASQUERADE,
    b"Local": Method.LOCAL,
    b"Tunnel": Method.TUNNEL,
    b"Route": Method.DIRECT,
    b"Bypass": Method.BYPASS,
}
_COUNTERS = 21  # bytes at the end of a real server's line: "%-10d %-10d"


def proc_text() -> bytes:
    """The text of /proc/net/ip_vs; b"" if the kernel has no IPVS or it is not loaded. Raises Rejected."""
    try:
        with _PATH.open("rb", buffering=0) as opened:
            return opened.readall()
    except FileNotFoundError:
        return b""
    except OSError as failure:
        raise Rejected(f"cannot read {_PATH}: {failure.strerror}", "run as root") from failure


def real_servers(table: bytes) -> dict[ServerKey, Mapping[RealServer, Connections]]:
    """The real servers, by virtual server. Virtual servers by firewall mark are skipped."""
    found: dict[ServerKey, Mapping[RealServer, Connections]] = {}
    reals: dict[RealServer, Connections] = {}
    for line in table.splitlines()[_HEADER_LINES:]:
        words = line.split()
        if words[0] == _ARROW:
            _, endpoint, method, weight, active, inactive = words
            real = RealServer(*_parse_endpoint(endpoint), int(weight), _METHODS[method])
            reals[real] = Connections(int(active), int(inactive))
        else:
            reals = {}
            if words[0] in _PROTOCOLS:
                found[ServerKey(*_parse_endpoint(words[1]), _PROTOCOLS[words[0]])] = reals
    return found


def without_counters(table: bytes) -> bytes:
    """The table without the connection counters of real servers."""
    return b"\n".join([line[:-_COUNTERS] if line[:1] == b" " else line for line in table.splitlines()])


def _parse_endpoint(text: bytes) -> tuple[Address, int]:
    """Address and port from text such as 0A600001:0050 or [fd00:0000:…:0001]:0050."""
    address, _, port = text.rpartition(b":")
    if address[:1] == b"[":
        return Address(bytes.fromhex(address[1:-1].replace(b":", b"").decode())), int(port, 16)
    return Address(V4_PREFIX + bytes.fromhex(address.decode())), int(port, 16)


_TIMEOUTS = (4, 5, 6)  # IPVS_CMD_ATTR_TIMEOUT_TCP, _TCP_FIN, _UDP
_U32 = struct.Struct("=I")
_PROBED = ServerKey(Address(V4_PREFIX + bytes((198, 51, 100, 0))), 20000, Protocol.TCP)


class Operation(NamedTuple):
    """One change, created by the functions below.

    `key`: the virtual server. `endpoint`: the address and port of the real server, if it is about one.
    `scheduler`: "" if the change sets none.
    """

    command: Command
    body: bytes
    key: ServerKey | None = None
    endpoint: tuple[Address, int] | None = None
    scheduler: str = ""

    def __str__(self) -> str:
        if self.key is None:
            return "timeouts of IPVS"
        if self.endpoint is None:
            return f"virtual server {self.key}"
        return f"real server {format_endpoint(*self.endpoint)} of {self.key}"


class Rejection(NamedTuple):
    """The position of an operation that the kernel rejected, and the error."""

    position: int
    error: KernelError


class Timeouts(NamedTuple):
    """Seconds after which IPVS removes an idle connection. `tcp_fin`: of TCP after a FIN."""

    tcp: int
    tcp_fin: int
    udp: int


def add_server(server: VirtualServer) -> Operation:
    """Add a virtual server. Rejected as AlreadyExists, or as Unsupported if the kernel lacks its
    scheduler."""
    return _of_server(Command.NEW_SERVER, server)


def change_server(server: VirtualServer) -> Operation:
    """Change everything but the key. The real servers stay. Rejected as NotFound, or as in `add_server`."""
    return _of_server(Command.SET_SERVER, server)


def delete_server(key: ServerKey) -> Operation:
    """Delete a virtual server with its real servers. Its connections end at their next packet.

    Rejected as NotFound.
    """
    return Operation(Command.DELETE_SERVER, messages.name_server(key), key)


def add_real(key: ServerKey, real: RealServer) -> Operation:
    """Add a real server. Rejected as AlreadyExists, or as NotFound if the virtual server does not exist."""
    return _of_real(Command.NEW_REAL, key, real)


def change_real(key: ServerKey, real: RealServer) -> Operation:
    """Change weight and forwarding of a real server. Its connections stay. Rejected as NotFound."""
    return _of_real(Command.SET_REAL, key, real)


def delete_real(key: ServerKey, address: Address, port: int) -> Operation:
    """Delete a real server. Depending on the sysctl expire_nodest_conn, its connections are dropped or
    expire.

    Rejected as NotFound.
    """
    body = messages.name_server(key) + messages.name_real(address, port)
    return Operation(Command.DELETE_REAL, body, key, (address, port))


def apply(operations: Sequence[Operation]) -> list[Rejection]:
    """Apply the operations in their order; return the rejected ones, by position. All others take effect.

    Raises Unsupported if the kernel has no IPVS or without CAP_NET_ADMIN, Rejected if the socket fails.
    """
    if not operations:
        return []
    with _converted("cannot change IPVS"):
        number = _message_type()
        requests = [
            netlink.Request(number, 0, messages.head(each.command) + each.body) for each in operations
        ]
        rejected = netlink.changes(messages.NETLINK_GENERIC, requests)
    return [
        Rejection(position, _rejection(operations[position], rejection))
        for position, rejection in sorted(rejected.items())
    ]


def read() -> dict[ServerKey, Listed]:
    """Every virtual server of TCP, UDP or SCTP. Those by firewall mark belong to other programs and are
    skipped.

    Virtual servers and real servers are read separately, so a concurrent change may be half visible.

    The table in proc may lack some virtual servers if other network namespaces have any, and it is longer
    than a page: the position at which the kernel continues counts theirs, too (ip_vs_info_seq_next()). Linux
    7.3 has a table for each namespace. The real servers of missing virtual servers are read one by one.

    Raises Unsupported if the kernel has no IPVS, Rejected.
    """
    servers = map(messages.read_server, _dump(Command.GET_SERVER))
    reals = real_servers(proc_text())
    return {
        server.key: Listed(server, reals[server.key] if server.key in reals else _reals(server.key))
        for server in servers
        if server
    }


def read_one(key: ServerKey) -> Listed:
    """The value of `read` for one virtual server. Raises NotFound, Unsupported, Rejected."""
    name = messages.name_server(key)
    with _converted(f"cannot read virtual server {key}"):
        payload = _get(Command.GET_SERVER, name)
    server = messages.read_server(payload)
    if server is None:
        raise Rejected(f"cannot read virtual server {key}: the kernel returned another one")
    return Listed(server, _reals(key))


def _reals(key: ServerKey) -> dict[RealServer, Connections]:
    """The real servers of one virtual server, in a dump of its own. Empty if it does not exist."""
    return dict(map(messages.read_real, _dump(Command.GET_REAL, messages.name_server(key))))


def fingerprint() -> bytes:
    """A digest of all virtual and real servers, without their connections. It does not include `Flag`.

    It takes a third of the time of `read`, since the kernel has no change counter. b"" if the kernel has no
    IPVS or it is not loaded; the call does not load it. Raises Rejected.
    """
    table = proc_text()
    return hashlib.blake2b(without_counters(table), digest_size=16).digest() if table else b""


def timeouts() -> Timeouts:
    """The timeouts in force. Raises Unsupported, Rejected."""
    with _converted("cannot read the timeouts of IPVS"):
        payload = _get(Command.GET_CONFIG)
    attributes = dict(netlink.attributes(payload, messages.HEAD.size))
    return Timeouts(*(netlink.number(attributes[each]) for each in _TIMEOUTS))


def set_timeouts(wanted: Timeouts) -> None:
    """Set the timeouts. 0 does not change a timeout, as in `ipvsadm --set`. Raises Unsupported, Rejected.

    Existing connections keep their timeout until their next packet.
    """
    body = b"".join(
        netlink.attribute(kind, _U32.pack(value))
        for kind, value in zip(_TIMEOUTS, wanted, strict=True)
        if value
    )
    rejections = apply([Operation(Command.SET_CONFIG, body)])
    for rejection in rejections:
        raise rejection.error


def available() -> None:
    """Load the module of IPVS if it is not loaded. Raises Unsupported if the kernel has no IPVS, Rejected."""
    with _converted("cannot use IPVS"):
        _message_type()


def probe_scheduler(name: str) -> None:
    """Test a scheduler with a virtual server at 198.51.100.0:20000/TCP (RFC 5737), which is deleted again.

    The virtual server is read back, as CanUseIPVSProxier() of kube-proxy does. One that an earlier probe left
    is deleted first. Use a temporary network namespace: `netns.throw_away`.

    Raises Unsupported if the kernel lacks the scheduler or IPVS, Rejected.
    """
    apply([delete_server(_PROBED)])
    rejections = apply([add_server(VirtualServer(_PROBED, name))])
    try:
        for rejection in rejections:
            raise rejection.error
        found = read_one(_PROBED).server.scheduler
        if found != name:
            raise Unsupported(f"this kernel used the IPVS scheduler {found} instead of {name}")
    finally:
        apply([delete_server(_PROBED)])


def _of_server(command: Command, server: VirtualServer) -> Operation:
    body = messages.describe_server(server)
    return Operation(command, body, server.key, scheduler=server.scheduler)


def _of_real(command: Command, key: ServerKey, real: RealServer) -> Operation:
    body = messages.name_server(key) + messages.describe_real(real)
    return Operation(command, body, key, (real.address, real.port))


def _message_type() -> int:
    try:
        return messages.message_type()
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise Unsupported("this kernel has no IPVS", "modprobe ip_vs") from error
        raise


def _get(command: Command, body: bytes = b"") -> bytes:
    return netlink.get(messages.NETLINK_GENERIC, _message_type(), messages.head(command) + body)[0]


def _dump(command: Command, body: bytes = b"") -> list[bytes]:
    with _converted("cannot read IPVS"):
        return netlink.dump(messages.NETLINK_GENERIC, _message_type(), messages.head(command) + body)


@contextlib.contextmanager
def _converted(action: str) -> Iterator[None]:
    """Convert an OSError within the block to an error of ebpfproxy.errors."""
    try:
        yield
    except OSError as error:
        raise _failure(action, error.errno or 0, error.strerror or str(error)) from error


def _rejection(operation: Operation, rejection: netlink.Rejection) -> KernelError:
    action = f"cannot {_VERBS[operation.command]} {operation}"
    if rejection.errno == errno.ENOENT and operation.scheduler:
        return Unsupported(
            f"{action}: this kernel has no scheduler {operation.scheduler}",
            f"modprobe ip_vs_{operation.scheduler}",
        )
    return _failure(action, rejection.errno, rejection.reason)


_VERBS = {
    Command.NEW_SERVER: "add",
    Command.SET_SERVER: "change",
    Command.DELETE_SERVER: "delete",
    Command.NEW_REAL: "add",
    Command.SET_REAL: "change",
    Command.DELETE_REAL: "delete",
    Command.SET_CONFIG: "set",
}


def _failure(action: str, number: int, reason: str) -> KernelError:
    """The kernel returns ESRCH for a missing virtual server, ENOENT for a missing real server."""
    if number in (errno.ESRCH, errno.ENOENT):
        return NotFound(f"{action}: it does not exist")
    if number == errno.EEXIST:
        return AlreadyExists(f"{action}: it exists already")
    if number in (errno.EPERM, errno.EACCES):
        return Unsupported(f"{action}: {reason}", "run as root, or with CAP_NET_ADMIN")
    if number in (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT):
        return Unsupported(f"{action}: {reason}", "use a kernel with CONFIG_IP_VS_IPV6, and enable IPv6")
    return Rejected(f"{action}: {reason}")
