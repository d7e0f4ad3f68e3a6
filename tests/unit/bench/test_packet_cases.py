"""Frames for test runs are valid, and each translating case has its own flows."""

import struct
from socket import IPPROTO_TCP, IPPROTO_UDP

import pytest

from ebpfproxy.bench import packet_cases
from ebpfproxy.bench.packet_cases import Tuple, frame, tuple_of
from ebpfproxy.model.address import parse_address
from tests.support.flows import entries, reply_entries

V4 = Tuple(parse_address("192.0.2.1"), 1000, parse_address("198.51.100.2"), 80)
V6 = Tuple(parse_address("2001:db8::1"), 1000, parse_address("2001:db8::2"), 80)


def ones_sum(raw: bytes) -> int:
    total = sum(int.from_bytes(raw[at : at + 2], "big") for at in range(0, len(raw), 2))
    return total % 0xFFFF


@pytest.mark.parametrize("protocol", [IPPROTO_TCP, IPPROTO_UDP])
def test_frames_have_correct_checksums(protocol: int) -> None:
    """The one's complement sum of the covered bytes is 0 (RFC 1071)."""
    four, six = frame(V4, protocol), frame(V6, protocol)
    assert ones_sum(four[14:34]) == 0
    assert ones_sum(four[26:34] + struct.pack("!II", len(four) - 34, protocol) + four[34:]) == 0
    assert ones_sum(six[22:54] + struct.pack("!II", len(six) - 54, protocol) + six[54:]) == 0


@pytest.mark.parametrize(("ends", "size"), [(V4, 4), (V6, 16)])
def test_the_tuple_of_a_frame_is_the_one_it_was_built_from(ends: Tuple, size: int) -> None:
    wanted = ends.source[-size:] + ends.destination[-size:] + struct.pack("!HH", 1000, 80)
    assert tuple_of(frame(ends, IPPROTO_TCP)) == wanted


def test_a_syn_frame_has_only_the_flag_syn() -> None:
    assert [frame(V4, IPPROTO_TCP, syn=syn)[14 + 20 + 13] for syn in (True, False)] == [0x02, 0x10]


def test_each_translating_case_has_its_own_flows_and_is_repeatable() -> None:
    """Two flows translate in both directions, or the address is restored before each run."""
    translating = [case for case in packet_cases.cases() if case.flows]
    assert all(len(case.flows) == (1 if case.floor else 2) for case in translating)
    flows = [flow for case in translating for flow in case.flows]
    assert len(entries(*flows)) == len(reply_entries(*flows)) == len(flows)
    everything = list(packet_cases.cases())
    assert len({(case.metric, case.path) for case in everything}) == len(everything)
    assert {case.program for case in everything} | {case.floor for case in translating} - {""} < set(
        packet_cases.PROGRAMS
    )
