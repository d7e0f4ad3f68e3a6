"""healthCheckNodePort: which Services need it, local endpoints, and addresses."""

import pytest

from ebpfproxy.model.address import Family, Protocol, format_address
from ebpfproxy.model.endpoint import EndpointPort
from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.health_check_node_port import (
    HealthCheck,
    health_check_addresses,
    local_endpoints,
    needs_health_check,
    plan_health_check,
)
from ebpfproxy.plan.service_plan import NodePlan
from tests.support import build
from tests.support.build import HERE, draining, endpoint, networks, slice_of

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
def test_only_load_balancers_with_policy_local_need_health_checks(service: Service, needed: bool) -> None:
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


def test_a_pod_with_addresses_of_both_families_counts_once() -> None:
    """kubernetes issue 114702: the counts of the two families conflicted."""
    service = build.service(ips=["10.96.0.10", "fd00::10"])
    four = slice_of("web", endpoint("10.1.0.1", HERE), endpoint("10.1.0.2", HERE))
    six = slice_of("web", endpoint("fd01::1", HERE), called="web-2")
    assert local_endpoints(service, [four, six], HERE) == 2
    assert local_endpoints(build.service(ips=["fd00::10"]), [four, six], HERE) == 1


def test_without_slices_there_is_no_local_endpoint() -> None:
    assert local_endpoints(BALANCED, (), HERE) == 0


def test_a_health_check_has_the_service_port_and_local_endpoints() -> None:
    here = slice_of("web", endpoint("10.1.0.1", HERE))
    assert plan_health_check(BALANCED, [here], HERE) == HealthCheck(BALANCED.name, 32000, 1)
    assert plan_health_check(build.service(), [here], HERE) is None


def addresses(*local: str, everywhere: tuple[Family, ...] = ()) -> set[str]:
    """Return the addresses of health checks on a node that accepts NodePorts on `local`."""
    plan = NodePlan(
        node_port_networks=frozenset(networks(local)), node_ports_everywhere=frozenset(everywhere)
    )
    return {format_address(address) for address in health_check_addresses(plan)}


def test_health_checks_are_served_at_the_addresses_of_node_ports() -> None:
    local = "192.0.2.10/32", "127.0.0.0/8", "2001:db8::10/128", "::1/128"
    assert addresses(*local) == {"192.0.2.10", "127.0.0.1", "2001:db8::10", "::1"}
    assert addresses(*local, everywhere=(Family.IPV4,)) == {"0.0.0.0", "2001:db8::10", "::1"}
    assert addresses(*local, everywhere=tuple(Family)) == {"0.0.0.0", "::"}
    assert addresses() == set()


def test_health_checks_are_not_served_on_networks_or_link_local_addresses() -> None:
    assert addresses("198.51.100.0/24", "fe80::1/128", "192.0.2.10/32") == {"192.0.2.10"}
