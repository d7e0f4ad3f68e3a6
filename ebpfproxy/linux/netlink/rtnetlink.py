"""rtnetlink(7) messages for links, addresses and routes: constants, decoding, and requests.

Constants are from include/uapi/linux/{rtnetlink,if_link,if_addr}.h. A payload is what follows struct
nlmsghdr, as `netlink` returns it. Functions raise OSError with the kernel's errno. The callers convert it to
an error of ebpfproxy.errors.
"""

import errno
import socket
import struct
from typing import NamedTuple

from ebpfproxy.linux.netlink import netlink

RTM_NEWLINK, RTM_GETLINK = 16, 18
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26

IFF_UP = 0x1
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINK, IFLA_MASTER = 1, 3, 4, 5, 10
IFLA_LINKINFO, IFLA_STATS64, IFLA_EXT_MASK, IFLA_LINK_NETNSID = 18, 23, 29, 37
IFLA_INFO_KIND = 1

IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS = 1, 2, 8
IFA_F_NODAD, IFA_F_NOPREFIXROUTE = 0x2, 0x200

RT_TABLE_UNSPEC, RT_TABLE_MAIN, RT_TABLE_LOCAL = 0, 254, 255
RTN_UNICAST, RTN_LOCAL = 1, 2
RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_PREFSRC = 1, 4, 5, 6, 7
RTA_MULTIPATH, RTA_TABLE, RTA_VIA, RTA_ENCAP_TYPE = 9, 15, 18, 21  # RTA_VIA: a gateway of another family
RT_SCOPE_LINK, RT_SCOPE_HOST = 253, 254
RTNH_F_DEAD, RTNH_F_ONLINK, RTNH_F_LINKDOWN = 1, 4, 16
RTPROT_STATIC, RTPROT_RA, RTPROT_DHCP = 4, 9, 16
NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)
"""The errors of a lookup without a route, or with one of type unreachable, prohibit or blackhole."""

LINK = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, index, flags, change
ADDRESS = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefixlen, flags, scope, index
# struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags
ROUTE = struct.Struct("=BBBBBBBBI")
_U32 = struct.Struct("=I")
# The type in struct nlmsghdr; family, destination's prefix length, table, protocol and scope in struct rtmsg.
_REPORT = struct.Struct("=4xH10xBB2xBBB")


class Link(NamedTuple):
    """`type` is ARPHRD_*. `kind` is IFLA_INFO_KIND, "" for hardware and for loopback."""

    ifindex: int
    type: int
    kind: str
    up: bool
    attributes: dict[int, bytes]


class ReportedRoute(NamedTuple):
    """The prefix length of its destination, in bits of its own family, its table, and its protocol: the
    program that added it (RTPROT_*). `scope`: RT_SCOPE_*, always 0 for IPv6."""

    length: int
    table: int
    protocol: int
    family: int
    scope: int


def link(payload: bytes) -> Link:
    """The link in the payload of an RTM_NEWLINK."""
    _, type_, ifindex, flags, _ = LINK.unpack_from(payload)
    attributes = dict(netlink.attributes(payload, LINK.size))
    info = dict(netlink.attributes(attributes.get(IFLA_LINKINFO, b""), 0))
    return Link(ifindex, type_, netlink.text(info.get(IFLA_INFO_KIND)), bool(flags & IFF_UP), attributes)


def link_named(name: str) -> Link | None:
    """The link of that name; None if there is none. Raises OSError."""
    wanted = netlink.attribute(IFLA_IFNAME, name.encode() + b"\0")
    try:
        answers = netlink.get(socket.NETLINK_ROUTE, RTM_GETLINK, LINK.pack(0, 0, 0, 0, 0) + wanted)
    except OSError as error:
        if error.errno == errno.ENODEV:
            return None
        raise
    return link(answers[0]) if answers else None


def routes(table: int, kind: int, protocol: int = 0) -> list[bytes]:
    """The payloads of the routes of both families in `table` (RT_TABLE_*) with the type `kind` (RTN_*).

    With RT_TABLE_UNSPEC, those of all tables. `protocol`: only routes of this program (RTPROT_*), 0 for all.

    A kernel before 4.20 returns all routes: see `netlink.dump`. Raises OSError.
    """
    found: list[bytes] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        request = ROUTE.pack(family, 0, 0, 0, table, protocol, 0, kind, 0)
        try:
            found += netlink.dump(socket.NETLINK_ROUTE, RTM_GETROUTE, request, strict=True)
        except OSError as error:
            if error.errno != errno.ENOENT:  # a table exists only once it has had a route
                raise
    return found


def is_local(family: int, address: bytes, ifindex: int = 0) -> bool:
    """Whether packets to an address are delivered to this node.

    `family`: AF_INET or AF_INET6. A link-local address needs the `ifindex` of its device. Raises OSError.
    """
    request = ROUTE.pack(family, 8 * len(address), 0, 0, 0, 0, 0, 0, 0)
    request += netlink.attribute(RTA_DST, address)
    if ifindex:
        request += netlink.attribute(RTA_OIF, _U32.pack(ifindex))
    try:
        found = netlink.get(socket.NETLINK_ROUTE, RTM_GETROUTE, request)
    except OSError as error:
        if error.errno in NO_ROUTE:
            return False
        raise
    return any(ROUTE.unpack_from(each)[7] == RTN_LOCAL for each in found)


def reported_route(report: bytes) -> ReportedRoute | None:
    """The route in a notification (with struct nlmsghdr). None if it is truncated or has no route."""
    if len(report) < _REPORT.size:
        return None
    kind, family, length, table, protocol, scope = _REPORT.unpack_from(report)
    is_route = kind in (RTM_NEWROUTE, RTM_DELROUTE)
    return ReportedRoute(length, table, protocol, family, scope) if is_route else None
