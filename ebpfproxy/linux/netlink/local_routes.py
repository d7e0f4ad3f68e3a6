"""Local routes of single addresses: mode userspace makes the addresses of Services local with them.

A packet to such an address is delivered to a socket of this node, although no device has the address
(`ip route add local 10.96.0.1 dev lo src 127.0.0.1`). No device is created. The kernel never selects the
address as a source, not even for a client of the node that connects to it: such a client would take one of
the address's ports, and no relay could listen there until its TIME_WAIT ends. The routes are marked with a
protocol, so that those of others are never removed; `ip route show table local proto 235` lists them.

All functions act in the calling thread's network namespace. Sources: inet_rtm_newroute() of
net/ipv4/fib_frontend.c, inet6_rtm_newroute() of net/ipv6/route.c.
"""

import errno
import socket
from collections.abc import Collection, Mapping

from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.linux.netlink import iproute, netlink, rtnetlink
from ebpfproxy.linux.netlink.netlink import Request, encoded, rejecting
from ebpfproxy.linux.netlink.rtnetlink import (
    PROTOCOL,
    RT_TABLE_LOCAL,
    RTA_OIF,
    RTA_PREFSRC,
    RTA_PRIORITY,
    RTA_TABLE,
    RTN_LOCAL,
)
from ebpfproxy.model.address import Address, Family, family, format_address

_METRIC = 1024  # the node's own routes have 0: both may exist
_LOOPBACK = "lo"
_SOURCE = encoded({RTA_PREFSRC: socket.inet_aton("127.0.0.1")})
_SINGLE = 128  # the prefix length of one address


def read() -> frozenset[Address]:
    """The addresses of these routes. Raises Rejected."""
    with rejecting("cannot read the local routes"):
        found = rtnetlink.routes(RT_TABLE_LOCAL, RTN_LOCAL, {PROTOCOL})
    return frozenset(each.network.address for each in found if each.network.length == _SINGLE)


def change(add: Collection[Address] = (), drop: Collection[Address] = ()) -> Mapping[Address, KernelError]:
    """Add and remove routes; return the addresses that the kernel rejected, with the error.

    All other changes are applied. A route that exists already, or is missing already, is no error.

    Raises Rejected.
    """
    changes = [(rtnetlink.RTM_DELROUTE, each) for each in drop] + [
        (rtnetlink.RTM_NEWROUTE, each) for each in add
    ]
    with rejecting("cannot change the local routes"):
        values = {RTA_TABLE: RT_TABLE_LOCAL, RTA_OIF: socket.if_nametoindex(_LOOPBACK), RTA_PRIORITY: _METRIC}
        place = encoded(values)
        requests = [_request(kind, address, place) for kind, address in changes]
        rejected = netlink.changes(socket.NETLINK_ROUTE, requests)
    rejections: dict[Address, KernelError] = {}
    for position, rejection in rejected.items():
        kind, address = changes[position]
        adds = kind == rtnetlink.RTM_NEWROUTE
        if rejection.errno != (errno.EEXIST if adds else errno.ESRCH):
            action = "add" if adds else "remove"
            rejections[address] = _failure(action, address, rejection.errno, rejection.reason)
    return rejections


def _failure(action: str, address: Address, number: int, reason: str) -> KernelError:
    message = f"cannot {action} the local route of {format_address(address)}"
    if number == errno.ENETDOWN:
        return Rejected(f"{message}: loopback is down", "ip link set lo up")
    return iproute.error(number, message, reason)


def _request(kind: int, address: Address, place: bytes) -> Request:
    flags = 0
    if kind == rtnetlink.RTM_NEWROUTE:  # a removal is for any source: a route of version 0.2 has none
        flags = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
        if family(address) is Family.IPV4:  # for IPv6 the kernel selects an address of a device
            place += _SOURCE
    scope = rtnetlink.RT_SCOPE_HOST
    return rtnetlink.own_route(kind, flags, address, place, type_=RTN_LOCAL, scope=scope)
