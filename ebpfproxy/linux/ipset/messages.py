"""Sets of ipset and their members, and the messages by which the kernel is asked for them.

Sources: include/uapi/linux/netfilter/ipset/ip_set.h; net/netfilter/ipset/ip_set_core.c, and ip_set_hash_*.c
and ip_set_bitmap_port.c for what a type requires.
"""

import enum
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.linux.netlink.netlink import attribute, attributes, text
from ebpfproxy.model import address
from ebpfproxy.model.address import V4_BITS, V4_PREFIX, Address, Family, Protocol

SUBSYSTEM = 6 << 8  # NFNL_SUBSYS_IPSET, the upper byte of a message's type
_HEAD = struct.Struct(">BBH")  # struct nfgenmsg: family, version, res_id
_NESTED = 0x8000  # NLA_F_NESTED
_ORDERED = 0x4000  # NLA_F_NET_BYTEORDER, without which numbers and addresses are rejected

_PROTOCOL, _NAME, _TYPE, _REVISION, _FAMILY, _FLAGS, _DATA, _MEMBERS = range(1, 9)  # IPSET_ATTR_*
_OTHER_NAME = _TYPE
_IP, _PORT, _PORT_TO, _PROTO = 1, 4, 5, 7  # within _DATA
_MAX_ELEMENTS, _ELEMENTS, _REFERENCES = 19, 24, 25  # of a set
_IP2, _CIDR2 = 20, 21  # of a member
_IPADDR = {Family.IPV4: 1, Family.IPV6: 2}  # IPSET_ATTR_IPADDR_*
_HEADERS_ONLY = 1 << 2  # IPSET_FLAG_LIST_HEADER
_NESTED_HEAD = 4  # struct nlattr
_LAST_PORT = 65535
_VERSION = bytes((6,))  # of ipset's protocol: that which every kernel understands

_NUMBERS = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_FAMILIES = {int(number): of for of, number in _NUMBERS.items()}
_BITS = {Family.IPV4: 32, Family.IPV6: 128}
_PROTOCOL_NUMBERS = {protocol.name.lower(): int(protocol) for protocol in Protocol}
_PROTOCOL_NAMES = {number: name for name, number in _PROTOCOL_NUMBERS.items()}

TYPES = {"hash:ip": 4, "hash:ip,port": 5, "hash:ip,port,ip": 5, "hash:ip,port,net": 7, "bitmap:port": 3}
"""The types that can be made, each with the revision that is asked for: Linux 3.18's. Which is not the
kernel's latest, since ipset(8) does not show a set of a revision that it does not know itself."""


class Command(enum.IntEnum):
    """IPSET_CMD_*."""

    PROTOCOL = 1
    CREATE = 2
    DESTROY = 3
    SWAP = 6
    LIST = 7
    ADD = 9
    DELETE = 10


class IpSet(NamedTuple):
    """What a set is made as. A bitmap:port is of no family, has no maximum, and holds all ports.

    `type` may be another one than those of TYPES where it was read, `max_elements` then 0.
    """

    name: str
    type: str
    family: Family | None
    max_elements: int = 65536


class Listed(NamedTuple):
    """`elements`: how many members it has. `references`: how many rules, and sets of sets, go by it."""

    set: IpSet
    elements: int
    references: int


def about(name: str) -> bytes:
    """The body of a message about one set, which attributes may follow; of "": about none."""
    return (
        _HEAD.pack(socket.AF_INET, 0, 0)
        + attribute(_PROTOCOL, _VERSION)
        + (_named(_NAME, name) if name else b"")
    )


def headers_only() -> bytes:
    return attribute(_FLAGS | _ORDERED, _HEADERS_ONLY.to_bytes(4))


def describe_set(made: IpSet) -> bytes:
    """Raises KeyError for a type that is not one of TYPES."""
    if made.type == "bitmap:port":
        data = attribute(_PORT | _ORDERED, bytes(2)) + attribute(_PORT_TO | _ORDERED, _LAST_PORT.to_bytes(2))
    else:
        data = attribute(_MAX_ELEMENTS | _ORDERED, made.max_elements.to_bytes(4))
    return (
        about(made.name)
        + _named(_TYPE, made.type)
        + attribute(_REVISION, TYPES[made.type].to_bytes())
        + attribute(_FAMILY, (_NUMBERS[made.family] if made.family else socket.AF_UNSPEC).to_bytes())
        + attribute(_DATA | _NESTED, data)
    )


def swap(one: str, other: str) -> bytes:
    return about(one) + _named(_OTHER_NAME, other)


