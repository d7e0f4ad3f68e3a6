"""Route lookups, in the calling thread's network namespace (include/uapi/linux/rtnetlink.h)."""

import errno
import socket
import struct
from typing import NamedTuple

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import netlink, rtnetlink
from ebpfproxy.model.address import V4_PREFIX, Address, Family, family

RTA_SRC, RTA_IIF, RTA_PREFSRC = 2, 3, 7

_U32 = struct.Struct("=I")
_NOT_ACCEPTED = (errno.EXDEV, errno.EINVAL)
"""The reverse path filter dropped the packet. Linux 6.18 returns EINVAL, as for all martians."""


class Route(NamedTuple):
    """The device to which the host sends, and the source address that it selects, None without one."""

    ifindex: int
    source: Address | None


def route_to(address: Address) -> Route:
    """The host's route to an address of either family. The ifindex is 0 without a route. Raises Rejected."""
    is_v4 = family(address) is Family.IPV4
    raw = address[len(V4_PREFIX) :] if is_v4 else address
    number = socket.AF_INET if is_v4 else socket.AF_INET6
    request = rtnetlink.ROUTE.pack(number, 8 * len(raw), 0, 0, 0, 0, 0, 0, 0)
    request += netlink.attribute(rtnetlink.RTA_DST, raw)
    try:
        replies = netlink.get(socket.NETLINK_ROUTE, rtnetlink.RTM_GETROUTE, request)
    except OSError as error:
        if error.errno in rtnetlink.NO_ROUTE:
            return Route(0, None)
        raise _unreadable(error) from error
    found = dict(netlink.attributes(replies[0], rtnetlink.ROUTE.size)) if replies else {}
    source = found.get(RTA_PREFSRC, b"")
    if is_v4 and source:
        source = V4_PREFIX + source
    return Route(netlink.number(found.get(rtnetlink.RTA_OIF)), Address(source) if source else None)


def device_to(address: Address) -> int:
    """The ifindex of the device through which the host sends to an IPv4 address; 0 without a route.

    Raises Rejected.
    """
    try:
        replies = _route(_attribute(rtnetlink.RTA_DST, address))
    except OSError as error:
        if error.errno in rtnetlink.NO_ROUTE:
            return 0
        raise _unreadable(error) from error
    attributes = dict(netlink.attributes(replies[0], rtnetlink.ROUTE.size)) if replies else {}
    return netlink.number(attributes.get(rtnetlink.RTA_OIF))


def accepts(ifindex: int, source: Address, destination: Address) -> bool:
    """Whether the host accepts a packet with these IPv4 addresses that arrives at the device.

    False if the reverse path filter (rp_filter) drops it, or if it is a martian for another reason.
    The lookup assumes the mark 0. Raises Rejected.
    """
    lookup = (
        _attribute(rtnetlink.RTA_DST, destination),
        _attribute(RTA_SRC, source),
        netlink.attribute(RTA_IIF, _U32.pack(ifindex)),
    )
    try:
        _route(*lookup, source_length=32)
    except OSError as error:
        if error.errno in _NOT_ACCEPTED:
            return False
        raise _unreadable(error) from error
    return True


def _route(*attributes: bytes, source_length: int = 0) -> list[bytes]:
    request = rtnetlink.ROUTE.pack(socket.AF_INET, 32, source_length, 0, 0, 0, 0, 0, 0)
    return netlink.get(socket.NETLINK_ROUTE, rtnetlink.RTM_GETROUTE, request + b"".join(attributes))


def _attribute(kind: int, address: Address) -> bytes:
    return netlink.attribute(kind, address[-4:])


def _unreadable(error: OSError) -> Rejected:
    return Rejected(f"cannot look up a route: {error.strerror or error}")
