"""Which conntrack entries of UDP flows are stale, without a kernel."""

import pytest

from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.model.endpoint import Endpoint, EndpointPort
from ebpfproxy.model.service import TrafficPolicy
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import Frontend, PlanKey, ServicePortPlan
from ebpfproxy.plan.stale_flows import StaleFlows
from tests.support import build
from tests.support.build import CONTEXT, HERE, draining, endpoint, networks, port, slice_of
from tests.unit.plan.udp_flows import (
    LOCAL,
    NODE,
    ONE,
    OTHER_NODE,
    SCTP,
    TCP,
    TO_ONE,
    TO_TWO,
    TWO,
    UDP,
    UNTRANSLATED,
    VIP,
    flow,
    gone,
    place,
    plan,
)

BOTH = frozenset(Family)
V4 = frozenset([Family.IPV4])


@pytest.fixture
def flows() -> StaleFlows:
    """The flows of a node that accepts NodePorts on `LOCAL`."""
    made = StaleFlows()
    made.expect_node_ports(frozenset(LOCAL))
    made.in_force()
    return made


def bring(flows: StaleFlows, changed: dict[PlanKey, ServicePortPlan | None]) -> frozenset[Family]:
    flows.expect(changed)
    return flows.in_force()


def test_a_flow_is_stale_once_its_endpoint_is_not_listed(flows: StaleFlows) -> None:
    bring(flows, plan(ONE, TWO))
    assert not flows.is_stale(TO_ONE)
    bring(flows, plan(TWO))
    assert flows.is_stale(TO_ONE)
    assert not flows.is_stale(TO_TWO)


def test_flows_to_terminating_and_remote_endpoints_are_not_stale(flows: StaleFlows) -> None:
    """Which endpoints policies would select now matters only for new flows."""
    here = endpoint("10.1.0.1", HERE)
    bring(flows, plan(here, draining("10.1.0.2"), policy=TrafficPolicy.LOCAL))
    assert not flows.is_stale(TO_ONE)
    assert not flows.is_stale(TO_TWO)


def test_flows_to_an_endpoint_that_does_not_serve_are_stale(flows: StaleFlows) -> None:
    bring(flows, plan(ONE, endpoint("10.1.0.2", ready=False, serving=False)))
    assert flows.is_stale(TO_TWO)


def test_a_flow_to_another_port_of_the_pod_is_stale(flows: StaleFlows) -> None:
    bring(flows, plan(ONE))
    assert flows.is_stale(flow(f"{VIP}:53", "10.1.0.1:53"))


def test_flows_of_a_service_scaled_to_zero_are_stale(flows: StaleFlows) -> None:
    bring(flows, plan(ONE))
    assert bring(flows, plan()) == V4
    assert flows.is_stale(TO_ONE)


def test_an_untranslated_flow_is_stale_once_the_service_has_an_endpoint(flows: StaleFlows) -> None:
    bring(flows, plan())
    assert bring(flows, plan(ONE)) == V4
    assert flows.is_stale(UNTRANSLATED)


def test_an_untranslated_flow_is_stale_once_the_service_exists(flows: StaleFlows) -> None:
    assert not flows.is_stale(UNTRANSLATED)
    assert bring(flows, plan(ONE)) == V4
    assert flows.is_stale(UNTRANSLATED)


def test_an_untranslated_flow_to_an_endpoint_with_the_frontends_address_is_not_stale(
    flows: StaleFlows,
) -> None:
    """A Pod in the host's network namespace, behind an external IP that is the node's address."""
    bring(flows, plan(endpoint(NODE), external=(NODE,), target=53))
    assert not flows.is_stale(flow(f"{NODE}:53"))
    assert flows.is_stale(UNTRANSLATED)


def test_translated_flows_of_a_deleted_service_are_stale_until_forgotten(flows: StaleFlows) -> None:
    plans = plan(ONE)
    bring(flows, plans)
    assert bring(flows, gone(plans)) == V4
    assert flows.is_stale(TO_ONE)
    assert not flows.is_stale(UNTRANSLATED)
    flows.forget_gone(Family.IPV4)
    assert not flows.is_stale(TO_ONE)  # another program translates it now


