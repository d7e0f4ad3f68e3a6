"""TCP connections and UDP flows through the classifiers, packet by packet, with the sequence numbers of both
ends. Frames are plain bytes, so that 64,512 connections take seconds."""

import dataclasses
import struct
from collections.abc import Callable
from socket import IPPROTO_TCP, IPPROTO_UDP
from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, Protocol, family, format_address, parse_address
from tests.support import headers
from tests.support.packet_path import REDIRECT, UNSPEC, Outcome, PacketPath
from tests.support.packets import HERE, THERE

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16

_ETHERNET = bytes.fromhex((HERE + THERE).replace(":", ""))
_NUMBERS = {Protocol.TCP: IPPROTO_TCP, Protocol.UDP: IPPROTO_UDP}
_WINDOW = 65535  # bytes; there is no window scale
_AGAIN = 4
"""How often a packet may be redirected to the device at which it arrived."""
_TCP = struct.Struct("!HHIIBBHHH")
_UDP = struct.Struct("!HHHH")


class End(NamedTuple):
    """An address, and a port in the machine's byte order."""

    address: Address
    port: int


class Segment(NamedTuple):
    """A TCP segment or a datagram, for which only `data` is used."""

    flags: int = 0
    seq: int = 0
    ack: int = 0
    data: bytes = b""


def frame(protocol: Protocol, source: End, to: End, segment: Segment) -> bytes:
    """An Ethernet frame with valid checksums."""
    number = _NUMBERS[protocol]
    v4 = family(source.address) is Family.IPV4
    at = -4 if v4 else -16
    addresses = source.address[at:] + to.address[at:]
    plain = _transport(protocol, source.port, to.port, segment)
    checksum = 65535 - (headers.total(addresses) + number + len(plain) + headers.total(plain)) % 65535
    offset = 16 if protocol is Protocol.TCP else 6
    transport = plain[:offset] + struct.pack("!H", checksum) + plain[offset + 2 :]
    if not v4:
        return (
            _ETHERNET
            + b"\x86\xdd"
            + struct.pack("!IHBB", 6 << 28, len(plain), number, 64)
            + addresses
            + transport
        )
    start = struct.pack("!BBHHHBB", 0x45, 0, 20 + len(plain), 0, 0x4000, 64, number)
    checksum = 65535 - headers.total(start + b"\0\0" + addresses)
    return _ETHERNET + b"\x08\x00" + start + struct.pack("!H", checksum) + addresses + transport


def _transport(protocol: Protocol, source: int, to: int, segment: Segment) -> bytes:
    if protocol is Protocol.UDP:
        return _UDP.pack(source, to, 8 + len(segment.data), 0) + segment.data
    return (
        _TCP.pack(source, to, segment.seq, segment.ack, 5 << 4, segment.flags, _WINDOW, 0, 0) + segment.data
    )


def ends(raw: bytes) -> tuple[End, End]:
    """Source and destination of a TCP or UDP frame."""
    found = headers.read(raw)
    assert found
    of = found.tuple
    return End(of.source, of.source_port), End(of.destination, of.destination_port)


@dataclasses.dataclass
class Conversation:
    """A client behind the device `net`, and an endpoint behind the device `towards` ("": determined by the
    chosen endpoint).

    `endpoint` and `seen` are the endpoint's own address and the client address that it sees, known after the
    first packet. `client_next` and `endpoint_next` are the sequence numbers of the next segments.
    """

    path: PacketPath
    protocol: Protocol
    client: End
    frontend: End
    towards: str = ""
    client_next: int = 1000
    endpoint_next: int = 5000
    endpoint: End | None = None
    seen: End | None = None

    def open(self) -> bool:
        """Establish it with three packets, for TCP and UDP. False: the first one was dropped."""
        if self.begin().verdict != UNSPEC:
            return False
        assert self.by_endpoint(SYN | ACK), "the endpoint's first packet does not reach the client"
        assert self.by_client(ACK, b"" if self.protocol is Protocol.TCP else b"?"), (
            "the client's second packet"
        )
        return True

    def begin(self) -> Outcome:
        """Send the client's first packet; its outcome. If the endpoint is not yet known, it is sent twice, as
        if the first one had been lost after ingress."""
        first = Segment(SYN, self.client_next) if self.protocol is Protocol.TCP else Segment(data=b"?")
        raw = self._frame(self.client, self.frontend, first)
        if not self.towards:
            came_in = _until_not_redirected_back(raw, lambda: self.path.ingress(raw, "net"))
            if came_in.verdict != UNSPEC:
                return came_in
            self.towards = _device_towards(ends(came_in.raw)[1].address)
        arrived = _until_not_redirected_back(raw, lambda: self.path.forward(raw, "net", self.towards))
        if arrived.verdict == UNSPEC:
            self.seen, self.endpoint = ends(arrived.raw)
            self._count("client_next", first)
        return arrived

    def exchange(self) -> bool:
        """Send one packet in each direction. Whether both arrive with unchanged addresses and ports."""
        return self.by_client(ACK | PSH, b"?") and self.by_endpoint(ACK | PSH, b"!")

    def close(self) -> None:
        """Close with FINs of both sides. Raises AssertionError if a segment is lost."""
        assert self.by_client(FIN | ACK)
        assert self.by_endpoint(FIN | ACK)
        assert self.by_client(ACK)

    def by_client(self, flags: int, data: bytes = b"") -> bool:
        """Send the client's next packet. Whether the endpoint receives it."""
        segment = Segment(flags, self.client_next, self.endpoint_next if flags & ACK else 0, data)
        arrived = self.path.forward(self._frame(self.client, self.frontend, segment), "net", self.towards)
        self._count("client_next", segment)
        return arrived.verdict == UNSPEC and ends(arrived.raw) == (self.seen, self.endpoint)

    def by_endpoint(self, flags: int, data: bytes = b"") -> bool:
        """Send the endpoint's next packet. Whether the client receives it."""
        assert self.endpoint
        assert self.seen
        segment = Segment(flags, self.endpoint_next, self.client_next, data)
        arrived = self.path.forward(self._frame(self.endpoint, self.seen, segment), self.towards, "net")
        self._count("endpoint_next", segment)
        return arrived.verdict == UNSPEC and ends(arrived.raw) == (self.frontend, self.client)

    def _count(self, side: str, segment: Segment) -> None:
        taken = len(segment.data) + bool(segment.flags & SYN) + bool(segment.flags & FIN)
        setattr(self, side, (getattr(self, side) + taken) % (1 << 32))

    def _frame(self, source: End, to: End, segment: Segment) -> bytes:
        return frame(self.protocol, source, to, segment)


def _until_not_redirected_back(raw: bytes, run: Callable[[], Outcome]) -> Outcome:
    """A program may redirect an unchanged packet to the device at which it arrived, and so get it again."""
    outcome = run()
    for _ in range(_AGAIN):
        if outcome.verdict != REDIRECT or outcome.raw != raw:
            break
        outcome = run()
    return outcome


def _device_towards(endpoint: Address) -> str:
    """One of the devices listed in packet_path.py."""
    return "pod" if format_address(endpoint).startswith(("10.244.1.", "fd00:1:")) else "tunnel"


def end(address: str, port: int) -> End:
    """An end with the address given as text."""
    return End(parse_address(address), port)
