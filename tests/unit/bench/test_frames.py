"""Frames for test runs are what a peer would accept."""

import struct
from socket import IPPROTO_TCP, IPPROTO_UDP

import pytest

from ebpfproxy.bench.frames import Tuple, frame, tuple_of
from ebpfproxy.model.address import parse_address

V4 = Tuple(parse_address("192.0.2.1"), 1000, parse_address("198.51.100.2"), 80)
V6 = Tuple(parse_address("2001:db8::1"), 1000, parse_address("2001:db8::2"), 80)


def ones_sum(raw: bytes) -> int:
    total = sum(int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2))
    return total % 0xFFFF


@pytest.mark.parametrize("protocol", [IPPROTO_TCP, IPPROTO_UDP])
def test_checksums_are_right(protocol: int) -> None:
    """Over what they cover they add up to 0 in one's complement (RFC 1071)."""
    four, six = frame(V4, protocol), frame(V6, protocol)
    assert ones_sum(four[14:34]) == 0
    assert ones_sum(four[26:34] + struct.pack("!II", len(four) - 34, protocol) + four[34:]) == 0
    assert ones_sum(six[22:54] + struct.pack("!II", len(six) - 54, protocol) + six[54:]) == 0


@pytest.mark.parametrize(("ends", "size"), [(V4, 4), (V6, 16)])
def test_the_tuple_is_found_where_it_was_put(ends: Tuple, size: int) -> None:
    wanted = ends.source[-size:] + ends.destination[-size:] + struct.pack("!HH", 1000, 80)
    assert tuple_of(frame(ends, IPPROTO_TCP)) == wanted


def test_a_syn_is_no_ack() -> None:
    assert [frame(V4, IPPROTO_TCP, syn=syn)[14 + 20 + 13] for syn in (True, False)] == [0x02, 0x10]
