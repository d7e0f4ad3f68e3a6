"""Waits for rtnetlink(7) notifications, for `local_addresses`, `links` and `tc_watch`.

A notification only triggers a new read, so its contents do not matter. If the kernel drops notifications
(ENOBUFS), nothing is lost, because that triggers a read as well.
"""

import contextlib
import errno
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.log import Logger

COALESCE_SECONDS = 0.005
"""Delay between a notification and the read. A device that comes up causes several notifications at once."""

BUSY_FACTOR = 9
"""Delay after reads, in multiples of their duration. Permanent changes so take at most a tenth of a CPU."""

BURST_SECONDS = 0.1
"""Duration of reads without that delay: a pod that starts causes some changes, and its first connection needs
the programs of its device."""

REREAD_SECONDS = 30.0
"""Read after this time even without a notification, in case one was missed."""

STOP_SECONDS = 0.2
"""Interval in which an event that is not a `Stop` is checked, and the minimum between two calls of
`await_reports`."""

GROUPS = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
"""RTMGRP_LINK, _IPV4_IFADDR, _IPV4_ROUTE, _IPV6_IFADDR, _IPV6_ROUTE: links, addresses and routes."""

LINKS = 0x1
"""RTMGRP_LINK."""

REPORT_BYTES = 160
"""The bytes of each notification that `concerns` gets: struct nlmsghdr, and the start of the message. A route
has its preferred source within them, unless it has many metrics."""

_SO_RCVBUFFORCE = 33
_RECEIVE_BUFFER_BYTES = 1 << 20

log = Logger(__name__)

READ_FAILED = "Failed to read the kernel after a change"
"""It is read again at the next change."""

T = TypeVar("T")


class Stop(threading.Event):
    """An event with a file descriptor, so that poll(2) can wait for it without a timeout."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        super().set()
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Close the file descriptor. Do not use the event afterwards."""
        os.close(self._fd)


def watch(
    what: str,
    read: Callable[[], T],
    concerns: Callable[[bytes], bool],
    changed: Callable[[T], object],
    stop: threading.Event,
) -> None:
    """Pass the result of `read` to `changed` at once, and again whenever it differs, until `stop` is set.

    `what` names the subject in logs and errors. `concerns` returns whether a notification may be about it; it
    gets the first REPORT_BYTES, which include struct nlmsghdr. All functions run in the calling thread and
    its network namespace. The subscription precedes the first read, so no change is missed. If a later read
    fails, this is logged, and the read is retried at the next notification or after REREAD_SECONDS.

    Raises Rejected if the subscription fails, and the errors of the first `read`.
    """
    with subscribed(what, GROUPS) as notifications:
        last = read()
        changed(last)
        spare, ended = BURST_SECONDS, time.monotonic()
        while _await_report(what, notifications, concerns, stop, REREAD_SECONDS):
            started = time.monotonic()
            spare = min(BURST_SECONDS, spare + (started - ended) / BUSY_FACTOR)
            try:
                current = read()
            except KernelError as error:
                log.warning(READ_FAILED, what=what, error=error.message)
                continue
            if current != last:
                last = current
                changed(last)
            ended = time.monotonic()
            spare -= ended - started
            stop.wait(-BUSY_FACTOR * min(spare, 0))


def await_reports(
    what: str,
    groups: int,
    concerns: Callable[[bytes], bool],
    reported: Callable[[], object],
    stop: Stop,
) -> None:
    """Call `reported` after each burst of relevant notifications of these groups, until `stop` is set.

    At least STOP_SECONDS are between two calls. `what` and `concerns` are as in `watch`. All functions run in
    the calling thread and its network namespace.

    Raises Rejected if notifications cannot be received.
    """
    with subscribed(what, groups) as notifications:
        while _await_report(what, notifications, concerns, stop, math.inf):
            reported()
            stop.wait(STOP_SECONDS)


def _await_report(
    what: str,
    notifications: socket.socket,
    concerns: Callable[[bytes], bool],
    stop: threading.Event,
    seconds: float,
) -> bool:
    """Wait for a relevant notification, at most `seconds`. Return False once `stop` is set."""
    poll = select.poll()
    poll.register(notifications, select.POLLIN)
    timeout: float | None = STOP_SECONDS * 1000
    if isinstance(stop, Stop) and seconds == math.inf:
        poll.register(stop, select.POLLIN)
        timeout = None
    due = time.monotonic() + seconds
    while not stop.is_set() and time.monotonic() < due:
        if poll.poll(timeout):
            stop.wait(COALESCE_SECONDS)
            if drain(what, notifications, concerns):
                break
    return not stop.is_set()


def subscribed(what: str, groups: int) -> socket.socket:
    """Return a non-blocking socket that receives notifications of these groups, for `drain`.

    `what` is as in `watch`. Raises Rejected.
    """
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    notifications = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
    try:
        with contextlib.suppress(PermissionError):  # without CAP_NET_ADMIN the default size remains
            notifications.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        notifications.bind((0, groups))
    except OSError as error:
        notifications.close()
        raise Rejected(f"cannot subscribe to changes of {what}: {error.strerror}") from error
    return notifications


def drain(
    what: str, notifications: socket.socket, concerns: Callable[[bytes], bool] = lambda report: True
) -> bool:
    """Receive all pending notifications; return whether one of them is relevant.

    The kernel reports dropped notifications once, with ENOBUFS. They count as relevant. Raises Rejected.
    """
    relevant = False
    while True:
        try:
            relevant = concerns(notifications.recv(REPORT_BYTES)) or relevant  # recv() discards the rest
        except BlockingIOError:
            return relevant
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise Rejected(f"cannot receive changes of {what}: {error.strerror}") from error
            relevant = True
