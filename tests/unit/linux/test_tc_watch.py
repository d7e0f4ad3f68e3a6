"""Which notifications are about the filters of a watched device."""

import struct

import pytest

from ebpfproxy.linux.bpf.tc_watch import is_relevant
from ebpfproxy.linux.netlink import netlink, rtnetlink_watch

NEWLINK, NEWQDISC, DELQDISC, NEWTCLASS, NEWTFILTER, DELTFILTER = 16, 36, 37, 40, 44, 45
WATCHED, ANOTHER, BLOCK = 7, 8, -1


def report(kind: int, ifindex: int) -> bytes:
    body = struct.pack("=BxxxiIII", 0, ifindex, 1, 0xFFFFFFF2, 0)
    return netlink.message(kind, 0, 0, body)[: rtnetlink_watch.REPORT_BYTES]


def concerns(message: bytes) -> bool:
    return is_relevant(lambda ifindex: ifindex == WATCHED, message)


@pytest.mark.parametrize("kind", [NEWQDISC, DELQDISC, NEWTFILTER, DELTFILTER])
def test_filters_and_qdiscs_of_watched_devices_are_relevant(kind: int) -> None:
    assert concerns(report(kind, WATCHED))
    assert not concerns(report(kind, ANOTHER))


@pytest.mark.parametrize("kind", [NEWLINK, NEWTCLASS])
def test_other_notifications_are_not_relevant(kind: int) -> None:
    assert not concerns(report(kind, WATCHED))


def test_a_filter_of_a_shared_block_may_be_at_a_watched_device() -> None:
    assert concerns(report(NEWTFILTER, BLOCK))


def test_a_truncated_message_is_not_relevant() -> None:
    assert not concerns(report(NEWTFILTER, WATCHED)[:23])
    assert not concerns(b"")
