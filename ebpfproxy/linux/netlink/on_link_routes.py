"""On-link routes, and routes by which packets to on-link addresses of frontends reach egress at once.

The kernel sends a packet to an on-link address only once a machine has answered ARP or a neighbor
solicitation for that address. A load balancer address that this node announces has no such machine. Therefore
each on-link address of a frontend gets a route (`ip route show table all proto 235`):

    ip neighbor add 192.0.0.8 lladdr 02:eb:bf:00:00:02 nud permanent dev eth0
    ip route add 192.168.0.50 via 192.0.0.8 dev eth0 onlink src 192.168.0.1 metric 4294967295

The gateway does not exist; only its link-layer address matters. The egress program translates packets to
frontends, and sends all others to the neighbor that has their destination address (bpf/on_link.h). Device and
source address stay those of the on-link route.

192.0.0.8 is the dummy address of RFC 7600, which no machine has; the gateway of IPv6 is a link-local address
that is derived from the link-layer address. With the highest metric, a route of another program to the same
address has precedence.

All functions act in the calling thread's network namespace. Sources: fib_check_nh_nongw() and
fib_check_nh_v4_gw() of net/ipv4/fib_semantics.c, ip6_validate_gw() of net/ipv6/route.c.
"""

import errno
import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.netlink import iproute, netlink, rtnetlink
from ebpfproxy.linux.netlink.netlink import Request, encoded, rejecting
from ebpfproxy.linux.netlink.rtnetlink import NUMBERS, PROTOCOL, Route, raw
from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    family,
    format_address,
    network,
    network_family,
    parse_address,
)
from ebpfproxy.model.device import OnLinkRoute

MAC = bytes.fromhex("02ebbf000002")
"""The link-layer address of the gateways, locally administered (IEEE 802): is_on_link_gateway() of bpf/."""

GATEWAYS = {Family.IPV4: parse_address("192.0.0.8"), Family.IPV6: parse_address("fe80::eb:bfff:fe00:2")}

_METRIC = 0xFFFFFFFF
_SINGLE = 128  # the prefix length of one address, of both families
_LINK_LOCAL, _MULTICAST = bytes.fromhex("fe80"), b"\xff"
RTM_NEWNEIGH, RTM_DELNEIGH, RTM_GETNEIGH = 28, 29, 30
NDA_DST, NDA_LLADDR = 1, 2
NUD_PERMANENT = 0x80
NLM_F_REPLACE = 0x100
_NEIGHBOR = struct.Struct("=BxxxiHBB")  # struct ndmsg: family, ifindex, state, flags, type
_GONE = (errno.ENOENT, errno.ENODEV, errno.ESRCH, errno.ENETDOWN)


class Target(NamedTuple):
    """A routing table and an address that gets a route there."""

    table: int
    address: Address

    def __str__(self) -> str:
        return f"route of {format_address(self.address)} in table {self.table}"


class Path(NamedTuple):
    """The device of a route, and its source address, None for the kernel's choice."""

    ifindex: int
    source: Address | None


def of_devices(routes: Iterable[Route]) -> dict[int, tuple[OnLinkRoute, ...]]:
    """The on-link routes by ifindex, without those to single addresses, by default, and link-local ones.

    Of several routes of a table to the same network, only the preferred one counts. Routes of a device
    without a carrier do not count.
    """
    best: dict[tuple[int, Network], Route] = {}
    for route in routes:
        if route.length > 0 and route.network.length < _SINGLE and _is_used(route):
            key = route.table, route.network
            if key not in best or route.metric < best[key].metric:
                best[key] = route
    on_link = {key: each for key, each in best.items() if _has_neighbors(each)}
    lengths = sorted({net.length for _, net in on_link})  # few, while routes may be thousands
    holes: dict[tuple[int, Network], list[Network]] = {key: [] for key in on_link}
    for table, net in best:
        for length in lengths:
            around = table, network(net.address, length)
            if length < net.length and around in holes:
                holes[around].append(net)
    found: dict[int, list[OnLinkRoute]] = {}
    for key, each in on_link.items():
        planned = OnLinkRoute(each.table, each.network, each.source, tuple(sorted(holes[key])))
        found.setdefault(each.hop.ifindex, []).append(planned)
    return {ifindex: tuple(sorted(each, key=lambda at: at[:2])) for ifindex, each in found.items()}


def _is_used(route: Route) -> bool:
    """False for a route that a lookup by destination does not use: one of a type of service or source,
    without a carrier, or a link-local one."""
    address = route.network.address
    is_up = not route.flags & (rtnetlink.RTNH_F_DEAD | rtnetlink.RTNH_F_LINKDOWN)
    is_wide = address[:1] != _MULTICAST and address[:2] != _LINK_LOCAL
    return is_up and is_wide and route.by_destination and route.kind == rtnetlink.RTN_UNICAST


def _has_neighbors(route: Route) -> bool:
    ifindex, gateway = route.hop
    return ifindex != 0 and gateway is None and rtnetlink.RTA_ENCAP_TYPE not in route.attributes


def may_be_of_device(route: rtnetlink.ReportedRoute) -> bool:
    """Whether a reported route may be on-link. IPv6 has no scopes, so there routes of routing daemons do not
    count, since they usually have gateways."""
    if route.protocol == PROTOCOL:
        return False
    if route.family == socket.AF_INET:
        return route.length < 32 and route.scope == rtnetlink.RT_SCOPE_LINK
    by_node = route.protocol <= rtnetlink.RTPROT_STATIC
    by_node = by_node or route.protocol in (rtnetlink.RTPROT_RA, rtnetlink.RTPROT_DHCP)
    return route.table != rtnetlink.RT_TABLE_LOCAL and 0 < route.length < _SINGLE and by_node


