"""Plans of random clusters equal the reference and do not depend on the order of the input."""

import dataclasses
import itertools
import random
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from ebpfproxy.model.address import Family
from ebpfproxy.model.endpoint import Endpoints, EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service, ServicePortName
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import (
    FrontendPlan,
    NoEndpointAction,
    PlanContext,
    PlannedEndpoint,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.support import reference
from tests.support.examples import examples
from tests.support.reference import Outcome, Question
from tests.support.strategies import CONTEXTS, NODES, exposed_services

T = TypeVar("T")
Exposed = tuple[Service, tuple[EndpointSlice, ...]]


def _outcome(plan: ServicePortPlan, frontend: FrontendPlan, policy_result: PolicyResult) -> Outcome:
    """Return the result of a backend that follows the plan."""
    in_scope = frozenset(
        (endpoint.address, endpoint.port)
        for endpoint in plan.endpoints
        if (endpoint.local if policy_result.scope is Scope.LOCAL else endpoint.cluster)
    )
    if in_scope:
        return Outcome(in_scope, "", policy_result.masquerade, frontend.restricted)
    return Outcome(None, plan.no_endpoint_action.value, False, frontend.restricted)


@settings(max_examples=examples(400))
@given(exposed_services(), NODES, CONTEXTS)
def test_the_result_for_every_client_equals_the_reference(
    exposed: Exposed, node: Node | None, context: PlanContext
) -> None:
    service, slices = exposed
    plans = {plan.key: plan for plan in plan_service(service, slices, node, context)}
    dialled = 0
    for port, of in itertools.product(service.ports, Family):
        q = Question(service, port, of, slices, node, context)
        for kind, *wanted in reference.frontend_addresses(q):
            dialled += 1
            plan = plans[ServicePortName(*service.name, port.name, port.protocol), of]
            frontend = next(f for f in plan.frontends if f.frontend == (*wanted, port.protocol))
            assert frontend.kind.value == kind
            for source in reference.SOURCES:
                policy_result: PolicyResult = getattr(frontend, source)
                assert _outcome(plan, frontend, policy_result) == reference.outcome(q, kind, source), source
            if frontend.restricted:
                assert frontend.node_admitted == reference.node_admitted(q)
    assert dialled == sum(len(plan.frontends) for plan in plans.values())


@given(exposed_services(), NODES, CONTEXTS, st.randoms(use_true_random=False))
def test_the_order_of_slices_endpoints_and_ports_does_not_matter(
    exposed: Exposed, node: Node | None, context: PlanContext, chance: random.Random
) -> None:
    service, slices = exposed
    shuffled = [
        dataclasses.replace(
            piece,
            ports=_shuffled(piece.ports, chance),
            endpoints=Endpoints(_shuffled(tuple(piece.endpoints), chance)),
        )
        for piece in _shuffled(slices, chance)
    ]
    other = dataclasses.replace(service, ports=_shuffled(service.ports, chance))
    assert plan_service(other, shuffled, node, context) == plan_service(service, slices, node, context)


def _shuffled(items: tuple[T, ...], chance: random.Random) -> tuple[T, ...]:
    return tuple(chance.sample(items, len(items)))


@given(exposed_services(), NODES, CONTEXTS)
def test_every_used_endpoint_serves(exposed: Exposed, node: Node | None, context: PlanContext) -> None:
    service, slices = exposed
    for plan in plan_service(service, slices, node, context):
        listed = [(endpoint.address, endpoint.port) for endpoint in plan.endpoints]
        assert listed == sorted(set(listed))
        for endpoint in plan.endpoints:
            _check(endpoint, slices, context.node_name)
        used = any(endpoint.cluster or endpoint.local for endpoint in plan.endpoints)
        assert not (used and plan.no_endpoint_action is NoEndpointAction.REJECT)


def _check(endpoint: PlannedEndpoint, slices: tuple[EndpointSlice, ...], here: str) -> None:
    entries = [e for piece in slices for e in piece.endpoints if e.address == endpoint.address]
    assert any(e.ready or e.serving for e in entries)
    if endpoint.cluster or endpoint.local:
        assert any(e.ready or (e.serving and e.terminating) for e in entries)
    if endpoint.local:
        assert endpoint.on_node
    assert not endpoint.on_node or any(e.node == here for e in entries)


@settings(max_examples=examples(200))
@given(exposed_services(), NODES, CONTEXTS)
def test_a_port_is_planned_as_if_it_was_alone(
    exposed: Exposed, node: Node | None, context: PlanContext
) -> None:
    service, slices = exposed
    alone = [
        plan
        for port in service.ports
        for plan in plan_service(dataclasses.replace(service, ports=(port,)), slices, node, context)
    ]
    together = plan_service(service, slices, node, context)
    assert {plan.key: plan for plan in together} == {plan.key: plan for plan in alone}
