"""Which TCP connections go to removed endpoints, without a kernel."""

import dataclasses

import pytest

from ebpfproxy.model.balancing import DEFAULT_BALANCING, Balancing, parse_weights
from ebpfproxy.model.endpoint import Endpoint
from ebpfproxy.model.service import RemovedEndpoints as Request
from ebpfproxy.model.service import ServiceType
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.open_connections import OpenConnections
from ebpfproxy.plan.service_plan import PlanContext, PlanKey, ServicePortPlan
from tests.support import build
from tests.support.build import CONTEXT, HERE, draining, endpoint, port, slice_of
from tests.unit.plan.udp_flows import LOCAL, NODE, OTHER_NODE, TCP, UDP, Flow, flow

VIP, OTHER_VIP = "10.96.0.10", "10.96.0.11"
ONE, TWO = "10.1.0.1", "10.1.0.2"
NODE_PORT = 30080

Plans = dict[PlanKey, ServicePortPlan | None]


def plan(
    *endpoints: Endpoint,
    called: str = "web",
    ip: str = VIP,
    request: Request | None = Request.RESET,
    context: PlanContext = CONTEXT,
    balancing: Balancing = DEFAULT_BALANCING,
    rebalance: int | None = None,
) -> Plans:
    """The plan, by key, of a Service with TCP port 80 and a NodePort."""
    service = build.service(called, port(80, node_port=NODE_PORT), ips=(ip,), type_=ServiceType.NODE_PORT)
    service = dataclasses.replace(
        service, removed_endpoints=request, balancing=balancing, rebalance=rebalance
    )
    slices = [slice_of(called, *endpoints)] if endpoints else []
    return {each.key: each for each in plan_service(service, slices, None, context)}


def connection(frontend: str, answers: str = "") -> Flow:
    return flow(frontend, f"{answers}:8080" if answers else "", protocol=TCP)


TO_ONE, TO_TWO = connection(f"{VIP}:80", ONE), connection(f"{VIP}:80", TWO)


class Endpoints(OpenConnections[Flow]):
    """With a grace period of ten seconds."""

    def __init__(self) -> None:
        super().__init__(10.0, b"node")

    def removed(self, connection: Flow, now: float = 1e9) -> bool:
        """Whether the connection is to be reset at a time, by default when the grace period is over."""
        self.search([connection], 0.0)
        return self.search([connection], now).removed == [connection]


@pytest.fixture
def endpoints() -> Endpoints:
    """Those of a node that accepts NodePorts on `LOCAL`."""
    made = Endpoints()
    made.expect_node_ports(frozenset(LOCAL))
    return made


def bring(endpoints: Endpoints, changed: Plans) -> bool:
    """Return whether a search is due then."""
    endpoints.expect(changed)
    return endpoints.in_force(0.0) is not None


def test_a_connection_counts_once_its_endpoint_is_gone(endpoints: Endpoints) -> None:
    assert not bring(endpoints, plan(endpoint(ONE), endpoint(TWO)))
    assert not endpoints.removed(TO_ONE)
    assert bring(endpoints, plan(endpoint(TWO)))
    assert endpoints.removed(TO_ONE)
    assert not endpoints.removed(TO_TWO)
    assert not bring(endpoints, plan(endpoint(ONE), endpoint(TWO)))
    assert not endpoints.removed(TO_ONE)


def test_an_endpoint_counts_as_long_as_it_serves(endpoints: Endpoints) -> None:
    """Whether new connections would use it makes no difference."""
    ready = endpoint(TWO, HERE)
    for other in (draining(ONE), endpoint(ONE, ready=False), endpoint(ONE, zones=["zone-z"])):
        bring(endpoints, plan(other, ready))
        assert not endpoints.removed(TO_ONE)
    for other in (
        endpoint(ONE, ready=False, serving=False),
        endpoint(ONE, serving=False, ready=False, terminating=True),
    ):
        bring(endpoints, plan(other, ready))
        assert endpoints.removed(TO_ONE)


def test_a_weight_of_zero_removes_no_endpoint(endpoints: Endpoints) -> None:
    weights = Balancing(weights=parse_weights(f"{ONE}=0"))
    bring(endpoints, plan(endpoint(ONE), endpoint(TWO), balancing=weights))
    assert not endpoints.removed(TO_ONE)


def test_services_that_do_not_request_it_do_not_count(endpoints: Endpoints) -> None:
    for request in (None, Request.KEEP):
        assert not bring(endpoints, plan(endpoint(TWO), request=request))
        assert not endpoints.removed(TO_ONE)


def test_the_default_of_the_node_applies_to_services_without_an_annotation(
    endpoints: Endpoints,
) -> None:
    context = dataclasses.replace(CONTEXT, reset_removed=True)
    bring(endpoints, plan(endpoint(ONE), request=None, context=context))
    bring(endpoints, plan(endpoint(TWO), request=None, context=context))
    assert endpoints.removed(TO_ONE)
    bring(endpoints, plan(endpoint(TWO), request=Request.KEEP, context=context))
    assert not endpoints.removed(TO_ONE)


def test_only_tcp_counts() -> None:
    service = build.service("dns", port(53, protocol=UDP), port(53))
    service = dataclasses.replace(service, removed_endpoints=Request.RESET)
    found = plan_service(service, [], None, CONTEXT)
    assert {each.name.protocol.name: each.serving is not None for each in found} == {
        "TCP": True,
        "UDP": False,
    }


