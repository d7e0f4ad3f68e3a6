"""Changed plans are rendered in parts, in turns between namespaces."""

import dataclasses
import math

from ebpfproxy.agent.active_mode import ActiveMode
from ebpfproxy.agent.parts import Parts
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.config import Config
from ebpfproxy.model.address import Family, Protocol, parse_address
from ebpfproxy.model.service import NamespacedName, ServicePortName, ServiceType, TrafficPolicy
from ebpfproxy.plan.claims import Claims
from ebpfproxy.plan.planned_endpoints import PlannedEndpoint, PlannedEndpoints
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    NoEndpointAction,
    PolicyResult,
    Role,
    Scope,
    ServicePortPlan,
)
from tests.support.build import CONTEXT, endpoint, port, service, slice_of
from tests.support.modes import FakeMode
from tests.unit.agent.agent import LOCAL, WEB, WEB_SLICE, Agent, gone

CLUSTER = PolicyResult(Scope.CLUSTER, False)


def plan(
    namespace: str, number: int, *, endpoints: int = 90, name: str = "web", at: int = 0
) -> ServicePortPlan:
    """A ServicePort. `at`: the port of its frontend, by default `number`."""
    address = Frontend(
        parse_address("10.96.0.1" if namespace == "a" else "10.96.0.2"), at or number, Protocol.TCP
    )
    return ServicePortPlan(
        ServicePortName(namespace, name, f"p{number}", Protocol.TCP),
        Family.IPV4,
        (FrontendPlan(address, FrontendKind.CLUSTER_IP, CLUSTER, CLUSTER, CLUSTER),),
        PlannedEndpoints(
            PlannedEndpoint(parse_address(f"10.1.0.{n}"), 8080, cluster=True, local=False, on_node=False)
            for n in range(1, endpoints + 1)
        ),
        NoEndpointAction.DROP,
        0,
    )


class Planned:
    """Claims and parts, as the reconciler has them."""

    def __init__(self) -> None:
        self.claims, self.parts = Claims(), Parts()

    def update(self, namespace: str, *plans: ServicePortPlan) -> None:
        self.parts.add(self.claims.update(NamespacedName(namespace, "web"), plans))

    def take(self, most: float) -> list[tuple[str, str, bool]]:
        """Namespace, port and whether it is served, sorted."""
        taken = self.parts.take(most)
        return sorted((name.namespace, name.port, plan is not None) for (name, _), plan in taken.items())


def test_a_part_has_plans_of_each_namespace_up_to_its_size() -> None:
    planned = Planned()
    planned.update("a", *(plan("a", number) for number in range(1, 6)))
    planned.update("b", plan("b", 1), plan("b", 2))
    parts = [planned.take(300) for _ in range(4)]
    assert [len(part) for part in parts] == [3, 3, 1, 0]
    found = sorted(each for part in parts for each in part)
    assert found == [*(("a", f"p{n}", True) for n in range(1, 6)), ("b", "p1", True), ("b", "p2", True)]
    assert {name for name, *_ in parts[0]} == {"a", "b"}
    assert not planned.parts.namespaces


def test_a_plan_larger_than_a_part_is_alone() -> None:
    planned = Planned()
    planned.update("a", plan("a", 1, endpoints=200), plan("a", 2))
    assert [len(planned.take(50)) for _ in range(3)] == [1, 1, 0]


def test_a_further_change_replaces_the_waiting_one() -> None:
    planned = Planned()
    planned.update("a", plan("a", 1), plan("a", 2))
    planned.update("a", plan("a", 1, endpoints=3))
    taken = planned.parts.take(math.inf)
    assert sorted((name.port, len(of.endpoints) if of else 0) for (name, _), of in taken.items()) == [
        ("p1", 3),
        ("p2", 0),
    ]


def test_a_deleted_service_counts_with_its_endpoints() -> None:
    planned = Planned()
    planned.update("a", plan("a", 1), plan("a", 2))
    planned.take(math.inf)
    planned.update("a")
    assert [planned.take(100) for _ in range(2)] == [[("a", "p1", False)], [("a", "p2", False)]]


