"""Sets of ipset and their members, as values and as netlink messages.

Sources: include/uapi/linux/netfilter/ipset/ip_set.h; net/netfilter/ipset/ip_set_core.c; ip_set_hash_*.c and
ip_set_bitmap_port.c for the requirements of each type.
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
_VERSION = bytes((6,))  # the version of ipset's protocol that every kernel supports

_NUMBERS = {Family.IPV4: socket.AF_INET, Family.IPV6: socket.AF_INET6}
_FAMILIES = {int(number): of for of, number in _NUMBERS.items()}
_BITS = {Family.IPV4: 32, Family.IPV6: 128}
_PROTOCOL_NUMBERS = {protocol.name.lower(): int(protocol) for protocol in Protocol}
_PROTOCOL_NAMES = {number: name for name, number in _PROTOCOL_NUMBERS.items()}

TYPES = {"hash:ip": 4, "hash:ip,port": 5, "hash:ip,port,ip": 5, "hash:ip,port,net": 7, "bitmap:port": 3}
"""The supported types, with the revision to create: that of Linux 3.18. A later one is not used, since
ipset(8) does not show a set whose revision it does not know."""


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
    """The properties of a set. A bitmap:port has no family and no maximum, and can hold all ports.

    A set that was read can have a type that is not in TYPES; then `max_elements` is 0.
    """

    name: str
    type: str
    family: Family | None
    max_elements: int = 65536


class Listed(NamedTuple):
    """A set as listed. `elements`: number of members. `references`: number of rules and sets that use it."""

    set: IpSet
    elements: int
    references: int


def about(name: str) -> bytes:
    """The start of the body of a message about one set. With the name "" the message is about no set."""
    return (
        _HEAD.pack(socket.AF_INET, 0, 0)
        + attribute(_PROTOCOL, _VERSION)
        + (_named(_NAME, name) if name else b"")
    )


def headers_only() -> bytes:
    return attribute(_FLAGS | _ORDERED, _HEADERS_ONLY.to_bytes(4))


def describe_set(made: IpSet) -> bytes:
    """The body of a message that creates a set. Raises KeyError if its type is not in TYPES."""
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
    """The attributes after `about` that add or delete a member. Raises ValueError if it does not fit the
    type."""
    _, _, shape = of.type.partition(":")
    parts = member.split(",")
    kinds = shape.split(",")
    if len(parts) != len(kinds):
        raise ValueError(f"{member!r} does not have the form {shape}")
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
    """The set in a reply to LIST with `headers_only`."""
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
    """The type in a reply to LIST; "" in a continuation message."""
    return text(dict(attributes(payload, _HEAD.size)).get(_TYPE))


def raw_members(payload: bytes) -> bytes:
    """The encoded members in a reply to LIST; b"" without members."""
    return dict(attributes(payload, _HEAD.size)).get(_MEMBERS, b"")


def read_members(raw: bytes, type_: str) -> list[str]:
    """The members in `raw_members`, in no order. Raises KeyError if the type is not in TYPES."""
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
    """The address in an IPSET_ATTR_IP, which contains one attribute."""
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
    v4 = address.family(value) is Family.IPV4
    if v4 is not (of.family is Family.IPV4):
        raise ValueError(f"{address.format_address(value)} has another family than the set")
    inner = _IPADDR[Family.IPV4 if v4 else Family.IPV6]
    return attribute(kind | _NESTED, attribute(inner | _ORDERED, value[len(V4_PREFIX) :] if v4 else value))


def _second(of: IpSet, text: str, kind: str) -> bytes:
    """The attributes of the third part of a member, which is compared with the client's address."""
    if kind == "ip" or "/" not in text:
        second = address.parse_address(text)
        length = _BITS[address.family(second)]
    else:
        net = address.parse_network(text)
        of_net = address.network_family(net)
        second, length = net.address, net.length - (V4_BITS if of_net is Family.IPV4 else 0)
    return _address(of, _IP2, second) + (attribute(_CIDR2, length.to_bytes()) if kind == "net" else b"")
