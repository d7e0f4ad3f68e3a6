"""The network devices of this node: kind, addresses, and which of them default routes lead to.

Everything here acts in the network namespace that the calling thread is in. Read with raw netlink,
not with pyroute2, since a node has a device for each pod: see `netlink`. Sources: rtnetlink(7),
include/uapi/linux/{rtnetlink,if_link,if_addr}.h.
"""

import errno
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.errors import Rejected
from ebpfproxy.kernel import netlink, rtnetlink_watch
from ebpfproxy.model.address import V4_PREFIX, Address
from ebpfproxy.model.device import Device

RTM_GETLINK = 18
RTM_GETADDR = 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26

IFF_UP = 0x1
IFLA_IFNAME, IFLA_MASTER, IFLA_LINKINFO, IFLA_EXT_MASK = 3, 10, 18, 29
IFLA_INFO_KIND = 1
RTEXT_FILTER_SKIP_STATS = 1 << 3  # a quarter of each message, and much of the kernel's work on it

IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS = 1, 2, 8
IFA_F_SECONDARY = 0x01  # of IPv6: IFA_F_TEMPORARY (RFC 8981)
IFA_F_OPTIMISTIC = 0x04
IFA_F_DADFAILED = 0x08
IFA_F_DEPRECATED = 0x20
IFA_F_TENTATIVE = 0x40

RT_TABLE_MAIN = 254
RTN_UNICAST = 1
RTM_F_CLONED = 0x200
RTA_OIF, RTA_MULTIPATH, RTA_TABLE = 4, 9, 15

_LINK = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefixlen, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # struct rtmsg: as in `local_addresses`
_HOP = struct.Struct("=HBBi")  # struct rtnexthop: len, flags, hops, ifindex; attributes follow
# Of struct nlmsghdr the type; then of struct rtmsg the length of the destination and the table.
_REPORT = struct.Struct("=4xH10xxB2xB")


def read() -> tuple[Device, ...]:
    """Every device, sorted by ifindex.

    Its addresses are those that its packets may be given as their source: of global scope, and not
    tentative. Those that the kernel would choose last come last: secondary ones of IPv4, temporary ones
    of IPv6, deprecated ones.

    Devices, addresses and routes are three readings, so a device made between them may lack its
    addresses; `watch` reads again then. All routes of the main table are gone through, since the kernel
    has no other way to find the default ones: 0.2 s where they are a hundred thousand.

    Raises Rejected.
    """
    links = _dump(RTM_GETLINK, _LINK.pack(0, 0, 0, 0, 0) + _SKIP_STATS)
    addresses = _dump(RTM_GETADDR, _ADDRESS.pack(0, 0, 0, 0, 0))
    routes = []
    for family in (socket.AF_INET, socket.AF_INET6):
        request = _ROUTE.pack(family, 0, 0, 0, RT_TABLE_MAIN, 0, 0, RTN_UNICAST, 0)
        routes += _dump(RTM_GETROUTE, request)
    return devices(links, addresses, routes)


def names() -> dict[int, str]:
    """The name of every device, by ifindex: what `read` tells, too, in a hundredth of its time.

    Raises Rejected.
    """
    try:
        return dict(socket.if_nameindex())
    except OSError as error:
        raise Rejected(f"the network devices cannot be read: {error.strerror or error}") from error


_SKIP_STATS = netlink.attribute(IFLA_EXT_MASK, struct.pack("=I", RTEXT_FILTER_SKIP_STATS))


def watch(changed: Callable[[tuple[Device, ...]], object], stop: threading.Event) -> None:
    """Report the devices to `changed` at once, and again whenever they differ, until `stop` is set.

    Runs in the calling thread and calls `changed` in it: see `rtnetlink_watch`. A device that is deleted
    and made anew between two readings is seen as the change of its ifindex that this is.

    Raises Rejected where the first read, or the subscription, fails.
    """
    rtnetlink_watch.watch("the network devices", read, _is_relevant, changed, stop)


def devices(
    links: Iterable[bytes], addresses: Iterable[bytes], routes: Iterable[bytes]
) -> tuple[Device, ...]:
    """What the payloads of RTM_NEWLINK, RTM_NEWADDR and RTM_NEWROUTE say of each device."""
    found = {device.ifindex: device for device in map(_device, links)}
    owned = _addresses_by_device(addresses)
    leading = default_devices(routes)
    return tuple(
        device._replace(
            master_kind=found[device.master].kind if device.master in found else "",
            addresses=owned.get(ifindex, ()),
            default_route=ifindex in leading,
        )
        for ifindex, device in sorted(found.items())
    )


