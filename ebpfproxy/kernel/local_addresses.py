"""The kernel's local table: what this node would deliver to itself.

A NodePort answers on every local address, and these are not Node.status.addresses but whatever the
routes of type LOCAL say: addresses of all devices, 127.0.0.0/8, those that IPVS mode has on
kube-ipvs0, prefixes made local by hand (`ip route add local`, AnyIP). Broadcast, multicast and anycast
routes are in the same table and are none of it.

Everything here acts in the network namespace that the calling thread is in. Read with raw netlink,
not with pyroute2: see `netlink` for why. Sources: rtnetlink(7), include/uapi/linux/rtnetlink.h.
"""

import contextlib
import errno
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable

from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.kernel import netlink
from ebpfproxy.log import Logger
from ebpfproxy.model.address import V4_BITS, V4_PREFIX, Address, Network

COALESCE_SECONDS = 0.02
"""For how long changes are gathered: a device that comes up brings several reports at once."""

BUSY_FACTOR = 9
"""How many times as long as a read took the next one waits: changes without end cost a tenth of a CPU."""

REREAD_SECONDS = 30.0
"""After how long the table is read though nothing was reported, should a report ever be missing."""

STOP_SECONDS = 0.2
"""At most how long a stop goes unnoticed."""

RTM_NEWROUTE = 24
RTM_DELROUTE = 25
RTM_GETROUTE = 26
RT_TABLE_LOCAL = 255
RTN_LOCAL = 2
RTA_DST = 1

# RTMGRP_LINK, _IPV4_IFADDR, _IPV4_ROUTE, _IPV6_IFADDR, _IPV6_ROUTE. Links because a device that is put
# into a VRF takes its IPv4 routes out of this table without a word about them (fib_disable_ip()).
GROUPS = 0x1 | 0x10 | 0x40 | 0x100 | 0x400

_SO_RCVBUFFORCE = 33
_RECEIVE_BUFFER_BYTES = 1 << 20

# struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags
_ROUTE = struct.Struct("=BBBBBBBBI")
# struct nlmsghdr: len, type, flags, seq, pid; then the table, where the message is about a route.
_REPORT = struct.Struct("=IHHII4xB")

log = Logger(__name__)


def read() -> frozenset[Network]:
    """The networks of both families that are local, mostly single addresses.

    127.0.0.0/8 and ::1/128 are among them once loopback is up; before, and without other devices, the
    set is empty. IPv4 addresses of a device that is down are local, its IPv6 addresses are not.

    Raises Rejected.
    """
    found: set[Network] = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        request = _ROUTE.pack(family, 0, 0, 0, RT_TABLE_LOCAL, 0, 0, RTN_LOCAL, 0)
        try:
            routes = netlink.dump(socket.NETLINK_ROUTE, RTM_GETROUTE, request, strict=True)
        except OSError as error:
            if error.errno == errno.ENOENT:  # the table does not exist before its first route does
                continue
            raise Rejected(f"the local routes cannot be read: {error.strerror or error}") from error
        found |= local_networks(routes)
    return frozenset(found)


def local_networks(routes: Iterable[bytes]) -> set[Network]:
    """Destinations of the routes (struct rtmsg and attributes) that are of type local, in the local table."""
    found: set[Network] = set()
    for route in routes:
        family, length, _, _, table, _, _, kind, _ = _ROUTE.unpack_from(route)
        if table != RT_TABLE_LOCAL or kind != RTN_LOCAL:
            continue
        value = dict(netlink.attributes(route, _ROUTE.size)).get(RTA_DST, b"")
        if family == socket.AF_INET:
            found.add(Network(Address(V4_PREFIX + value.ljust(4, b"\0")), V4_BITS + length))
        elif family == socket.AF_INET6:
            found.add(Network(Address(value.ljust(16, b"\0")), length))
    return found


def watch(changed: Callable[[frozenset[Network]], object], stop: threading.Event) -> None:
    """Report the local networks to `changed` at once, and again whenever they differ, until `stop` is set.

    Runs in the calling thread and calls `changed` in it. Subscribes before it reads, so nothing falls
    between; what a report says is of no interest, only that there was one, so reports that the kernel
    had to drop (ENOBUFS) are one more reason to read and no loss. A read that fails later on is logged,
    and made again at the next change or when it is due.

    Raises Rejected where the first read, or the subscription, fails.
    """
    with _subscribed() as changes:
        reported = read()
        changed(reported)
        while _await_change(changes, stop):
            started = time.monotonic()
            try:
                current = read()
            except KernelError as error:
                log.warning("reading the local routes failed", error=error.message)
                continue
            if current != reported:
                reported = current
                changed(reported)
            stop.wait(BUSY_FACTOR * (time.monotonic() - started))


def _await_change(changes: socket.socket, stop: threading.Event) -> bool:
    """Wait until the local table may have changed, or is due to be read anyway; False once `stop` is set."""
    poll = select.poll()
    poll.register(changes, select.POLLIN)
    due = time.monotonic() + REREAD_SECONDS
    while not stop.is_set() and time.monotonic() < due:
        if poll.poll(STOP_SECONDS * 1000):
            stop.wait(COALESCE_SECONDS)
            if _drain(changes):
                break
    return not stop.is_set()


def _subscribed() -> socket.socket:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    changes = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
    try:
        with contextlib.suppress(PermissionError):  # without CAP_NET_ADMIN the usual size has to do
            changes.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        changes.bind((0, GROUPS))
    except OSError as error:
        changes.close()
        raise Rejected(f"changes of routes cannot be subscribed to: {error.strerror}") from error
    return changes


def _drain(changes: socket.socket) -> bool:
    """Take all reports that are there; whether one of them may be about the local table.

    ENOBUFS stands for reports that were dropped, and is given once for all of them.
    """
    relevant = False
    while True:
        try:
            relevant = _is_relevant(changes.recv(_REPORT.size)) or relevant  # the rest goes with it
        except BlockingIOError:
            return relevant
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise Rejected(f"changes of routes cannot be received: {error.strerror}") from error
            relevant = True


def _is_relevant(report: bytes) -> bool:
    """False for a route of another table: a router's come and go by the thousand."""
    if len(report) < _REPORT.size:
        return True
    _, kind, _, _, _, table = _REPORT.unpack(report)
    return kind not in (RTM_NEWROUTE, RTM_DELROUTE) or table == RT_TABLE_LOCAL
