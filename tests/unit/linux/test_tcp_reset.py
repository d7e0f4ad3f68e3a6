"""The bytes of a TCP reset. Whether kernels accept it: tests/kernel/test_removed_endpoints.py."""

import socket
import struct

import pytest

from ebpfproxy.linux.sockets.tcp_reset import Reset, packet
from ebpfproxy.model.address import parse_address


def checksum(data: bytes) -> int:
    """The sum of RFC 1071 with the checksum included: 0xFFFF if it is right."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total >> 16) + (total & 0xFFFF)
    return total


@pytest.mark.parametrize(
    ("source", "destination", "header"), [("192.0.2.1", "198.51.100.7", 20), ("fd00::1", "2001:db8::7", 40)]
)
def test_a_reset_has_the_numbers_and_a_right_checksum(source: str, destination: str, header: int) -> None:
    built = packet(
        Reset(parse_address(source), 443, parse_address(destination), 40000, 0xFFFFFFFE, 0x01020304)
    )
    ip, segment = built[:header], built[header:]
    assert struct.unpack("!HHIIBB", segment[:14]) == (443, 40000, 0xFFFFFFFE, 0x01020304, 0x50, 0x14)
    of = socket.AF_INET if header == 20 else socket.AF_INET6
    addresses = socket.inet_pton(of, source) + socket.inet_pton(of, destination)
    assert addresses in ip
    assert checksum(addresses + struct.pack("!II", len(segment), socket.IPPROTO_TCP) + segment) == 0xFFFF
