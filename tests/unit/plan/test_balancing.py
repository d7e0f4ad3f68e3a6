"""How a ServicePort selects an endpoint: weights, defaults of the node, and what a mode honors."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.model.address import contains, format_address, parse_address
from ebpfproxy.model.balancing import MAX_RULES, Algorithm, Balancing, Forwarding, parse_weights
from ebpfproxy.model.endpoint import Endpoint
from ebpfproxy.plan.balancing import DEFAULT, EVERYTHING, PlannedBalancing, Support, WeightIndex, unsupported
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


RULES = st.lists(
    st.sampled_from(
        (
            "node:a=1",
            "node:b=2",
            "10.1.0.1=3",
            "10.1.0.0/31=4",
            "10.1.0.0/16=5",
            "::/0=6",
            "fd00::1=7",
            "0.0.0.0/0=8",
        )
    ),
    max_size=6,
)


@given(
    RULES,
    st.sampled_from(("10.1.0.1", "10.1.0.0", "10.2.0.1", "fd00::1", "fd00::2")),
    st.sampled_from(("a", "c", "")),
)
def test_the_first_rule_that_matches_an_endpoint_counts(texts: list[str], text: str, node: str) -> None:
    rules, address = parse_weights(",".join(texts)), parse_address(text)
    matching = [
        rule.weight
        for rule in rules
        if (contains(rule.network, address) if rule.network else rule.node == node)
    ]
    index = WeightIndex(rules)
    for _ in range(2):
        assert index.weight(address, node) == (matching[0] if matching else None)


def test_the_work_for_an_endpoint_does_not_depend_on_the_number_of_rules() -> None:
    """Regression: an annotation of 245 kB delayed the changes of other Services by 28 s."""
    rules = parse_weights(",".join(f"10.{n >> 8}.{n & 255}.0/24=1" for n in range(MAX_RULES)))
    index, looked_up = WeightIndex(rules), 0

    class Counting(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> Any:
            nonlocal looked_up
            looked_up += 1
            return super().get(key, default)

    index._networks = {shift: Counting(table) for shift, table in index._networks.items()}
    for n in range(100):
        for _ in range(10):
            index.weight(parse_address(f"10.200.0.{n}"), "")
    assert looked_up == 100


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


# Forwarding in mode ipvs

PODS = tuple(each._replace(own_pod=True) for each in THREE)
HONORING = dataclasses.replace(CONTEXT, service_forwarding=True)
NEEDS_FLAG = "the annotation needs --ipvs-service-forwarding"


@pytest.mark.parametrize("method", [Forwarding.DIRECT_ROUTING, Forwarding.TUNNEL])
def test_an_annotation_changes_nodes_only_if_the_operator_permits_it(method: Forwarding) -> None:
    requested = Balancing(forwarding=method)
    assert planned(requested, *PODS).balancing.forwarding_limit == NEEDS_FLAG
    assert planned(requested, *PODS, context=HONORING).balancing.forwarding_limit == ""
    same = dataclasses.replace(CONTEXT, forwarding=method)
    assert planned(requested, *PODS, context=same).balancing.forwarding_limit == ""


def test_an_annotation_may_always_request_translation() -> None:
    context = dataclasses.replace(CONTEXT, forwarding=Forwarding.TUNNEL)
    assert planned(Balancing(forwarding=Forwarding.NAT), context=context).balancing.forwarding_limit == ""


@pytest.mark.parametrize(
    ("requested", "context"),
    [
        (Forwarding.TUNNEL, HONORING),
        (None, dataclasses.replace(CONTEXT, forwarding=Forwarding.DIRECT_ROUTING)),
    ],
)
def test_only_pods_of_the_namespace_get_untranslated_packets(
    requested: Forwarding | None, context: PlanContext
) -> None:
    foreign = (*PODS[:2], PODS[2]._replace(own_pod=False))
    limit = planned(Balancing(forwarding=requested), *foreign, context=context).balancing.forwarding_limit
    assert limit == "endpoint 10.1.0.3 is no pod of the Service's namespace"
    assert planned(Balancing(forwarding=requested), *PODS, context=context).balancing.forwarding_limit == ""


def test_without_a_method_endpoints_may_be_of_any_kind() -> None:
    assert planned(Balancing()).balancing is DEFAULT
