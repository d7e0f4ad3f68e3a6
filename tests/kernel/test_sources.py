"""The planned source addresses compared with those that the kernel selects for its own packets.

The table of kernels without BPF_FIB_LOOKUP_SRC so has the same result as the lookup of newer ones.
"""

import pytest

from ebpfproxy.linux.netlink import links, routing
from ebpfproxy.model.address import Address, family, format_address, parse_address
from ebpfproxy.model.device import Device
from ebpfproxy.plan.sources import plan_sources, source_for
from tests.support.namespace import namespace

pytestmark = pytest.mark.kernel

TWO_SUBNETS = ("addr add 203.0.113.2/24 dev n0", "addr add 192.0.2.10/24 dev n0")
BOTH_KINDS = ("addr add 2001:db8::10/64 dev n0 nodad", "addr add fd00:5::10/64 dev n0 nodad")
ROUTER = "route add default via 192.0.2.1"
ROUTER_V6 = "route add default via fe80::1 dev n0"
SITUATIONS = {
    "one address": ("addr add 192.0.2.10/24 dev n0", ROUTER),
    "two subnets": (*TWO_SUBNETS, ROUTER, "route add 10.0.0.0/8 via 203.0.113.1"),
    "DHCP beside a static address": (
        *TWO_SUBNETS,
        "route add default via 203.0.113.1 src 203.0.113.2",
        "route add 10.0.0.0/8 via 192.0.2.1",
    ),
    "a secondary address is preferred": (
        "addr add 192.0.2.10/24 dev n0",
        "addr add 192.0.2.11/24 dev n0",
        f"{ROUTER} src 192.0.2.11",
    ),
    "an address of loopback is preferred": (
        "addr add 192.0.2.10/24 dev n0",
        "addr add 198.51.100.1/32 dev lo",
        f"{ROUTER} src 198.51.100.1",
    ),
    "only loopback has an address": (
        "addr add 198.51.100.1/32 dev lo",
        "addr add 198.51.100.2/32 dev lo",
        "route add 192.0.2.1 dev n0 scope link",
        f"{ROUTER} src 198.51.100.2",
    ),
    "a gateway of the other family": (
        *TWO_SUBNETS,
        "route add default src 192.0.2.10 via inet6 fe80::1 dev n0",
    ),
    "routes of several hops": (
        *TWO_SUBNETS,
        "route add default src 192.0.2.10 nexthop via 203.0.113.1 dev n0 nexthop via 203.0.113.3 dev n0",
    ),
    "unique local and global": (*BOTH_KINDS, ROUTER_V6),
    "unique local and two global": (
        *BOTH_KINDS,
        "addr add 2a00:1::10/64 dev n0 nodad",
        ROUTER_V6,
    ),
    "a deprecated address": (
        *BOTH_KINDS,
        "addr add 2a00:1::10/64 dev n0 nodad preferred_lft 0",
        ROUTER_V6,
    ),
    "a preferred source of IPv6": (*BOTH_KINDS, f"{ROUTER_V6} src 2001:db8::10"),
}
DESTINATIONS = (
    *("10.1.0.1", "192.0.2.99", "203.0.113.99", "100.64.0.1"),
    *("2001:db8::99", "2001:db8:5::1", "2a00:7::1", "fd00:5::99", "fd00:244::1", "4000::1"),
)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_planned_sources_are_those_of_the_kernel(situation: str) -> None:
    with namespace("sources") as node:
        node.ip("link set lo up", "link add n0 type veth peer name n1", "link set n1 up", "link set n0 up")
        node.ip(*SITUATIONS[situation])
        with node.entered():
            (device,) = (each for each in links.read() if each.name == "n0")
            routes = {each: routing.route_to(parse_address(each)) for each in DESTINATIONS}
    wanted = {
        to: format_address(each.source)
        for to, each in routes.items()
        if each.ifindex == device.ifindex and each.source
    }
    assert wanted
    assert {to: planned(device, to, routes[to]) for to in wanted} == wanted


def planned(device: Device, destination: str, route: routing.Route) -> str:
    to = parse_address(destination)
    found = source_for(plan_sources(device, ()), route.gateway or to, to)
    return format_address(found) if found else format_address(usual(device, to))


def usual(device: Device, to: Address) -> Address:
    """The address without a table."""
    return next(each for each in device.addresses if family(each) is family(to))
