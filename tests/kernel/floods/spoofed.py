"""Packets with spoofed source addresses, sent by raw sockets."""

import random
import socket
from collections.abc import Iterable

from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet

from ebpfproxy.lab import Netns

End = tuple[str, int]
"""An address and a port."""

_chance = random.Random(1)


def segment(source: End, to: End, flags: str) -> Packet:
    """A TCP segment with random sequence numbers."""
    seq, ack = _chance.getrandbits(32), _chance.getrandbits(32) if "A" in flags else 0
    header = IPv6 if ":" in to[0] else IP
    return header(src=source[0], dst=to[0]) / TCP(sport=source[1], dport=to[1], flags=flags, seq=seq, ack=ack)


def send(netns: Netns, packets: Iterable[Packet]) -> None:
    """Send them from the network namespace, in order. A veth pair delivers a packet before the next one is
    sent."""
    frames = [(":" in packet.dst, packet.dst, bytes(packet)) for packet in packets]

    def send_all() -> None:
        of = socket.AF_INET, socket.AF_INET6
        with (
            socket.socket(of[0], socket.SOCK_RAW, socket.IPPROTO_RAW) as four,
            socket.socket(of[1], socket.SOCK_RAW, socket.IPPROTO_RAW) as six,
        ):
            for is_six, address, frame in frames:
                (six if is_six else four).sendto(frame, (address, 0))

    netns.call(send_all)
