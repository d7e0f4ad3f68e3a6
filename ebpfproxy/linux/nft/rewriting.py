"""Statements that exchange the ports of packets without connection tracking.

The other port of a port has the opposite highest bit: 443 and 33211. So a set of ports is enough to rewrite
packets in both directions, and no two ports have the same other port.
"""

from typing import NamedTuple

from ebpfproxy.linux.nft.expressions import (
    Base,
    Bitwise,
    Compare,
    Comparison,
    Expression,
    Lookup,
    Meta,
    MetaKey,
    Payload,
    SetPayload,
)

PORT_BIT = 0x8000
_PORT, _MASK, _BIT = 2, b"\xff\xff", PORT_BIT.to_bytes(2)
_WORD = 4  # bytes of a slot
_ICMP_HEADER = 8
_UDP_CHECKSUM = 6  # its offset


class End(NamedTuple):
    """Where a packet has the protocol, the address and the port of one of its ends."""

    text: str
    protocol: Payload | Meta
    address: Payload
    port: Payload


def end(family: str, side: str) -> End:
    """Return one end of a packet. `family` is "ip" or "ip6", `side` is "saddr" or "daddr"."""
    offset, length = _ADDRESSES[family, side]
    return End(
        f"meta l4proto . {family} {side} . th {_PORTS[side]}",
        Meta(0, MetaKey.PROTOCOL),
        Payload(1, Base.NETWORK, offset, length),
        Payload(1 + length // _WORD, Base.TRANSPORT, _PORT_OFFSETS[side], _PORT),
    )


def source_in_icmp_error(family: str) -> End:
    """Return the source of the packet that an ICMP error quotes. IPv4 options are not supported."""
    protocol, header = (9, 20) if family == "ip" else (6, 40)
    offset, length = _ADDRESSES[family, "saddr"]
    return End(
        "source in icmp error",
        Payload(0, Base.TRANSPORT, _ICMP_HEADER + protocol, 1),
        Payload(1, Base.TRANSPORT, _ICMP_HEADER + offset, length),
        Payload(1 + length // _WORD, Base.TRANSPORT, _ICMP_HEADER + header, _PORT),
    )


_ADDRESSES = {
    ("ip", "saddr"): (12, 4),
    ("ip", "daddr"): (16, 4),
    ("ip6", "saddr"): (8, 16),
    ("ip6", "daddr"): (24, 16),
}
_PORTS = {"saddr": "sport", "daddr": "dport"}
_PORT_OFFSETS = {"saddr": 0, "daddr": 2}


class HasPort(NamedTuple):
    """Continue if a set has protocol, address and port of an end; with `other`, protocol, address and the
    other port.
    """

    end: End
    container: str
    other: bool = False

    def __str__(self) -> str:
        return f"{self.end.text}{f' ^ {PORT_BIT:#x}' if self.other else ''} @{self.container}"

    def expressions(self) -> tuple[Expression, ...]:
        slot = self.end.port.slot
        other = (Bitwise(slot, slot, _MASK, _BIT),) if self.other else ()
        return self.end.protocol, self.end.address, self.end.port, *other, Lookup(self.container, 0)


class ExchangePort(NamedTuple):
    """Write the other port. `checksum`: the offset of the checksum in the transport header, None without."""

    end: End
    checksum: int | None

    def __str__(self) -> str:
        port = self.end.port
        checksum = "" if self.checksum is None else f" checksum at {self.checksum}"
        return f"@th,{8 * port.offset},16 set @th,{8 * port.offset},16 ^ {PORT_BIT:#x}{checksum}"

    def expressions(self) -> tuple[Expression, ...]:
        load = self.end.port._replace(slot=0)
        write = SetPayload(0, load.base, load.offset, load.length, self.checksum)
        return load, Bitwise(0, 0, _MASK, _BIT), write


class WithoutUdpChecksum(NamedTuple):
    """Continue if a UDP datagram has no checksum, which IPv4 permits."""

    def __str__(self) -> str:
        return "udp checksum 0"

    def expressions(self) -> tuple[Expression, ...]:
        return Payload(0, Base.TRANSPORT, _UDP_CHECKSUM, 2), Compare(0, Comparison.EQUAL, bytes(2))


class IcmpError(NamedTuple):
    """Continue if an ICMP packet is an error: destination unreachable, or in IPv6 any error."""

    family: str

    def __str__(self) -> str:
        return "icmp type destination-unreachable" if self.family == "ip" else "icmpv6 type < 128"

    def expressions(self) -> tuple[Expression, ...]:
        how, number = (Comparison.EQUAL, 3) if self.family == "ip" else (Comparison.LESS, 128)
        return Payload(0, Base.TRANSPORT, 0, 1), Compare(0, how, bytes((number,)))