def test_plans_that_exchange_frontends_are_in_one_part() -> None:
    planned = Planned()
    planned.update("a", *(plan("a", number) for number in (1, 2, 3)))
    planned.take(math.inf)
    planned.update("a", plan("a", 1, at=2), plan("a", 2, at=1), plan("a", 3))
    assert planned.take(1) == [("a", "p1", True), ("a", "p2", True)]


def test_a_group_stays_together_when_one_of_its_plans_changes_again() -> None:
    planned = Planned()
    planned.update("a", plan("a", 1), plan("a", 2))
    planned.take(math.inf)
    planned.update("a", plan("a", 1, at=2), plan("a", 2, at=1))
    planned.update("a", plan("a", 1, at=2, endpoints=5), plan("a", 2, at=1))
    assert planned.take(1) == [("a", "p1", True), ("a", "p2", True)]


LARGE = service("large", *(port(number, f"p{number}") for number in range(1, 6)), ips=["10.96.0.9"])


def test_parts_of_a_service_come_into_force_one_after_another() -> None:
    agent = Agent()
    agent.sync(WEB, WEB_SLICE, LOCAL)
    agent.reconciler.take_changed()
    agent.fold(LARGE)
    drained = agent.tracker.drain(1)
    agent.reconciler.plan(drained.state, drained.services, node_changed=False, host_changed=False, most=25)
    served: list[int] = []
    while agent.reconciler.unrendered or not served:
        agent.reconciler.render(25 if served else 0)
        assert len(agent.reconciler.take_changed()) <= 2
        agent.reconciler.sync(verify=False)
        served.append(len(agent.served()) - 1)
    assert served == [2, 4, 5]


def test_what_is_not_rendered_is_no_leftover_of_a_previous_run() -> None:
    """A sync that reads everything removes what no plan has: it must know all plans."""
    mode = FakeMode("one")
    active = ActiveMode(mode, Config(hostname_override="here"), Callbacks())
    active.open()
    agent = Agent()
    agent.fold(WEB, LARGE)
    drained = agent.tracker.drain()
    active.reconciler.plan(drained.state, drained.services, node_changed=True, host_changed=True, most=1)
    assert active.reconciler.unrendered
    active.sync(verify=False)
    assert not active.reconciler.unrendered
    active.reconciler.plan(drained.state, drained.services, node_changed=True, host_changed=True, most=1)
    active.sync(verify=True)
    assert not active.reconciler.unrendered
    active.close()


def test_an_edge_announces_an_address_when_its_plan_is_rendered() -> None:
    agent = Agent(context=dataclasses.replace(CONTEXT, role=Role.EDGE))
    edge = agent.reconciler.edge
    assert edge
    outside = service("outside", ips=["10.96.0.9"], external=["203.0.113.9"])
    agent.fold(outside, slice_of("outside", endpoint("10.1.0.1")), LOCAL)
    drained = agent.tracker.drain()
    agent.reconciler.plan(drained.state, drained.services, node_changed=False, host_changed=False, most=0)
    assert not edge.vips
    agent.reconciler.render()
    assert parse_address("203.0.113.9") in edge.vips
    agent.sync(gone("outside"))
    assert not edge.vips


def test_a_health_check_changes_with_the_last_plan_of_its_namespace() -> None:
    agent = Agent()
    agent.fold(LOCAL, gone("none"))
    agent.plan()
    checked = service(
        "checked",
        *(port(number, f"p{number}") for number in (1, 2)),
        balancer=["203.0.113.9"],
        type_=ServiceType.LOAD_BALANCER,
        external_policy=TrafficPolicy.LOCAL,
        health_check=30100,
    )
    agent.fold(checked)
    drained = agent.tracker.drain()
    agent.reconciler.plan(drained.state, drained.services, node_changed=False, host_changed=False, most=1)
    assert not agent.reconciler.health_checks
    agent.reconciler.render()
    assert len(agent.reconciler.health_checks) == 1
