"""Data types of nf_tables: conversion of values between nft's text and the kernel's bytes.

The kernel knows only lengths. The numbers of types are for programs that list tables (enum datatypes of
include/datatype.h of nftables). Values are in network byte order unless stated otherwise.
"""

import functools
import ipaddress
import re
import socket
import sys
from collections.abc import Callable
from typing import Literal, NamedTuple

IFNAMSIZ = 16
_REGISTER = 4  # bytes to which each part of a concatenation is padded


class Datatype(NamedTuple):
    """A data type. `number` is that of nftables, `length` is in bytes.

    `parse` and `text` convert one value from and to text. `parse` raises ValueError. Types whose values are
    only in rules need no `text`.
    """

    name: str
    number: int
    length: int
    parse: Callable[[str], bytes]
    text: Callable[[bytes], str] = bytes.hex


_PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132}
_PROTOCOL_NAMES = {number: name for name, number in _PROTOCOLS.items()}


def _parse_address(family: int) -> Callable[[str], bytes]:
    def parse(text: str) -> bytes:
        try:
            return socket.inet_pton(family, text)
        except OSError:
            raise ValueError(f"{text!r} is not an address") from None

    return parse


def address_text(value: bytes) -> str:
    """The text of an address of 4 or 16 bytes."""
    return socket.inet_ntop(socket.AF_INET if len(value) == 4 else socket.AF_INET6, value)


def _number(length: int, order: Literal["big", "little"], **names: int) -> Callable[[str], bytes]:
    def parse(text: str) -> bytes:
        number = names[text] if text in names else int(text, 0)
        try:
            return number.to_bytes(length, order)
        except OverflowError:
            raise ValueError(f"{number} does not fit into {length} bytes") from None

    return parse


def _parse_device(text: str) -> bytes:
    """The name with its padding. Of a name with a final asterisk only the part before it, without padding."""
    found = re.fullmatch(r'"([^"]{1,15})"', text)
    if not found:
        raise ValueError(f"{text} is not a quoted device name")
    name = found[1].encode()
    return name[:-1] if name.endswith(b"*") else name.ljust(IFNAMSIZ, b"\0")


IPV4 = Datatype("ipv4_addr", 7, 4, _parse_address(socket.AF_INET), address_text)
IPV6 = Datatype("ipv6_addr", 8, 16, _parse_address(socket.AF_INET6), address_text)
PROTOCOL = Datatype(
    "inet_proto",
    12,
    1,
    _number(1, "big", **_PROTOCOLS),
    lambda value: _PROTOCOL_NAMES.get(value[0], str(value[0])),
)
PORT = Datatype("inet_service", 13, 2, _number(2, "big"), lambda value: str(int.from_bytes(value)))
INTEGER = Datatype("integer", 4, 4, _number(4, sys.byteorder))
MARK = Datatype(
    "mark",
    19,
    4,
    _number(4, sys.byteorder),
    lambda value: f"0x{int.from_bytes(value, sys.byteorder):08x}",
)
STATE = Datatype("ct_state", 26, 4, _number(4, sys.byteorder, established=2, related=4, new=8))
STATUS = Datatype("ct_status", 28, 4, _number(4, sys.byteorder, snat=16, dnat=32))  # IPS_*
ADDRESS_TYPE = Datatype("fib_addrtype", 33, 4, _number(4, sys.byteorder, unicast=1, local=2))  # RTN_*
DEVICE = Datatype("ifname", 41, IFNAMSIZ, _parse_device)


@functools.cache
def raw(length: int) -> Datatype:
    """The type of bytes of a packet."""
    return Datatype("integer", 4, length, _number(length, "big"))


BITS = (STATE, STATUS)
"""The types whose values are single bits, of which several can be set."""

IN_SETS = {each.name: each for each in (IPV4, IPV6, PROTOCOL, PORT, MARK)}
_BY_NUMBER = {each.number: each for each in IN_SETS.values()}

Key = tuple[Datatype, ...]
"""The types of a set's key. Several types are a concatenation."""


def key_length(key: Key) -> int:
    """The length of a key in bytes. Parts of a concatenation are padded, a single type is not."""
    return key[0].length if len(key) == 1 else sum(map(padded, key))


def padded(of: Datatype) -> int:
    return -(-of.length // _REGISTER) * _REGISTER


def key_number(key: Key) -> int:
    """The number of a key. That of a concatenation has six bits for each part (TYPE_BITS)."""
    number = 0
    for part in key:
        number = number << 6 | part.number
    return number


def key_of_number(number: int) -> Key | None:
    """The key with this number; None if it has an unknown type."""
    parts: list[Datatype] = []
    while number:
        if number & 63 not in _BY_NUMBER:
            return None
        parts.insert(0, _BY_NUMBER[number & 63])
        number >>= 6
    return tuple(parts) or None


def parse_key(key: Key, text: str) -> bytes:
    """
    >>> parse_key((PROTOCOL, PORT), "tcp . 80").hex(" ", 4)
    '06000000 00500000'

    Raises ValueError.
    """
    texts = text.split(" . ")
    if len(texts) != len(key):
        raise ValueError(f"{text!r} has {len(texts)} parts instead of {len(key)}")
    if len(key) == 1:
        return key[0].parse(text)
    return b"".join(
        part.parse(each).ljust(padded(part), b"\0") for part, each in zip(key, texts, strict=True)
    )


def key_text(key: Key, value: bytes) -> str:
    """The text that `parse_key` reads."""
    texts = []
    for part in key:
        texts.append(part.text(value[: part.length]))
        value = value[padded(part) :]
    return " . ".join(texts)


# Ranges of addresses


class Interval(NamedTuple):
    """All values from `first` to `last` inclusive, which have the same length."""

    first: bytes
    last: bytes


@functools.lru_cache(maxsize=256)
def parse_interval(of: Datatype, text: str) -> Interval:
    """A value, a prefix, or both ends of a range. Raises ValueError.

    >>> parse_interval(IPV4, "10.0.0.0/24").last.hex()
    '0a0000ff'
    """
    if "/" in text:
        network = ipaddress.ip_network(text)
        if network.max_prefixlen != 8 * of.length:
            raise ValueError(f"{text!r} belongs to the other family")
        return Interval(network.network_address.packed, network.broadcast_address.packed)
    first, dash, last = text.partition("-")
    start = of.parse(first)
    return Interval(start, of.parse(last) if dash else start)


def interval_text(of: Datatype, interval: Interval) -> str:
    """The text of an interval: a single value, a prefix if possible, else both ends."""
    if interval.first == interval.last:
        return of.text(interval.first)
    length = prefix_length(interval)
    if length is None:
        return f"{of.text(interval.first)}-{of.text(interval.last)}"
    return f"{of.text(interval.first)}/{length}"


def prefix_length(interval: Interval) -> int | None:
    """The prefix length of an interval; None if it is not a prefix."""
    bits = 8 * len(interval.first)
    first = int.from_bytes(interval.first)
    size = int.from_bytes(interval.last) - first + 1
    if size.bit_count() != 1 or first % size:
        return None
    return bits + 1 - size.bit_length()
