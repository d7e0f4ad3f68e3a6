"""Service (core/v1): the fields that a service proxy reads."""

import dataclasses
import enum
from typing import NamedTuple

from ebpfproxy.model.address import Address, Network, Protocol
from ebpfproxy.model.balancing import DEFAULT_BALANCING, Balancing


class NamespacedName(NamedTuple):
    """The namespace and name of an object."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ServicePortName(NamedTuple):
    """The identity of a ServicePort. It includes the protocol, so 53/TCP and 53/UDP are two ServicePorts.

    >>> str(ServicePortName("default", "web", "http", Protocol.TCP))
    'default/web:http'
    >>> str(ServicePortName("default", "web", "", Protocol.TCP))
    'default/web'
    """

    namespace: str
    name: str
    port: str
    protocol: Protocol

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}" + (f":{self.port}" if self.port else "")


class ServiceType(enum.Enum):
    """spec.type. ExternalName is missing: a Service of that type is left out."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class TrafficPolicy(enum.Enum):
    """spec.internalTrafficPolicy or spec.externalTrafficPolicy."""

    CLUSTER = "Cluster"
    LOCAL = "Local"


class RemovedEndpoints(enum.Enum):
    """What happens to open TCP connections to an endpoint that has left its Service."""

    KEEP = "keep"
    RESET = "reset"

    __hash__ = object.__hash__


class ServicePort(NamedTuple):
    """One element of spec.ports. `name` is "" for an unnamed port. `node_port` is 0 without a NodePort."""

    name: str
    protocol: Protocol
    port: int
    node_port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """A Service with a ClusterIP. Headless Services and those of type ExternalName are left out.

    Addresses are of both families, in the API's order. Invalid addresses and load balancer addresses of
    ipMode Proxy are left out. `source_ranges` is loadBalancerSourceRanges in both families; an empty tuple
    admits every source. `affinity_timeout` is in seconds, 0 if sessionAffinity is None.
    `health_check_node_port` is 0 if there is none. `balancing`, `removed_endpoints` and `rebalance`
    (a percentage, see `plan.rebalancing`) come from annotations of ebpfproxy; None for the node's default.
    """

    name: NamespacedName
    ports: tuple[ServicePort, ...]
    cluster_ips: tuple[Address, ...]
    external_ips: tuple[Address, ...] = ()
    load_balancer_ips: tuple[Address, ...] = ()
    source_ranges: tuple[Network, ...] = ()
    type: ServiceType = ServiceType.CLUSTER_IP
    internal_policy: TrafficPolicy = TrafficPolicy.CLUSTER
    external_policy: TrafficPolicy = TrafficPolicy.CLUSTER
    affinity_timeout: int = 0
    health_check_node_port: int = 0
    balancing: Balancing = DEFAULT_BALANCING
    removed_endpoints: RemovedEndpoints | None = None
    rebalance: int | None = None
