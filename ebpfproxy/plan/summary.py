"""Figures over plans, for kube-proxy's metrics."""

from collections.abc import Iterable
from typing import NamedTuple

from ebpfproxy.plan.service_plan import FrontendKind, NoEndpointAction, Scope, ServicePortPlan


class NoLocalEndpoints(NamedTuple):
    """kubeproxy_sync_proxy_rules_no_local_endpoints_total by its label traffic_policy."""

    internal: int
    external: int


def no_local_endpoints(plans: Iterable[ServicePortPlan]) -> NoLocalEndpoints:
    """How many plans have policy Local, endpoints somewhere, and none on this node.

    One plan gives 0 or 1 in each field, so that a sum can be kept up plan by plan.
    """
    internal = external = 0
    for plan in plans:
        if plan.no_endpoint_action is NoEndpointAction.DROP and not any(
            endpoint.local for endpoint in plan.endpoints
        ):
            kinds = {each.kind for each in plan.frontends if each.outside.scope is Scope.LOCAL}
            internal += FrontendKind.CLUSTER_IP in kinds
            external += bool(kinds - {FrontendKind.CLUSTER_IP})
    return NoLocalEndpoints(internal, external)
