"""What counts as our filter, from messages as the kernel sends them."""

import socket
import struct

import pytest

from ebpfproxy.kernel import netlink, tc
from ebpfproxy.kernel.tc import Filter

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


def test_a_bpf_filter_tells_its_name_and_its_program() -> None:
    chain = netlink.attribute(11, number(0))
    assert tc._filter(message("bpf", 235, 0xEB, chain, options("ebpfproxy", 77))) == OURS


def test_options_of_another_kind_are_not_read_as_those_of_bpf() -> None:
    """Attribute 11 of flower is the mask of an address, say."""
    raw = message("flower", 9, 1, options("ebpfproxy", 77), protocol=0x86DD)
    assert tc._filter(raw) == Filter(9, 1, 0x86DD, "flower", "", 0)


def test_a_filter_with_classic_bpf_has_neither() -> None:
    assert tc._filter(message("bpf", 9, 1)) == Filter(9, 1, 3, "bpf", "", 0)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "cilium"},
        {"handle": 1},
        {"priority": 1},
        {"chain": 7},
        {"kind": "flower"},
    ],
)
def test_a_filter_is_ours_only_with_all_of_its_marks(change: dict[str, object]) -> None:
    assert OURS.is_ours
    assert not OURS._replace(**change).is_ours  # type: ignore[arg-type]


def test_others_are_in_our_way_where_the_kernel_would_refuse_or_replace_them() -> None:
    assert not OURS.is_in_our_way
    assert OURS._replace(name="cilium").is_in_our_way
    assert OURS._replace(kind="flower", handle=1).is_in_our_way
    assert OURS._replace(name="cilium", handle=1, protocol=0x0800).is_in_our_way
    assert not OURS._replace(name="cilium", handle=1).is_in_our_way
    assert not OURS._replace(kind="flower", priority=234).is_in_our_way
    assert not OURS._replace(kind="flower", chain=7).is_in_our_way