def default_devices(routes: Iterable[bytes]) -> set[int]:
    """Indices of the devices that default routes of the main table lead to, each hop of a multipath one.

    Nexthop objects are seen as the hops that they stand for (sysctl net.ipv4.nexthop_compat_mode, on
    unless somebody turned it off).
    """
    found: set[int] = set()
    for route in routes:
        _, length, _, _, table, _, _, kind, flags = _ROUTE.unpack_from(route)
        if length or kind != RTN_UNICAST or flags & RTM_F_CLONED:
            continue
        attributes = dict(netlink.attributes(route, _ROUTE.size))
        if (netlink.number(attributes.get(RTA_TABLE)) or table) == RT_TABLE_MAIN:
            found.add(netlink.number(attributes.get(RTA_OIF)))
            found.update(_hops(attributes.get(RTA_MULTIPATH, b"")))
    return found - {0}


def _dump(kind: int, request: bytes) -> list[bytes]:
    try:
        return netlink.dump(socket.NETLINK_ROUTE, kind, request, strict=True)
    except OSError as error:
        if error.errno == errno.ENOENT:  # a routing table does not exist before its first route does
            return []
        raise Rejected(f"the network devices cannot be read: {error.strerror or error}") from error


def _device(link: bytes) -> Device:
    _, link_type, ifindex, flags, _ = _LINK.unpack_from(link)
    attributes = dict(netlink.attributes(link, _LINK.size))
    info = dict(netlink.attributes(attributes.get(IFLA_LINKINFO, b""), 0))
    return Device(
        ifindex=ifindex,
        name=netlink.text(attributes.get(IFLA_IFNAME)),
        kind=netlink.text(info.get(IFLA_INFO_KIND)),
        link_type=link_type,
        up=bool(flags & IFF_UP),
        master=netlink.number(attributes.get(IFLA_MASTER)),
    )


class _Owned(NamedTuple):
    """An address, how willingly the kernel would choose it (0 first), and whose it is."""

    ifindex: int
    reluctance: int
    address: Address


def _addresses_by_device(messages: Iterable[bytes]) -> dict[int, tuple[Address, ...]]:
    """Sorted by reluctance only, so that otherwise they stay in the kernel's order."""
    found: dict[int, list[Address]] = {}
    for owned in sorted(_usable(messages), key=lambda one: one.reluctance):
        found.setdefault(owned.ifindex, []).append(owned.address)
    return {ifindex: tuple(addresses) for ifindex, addresses in found.items()}


def _usable(messages: Iterable[bytes]) -> Iterator[_Owned]:
    for message in messages:
        family, _, flags, scope, ifindex = _ADDRESS.unpack_from(message)
        attributes = dict(netlink.attributes(message, _ADDRESS.size))
        flags = netlink.number(attributes.get(IFA_FLAGS)) or flags  # the header has room for eight of them
        # Of a point-to-point address IFA_ADDRESS is the peer's, IFA_LOCAL ours.
        raw = attributes.get(IFA_LOCAL) or attributes.get(IFA_ADDRESS, b"")
        if scope or not _is_valid(flags):
            continue
        reluctance = bool(flags & IFA_F_SECONDARY) + 2 * bool(flags & IFA_F_DEPRECATED)
        if family == socket.AF_INET and len(raw) == 4:
            yield _Owned(ifindex, reluctance, Address(V4_PREFIX + raw))
        elif family == socket.AF_INET6 and len(raw) == 16:
            yield _Owned(ifindex, reluctance, Address(raw))


def _is_valid(flags: int) -> bool:
    """Whether duplicate address detection leaves it to be used (RFC 4862 5.4; optimistic: RFC 4429)."""
    tentative = flags & IFA_F_TENTATIVE and not flags & IFA_F_OPTIMISTIC
    return not tentative and not flags & IFA_F_DADFAILED


def _hops(multipath: bytes) -> Iterator[int]:
    offset = 0
    while offset + _HOP.size <= len(multipath):
        length, _, _, ifindex = _HOP.unpack_from(multipath, offset)
        if length < _HOP.size:
            return
        yield ifindex
        offset += (length + 3) & ~3


def _is_relevant(report: bytes) -> bool:
    """False for a route that is no default one of the main table: a router's come and go by the thousand."""
    if len(report) < _REPORT.size:
        return True
    kind, length, table = _REPORT.unpack_from(report)
    return kind not in (RTM_NEWROUTE, RTM_DELROUTE) or (length == 0 and table == RT_TABLE_MAIN)
