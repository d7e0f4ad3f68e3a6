"""rtnetlink(7): links, addresses and routes, each decoded in one place; requests about routes.

Constants are from include/uapi/linux/{rtnetlink,if_link,if_addr}.h. A payload is what follows struct
nlmsghdr, as `netlink` returns it. All functions act in the calling thread's network namespace, and raise
OSError with the kernel's errno. The callers convert it to an error of ebpfproxy.errors.
"""

import errno
import socket
import struct
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.linux.netlink import netlink
from ebpfproxy.model.address import V4_BITS, V4_PREFIX, Address, Family, Network, family

RTM_NEWLINK, RTM_GETLINK = 16, 18
RTM_NEWADDR, RTM_DELADDR, RTM_GETADDR = 20, 21, 22
RTM_NEWROUTE, RTM_DELROUTE, RTM_GETROUTE = 24, 25, 26

IFF_UP = 0x1
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINK, IFLA_MASTER = 1, 3, 4, 5, 10
IFLA_LINKINFO, IFLA_IFALIAS, IFLA_STATS64, IFLA_EXT_MASK, IFLA_LINK_NETNSID = 18, 20, 23, 29, 37
IFLA_INFO_KIND, IFLA_INFO_DATA = 1, 2
RTEXT_FILTER_SKIP_STATS = 1 << 3  # statistics are a quarter of each message, and costly for the kernel

IFA_ADDRESS, IFA_LOCAL, IFA_FLAGS = 1, 2, 8
IFA_F_NODAD, IFA_F_NOPREFIXROUTE = 0x2, 0x200

RT_TABLE_UNSPEC, RT_TABLE_MAIN, RT_TABLE_LOCAL = 0, 254, 255
RTN_UNICAST, RTN_LOCAL = 1, 2
RTA_DST, RTA_SRC, RTA_IIF, RTA_OIF, RTA_GATEWAY, RTA_PRIORITY, RTA_PREFSRC = 1, 2, 3, 4, 5, 6, 7
RTA_MULTIPATH, RTA_TABLE, RTA_VIA, RTA_ENCAP_TYPE = 9, 15, 18, 21  # RTA_VIA: a gateway of another family
RT_SCOPE_LINK, RT_SCOPE_HOST = 253, 254
RTM_F_CLONED = 0x200
RTNH_F_DEAD, RTNH_F_ONLINK, RTNH_F_LINKDOWN = 1, 4, 16
RTPROT_KERNEL, RTPROT_STATIC, RTPROT_RA, RTPROT_DHCP = 2, 4, 9, 16
PROTOCOL = 235  # of no routing daemon in include/uapi/linux/rtnetlink.h or /etc/iproute2/rt_protos
"""The protocol of the agent's routes."""
NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)
"""The errors of a lookup without a route, or with one of type unreachable, prohibit or blackhole."""

LINK = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, index, flags, change
ADDRESS = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, prefixlen, flags, scope, index
# struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags
ROUTE = struct.Struct("=BBBBBBBBI")
_PROTOCOL_AT, _KIND_AT = 5, 7  # in struct rtmsg
_HOP = struct.Struct("=HBBi")  # struct rtnexthop: len, flags, hops, ifindex; attributes follow
_VIA_FAMILY_BYTES = 2  # of RTA_VIA, before the address
# The type in struct nlmsghdr; family, destination's prefix length, table, protocol and scope in struct rtmsg.
_REPORT = struct.Struct("=4xH10xBB2xBBB")

NUMBERS = {Family.IPV4: int(socket.AF_INET), Family.IPV6: int(socket.AF_INET6)}
_SIZES = {int(socket.AF_INET): 4, int(socket.AF_INET6): 16}


class Link(NamedTuple):
    """`type` is ARPHRD_*. `kind` is IFLA_INFO_KIND, "" for hardware and for loopback. `details`: attributes
    that depend on the kind (IFLA_INFO_DATA)."""

    ifindex: int
    type: int
    kind: str
    up: bool
    attributes: Mapping[int, bytes]
    details: bytes

    @property
    def name(self) -> str:
        return netlink.text(self.attributes.get(IFLA_IFNAME))

    @property
    def note(self) -> str:
        """Its alias (`ip link show`)."""
        return netlink.text(self.attributes.get(IFLA_IFALIAS))

    @property
    def mac(self) -> bytes:
        """Its link-layer address; that of a tunnel device is its local IP address."""
        return self.attributes.get(IFLA_ADDRESS, b"")

    @property
    def mtu(self) -> int:
        return netlink.number(self.attributes.get(IFLA_MTU))

    @property
    def master(self) -> int:
        """The ifindex of the bridge, bond or VRF of which it is a port, 0 without one."""
        return netlink.number(self.attributes.get(IFLA_MASTER))

    @property
    def linked(self) -> int:
        """The ifindex of its peer, or of the device below it, 0 without one. It may be in another namespace:
        see IFLA_LINK_NETNSID."""
        return netlink.number(self.attributes.get(IFLA_LINK))


