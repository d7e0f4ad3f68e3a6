"""The host ports of pods, and the annotations of pods and Namespaces, from the API's JSON."""

from typing import Any

import msgspec
import pytest

from ebpfproxy.api.event import Invalid, NamespaceChanged, PodChanged
from ebpfproxy.api.parse import parse_manifest_object, parse_pod
from ebpfproxy.lab import manifests
from ebpfproxy.model.address import Protocol, parse_address
from ebpfproxy.model.pod import HostPort
from tests.support.build import HERE, name

WEB = {"containerPort": 8080, "hostPort": 80}


def pod(*ports: dict[str, Any], addresses: tuple[str, ...] = ("10.1.0.1",)) -> dict[str, Any]:
    return manifests.pod("web-0", HERE, addresses, ports)


def changed(raw: object) -> PodChanged:
    event = parse_pod(msgspec.json.encode(raw))
    assert isinstance(event, PodChanged)
    return event


def test_a_pod_has_addresses_and_host_ports() -> None:
    raw = pod(
        WEB,
        {"containerPort": 53, "hostPort": 5353, "protocol": "UDP", "hostIP": "192.0.2.10"},
        {"containerPort": 9090},
        addresses=("10.1.0.1", "fd01::1", "10.1.0.9"),
    )
    found = changed(raw).pod
    assert found
    assert found.name == name("web-0")
    assert found.addresses == (parse_address("10.1.0.1"), parse_address("fd01::1"))
    assert found.host_ports == (
        HostPort(None, 80, Protocol.TCP, 8080),
        HostPort(parse_address("192.0.2.10"), 5353, Protocol.UDP, 53),
    )


def test_ports_of_init_containers_count_too() -> None:
    raw = pod(WEB)
    raw["spec"]["initContainers"] = [{"name": "sidecar", "ports": [{"containerPort": 1, "hostPort": 2}]}]
    found = changed(raw).pod
    assert found
    assert [each.host_port for each in found.host_ports] == [2, 80]


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_is_not_served(phase: str) -> None:
    raw = pod(WEB)
    raw["status"]["phase"] = phase
    assert changed(raw).pod is None


def test_a_pod_without_address_has_no_host_ports_and_one_with_the_host_network_is_not_served() -> None:
    host_network = pod(WEB)
    host_network["spec"]["hostNetwork"] = True
    assert changed(host_network) == PodChanged(name("web-0"), None)
    for raw in pod({"containerPort": 80}), pod(WEB, addresses=()):
        found = changed(raw).pod
        assert found
        assert found.host_ports == ()


@pytest.mark.parametrize(
    ("metadata", "uid"),
    [
        ({"uid": "7d2c4a5e-0000-4000-8000-000000000001"}, "7d2c4a5e-0000-4000-8000-000000000001"),
        ({"uid": "x", "annotations": {"kubernetes.io/config.hash": "a" * 32}}, "a" * 32),
    ],
    ids=["pod", "static pod"],
)
def test_the_uid_is_that_of_the_cgroup(metadata: dict[str, Any], uid: str) -> None:
    raw = pod()
    raw["metadata"] |= metadata
    found = changed(raw).pod
    assert found
    assert found.uid == uid


def test_annotations_of_pods_and_namespaces_are_on_off_or_rejected() -> None:
    for text, socket_lb, complaints in (("on", True, 0), ("off", False, 0), ("no", None, 1)):
        metadata = {"name": "mesh", "annotations": {"ebpfproxy/socket-lb": text}}
        raw = pod()
        raw["metadata"] |= metadata
        of_pod = changed(raw)
        assert of_pod.pod
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        (of_namespace,) = parse_manifest_object(msgspec.json.encode(namespace), HERE)
        assert isinstance(of_namespace, NamespaceChanged)
        assert of_namespace.name == "mesh"
        assert of_pod.pod.socket_lb is of_namespace.socket_lb is socket_lb
        assert len(of_pod.complaints) == len(of_namespace.complaints) == complaints


@pytest.mark.parametrize(
    ("port", "complaint"),
    [
        ({"hostPort": 70000, "containerPort": 80}, "hostPort 70000 is not a port number"),
        ({"hostPort": 80, "containerPort": -1}, "containerPort -1 is not a port number"),
        ({"hostPort": 80, "containerPort": 80, "protocol": "ICMP"}, "hostPort: protocol 'ICMP' is unknown"),
        ({"hostPort": 80, "containerPort": 80, "hostIP": "node"}, "hostIP 'node' is not an IP address"),
    ],
)
def test_an_invalid_host_port_is_reported_and_the_others_are_served(
    port: dict[str, Any], complaint: str
) -> None:
    event = changed(pod(port, WEB))
    assert event.pod
    assert len(event.pod.host_ports) == 1
    assert len(event.complaints) == 1
    assert complaint in event.complaints[0]


def test_an_invalid_pod_is_named() -> None:
    event = parse_pod(msgspec.json.encode(pod(WEB) | {"spec": 1}))
    assert isinstance(event, Invalid)
    assert (event.kind, event.name) == ("Pod", "default/web-0")


def test_manifests_yield_only_pods_of_this_node() -> None:
    raw = msgspec.json.encode(pod(WEB))
    assert parse_manifest_object(raw, HERE) == [parse_pod(raw)]
    assert parse_manifest_object(raw, "elsewhere") == []
