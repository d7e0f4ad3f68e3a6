"""Addresses of both families as one type.

An `Address` is 16 bytes in network order; IPv4 a.b.c.d stands as ::ffff:a.b.c.d (RFC 4291 2.5.5.2).
The BPF maps hold the same 16 bytes, so an address is parsed once and never converted again.
"""

import enum
import re
import socket
from typing import NamedTuple, NewType

Address = NewType("Address", bytes)

V4_PREFIX = bytes(10) + b"\xff\xff"
V4_BITS = 96
"""How many leading bits of an IPv4 address are `V4_PREFIX`: a /24 is a /120 here."""


class Family(enum.Enum):
    """The names are those of EndpointSlice.addressType and Service.spec.ipFamilies."""

    IPV4 = "IPv4"
    IPV6 = "IPv6"

    __hash__ = object.__hash__  # Enum's own is written in Python, and these are in the keys of large dicts


class Protocol(enum.IntEnum):
    """The numbers are the kernel's (IPPROTO_*), the names the API's."""

    TCP = socket.IPPROTO_TCP
    UDP = socket.IPPROTO_UDP
    SCTP = socket.IPPROTO_SCTP

    __hash__ = int.__hash__  # equal to its number, so it must hash like it


def protocol_name(number: int) -> str:
    """As the API calls it; of another protocol the number.

    >>> protocol_name(17), protocol_name(1)
    ('UDP', '1')
    """
    return Protocol(number).name if number in _PROTOCOLS else str(number)


_PROTOCOLS = frozenset(map(int, Protocol))


class Network(NamedTuple):
    """A prefix of `length` bits, 0 to 128; an IPv4 /n has length 96 + n. Host bits are zero."""

    address: Address
    length: int

    def __str__(self) -> str:
        return format_network(self)


_DOTTED = re.compile(r"[0-9]{1,10}(?:\.[0-9]{1,10}){3}", re.ASCII)
_LOOPBACK = {
    Family.IPV4: Address(V4_PREFIX + b"\x7f\0\0\1"),
    Family.IPV6: Address(bytes(15) + b"\1"),
}
_UNSPECIFIED = {Family.IPV4: Address(V4_PREFIX + bytes(4)), Family.IPV6: Address(bytes(16))}


def parse_address(text: str) -> Address:
    """Read an address as kube-proxy does (ParseIPSloppy): IPv4 octets may have leading zeros, and
    are decimal.

    >>> parse_address("172.30.0.041") == parse_address("172.30.0.41")
    True

    Raises ValueError for anything else, a zone (``fe80::1%eth0``) included.
    """
    try:
        if ":" in text:
            return Address(socket.inet_pton(socket.AF_INET6, text))
        return Address(V4_PREFIX + socket.inet_pton(socket.AF_INET, text))
    except (OSError, ValueError):  # ValueError: a NUL or a lone surrogate in the text
        return _parse_dotted(text)


def _parse_dotted(text: str) -> Address:
    octets = [int(octet) for octet in text.split(".")] if _DOTTED.fullmatch(text) else [256]
    if max(octets) > 255:
        raise ValueError(f"{text!r} is not an IP address")
    return Address(V4_PREFIX + bytes(octets))


def parse_network(text: str) -> Network:
    """Read a CIDR as kube-proxy does: blanks around it are dropped, host bits are cleared.

    >>> format_network(parse_network(" 10.1.2.3/8"))
    '10.0.0.0/8'

    Raises ValueError.
    """
    head, slash, tail = text.strip().partition("/")
    address = parse_address(head)
    four = family(address) is Family.IPV4 and ":" not in head
    if not slash or not re.fullmatch(r"[0-9]{1,3}", tail, re.ASCII) or int(tail) > (32 if four else 128):
        raise ValueError(f"{text!r} is not a CIDR")
    return network(address, int(tail) + (V4_BITS if four else 0))


def network(address: Address, length: int) -> Network:
    """The network of `length` bits (of 128) that `address` is in."""
    bits = int.from_bytes(address) >> (128 - length) << (128 - length)
    return Network(Address(bits.to_bytes(16)), length)


def contains(net: Network, address: Address) -> bool:
    return network(address, net.length).address == net.address


def family(address: Address) -> Family:
    return Family.IPV4 if address[:12] == V4_PREFIX else Family.IPV6


def network_family(net: Network) -> Family:
    return Family.IPV4 if net.length >= V4_BITS and net.address[:12] == V4_PREFIX else Family.IPV6


def unspecified(of: Family) -> Address:
    """0.0.0.0 or ::, which stands for "any local address" in the frontend of a NodePort."""
    return _UNSPECIFIED[of]


def is_unspecified(address: Address) -> bool:
    return address in _UNSPECIFIED.values()


def loopback(of: Family) -> Address:
    """127.0.0.1 or ::1."""
    return _LOOPBACK[of]


def is_loopback(address: Address) -> bool:
    """In 127.0.0.0/8, or ::1."""
    return address[:13] == _LOOPBACK[Family.IPV4][:13] or address == _LOOPBACK[Family.IPV6]


def format_address(address: Address) -> str:
    """As text: dotted for IPv4, RFC 5952 for IPv6."""
    if family(address) is Family.IPV4:
        return socket.inet_ntop(socket.AF_INET, address[12:])
    return socket.inet_ntop(socket.AF_INET6, address)


def format_network(net: Network) -> str:
    if network_family(net) is Family.IPV4:
        return f"{format_address(net.address)}/{net.length - V4_BITS}"
    return f"{socket.inet_ntop(socket.AF_INET6, net.address)}/{net.length}"


def format_endpoint(address: Address, port: int) -> str:
    """``10.0.0.1:80`` or ``[fd00::1]:80``."""
    text = format_address(address)
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"
