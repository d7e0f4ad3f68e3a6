"""The packets of a client outside: frames that a device receives, and what is sent back. Pure."""

import struct
from typing import NamedTuple

from ebpfproxy.linux.checksum import internet_checksum
from ebpfproxy.model.address import V4_PREFIX, Address, Family, Protocol, family, in_header

SYN, RST, ACK = 2, 4, 16

_ICMP = {Family.IPV4: (1, 3), Family.IPV6: (58, 1)}
"""The protocol of ICMP, and its type for an unreachable destination."""
_ETHERNET_SOURCE = bytes.fromhex("02eb9f000001")  # locally administered
_ETHERTYPES = {Family.IPV4: 0x0800, Family.IPV6: 0x86DD}
_TTL, _WINDOW = 64, 65535
_TCP, _UDP = struct.Struct(">HHIIBBHHH"), struct.Struct(">HHHH")


class Conversation(NamedTuple):
    """Both ends of a connection, as the client has them. Ports in host order."""

    protocol: Protocol
    client: Address
    client_port: int
    server: Address
    server_port: int


class Answer(NamedTuple):
    """A packet to the client. `flags`, `sequence` and `acknowledged` are 0 without TCP.

    `unreachable`: it is an ICMP error; `source` is then who sent it, and `port` 0.
    """

    source: Address
    port: int
    flags: int = 0
    sequence: int = 0
    acknowledged: int = 0
    unreachable: bool = False


def frame(
    of: Conversation, hardware: bytes, flags: int = 0, sequence: int = 0, acknowledged: int = 0
) -> bytes:
    """Return a frame from the client to the server without payload. `hardware`: the device's MAC address."""
    version = family(of.client)
    ports = of.client_port, of.server_port
    if of.protocol is Protocol.TCP:
        layout, fields, at = _TCP, [*ports, sequence, acknowledged, 5 << 4, flags, _WINDOW, 0, 0], 7
    else:
        layout, fields, at = _UDP, [*ports, _UDP.size, 0], 3
    pseudo = in_header(of.client) + in_header(of.server) + struct.pack(">HH", of.protocol, layout.size)
    fields[at] = internet_checksum(pseudo + layout.pack(*fields)) or 0xFFFF
    return (
        hardware
        + _ETHERNET_SOURCE
        + _ETHERTYPES[version].to_bytes(2)
        + _ip_header(of, version, layout.size)
        + layout.pack(*fields)
    )


def answer(packet: bytes, of: Conversation) -> Answer | None:
    """Return the answer in a packet (from the IP header on); None if it is no answer to the client's port."""
    version = family(of.client)
    if version is Family.IPV4:
        if len(packet) < 20:
            return None
        kind, size = packet[9], (packet[0] & 15) * 4
        source = Address(V4_PREFIX + packet[12:16])
    else:
        if len(packet) < 40:
            return None
        kind, size, source = packet[6], 40, Address(packet[8:24])
    rest = packet[size:]
    icmp, unreachable = _ICMP[version]
    if kind == icmp:
        quoted = rest[8 + (20 if version is Family.IPV4 else 40) :]
        is_own = len(quoted) >= 2 and int.from_bytes(quoted[:2]) == of.client_port
        return Answer(source, 0, unreachable=True) if rest[:1] == bytes([unreachable]) and is_own else None
    is_tcp = of.protocol is Protocol.TCP
    if kind != of.protocol or len(rest) < (_TCP.size if is_tcp else _UDP.size):
        return None
    port, to_port = struct.unpack_from(">HH", rest)
    if to_port != of.client_port:
        return None
    if not is_tcp:
        return Answer(source, port)
    _, _, sequence, acknowledged, _, flags, *_ = _TCP.unpack_from(rest)
    return Answer(source, port, flags, sequence, acknowledged)


def _ip_header(of: Conversation, version: Family, size: int) -> bytes:
    ends = in_header(of.client) + in_header(of.server)
    if version is Family.IPV6:
        return struct.pack(">IHBB", 6 << 28, size, of.protocol, _TTL) + ends
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + size, 0, 0x4000, _TTL, of.protocol, 0)
    return head[:10] + internet_checksum(head + ends).to_bytes(2) + ends
