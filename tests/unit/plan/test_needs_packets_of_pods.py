"""Which ServicePorts need the packets of pods."""

import dataclasses

import pytest

from ebpfproxy.model.address import Protocol
from ebpfproxy.model.endpoint import Endpoint, EndpointPort
from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.devices import needs_packets_of_node, needs_packets_of_pods
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import DetectLocal
from tests.support.build import CONTEXT, HERE, endpoint, port, service, slice_of

LOCAL = TrafficPolicy.LOCAL
NO_DETECTOR = dataclasses.replace(CONTEXT, detect_local=DetectLocal.CLUSTER_CIDR)
BALANCED = service(balancer=["203.0.113.1"], type_=ServiceType.LOAD_BALANCER)
INTERNAL = service(internal_policy=LOCAL)
EXTERNAL = service("web", port(80, node_port=30080), type_=ServiceType.NODE_PORT, external_policy=LOCAL)
RANGED = dataclasses.replace(
    BALANCED, source_ranges=service(ranges=["198.51.100.0/24", "fd00::/8"]).source_ranges
)


def needs(of: Service, *endpoints: Endpoint, detector: bool = True) -> bool:
    context = CONTEXT if detector else NO_DETECTOR
    (plan,) = plan_service(of, [slice_of("web", *endpoints)], None, context)
    return needs_packets_of_pods(plan)


@pytest.mark.parametrize("of", [service(), BALANCED, INTERNAL, EXTERNAL])
def test_a_service_with_a_local_endpoint_does_not_need_packets_of_pods(of: Service) -> None:
    assert not needs(of, endpoint(node=HERE))


def test_source_ranges_need_packets_of_pods_with_and_without_endpoints() -> None:
    assert needs(RANGED, endpoint())
    assert needs(RANGED)


@pytest.mark.parametrize("ranges", [["fd00::/8"], ["198.51.100.0/24", "0.0.0.0/0"]])
def test_source_ranges_that_restrict_nothing_do_not_need_packets_of_pods(ranges: list[str]) -> None:
    four = dataclasses.replace(BALANCED, source_ranges=service(ranges=ranges).source_ranges)
    assert not needs(four, endpoint())


def test_sctp_needs_packets_of_pods() -> None:
    sctp = service("web", port(protocol=Protocol.SCTP))
    (plan,) = plan_service(
        sctp, [slice_of("web", endpoint(), ports=[EndpointPort("", Protocol.SCTP, 8080)])], None, CONTEXT
    )
    assert needs_packets_of_pods(plan)
    assert needs_packets_of_node(plan)


def test_a_rejection_without_endpoints_does_not_need_packets_of_pods() -> None:
    assert not needs(service())
    assert not needs(INTERNAL)


def test_a_drop_without_local_endpoints_needs_packets_of_pods() -> None:
    assert needs(INTERNAL, endpoint(node="elsewhere"))


def test_a_drop_that_does_not_concern_pods_does_not_need_their_packets() -> None:
    assert not needs(EXTERNAL, endpoint(node="elsewhere"))
    assert needs(EXTERNAL, endpoint(node="elsewhere"), detector=False)


def test_a_plan_that_lost_all_frontends_does_not_need_packets_of_pods() -> None:
    for of in (RANGED, INTERNAL, service("web", port(protocol=Protocol.SCTP))):
        (plan,) = plan_service(of, [slice_of("web", endpoint())], None, CONTEXT)
        assert not needs_packets_of_pods(dataclasses.replace(plan, frontends=()))
