"""Notifications about the tc filters and qdiscs of devices. The kernel sends none for tcx links.

Sources: include/uapi/linux/rtnetlink.h; tfilter_notify() of net/sched/cls_api.c and qdisc_notify() of
net/sched/sch_api.c (Linux 6.12).
"""

import functools
import struct
from collections.abc import Callable

from ebpfproxy.linux.netlink import rtnetlink_watch
from ebpfproxy.linux.netlink.rtnetlink_watch import Stop

GROUPS = 0x8  # RTMGRP_TC

_KINDS = frozenset((36, 37, 44, 45))  # RTM_NEWQDISC, RTM_DELQDISC, RTM_NEWTFILTER, RTM_DELTFILTER
_SHARED_BLOCK = -1  # TCM_IFINDEX_MAGIC_BLOCK: the filter is on each device that uses the block
_REPORT = struct.Struct("=4xH10x4xi")  # nlmsg_type of struct nlmsghdr, tcm_ifindex of struct tcmsg


def watch(is_watched: Callable[[int], bool], changed: Callable[[], object], stop: Stop) -> None:
    """Call `changed` soon after filters or qdiscs of a watched device may have changed, until `stop` is set.

    `is_watched` is called with the device's ifindex. A burst of changes leads to one call, or to a few calls
    if it is long. Lost notifications count as a change. Both functions run in the calling thread and its
    network namespace.

    Raises Rejected if notifications cannot be received.
    """
    concerns = functools.partial(is_relevant, is_watched)
    rtnetlink_watch.await_reports("tc filters", GROUPS, concerns, changed, stop)


def is_relevant(is_watched: Callable[[int], bool], report: bytes) -> bool:
    """Whether a notification concerns a watched device, or a filter block that devices share.

    `report`: the beginning of a datagram, in host byte order. All of its messages are about one device.
    """
    if len(report) < _REPORT.size:
        return False
    kind, ifindex = _REPORT.unpack_from(report)
    return kind in _KINDS and (ifindex == _SHARED_BLOCK or is_watched(ifindex))
