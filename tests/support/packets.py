"""Packets created by scapy, and their expected translations with recomputed checksums."""

from typing import Any, NamedTuple

from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import ICMPv6EchoRequest, IPv6
from scapy.layers.l2 import Ether
from scapy.layers.sctp import SCTP, SCTPChunkData
from scapy.packet import Packet, Raw

from ebpfproxy.model.address import Protocol

HERE, THERE = "02:00:00:00:00:01", "02:00:00:00:00:02"
"""MAC addresses of the node and of its neighbor."""


class Places(NamedTuple):
    """The addresses of one family. `here`, `there`: endpoints on this and the other node; `masquerade` and
    `gateway`: the node's addresses towards other nodes and its pods."""

    client: str
    router: str
    node: str
    cluster: str
    external: str
    balancer: str
    pod: str
    here: str
    there: str
    masquerade: str
    gateway: str


V4 = Places(
    client="198.51.100.7",
    router="203.0.113.1",
    node="192.0.2.10",
    cluster="10.96.0.10",
    external="10.97.0.11",
    balancer="10.97.0.12",
    pod="10.244.1.9",
    here="10.244.1.5",
    there="10.244.2.5",
    masquerade="10.244.1.2",
    gateway="10.244.1.1",
)
V6 = Places(
    client="2001:db8:99::7",
    router="2001:db8:77::1",
    node="2001:db8::10",
    cluster="fd00:96::10",
    external="fd00:97::11",
    balancer="fd00:97::12",
    pod="fd00:1::9",
    here="fd00:1::5",
    there="fd00:2::5",
    masquerade="fd00:1::2",
    gateway="fd00:1::1",
)


def ip(source: str, destination: str, **fields: Any) -> Packet:
    """Ethernet and IP headers for the addresses' family. `fields` are IP fields."""
    ethernet = Ether(src=THERE, dst=HERE)
    if ":" in destination:
        return ethernet / IPv6(src=source, dst=destination, **fields)
    return ethernet / IP(src=source, dst=destination, **fields)


def transport(
    protocol: Protocol, source: int, destination: int, data: bytes = b"data", **fields: Any
) -> Packet:
    """The first segment of a flow, unless `fields` change it. SCTP data must be a multiple of four bytes."""
    if protocol is Protocol.TCP:
        return TCP(sport=source, dport=destination, **fields) / Raw(data)
    if protocol is Protocol.UDP:
        return UDP(sport=source, dport=destination, **fields) / Raw(data)
    return SCTP(sport=source, dport=destination) / SCTPChunkData(data=data, tsn=7)


def ping(client: str, address: str) -> Packet:
    """An echo request with a payload."""
    if ":" in address:
        return ip(client, address) / ICMPv6EchoRequest(id=7, seq=1, data=b"ping pong")
    return ip(client, address) / ICMP(id=7, seq=1) / Raw(b"ping pong")


def become(
    packet: Packet,
    source: str | None = None,
    destination: str | None = None,
    *,
    source_port: int | None = None,
    destination_port: int | None = None,
) -> bytes:
    """The packet with another tuple. scapy computes the checksums, except for UDP's 0 (no checksum)."""
    copy = packet.copy()
    layer = copy[IPv6] if IPv6 in copy else copy[IP]
    layer.src, layer.dst = source or layer.src, destination or layer.dst
    for kind in (TCP, UDP, SCTP):
        if kind in copy:
            copy[kind].sport = source_port or copy[kind].sport
            copy[kind].dport = destination_port or copy[kind].dport
    return bytes(copy)