def test_an_untranslated_connection_belongs_to_no_service(endpoints: Endpoints) -> None:
    bring(endpoints, plan(endpoint(TWO)))
    assert not endpoints.removed(connection(f"{VIP}:80"))


def test_node_ports_count_at_addresses_that_accept_them(endpoints: Endpoints) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    bring(endpoints, plan(endpoint(TWO)))
    assert endpoints.removed(connection(f"{NODE}:{NODE_PORT}", ONE))
    assert not endpoints.removed(connection(f"{OTHER_NODE}:{NODE_PORT}", ONE))
    assert not endpoints.removed(connection(f"{NODE}:80", ONE))


def test_an_external_ip_of_another_service_precedes_a_node_port(endpoints: Endpoints) -> None:
    """Bug: a tenant could have its connections reset by a NodePort with the same port."""
    at_node = connection(f"{NODE}:{NODE_PORT}", ONE)
    victim = build.service("victim", port(NODE_PORT), ips=(OTHER_VIP,), external=(NODE,))
    of_victim = {each.key: each for each in plan_service(victim, [], None, CONTEXT)}
    bring(endpoints, dict(of_victim))
    bring(endpoints, plan(endpoint(ONE)))
    bring(endpoints, plan(endpoint(TWO)))
    assert endpoints.search([at_node], 1.0).due == 10.0
    assert not endpoints.search([at_node], 9.0).removed
    bring(endpoints, dict.fromkeys(of_victim))
    assert endpoints.search([at_node], 9.5).due == 10.0
    assert endpoints.removed(at_node, 20.0)


def test_endpoints_that_the_service_never_had_do_not_count(endpoints: Endpoints) -> None:
    """Of a Service that had the frontend before, or from before the start of the agent."""
    bring(endpoints, plan(endpoint(TWO)))
    assert not endpoints.removed(TO_ONE)


def test_an_endpoint_of_a_plan_that_is_not_in_force_yet_does_not_count(endpoints: Endpoints) -> None:
    """The kernel may have applied a part of it."""
    bring(endpoints, plan(endpoint(ONE)))
    bring(endpoints, plan(endpoint(TWO)))
    assert endpoints.removed(TO_ONE)
    changed = plan(endpoint(ONE))
    endpoints.expect(changed)
    endpoints.in_force(0.0, changed.keys())
    assert not endpoints.removed(TO_ONE)


def test_a_connection_that_is_still_opening_is_found_by_the_last_search(endpoints: Endpoints) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    bring(endpoints, plan(endpoint(TWO)))
    assert endpoints.search([], 1.0).due == 10.0
    assert endpoints.search([TO_ONE], 10.0).removed == [TO_ONE]
    assert endpoints.search([], 21.0).due is None
    assert not endpoints.removed(TO_ONE), "nothing is remembered that no connection needs"


def test_the_endpoints_of_a_deleted_service_are_removed_until_a_search_finds_no_connection(
    endpoints: Endpoints,
) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    assert bring(endpoints, dict.fromkeys(plan()))
    assert endpoints.removed(TO_ONE)
    endpoints.search([], 100.0)
    assert not endpoints.removed(TO_ONE)


def test_a_connection_to_a_former_frontend_follows_its_service(endpoints: Endpoints) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    bring(endpoints, plan(endpoint(ONE), ip=OTHER_VIP))
    assert not endpoints.removed(TO_ONE)
    bring(endpoints, plan(endpoint(TWO), ip=OTHER_VIP))
    assert endpoints.removed(TO_ONE)


@pytest.mark.parametrize("request_", [Request.KEEP, Request.RESET])
def test_a_frontend_belongs_to_the_service_that_has_it(endpoints: Endpoints, request_: Request) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    bring(endpoints, dict.fromkeys(plan()) | plan(endpoint(TWO), called="other", request=request_))
    assert not endpoints.removed(TO_TWO)
    assert not endpoints.removed(TO_ONE), "it may be right: the other Service does not know it"


def test_a_rejected_plan_is_not_in_force(endpoints: Endpoints) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    changed = plan(endpoint(TWO))
    endpoints.expect(changed)
    assert endpoints.in_force(0.0, changed.keys()) is None
    assert not endpoints.removed(TO_ONE)
    assert endpoints.in_force(0.0) == 10.0
    assert endpoints.removed(TO_ONE)


def test_the_grace_period_begins_again_when_the_endpoint_was_back(endpoints: Endpoints) -> None:
    for began in (0.0, 100.0):
        bring(endpoints, plan(endpoint(ONE), endpoint(TWO)))
        endpoints.expect(plan(endpoint(TWO)))
        assert endpoints.in_force(began) == began + 10
        first = endpoints.search([TO_ONE], began)
        assert first == ([], [], began + 10)
        assert endpoints.search([TO_ONE], began + 9.9) == first
        assert endpoints.search([TO_ONE], began + 10).removed == [TO_ONE]


def test_the_api_server_keeps_its_last_endpoints(endpoints: Endpoints) -> None:
    from ebpfproxy.plan.endpoints import keep_last_endpoints

    context = dataclasses.replace(CONTEXT, reset_removed=True)
    previous = plan(endpoint(ONE), request=None, context=context)
    (now,) = keep_last_endpoints(
        tuple(each for each in plan(request=None, context=context).values() if each), previous.get
    )
    bring(endpoints, {now.key: now})
    assert not endpoints.removed(TO_ONE)
