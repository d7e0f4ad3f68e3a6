"""Generates millions of packets: complete ones created by scapy, then damaged as bytes.

One in 16 is a complete packet for a Service with a random client and port. One in 16 is a reply to such a
client, or an ICMP error about a packet passed to `remember`. A third are damaged packets of all kinds. The
others belong to no Service: similar addresses, unusual packets and noise. All are determined by the seed.
"""

import functools
import random
import struct
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_NOP, IPOption_Router_Alert
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6ND_NS,
    ICMPv6PacketTooBig,
    ICMPv6TimeExceeded,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import ARP, Dot1Q, Ether
from scapy.layers.sctp import SCTP, SCTPChunkInit
from scapy.packet import Packet, Raw

from tests.support import headers
from tests.support.headers import Headers
from tests.support.packets import HERE, THERE, ip, ping

CLIENTS, PORTS = 32, 64
"""The number of clients, and of ports for each client."""

_PAYLOADS = (0, 1, 7, 64, 533)
_POOL = 2048
_WORD = struct.Struct("!H")


class Target(NamedTuple):
    """A destination. `protocol`: headers.TCP, UDP or SCTP."""

    address: str
    port: int
    protocol: int


class _Complete(NamedTuple):
    """A complete packet whose source can be replaced, and the offsets to change for that."""

    frame: bytes
    source: int
    """The last two bytes of the address."""
    port: int
    checksums: tuple[int, ...]
    """Offsets of the checksums that cover the address."""
    port_checksums: tuple[int, ...]
    sctp: Headers | None
    """The CRC covers the port."""


class RandomPackets:
    """`make()` returns the next packet."""

    def __init__(self, seed: int, services: Sequence[Target], others: Sequence[Target]) -> None:
        """`others` are destinations similar to Services."""
        self._random = random.Random(seed)
        self._complete, self._without_service = _pools(tuple(services), tuple(others))
        self._about: list[bytes] = []
        makers: tuple[tuple[int, Callable[[], bytes]], ...] = (
            (2, self.for_service),
            (2, self._about_flow),
            (14, self._for_no_service),
            (6, self._flipped),
            (3, self._shortened),
            (2, self._lengthened),
            (3, self._noise),
        )
        self._makers = [maker for weight, maker in makers for _ in range(weight)]

    def make(self) -> bytes:
        """The next frame, not shorter than the kernel allows: the Ethernet header and the IP header that it
        announces."""
        frame = self._makers[int(self._random.random() * len(self._makers))]()
        least = _LEAST.get(frame[12:14], 14)
        return frame if len(frame) >= least else frame + bytes(least - len(frame))

    def remember(self, forwarded: bytes) -> None:
        """Record a packet that was forwarded. Later packets may be answers to it, or errors about it."""
        answers = _answers(forwarded)
        if len(self._about) < _POOL:
            self._about += answers
        else:
            for answer in answers:
                self._about[int(self._random.random() * _POOL)] = answer

    def _pick(self, frames: list[bytes]) -> bytes:
        return frames[int(self._random.random() * len(frames))]

    def for_service(self) -> bytes:
        """A complete packet with valid checksums."""
        complete = self._complete[int(self._random.random() * len(self._complete))]
        address = int(self._random.random() * CLIENTS) + 1
        port = 20000 + int(self._random.random() * PORTS)
        frame = bytearray(complete.frame)
        before = _WORD.unpack_from(frame, complete.source)[0], _WORD.unpack_from(frame, complete.port)[0]
        _WORD.pack_into(frame, complete.source, address)
        _WORD.pack_into(frame, complete.port, port)
        for at in complete.checksums:
            _adjust(frame, at, address - before[0])
        for at in complete.port_checksums:
            _adjust(frame, at, port - before[1])
        if complete.sctp:
            at = complete.sctp.l4 + 8
            frame[at : at + 4] = headers.crc_of(bytes(frame), complete.sctp).to_bytes(4)
        return bytes(frame)

    def _about_flow(self) -> bytes:
        return self._pick(self._about) if self._about else self.for_service()

    def _for_no_service(self) -> bytes:
        return self._pick(self._without_service)

    def _any(self) -> bytes:
        return self._makers[int(self._random.random() * 18)]()  # one of the first three makers

    def _flipped(self) -> bytes:
        frame = bytearray(self._any())
        for _ in range(1 + int(self._random.random() * 4)):
            # Mostly in headers: payloads have little effect.
            at = int(self._random.random() * min(len(frame), 80))
            frame[at] ^= 1 << int(self._random.random() * 8)
        return bytes(frame)

    def _shortened(self) -> bytes:
        frame = self._any()
        return frame[: 14 + int(self._random.random() * (len(frame) - 14))]

    def _lengthened(self) -> bytes:
        """With bytes after the packet's end, like Ethernet padding."""
        return self._any() + self._random.randbytes(1 + int(self._random.random() * 30))

    def _noise(self) -> bytes:
        kind = (b"\x08\x00\x45", b"\x86\xdd\x60", b"\x08\x06", b"")[int(self._random.random() * 4)]
        return (
            self._random.randbytes(12) + kind + self._random.randbytes(40 + int(self._random.random() * 80))
        )


