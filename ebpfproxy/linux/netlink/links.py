"""The network devices of this node: kind, addresses, and which of them default routes lead to.

Everything here acts in the network namespace that the calling thread is in. Read with raw netlink,
not with pyroute2, since a node has a device for each pod: see `netlink`.
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import netlink, rtnetlink, rtnetlink_watch
from ebpfproxy.model.address import V4_PREFIX, Address
from ebpfproxy.model.device import PAIRS, Device

RTEXT_FILTER_SKIP_STATS = 1 << 3  # a quarter of each message, and much of the kernel's work on it
RTM_F_CLONED = 0x200

IFA_F_SECONDARY = 0x01  # of IPv6: IFA_F_TEMPORARY (RFC 8981)
IFA_F_OPTIMISTIC = 0x04
IFA_F_DADFAILED = 0x08
IFA_F_DEPRECATED = 0x20
IFA_F_TENTATIVE = 0x40

_HOP = struct.Struct("=HBBi")  # struct rtnexthop: len, flags, hops, ifindex; attributes follow


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
    try:
        links = _dump(rtnetlink.RTM_GETLINK, rtnetlink.LINK.pack(0, 0, 0, 0, 0) + _SKIP_STATS)
        addresses = _dump(rtnetlink.RTM_GETADDR, rtnetlink.ADDRESS.pack(0, 0, 0, 0, 0))
        routes = rtnetlink.routes(rtnetlink.RT_TABLE_MAIN, rtnetlink.RTN_UNICAST)
    except OSError as error:
        raise _unreadable(error) from error
    return devices(links, addresses, routes)


def names() -> dict[int, str]:
    """The name of every device, by ifindex: as `read` returns it, in a hundredth of its time.

    Raises Rejected.
    """
    try:
        return dict(socket.if_nameindex())
    except OSError as error:
        raise _unreadable(error) from error


class Packets(NamedTuple):
    """What a device has counted since it was made: struct rtnl_link_stats64, rx_packets and tx_packets."""

    received: int
    sent: int


def packets() -> dict[int, Packets]:
    """By ifindex, of every device that counts. Raises Rejected."""
    try:
        found = _dump(rtnetlink.RTM_GETLINK, rtnetlink.LINK.pack(0, 0, 0, 0, 0))
    except OSError as error:
        raise _unreadable(error) from error
    counts = {}
    for link in map(rtnetlink.link, found):
        statistics = link.attributes.get(rtnetlink.IFLA_STATS64, b"")
        if len(statistics) >= _STATISTICS.size:
            counts[link.ifindex] = Packets._make(_STATISTICS.unpack_from(statistics))
    return counts


_STATISTICS = struct.Struct("=QQ")  # the first two of struct rtnl_link_stats64
_SKIP_STATS = netlink.attribute(rtnetlink.IFLA_EXT_MASK, struct.pack("=I", RTEXT_FILTER_SKIP_STATS))


def watch(changed: Callable[[tuple[Device, ...]], object], stop: threading.Event) -> None:
    """Report the devices to `changed` at once, and again whenever they differ, until `stop` is set.

    Runs in the calling thread and calls `changed` in it: see `rtnetlink_watch`.

    A device that is deleted and made again between two readings differs by its ifindex, unless its maker
    asked for the same one; one that was in another network namespace meanwhile keeps its own. Where all
    else is as before, too, nothing is reported, though the device has lost its filters: who put some there
    has to look for them from time to time.

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
    unless another program turned it off).
    """
    found: set[int] = set()
    for route in routes:
        _, length, _, _, table, _, _, kind, flags = rtnetlink.ROUTE.unpack_from(route)
        if length or kind != rtnetlink.RTN_UNICAST or flags & RTM_F_CLONED:
            continue
        attributes = dict(netlink.attributes(route, rtnetlink.ROUTE.size))
        if (netlink.number(attributes.get(rtnetlink.RTA_TABLE)) or table) == rtnetlink.RT_TABLE_MAIN:
            found.add(netlink.number(attributes.get(rtnetlink.RTA_OIF)))
            found.update(_hops(attributes.get(rtnetlink.RTA_MULTIPATH, b"")))
    return found - {0}


def _dump(kind: int, request: bytes) -> list[bytes]:
    return netlink.dump(socket.NETLINK_ROUTE, kind, request, strict=True)


def _unreadable(error: OSError) -> Rejected:
    return Rejected(f"the network devices cannot be read: {error.strerror or error}")


def _device(payload: bytes) -> Device:
    link = rtnetlink.link(payload)
    return Device(
        ifindex=link.ifindex,
        name=netlink.text(link.attributes.get(rtnetlink.IFLA_IFNAME)),
        kind=link.kind,
        link_type=link.type,
        up=link.up,
        master=netlink.number(link.attributes.get(rtnetlink.IFLA_MASTER)),
        peer_elsewhere=link.kind in PAIRS and rtnetlink.IFLA_LINK_NETNSID in link.attributes,
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
        family, _, flags, scope, ifindex = rtnetlink.ADDRESS.unpack_from(message)
        attributes = dict(netlink.attributes(message, rtnetlink.ADDRESS.size))
        # The header has room for eight flags.
        flags = netlink.number(attributes.get(rtnetlink.IFA_FLAGS)) or flags
        # Of a point-to-point address IFA_ADDRESS is the peer's, IFA_LOCAL ours.
        raw = attributes.get(rtnetlink.IFA_LOCAL) or attributes.get(rtnetlink.IFA_ADDRESS, b"")
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
    route = rtnetlink.reported_route(report)
    return route is None or route == (0, rtnetlink.RT_TABLE_MAIN)
