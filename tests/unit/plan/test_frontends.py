"""Plans of Services: frontends, families, traffic policy results and source ranges."""

import dataclasses
from typing import Any

import pytest

from ebpfproxy.model.address import Family, Protocol, format_address, format_network, parse_address
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan import frontends
from ebpfproxy.plan.endpoints import merge
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import (
    DetectLocal,
    FrontendKind,
    FrontendPlan,
    NoEndpointAction,
    PlanContext,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.support import build
from tests.support.build import CONTEXT, ELSEWHERE, HERE, endpoint, port, slice_of

LOCAL, CLUSTER = TrafficPolicy.LOCAL, TrafficPolicy.CLUSTER
NO_DETECTOR = dataclasses.replace(CONTEXT, detect_local=DetectLocal.CLUSTER_CIDR)
MASQUERADE_ALL = dataclasses.replace(CONTEXT, masquerade_all=True)


def planned(
    service: Service, *endpoints: object, node: Node | None = None, context: PlanContext = CONTEXT
) -> ServicePortPlan:
    """Return the plan of a Service with one port and one family."""
    (plan,) = plan_service(service, [slice_of("web", *endpoints)], node, context)  # type: ignore[arg-type]
    return plan


def listed(plan: ServicePortPlan) -> list[tuple[str, str, int]]:
    return [(f.kind.value, format_address(f.frontend.address), f.frontend.port) for f in plan.frontends]


def of_kind(plan: ServicePortPlan, kind: FrontendKind) -> FrontendPlan:
    return next(each for each in plan.frontends if each.kind is kind)


def row(frontend: FrontendPlan) -> tuple[PolicyResult, PolicyResult, PolicyResult]:
    return frontend.pod, frontend.node, frontend.outside


def test_frontends_are_in_the_order_of_their_kinds() -> None:
    service = build.service(
        "web", port(80, node_port=30080), external=["203.0.113.1"], balancer=["203.0.113.2"]
    )
    assert listed(planned(service)) == [
        ("ClusterIP", "10.96.0.10", 80),
        ("ExternalIP", "203.0.113.1", 80),
        ("LoadBalancer", "203.0.113.2", 80),
        ("NodePort", "0.0.0.0", 30080),
    ]


def test_an_address_that_is_listed_twice_is_one_frontend() -> None:
    service = build.service(external=["203.0.113.1", "203.0.113.1", "10.96.0.10"])
    assert listed(planned(service)) == [
        ("ClusterIP", "10.96.0.10", 80),
        ("ExternalIP", "203.0.113.1", 80),
    ]


def test_an_external_ip_that_is_a_load_balancer_ip_keeps_its_source_ranges() -> None:
    """cilium #44718."""
    service = build.service(external=["203.0.113.1"], balancer=["203.0.113.1"])
    assert listed(planned(service)) == [
        ("ClusterIP", "10.96.0.10", 80),
        ("LoadBalancer", "203.0.113.1", 80),
    ]


def test_an_unspecified_external_ip_never_becomes_a_node_port() -> None:
    service = build.service(external=["0.0.0.0", "::"], balancer=["0.0.0.0"])
    assert listed(planned(service)) == [("ClusterIP", "10.96.0.10", 80)]


def test_a_family_without_cluster_ip_has_no_plan() -> None:
    service = build.service(external=["2001:db8::1", "203.0.113.1"])
    assert [plan.family for plan in plan_service(service, (), None, CONTEXT)] == [Family.IPV4]


def test_a_service_without_usable_cluster_ip_has_no_plan() -> None:
    service = build.service("web", port(80, node_port=30080), ips=["0.0.0.0"], external=["203.0.113.1"])
    assert plan_service(service, (), None, CONTEXT) == ()


def test_both_families_and_all_ports_are_planned_in_order() -> None:
    udp = Protocol.UDP
    service = build.service(
        "web", port(53, "dns", protocol=udp), port(53, "dns"), port(80, "a"), ips=["fd00::10", "10.96.0.10"]
    )
    plans = plan_service(service, (), None, CONTEXT)
    keys = [(plan.name.port, plan.name.protocol, plan.family) for plan in plans]
    four, six, tcp = Family.IPV4, Family.IPV6, Protocol.TCP
    assert keys == [
        ("a", tcp, four),
        ("a", tcp, six),
        ("dns", tcp, four),
        ("dns", tcp, six),
        ("dns", udp, four),
        ("dns", udp, six),
    ]


def test_two_ports_are_planned_in_order() -> None:
    service = build.service("web", port(80, "b"), port(81, "a"))
    assert [plan.name.port for plan in plan_service(service, (), None, CONTEXT)] == ["a", "b"]


def test_tcp_and_udp_ports_with_the_same_number_do_not_share_endpoints() -> None:
    """Regression of kpng: its key had no protocol, so 53/TCP and 53/UDP were the same."""
    service = build.service("web", port(53, "dns", protocol=Protocol.UDP), port(53, "dns-tcp"))
    ports = (EndpointPort("dns", Protocol.UDP, 1053), EndpointPort("dns-tcp", Protocol.TCP, 2053))
    plans = plan_service(service, [slice_of("web", endpoint(), ports=ports)], None, CONTEXT)
    assert [(plan.name.port, [e.port for e in plan.endpoints]) for plan in plans] == [
        ("dns", [1053]),
        ("dns-tcp", [2053]),
    ]


@pytest.mark.parametrize(
    ("context", "pod", "others"),
    [(CONTEXT, False, True), (MASQUERADE_ALL, True, True), (NO_DETECTOR, False, False)],
)
def test_a_cluster_ip_masquerades_clients_that_are_not_pods(
    context: PlanContext, pod: bool, others: bool
) -> None:
    (frontend,) = planned(build.service(), context=context).frontends
    assert row(frontend) == tuple(PolicyResult(Scope.CLUSTER, m) for m in (pod, others, others))


@pytest.mark.parametrize("context", [CONTEXT, MASQUERADE_ALL, NO_DETECTOR])
def test_external_policy_cluster_masquerades_every_client(context: PlanContext) -> None:
    plan = planned(build.service("web", port(80, node_port=30080)), context=context)
    assert set(row(of_kind(plan, FrontendKind.NODE_PORT))) == {PolicyResult(Scope.CLUSTER, True)}


def test_with_external_policy_local_pods_and_the_node_use_endpoints_of_all_nodes() -> None:
    service = build.service(
        "web", port(80, node_port=30080), type_=ServiceType.NODE_PORT, external_policy=LOCAL
    )
    plan = planned(service, endpoint(node=ELSEWHERE))
    assert row(of_kind(plan, FrontendKind.NODE_PORT)) == (
        PolicyResult(Scope.CLUSTER, False),
        PolicyResult(Scope.CLUSTER, True),
        PolicyResult(Scope.LOCAL, False),
    )
    assert plan.no_endpoint_action is NoEndpointAction.DROP
    assert of_kind(plan, FrontendKind.CLUSTER_IP).outside.scope is Scope.CLUSTER


def test_without_a_detector_pods_count_as_outside_for_external_policy_local() -> None:
    service = build.service(
        "web", port(80, node_port=30080), type_=ServiceType.NODE_PORT, external_policy=LOCAL
    )
    pod, node, outside = row(of_kind(planned(service, context=NO_DETECTOR), FrontendKind.NODE_PORT))
    assert pod == outside == PolicyResult(Scope.LOCAL, False)
    assert node == PolicyResult(Scope.CLUSTER, True)


def test_external_policy_local_is_ignored_for_type_cluster_ip_without_external_ip() -> None:
    service = build.service("web", port(80, node_port=30080), external_policy=LOCAL)
    plan = planned(service, endpoint(node=HERE))
    assert of_kind(plan, FrontendKind.NODE_PORT).outside == PolicyResult(Scope.CLUSTER, True)
    assert not any(each.local for each in plan.endpoints)


def test_external_policy_local_applies_to_type_cluster_ip_with_an_external_ip() -> None:
    plan = planned(build.service(external=["203.0.113.1"], external_policy=LOCAL), endpoint(node=HERE))
    assert of_kind(plan, FrontendKind.EXTERNAL_IP).outside == PolicyResult(Scope.LOCAL, False)


def test_internal_policy_local_applies_only_to_the_cluster_ip() -> None:
    service = build.service("web", port(80, node_port=30080), internal_policy=LOCAL)
    plan = planned(service, endpoint("10.1.0.1", HERE), endpoint("10.1.0.2", ELSEWHERE))
    assert of_kind(plan, FrontendKind.CLUSTER_IP).pod == PolicyResult(Scope.LOCAL, False)
    assert of_kind(plan, FrontendKind.NODE_PORT).outside == PolicyResult(Scope.CLUSTER, True)
    assert [(e.cluster, e.local) for e in plan.endpoints] == [(True, True), (True, False)]


def test_internal_policy_local_without_external_traffic_never_uses_scope_cluster() -> None:
    plan = planned(build.service(internal_policy=LOCAL), endpoint(node=ELSEWHERE))
    assert [(e.cluster, e.local) for e in plan.endpoints] == [(False, False)]
    assert plan.no_endpoint_action is NoEndpointAction.DROP


def test_without_endpoints_on_any_node_connections_are_rejected() -> None:
    assert planned(build.service(internal_policy=LOCAL)).no_endpoint_action is NoEndpointAction.REJECT


def test_source_ranges_apply_only_to_load_balancer_ips() -> None:
    """In cilium/cilium 44718 the ranges were applied to an external IP."""
    service = build.service(
        "web",
        port(80, node_port=30080),
        external=["203.0.113.1"],
        balancer=["203.0.113.2"],
        ranges=["198.51.100.0/24", "2001:db8::/32"],
    )
    plan = planned(service, node=build.node())
    restricted = {each.kind for each in plan.frontends if each.restricted}
    assert restricted == {FrontendKind.LOAD_BALANCER}
    frontend = of_kind(plan, FrontendKind.LOAD_BALANCER)
    assert list(map(format_network, frontend.source_ranges)) == ["198.51.100.0/24"]
    assert not frontend.node_admitted


def test_source_ranges_only_of_the_other_family_restrict_nothing() -> None:
    plan = planned(build.service(balancer=["203.0.113.2"], ranges=["2001:db8::/32"]))
    frontend = of_kind(plan, FrontendKind.LOAD_BALANCER)
    assert (frontend.restricted, frontend.source_ranges, frontend.node_admitted) == (False, (), True)


@pytest.mark.parametrize("ranges", [["0.0.0.0/0"], ["198.51.100.0/24", " 0.0.0.0/0", "fd00::/8"]])
def test_a_source_range_of_all_addresses_of_a_family_restricts_nothing_in_it(ranges: list[str]) -> None:
    """As kube-proxy 1.36: newBaseServiceInfo in pkg/proxy/serviceport.go."""
    frontend = of_kind(
        planned(build.service(balancer=["203.0.113.2"], ranges=ranges)), FrontendKind.LOAD_BALANCER
    )
    assert (frontend.restricted, frontend.source_ranges, frontend.node_admitted) == (False, (), True)


def test_a_source_range_of_all_addresses_of_the_other_family_does_not_count() -> None:
    service = build.service(balancer=["203.0.113.2"], ranges=["198.51.100.0/24", "::/0"])
    assert of_kind(planned(service), FrontendKind.LOAD_BALANCER).restricted


@pytest.mark.parametrize(
    ("ranges", "node", "admitted"),
    [
        (["192.0.2.0/24"], build.node(), True),
        (["198.51.100.0/24"], build.node(), False),
        (["192.0.2.0/24"], None, False),
        (["0.0.0.0/1"], None, False),
        (["192.0.2.0/24"], build.node(addresses=["2001:db8::10"]), False),
    ],
)
def test_the_node_is_admitted_if_a_range_contains_its_address(
    ranges: list[str], node: Node | None, admitted: bool
) -> None:
    plan = planned(build.service(balancer=["203.0.113.2"], ranges=ranges), node=node)
    frontend = of_kind(plan, FrontendKind.LOAD_BALANCER)
    assert (frontend.restricted, frontend.node_admitted) == (True, admitted)


def test_the_node_is_admitted_if_a_range_contains_its_bind_address() -> None:
    context = dataclasses.replace(CONTEXT, bind_address=parse_address("198.51.100.9"))
    balanced = build.service(balancer=["203.0.113.2"], ranges=["198.51.100.0/24"])
    plan = planned(balanced, node=build.node(), context=context)
    assert of_kind(plan, FrontendKind.LOAD_BALANCER).node_admitted


def test_session_affinity_is_in_the_plan() -> None:
    assert planned(build.service(affinity=10800)).affinity_timeout == 10800


def test_the_work_for_a_service_is_linear_in_its_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = []

    def counted(*arguments: Any) -> Any:
        merged.append(arguments)
        return merge(*arguments)

    monkeypatch.setattr(frontends, "merge", counted)
    names = [f"p{number}" for number in range(200)]
    service = build.service("web", *(port(number + 1, label) for number, label in enumerate(names)))
    slices = [
        slice_of(
            "web",
            *(endpoint(f"10.{of}.0.{number}") for number in range(1, 4)),
            ports=[EndpointPort(each, Protocol.TCP, at + of) for at, each in enumerate(names, 100)],
            called=f"web-{of}",
        )
        for of in (1, 2)
    ]
    plans = plan_service(service, slices, None, CONTEXT)
    assert len(merged) == 1
    ports = {number: plan for plan in plans for number in [plan.frontends[0].frontend.port]}
    assert [each.port for each in ports[1].endpoints] == [101] * 3 + [102] * 3
    assert [each.port for each in ports[200].endpoints] == [300] * 3 + [301] * 3