_LEAST = {b"\x08\x00": 34, b"\x86\xdd": 54}
"""From Linux 6.17 on, a test run rejects shorter frames (6b53d0f3a2a9: "Reject narrower access to the
headers")."""


@functools.cache
def _pools(services: Sequence[Target], others: Sequence[Target]) -> tuple[list[_Complete], list[bytes]]:
    """Complete packets to Services, and packets to no Service. scapy takes seconds to create them."""
    chance = random.Random(1)
    complete = [_complete(packet) for target in services for packet in _to(target, chance)]
    without_service = [bytes(packet) for target in others for packet in _to(target, chance)]
    return complete, without_service + _errors(services, others) + _odd(services)


def _adjust(frame: bytearray, at: int, difference: int) -> None:
    """Update the checksum at `at` after a covered word grew by `difference` (RFC 1624, equation 3)."""
    total = (~_WORD.unpack_from(frame, at)[0] & 0xFFFF) + difference
    _WORD.pack_into(frame, at, ~(total % 65535) & 0xFFFF or 0xFFFF)


def _complete(packet: Packet) -> _Complete:
    frame = bytes(packet)
    found = headers.read(frame)
    assert found
    assert found.has_ports
    at = found.l4 + {headers.TCP: 16, headers.UDP: 6}.get(found.protocol, 0)
    own = (at,) if at != found.l4 and frame[at : at + 2] != b"\0\0" else ()
    sctp = found if found.protocol == headers.SCTP else None
    if found.version == 4:
        return _Complete(frame, found.l3 + 14, found.l4, (found.l3 + 10, *own), own, sctp)
    return _Complete(frame, found.l3 + 22, found.l4, own, own, sctp)


def client_of(address: str) -> str:
    """A client of the same family; others differ in the last two bytes."""
    return "2001:db8:99::7" if ":" in address else "198.51.100.7"


def _transports(target: Target) -> list[Packet]:
    if target.protocol == headers.TCP:
        long = TCP(sport=20000, dport=target.port, options=[("MSS", 1460), ("SAckOK", b"")])
        return [
            long,
            *(TCP(sport=20000, dport=target.port, flags=flags) for flags in ("S", "A", "PA", "FA", "R")),
        ]
    if target.protocol == headers.UDP:
        return [UDP(sport=20000, dport=target.port), UDP(sport=20000, dport=target.port, chksum=0)]
    init = SCTPChunkInit(init_tag=0xCAFE0001, a_rwnd=1, n_out_streams=1, n_in_streams=1, init_tsn=7)
    return [SCTP(sport=20000, dport=target.port) / init]


def _between(target: Target) -> list[Packet]:
    """All headers before the transport header."""
    source = client_of(target.address)
    if ":" not in target.address:
        options = [[], [IPOption_NOP(), IPOption_NOP()], [IPOption_Router_Alert()]]
        return [ip(source, target.address, options=each) for each in options]
    plain = ip(source, target.address)
    return [
        plain,
        plain / IPv6ExtHdrHopByHop(),
        plain / IPv6ExtHdrHopByHop() / IPv6ExtHdrDestOpt() / IPv6ExtHdrRouting(segleft=0),
        plain / IPv6ExtHdrFragment(id=5),
    ]


def _to(target: Target, chance: random.Random) -> list[Packet]:
    """Complete packets to one destination: all combinations of headers and transports."""
    return [
        before / transport / Raw(chance.randbytes(chance.choice(_PAYLOADS)))
        for before, transport in product(_between(target), _transports(target))
    ]


