"""The network devices of this node: their kind, their addresses, and whether a default route uses them.

All functions act in the calling thread's network namespace. They use raw netlink instead of pyroute2, since a
node has a device for each pod (see `netlink`).
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import netlink, on_link_routes, rtnetlink, rtnetlink_watch
from ebpfproxy.linux.netlink.local_routes import PROTOCOL
from ebpfproxy.linux.netlink.routing import gateway_of, mapped
from ebpfproxy.model.address import V4_BITS, V4_PREFIX, Address, Network, network
from ebpfproxy.model.device import PAIRS, Device

RTEXT_FILTER_SKIP_STATS = 1 << 3  # statistics are a quarter of each message, and costly for the kernel
RTM_F_CLONED = 0x200

IFA_F_SECONDARY = 0x01  # of IPv6: IFA_F_TEMPORARY (RFC 8981)
IFA_F_OPTIMISTIC = 0x04
IFA_F_DADFAILED = 0x08
IFA_F_DEPRECATED = 0x20
IFA_F_TENTATIVE = 0x40

_WITH_SOURCE = tuple(struct.pack("=HH", 4 + size, rtnetlink.RTA_PREFSRC) for size in (4, 16))
"""The header of RTA_PREFSRC for each family: a fast test, since a node may have a million routes."""

_ADDRESS_BITS, _V4_BYTES, _V6_BYTES = 128, 4, 16
_RTPROT_KERNEL = 2
_WITHOUT_PREFERENCE = frozenset({_RTPROT_KERNEL, PROTOCOL})
_DEPRECATED = 2  # the least `rank` of a deprecated address
_HOP = struct.Struct("=HBBi")  # struct rtnexthop: len, flags, hops, ifindex; attributes follow


def read() -> tuple[Device, ...]:
    """Every device, sorted by ifindex.

    Its addresses are those that can be the source of its packets: of global scope and not tentative. They are
    sorted by the kernel's preference. Secondary addresses of IPv4, temporary ones of IPv6 and deprecated ones
    are last.

    Devices, addresses and routes are three dumps. A device that is created between them may lack its
    addresses; `watch` then reads again. The kernel can filter neither default routes nor on-link routes nor
    preferred sources, so the function reads the routes of all tables: 0.5 s for 100 000 routes.

    Raises Rejected.
    """
    try:
        links, addresses = dump(), _addresses()
        routes = rtnetlink.routes(rtnetlink.RT_TABLE_UNSPEC, rtnetlink.RTN_UNICAST)
    except OSError as error:
        raise _unreadable(error) from error
    return devices(links, addresses, routes)


def with_addresses(links: Iterable[bytes]) -> tuple[Device, ...]:
    """The devices in the result of `dump`, without facts about routes. Raises OSError."""
    return devices(links, _addresses(), ())


def names() -> dict[int, str]:
    """The name of every device, by ifindex. Takes a hundredth of the time of `read`.

    Raises Rejected.
    """
    try:
        return dict(socket.if_nameindex())
    except OSError as error:
        raise _unreadable(error) from error


def up() -> frozenset[int]:
    """The ifindexes of the devices that are up. Raises Rejected."""
    try:
        return frozenset(link.ifindex for link in map(rtnetlink.link, dump()) if link.up)
    except OSError as error:
        raise _unreadable(error) from error


class Packets(NamedTuple):
    """Packets since the device was created: rx_packets and tx_packets of struct rtnl_link_stats64."""

    received: int
    sent: int


def packets() -> dict[int, Packets]:
    """The packet counters of every device that has them, by ifindex. Raises Rejected."""
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


_STATISTICS = struct.Struct("=QQ")  # the first two fields of struct rtnl_link_stats64
_SKIP_STATS = netlink.attribute(rtnetlink.IFLA_EXT_MASK, struct.pack("=I", RTEXT_FILTER_SKIP_STATS))


def watch(changed: Callable[[tuple[Device, ...]], object], stop: threading.Event) -> None:
    """Report the devices to `changed` at once, and again after each change, until `stop` is set.

    Runs in the calling thread and calls `changed` in it: see `rtnetlink_watch`.

    A device that is deleted and created again between two reads usually gets a new ifindex. It keeps its
    ifindex if its creator requests that, or if it was only moved to another network namespace and back. Then
    nothing may be reported, although the device has lost its filters. Owners of filters must check them
    periodically.

    Raises Rejected if the first read or the subscription fails.
    """
    rtnetlink_watch.watch("the network devices", read, _is_relevant, changed, stop)


def devices(
    links: Iterable[bytes], addresses: Iterable[bytes], routes: Iterable[bytes]
) -> tuple[Device, ...]:
    """The devices in payloads of RTM_NEWLINK, RTM_NEWADDR and RTM_NEWROUTE, sorted by ifindex."""
    by_ifindex = {device.ifindex: device for device in map(_device, links)}
    usable = sorted(_usable(addresses), key=lambda each: each.rank)
    addresses_by_ifindex: dict[int, list[Address]] = {}
    networks_by_ifindex: dict[int, set[Network]] = {}
    connected_by_ifindex: dict[int, list[tuple[Network, Address]]] = {}
    for each in usable:
        addresses_by_ifindex.setdefault(each.ifindex, []).append(each.address)
        networks_by_ifindex.setdefault(each.ifindex, set()).add(each.network)
        if each.rank < _DEPRECATED:
            connected_by_ifindex.setdefault(each.ifindex, []).append((each.network, each.address))
    all_routes = list(routes)
    with_default_route = default_devices(all_routes)
    preferred = preferred_sources(all_routes)
    on_link = on_link_routes.of_devices(all_routes)
    return tuple(
        device._replace(
            master_kind=by_ifindex[device.master].kind if device.master in by_ifindex else "",
            addresses=tuple(addresses_by_ifindex.get(ifindex, ())),
            networks=tuple(sorted(networks_by_ifindex.get(ifindex, ()))),
            default_route=ifindex in with_default_route,
            connected=tuple(connected_by_ifindex.get(ifindex, ())),
            preferred=preferred.get(ifindex, ()),
            on_link=on_link.get(ifindex, ()),
        )
        for ifindex, device in sorted(by_ifindex.items())
    )


def default_devices(routes: Iterable[bytes]) -> set[int]:
    """The ifindexes of the devices that default routes of the main table use.

    All hops of a multipath route count. The kernel shows nexthop objects as their hops (sysctl
    net.ipv4.nexthop_compat_mode, on by default).
    """
    found: set[int] = set()
    for route in routes:
        _, length, _, _, table, _, _, kind, flags = rtnetlink.ROUTE.unpack_from(route)
        if length or kind != rtnetlink.RTN_UNICAST or flags & RTM_F_CLONED:
            continue
        attributes = dict(netlink.attributes(route, rtnetlink.ROUTE.size))
        if (netlink.number(attributes.get(rtnetlink.RTA_TABLE)) or table) == rtnetlink.RT_TABLE_MAIN:
            found.add(netlink.number(attributes.get(rtnetlink.RTA_OIF)))
            found.update(each for each, _ in _hops(attributes.get(rtnetlink.RTA_MULTIPATH, b"")))
    return found - {0}


def preferred_sources(routes: Iterable[bytes]) -> dict[int, tuple[tuple[Network, Address], ...]]:
    """The preferred source addresses of routes, by ifindex: see `Device.preferred`.

    The kernel's routes to the networks of addresses do not count, since `Device.connected` has them, and
    those of `on_link_routes`. Of routes by the same gateway, one of the main table precedes others, then the
    one with the shortest prefix.
    """
    found: dict[int, dict[Network, tuple[bool, int, Address]]] = {}
    for route in routes:
        if not any(each in route for each in _WITH_SOURCE):
            continue
        family, length, _, _, table, protocol, _, kind, flags = rtnetlink.ROUTE.unpack_from(route)
        if kind != rtnetlink.RTN_UNICAST or flags & RTM_F_CLONED or protocol in _WITHOUT_PREFERENCE:
            continue
        attributes = dict(netlink.attributes(route, rtnetlink.ROUTE.size))
        if rtnetlink.RTA_PREFSRC not in attributes:
            continue
        bits, size = (V4_BITS, _V4_BYTES) if family == socket.AF_INET else (0, _V6_BYTES)
        to = network(mapped(attributes.get(rtnetlink.RTA_DST, bytes(size))), bits + length)
        table = netlink.number(attributes.get(rtnetlink.RTA_TABLE)) or table
        rank = table != rtnetlink.RT_TABLE_MAIN, length, mapped(attributes[rtnetlink.RTA_PREFSRC])
        single = [(netlink.number(attributes.get(rtnetlink.RTA_OIF)), attributes)]
        for ifindex, hop in _hops(attributes.get(rtnetlink.RTA_MULTIPATH, b"")) or single:
            gateway = gateway_of(hop)
            hops = Network(gateway, _ADDRESS_BITS) if gateway else to
            by_hops = found.setdefault(ifindex, {})
            by_hops[hops] = min(rank, by_hops.get(hops, rank))
    return {
        ifindex: tuple((hops, source) for hops, (*_, source) in sorted(by_hops.items()))
        for ifindex, by_hops in found.items()
    }


def dump() -> list[bytes]:
    """The payloads of RTM_NEWLINK for all devices, without statistics. Raises OSError."""
    return _dump(rtnetlink.RTM_GETLINK, rtnetlink.LINK.pack(0, 0, 0, 0, 0) + _SKIP_STATS)


def _addresses() -> list[bytes]:
    return _dump(rtnetlink.RTM_GETADDR, rtnetlink.ADDRESS.pack(0, 0, 0, 0, 0))


def _dump(kind: int, request: bytes) -> list[bytes]:
    return netlink.dump(socket.NETLINK_ROUTE, kind, request, strict=True)


def _unreadable(error: OSError) -> Rejected:
    return Rejected(f"cannot read the network devices: {error.strerror or error}")


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
        mac=link.attributes.get(rtnetlink.IFLA_ADDRESS, b""),
    )


class _SourceAddress(NamedTuple):
    """An address of a device. `rank`: the kernel prefers lower ones as a source, starting at 0.

    `network`: of its prefix; on a point-to-point device, the one of the peer.
    """

    ifindex: int
    rank: int
    address: Address
    network: Network


def _usable(messages: Iterable[bytes]) -> Iterator[_SourceAddress]:
    for message in messages:
        family, length, flags, scope, ifindex = rtnetlink.ADDRESS.unpack_from(message)
        attributes = dict(netlink.attributes(message, rtnetlink.ADDRESS.size))
        # The header has only the lower eight flags.
        flags = netlink.number(attributes.get(rtnetlink.IFA_FLAGS)) or flags
        # On a point-to-point device IFA_ADDRESS is the peer's address, IFA_LOCAL the local one.
        peer = attributes.get(rtnetlink.IFA_ADDRESS, b"")
        raw = attributes.get(rtnetlink.IFA_LOCAL) or peer
        if scope or not _is_valid(flags):
            continue
        rank = bool(flags & IFA_F_SECONDARY) + _DEPRECATED * bool(flags & IFA_F_DEPRECATED)
        if family == socket.AF_INET and len(raw) == 4:
            net = network(Address(V4_PREFIX + (peer or raw)), V4_BITS + length)
            yield _SourceAddress(ifindex, rank, Address(V4_PREFIX + raw), net)
        elif family == socket.AF_INET6 and len(raw) == 16:
            net = network(Address(peer or raw), length)
            yield _SourceAddress(ifindex, rank, Address(raw), net)


def _is_valid(flags: int) -> bool:
    """Whether duplicate address detection permits its use (RFC 4862 5.4; optimistic addresses: RFC 4429)."""
    tentative = flags & IFA_F_TENTATIVE and not flags & IFA_F_OPTIMISTIC
    return not tentative and not flags & IFA_F_DADFAILED


def _hops(multipath: bytes) -> list[tuple[int, dict[int, bytes]]]:
    """The ifindex and the attributes of each hop of RTA_MULTIPATH."""
    found = []
    offset = 0
    while offset + _HOP.size <= len(multipath):
        length, _, _, ifindex = _HOP.unpack_from(multipath, offset)
        if length < _HOP.size:
            break
        found.append((ifindex, dict(netlink.attributes(multipath[offset : offset + length], _HOP.size))))
        offset += (length + 3) & ~3
    return found


def _is_relevant(report: bytes) -> bool:
    """False for a route that is no default route of the main table, may not be an on-link route, and has no
    preferred source.

    A router changes thousands of them.
    """
    route = rtnetlink.reported_route(report)
    if route is None or (route.length, route.table) == (0, rtnetlink.RT_TABLE_MAIN):
        return True
    if on_link_routes.may_be_of_device(route):
        return True
    return route.protocol not in _WITHOUT_PREFERENCE and any(each in report for each in _WITH_SOURCE)
