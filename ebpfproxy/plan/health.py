"""What a load balancer that asks at a healthCheckNodePort is told."""

from collections.abc import Iterable

from ebpfproxy.model.address import Address, Family, family
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.service import Service, ServiceType
from ebpfproxy.plan.treatment import external_policy_local


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