def _errors(services: Sequence[Target], others: Sequence[Target]) -> list[bytes]:
    """ICMP errors about packets that were never sent, and pings."""
    found: list[bytes] = []
    for target in (*services, *others):
        client = client_of(target.address)
        found.append(bytes(ping(client, target.address)))
        for transport in _transports(target)[:1]:
            quoted: Packet
            errors: list[Packet]
            if ":" in client:
                quoted = IPv6(src=target.address, dst=client) / transport / Raw(bytes(24))
                errors = [ICMPv6DestUnreach(code=4), ICMPv6PacketTooBig(mtu=1280), ICMPv6TimeExceeded()]
            else:
                quoted = IP(src=target.address, dst=client) / transport / Raw(bytes(24))
                errors = [ICMP(type=3, code=3), ICMP(type=3, code=4, nexthopmtu=1400), ICMP(type=11)]
            found += [bytes(ip("2001:db8:77::1" if ":" in client else "203.0.113.1", target.address)
                            / error / quoted) for error in errors]  # fmt: skip
    return found


def _odd(services: Sequence[Target]) -> list[bytes]:
    """Packets without transport header, frames of other types, and first and later fragments."""
    found: list[Packet] = []
    for target in services:
        client = client_of(target.address)
        plain = ip(client, target.address)
        syn = _transports(target)[0]
        found += [Ether(src=THERE, dst=HERE) / Dot1Q(vlan=5) / plain.payload / syn]
        if ":" in client:
            found += [plain / ICMPv6ND_NS(tgt=target.address), plain / Raw(bytes(30))]
            found += [plain / IPv6ExtHdrFragment(id=9, m=1, nh=target.protocol) / syn]
            found += [plain / IPv6ExtHdrFragment(id=9, offset=3, nh=target.protocol) / Raw(bytes(30))]
            found += [_deep(plain, count) / syn for count in (6, 7, 12)]
        else:
            found += [Ether(src=THERE, dst=HERE) / ARP(psrc=client, pdst=target.address)]
            found += [ip(client, target.address, flags=1, proto=target.protocol, id=9) / syn]
            found += [ip(client, target.address, frag=3, proto=target.protocol, id=9) / Raw(bytes(30))]
            found += [ip(client, target.address, proto=47) / Raw(bytes(30))]
    return [bytes(packet) for packet in found]


def _deep(packet: Packet, count: int) -> Packet:
    for _ in range(count):
        packet = packet / IPv6ExtHdrDestOpt()
    return packet


def _answers(forwarded: bytes) -> list[bytes]:
    """An answer to the packet, and an error about it. All checksums stay valid."""
    found = headers.read(forwarded)
    if not found or not found.has_ports:
        return []
    return [answer_to(forwarded, found), error_about(forwarded, found)]


def answer_to(sent: bytes, found: Headers) -> bytes:
    """The packet with source and destination exchanged. Its headers have ports."""
    back = bytearray(sent)
    size, at = (4, found.l3 + 12) if found.version == 4 else (16, found.l3 + 8)
    back[at : at + 2 * size] = sent[at + size : at + 2 * size] + sent[at : at + size]
    back[found.l4 : found.l4 + 4] = sent[found.l4 + 2 : found.l4 + 4] + sent[found.l4 : found.l4 + 2]
    if found.protocol == headers.SCTP and not found.fragment:
        back[found.l4 + 8 : found.l4 + 12] = headers.crc_of(bytes(back), found).to_bytes(4)
    return bytes(back)


def error_about(sent: bytes, found: Headers) -> bytes:
    """Fragmentation needed or packet too big, from a router with an otherwise unused address."""
    kept = sent[found.l3 : max(found.l4 + 8, found.l3 + 60)]
    if found.version == 4:
        message = bytearray(b"\x03\x04\0\0\0\0" + _WORD.pack(1400) + kept)
        _WORD.pack_into(message, 2, 65535 - headers.total(bytes(message)))
        outer = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(message), 0, 0, 64, 1, 0))
        outer += b"\xcb\x00\x71\x01" + sent[found.l3 + 12 : found.l3 + 16]
        _WORD.pack_into(outer, 10, 65535 - headers.total(bytes(outer)))
        return sent[:12] + b"\x08\x00" + outer + message
    addresses = bytes.fromhex("20010db8007700000000000000000001") + sent[found.l3 + 8 : found.l3 + 24]
    message = bytearray(b"\x02\0\0\0" + struct.pack("!I", 1280) + kept)
    pseudo = headers.total(addresses) + len(message) + headers.ICMPV6
    _WORD.pack_into(message, 2, 65535 - (pseudo + headers.total(bytes(message))) % 65535)
    return sent[:12] + b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, len(message), 58, 64) + addresses + message
