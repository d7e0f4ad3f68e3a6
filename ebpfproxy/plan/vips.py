"""Virtual IPs: the addresses of Services that an edge announces, because it can forward to an endpoint."""

from ebpfproxy.model.address import Address
from ebpfproxy.plan.planned_endpoints import CLUSTER
from ebpfproxy.plan.service_plan import ServicePortPlan


def vips(plan: ServicePortPlan) -> frozenset[Address]:
    """Return the addresses to announce for a ServicePort. Empty if no endpoint gets new connections.

    An address of several ServicePorts is announced if one of them has such an endpoint.
    """
    if not plan.endpoints.has(CLUSTER):
        return frozenset()
    return frozenset(each.frontend.address for each in plan.frontends)
