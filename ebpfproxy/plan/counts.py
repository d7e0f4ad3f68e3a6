"""Counts over all Services: the size of the cluster, and ServicePorts without local endpoints."""

from collections.abc import Iterable
from typing import NamedTuple

from ebpfproxy.model.address import Family
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.service import NamespacedName, Service
from ebpfproxy.plan.planned_endpoints import LOCAL
from ebpfproxy.plan.service_plan import FrontendKind, NoEndpointAction, Scope, ServicePortPlan

LARGE = 1000
"""A family is large if all ports of all Services have more endpoints than this.

The value is that of largeClusterEndpointsThreshold in pkg/proxy/iptables/proxier.go.
"""


class ClusterSize:
    """The number of endpoints of all Services by family, ready or not; updated Service by Service."""

    def __init__(self) -> None:
        self._counts: dict[Family, dict[NamespacedName, int]] = {each: {} for each in Family}
        self._totals = dict.fromkeys(Family, 0)

    @property
    def large(self) -> frozenset[Family]:
        """The families that have more than `LARGE` endpoints."""
        return frozenset(ip_family for ip_family, total in self._totals.items() if total > LARGE)

    def update(self, name: NamespacedName, service: Service | None, slices: Iterable[EndpointSlice]) -> None:
        """Count one Service again. `service` is None if it was deleted; `slices` are all of this Service."""
        counts = _endpoints_by_family(service, slices) if service else {}
        for ip_family, of_services in self._counts.items():
            count = counts.get(ip_family, 0)
            self._totals[ip_family] += count - of_services.pop(name, 0)
            if count:
                of_services[name] = count


class NoLocalEndpoints(NamedTuple):
    """kubeproxy_sync_proxy_rules_no_local_endpoints_total by its label traffic_policy."""

    internal: int
    external: int


def no_local_endpoints(plans: Iterable[ServicePortPlan]) -> NoLocalEndpoints:
    """Return how many plans have traffic policy Local and endpoints, but none on this node.

    One plan adds 0 or 1 to each field, so a sum can be updated plan by plan.
    """
    internal = external = 0
    for plan in plans:
        kinds = {each.kind for each in plan.frontends if each.outside.scope is Scope.LOCAL}
        if kinds and plan.no_endpoint_action is NoEndpointAction.DROP and not plan.endpoints.has(LOCAL):
            internal += FrontendKind.CLUSTER_IP in kinds
            external += bool(kinds - {FrontendKind.CLUSTER_IP})
    return NoLocalEndpoints(internal, external)


def _endpoints_by_family(service: Service, slices: Iterable[EndpointSlice]) -> dict[Family, int]:
    ports = {(port.name, port.protocol) for port in service.ports}
    counts: dict[Family, int] = {}
    for endpoint_slice in slices:
        matching = sum((port.name, port.protocol) in ports for port in endpoint_slice.ports)
        endpoints = matching * len(endpoint_slice.endpoints)
        counts[endpoint_slice.family] = counts.get(endpoint_slice.family, 0) + endpoints
    return counts
