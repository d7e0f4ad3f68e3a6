"""Virtual servers and real servers of IPVS, as values and as netlink messages.

Sources: include/uapi/linux/{ip_vs,genetlink}.h; net/netfilter/ipvs/ip_vs_ctl.c for the required attributes;
net/netlink/genetlink.c.
"""

import enum
import functools
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

from ebpfproxy.linux.netlink import netlink
from ebpfproxy.linux.netlink.netlink import attribute, attributes
from ebpfproxy.model.address import V4_PREFIX, Address, Family, Protocol, family, format_endpoint

NETLINK_GENERIC = 16
HEAD = struct.Struct("=BBxx")  # struct genlmsghdr: cmd, version
_CONTROLLER = 0x10  # GENL_ID_CTRL
_GET_FAMILY = 3  # CTRL_CMD_GETFAMILY
_FAMILY_ID, _FAMILY_NAME = 1, 2  # CTRL_ATTR_*

_NAME = b"IPVS"
_VERSION = 1
_NESTED = 0x8000  # NLA_F_NESTED

SERVICE, REAL = 1, 2  # IPVS_CMD_ATTR_SERVICE, _DEST
_AF, _PROTOCOL, _ADDRESS, _PORT, _MARK, _SCHEDULER, _FLAGS, _TIMEOUT, _NETMASK = range(1, 10)
_METHOD, _WEIGHT, _UPPER, _LOWER, _ACTIVE, _INACTIVE = 3, 4, 5, 6, 7, 8  # IPVS_DEST_ATTR_*, as 1 and 2:
_REAL_ADDRESS, _REAL_PORT, _REAL_AF = 1, 2, 11

_PERSISTENT, _HASHED = 1, 2  # IP_VS_SVC_F_*; only the kernel sets the second one
_ALL_FLAGS = 0xFFFFFFFF ^ _HASHED
_METHODS = 0x7  # IP_VS_CONN_F_FWD_MASK
_FAMILIES = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_BITS = {Family.IPV4: 32, Family.IPV6: 128}

_U16 = struct.Struct("=H")
_U32 = struct.Struct("=I")
_FLAG_BITS = struct.Struct("=II")  # struct ip_vs_flags: flags, mask


class Command(enum.IntEnum):
    """IPVS_CMD_*."""

    NEW_SERVER = 1
    SET_SERVER = 2
    DELETE_SERVER = 3
    GET_SERVER = 4
    NEW_REAL = 5
    SET_REAL = 6
    DELETE_REAL = 7
    GET_REAL = 8
    SET_CONFIG = 12
    GET_CONFIG = 13


class Method(enum.IntEnum):
    """How IPVS forwards a packet to a real server: IP_VS_CONN_F_MASQ and so on."""

    MASQUERADE = 0
    LOCAL = 1
    TUNNEL = 2
    DIRECT = 3
    BYPASS = 4


class Flag(enum.IntFlag):
    """IP_VS_SVC_F_*. FALLBACK and PORT are options of the schedulers `sh` and `mh`: sh-fallback, mh-port, ...

    kube-proxy sets PORT for `mh` (its FlagSourceHash).
    """

    ONE_PACKET = 0x4
    FALLBACK = 0x8
    PORT = 0x10


class ServerKey(NamedTuple):
    """The key of a virtual server. It compares equal to a `plan.Frontend` with the same fields."""

    address: Address
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        return f"{format_endpoint(self.address, self.port)}/{self.protocol.name}"


class VirtualServer(NamedTuple):
    """A virtual server without its real servers.

    `persistence`: seconds for which a client keeps its real server after its last connection. 0: none.
    `prefix`: clients that share this number of leading address bits count as one client for persistence. None
    means all bits, both when read and when written.
    """

    key: ServerKey
    scheduler: str
    flags: Flag = Flag(0)
    persistence: int = 0
    prefix: int | None = None


class RealServer(NamedTuple):
    """One endpoint of a virtual server. With weight 0 it gets no new connections, but keeps existing ones."""

    address: Address
    port: int
    weight: int = 1
    method: Method = Method.MASQUERADE


class Connections(NamedTuple):
    """Connections of one real server in one virtual server. Inactive: not established; with UDP all of
    them."""

    active: int
    inactive: int


class Listed(NamedTuple):
    """A virtual server and its real servers, with their connections."""

    server: VirtualServer
    reals: Mapping[RealServer, Connections]

    @property
    def connections(self) -> int:
        """The connections of all its real servers. The kernel does not show those of deleted real servers."""
        return sum(active + inactive for active, inactive in self.reals.values())


def message_type() -> int:
    """The netlink message type of IPVS, which the kernel assigns when it loads the module of IPVS.

    The kernel loads the module for this request (net-pf-16-proto-16-family-IPVS). Raises OSError, with ENOENT
    if the kernel has no IPVS.
    """
    request = HEAD.pack(_GET_FAMILY, 1) + attribute(_FAMILY_NAME, _NAME + b"\0")
    replies = netlink.get(NETLINK_GENERIC, _CONTROLLER, request)
    (number,) = _U16.unpack(dict(attributes(replies[0], HEAD.size))[_FAMILY_ID])
    return int(number)


