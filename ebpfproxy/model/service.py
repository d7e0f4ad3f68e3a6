"""Service, as far as a proxy reads it (KEP-independent fields of core/v1 Service)."""

import dataclasses
import enum
from typing import NamedTuple

from ebpfproxy.model.address import Address, Network, Protocol


class NamespacedName(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ServicePortName(NamedTuple):
    """What identifies a ServicePort: protocol is part of it, so 53/TCP and 53/UDP are two.

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
    """spec.type, without ExternalName: such a Service never becomes a value."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class TrafficPolicy(enum.Enum):
    CLUSTER = "Cluster"
    LOCAL = "Local"


class ServicePort(NamedTuple):
    """One of spec.ports. `name` is "" where the port is unnamed; `node_port` 0 where there is none."""

    name: str
    protocol: Protocol
    port: int
    node_port: int


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """A Service that has addresses: headless ones and ExternalName are not values.

    Addresses are of both families, in the API's order, junk and load balancer addresses of ipMode
    Proxy left out. `affinity_timeout` is in seconds, 0 where sessionAffinity is None.
    `source_ranges` holds both families; an empty tuple admits every source.
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
