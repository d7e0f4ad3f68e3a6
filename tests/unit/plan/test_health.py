"""healthCheckNodePort."""

import pytest

from ebpfproxy.model.address import Protocol
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.health import local_endpoints, needs_health_check
from tests.support import build
from tests.support.build import HERE, draining, endpoint, slice_of

BALANCED = build.service(
    type_=ServiceType.LOAD_BALANCER, external_policy=TrafficPolicy.LOCAL, health_check=32000
)


@pytest.mark.parametrize(
    ("service", "needed"),
    [
        (BALANCED, True),
        (build.service(type_=ServiceType.LOAD_BALANCER, external_policy=TrafficPolicy.LOCAL), False),
        (build.service(type_=ServiceType.LOAD_BALANCER, health_check=32000), False),
        (
            build.service(
                type_=ServiceType.NODE_PORT, external_policy=TrafficPolicy.LOCAL, health_check=32000
            ),
            False,
        ),
    ],
)
def test_only_load_balancers_of_policy_local_are_asked(service: Service, needed: bool) -> None:
    assert needs_health_check(service) is needed


def test_a_pod_with_two_ports_in_two_slices_counts_once() -> None:
    ports = (EndpointPort("a", Protocol.TCP, 1), EndpointPort("b", Protocol.TCP, 2))
    pod = endpoint("10.1.0.1", HERE)
    slices = [slice_of("web", pod, ports=ports), slice_of("web", pod, called="web-2")]
    assert local_endpoints(BALANCED, slices, HERE) == 1


def test_only_ready_endpoints_of_this_node_count() -> None:
    pods = [endpoint("10.1.0.1", HERE), endpoint("10.1.0.2"), draining("10.1.0.3", HERE)]
    unready = endpoint("10.1.0.4", HERE, ready=False)
    assert local_endpoints(BALANCED, [slice_of("web", *pods, unready)], HERE) == 1


def test_a_node_with_only_terminating_endpoints_is_not_healthy() -> None:
    assert local_endpoints(BALANCED, [slice_of("web", draining("10.1.0.1", HERE))], HERE) == 0


def test_the_families_of_a_pod_are_not_added_up() -> None:
    """kubernetes issue 114702: the two families' counts got in each other's way."""
    service = build.service(ips=["10.96.0.10", "fd00::10"])
    four = slice_of("web", endpoint("10.1.0.1", HERE), endpoint("10.1.0.2", HERE))
    six = slice_of("web", endpoint("fd01::1", HERE), called="web-2")
    assert local_endpoints(service, [four, six], HERE) == 2
    assert local_endpoints(build.service(ips=["fd00::10"]), [four, six], HERE) == 1


def test_without_slices_there_is_none() -> None:
    assert local_endpoints(BALANCED, (), HERE) == 0
