"""Short ways to write model values and API objects in tests. Addresses are written as text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ebpfproxy.model.address import Network, Protocol, family, parse_address, parse_network
from ebpfproxy.model.endpoint import Endpoint, EndpointPort, Endpoints, EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName, Service, ServicePort, ServiceType, TrafficPolicy
from ebpfproxy.plan.service_plan import PlanContext

HERE, ELSEWHERE = "here", "elsewhere"
"""The node that tests plan for, and another node."""

CONTEXT = PlanContext(node_name=HERE)

Object = dict[str, Any]


def name(text: str) -> NamespacedName:
    """``namespace/name``, or a name in the namespace ``default``."""
    namespace, slash, own = text.rpartition("/")
    return NamespacedName(namespace if slash else "default", own)


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    return tuple(parse_network(text) for text in texts)


def port(
    number: int = 80, label: str = "", *, protocol: Protocol = Protocol.TCP, node_port: int = 0
) -> ServicePort:
    return ServicePort(label, protocol, number, node_port)


def service(
    called: str = "web",
    *ports: ServicePort,
    ips: Sequence[str] = ("10.96.0.10",),
    external: Sequence[str] = (),
    balancer: Sequence[str] = (),
    ranges: Sequence[str] = (),
    type_: ServiceType = ServiceType.CLUSTER_IP,
    internal_policy: TrafficPolicy = TrafficPolicy.CLUSTER,
    external_policy: TrafficPolicy = TrafficPolicy.CLUSTER,
    affinity: int = 0,
    health_check: int = 0,
) -> Service:
    """A Service, by default with TCP port 80."""
    return Service(
        name(called),
        ports or (port(),),
        tuple(map(parse_address, ips)),
        tuple(map(parse_address, external)),
        tuple(map(parse_address, balancer)),
        networks(ranges),
        type_,
        internal_policy,
        external_policy,
        affinity,
        health_check,
    )


def endpoint(
    ip: str = "10.1.0.1",
    node: str = ELSEWHERE,
    *,
    ready: bool = True,
    serving: bool = True,
    terminating: bool = False,
    zones: Iterable[str] = (),
    nodes: Iterable[str] = (),
) -> Endpoint:
    return Endpoint(parse_address(ip), ready, serving, terminating, node, frozenset(zones), frozenset(nodes))


def draining(ip: str = "10.1.0.1", node: str = ELSEWHERE) -> Endpoint:
    """An endpoint that terminates and still serves."""
    return endpoint(ip, node, ready=False, terminating=True)


def slice_of(
    of: str = "web",
    *endpoints: Endpoint,
    ports: Sequence[EndpointPort] = (EndpointPort("", Protocol.TCP, 8080),),
    called: str = "",
) -> EndpointSlice:
    """An EndpointSlice with the family of its first endpoint."""
    owner = name(of)
    own = NamespacedName(owner.namespace, called or f"{owner.name}-1")
    first = endpoints[0].address if endpoints else parse_address("0.0.0.0")
    return EndpointSlice(own, owner, family(first), tuple(ports), Endpoints(endpoints))


def node(zone: str = "", addresses: Sequence[str] = ("192.0.2.10",)) -> Node:
    return Node(HERE, zone, True, tuple(map(parse_address, addresses)))


def service_object(called: str = "web", spec: Mapping[str, Any] | None = None, **metadata: Any) -> Object:
    """A Service as sent by the API server: by default with TCP port 80 and a ClusterIP; `spec` overrides."""
    defaults = {
        "type": "ClusterIP",
        "clusterIP": "10.96.0.10",
        "clusterIPs": ["10.96.0.10"],
        "ipFamilies": ["IPv4"],
        "ports": [{"protocol": "TCP", "port": 80, "targetPort": 8080}],
    }
    return _object("v1", "Service", name(called), metadata) | {"spec": defaults | dict(spec or {})}


def slice_object(
    of: str = "web",
    endpoints: Sequence[Mapping[str, Any]] = (),
    ports: Sequence[Mapping[str, Any]] = ({"name": "", "protocol": "TCP", "port": 8080},),
    *,
    called: str = "",
    address_type: str = "IPv4",
) -> Object:
    """An EndpointSlice as sent by the API server."""
    owner = name(of)
    own = NamespacedName(owner.namespace, called or f"{owner.name}-1")
    labels = {"labels": {"kubernetes.io/service-name": owner.name}}
    fields = {
        "addressType": address_type,
        "endpoints": list(endpoints),
        "ports": [dict(port) for port in ports],
    }
    return _object("discovery.k8s.io/v1", "EndpointSlice", own, labels) | fields


def node_object(
    called: str = HERE, labels: Mapping[str, str] | None = None, addresses: Sequence[str] = ()
) -> Object:
    """A Node as sent by the API server; `addresses` have the type InternalIP."""
    status = {"addresses": [{"type": "InternalIP", "address": address} for address in addresses]}
    metadata = {"name": called, "labels": dict(labels or {})}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}


def _object(version: str, kind: str, called: NamespacedName, metadata: Mapping[str, Any]) -> Object:
    named = {"namespace": called.namespace, "name": called.name} | dict(metadata)
    return {"apiVersion": version, "kind": kind, "metadata": named}
