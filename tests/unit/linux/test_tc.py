"""Which filters are the agent's, decoded from the kernel's messages."""

import socket
import struct

import pytest

from ebpfproxy.linux.bpf import tc
from ebpfproxy.linux.bpf.tc import Filter
from ebpfproxy.linux.netlink import netlink

OURS = Filter(235, 0xEB, 3, "bpf", "ebpfproxy", 77)


def message(kind: str, priority: int, handle: int, *attributes: bytes, protocol: int = 3) -> bytes:
    info = priority << 16 | socket.htons(protocol)
    head = struct.pack("=BxxxiIII", 0, 2, handle, tc.Side.INGRESS, info)
    return head + netlink.attribute(1, kind.encode() + b"\0") + b"".join(attributes)


def number(value: int) -> bytes:
    return struct.pack("=I", value)


def options(name: str, program_id: int) -> bytes:
    inner = netlink.attribute(7, name.encode() + b"\0") + netlink.attribute(11, number(program_id))
    return netlink.attribute(2 | 0x8000, inner)  # NLA_F_NESTED, which new kernels set


def test_a_bpf_filter_is_decoded_with_its_name_and_program() -> None:
    chain = netlink.attribute(11, number(0))
    assert tc._filter(message("bpf", 235, 0xEB, chain, options("ebpfproxy", 77))) == OURS


def test_options_of_another_kind_are_not_read_as_those_of_bpf() -> None:
    """For example, attribute 11 of flower is the mask of an address."""
    raw = message("flower", 9, 1, options("ebpfproxy", 77), protocol=0x86DD)
    assert tc._filter(raw) == Filter(9, 1, 0x86DD, "flower", "", 0)


def test_a_filter_with_classic_bpf_has_neither_name_nor_program() -> None:
    assert tc._filter(message("bpf", 9, 1)) == Filter(9, 1, 3, "bpf", "", 0)


@pytest.mark.parametrize("change", [{"name": "cilium"}, {"chain": 7}, {"kind": "flower"}])
def test_a_filter_is_own_only_with_its_kind_name_and_chain(change: dict[str, object]) -> None:
    assert OURS.is_own
    assert not OURS._replace(**change).is_own  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"handle": 1}, {"priority": 1}])
def test_a_filter_is_own_at_any_priority_and_handle(change: dict[str, object]) -> None:
    assert OURS._replace(**change).is_own  # type: ignore[arg-type]


THEIRS = Filter(1, 1, 3, "bpf", "theirs", 5)
FLOWER = Filter(1, 1, 3, "flower", "", 0)
FIRST = OURS._replace(priority=1)


@pytest.mark.parametrize(
    ("found", "passed", "advances"),
    [
        ([FIRST], [], False),
        ([FIRST, THEIRS], [], False),
        ([THEIRS, FIRST], [THEIRS], True),
        ([THEIRS._replace(chain=7), FIRST], [], False),
        ([THEIRS, OURS], [THEIRS], True),
        ([OURS], [], True),
        ([FLOWER, FIRST._replace(priority=2)], [FLOWER], False),
        ([FLOWER, OURS], [FLOWER], True),
        ([FLOWER, THEIRS._replace(priority=2), FIRST._replace(priority=2)],
         [FLOWER, THEIRS._replace(priority=2)], True),
        ([THEIRS._replace(protocol=0x0800), FIRST._replace(priority=2)],
         [THEIRS._replace(protocol=0x0800)], False),
    ],
)  # fmt: skip
def test_filters_that_run_before_the_own_one_and_whether_it_can_advance(
    found: list[Filter], passed: list[Filter], advances: bool
) -> None:
    assert tc.before(found) == passed
    assert tc.can_advance(found) is advances
