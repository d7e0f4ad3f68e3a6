"""Route lookups, in the calling thread's network namespace (include/uapi/linux/rtnetlink.h)."""

import errno
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import netlink, rtnetlink
from ebpfproxy.model.address import V4_PREFIX, Address, Family, family

RTA_SRC, RTA_IIF = 2, 3

_U32 = struct.Struct("=I")
_V4_BYTES = 4
_VIA_FAMILY_BYTES = 2  # of RTA_VIA, before the address
_NOT_ACCEPTED = (errno.EXDEV, errno.EINVAL)
"""The reverse path filter dropped the packet. Linux 6.18 returns EINVAL, as for all martians."""


class Route(NamedTuple):
    """The device to which the host sends, and the source address that it selects, None without one.

    Without a gateway, packets are sent only while a neighbor answers for the address itself. `gateway`: its
    address, None without one.
    """

    ifindex: int
    source: Address | None
    gateway: Address | None = None

    @property
    def has_gateway(self) -> bool:
        return self.gateway is not None


def mapped(raw: bytes) -> Address:
    """The address of an attribute of either family."""
    return Address(V4_PREFIX + raw if len(raw) == _V4_BYTES else raw)


def gateway_of(attributes: Mapping[int, bytes]) -> Address | None:
    """The gateway in the attributes of a route or a hop, None without one."""
    raw = attributes.get(rtnetlink.RTA_GATEWAY) or attributes.get(rtnetlink.RTA_VIA, b"")[_VIA_FAMILY_BYTES:]
    return mapped(raw) if raw else None


def route_to(address: Address) -> Route:
    """The route to an address of either family. The ifindex is 0 without a route. Raises Rejected."""
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
    source = found.get(rtnetlink.RTA_PREFSRC, b"")
    return Route(
        netlink.number(found.get(rtnetlink.RTA_OIF)),
        mapped(source) if source else None,
        gateway_of(found),
    )


def accepts(ifindex: int, source: Address, destination: Address) -> bool:
    """Whether the host accepts a packet with these IPv4 addresses that arrives at the device.

    False if the reverse path filter (rp_filter) drops it, or if it is a martian for another reason.
    The lookup assumes the mark 0. Raises Rejected.
    """
    request = rtnetlink.ROUTE.pack(socket.AF_INET, 32, 32, 0, 0, 0, 0, 0, 0)
    request += netlink.attribute(rtnetlink.RTA_DST, destination[-4:])
    request += netlink.attribute(RTA_SRC, source[-4:])
    request += netlink.attribute(RTA_IIF, _U32.pack(ifindex))
    try:
        netlink.get(socket.NETLINK_ROUTE, rtnetlink.RTM_GETROUTE, request)
    except OSError as error:
        if error.errno in _NOT_ACCEPTED:
            return False
        raise _unreadable(error) from error
    return True


def _unreadable(error: OSError) -> Rejected:
    return Rejected(f"cannot look up a route: {error.strerror or error}")
