"""IPVS' objects, and the messages by which the kernel is asked for them.

Sources: include/uapi/linux/ip_vs.h; net/netfilter/ipvs/ip_vs_ctl.c for what is required of a message.
"""

import enum
import functools
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

from ebpfproxy.linux.netlink import genetlink, netlink
from ebpfproxy.linux.netlink.netlink import attribute, attributes
from ebpfproxy.model.address import V4_PREFIX, Address, Family, Protocol, family, format_endpoint

FAMILY_NAME = "IPVS"
_VERSION = 1
_NESTED = 0x8000  # NLA_F_NESTED

SERVICE, REAL = 1, 2  # IPVS_CMD_ATTR_SERVICE, _DEST
_AF, _PROTOCOL, _ADDRESS, _PORT, _MARK, _SCHEDULER, _FLAGS, _TIMEOUT, _NETMASK = range(1, 10)
_METHOD, _WEIGHT, _UPPER, _LOWER, _ACTIVE, _INACTIVE = 3, 4, 5, 6, 7, 8  # IPVS_DEST_ATTR_*, as 1 and 2:
_REAL_ADDRESS, _REAL_PORT, _REAL_AF = 1, 2, 11

_PERSISTENT, _HASHED = 1, 2  # IP_VS_SVC_F_*; the latter is the kernel's own
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


class Forwarding(enum.IntEnum):
    """How a packet gets to a real server: IP_VS_CONN_F_MASQ and so on."""

    MASQUERADE = 0
    LOCAL = 1
    TUNNEL = 2
    DIRECT = 3
    BYPASS = 4


class Flag(enum.IntFlag):
    """IP_VS_SVC_F_*. FALLBACK and PORT are the scheduler's: of `sh` and `mh` sh-fallback, mh-port and so on.

    kube-proxy gives PORT to `mh` (its FlagSourceHash).
    """

    ONE_PACKET = 0x4
    FALLBACK = 0x8
    PORT = 0x10


class ServerKey(NamedTuple):
    """What identifies a virtual server. As `plan.Frontend`, to which it is equal."""

    address: Address
    port: int
    protocol: Protocol

    def __str__(self) -> str:
        return f"{format_endpoint(self.address, self.port)}/{self.protocol.name}"


class VirtualServer(NamedTuple):
    """`persistence`: seconds for which a client stays with its real server after its last connection; or 0.

    `prefix`: how many leading bits of their addresses make clients one and the same to persistence; None
    for all of them, read or written.
    """

    key: ServerKey
    scheduler: str
    flags: Flag = Flag(0)
    persistence: int = 0
    prefix: int | None = None


class RealServer(NamedTuple):
    """One endpoint of a virtual server. With weight 0 it gets no new connections, and keeps those it has."""

    address: Address
    port: int
    weight: int = 1
    forwarding: Forwarding = Forwarding.MASQUERADE


class Connections(NamedTuple):
    """Of one real server, through one virtual server. Inactive: of UDP all, else those not established."""

    active: int
    inactive: int


class Listed(NamedTuple):
    """A virtual server and its real servers. Whose connections are 0 is not in use by anyone."""

    server: VirtualServer
    reals: Mapping[RealServer, Connections]

    @property
    def connections(self) -> int:
        """Of all its real servers; those of real servers that were deleted are not known."""
        return sum(active + inactive for active, inactive in self.reals.values())


def head(command: Command) -> bytes:
    return genetlink.HEAD.pack(command, _VERSION)


@functools.lru_cache(maxsize=256)
def name_server(key: ServerKey) -> bytes:
    """What says which virtual server is meant. Changes of its real servers follow one another."""
    return attribute(SERVICE | _NESTED, _identity(key))


def describe_server(server: VirtualServer) -> bytes:
    """All of it. Its netmask is of IPv4 a mask, of IPv6 the length of the prefix in the machine's byte order
    (ip_vs_add_service()), and may be missing of neither."""
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
    """What says which real server is meant."""
    return attribute(REAL | _NESTED, _place(address, port))


def describe_real(real: RealServer) -> bytes:
    """All of it. Thresholds may not be missing; 0 is none."""
    return attribute(
        REAL | _NESTED,
        _place(real.address, real.port)
        + attribute(_METHOD, _U32.pack(real.forwarding))
        + attribute(_WEIGHT, _U32.pack(real.weight))
        + attribute(_UPPER, _U32.pack(0))
        + attribute(_LOWER, _U32.pack(0)),
    )


def read_server(payload: bytes) -> VirtualServer | None:
    """None for one by firewall mark, or of another protocol."""
    parts = dict(attributes(dict(attributes(payload, genetlink.HEAD.size)).get(SERVICE, b""), 0))
    protocol = _U16.unpack(parts.get(_PROTOCOL, bytes(2)))[0]
    if _MARK in parts or protocol not in _PROTOCOLS:
        return None
    (number,) = _U16.unpack(parts[_AF])
    key = ServerKey(read_address(parts[_ADDRESS], number), int.from_bytes(parts[_PORT]), _PROTOCOLS[protocol])
    flags, _ = _FLAG_BITS.unpack(parts[_FLAGS])
    netmask = parts[_NETMASK]
    four = number == socket.AF_INET
    length = int.from_bytes(netmask).bit_count() if four else netlink.number(netmask)
    return VirtualServer(
        key,
        netlink.text(parts[_SCHEDULER]),
        Flag(flags & _KNOWN_FLAGS),
        netlink.number(parts[_TIMEOUT]) if flags & _PERSISTENT else 0,
        None if length == (32 if four else 128) else length,
    )


def read_real(payload: bytes) -> tuple[RealServer, Connections]:
    """Its family need not be that of its virtual server, where it is reached by a tunnel."""
    parts = dict(attributes(dict(attributes(payload, genetlink.HEAD.size))[REAL], 0))
    (number,) = _U16.unpack(parts[_REAL_AF])
    real = RealServer(
        read_address(parts[_REAL_ADDRESS], number),
        int.from_bytes(parts[_REAL_PORT]),
        netlink.number(parts[_WEIGHT]),
        Forwarding(netlink.number(parts[_METHOD]) & _METHODS),
    )
    return real, Connections(netlink.number(parts[_ACTIVE]), netlink.number(parts[_INACTIVE]))


_PROTOCOLS = {int(protocol): protocol for protocol in Protocol}
_KNOWN_FLAGS = Flag.ONE_PACKET | Flag.FALLBACK | Flag.PORT


def read_address(value: bytes, number: int) -> Address:
    """Of a union nf_inet_addr, in which an IPv4 address is the first four bytes."""
    return Address(V4_PREFIX + value[:4] if number == socket.AF_INET else value)


def _identity(key: ServerKey) -> bytes:
    return (
        attribute(_AF, _U16.pack(_FAMILIES[family(key.address)]))
        + attribute(_PROTOCOL, _U16.pack(key.protocol))
        + attribute(_ADDRESS, _raw(key.address))
        + attribute(_PORT, key.port.to_bytes(2))
    )


def _place(address: Address, port: int) -> bytes:
    return attribute(_REAL_ADDRESS, _raw(address)) + attribute(_REAL_PORT, port.to_bytes(2))


def _raw(address: Address) -> bytes:
    return address[len(V4_PREFIX) :] if family(address) is Family.IPV4 else address
