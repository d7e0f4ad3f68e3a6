"""How a ServicePort selects an endpoint: weights, defaults of the node, and what a mode honors."""

import dataclasses

from ebpfproxy.model.address import format_address
from ebpfproxy.model.balancing import Algorithm, Balancing, Forwarding, parse_weights
from ebpfproxy.model.endpoint import Endpoint
from ebpfproxy.plan.balancing import DEFAULT, EVERYTHING, PlannedBalancing, Support, unsupported
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import NoEndpointAction, PlanContext, ServicePortPlan
from tests.support.build import CONTEXT, ELSEWHERE, HERE, draining, endpoint, port, service, slice_of

THREE = endpoint("10.1.0.1", HERE), endpoint("10.1.0.2", ELSEWHERE), endpoint("10.1.0.3", ELSEWHERE)


def planned(balancing: Balancing, *endpoints: Endpoint, context: PlanContext = CONTEXT) -> ServicePortPlan:
    of = dataclasses.replace(service("web", port()), balancing=balancing)
    (plan,) = plan_service(of, [slice_of("web", *(endpoints or THREE))], None, context)
    return plan


def usable(plan: ServicePortPlan) -> list[str]:
    return [format_address(each.address) for each in plan.endpoints if each.cluster]


def test_without_a_request_all_plans_share_the_defaults() -> None:
    assert planned(Balancing()).balancing is DEFAULT


def test_the_first_rule_that_matches_counts() -> None:
    rules = parse_weights(f"10.1.0.3=5, node:{ELSEWHERE}=2")
    assert planned(Balancing(weights=rules)).balancing.weights == (1, 2, 5)


def test_weights_of_one_are_no_weights() -> None:
    assert planned(Balancing(weights=parse_weights("10.1.0.0/16=1"))).balancing is DEFAULT


def test_an_endpoint_of_weight_0_gets_no_new_connections_but_stays_listed() -> None:
    plan = planned(Balancing(weights=parse_weights("10.1.0.2=0")))
    assert usable(plan) == ["10.1.0.1", "10.1.0.3"]
    assert len(plan.endpoints) == 3


def test_without_any_weight_connections_are_rejected() -> None:
    plan = planned(Balancing(weights=parse_weights("0.0.0.0/0=0")))
    assert usable(plan) == []
    assert plan.no_endpoint_action is NoEndpointAction.REJECT


def test_terminating_endpoints_serve_if_those_that_are_ready_have_no_weight() -> None:
    rules = parse_weights("10.1.0.1=0")
    assert usable(planned(Balancing(weights=rules), THREE[0], draining("10.1.0.9"))) == ["10.1.0.9"]


def test_the_node_has_defaults_that_a_service_may_override() -> None:
    context = dataclasses.replace(CONTEXT, algorithm=Algorithm.MAGLEV, slow_start=30)
    by_node = planned(Balancing(), context=context).balancing
    assert by_node == PlannedBalancing(Algorithm.MAGLEV, slow_start=30)
    own = planned(Balancing(Algorithm.RANDOM, slow_start=0), context=context).balancing
    assert own == PlannedBalancing(Algorithm.RANDOM)


def test_what_a_mode_does_not_honor_is_named() -> None:
    wanted = PlannedBalancing(Algorithm.MAGLEV, (1, 3), 30, Forwarding.TUNNEL)
    little = Support(frozenset({Algorithm.RANDOM}))
    assert list(unsupported(wanted, little)) == [
        "lb-algorithm maglev",
        "endpoint-weights other than 0",
        "slow-start 30s",
        "ipvs-forwarding tunnel",
    ]
    assert list(unsupported(wanted, EVERYTHING)) == []


def test_defaults_and_weights_of_0_are_honored_by_every_mode() -> None:
    wanted = PlannedBalancing(None, (0, 1), 0, Forwarding.NAT)
    assert list(unsupported(wanted, Support(frozenset()))) == []


def test_slow_start_may_depend_on_the_algorithm() -> None:
    support = Support(frozenset(Algorithm), slow_start=frozenset({Algorithm.RANDOM}))
    for algorithm in None, Algorithm.RANDOM:
        assert list(unsupported(PlannedBalancing(algorithm, slow_start=30), support)) == []
    by_hash = PlannedBalancing(Algorithm.MAGLEV, slow_start=30)
    assert list(unsupported(by_hash, support)) == ["slow-start 30s (not with maglev)"]