def test_removed_frontends_are_forgotten_by_family(flows: StaleFlows) -> None:
    plans = plan(ONE, ips=(VIP, "fd00::53"))
    bring(flows, plans)
    assert bring(flows, gone(plans)) == BOTH
    flows.forget_gone(Family.IPV6)
    assert flows.is_stale(TO_ONE)
    assert not flows.is_stale(flow("fd00::53:53", "fd01::1:5353"))


def test_flows_of_a_recreated_service_are_compared_with_its_new_endpoints(flows: StaleFlows) -> None:
    plans = plan(ONE)
    bring(flows, plans)
    bring(flows, gone(plans))
    bring(flows, plan(TWO))
    assert flows.is_stale(TO_ONE)
    assert not flows.is_stale(TO_TWO)


@pytest.mark.parametrize("swap", [False, True])
def test_a_frontend_that_moves_to_another_service_has_its_endpoints(flows: StaleFlows, swap: bool) -> None:
    previous, latter = plan(ONE), plan(TWO, called="resolver")
    bring(flows, previous)
    moved = {**latter, **gone(previous)} if swap else {**gone(previous), **latter}
    flows.expect(moved)
    assert not flows.is_stale(TO_ONE)
    assert not flows.is_stale(TO_TWO)
    assert flows.in_force() == V4
    assert flows.is_stale(TO_ONE)
    assert not flows.is_stale(TO_TWO)


def test_flows_that_another_program_translates_are_not_stale(flows: StaleFlows) -> None:
    bring(flows, plan(ONE, node_port=30053))
    for sent in (f"{NODE}:8053", "8.8.8.8:53", f"{VIP}:54", "10.96.0.54:53"):
        assert not flows.is_stale(flow(sent, "10.1.0.9:53"))


@pytest.mark.parametrize("protocol", [TCP, SCTP, 1])
def test_only_udp_flows_can_be_stale(flows: StaleFlows, protocol: int) -> None:
    bring(flows, plan(TWO) | plan(TWO, protocol=TCP) | plan(TWO, protocol=SCTP))
    assert flows.is_stale(TO_ONE)
    assert not flows.is_stale(TO_ONE._replace(protocol=protocol))


def test_a_tcp_plan_causes_no_search_and_makes_no_udp_flow_stale(flows: StaleFlows) -> None:
    plans = plan(ONE, protocol=TCP)
    assert bring(flows, plans) == frozenset()
    assert not flows.is_stale(UNTRANSLATED)
    assert bring(flows, gone(plans)) == frozenset()


def test_node_port_flows_are_stale_only_at_this_nodes_addresses(flows: StaleFlows) -> None:
    bring(flows, plan(ONE, node_port=30053))
    for address in (NODE, "127.0.0.1"):
        assert not flows.is_stale(flow(f"{address}:30053", "10.1.0.1:5353"))
        assert flows.is_stale(flow(f"{address}:30053", "10.1.0.2:5353"))
        assert flows.is_stale(flow(f"{address}:30053"))
    assert not flows.is_stale(flow(f"{OTHER_NODE}:30053"))
    assert not flows.is_stale(flow(f"{OTHER_NODE}:30053", "10.1.0.2:5353"))


def test_a_node_port_of_one_family_makes_no_flow_of_the_other_stale(flows: StaleFlows) -> None:
    bring(flows, plan(ONE, node_port=30053))
    assert not flows.is_stale(flow("2001:db8::10:30053", "fd01::1:5353"))
    both = plan(ONE, ips=(VIP, "fd00::53"), node_port=30053)
    bring(flows, both)
    assert flows.is_stale(flow("2001:db8::10:30053", "fd01::1:5353"))


def test_no_node_port_is_stale_before_the_nodes_addresses_are_known() -> None:
    flows = StaleFlows()
    bring(flows, plan(ONE, node_port=30053))
    assert not flows.is_stale(flow(f"{NODE}:30053"))
    assert flows.is_stale(UNTRANSLATED)


