"""Which TCP connections go to removed endpoints, without a kernel."""

import dataclasses

import pytest

from ebpfproxy.model.balancing import DEFAULT_BALANCING, Balancing, parse_weights
from ebpfproxy.model.endpoint import Endpoint
from ebpfproxy.model.service import RemovedEndpoints as Request
from ebpfproxy.model.service import ServiceType
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.removed_endpoints import RemovedEndpoints
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
) -> Plans:
    """The plan, by key, of a Service with TCP port 80 and a NodePort."""
    service = build.service(called, port(80, node_port=NODE_PORT), ips=(ip,), type_=ServiceType.NODE_PORT)
    service = dataclasses.replace(service, removed_endpoints=request, balancing=balancing)
    slices = [slice_of(called, *endpoints)] if endpoints else []
    return {each.key: each for each in plan_service(service, slices, None, context)}


def connection(frontend: str, answers: str = "") -> Flow:
    return flow(frontend, f"{answers}:8080" if answers else "", protocol=TCP)


TO_ONE, TO_TWO = connection(f"{VIP}:80", ONE), connection(f"{VIP}:80", TWO)


@pytest.fixture
def endpoints() -> RemovedEndpoints:
    """Those of a node that accepts NodePorts on `LOCAL`."""
    made = RemovedEndpoints()
    made.expect_node_ports(frozenset(LOCAL))
    return made


def bring(endpoints: RemovedEndpoints, changed: Plans) -> bool:
    endpoints.expect(changed)
    return endpoints.in_force()


def test_a_connection_counts_once_its_endpoint_is_gone(endpoints: RemovedEndpoints) -> None:
    assert bring(endpoints, plan(endpoint(ONE), endpoint(TWO)))
    assert endpoints.removed(TO_ONE) is None
    assert bring(endpoints, plan(endpoint(TWO)))
    removed = endpoints.removed(TO_ONE)
    assert removed
    assert removed.service in plan()
    assert endpoints.removed(TO_TWO) is None
    assert not bring(endpoints, plan(endpoint(ONE), endpoint(TWO)))
    assert endpoints.removed(TO_ONE) is None


def test_an_endpoint_counts_as_long_as_it_serves(endpoints: RemovedEndpoints) -> None:
    """Whether new connections would use it makes no difference."""
    ready = endpoint(TWO, HERE)
    for other in (draining(ONE), endpoint(ONE, ready=False), endpoint(ONE, zones=["zone-z"])):
        bring(endpoints, plan(other, ready))
        assert endpoints.removed(TO_ONE) is None
    for other in (
        endpoint(ONE, ready=False, serving=False),
        endpoint(ONE, serving=False, ready=False, terminating=True),
    ):
        bring(endpoints, plan(other, ready))
        assert endpoints.removed(TO_ONE)


def test_a_weight_of_zero_removes_no_endpoint(endpoints: RemovedEndpoints) -> None:
    weights = Balancing(weights=parse_weights(f"{ONE}=0"))
    bring(endpoints, plan(endpoint(ONE), endpoint(TWO), balancing=weights))
    assert endpoints.removed(TO_ONE) is None


def test_services_that_do_not_request_it_do_not_count(endpoints: RemovedEndpoints) -> None:
    for request in (None, Request.KEEP):
        assert not bring(endpoints, plan(endpoint(TWO), request=request))
        assert endpoints.removed(TO_ONE) is None


def test_the_default_of_the_node_applies_to_services_without_an_annotation(
    endpoints: RemovedEndpoints,
) -> None:
    context = dataclasses.replace(CONTEXT, reset_removed=True)
    bring(endpoints, plan(endpoint(TWO), request=None, context=context))
    assert endpoints.removed(TO_ONE)
    bring(endpoints, plan(endpoint(TWO), request=Request.KEEP, context=context))
    assert endpoints.removed(TO_ONE) is None