def describe_member(of: IpSet, member: str) -> bytes:
    """What follows `about` to add it, or to delete it. Raises ValueError where the type has none such."""
    _, _, shape = of.type.partition(":")
    parts = member.split(",")
    kinds = shape.split(",")
    if len(parts) != len(kinds):
        raise ValueError(f"{member!r} is not of {shape}")
    if of.type == "bitmap:port":
        return attribute(_DATA | _NESTED, _port(member))
    data = _address(of, _IP, address.parse_address(parts[0]))
    if len(parts) > 1:
        protocol, _, port = parts[1].partition(":")
        data += _port(port) + attribute(_PROTO, _protocol(protocol).to_bytes())
    if len(parts) > 2:
        data += _second(of, parts[2], kinds[2])
    return attribute(_DATA | _NESTED, data)


def read_set(payload: bytes) -> Listed:
    """Of an answer to LIST, headers only."""
    found = dict(attributes(payload, _HEAD.size))
    data = dict(attributes(found.get(_DATA, b""), 0))
    number = int.from_bytes(found.get(_FAMILY, b""))
    made = IpSet(
        text(found[_NAME]),
        text(found[_TYPE]),
        _FAMILIES.get(number),
        int.from_bytes(data.get(_MAX_ELEMENTS, b"")),
    )
    return Listed(made, int.from_bytes(data.get(_ELEMENTS, b"")), int.from_bytes(data.get(_REFERENCES, b"")))


def type_of(payload: bytes) -> str:
    """Of an answer to LIST; "" of one that continues another."""
    return text(dict(attributes(payload, _HEAD.size)).get(_TYPE))


def raw_members(payload: bytes) -> bytes:
    """Of an answer to LIST: all its members as the kernel reports them; b"" where it has none."""
    return dict(attributes(payload, _HEAD.size)).get(_MEMBERS, b"")


def read_members(raw: bytes, type_: str) -> list[str]:
    """Of `raw_members`, in no order. Raises KeyError for a type that is not one of TYPES."""
    read = _READERS[type_]
    return [read(dict(attributes(data, 0))) for _, data in attributes(raw, 0)]


def _read_ip(parts: dict[int, bytes]) -> str:
    return _ip(parts[_IP])


def _read_ip_port(parts: dict[int, bytes]) -> str:
    number = parts[_PROTO][0]
    protocol = _PROTOCOL_NAMES.get(number) or str(number)
    return f"{_ip(parts[_IP])},{protocol}:{int.from_bytes(parts[_PORT])}"


def _read_ip_port_ip(parts: dict[int, bytes]) -> str:
    return f"{_read_ip_port(parts)},{_ip(parts[_IP2])}"


def _read_ip_port_net(parts: dict[int, bytes]) -> str:
    raw = parts[_IP2]
    length = parts[_CIDR2][0]
    suffix = "" if length == 8 * (len(raw) - _NESTED_HEAD) else f"/{length}"
    return f"{_read_ip_port_ip(parts)}{suffix}"


def _read_port(parts: dict[int, bytes]) -> str:
    return str(int.from_bytes(parts[_PORT]))


_READERS: dict[str, Callable[[dict[int, bytes]], str]] = {
    "hash:ip": _read_ip,
    "hash:ip,port": _read_ip_port,
    "hash:ip,port,ip": _read_ip_port_ip,
    "hash:ip,port,net": _read_ip_port_net,
    "bitmap:port": _read_port,
}


def _ip(nested: bytes) -> str:
    """Of IPSET_ATTR_IP: one attribute within, which is the address."""
    raw = nested[_NESTED_HEAD:]
    return address.format_address(Address(V4_PREFIX + raw if len(raw) == 4 else raw))


def _named(kind: int, name: str) -> bytes:
    return attribute(kind, name.encode() + b"\0")


def _port(text: str) -> bytes:
    number = int(text)
    if not 0 <= number <= _LAST_PORT:
        raise ValueError(f"{text} is not a port")
    return attribute(_PORT | _ORDERED, number.to_bytes(2))


def _protocol(text: str) -> int:
    number = _PROTOCOL_NUMBERS.get(text) or int(text)
    if not 0 <= number <= 255:
        raise ValueError(f"{text} is not a protocol")
    return number


def _address(of: IpSet, kind: int, value: Address) -> bytes:
    four = address.family(value) is Family.IPV4
    if four is not (of.family is Family.IPV4):
        raise ValueError(f"{address.format_address(value)} is not of the set's family")
    inner = _IPADDR[Family.IPV4 if four else Family.IPV6]
    return attribute(kind | _NESTED, attribute(inner | _ORDERED, value[len(V4_PREFIX) :] if four else value))


def _second(of: IpSet, text: str, kind: str) -> bytes:
    """What a client's address is compared with."""
    if kind == "ip" or "/" not in text:
        second = address.parse_address(text)
        length = _BITS[address.family(second)]
    else:
        net = address.parse_network(text)
        of_net = address.network_family(net)
        second, length = net.address, net.length - (V4_BITS if of_net is Family.IPV4 else 0)
    return _address(of, _IP2, second) + (attribute(_CIDR2, length.to_bytes()) if kind == "net" else b"")