def test_a_new_node_port_address_causes_a_search_if_there_are_node_ports(flows: StaleFlows) -> None:
    bring(flows, plan(ONE))
    flows.expect_node_ports(frozenset([*LOCAL, *networks(["192.0.2.12/32"])]))
    assert flows.in_force() == frozenset()  # no NodePort
    bring(flows, plan(ONE, node_port=30053))
    flows.expect_node_ports(frozenset([*LOCAL, *networks(["192.0.2.13/32"])]))
    assert flows.in_force() == V4
    assert flows.is_stale(flow("192.0.2.13:30053"))
    assert not flows.is_stale(flow("192.0.2.12:30053"))
    flows.expect_node_ports(frozenset(LOCAL))
    assert flows.in_force() == frozenset()


def edge() -> dict[PlanKey, ServicePortPlan | None]:
    """Return the plans of a Service whose external IP is the node's address, with the port of a NodePort."""
    service = build.service("edge", port(30053, protocol=UDP), ips=("10.96.0.9",), external=(NODE,))
    slices = [slice_of("edge", TWO, ports=[EndpointPort("", UDP, 5353)])]
    return {each.key: each for each in plan_service(service, slices, None, CONTEXT)}


def test_an_external_ip_takes_precedence_over_a_node_port_at_the_same_address(flows: StaleFlows) -> None:
    to_one, to_two = flow(f"{NODE}:30053", "10.1.0.1:5353"), flow(f"{NODE}:30053", "10.1.0.2:5353")
    bring(flows, plan(ONE, node_port=30053) | edge())
    assert flows.is_stale(to_one)
    assert not flows.is_stale(to_two)
    bring(flows, gone(edge()))
    assert not flows.is_stale(to_one)
    assert flows.is_stale(to_two)


def test_flows_to_an_expected_node_port_that_replaces_an_external_ip_are_not_stale(
    flows: StaleFlows,
) -> None:
    to_one = flow(f"{NODE}:30053", "10.1.0.1:5353")
    bring(flows, edge())
    bring(flows, gone(edge()))
    assert flows.is_stale(to_one)
    flows.expect(plan(ONE, node_port=30053))
    assert not flows.is_stale(to_one)
    flows.in_force()
    assert not flows.is_stale(to_one)


def test_in_another_conntrack_zone_only_translated_flows_are_stale(flows: StaleFlows) -> None:
    bring(flows, plan(ONE))
    assert not flows.is_stale(UNTRANSLATED._replace(zone=7))
    assert flows.is_stale(TO_TWO._replace(zone=7))


def test_flows_to_expected_endpoints_are_not_stale(flows: StaleFlows) -> None:
    bring(flows, plan(ONE))
    flows.expect(plan(TWO))
    assert not flows.is_stale(TO_ONE)
    assert not flows.is_stale(TO_TWO)
    flows.expect(plan(endpoint("10.1.0.3")))  # the sync failed: who knows what is in the kernel
    assert not flows.is_stale(TO_TWO)
    assert flows.is_stale(flow(f"{VIP}:53", "10.1.0.4:5353"))
    assert flows.in_force() == V4
    assert flows.is_stale(TO_ONE)
    assert flows.is_stale(TO_TWO)


def test_an_expected_frontend_makes_no_flow_stale_before_it_is_in_force(flows: StaleFlows) -> None:
    flows.expect(plan(ONE))
    assert not flows.is_stale(UNTRANSLATED)


def test_flows_to_endpoints_of_an_expected_recreated_service_are_not_stale(flows: StaleFlows) -> None:
    previous = plan(ONE, node_port=30053)
    bring(flows, previous)
    bring(flows, gone(previous))
    flows.expect(plan(TWO, node_port=30053))
    assert flows.is_stale(TO_ONE)
    assert not flows.is_stale(TO_TWO)
    assert not flows.is_stale(flow(f"{NODE}:30053", "10.1.0.2:5353"))