def head(command: Command) -> bytes:
    return HEAD.pack(command, _VERSION)


@functools.lru_cache(maxsize=256)
def name_server(key: ServerKey) -> bytes:
    """The attribute that identifies a virtual server. Cached, since changes of its real servers are
    adjacent."""
    return attribute(SERVICE | _NESTED, _identity(key))


def describe_server(server: VirtualServer) -> bytes:
    """The attribute with all fields of a virtual server.

    The netmask is required. For IPv4 it is a mask, for IPv6 a prefix length in host byte order
    (ip_vs_add_service()).
    """
    of = family(server.key.address)
    length = _BITS[of] if server.prefix is None else server.prefix
    mask = (~0 << 32 - length & 0xFFFFFFFF).to_bytes(4) if of is Family.IPV4 else _U32.pack(length)
    flags = server.flags | (_PERSISTENT if server.persistence else 0)
    return attribute(
        SERVICE | _NESTED,
        _identity(server.key)
        + attribute(_SCHEDULER, server.scheduler.encode() + b"\0")
        + attribute(_FLAGS, _FLAG_BITS.pack(flags, _ALL_FLAGS))
        + attribute(_TIMEOUT, _U32.pack(server.persistence))
        + attribute(_NETMASK, mask),
    )


def name_real(address: Address, port: int) -> bytes:
    """The attribute that identifies a real server."""
    return attribute(REAL | _NESTED, _endpoint(address, port))


def describe_real(real: RealServer) -> bytes:
    """The attribute with all fields of a real server. Thresholds are required; 0 means none."""
    return attribute(
        REAL | _NESTED,
        _endpoint(real.address, real.port)
        + attribute(_METHOD, _U32.pack(real.method))
        + attribute(_WEIGHT, _U32.pack(real.weight))
        + attribute(_UPPER, _U32.pack(0))
        + attribute(_LOWER, _U32.pack(0)),
    )


def read_server(payload: bytes) -> VirtualServer | None:
    """The virtual server in a payload; None for one by firewall mark, or of another protocol."""
    parts = dict(attributes(dict(attributes(payload, HEAD.size)).get(SERVICE, b""), 0))
    protocol = _U16.unpack(parts.get(_PROTOCOL, bytes(2)))[0]
    if _MARK in parts or protocol not in _PROTOCOLS:
        return None
    (number,) = _U16.unpack(parts[_AF])
    key = ServerKey(read_address(parts[_ADDRESS], number), int.from_bytes(parts[_PORT]), _PROTOCOLS[protocol])
    flags, _ = _FLAG_BITS.unpack(parts[_FLAGS])
    netmask = parts[_NETMASK]
    v4 = number == socket.AF_INET
    length = int.from_bytes(netmask).bit_count() if v4 else netlink.number(netmask)
    return VirtualServer(
        key,
        netlink.text(parts[_SCHEDULER]),
        Flag(flags & _KNOWN_FLAGS),
        netlink.number(parts[_TIMEOUT]) if flags & _PERSISTENT else 0,
        None if length == (32 if v4 else 128) else length,
    )


def read_real(payload: bytes) -> tuple[RealServer, Connections]:
    """The real server in a payload. With a tunnel, its family can differ from that of its virtual server."""
    parts = dict(attributes(dict(attributes(payload, HEAD.size))[REAL], 0))
    (number,) = _U16.unpack(parts[_REAL_AF])
    real = RealServer(
        read_address(parts[_REAL_ADDRESS], number),
        int.from_bytes(parts[_REAL_PORT]),
        netlink.number(parts[_WEIGHT]),
        Method(netlink.number(parts[_METHOD]) & _METHODS),
    )
    return real, Connections(netlink.number(parts[_ACTIVE]), netlink.number(parts[_INACTIVE]))


_PROTOCOLS = {int(protocol): protocol for protocol in Protocol}
_KNOWN_FLAGS = Flag.ONE_PACKET | Flag.FALLBACK | Flag.PORT


def read_address(value: bytes, number: int) -> Address:
    """The address in a union nf_inet_addr: an IPv4 address is its first four bytes. `number`: AF_*."""
    return Address(V4_PREFIX + value[:4] if number == socket.AF_INET else value)


def _identity(key: ServerKey) -> bytes:
    return (
        attribute(_AF, _U16.pack(_FAMILIES[family(key.address)]))
        + attribute(_PROTOCOL, _U16.pack(key.protocol))
        + attribute(_ADDRESS, _raw(key.address))
        + attribute(_PORT, key.port.to_bytes(2))
    )


def _endpoint(address: Address, port: int) -> bytes:
    return attribute(_REAL_ADDRESS, _raw(address)) + attribute(_REAL_PORT, port.to_bytes(2))


def _raw(address: Address) -> bytes:
    return address[len(V4_PREFIX) :] if family(address) is Family.IPV4 else address