def test_only_tcp_counts() -> None:
    service = build.service("dns", port(53, protocol=UDP), port(53))
    service = dataclasses.replace(service, removed_endpoints=Request.RESET)
    found = plan_service(service, [], None, CONTEXT)
    assert {each.name.protocol.name: each.serving is not None for each in found} == {
        "TCP": True,
        "UDP": False,
    }


def test_an_untranslated_connection_belongs_to_no_service(endpoints: RemovedEndpoints) -> None:
    bring(endpoints, plan(endpoint(TWO)))
    assert endpoints.removed(connection(f"{VIP}:80")) is None


def test_node_ports_count_at_addresses_that_accept_them(endpoints: RemovedEndpoints) -> None:
    bring(endpoints, plan(endpoint(TWO)))
    assert endpoints.removed(connection(f"{NODE}:{NODE_PORT}", ONE))
    assert endpoints.removed(connection(f"{OTHER_NODE}:{NODE_PORT}", ONE)) is None
    assert endpoints.removed(connection(f"{NODE}:80", ONE)) is None


def test_the_endpoints_of_a_deleted_service_are_removed_until_a_search_finds_no_connection(
    endpoints: RemovedEndpoints,
) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    assert bring(endpoints, dict.fromkeys(plan()))
    removed = endpoints.removed(TO_ONE)
    assert removed
    endpoints.searched([removed])
    assert endpoints.removed(TO_ONE)
    endpoints.searched([])
    assert endpoints.removed(TO_ONE) is None


def test_a_connection_to_a_former_frontend_follows_its_service(endpoints: RemovedEndpoints) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    bring(endpoints, plan(endpoint(ONE), ip=OTHER_VIP))
    assert endpoints.removed(TO_ONE) is None
    bring(endpoints, plan(endpoint(TWO), ip=OTHER_VIP))
    assert endpoints.removed(TO_ONE)


@pytest.mark.parametrize("request_", [Request.KEEP, Request.RESET])
def test_a_frontend_belongs_to_the_service_that_has_it(
    endpoints: RemovedEndpoints, request_: Request
) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    bring(endpoints, dict.fromkeys(plan()) | plan(endpoint(TWO), called="other", request=request_))
    assert endpoints.removed(TO_TWO) is None
    assert bool(endpoints.removed(TO_ONE)) is (request_ is Request.RESET)


def test_a_rejected_plan_is_not_in_force(endpoints: RemovedEndpoints) -> None:
    bring(endpoints, plan(endpoint(ONE)))
    changed = plan(endpoint(TWO))
    endpoints.expect(changed)
    assert not endpoints.in_force(changed.keys())
    assert endpoints.removed(TO_ONE) is None
    assert endpoints.in_force()
    assert endpoints.removed(TO_ONE)


def test_the_time_of_a_removal_is_kept_until_the_endpoint_is_back(endpoints: RemovedEndpoints) -> None:
    bring(endpoints, plan(endpoint(TWO)))
    removed = endpoints.removed(TO_ONE)
    assert removed
    assert [endpoints.since(removed, now) for now in (10.0, 20.0)] == [10.0, 10.0]
    bring(endpoints, plan(endpoint(ONE), endpoint(TWO)))
    bring(endpoints, plan(endpoint(TWO)))
    assert endpoints.since(removed, 30.0) == 30.0
    endpoints.searched([])
    assert endpoints.since(removed, 40.0) == 40.0


def test_the_api_server_keeps_its_last_endpoints(endpoints: RemovedEndpoints) -> None:
    from ebpfproxy.plan.endpoints import keep_last_endpoints

    context = dataclasses.replace(CONTEXT, reset_removed=True)
    previous = plan(endpoint(ONE), request=None, context=context)
    (now,) = keep_last_endpoints(
        tuple(each for each in plan(request=None, context=context).values() if each), previous.get
    )
    bring(endpoints, {now.key: now})
    assert endpoints.removed(TO_ONE) is None