class DeviceAddress(NamedTuple):
    """`peer`: that of a point-to-point device, else `address`. `length`: of the prefix, in bits of its own
    family. `flags`: IFA_F_*. `scope`: RT_SCOPE_*."""

    ifindex: int
    address: Address
    peer: Address
    length: int
    flags: int
    scope: int


class Hop(NamedTuple):
    """A way of a route. The ifindex is 0 for a route without a device."""

    ifindex: int
    gateway: Address | None


class Route(NamedTuple):
    """A route, or the result of a lookup.

    - `length`: the prefix length of the destination, in bits of its own family. 0 for a default route.
    - `by_destination`: whether each lookup of a destination uses the route. False for one of a type of
      service or of source addresses.
    """

    table: int
    network: Network
    length: int
    protocol: int
    kind: int
    flags: int
    by_destination: bool
    attributes: Mapping[int, bytes]

    @property
    def metric(self) -> int:
        return netlink.number(self.attributes.get(RTA_PRIORITY))

    @property
    def source(self) -> Address | None:
        """The preferred source address."""
        found = self.attributes.get(RTA_PREFSRC)
        return mapped(found) if found else None

    @property
    def hops(self) -> list[Hop]:
        """Several for a multipath route. The kernel shows nexthop objects as their hops (sysctl
        net.ipv4.nexthop_compat_mode, on by default)."""
        if RTA_MULTIPATH in self.attributes:
            return list(_hops(self.attributes[RTA_MULTIPATH]))
        return [Hop(netlink.number(self.attributes.get(RTA_OIF)), _gateway(self.attributes))]

    @property
    def hop(self) -> Hop:
        """Its only hop; one without device and gateway for a multipath route."""
        hops = self.hops
        return hops[0] if len(hops) == 1 else Hop(0, None)


class ReportedRoute(NamedTuple):
    """The prefix length of its destination, in bits of its own family, its table, and its protocol: the
    program that added it (RTPROT_*). `scope`: RT_SCOPE_*, always 0 for IPv6."""

    length: int
    table: int
    protocol: int
    family: int
    scope: int


def mapped(raw: bytes) -> Address:
    """The address of an attribute of either family."""
    return Address(V4_PREFIX + raw if len(raw) == 4 else raw)


def raw(address: Address) -> bytes:
    """The value of an attribute: 4 or 16 bytes."""
    return address[len(V4_PREFIX) :] if family(address) is Family.IPV4 else address


def link(payload: bytes) -> Link:
    """The link in the payload of an RTM_NEWLINK."""
    _, type_, ifindex, flags, _ = LINK.unpack_from(payload)
    attributes = dict(netlink.attributes(payload, LINK.size))
    info = dict(netlink.attributes(attributes.get(IFLA_LINKINFO, b""), 0))
    kind = netlink.text(info.get(IFLA_INFO_KIND))
    return Link(ifindex, type_, kind, bool(flags & IFF_UP), attributes, info.get(IFLA_INFO_DATA, b""))


def links(statistics: bool = False) -> list[Link]:
    """All links. `statistics`: with IFLA_STATS64."""
    without = b"" if statistics else netlink.encoded({IFLA_EXT_MASK: RTEXT_FILTER_SKIP_STATS})
    return [link(each) for each in _dump(RTM_GETLINK, LINK.pack(0, 0, 0, 0, 0) + without)]


def find_link(name: str | None = None, ifindex: int = 0) -> Link | None:
    """The link of that name, or with that ifindex; None if there is none."""
    request = LINK.pack(0, 0, ifindex, 0, 0) + netlink.encoded({IFLA_IFNAME: name})
    try:
        answers = netlink.get(socket.NETLINK_ROUTE, RTM_GETLINK, request)
    except OSError as error:
        if error.errno == errno.ENODEV:
            return None
        raise
    return link(answers[0]) if answers else None


def addresses(ifindex: int = 0) -> list[DeviceAddress]:
    """The addresses of a device, 0 for all devices. Empty if the device is gone."""
    try:
        found = decoded_addresses(_dump(RTM_GETADDR, ADDRESS.pack(0, 0, 0, 0, ifindex)))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return []
        raise
    return [each for each in found if ifindex in (0, each.ifindex)]  # a kernel before 4.20 returns all


def decoded_addresses(payloads: Iterable[bytes]) -> list[DeviceAddress]:
    """The addresses in payloads of RTM_NEWADDR, without those of other families."""
    found = []
    for payload in payloads:
        number, length, flags, scope, ifindex = ADDRESS.unpack_from(payload)
        attributes = dict(netlink.attributes(payload, ADDRESS.size))
        # On a point-to-point device IFA_ADDRESS is the peer's address, IFA_LOCAL the local one.
        peer = attributes.get(IFA_ADDRESS, b"")
        local = attributes.get(IFA_LOCAL) or peer
        peer = peer or local
        if len(local) == len(peer) == _SIZES.get(number):
            # The header has only the lower eight flags.
            flags = netlink.number(attributes.get(IFA_FLAGS)) or flags
            found.append(DeviceAddress(ifindex, mapped(local), mapped(peer), length, flags, scope))
    return found


