"""Which frontends are on-link, and the routes that they need."""

from ebpfproxy.model.address import Address, Family, Protocol, parse_address, parse_network
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device import ETHERNET, Device, OnLinkRoute
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.on_link import FrontendAddresses, frontend_routes
from ebpfproxy.plan.planned_endpoints import PlannedEndpoints
from ebpfproxy.plan.service_plan import (
    DevicePlan,
    DeviceRole,
    Frontend,
    FrontendKind,
    FrontendPlan,
    FrontendRoute,
    NoEndpointAction,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.support.build import networks

MAIN, OTHER = 254, 1000
SOURCE = parse_address("192.0.2.1")
UPLINK = Device(
    2,
    "eth0",
    "",
    ETHERNET,
    True,
    on_link=(
        OnLinkRoute(MAIN, parse_network("192.0.2.0/24"), SOURCE, tuple(networks(["192.0.2.128/25"]))),
        OnLinkRoute(OTHER, parse_network("192.0.2.0/24")),
    ),
)
PLAN = DevicePlan(2, "eth0", DeviceRole.UPLINK, False, None, None)
STATE = ClusterState(
    {},
    {},
    local_networks=frozenset(networks(["192.0.2.1/32"])),
    devices=(UPLINK,),
    node_addresses=frozenset({parse_address("192.0.2.2")}),
)


def addresses(*texts: str) -> frozenset[Address]:
    return frozenset(map(parse_address, texts))


def plan(*texts: str) -> ServicePortPlan:
    name = ServicePortName("default", "web", "", Protocol.TCP)
    result = PolicyResult(Scope.CLUSTER, False)
    frontends = tuple(
        FrontendPlan(Frontend(each, 80, Protocol.TCP), FrontendKind.LOAD_BALANCER, result, result, result)
        for each in map(parse_address, texts)
    )
    return ServicePortPlan(name, Family.IPV4, frontends, PlannedEndpoints(), NoEndpointAction.REJECT)


def test_a_frontend_gets_a_route_in_each_table_with_an_on_link_route() -> None:
    at = parse_address("192.0.2.50")
    assert frontend_routes({at}, (PLAN,), STATE) == {
        FrontendRoute(at, MAIN, 2, SOURCE),
        FrontendRoute(at, OTHER, 2, None),
    }


def test_a_more_specific_route_has_precedence() -> None:
    found = frontend_routes(addresses("192.0.2.200"), (PLAN,), STATE)
    assert {each.table for each in found} == {OTHER}


def test_addresses_of_this_node_and_of_other_nodes_need_none() -> None:
    assert not frontend_routes(addresses("192.0.2.1", "192.0.2.2", "198.51.100.1"), (PLAN,), STATE)


def test_devices_without_programs_or_neighbors_need_none() -> None:
    at = addresses("192.0.2.50")
    for plan in (PLAN._replace(layer3=True), PLAN._replace(role=DeviceRole.POD), PLAN._replace(ifindex=3)):
        assert not frontend_routes(at, (plan,), STATE)


def test_the_addresses_in_on_link_networks_follow_frontends_and_networks() -> None:
    found = FrontendAddresses()
    near, far = plan("192.0.2.50", "0.0.0.0"), plan("198.51.100.1", "192.0.2.50")
    found.count(near, 1)
    found.count(far, 1)
    assert found.on_link((UPLINK,)) == addresses("192.0.2.50")
    found.count(near, -1)
    assert found.on_link((UPLINK,)) == addresses("192.0.2.50")
    wider = UPLINK._replace(on_link=(OnLinkRoute(MAIN, parse_network("198.51.100.0/24")),))
    assert found.on_link((wider,)) == addresses("198.51.100.1")
    found.count(far, -1)
    assert found.on_link((wider,)) == frozenset()
    assert found.on_link(()) == frozenset()
