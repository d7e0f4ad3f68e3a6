"""The packets of a client outside."""

import struct

import pytest

from ebpfproxy.diagnose.canary.segment import ACK, SYN, Answer, Conversation, answer, frame
from ebpfproxy.model.address import Protocol, parse_address

CLIENTS = {4: "198.51.100.77", 6: "2001:db8:5cab::77"}
SERVERS = {4: "192.0.2.20", 6: "fd00::20"}
HARDWARE = bytes.fromhex("020000000001")


def conversation(version: int, protocol: Protocol = Protocol.TCP) -> Conversation:
    client, server = parse_address(CLIENTS[version]), parse_address(SERVERS[version])
    return Conversation(protocol, client, 50000, server, 443)


def reversed_(of: Conversation) -> Conversation:
    return Conversation(of.protocol, of.server, of.server_port, of.client, of.client_port)


def sum_of(data: bytes) -> int:
    """The sum that RFC 1071 verifies: 0xffff for correct data."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    return total % 0xFFFF or 0xFFFF


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
def test_checksums_are_correct(version: int, protocol: Protocol) -> None:
    packet = frame(conversation(version, protocol), HARDWARE, SYN, 0xFFFFFFFF)[14:]
    size = 20 if version == 4 else 40
    header, rest = packet[:size], packet[size:]
    if version == 4:
        assert sum_of(header) == 0xFFFF
    pseudo = header[12:20] if version == 4 else header[8:40]
    assert sum_of(pseudo + struct.pack(">HH", protocol, len(rest)) + rest) == 0xFFFF


@pytest.mark.parametrize("version", [4, 6])
def test_an_answer_is_recognized(version: int) -> None:
    of = conversation(version)
    packet = frame(reversed_(of), HARDWARE, SYN | ACK, 7, 9)[14:]
    assert answer(packet, of) == Answer(of.server, 443, SYN | ACK, 7, 9)
    assert answer(packet, of._replace(client_port=50001)) is None
    assert answer(packet[:30], of) is None


@pytest.mark.parametrize("version", [4, 6])
def test_an_icmp_error_about_the_connection_is_recognized(version: int) -> None:
    of = conversation(version)
    quoted = frame(of, HARDWARE, SYN)[14:]
    kind, protocol = ((3, 1), (1, 58))[version == 6]
    size = 20 if version == 4 else 40
    header = bytearray(frame(reversed_(of), HARDWARE)[14 : 14 + size])
    header[9 if version == 4 else 6] = protocol
    error = bytes(header) + bytes([kind, 3, 0, 0, 0, 0, 0, 0])
    assert answer(error + quoted, of) == Answer(of.server, 0, unreachable=True)
    assert answer(error + quoted, of._replace(client_port=1)) is None
    assert answer(error, of) is None
