"""The API server's own Service keeps its last endpoints when all of them go.

An agent in a Pod reaches the API server by the ClusterIP of default/kubernetes, which it serves itself.
If that Service lost all its endpoints (the API server removes them while it restarts or its lease
runs out), refusing connections to it would cut the agent off from the very news that they are back
(calico ee3dc51152). A connection to an endpoint that is really gone fails anyway, only later.
"""

import dataclasses
from collections.abc import Callable

from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.service_plan import PlanKey, ServicePortPlan

API_SERVER = NamespacedName("default", "kubernetes")


def with_last_endpoints(
    plans: tuple[ServicePortPlan, ...], previous: Callable[[PlanKey], ServicePortPlan | None]
) -> tuple[ServicePortPlan, ...]:
    """The plans of `API_SERVER`; one without a usable endpoint keeps its previous endpoints."""
    return tuple(_kept(plan, previous(plan.key)) for plan in plans)


def _kept(plan: ServicePortPlan, previous: ServicePortPlan | None) -> ServicePortPlan:
    if previous is None or _is_usable(plan) or not _is_usable(previous):
        return plan
    return dataclasses.replace(
        plan, endpoints=previous.endpoints, no_endpoint_action=previous.no_endpoint_action
    )


def _is_usable(plan: ServicePortPlan) -> bool:
    return any(endpoint.cluster or endpoint.local for endpoint in plan.endpoints)
