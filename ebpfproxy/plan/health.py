"""The answer to a load balancer at a healthCheckNodePort, and the addresses where it is given."""

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
_OF_LOOPBACK = {network_family(net): net for net in LOOPBACK}


class HealthCheck(NamedTuple):
    """Load balancers ask at `port` of this node; `endpoints` as of `local_endpoints`."""

    service: NamespacedName
    port: int
    endpoints: int


def plan_health_check(
    service: Service, slices: Iterable[EndpointSlice], node_name: str
) -> HealthCheck | None:
    """None where load balancers do not ask about this Service. `slices` are all of its own."""
    if not needs_health_check(service):
        return None
    endpoints = local_endpoints(service, slices, node_name)
    return HealthCheck(service.name, service.health_check_node_port, endpoints)


def health_check_addresses(node: NodePlan) -> frozenset[Address]:
    """Where health checks are answered: the addresses that NodePorts have, as with kube-proxy
    (newServiceHealthServer in pkg/proxy/healthcheck/service_health.go).

    The unspecified address of a family is all of its addresses. Of a network that is local as a whole only
    loopback's first address is meant, and no link-local address: no server can listen there.
    """
    addresses = {unspecified(of) for of in node.node_ports_everywhere}
    for net in node.node_port_networks:
        of = network_family(net)
        if of in node.node_ports_everywhere or contains(_LINK_LOCAL, net.address):
            continue
        if net.length == 128:
            addresses.add(net.address)
        elif net == _OF_LOOPBACK[of]:
            addresses.add(_first(net))
    return frozenset(addresses)


def _first(net: Network) -> Address:
    return Address((int.from_bytes(net.address) + 1).to_bytes(16))


def needs_health_check(service: Service) -> bool:
    """Whether `service.health_check_node_port` is to be served: type LoadBalancer with policy Local."""
    wanted = service.type is ServiceType.LOAD_BALANCER and external_policy_local(service)
    return wanted and service.health_check_node_port != 0


def local_endpoints(service: Service, slices: Iterable[EndpointSlice], node_name: str) -> int:
    """How many endpoints on this node are ready, each address counted once over all ports.

    Ready alone counts, as in LocalReadyEndpoints of pkg/proxy/endpointschangetracker.go: an endpoint that
    terminates is not ready, except with publishNotReadyAddresses. A pod has an address in each family of
    the Service, so the families are not added up; the larger number is given.
    """
    ready: dict[Family, set[Address]] = {family(address): set() for address in service.cluster_ips}
    for piece in slices:
        if piece.ports and piece.family in ready:
            ready[piece.family] |= {
                endpoint.address
                for endpoint in piece.endpoints
                if endpoint.ready and endpoint.node == node_name
            }
    return max(map(len, ready.values()), default=0)
