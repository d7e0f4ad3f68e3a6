"""On-link routes, decoded from the kernel's messages."""

import pytest

from ebpfproxy.linux.netlink import netlink, on_link_routes, rtnetlink
from ebpfproxy.linux.netlink.rtnetlink import PROTOCOL
from ebpfproxy.model.address import Network, format_network, parse_address, parse_network
from ebpfproxy.model.device import OnLinkRoute
from tests.unit.linux.test_links import INET6, number

DOWN = rtnetlink.RTNH_F_LINKDOWN
OIF, GATEWAY, METRIC, SOURCE, TABLE = 4, 5, 6, 7, 15
MAIN, OTHER = 254, 1000


def raw(text: str) -> bytes:
    address = parse_address(text)
    return address if ":" in text else address[12:]


def route(
    to: str,
    ifindex: int = 4,
    gateway: str = "",
    metric: int = 0,
    source: str = "",
    table: int = MAIN,
    flags: int = 0,
    protocol: int = 2,
    service: int = 0,
) -> bytes:
    """An RTM_NEWROUTE as the kernel sends it."""
    address, _, length = to.partition("/")
    family = INET6 if ":" in address else 2
    message = rtnetlink.ROUTE.pack(family, int(length), 0, service, table & 255, protocol, 0, 1, flags)
    message += netlink.attribute(1, raw(address)) + netlink.attribute(OIF, number(ifindex))
    message += netlink.attribute(TABLE, number(table)) + netlink.attribute(METRIC, number(metric))
    if gateway:
        message += netlink.attribute(GATEWAY, raw(gateway))
    if source:
        message += netlink.attribute(SOURCE, raw(source))
    return message


def of_devices(*routes: bytes) -> dict[int, tuple[OnLinkRoute, ...]]:
    return on_link_routes.of_devices(map(rtnetlink.route, routes))


def networks_of(*routes: bytes) -> dict[int, list[str]]:
    found = of_devices(*routes)
    return {ifindex: [format_network(each.network) for each in entries] for ifindex, entries in found.items()}


def test_routes_without_a_gateway_are_on_link() -> None:
    assert of_devices(
        route("192.0.2.0/24", source="192.0.2.1"),
        route("192.0.2.0/24", table=OTHER),
        route("fd00::/64", ifindex=5),
    ) == {
        4: (
            OnLinkRoute(MAIN, parse_network("192.0.2.0/24"), parse_address("192.0.2.1")),
            OnLinkRoute(OTHER, parse_network("192.0.2.0/24")),
        ),
        5: (OnLinkRoute(MAIN, parse_network("fd00::/64")),),
    }


@pytest.mark.parametrize(
    "other",
    [
        route("192.0.2.0/24", gateway="198.51.100.1"),
        route("192.0.2.1/32"),
        route("0.0.0.0/0"),
        route("192.0.2.0/24", flags=DOWN),
        route("192.0.2.0/24", service=8),
        route("fe80::/64"),
        route("ff00::/8"),
    ],
    ids=["gateway", "single", "default", "down", "service", "link-local", "multicast"],
)
def test_other_routes_are_not(other: bytes) -> None:
    assert networks_of(other) == {}


def test_only_the_preferred_route_to_a_network_counts() -> None:
    by_wifi = route("192.0.2.0/24", ifindex=5, metric=600)
    assert networks_of(by_wifi, route("192.0.2.0/24", metric=100)) == {4: ["192.0.2.0/24"]}
    assert networks_of(by_wifi, route("192.0.2.0/24", gateway="198.51.100.1", metric=100)) == {}


def test_more_specific_routes_of_the_same_table_are_holes() -> None:
    (found,) = of_devices(
        route("192.0.0.0/16"),
        route("192.0.2.0/24", gateway="192.0.0.1"),
        route("192.0.3.0/24", gateway="192.0.0.1", table=OTHER),
        route("192.0.4.9/32", gateway="192.0.0.1"),
        route("10.0.0.0/24", gateway="192.0.0.1"),
    )[4]
    assert found.holes == (Network(parse_address("192.0.2.0"), 96 + 24),)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (rtnetlink.ReportedRoute(24, MAIN, 3, 2, rtnetlink.RT_SCOPE_LINK), True),
        (rtnetlink.ReportedRoute(24, OTHER, 186, 2, rtnetlink.RT_SCOPE_LINK), True),
        (rtnetlink.ReportedRoute(24, MAIN, 3, 2, 0), False),  # it has a gateway
        (rtnetlink.ReportedRoute(32, MAIN, 3, 2, rtnetlink.RT_SCOPE_LINK), False),
        (rtnetlink.ReportedRoute(64, MAIN, 2, INET6, 0), True),
        (rtnetlink.ReportedRoute(64, MAIN, 9, INET6, 0), True),
        (rtnetlink.ReportedRoute(64, MAIN, 186, INET6, 0), False),  # BGP
        (rtnetlink.ReportedRoute(128, MAIN, 2, INET6, 0), False),
        (rtnetlink.ReportedRoute(64, 255, 2, INET6, 0), False),
        (rtnetlink.ReportedRoute(24, MAIN, PROTOCOL, 2, rtnetlink.RT_SCOPE_LINK), False),
    ],
)
def test_only_reports_that_may_be_of_on_link_routes_trigger_a_read(
    report: rtnetlink.ReportedRoute, expected: bool
) -> None:
    assert on_link_routes.may_be_of_device(report) is expected
