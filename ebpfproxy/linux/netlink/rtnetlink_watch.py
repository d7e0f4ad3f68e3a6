"""Reading something of rtnetlink(7) again whenever the kernel reports that it may have changed.

The loop that `local_addresses` and `links` share, and the waiting for reports of `tc_watch`. What a report
says is of no interest, only that there was one, so reports that the kernel had to drop (ENOBUFS) are one more
reason to read and no loss.
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

COALESCE_SECONDS = 0.02
"""For how long changes are gathered: a device that comes up brings several reports at once."""

BUSY_FACTOR = 9
"""How many times as long as a read took the next one waits: changes without end cost a tenth of a CPU."""

REREAD_SECONDS = 30.0
"""After how long is read though nothing was reported, should a report ever be missing."""

STOP_SECONDS = 0.2
"""At most how long a stop that is no `Stop` goes unnoticed."""

GROUPS = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
"""RTMGRP_LINK, _IPV4_IFADDR, _IPV4_ROUTE, _IPV6_IFADDR, _IPV6_ROUTE: links, addresses and routes."""

REPORT_BYTES = 32
"""How much of each report `concerns` gets to see: the header, and what begins every kind of message."""

_SO_RCVBUFFORCE = 33
_RECEIVE_BUFFER_BYTES = 1 << 20

log = Logger(__name__)

READ_FAILED = "Failed to read the kernel after a change"
"""Read again at the next change."""

T = TypeVar("T")


class Stop(threading.Event):
    """An event that also ends a `poll` of it at once, so that the wait costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        super().set()
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Nothing may use it any more."""
        os.close(self._fd)


def watch(
    what: str,
    read: Callable[[], T],
    concerns: Callable[[bytes], bool],
    changed: Callable[[T], object],
    stop: threading.Event,
) -> None:
    """Hand what `read` returns to `changed` at once, and again whenever it differs, until `stop` is set.

    `what` names it in logs and errors; `concerns` says of a report (its first REPORT_BYTES, struct
    nlmsghdr included) whether it may be about it. Runs in the calling thread, in its network namespace,
    and calls all of them in it. Subscribes before it reads, so nothing falls between. A read that fails
    later on is logged, and made again at the next change or when it is due.

    Raises Rejected where the subscription fails, and what `read` raises where that fails the first time.
    """
    with _subscribed(what, GROUPS) as reports:
        known = read()
        changed(known)
        while _await_report(what, reports, concerns, stop, REREAD_SECONDS):
            started = time.monotonic()
            try:
                current = read()
            except KernelError as error:
                log.warning(READ_FAILED, what=what, error=error.message)
                continue
            if current != known:
                known = current
                changed(known)
            stop.wait(BUSY_FACTOR * (time.monotonic() - started))


def await_reports(
    what: str,
    groups: int,
    concerns: Callable[[bytes], bool],
    reported: Callable[[], object],
    stop: Stop,
) -> None:
    """Call `reported` after each burst of reports to these groups of which one `concerns` the caller, until
    `stop` is set. Between two calls are at least STOP_SECONDS.

    `what` and `concerns` are as in `watch`. Runs in the calling thread, in its network namespace, and calls
    both functions in it.

    Raises Rejected where reports cannot be received.
    """
    with _subscribed(what, groups) as reports:
        while _await_report(what, reports, concerns, stop, math.inf):
            reported()
            stop.wait(STOP_SECONDS)


def _await_report(
    what: str,
    reports: socket.socket,
    concerns: Callable[[bytes], bool],
    stop: threading.Event,
    seconds: float,
) -> bool:
    """Wait until something may have changed, at most for so long; False once `stop` is set."""
    poll = select.poll()
    poll.register(reports, select.POLLIN)
    timeout: float | None = STOP_SECONDS * 1000
    if isinstance(stop, Stop) and seconds == math.inf:
        poll.register(stop, select.POLLIN)
        timeout = None
    due = time.monotonic() + seconds
    while not stop.is_set() and time.monotonic() < due:
        if poll.poll(timeout):
            stop.wait(COALESCE_SECONDS)
            if _drain(what, reports, concerns):
                break
    return not stop.is_set()


def _subscribed(what: str, groups: int) -> socket.socket:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    reports = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
    try:
        with contextlib.suppress(PermissionError):  # without CAP_NET_ADMIN the usual size has to do
            reports.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        reports.bind((0, groups))
    except OSError as error:
        reports.close()
        raise Rejected(f"changes of {what} cannot be subscribed to: {error.strerror}") from error
    return reports


def _drain(what: str, reports: socket.socket, concerns: Callable[[bytes], bool]) -> bool:
    """Take all reports that are there; whether one of them may be of interest.

    ENOBUFS stands for reports that were dropped, and is given once for all of them.
    """
    relevant = False
    while True:
        try:
            relevant = concerns(reports.recv(REPORT_BYTES)) or relevant  # the rest goes with it
        except BlockingIOError:
            return relevant
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise Rejected(f"changes of {what} cannot be received: {error.strerror}") from error
            relevant = True
