"""A client and an endpoint of the Services of `served`, packet by packet."""

from collections.abc import Callable
from typing import Any

from scapy.layers.inet import ICMP
from scapy.layers.inet6 import ICMPv6DestUnreach, ICMPv6PacketTooBig, ICMPv6TimeExceeded
from scapy.packet import Packet, Raw

from ebpfproxy.model.address import Protocol
from tests.kernel.packet_path.served import CLIENT_PORT, PORTS, TCP
from tests.support.packet_path import UNSPEC, Outcome, PacketPath
from tests.support.packets import Places, ip, transport

NEXT = 5
"""The sequence number after a SYN and its data, which both sides expect next."""

SEARCHES = 4
"""The number of first packets after which all ports were searched."""

ERRORS: dict[str, tuple[Callable[[], Packet], Callable[[], Packet]]] = {
    "too big": (lambda: ICMP(type=3, code=4, nexthopmtu=1400), lambda: ICMPv6PacketTooBig(mtu=1400)),
    "port unreachable": (lambda: ICMP(type=3, code=3), lambda: ICMPv6DestUnreach(code=4)),
    "time exceeded": (lambda: ICMP(type=11), lambda: ICMPv6TimeExceeded()),
}


def error(kind: str, source: str, destination: str, about: bytes, quoted: int | None = None) -> Packet:
    """An ICMP error about the packet `about`. It quotes the first `quoted` bytes, beginning with the IP
    header."""
    make = ERRORS[kind][":" in destination]
    return ip(source, destination) / make() / Raw(about[14:][:quoted])


def request(
    at: Places,
    protocol: Protocol = TCP,
    port: int = CLIENT_PORT,
    *,
    client: str = "",
    to: str = "",
    **fields: Any,
) -> Packet:
    """A packet of the usual client to the external address, unless `client` or `to` is given. `fields` are
    those of the transport header. A segment without SYN has the sequence numbers of one that follows the
    SYN."""
    if protocol is TCP:
        fields = _numbered(fields)
    addresses = client or at.client, to or at.external
    return ip(*addresses) / transport(protocol, port, PORTS[protocol], **fields)


def _numbered(fields: dict[str, Any]) -> dict[str, Any]:
    """Sequence numbers as both sides expect them. Each SYN begins at 0 and has 4 bytes of data."""
    flags = fields.get("flags", "S")
    return {"seq": 0 if "S" in flags else NEXT, "ack": NEXT if flags != "S" else 0} | fields


def answer(got: Outcome, **fields: Any) -> Packet:
    """The endpoint's answer to the packet that it got."""
    packet = got.packet
    protocol = next(each for each in Protocol if each.name in packet)
    if protocol is Protocol.TCP:
        fields = _numbered({"flags": "SA"} | fields)
    back = ip(packet.payload.dst, packet.payload.src)
    return back / transport(protocol, packet.dport, packet.sport, **fields)


def established(
    path: PacketPath, at: Places, towards: str = "tunnel", protocol: Protocol = Protocol.TCP, **fields: Any
) -> Outcome:
    """Establish a flow: TCP's handshake, or a packet, its answer and another packet. Returns the first packet
    as the endpoint got it."""
    got = path.forward(request(at, protocol=protocol, **fields), "net", towards)
    path.forward(answer(got), towards, "net")
    more: dict[str, Any] = {"flags": "A"} if protocol is TCP else {}
    path.forward(request(at, protocol=protocol, **more, **fields), "net", towards)
    return got


def finish(path: PacketPath, at: Places, got: Outcome, towards: str = "tunnel") -> None:
    """Close the connection from both sides."""
    path.forward(answer(got, flags="FA"), towards, "net")
    path.forward(request(at, flags="FA"), "net", towards)
    path.forward(answer(got, flags="A"), towards, "net")


def is_left_alone(outcome: Outcome, packet: Packet | bytes) -> bool:
    return outcome == (UNSPEC, bytes(packet), 0)
