"""Counts over Services: cluster size, and ServicePorts without local endpoints."""

import pytest

from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.model.endpoint import Endpoint, EndpointPort, EndpointSlice
from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.counts import LARGE, ClusterSize, NoLocalEndpoints, no_local_endpoints
from ebpfproxy.plan.frontends import plan_service
from tests.support.build import CONTEXT, HERE, endpoint, name, port, service, slice_of

WEB = service("web")


def many(count: int, of: str = "web", label: str = "", ready: bool = True) -> EndpointSlice:
    pods = (endpoint(f"10.1.{n >> 8}.{n & 255}", ready=ready) for n in range(count))
    return slice_of(of, *pods, ports=(EndpointPort(label, Protocol.TCP, 80),))


def size(*changes: tuple[Service | None, EndpointSlice]) -> frozenset[Family]:
    cluster = ClusterSize()
    for of, piece in changes:
        cluster.update(piece.service, of, [piece])
    return cluster.large


def test_a_family_with_more_endpoints_than_the_threshold_is_large() -> None:
    assert size((WEB, many(LARGE))) == frozenset()
    assert size((WEB, many(LARGE + 1))) == {Family.IPV4}
    assert size((WEB, many(LARGE + 1, ready=False))) == {Family.IPV4}, "as kube-proxy counts"
    assert size((WEB, many(600)), (service("api"), many(401, "api"))) == {Family.IPV4}


def test_endpoints_of_unknown_ports_and_services_do_not_count() -> None:
    assert size((WEB, many(LARGE + 1, label="other"))) == frozenset()
    assert size((None, many(LARGE + 1))) == frozenset()


def test_an_endpoint_counts_once_for_each_port() -> None:
    two = service("web", port(80, "a"), port(81, "b"))
    ports = EndpointPort("a", Protocol.TCP, 80), EndpointPort("b", Protocol.TCP, 81)
    pods = (endpoint(f"10.1.{n >> 8}.{n & 255}") for n in range(501))
    assert size((two, slice_of("web", *pods, ports=ports))) == {Family.IPV4}


def test_removed_endpoints_and_services_no_longer_count() -> None:
    cluster = ClusterSize()
    cluster.update(name("web"), WEB, [many(LARGE + 1)])
    cluster.update(name("web"), WEB, [many(1)])
    assert not cluster.large
    cluster.update(name("web"), WEB, [many(LARGE + 1)])
    cluster.update(name("web"), None, [many(LARGE + 1)])
    assert not cluster.large


def test_plans_of_a_large_family_are_terse() -> None:
    both = service("web", ips=["10.96.0.10", "fd00::10"])
    plans = plan_service(both, [many(1)], None, CONTEXT, {Family.IPV4})
    assert {plan.family: plan.terse for plan in plans} == {Family.IPV4: True, Family.IPV6: False}


LOCAL = TrafficPolicy.LOCAL
INTERNAL = service(internal_policy=LOCAL)
EXTERNAL = service("web", port(80, node_port=30080), type_=ServiceType.NODE_PORT, external_policy=LOCAL)


@pytest.mark.parametrize(
    ("of", "endpoints", "counted"),
    [
        (INTERNAL, [endpoint()], (1, 0)),
        (EXTERNAL, [endpoint()], (0, 1)),
        (INTERNAL, [endpoint(node=HERE)], (0, 0)),
        (EXTERNAL, [endpoint(node=HERE)], (0, 0)),
        (INTERNAL, [], (0, 0)),
        (service(), [endpoint()], (0, 0)),
    ],
)
def test_a_local_policy_with_endpoints_only_on_other_nodes_counts(
    of: Service, endpoints: list[Endpoint], counted: tuple[int, int]
) -> None:
    plans = plan_service(of, [slice_of("web", *endpoints)], None, CONTEXT)
    assert no_local_endpoints(plans) == NoLocalEndpoints(*counted)


def test_without_plans_all_counts_are_zero() -> None:
    assert no_local_endpoints(()) == NoLocalEndpoints(0, 0)
