"""Local routes of single addresses: mode userspace makes the addresses of Services local with them.

A packet to such an address is delivered to a socket of this node, although no device has the address
(`ip route add local 10.96.0.1 dev lo src 127.0.0.1`). No device is created. The kernel never selects the
address as a source, not even for a client of the node that connects to it: such a client would take one of
the address's ports, and no relay could listen there until its TIME_WAIT ends. The routes are marked with a
protocol, so that those of others are never removed; `ip route show table local proto 235` lists them.

All functions act in the calling thread's network namespace. They use raw netlink instead of pyroute2 (see
`netlink`). Sources: inet_rtm_newroute() of net/ipv4/fib_frontend.c, inet6_rtm_newroute() of net/ipv6/route.c.
"""

import errno
import os
import socket
import struct
from collections.abc import Collection, Mapping

from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.netlink import iproute, netlink, rtnetlink
from ebpfproxy.linux.netlink.netlink import Request, attribute
from ebpfproxy.model.address import V4_PREFIX, Address, Family, family, format_address

PROTOCOL = 235  # of no routing daemon in include/uapi/linux/rtnetlink.h or /etc/iproute2/rt_protos
"""The protocol of these routes."""

_METRIC = 1024  # the node's own routes have 0: both may exist
_LOOPBACK = "lo"
_SOURCE = socket.inet_aton("127.0.0.1")
_U32 = struct.Struct("=I")


def read() -> frozenset[Address]:
    """The addresses of these routes. Raises Rejected."""
    try:
        found = rtnetlink.routes(rtnetlink.RT_TABLE_LOCAL, rtnetlink.RTN_LOCAL)
    except OSError as error:
        raise Rejected(f"cannot read the local routes: {error.strerror or error}") from error
    return frozenset(filter(None, map(_address, found)))


def change(add: Collection[Address] = (), drop: Collection[Address] = ()) -> Mapping[Address, KernelError]:
    """Add and remove routes; return the addresses that the kernel rejected, with the error.

    All other changes are applied. A route that exists already, or is missing already, is no error.

    Raises Rejected.
    """
    changes = [(rtnetlink.RTM_DELROUTE, each) for each in drop] + [
        (rtnetlink.RTM_NEWROUTE, each) for each in add
    ]
    try:
        loopback = socket.if_nametoindex(_LOOPBACK)
        requests = [_request(kind, address, loopback) for kind, address in changes]
        rejected = netlink.changes(socket.NETLINK_ROUTE, requests)
    except OSError as error:
        raise Rejected(f"cannot change the local routes: {error.strerror or error}") from error
    rejections: dict[Address, KernelError] = {}
    for position, rejection in rejected.items():
        kind, address = changes[position]
        adds = kind == rtnetlink.RTM_NEWROUTE
        if rejection.errno != (errno.EEXIST if adds else errno.ESRCH):
            reason = rejection.reason or os.strerror(rejection.errno)
            action = "add" if adds else "remove"
            rejections[address] = _failure(action, address, rejection.errno, reason)
    return rejections


def _failure(action: str, address: Address, number: int, reason: str) -> KernelError:
    message = f"cannot {action} the local route of {format_address(address)}"
    if number == errno.ENETDOWN:
        return Rejected(f"{message}: loopback is down", "ip link set lo up")
    return iproute.error(number, message, reason)


def _request(kind: int, address: Address, loopback: int) -> Request:
    v4 = family(address) is Family.IPV4
    raw = address[len(V4_PREFIX) :] if v4 else address
    body = rtnetlink.ROUTE.pack(
        socket.AF_INET if v4 else socket.AF_INET6,
        8 * len(raw),
        0,
        0,
        rtnetlink.RT_TABLE_LOCAL,
        PROTOCOL,
        rtnetlink.RT_SCOPE_HOST,
        rtnetlink.RTN_LOCAL,
        0,
    )
    body += attribute(rtnetlink.RTA_DST, raw) + attribute(rtnetlink.RTA_OIF, _U32.pack(loopback))
    body += attribute(rtnetlink.RTA_PRIORITY, _U32.pack(_METRIC))
    if kind == rtnetlink.RTM_DELROUTE:
        return Request(kind, 0, body)  # of any source: one of version 0.2 has none
    if v4:  # for IPv6 the kernel selects an address of a device
        body += attribute(rtnetlink.RTA_PREFSRC, _SOURCE)
    return Request(kind, netlink.NLM_F_CREATE | netlink.NLM_F_EXCL, body)


def _address(route: bytes) -> Address | None:
    """The address in a message; None for a route of another program or to several addresses."""
    number, length, _, _, table, protocol, _, kind, _ = rtnetlink.ROUTE.unpack_from(route)
    raw = dict(netlink.attributes(route, rtnetlink.ROUTE.size)).get(rtnetlink.RTA_DST, b"")
    is_own = (table, protocol, kind) == (rtnetlink.RT_TABLE_LOCAL, PROTOCOL, rtnetlink.RTN_LOCAL)
    if not is_own or length != 8 * len(raw):
        return None
    return Address(V4_PREFIX + raw if number == socket.AF_INET else raw)
