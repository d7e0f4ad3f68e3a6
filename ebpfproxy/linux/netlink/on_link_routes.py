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

All functions act in the calling thread's network namespace. They use raw netlink instead of pyroute2 (see
`netlink`). Sources: fib_check_nh_nongw() and fib_check_nh_v4_gw() of net/ipv4/fib_semantics.c,
ip6_validate_gw() of net/ipv6/route.c.
"""

import errno
import os
import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.errors import KernelError, NotFound, Rejected
from ebpfproxy.linux.netlink import iproute, netlink, rtnetlink
from ebpfproxy.linux.netlink.local_routes import PROTOCOL
from ebpfproxy.linux.netlink.netlink import Request, attribute
from ebpfproxy.linux.netlink.routing import mapped
from ebpfproxy.model.address import (
    V4_BITS,
    V4_PREFIX,
    Address,
    Family,
    Network,
    family,
    format_address,
    network,
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
_U32 = struct.Struct("=I")
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


class _Route(NamedTuple):
    """A route to a network. `ifindex` is 0 for a route of several hops. `has_neighbors`: it is on-link."""

    table: int
    network: Network
    metric: int
    ifindex: int
    source: Address | None
    gateway: Address | None
    protocol: int
    has_neighbors: bool


def of_devices(routes: Iterable[bytes]) -> dict[int, tuple[OnLinkRoute, ...]]:
    """The on-link routes by ifindex, without those to single addresses, by default, and link-local ones.

    `routes`: payloads of RTM_NEWROUTE. Of several routes of a table to the same network, only the preferred
    one counts. Routes of a device without a carrier do not count.
    """
    best: dict[tuple[int, Network], _Route] = {}
    for payload in routes:
        _, length, *_ = rtnetlink.ROUTE.unpack_from(payload)
        route = _route(payload) if length else None
        if route and route.network.length < _SINGLE:
            key = route.table, route.network
            if key not in best or route.metric < best[key].metric:
                best[key] = route
    on_link = {key: each for key, each in best.items() if each.has_neighbors}
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
        found.setdefault(each.ifindex, []).append(planned)
    return {ifindex: tuple(sorted(each, key=lambda at: at[:2])) for ifindex, each in found.items()}


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
    found = {Target(each.table, each.network.address): each for each in _own_routes()}
    places = {(family(target.address), each.ifindex) for target, each in found.items()}
    known = {place for place in places if _has_neighbor(*place)}
    return {
        target: Path(each.ifindex, each.source)
        for target, each in found.items()
        if (family(target.address), each.ifindex) in known
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
    needed = {(family(each.network.address), each.ifindex) for each in _own_routes()}
    _changes([_neighbor(RTM_DELNEIGH, 0, *place) for place in _gateways() - needed])
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


def _own_routes() -> list[_Route]:
    try:
        found = rtnetlink.routes(rtnetlink.RT_TABLE_UNSPEC, rtnetlink.RTN_UNICAST, PROTOCOL)
    except OSError as error:
        raise Rejected(f"cannot read the routes: {error.strerror or error}") from error
    return [
        each
        for each in map(_route, found)
        if each and each.protocol == PROTOCOL and each.gateway in GATEWAYS.values()
    ]


def _route(payload: bytes) -> _Route | None:
    """None for a route that a lookup by destination does not use: one of a type of service or source, without
    a carrier, or a link-local one."""
    number, length, source_length, service, table, protocol, _, kind, flags = rtnetlink.ROUTE.unpack_from(
        payload
    )
    is_down = flags & (rtnetlink.RTNH_F_DEAD | rtnetlink.RTNH_F_LINKDOWN)
    if source_length or service or kind != rtnetlink.RTN_UNICAST or is_down:
        return None
    is_v4 = number == socket.AF_INET
    found = dict(netlink.attributes(payload, rtnetlink.ROUTE.size))
    raw = found.get(rtnetlink.RTA_DST, b"").ljust(4 if is_v4 else 16, b"\0")
    if not is_v4 and (raw[:1] == _MULTICAST or raw[:2] == _LINK_LOCAL):
        return None
    ifindex = netlink.number(found.get(rtnetlink.RTA_OIF))
    indirect = (rtnetlink.RTA_GATEWAY, rtnetlink.RTA_VIA, rtnetlink.RTA_MULTIPATH, rtnetlink.RTA_ENCAP_TYPE)
    return _Route(
        netlink.number(found.get(rtnetlink.RTA_TABLE)) or table,
        Network(mapped(raw), V4_BITS + length if is_v4 else length),
        netlink.number(found.get(rtnetlink.RTA_PRIORITY)),
        ifindex,
        mapped(found[rtnetlink.RTA_PREFSRC]) if rtnetlink.RTA_PREFSRC in found else None,
        mapped(found[rtnetlink.RTA_GATEWAY]) if rtnetlink.RTA_GATEWAY in found else None,
        protocol,
        bool(ifindex) and not any(each in found for each in indirect),
    )


def _raw(address: Address) -> bytes:
    return address[len(V4_PREFIX) :] if family(address) is Family.IPV4 else address


def _request(kind: int, flags: int, target: Target, path: Path | None) -> Request:
    """`path`: None to remove the route."""
    of, raw = family(target.address), _raw(target.address)
    is_v4 = of is Family.IPV4
    body = rtnetlink.ROUTE.pack(
        socket.AF_INET if is_v4 else socket.AF_INET6,
        8 * len(raw),
        0,
        0,
        0,
        PROTOCOL,
        0,
        rtnetlink.RTN_UNICAST,
        rtnetlink.RTNH_F_ONLINK if is_v4 and path else 0,
    )
    body += attribute(rtnetlink.RTA_TABLE, _U32.pack(target.table))
    body += attribute(rtnetlink.RTA_DST, raw) + attribute(rtnetlink.RTA_PRIORITY, _U32.pack(_METRIC))
    if path:
        body += attribute(rtnetlink.RTA_GATEWAY, _raw(GATEWAYS[of]))
        body += attribute(rtnetlink.RTA_OIF, _U32.pack(path.ifindex))
        body += attribute(rtnetlink.RTA_PREFSRC, _raw(path.source)) if path.source else b""
    return Request(kind, flags, body)


def _neighbor(kind: int, flags: int, of: Family, ifindex: int) -> Request:
    return Request(kind, flags, _gateway(of, ifindex, NUD_PERMANENT) + attribute(NDA_LLADDR, MAC))


def _gateway(of: Family, ifindex: int, state: int) -> bytes:
    number = socket.AF_INET if of is Family.IPV4 else socket.AF_INET6
    return _NEIGHBOR.pack(number, ifindex, state, 0, 0) + attribute(NDA_DST, _raw(GATEWAYS[of]))


def _has_neighbor(of: Family, ifindex: int) -> bool:
    request = _gateway(of, ifindex, 0)
    try:
        found = netlink.get(socket.NETLINK_ROUTE, RTM_GETNEIGH, request)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise Rejected(f"cannot read a neighbor: {error.strerror or error}") from error
    return any(
        _NEIGHBOR.unpack_from(each)[2] & NUD_PERMANENT
        and dict(netlink.attributes(each, _NEIGHBOR.size)).get(NDA_LLADDR) == MAC
        for each in found
    )


def _gateways() -> set[tuple[Family, int]]:
    """Family and ifindex of each neighbor entry of a gateway. The kernel may have removed their routes."""
    try:
        found = netlink.dump(socket.NETLINK_ROUTE, RTM_GETNEIGH, _NEIGHBOR.pack(0, 0, 0, 0, 0))
    except OSError as error:
        raise Rejected(f"cannot read the neighbors: {error.strerror or error}") from error
    gateways = {_raw(address): of for of, address in GATEWAYS.items()}
    places = set()
    for each in found:
        attributes = dict(netlink.attributes(each, _NEIGHBOR.size))
        of = gateways.get(attributes.get(NDA_DST, b""))
        if of and attributes.get(NDA_LLADDR) == MAC:
            places.add((of, _NEIGHBOR.unpack_from(each)[1]))
    return places


def _changes(requests: Collection[Request]) -> dict[int, netlink.Rejection]:
    try:
        return netlink.changes(socket.NETLINK_ROUTE, list(requests))
    except OSError as error:
        raise Rejected(f"cannot change the routes of frontends: {error.strerror or error}") from error


def _failure(action: str, target: Target, rejection: netlink.Rejection) -> KernelError:
    message = f"cannot {action} the route of the on-link frontend {format_address(target.address)}"
    if rejection.errno in _GONE:
        return NotFound(f"{message}: {rejection.reason}")
    return iproute.error(rejection.errno, message, rejection.reason or os.strerror(rejection.errno))
