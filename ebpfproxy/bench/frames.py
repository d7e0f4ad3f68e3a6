"""Ethernet frames with TCP or UDP in them, for test runs. Pure."""

import struct
from socket import IPPROTO_TCP, IPPROTO_UDP
from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, family

HERE = "02:00:00:00:00:02"
"""The Ethernet address that frames are sent to; a device that has another one overhears them."""

_ETHERNET = bytes.fromhex(HERE.replace(":", "") + "020000000001")
_PAYLOAD = b"x" * 100
_ACK, _SYN = 0x10, 0x02


class Tuple(NamedTuple):
    """Source and destination; ports are numbers."""

    source: Address
    source_port: int
    destination: Address
    destination_port: int


def frame(ends: Tuple, protocol: int, *, syn: bool = False) -> bytes:
    """A frame with 100 bytes of payload and right checksums; of TCP with ACK, or SYN alone."""
    payload = _transport(ends, protocol, _SYN if syn else _ACK)
    if family(ends.source) is Family.IPV4:
        addresses = ends.source[12:] + ends.destination[12:]
        total = 20 + len(payload)
        plain = struct.pack("!BBHHHBBH", 0x45, 0, total, 1, 0, 64, protocol, 0) + addresses
        header = plain[:10] + struct.pack("!H", _checksum(plain)) + plain[12:]
        return _ETHERNET + b"\x08\x00" + header + payload
    header = struct.pack("!IHBB", 6 << 28, len(payload), protocol, 64) + ends.source + ends.destination
    return _ETHERNET + b"\x86\xdd" + header + payload


def tuple_of(raw: bytes) -> bytes:
    """Addresses and ports of such a frame, as they are there."""
    start, ports = (26, 34) if raw[12:14] == b"\x08\x00" else (22, 54)
    return raw[start : ports + 4]


def _transport(ends: Tuple, protocol: int, flags: int) -> bytes:
    ports = ends.source_port, ends.destination_port
    if protocol == IPPROTO_TCP:
        at, plain = 16, struct.pack("!HHIIBBHHH", *ports, 1, 1, 5 << 4, flags, 1024, 0, 0) + _PAYLOAD
    else:
        assert protocol == IPPROTO_UDP
        at, plain = 6, struct.pack("!HHHH", *ports, 8 + len(_PAYLOAD), 0) + _PAYLOAD
    four = family(ends.source) is Family.IPV4
    addresses = ends.source[12:] + ends.destination[12:] if four else ends.source + ends.destination
    pseudo = addresses + struct.pack("!II", len(plain), protocol)
    return plain[:at] + struct.pack("!H", _checksum(pseudo + plain)) + plain[at + 2 :]


def _checksum(raw: bytes) -> int:
    """RFC 1071; of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(raw) // 2}H", raw))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
