"""Local traffic detection by kube-proxy's four modes and by devices."""

import dataclasses

from ebpfproxy.model.address import Family, parse_address, parse_network
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import ServiceType, TrafficPolicy
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.local_traffic import families_without_detector, has_detector, local_traffic
from ebpfproxy.plan.service_plan import DetectLocal, LocalTraffic, PlanContext
from tests.support.build import CONTEXT, HERE, service

V4, V6 = Family.IPV4, Family.IPV6
FOUR, SIX, ANOTHER = map(parse_network, ("10.244.0.0/16", "fd00::/48", "10.245.0.0/16"))


def context(mode: DetectLocal, **options: object) -> PlanContext:
    return dataclasses.replace(CONTEXT, detect_local=mode, **options)  # type: ignore[arg-type]


def test_the_first_cluster_cidr_of_each_family_is_used() -> None:
    given = context(DetectLocal.CLUSTER_CIDR, cluster_cidrs=(FOUR, SIX, ANOTHER))
    assert local_traffic(given, V4, None) == LocalTraffic(FOUR)
    assert local_traffic(given, V6, None) == LocalTraffic(SIX)


def test_a_family_without_a_cluster_cidr_has_no_detector() -> None:
    given = context(DetectLocal.CLUSTER_CIDR, cluster_cidrs=(FOUR,))
    assert has_detector(given, V4, None)
    assert not has_detector(given, V6, None)


def test_node_cidrs_are_the_pod_cidrs_of_the_node_object() -> None:
    given = context(DetectLocal.NODE_CIDR, cluster_cidrs=(ANOTHER,))
    assert local_traffic(given, V4, None) is None
    assert local_traffic(given, V4, Node(HERE)) is None
    assert local_traffic(given, V4, Node(HERE, pod_cidrs=(FOUR, SIX))) == LocalTraffic(FOUR)


def test_a_device_name_identifies_pods_of_both_families() -> None:
    for of in Family:
        bridge = local_traffic(context(DetectLocal.BRIDGE_INTERFACE, pod_interface="cni0"), of, None)
        assert bridge == LocalTraffic(interface="cni0")
        veths = local_traffic(context(DetectLocal.INTERFACE_NAME_PREFIX, pod_interface="cali"), of, None)
        assert veths == LocalTraffic(interface="cali", prefix=True)


def test_without_a_device_name_there_is_no_detector() -> None:
    assert not has_detector(context(DetectLocal.BRIDGE_INTERFACE), V4, None)


def test_mode_devices_has_a_detector_without_local_traffic() -> None:
    assert has_detector(CONTEXT, V4, None)
    assert local_traffic(CONTEXT, V4, None) is None


def test_only_families_of_the_nodes_addresses_are_reported_without_detector() -> None:
    here = Node(HERE, addresses=(parse_address("192.0.2.10"), parse_address("2001:db8::10")))
    by_node = context(DetectLocal.NODE_CIDR)
    assert families_without_detector(by_node, here) == {V4, V6}
    assert families_without_detector(by_node, dataclasses.replace(here, pod_cidrs=(FOUR,))) == {V6}
    assert families_without_detector(by_node, dataclasses.replace(here, pod_cidrs=(FOUR, SIX))) == set()
    assert families_without_detector(by_node, None) == set(), "a missing Node is reported elsewhere"
    assert families_without_detector(CONTEXT, here) == set()


def test_a_plan_has_its_local_traffic_and_health_check_node_port() -> None:
    balanced = dataclasses.replace(
        service(balancer=["203.0.113.1"], type_=ServiceType.LOAD_BALANCER),
        external_policy=TrafficPolicy.LOCAL,
        health_check_node_port=32000,
    )
    given = context(DetectLocal.CLUSTER_CIDR, cluster_cidrs=(FOUR,))
    (plan,) = plan_service(balanced, (), None, given)
    assert plan.local_traffic == LocalTraffic(FOUR)
    assert plan.health_check_node_port == 32000
    anywhere = dataclasses.replace(balanced, external_policy=TrafficPolicy.CLUSTER)
    (plan,) = plan_service(anywhere, (), None, given)
    assert plan.health_check_node_port == 0
