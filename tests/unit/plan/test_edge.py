"""Plans of an edge: which frontends, endpoints and devices it uses, and what it does while nodes are down."""

import dataclasses

from ebpfproxy.model.address import Protocol, format_address, parse_address
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device import ETHERNET, LOOPBACK, Device
from ebpfproxy.model.endpoint import Endpoint, EndpointPort
from ebpfproxy.model.node_check import NodeCheck
from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.devices import plan_devices
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.node_checks import PROXY_PORT, plan_checks
from ebpfproxy.plan.node_plan import plan_node
from ebpfproxy.plan.service_plan import (
    DeviceRole,
    NoEndpointAction,
    PlanContext,
    PolicyResult,
    Role,
    Scope,
    ServicePortPlan,
)
from ebpfproxy.plan.vips import vips
from tests.support import build
from tests.support.build import draining, endpoint, networks, port, slice_of

EDGE = PlanContext(node_name="edge-1", role=Role.EDGE)
LOCAL = TrafficPolicy.LOCAL
MASQUERADED = PolicyResult(Scope.CLUSTER, True)
CHECKED = 30500
WEB = build.service(external=["203.0.113.1"])
PUBLIC = build.service(
    "web",
    port(80, node_port=30080),
    balancer=["203.0.113.2"],
    type_=ServiceType.LOAD_BALANCER,
    external_policy=LOCAL,
    health_check=CHECKED,
)
N1, N2 = endpoint("10.1.0.1", "n1"), endpoint("10.1.0.2", "n2")


def plans(
    service: Service, *endpoints: Endpoint, down: tuple[NodeCheck, ...] = (), context: PlanContext = EDGE
) -> tuple[ServicePortPlan, ...]:
    return plan_service(service, [slice_of("web", *endpoints)], None, context, down=frozenset(down))


def used(
    *endpoints: Endpoint, service: Service = WEB, down: tuple[NodeCheck, ...] = ()
) -> tuple[set[str], set[str]]:
    """Return the addresses of the endpoints that get new connections, and of all that are listed."""
    (plan,) = plans(service, *endpoints, down=down)
    listed = {format_address(each.address) for each in plan.endpoints}
    return {format_address(each.address) for each in plan.endpoints if each.cluster}, listed


def failed(*nodes: str, at: int = PROXY_PORT) -> tuple[NodeCheck, ...]:
    return tuple(NodeCheck(node, at) for node in nodes)


# Frontends


def test_an_edge_serves_external_and_load_balancer_ips_only() -> None:
    service = build.service(
        "web", port(80, node_port=30080), external=["203.0.113.1"], balancer=["203.0.113.2"]
    )
    (plan,) = plans(service, N1)
    assert [str(each.frontend) for each in plan.frontends] == ["203.0.113.1:80/TCP", "203.0.113.2:80/TCP"]
    assert plans(build.service("web", port(80, node_port=30080)), N1) == ()


def test_an_edge_serves_only_addresses_in_its_networks() -> None:
    context = dataclasses.replace(EDGE, vip_cidrs=networks(["203.0.113.0/31"]))
    service = build.service(external=["203.0.113.1", "203.0.113.2", "10.96.0.1"])
    (plan,) = plans(service, N1, context=context)
    assert [str(each.frontend) for each in plan.frontends] == ["203.0.113.1:80/TCP"]
    assert plans(build.service(external=["203.0.113.2"]), N1, context=context) == ()


def test_all_clients_of_an_edge_are_masqueraded_and_use_all_endpoints_whatever_the_policy() -> None:
    (plan,) = plans(PUBLIC, N1, N2)
    (frontend,) = plan.frontends
    assert (frontend.pod, frontend.node, frontend.outside) == (MASQUERADED, MASQUERADED, MASQUERADED)
    assert [(each.cluster, each.local, each.on_node) for each in plan.endpoints] == [(True, False, False)] * 2
    assert plan.health_check_node_port == 0


def test_source_ranges_apply_at_an_edge() -> None:
    service = build.service(balancer=["203.0.113.2"], ranges=["198.51.100.0/24"])
    (plan,) = plans(service, N1)
    assert plan.frontends[0].restricted
    assert plan.frontends[0].source_ranges == networks(["198.51.100.0/24"])


def test_no_endpoint_is_on_an_edge_whatever_its_name_and_the_hints() -> None:
    context = dataclasses.replace(EDGE, node_name="n1")
    hinted = [
        endpoint("10.1.0.1", "n1", nodes=["n1"], zones=["a"]),
        endpoint("10.1.0.2", "", nodes=["n2"], zones=["b"]),
    ]
    (plan,) = plans(WEB, *hinted, context=context)
    assert [(each.cluster, each.on_node) for each in plan.endpoints] == [(True, False), (True, None)]


# Nodes that are down


