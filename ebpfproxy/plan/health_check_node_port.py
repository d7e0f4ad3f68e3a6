"""healthCheckNodePort: the answer to load balancers, and the addresses at which it is served.

`http/health_check_node_port.py` serves the answer.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    contains,
    family,
    network_family,
    parse_network,
    unspecified,
)
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.service import NamespacedName, Service, ServiceType
from ebpfproxy.plan.node_ports import LOOPBACK
from ebpfproxy.plan.service_plan import NodePlan
from ebpfproxy.plan.traffic_policy import external_policy_local

_LINK_LOCAL = parse_network("fe80::/10")
_LOOPBACK_BY_FAMILY = {network_family(net): net for net in LOOPBACK}


class HealthCheck(NamedTuple):
    """The answer of this node for one Service: load balancers connect to `port`.

    `endpoints` is the result of `local_endpoints`.
    """

    service: NamespacedName
    port: int
    endpoints: int


def plan_health_check(
    service: Service, slices: Iterable[EndpointSlice], node_name: str
) -> HealthCheck | None:
    """Return the health check of `service`, None if it needs none. `slices` are all of this Service."""
    if not needs_health_check(service):
        return None
    endpoints = local_endpoints(service, slices, node_name)
    return HealthCheck(service.name, service.health_check_node_port, endpoints)


def needs_health_check(service: Service) -> bool:
    """Return whether the node serves `service.health_check_node_port`.

    It does for type LoadBalancer with externalTrafficPolicy Local.
    """
    is_checked = service.type is ServiceType.LOAD_BALANCER and external_policy_local(service)
    return is_checked and service.health_check_node_port != 0


def local_endpoints(service: Service, slices: Iterable[EndpointSlice], node_name: str) -> int:
    """Return how many endpoints on this node are ready; an address counts once, however many ports it has.

    Only readiness counts, as in LocalReadyEndpoints of pkg/proxy/endpointschangetracker.go. A terminating
    endpoint is not ready, except with publishNotReadyAddresses. A pod has an address in each family of the
    Service, so the result is the larger number of the two families, not their sum.
    """
    ready: dict[Family, set[Address]] = {family(address): set() for address in service.cluster_ips}
    for endpoint_slice in slices:
        if endpoint_slice.ports and endpoint_slice.family in ready:
            ready[endpoint_slice.family] |= {
                endpoint.address
                for endpoint in endpoint_slice.endpoints
                if endpoint.ready and endpoint.node == node_name
            }
    return max(map(len, ready.values()), default=0)


def health_check_addresses(node: NodePlan) -> frozenset[Address]:
    """Return the addresses at which health checks are served: those of NodePorts, as in kube-proxy.

    The unspecified address means all addresses of its family. Of loopback only the first address is
    included. Other networks and link-local addresses are left out, since no server can listen on them
    (newServiceHealthServer in pkg/proxy/healthcheck/service_health.go).
    """
    addresses = {unspecified(ip_family) for ip_family in node.node_ports_everywhere}
    for net in node.node_port_networks:
        ip_family = network_family(net)
        if ip_family in node.node_ports_everywhere or contains(_LINK_LOCAL, net.address):
            continue
        if net.length == 128:
            addresses.add(net.address)
        elif net == _LOOPBACK_BY_FAMILY[ip_family]:
            addresses.add(_first_address(net))
    return frozenset(addresses)


def _first_address(net: Network) -> Address:
    return Address((int.from_bytes(net.address) + 1).to_bytes(16))
