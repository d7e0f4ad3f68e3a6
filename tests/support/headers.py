"""Parses Ethernet frames, independently of bpf/packet.h and, except for the CRC of SCTP, of scapy.

Addresses are the 16 bytes of `Address`; ports are in host byte order.
"""

import struct
from typing import NamedTuple

from scapy.layers.sctp import crc32c

from ebpfproxy.model.address import V4_PREFIX, Address

TCP, UDP, SCTP, ICMP, ICMPV6 = 6, 17, 132, 1, 58
IPV4, IPV6 = 0x0800, 0x86DD
ETHERNET = 14
MOST_EXTENSIONS = 6

_HOP_BY_HOP, _ROUTING, _FRAGMENT, _OPTIONS = 0, 43, 44, 60
_PORTS = struct.Struct("!HH")
_SIZES = {TCP: 20, UDP: 8, SCTP: 12}
_CHECKSUMS = {TCP: 16, UDP: 6, ICMP: 2, ICMPV6: 2}
_CRC = 8
_ERRORS = {ICMP: frozenset({3, 11, 12}), ICMPV6: frozenset(range(1, 128))}


class Tuple(NamedTuple):
    """The key of a flow. Ports are 0 for protocols without ports."""

    source: Address
    destination: Address
    source_port: int
    destination_port: int
    protocol: int

    def reversed(self) -> "Tuple":
        return Tuple(self.destination, self.source, self.destination_port, self.source_port, self.protocol)


class Headers(NamedTuple):
    """Offsets from the frame's start. `fragment`: "", "first" or "later". `end`: the end of the IP packet by
    its length field; a packet quoted by an ICMP error may be shorter.
    """

    version: int
    l3: int
    l4: int
    end: int
    tuple: Tuple
    fragment: str

    @property
    def protocol(self) -> int:
        return self.tuple.protocol

    @property
    def has_ports(self) -> bool:
        return self.protocol in _SIZES and self.fragment != "later"


def read(frame: bytes) -> Headers | None:
    """The headers; None unless it is an IP packet with complete headers and not too many extension
    headers."""
    kind = int.from_bytes(frame[12:14])
    if kind == IPV4:
        return _read4(frame, ETHERNET, _SIZES)
    return _read6(frame, ETHERNET, _SIZES) if kind == IPV6 else None


def quoted(frame: bytes, headers: Headers) -> Headers | None:
    """The packet that an ICMP error quotes; its transport header may be truncated after the ports."""
    if headers.protocol not in _ERRORS or headers.fragment == "later" or len(frame) < headers.l4 + 8:
        return None
    if frame[headers.l4] not in _ERRORS[headers.protocol]:
        return None
    at, sizes = headers.l4 + 8, dict.fromkeys(_SIZES, 4)
    found = _read4(frame, at, sizes) if headers.version == 4 else _read6(frame, at, sizes)
    return found if found and found.has_ports else None


def _read4(frame: bytes, l3: int, sizes: dict[int, int]) -> Headers | None:
    header = frame[l3 : l3 + 20]
    if len(header) < 20 or header[0] >> 4 != 4 or header[0] & 15 < 5:
        return None
    l4, end = l3 + (header[0] & 15) * 4, l3 + int.from_bytes(header[2:4])
    offset = int.from_bytes(header[6:8])
    fragment = "later" if offset & 0x1FFF else "first" if offset & 0x2000 else ""
    source, destination = Address(V4_PREFIX + header[12:16]), Address(V4_PREFIX + header[16:20])
    return _with_ports(frame, 4, l3, l4, end, source, destination, header[9], fragment, sizes)


def _read6(frame: bytes, l3: int, sizes: dict[int, int]) -> Headers | None:
    header = frame[l3 : l3 + 40]
    if len(header) < 40 or header[0] >> 4 != 6:
        return None
    end = l3 + 40 + int.from_bytes(header[4:6])
    source, destination = Address(header[8:24]), Address(header[24:40])
    if V4_PREFIX in (source[:12], destination[:12]):
        return None
    following, l4, fragment = header[6], l3 + 40, ""
    for _ in range(MOST_EXTENSIONS + 1):
        if following not in (_HOP_BY_HOP, _ROUTING, _FRAGMENT, _OPTIONS):
            return _with_ports(frame, 6, l3, l4, end, source, destination, following, fragment, sizes)
        if len(frame) < l4 + 8:
            return None
        size = 8
        if following == _FRAGMENT:
            offset = int.from_bytes(frame[l4 + 2 : l4 + 4])
            fragment = "later" if offset & 0xFFF8 else "first" if offset & 1 else fragment
        else:
            size = (frame[l4 + 1] + 1) * 8
        following, l4 = frame[l4], l4 + size
        if fragment == "later":
            return _with_ports(frame, 6, l3, l4, end, source, destination, following, fragment, sizes)
    return None


