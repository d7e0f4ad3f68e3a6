"""Which ports of Services a pod reaches rightly only by its packets."""

import dataclasses

import pytest

from ebpfproxy.model.address import Protocol
from ebpfproxy.model.endpoint import Endpoint, EndpointPort
from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.devices import needs_packets_of_pods
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
def test_one_with_an_endpoint_here_is_left_to_the_sockets(of: Service) -> None:
    assert not needs(of, endpoint(node=HERE))


def test_source_ranges_are_for_packets_whatever_endpoints_there_are() -> None:
    assert needs(RANGED, endpoint())
    assert needs(RANGED)


def test_ranges_of_the_other_family_restrict_nothing() -> None:
    four = dataclasses.replace(BALANCED, source_ranges=service(ranges=["fd00::/8"]).source_ranges)
    assert not needs(four, endpoint())


def test_sctp_is_for_packets() -> None:
    sctp = service("web", port(protocol=Protocol.SCTP))
    (plan,) = plan_service(
        sctp, [slice_of("web", endpoint(), ports=[EndpointPort("", Protocol.SCTP, 8080)])], None, CONTEXT
    )
    assert needs_packets_of_pods(plan)


def test_what_is_refused_is_refused_at_the_socket() -> None:
    assert not needs(service())
    assert not needs(INTERNAL)


def test_what_meets_silence_is_dropped_as_a_packet() -> None:
    assert needs(INTERNAL, endpoint(node="elsewhere"))


def test_where_only_others_than_pods_meet_silence_pods_need_nothing() -> None:
    assert not needs(EXTERNAL, endpoint(node="elsewhere"))
    assert needs(EXTERNAL, endpoint(node="elsewhere"), detector=False)


def test_a_port_whose_frontends_all_are_anothers_needs_nothing() -> None:
    for of in (RANGED, INTERNAL, service("web", port(protocol=Protocol.SCTP))):
        (plan,) = plan_service(of, [slice_of("web", endpoint())], None, CONTEXT)
        assert not needs_packets_of_pods(dataclasses.replace(plan, frontends=()))