def test_endpoints_on_a_node_that_is_down_get_no_new_connections_and_stay_listed() -> None:
    assert used(N1, N2, down=failed("n1")) == ({"10.1.0.2"}, {"10.1.0.1", "10.1.0.2"})


def test_if_all_nodes_are_down_all_endpoints_are_used() -> None:
    both = {"10.1.0.1", "10.1.0.2"}
    assert used(N1, N2, down=failed("n1", "n2")) == (both, both)


def test_terminating_endpoints_on_other_nodes_do_not_replace_ready_ones_on_nodes_that_are_down() -> None:
    assert used(N1, draining("10.1.0.2", "n2"), down=failed("n1"))[0] == {"10.1.0.1"}


def test_if_no_endpoint_is_ready_terminating_ones_on_nodes_that_are_up_are_used() -> None:
    terminating = draining("10.1.0.1", "n1"), draining("10.1.0.2", "n2")
    assert used(*terminating, down=failed("n1"))[0] == {"10.1.0.2"}


def test_an_endpoint_without_a_node_is_always_used() -> None:
    assert used(N1, endpoint("10.1.0.3", ""), down=failed("n1"))[0] == {"10.1.0.3"}


def test_a_check_counts_only_for_services_with_its_port() -> None:
    assert used(N1, N2, service=PUBLIC, down=failed("n1"))[0] == {"10.1.0.1", "10.1.0.2"}
    assert used(N1, N2, service=PUBLIC, down=failed("n1", at=CHECKED))[0] == {"10.1.0.2"}
    assert used(N1, N2, down=failed("n1", at=CHECKED))[0] == {"10.1.0.1", "10.1.0.2"}


def test_udp_flows_leave_a_node_that_is_down() -> None:
    service = build.service("web", port(53, protocol=Protocol.UDP), external=["203.0.113.1"])
    of_udp = slice_of("web", N1, N2, ports=[EndpointPort("", Protocol.UDP, 53)])
    (plan,) = plan_service(service, [of_udp], None, EDGE, down=frozenset(failed("n1")))
    assert [format_address(each.address) for each in plan.endpoints] == ["10.1.0.2"]


def test_checks_do_not_matter_to_a_node() -> None:
    with_checks = plans(WEB, N1, N2, down=failed("n1"), context=build.CONTEXT)
    assert with_checks == plans(WEB, N1, N2, context=build.CONTEXT)


# What is checked


def test_each_node_with_serving_endpoints_is_checked_at_the_port_of_the_service_proxy() -> None:
    gone = endpoint("10.1.0.9", "n9", ready=False, serving=False)
    slices = [slice_of("web", N1, N2, endpoint("10.1.0.3", "n2"), endpoint("10.1.0.4", ""), gone)]
    assert plan_checks(WEB, slices) == set(failed("n1", "n2"))


def test_nodes_of_a_service_with_a_health_check_node_port_are_checked_there() -> None:
    assert plan_checks(PUBLIC, [slice_of("web", N1)]) == set(failed("n1", at=CHECKED))


# Announced addresses


def test_an_address_is_announced_while_any_endpoint_gets_connections() -> None:
    (plan,) = plans(WEB, N1)
    assert vips(plan) == {parse_address("203.0.113.1")}
    (plan,) = plans(WEB, N1, down=failed("n1"))
    assert vips(plan) == {parse_address("203.0.113.1")}
    (plan,) = plans(WEB, endpoint("10.1.0.1", "n1", ready=False))
    assert vips(plan) == frozenset()
    assert plan.no_endpoint_action is NoEndpointAction.REJECT


# The machine


def test_an_edge_has_no_node_ports() -> None:
    state = ClusterState({}, {}, local_networks=frozenset(networks(["192.0.2.1/32"])))
    plan = plan_node(state, EDGE, pods=False)
    assert plan.local_networks == state.local_networks
    assert plan.node_port_networks == frozenset()


def test_a_veth_device_with_an_address_is_an_uplink_of_an_edge() -> None:
    devices = [
        Device(1, "lo", "", LOOPBACK, up=True),
        Device(2, "eth0", "veth", ETHERNET, up=True, addresses=(parse_address("192.0.2.1"),)),
        Device(3, "veth1", "veth", ETHERNET, up=True),
        Device(4, "tap0", "tun", ETHERNET, up=True),
        Device(5, "ebpfproxy-vip", "dummy", ETHERNET, up=True, addresses=(parse_address("203.0.113.1"),)),
        Device(6, "eno1", "", ETHERNET, up=True),
    ]
    found = plan_devices(devices, None, EDGE, pods=True, bypassing=(3,))
    assert {each.name: each.role for each in found} == {
        "eth0": DeviceRole.UPLINK,
        "eno1": DeviceRole.UPLINK,
    }