def test_flows_are_stale_if_an_expected_frontend_does_not_come_into_force(flows: StaleFlows) -> None:
    """The sync with the frontend failed, and a search ran before the next sync."""
    bring(flows, plan(ONE))
    bring(flows, gone(plan(ONE)))
    flows.expect(plan(ONE))
    flows.forget_gone(Family.IPV4)
    assert bring(flows, gone(plan(ONE))) == V4
    assert flows.is_stale(TO_ONE)


def test_if_the_kernel_rejects_a_plan_the_previous_one_stays_in_force(flows: StaleFlows) -> None:
    first, second = plan(ONE), plan(TWO)
    bring(flows, first)
    flows.expect(second)
    assert flows.in_force(rejected=second.keys()) == frozenset()
    assert not flows.is_stale(TO_ONE)
    assert not flows.is_stale(TO_TWO)
    assert flows.in_force() == V4
    assert flows.is_stale(TO_ONE)


@pytest.mark.parametrize(
    ("before", "after", "worth"),
    [
        ([ONE], [ONE, TWO], False),
        ([ONE, TWO], [TWO], True),
        ([], [ONE], True),
        ([ONE], [], True),
        ([ONE], [draining("10.1.0.1")], False),
        ([ONE], [ONE], False),
    ],
)
def test_changed_endpoints_cause_a_search_only_if_flows_can_become_stale(
    flows: StaleFlows, before: list[Endpoint], after: list[Endpoint], worth: bool
) -> None:
    bring(flows, plan(*before))
    assert bring(flows, plan(*after)) == (V4 if worth else frozenset())


@pytest.mark.parametrize(
    ("before", "after"),
    [((), ("203.0.113.1",)), (("203.0.113.1",), ()), (("203.0.113.1",), ("203.0.113.2",))],
)
def test_an_added_or_removed_frontend_causes_a_search(
    flows: StaleFlows, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    bring(flows, plan(ONE, external=before))
    assert bring(flows, plan(ONE, external=after)) == V4


def test_removing_a_rejected_plan_keeps_frontends_that_another_service_has(flows: StaleFlows) -> None:
    previous, latter = plan(ONE), plan(TWO, called="resolver")
    bring(flows, previous)
    flows.expect(gone(previous) | latter)
    flows.in_force(rejected=previous.keys())
    assert not flows.is_stale(TO_TWO)
    assert flows.in_force() == V4
    assert not flows.is_stale(TO_TWO)
    assert flows.is_stale(TO_ONE)


def test_without_changes_there_is_no_search(flows: StaleFlows) -> None:
    assert flows.in_force() == frozenset()
    assert bring(flows, gone(plan(ONE))) == frozenset()  # never was in force


def frontend(text: str, protocol: Protocol = UDP) -> Frontend:
    return Frontend(*place(text), protocol)


def test_inherited_frontends_cause_searches_until_forgotten() -> None:
    flows = StaleFlows()
    flows.inherit([frontend("10.96.0.99:53")])
    assert flows.in_force() == V4
    assert flows.in_force() == V4
    flows.forget_gone(Family.IPV4)
    assert flows.in_force() == frozenset()


def test_inherited_frontends_without_plan_count_as_removed() -> None:
    flows = StaleFlows()
    left = [f"{VIP}:53", "10.96.0.99:53", "0.0.0.0:30099"]
    flows.inherit([*map(frontend, left), frontend("10.96.0.98:53", TCP)])
    flows.expect_node_ports(frozenset(LOCAL))
    assert bring(flows, plan(ONE)) == V4
    assert not flows.is_stale(TO_ONE)
    assert flows.is_stale(flow("10.96.0.99:53", "10.1.0.9:5353"))
    assert flows.is_stale(flow(f"{NODE}:30099", "10.1.0.9:5353"))
    assert not flows.is_stale(flow(f"{OTHER_NODE}:30099", "10.1.0.9:5353"))
    assert not flows.is_stale(flow("10.96.0.98:53", "10.1.0.9:5353"))
    assert not flows.is_stale(flow("10.96.0.99:53"))