def read() -> dict[Target, Path]:
    """The routes of frontends whose gateway has its neighbor entry. Raises Rejected."""
    found = _own_routes()
    known = _gateways(NUD_PERMANENT) if found else set()
    return {
        Target(each.table, each.network.address): Path(each.hop.ifindex, each.source)
        for each in found
        if _place(each) in known
    }


def put(routes: Mapping[Target, Path]) -> dict[Target, KernelError]:
    """Add or replace routes, and the neighbor entries of their gateways. Return what the kernel rejected.

    Raises Rejected.
    """
    places = sorted({(family(target.address).value, path.ifindex) for target, path in routes.items()})
    flags = netlink.NLM_F_CREATE | NLM_F_REPLACE
    targets = list(routes)
    requests = [_neighbor(RTM_NEWNEIGH, flags, Family(of), ifindex) for of, ifindex in places]
    requests += [_request(rtnetlink.RTM_NEWROUTE, flags, each, routes[each]) for each in targets]
    rejected = {}
    for position, rejection in _changes(requests).items():
        if position >= len(places):
            target = targets[position - len(places)]
            rejected[target] = _failure("add", target, rejection)
    return rejected


def remove(targets: Collection[Target]) -> dict[Target, KernelError]:
    """Remove routes, and the neighbor entries of gateways that no route needs any more. Return what the
    kernel rejected; a route that is gone is no error.

    Raises Rejected.
    """
    ordered = list(targets)
    found = _changes([_request(rtnetlink.RTM_DELROUTE, 0, each, None) for each in ordered])
    unneeded = _gateways() - set(map(_place, _own_routes()))  # the kernel may have removed their routes
    _changes([_neighbor(RTM_DELNEIGH, 0, *place) for place in unneeded])
    return {
        ordered[position]: _failure("remove", ordered[position], rejection)
        for position, rejection in found.items()
        if rejection.errno not in _GONE
    }


def remove_all(dry_run: bool = False) -> int:
    """Remove all routes of frontends, and the neighbor entries of gateways; return how many routes existed.

    With `dry_run` nothing changes. Raises KernelError.
    """
    targets = [Target(each.table, each.network.address) for each in _own_routes()]
    if not dry_run:
        for failure in remove(targets).values():
            raise failure
    return len(targets)


def _own_routes() -> list[Route]:
    with rejecting("cannot read the routes"):
        found = rtnetlink.routes(rtnetlink.RT_TABLE_UNSPEC, rtnetlink.RTN_UNICAST, {PROTOCOL})
    return [each for each in found if _is_used(each) and each.hop.gateway in GATEWAYS.values()]


def _place(route: Route) -> tuple[Family, int]:
    """Where the neighbor entry of the route's gateway is."""
    return network_family(route.network), route.hop.ifindex


def _request(kind: int, flags: int, target: Target, path: Path | None) -> Request:
    """`path`: None to remove the route."""
    values: dict[int, bytes | int | None] = {
        rtnetlink.RTA_TABLE: target.table,
        rtnetlink.RTA_PRIORITY: _METRIC,
    }
    hop = 0
    if path:
        of = family(target.address)
        hop = rtnetlink.RTNH_F_ONLINK if of is Family.IPV4 else 0
        values[rtnetlink.RTA_GATEWAY] = raw(GATEWAYS[of])
        values[rtnetlink.RTA_OIF] = path.ifindex
        values[rtnetlink.RTA_PREFSRC] = path.source and raw(path.source)
    unicast = rtnetlink.RTN_UNICAST
    return rtnetlink.own_route(kind, flags, target.address, encoded(values), type_=unicast, hop=hop)


def _neighbor(kind: int, flags: int, of: Family, ifindex: int) -> Request:
    head = _NEIGHBOR.pack(NUMBERS[of], ifindex, NUD_PERMANENT, 0, 0)
    return Request(kind, flags, head + encoded({NDA_DST: raw(GATEWAYS[of]), NDA_LLADDR: MAC}))


def _gateways(state: int = 0xFFFF) -> set[tuple[Family, int]]:
    """Family and ifindex of each neighbor entry of a gateway that is in one of these states (NUD_*)."""
    with rejecting("cannot read the neighbors"):
        found = netlink.dump(socket.NETLINK_ROUTE, RTM_GETNEIGH, _NEIGHBOR.pack(0, 0, 0, 0, 0))
    gateways = {raw(address): of for of, address in GATEWAYS.items()}
    places = set()
    for each in found:
        _, ifindex, current, _, _ = _NEIGHBOR.unpack_from(each)
        attributes = dict(netlink.attributes(each, _NEIGHBOR.size))
        of = gateways.get(attributes.get(NDA_DST, b""))
        if of and attributes.get(NDA_LLADDR) == MAC and current & state:
            places.add((of, ifindex))
    return places


def _changes(requests: Collection[Request]) -> dict[int, netlink.Rejection]:
    with rejecting("cannot change the routes of frontends"):
        return netlink.changes(socket.NETLINK_ROUTE, list(requests))


def _failure(action: str, target: Target, rejection: netlink.Rejection) -> KernelError:
    message = f"cannot {action} the route of the on-link frontend {format_address(target.address)}"
    if rejection.errno in _GONE:
        return NotFound(f"{message}: {rejection.reason}")
    return iproute.error(rejection.errno, message, rejection.reason)