def _with_ports(
    frame: bytes,
    version: int,
    l3: int,
    l4: int,
    end: int,
    source: Address,
    destination: Address,
    protocol: int,
    fragment: str,
    sizes: dict[int, int],
) -> Headers | None:
    ports = 0, 0
    if protocol in sizes and fragment != "later":
        if len(frame) < l4 + sizes[protocol]:
            return None
        ports = _PORTS.unpack_from(frame, l4)
    known = Tuple(source, destination, *ports, protocol)
    return Headers(version, l3, l4, end, known, fragment)


def total(data: bytes) -> int:
    """The sum of all 16-bit words modulo 65535 (RFC 1071): 0 for data with a valid checksum."""
    return int.from_bytes(data + b"\0" if len(data) % 2 else data) % 65535


class Parts(NamedTuple):
    """A packet, and the packet that it quotes if it is an ICMP error."""

    outer: Headers
    inner: Headers | None


def parts(frame: bytes) -> Parts:
    """Raises AssertionError if `read` returns None."""
    outer = read(frame)
    assert outer, "not an IP packet with complete headers"
    return Parts(outer, quoted(frame, outer))


def defects(frame: bytes, of: Parts) -> tuple[int, ...]:
    """The error of each checksum: of IPv4, of the transport, and both of a quoted packet.

    A translation changes none of them, also in truncated packets. 0 is a valid checksum if the packet is
    neither a fragment nor truncated. UDP without a checksum has none. A quoted packet ends with the packet
    around it: padding follows.
    """
    return _defects(frame, of.outer) + (_defects(frame[: of.outer.end], of.inner) if of.inner else ())


def _defects(frame: bytes, of: Headers) -> tuple[int, ...]:
    header = (total(frame[of.l3 : min(of.l4, len(frame))]),) if of.version == 4 else ()
    at = of.l4 + _CHECKSUMS.get(of.protocol, 0)
    if of.protocol == SCTP and of.has_ports:
        return (*header, *_crc_defect(frame, of))
    if of.protocol not in _CHECKSUMS or of.fragment == "later" or len(frame) < at + 2:
        return header
    if of.protocol == UDP and frame[at : at + 2] == b"\0\0":
        return header
    return (*header, _transport_defect(frame, of))


def is_good(frame: bytes) -> bool:
    """Whether all checksums of a complete packet are valid; for a quoted packet, those that can be
    computed."""
    outer, inner = parts(frame)
    found = _defects(frame, outer)
    if inner:
        own = _defects(frame, inner)
        found += own[: inner.version == 4] if inner.end > outer.end else own
    return not any(found)


def _transport_defect(frame: bytes, headers: Headers) -> int:
    least = headers.l4 + _CHECKSUMS[headers.protocol] + 2  # otherwise the length contradicts the headers
    data = frame[headers.l4 : headers.end if headers.end >= least else len(frame)]
    if headers.protocol == ICMP:
        return total(data)
    # The pseudo header (RFC 9293, 3.1; RFC 8200, 8.1); ::ffff:0:0/96 adds 0xffff, which equals 0.
    pseudo = total(headers.tuple.source + headers.tuple.destination) + headers.protocol
    return (pseudo + headers.end - headers.l4 + total(data)) % 65535


def _crc_defect(frame: bytes, headers: Headers) -> tuple[int, ...]:
    """Empty if the CRC is missing in a truncated packet, or if the length contradicts the headers."""
    at = headers.l4 + _CRC
    if len(frame) < at + 4 or headers.end < at + 4:
        return ()
    return (int.from_bytes(frame[at : at + 4]) ^ crc_of(frame, headers),)


def crc_of(frame: bytes, headers: Headers) -> int:
    """The correct CRC of an SCTP packet (RFC 9260, 6.8), in the byte order of the field. A truncated packet
    ends with zeros."""
    at = headers.l4 + _CRC
    data = frame[headers.l4 : at] + bytes(4) + frame[at + 4 : headers.end]
    found: int = crc32c(data.ljust(headers.end - headers.l4, b"\0"))  # type: ignore[no-untyped-call]
    return found


def without_translated_fields(frame: bytes, of: Parts) -> bytes:
    """The frame with addresses, ports and their checksums blanked: a translation changes nothing else."""
    kept = bytearray(frame)
    for each in of:
        if each:
            _blank(kept, each)
    return bytes(kept)


def _blank(kept: bytearray, headers: Headers) -> None:
    if headers.version == 4:
        _clear(kept, headers.l3 + 10, 10)
    else:
        _clear(kept, headers.l3 + 8, 32)
    if headers.fragment == "later":
        return
    if headers.has_ports:
        _clear(kept, headers.l4, 4)
    if headers.protocol == SCTP:
        _clear(kept, headers.l4 + _CRC, 4)
    if headers.protocol in _CHECKSUMS:
        _clear(kept, headers.l4 + _CHECKSUMS[headers.protocol], 2)


def _clear(kept: bytearray, at: int, size: int) -> None:
    end = min(at + size, len(kept))
    if at < end:
        kept[at:end] = bytes(end - at)
