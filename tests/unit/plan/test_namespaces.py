"""The class of a network namespace by its facts."""

import dataclasses

import pytest

from ebpfproxy.model.address import Family, parse_address, parse_network
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device import ETHERNET, Device
from ebpfproxy.model.namespace import Link, Namespace, NamespaceClass
from ebpfproxy.model.node import Node
from ebpfproxy.model.pod import Pod
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.namespaces import by_socket, classify, source
from ebpfproxy.plan.node_plan import plan_node
from ebpfproxy.plan.service_plan import PlanContext, PodNamespace, SocketLb

NETWORKS = (parse_network("10.244.1.0/24"),)
POD = Namespace(
    7,
    Link.NODE,
    frozenset({12}),
    frozenset({parse_address("10.244.1.5")}),
    "7d2c4a5e-0000-4000-8000-000000000001",
    ("eth0",),
)
STATE = ClusterState({}, {}, Node("n", pod_cidrs=NETWORKS))
GUEST = POD._replace(pod="", addresses=frozenset({parse_address("192.0.2.9")}))


@pytest.mark.parametrize(
    ("namespace", "expected"),
    [
        (POD, NamespaceClass.SOCKET_PATH),
        (POD._replace(pod=""), NamespaceClass.SOCKET_PATH),
        (POD._replace(addresses=GUEST.addresses), NamespaceClass.SOCKET_PATH),
        (POD._replace(link=Link.NONE, outer=frozenset()), NamespaceClass.SOCKET_PATH),
        (GUEST, NamespaceClass.OTHER),
        (POD._replace(link=Link.ELSEWHERE), NamespaceClass.OTHER),
        (POD._replace(pod="", link=Link.NONE), NamespaceClass.OTHER),
        (POD._replace(up=("eth0", "net1")), NamespaceClass.PACKET_PATH),
        (POD._replace(up=()), NamespaceClass.PACKET_PATH),
        (POD._replace(special=("it has tables of nftables",)), NamespaceClass.PACKET_PATH),
    ],
)
def test_a_pod_is_known_by_its_cgroup_or_its_address_and_served_by_one_ordinary_way(
    namespace: Namespace, expected: NamespaceClass
) -> None:
    found, reason = classify(namespace, STATE)
    assert found is expected
    assert reason


def test_the_address_of_a_pod_is_only_known_with_the_networks_of_the_node() -> None:
    assert classify(POD._replace(pod=""), ClusterState({}, {}))[0] is NamespaceClass.OTHER


@pytest.mark.parametrize("socket_lb", SocketLb)
def test_only_pods_of_the_socket_path_are_planned_and_only_if_it_serves_pods(socket_lb: SocketLb) -> None:
    state = ClusterState({}, {}, Node("n", pod_cidrs=NETWORKS), namespaces=(POD, GUEST))
    context = dataclasses.replace(PlanContext("n"), socket_lb=socket_lb)
    assert by_socket(state, context) == ((POD,) if socket_lb is SocketLb.ON else ())


@pytest.mark.parametrize(
    ("addresses", "sources"),
    [
        ((), (None, None)),
        (("10.244.1.5",), ("10.244.1.5", None)),
        (("10.244.1.5", "fd00:1::5"), ("10.244.1.5", "fd00:1::5")),
        (("10.244.1.5", "10.244.1.6", "fd00:1::5"), (None, "fd00:1::5")),
        (("10.244.1.5", "fd00:1::5", "2001:db8::5"), ("10.244.1.5", None)),
    ],
)
def test_the_source_of_a_pods_packets_is_known_if_it_has_one_address_of_the_family(
    addresses: tuple[str, ...], sources: tuple[str | None, str | None]
) -> None:
    pod = POD._replace(addresses=frozenset(map(parse_address, addresses)))
    expected = tuple(each and parse_address(each) for each in sources)
    assert (source(pod, Family.IPV4), source(pod, Family.IPV6)) == expected


def test_a_pods_device_keeps_its_programs_until_it_has_no_connection_of_the_packet_path() -> None:
    veth = Device(12, "veth1", "veth", ETHERNET, up=True, peer_elsewhere=True)
    unknown = ClusterState({}, {}, devices=(veth,))
    first = plan_node(unknown, PlanContext("n"), pods=False)
    for in_flight in (True, False):
        known = dataclasses.replace(unknown, namespaces=(POD._replace(in_flight=in_flight),))
        found = plan_node(known, PlanContext("n"), pods=False, previous=first)
        assert found.pod_namespaces == {PodNamespace(7, parse_address("10.244.1.5"), None)}
        assert [each.name for each in found.devices] == (["veth1"] if in_flight else [])
    assert [each.name for each in first.devices] == ["veth1"]


def test_a_device_that_had_programs_for_a_service_keeps_them() -> None:
    veth = Device(12, "veth1", "veth", ETHERNET, up=True, peer_elsewhere=True)
    state = ClusterState({}, {}, devices=(veth,), namespaces=(POD._replace(in_flight=False),))
    needed = plan_node(state, PlanContext("n"), pods=True)
    found = plan_node(state, PlanContext("n"), pods=False, previous=needed)
    later = plan_node(state, PlanContext("n"), pods=False, previous=found)
    assert [each.name for each in later.devices] == ["veth1"]
    gone = dataclasses.replace(state, devices=())
    assert plan_node(gone, PlanContext("n"), pods=False, previous=later).lasting == frozenset()


def test_an_annotation_of_the_pod_selects_the_packet_path() -> None:
    by_address = Pod(NamespacedName("mesh", "vpn"), (parse_address("10.244.1.5"),), ())
    by_uid = Pod(by_address.name, (), (), uid=POD.pod)
    for pod in by_address, by_uid:
        state = dataclasses.replace(STATE, opted_out=frozenset({pod}))
        found, reason = classify(POD, state)
        assert found is NamespaceClass.PACKET_PATH
        assert "; the Namespace mesh has the annotation" in reason
        annotated = dataclasses.replace(pod, socket_lb=False)
        _, reason = classify(POD, dataclasses.replace(STATE, opted_out=frozenset({annotated})))
        assert "; the pod has the annotation" in reason
    other = Pod(by_address.name, (parse_address("10.244.1.6"),), ())
    without_uid = POD._replace(pod="")
    state = dataclasses.replace(STATE, opted_out=frozenset({other}))
    assert [classify(each, state)[0] for each in (POD, without_uid)] == [NamespaceClass.SOCKET_PATH] * 2
