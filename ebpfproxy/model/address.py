"""IP addresses and networks: one type for both families.

An `Address` is 16 bytes in network order. IPv4 a.b.c.d is the IPv4-mapped address ::ffff:a.b.c.d
(RFC 4291 2.5.5.2). The BPF maps contain the same 16 bytes, so an address is parsed once and never converted
again.
"""

import enum
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple, NewType

Address = NewType("Address", bytes)

V4_PREFIX = bytes(10) + b"\xff\xff"
V4_BITS = 96
"""The length of `V4_PREFIX` in bits. An IPv4 /24 is a `Network` of length 120."""


class Family(enum.Enum):
    """IPv4 or IPv6, named as in EndpointSlice.addressType and Service.spec.ipFamilies."""

    IPV4 = "IPv4"
    IPV6 = "IPv6"

    __hash__ = object.__hash__  # faster than Enum.__hash__, which is written in Python


class Protocol(enum.IntEnum):
    """A transport protocol: the value is the kernel's (IPPROTO_*), the name is the API's."""

    TCP = socket.IPPROTO_TCP
    UDP = socket.IPPROTO_UDP
    SCTP = socket.IPPROTO_SCTP

    __hash__ = int.__hash__  # a member equals its number, so their hashes must be equal


def protocol_name(number: int) -> str:
    """Return the API's name of a protocol, or the number as text if the API has no name for it.

    >>> protocol_name(17), protocol_name(1)
    ('UDP', '1')
    """
    return Protocol(number).name if number in _PROTOCOLS else str(number)


_PROTOCOLS = frozenset(map(int, Protocol))


class Network(NamedTuple):
    """A prefix of `length` bits, 0 to 128. An IPv4 /n has length 96 + n. Host bits are zero."""

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
    """Parse an address as kube-proxy does (ParseIPSloppy).

    IPv4 octets are decimal and may have leading zeros.

    >>> parse_address("172.30.0.041") == parse_address("172.30.0.41")
    True

    Raises ValueError for anything else, including an address with a zone (``fe80::1%eth0``).
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
    """Parse a CIDR as kube-proxy does: strip surrounding blanks and clear host bits.

    >>> format_network(parse_network(" 10.1.2.3/8"))
    '10.0.0.0/8'

    Raises ValueError.
    """
    prefix, slash, bits = text.strip().partition("/")
    if not slash:
        raise ValueError(f"{text!r} is not a CIDR")
    address = parse_address(prefix)
    is_v4 = family(address) is Family.IPV4 and ":" not in prefix
    if not re.fullmatch(r"[0-9]{1,3}", bits, re.ASCII) or int(bits) > (32 if is_v4 else 128):
        raise ValueError(f"{text!r} is not a CIDR")
    return network(address, int(bits) + (V4_BITS if is_v4 else 0))


def network(address: Address, length: int) -> Network:
    """Return the network of `length` bits (of 128) that contains `address`."""
    bits = int.from_bytes(address) >> (128 - length) << (128 - length)
    return Network(Address(bits.to_bytes(16)), length)


def common_network(networks: Iterable[Network]) -> Network:
    """Return the smallest network that contains all of `networks`, which are not empty.

    >>> format_network(common_network(map(parse_network, ["10.96.0.0/16", "10.98.0.0/16"])))
    '10.96.0.0/14'
    """
    first, *others = networks
    length = first.length
    for each in others:
        differing = int.from_bytes(first.address) ^ int.from_bytes(each.address)
        length = min(length, each.length, 128 - differing.bit_length())
    return network(first.address, length)


def contains(net: Network, address: Address) -> bool:
    """Return whether `address` is in `net`."""
    return network(address, net.length).address == net.address


def family(address: Address) -> Family:
    """Return the family of an address; an IPv4-mapped address is IPv4."""
    return Family.IPV4 if address[:12] == V4_PREFIX else Family.IPV6


def network_family(net: Network) -> Family:
    """Return the family of a network; one that is shorter than the IPv4-mapped prefix is IPv6."""
    return Family.IPV4 if net.length >= V4_BITS and net.address[:12] == V4_PREFIX else Family.IPV6


def unspecified(ip_family: Family) -> Address:
    """Return 0.0.0.0 or ::, which means "any local address" in the frontend of a NodePort."""
    return _UNSPECIFIED[ip_family]


def is_unspecified(address: Address) -> bool:
    """Return whether `address` is 0.0.0.0 or ::."""
    return address in _UNSPECIFIED.values()


def loopback(ip_family: Family) -> Address:
    """Return 127.0.0.1 or ::1."""
    return _LOOPBACK[ip_family]


def is_loopback(address: Address) -> bool:
    """Return whether `address` is in 127.0.0.0/8, or is ::1."""
    return address[:13] == _LOOPBACK[Family.IPV4][:13] or address == _LOOPBACK[Family.IPV6]


def format_address(address: Address) -> str:
    """Return `address` as text: dotted decimal for IPv4, RFC 5952 for IPv6."""
    if family(address) is Family.IPV4:
        return socket.inet_ntop(socket.AF_INET, address[12:])
    return socket.inet_ntop(socket.AF_INET6, address)


def format_network(net: Network) -> str:
    """Return `net` in CIDR notation of its family."""
    if network_family(net) is Family.IPV4:
        return f"{format_address(net.address)}/{net.length - V4_BITS}"
    return f"{socket.inet_ntop(socket.AF_INET6, net.address)}/{net.length}"


def format_endpoint(address: Address, port: int) -> str:
    """Return ``10.0.0.1:80`` or ``[fd00::1]:80``."""
    text = format_address(address)
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"


def parse_endpoint(text: str) -> tuple[Address, int]:
    """Parse what `format_endpoint` returns. Raises ValueError.

    >>> format_endpoint(*parse_endpoint("[fd00::1]:80"))
    '[fd00::1]:80'
    """
    address, _, port = text.rpartition(":")
    return parse_address(address.strip("[]")), int(port)


def in_header(address: Address) -> bytes:
    """Return the 4 or 16 bytes that an IP header has."""
    return address[len(V4_PREFIX) :] if family(address) is Family.IPV4 else address