def route(payload: bytes) -> Route:
    """The route in the payload of an RTM_NEWROUTE of IPv4 or IPv6."""
    number, length, source_length, service, table, protocol, _, kind, flags = ROUTE.unpack_from(payload)
    found = dict(netlink.attributes(payload, ROUTE.size))
    to = found.get(RTA_DST, b"")
    if number == socket.AF_INET:
        net = Network(Address(V4_PREFIX + to[:4].ljust(4, b"\0")), V4_BITS + length)
    else:
        net = Network(Address(to[:16].ljust(16, b"\0")), length)
    table = netlink.number(found.get(RTA_TABLE)) or table
    return Route(table, net, length, protocol, kind, flags, not (source_length or service), found)


def _hops(multipath: bytes) -> Iterator[Hop]:
    offset = 0
    while offset + _HOP.size <= len(multipath):
        length, _, _, ifindex = _HOP.unpack_from(multipath, offset)
        if length < _HOP.size:
            return
        attributes = dict(netlink.attributes(multipath[offset : offset + length], _HOP.size))
        yield Hop(ifindex, _gateway(attributes))
        offset += (length + 3) & ~3


def _gateway(attributes: Mapping[int, bytes]) -> Address | None:
    found = attributes.get(RTA_GATEWAY) or attributes.get(RTA_VIA, b"")[_VIA_FAMILY_BYTES:]
    return mapped(found) if found else None


def routes(
    table: int, kind: int = 0, protocols: Container[int] = range(256), of: Iterable[Family] = Family
) -> list[Route]:
    """The routes of these families in `table` (RT_TABLE_*) with the type `kind` (RTN_*, 0 for all).

    With RT_TABLE_UNSPEC, those of all tables. `protocols`: those of these programs (RTPROT_*).
    """
    found: list[bytes] = []
    for each in of:
        request = ROUTE.pack(NUMBERS[each], 0, 0, 0, table, 0, 0, kind, 0)
        try:
            found += _dump(RTM_GETROUTE, request)
        except OSError as error:
            if error.errno != errno.ENOENT:  # a table exists only once it has had a route
                raise
    # A kernel before 4.20 returns all routes: see `netlink.dump`.
    wanted = (each for each in found if each[_PROTOCOL_AT] in protocols and kind in (0, each[_KIND_AT]))
    return [
        each
        for each in map(route, wanted)
        if table in (RT_TABLE_UNSPEC, each.table) and not each.flags & RTM_F_CLONED
    ]


def lookup(to: Address, source: Address | None = None, **devices: int) -> Route | None:
    """The route of packets to `to`. None if the kernel reports none without an error.

    `source`: their source. `arrives_by`, `leaves_by`: the ifindex of a device.
    """
    values = {
        RTA_DST: raw(to),
        RTA_SRC: source and raw(source),
        RTA_IIF: devices.get("arrives_by"),
        RTA_OIF: devices.get("leaves_by"),
    }
    bits = 8 * len(raw(to))
    head = ROUTE.pack(NUMBERS[family(to)], bits, bits if source else 0, 0, 0, 0, 0, 0, 0)
    replies = netlink.get(socket.NETLINK_ROUTE, RTM_GETROUTE, head + netlink.encoded(values))
    return route(replies[0]) if replies else None


def is_local(address: Address, ifindex: int = 0) -> bool:
    """Whether packets to an address are delivered to this node.

    A link-local address needs the `ifindex` of its device.
    """
    try:
        found = lookup(address, leaves_by=ifindex) if ifindex else lookup(address)
    except OSError as error:
        if error.errno in NO_ROUTE:
            return False
        raise
    return found is not None and found.kind == RTN_LOCAL


def own_route(
    kind: int, flags: int, to: Address, attributes: bytes, *, type_: int, scope: int = 0, hop: int = 0
) -> netlink.Request:
    """A request about a route of PROTOCOL to one address. `kind`: RTM_*. `type_`: RTN_*. `hop`: RTNH_F_*."""
    address = raw(to)
    head = ROUTE.pack(NUMBERS[family(to)], 8 * len(address), 0, 0, 0, PROTOCOL, scope, type_, hop)
    return netlink.Request(kind, flags, head + netlink.attribute(RTA_DST, address) + attributes)


def reported_route(report: bytes) -> ReportedRoute | None:
    """The route in a notification (with struct nlmsghdr). None if it is truncated or has no route."""
    if len(report) < _REPORT.size:
        return None
    kind, number, length, table, protocol, scope = _REPORT.unpack_from(report)
    is_route = kind in (RTM_NEWROUTE, RTM_DELROUTE)
    return ReportedRoute(length, table, protocol, number, scope) if is_route else None


def _dump(kind: int, request: bytes) -> list[bytes]:
    return netlink.dump(socket.NETLINK_ROUTE, kind, request, strict=True)
