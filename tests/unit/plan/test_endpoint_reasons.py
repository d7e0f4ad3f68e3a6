"""The reason for each endpoint: used by a scope, or excluded."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.model.address import Family, Protocol, format_address
from ebpfproxy.model.balancing import Balancing, parse_weights
from ebpfproxy.model.endpoint import Endpoint, EndpointPort, Endpoints, EndpointSlice
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.endpoint_reasons import EndpointReason
from ebpfproxy.plan.endpoints import NodeLocation, Reasons, Trace, UsedScopes, merge_slices, plan_endpoints
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import PlanContext, Scope
from tests.support.build import ELSEWHERE, HERE, draining, endpoint, service, slice_of
from tests.support.strategies import endpoints

LOCATION = NodeLocation(HERE, "zone-a")
R = EndpointReason


def dead(address: str, node: str = ELSEWHERE, *, terminating: bool = False) -> Endpoint:
    return endpoint(address, node, ready=False, serving=False, terminating=terminating)


def reasons(scope: Scope, *of: Endpoint) -> list[EndpointReason]:
    merged = merge_slices([slice_of("web", *of)], "", Protocol.TCP, LOCATION)
    found: Reasons = {}
    plan_endpoints(merged, UsedScopes(scope is Scope.CLUSTER, scope is Scope.LOCAL), LOCATION, found)
    by_address = {format_address(address): reason for (address, _), reason in found[scope].items()}
    return [by_address[format_address(each.address)] for each in of]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ([endpoint("10.1.0.1"), dead("10.1.0.2")], [R.READY, R.NOT_READY]),
        (
            [endpoint("10.1.0.1", nodes=[HERE]), endpoint("10.1.0.2", nodes=[ELSEWHERE])],
            [R.READY_HINT_NODE, R.HINT_OTHER_NODE],
        ),
        (
            [endpoint("10.1.0.1", zones=["zone-a"]), endpoint("10.1.0.2", zones=["zone-b"])],
            [R.READY_HINT_ZONE, R.HINT_OTHER_ZONE],
        ),
        ([endpoint("10.1.0.1"), draining("10.1.0.2")], [R.READY, R.TERMINATING]),
        (
            [draining("10.1.0.1"), dead("10.1.0.2", terminating=True)],
            [R.ONLY_TERMINATING, R.NOT_SERVING],
        ),
        ([endpoint("10.1.0.1", ready=False)], [R.NOT_READY]),
    ],
)
def test_each_endpoint_of_policy_cluster_has_a_reason(
    of: list[Endpoint], expected: list[EndpointReason]
) -> None:
    assert reasons(Scope.CLUSTER, *of) == expected


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (
            [endpoint("10.1.0.1", HERE), endpoint("10.1.0.2"), endpoint("10.1.0.3", "")],
            [R.READY_ON_NODE, R.NOT_LOCAL, R.NODE_UNKNOWN],
        ),
        (
            [draining("10.1.0.1", HERE), endpoint("10.1.0.2"), draining("10.1.0.3")],
            [R.ONLY_TERMINATING_ON_NODE, R.NOT_LOCAL, R.NOT_LOCAL],
        ),
        ([endpoint("10.1.0.1", HERE), draining("10.1.0.2", HERE)], [R.READY_ON_NODE, R.TERMINATING]),
        ([dead("10.1.0.1"), dead("10.1.0.2", HERE)], [R.NOT_READY, R.NOT_READY]),
        ([dead("10.1.0.1", terminating=True)], [R.NOT_SERVING]),
    ],
)
def test_each_endpoint_of_policy_local_has_a_reason(
    of: list[Endpoint], expected: list[EndpointReason]
) -> None:
    assert reasons(Scope.LOCAL, *of) == expected


@given(
    st.lists(endpoints(Family.IPV4), max_size=6),
    st.sampled_from(("", "zone-a", "zone-c")),
)
def test_the_reasons_agree_with_the_plan(of: list[Endpoint], zone: str) -> None:
    location = NodeLocation(HERE, zone)
    ports = (EndpointPort("", Protocol.TCP, 8080),)
    name = NamespacedName("default", "web")
    piece = EndpointSlice(name, name, Family.IPV4, ports, Endpoints(of))
    merged = merge_slices([piece], "", Protocol.TCP, location)
    reasons: Reasons = {}
    plan = plan_endpoints(merged, UsedScopes(True, True), location, reasons)
    assert plan == plan_endpoints(merged, UsedScopes(True, True), location)
    for scope, used in (
        (Scope.CLUSTER, {(e.address, e.port) for e in plan[0] if e.cluster}),
        (Scope.LOCAL, {(e.address, e.port) for e in plan[0] if e.local}),
    ):
        found = reasons[scope]
        assert found.keys() == merged.keys()
        assert {target for target, reason in found.items() if reason.meaning.startswith("used: ")} == used


def test_an_endpoint_of_weight_0_is_excluded_whatever_its_conditions() -> None:
    of = endpoint("10.1.0.1"), endpoint("10.1.0.2"), dead("10.1.0.3")
    weights = Balancing(weights=parse_weights("10.1.0.2=0, 10.1.0.3=0"))
    web = dataclasses.replace(service(), balancing=weights)
    trace: Trace = {}
    plans = plan_service(web, [slice_of("web", *of)], None, PlanContext(HERE), trace=trace)
    assert plans == plan_service(web, [slice_of("web", *of)], None, PlanContext(HERE))
    ((_, found),) = trace.values()
    assert list(found[Scope.CLUSTER].values()) == [R.READY, R.NO_WEIGHT, R.NO_WEIGHT]


def test_without_endpoints_there_are_no_reasons() -> None:
    found: Reasons = {}
    plan_endpoints({}, UsedScopes(True, True), LOCATION, found)
    assert found == {Scope.CLUSTER: {}, Scope.LOCAL: {}}
