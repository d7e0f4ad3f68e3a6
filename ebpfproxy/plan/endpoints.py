"""Endpoint selection: which endpoints a ServicePort may use in each scope, terminating endpoints included.

Scope CLUSTER (traffic policy Cluster):

1. The ready endpoints that topology hints assign to this node; else those for its zone; else all ready ones.
2. If no endpoint is ready: all endpoints that are terminating and still serving, in any zone.

Scope LOCAL (traffic policy Local):

1. The ready endpoints on this node, whatever their hints.
2. If none is ready on this node: those on this node that are terminating and still serving. Ready endpoints
   on other nodes make no difference.

`traffic_policy.py` decides which scope a connection has.

The rules are those of CategorizeEndpoints in pkg/proxy/topology.go of Kubernetes, with the hints of 1.33 and
later (KEP-2433 for zones, KEP-3015 for nodes) and terminating endpoints (KEP-1669).
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import Address, Protocol
from ebpfproxy.model.endpoint import Endpoints, EndpointSlice, EndpointState
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.balancing import with_endpoints_of
from ebpfproxy.plan.endpoint_reasons import EndpointReason
from ebpfproxy.plan.planned_endpoints import CLUSTER, LOCAL, PlannedEndpoints, row
from ebpfproxy.plan.service_plan import PlanKey, Scope, ServicePortPlan

EndpointAddress = tuple[Address, int]
"""Address and port: entries of EndpointSlices with the same address and port are the same endpoint."""

Candidate = tuple[EndpointAddress, EndpointState]

PortOfSlice = tuple[int, Endpoints]
"""A port of an EndpointSlice: its number, and the endpoints of the slice."""

API_SERVER = NamespacedName("default", "kubernetes")
"""The Service of the API server."""


class NodeLocation(NamedTuple):
    """The name and zone of this node. `zone` is "" while it is unknown."""

    node: str
    zone: str


Reasons = dict[Scope, dict[EndpointAddress, EndpointReason]]
"""Why each scope in use has an endpoint or excludes it."""

Trace = dict[PlanKey, tuple[dict[EndpointAddress, EndpointState], Reasons]]
"""The endpoints of each ServicePort and their reasons, recorded while a Service is planned."""


class UsedScopes(NamedTuple):
    """Which scopes the frontends of a ServicePort can use."""

    cluster: bool
    local: bool


def by_port(slices: Iterable[EndpointSlice]) -> dict[tuple[str, Protocol], list[PortOfSlice]]:
    """Return the endpoints of each port, by its name *and* protocol: those of each slice, with its number."""
    found: dict[tuple[str, Protocol], list[PortOfSlice]] = {}
    for endpoint_slice in slices:
        for port in endpoint_slice.ports:
            found.setdefault((port.name, port.protocol), []).append((port.port, endpoint_slice.endpoints))
    return found


def merge_slices(
    slices: Iterable[EndpointSlice], name: str, protocol: Protocol, location: NodeLocation
) -> dict[EndpointAddress, EndpointState]:
    """Return all endpoints of the port with this name and protocol. See `merge`."""
    return merge(by_port(slices).get((name, protocol), ()), location)


def merge(of_port: Iterable[PortOfSlice], location: NodeLocation) -> dict[EndpointAddress, EndpointState]:
    """Return all endpoints of a port, whatever its number in each slice. `of_port`: its part of `by_port`.

    Several entries may have the same address and port: while an endpoint moves between EndpointSlices, or if
    a new pod got the address of one that is still terminating (kubernetes issue 135266). The best entry
    counts: ready before serving before the rest, then an entry on this node. The order of slices does not
    matter.
    """
    endpoints: dict[EndpointAddress, EndpointState] = {}
    for number, of_slice in of_port:
        for address, state in of_slice.states_by_address():
            other = endpoints.setdefault((address, number), state)
            if other is not state and _rank(state, location) > _rank(other, location):
                endpoints[address, number] = state
    return endpoints


def plan_endpoints(
    endpoints: Mapping[EndpointAddress, EndpointState],
    uses: UsedScopes,
    location: NodeLocation,
    reasons: Reasons | None = None,
) -> tuple[PlannedEndpoints, bool]:
    """Return the endpoints, sorted, and whether any node has a usable one (kube-proxy's hasAnyEndpoints).

    Each scope falls back to terminating endpoints separately: if this node has only terminating endpoints,
    scope LOCAL uses them even if other nodes have ready ones. An endpoint that does not serve is never used,
    nor is one that serves but is neither ready nor terminating.

    `reasons`: a dictionary in which they are recorded.
    """
    candidates = list(endpoints.items())
    ready = [each for each in candidates if each[1].ready]
    near, why = _nearest(ready, location) if uses.cluster else ([], EndpointReason.READY)
    if reasons is None and not uses.local and len(near) == len(candidates):
        rows = [
            row(address, port, cluster=True, local=False, on_node=_is_on_node(endpoint, location))
            for (address, port), endpoint in candidates
        ]
        return _sorted(rows), bool(rows)
    terminating = [each for each in candidates if is_serving_terminating(each[1])]
    cluster: set[EndpointAddress] = set()
    local: set[EndpointAddress] = set()
    if uses.cluster:
        if not near:
            near, why = terminating, EndpointReason.ONLY_TERMINATING
        cluster = {target for target, _ in near}
        if reasons is not None:
            reasons[Scope.CLUSTER] = _reasons(candidates, cluster, why, None)
    if uses.local:
        local, why = _targets_here(ready, location), EndpointReason.READY_ON_NODE
        if not local:
            local, why = _targets_here(terminating, location), EndpointReason.ONLY_TERMINATING_ON_NODE
        if reasons is not None:
            reasons[Scope.LOCAL] = _reasons(candidates, local, why, location.node)
    has_any = bool(cluster) or (uses.local and bool(ready or terminating))
    return _planned(candidates, cluster, local, location), has_any


def _reasons(
    candidates: Iterable[Candidate], used: set[EndpointAddress], why: EndpointReason, node: str | None
) -> dict[EndpointAddress, EndpointReason]:
    """Return the reason for each endpoint. `why`: that of those used; `node`: the only one that has any."""
    return {
        target: why if target in used else _why_excluded(state, why, node) for target, state in candidates
    }


def _why_excluded(state: EndpointState, why: EndpointReason, node: str | None) -> EndpointReason:
    """Return why an endpoint is not among the used ones, which are used because of `why`."""
    if not state.ready and not is_serving_terminating(state):
        return EndpointReason.NOT_SERVING if state.terminating else EndpointReason.NOT_READY
    if node is not None and state.node != node:
        return EndpointReason.NOT_LOCAL if state.node else EndpointReason.NODE_UNKNOWN
    if not state.ready:
        return EndpointReason.TERMINATING
    is_by_node = why is EndpointReason.READY_HINT_NODE
    return EndpointReason.HINT_OTHER_NODE if is_by_node else EndpointReason.HINT_OTHER_ZONE


def keep_last_endpoints(
    plans: tuple[ServicePortPlan, ...], previous: Callable[[PlanKey], ServicePortPlan | None]
) -> tuple[ServicePortPlan, ...]:
    """Return the plans of `API_SERVER`, where a plan without a usable endpoint keeps its previous endpoints.

    An agent in a Pod reaches the API server through the ClusterIP of default/kubernetes, which it serves
    itself. The API server removes its endpoints while it restarts or when its lease expires. If the agent
    then rejected connections to the ClusterIP, it could never read that the endpoints are back (calico
    ee3dc51152). A connection to an endpoint that is really gone fails anyway, only later.
    """
    return tuple(_with_last_endpoints(plan, previous(plan.key)) for plan in plans)


def _with_last_endpoints(plan: ServicePortPlan, previous: ServicePortPlan | None) -> ServicePortPlan:
    if previous is None or _has_usable_endpoint(plan) or not _has_usable_endpoint(previous):
        return plan
    return dataclasses.replace(
        plan,
        endpoints=previous.endpoints,
        no_endpoint_action=previous.no_endpoint_action,
        balancing=with_endpoints_of(plan.balancing, previous.balancing),
        serving=None if plan.serving is None else previous.serving,
        rebalancing=None,
    )


def _has_usable_endpoint(plan: ServicePortPlan) -> bool:
    return plan.endpoints.has(CLUSTER | LOCAL)


def serving_endpoints(endpoints: Mapping[EndpointAddress, EndpointState]) -> PlannedEndpoints:
    """Return those that serve, sorted, in no scope. See `ServicePortPlan.serving`."""
    return _sorted(
        row(*target, cluster=False, local=False, on_node=None)
        for target, state in endpoints.items()
        if state.serving or state.ready
    )


def _planned(
    candidates: list[Candidate],
    cluster: set[EndpointAddress],
    local: set[EndpointAddress],
    location: NodeLocation,
) -> PlannedEndpoints:
    """Return the endpoints of either scope, and all others that serve."""
    rows = (
        row(
            *target,
            cluster=target in cluster,
            local=target in local,
            on_node=_is_on_node(endpoint, location),
        )
        for target, endpoint in candidates
        if endpoint.serving or target in cluster or target in local
    )
    return _sorted(rows)


def _sorted(rows: Iterable[bytes]) -> PlannedEndpoints:
    """Return the endpoints with these rows, sorted by address and port."""
    return PlannedEndpoints.packed(b"".join(sorted(rows)))


def _nearest(ready: list[Candidate], location: NodeLocation) -> tuple[list[Candidate], EndpointReason]:
    """Return the endpoints with a hint for this node; else those with a hint for its zone; else all.

    Also return the reason.

    Hints of a kind apply only if every ready endpoint has one and at least one is for this node or zone. A
    missing hint may mean that the EndpointSlice controller has not processed all endpoints yet.
    """
    if all(endpoint.nodes for _, endpoint in ready):
        hinted = [each for each in ready if location.node in each[1].nodes]
        if hinted:
            return hinted, EndpointReason.READY_HINT_NODE
    if location.zone and all(endpoint.zones for _, endpoint in ready):
        hinted = [each for each in ready if location.zone in each[1].zones]
        if hinted:
            return hinted, EndpointReason.READY_HINT_ZONE
    return ready, EndpointReason.READY


def is_serving_terminating(endpoint: EndpointState) -> bool:
    """Return whether the endpoint is used if no endpoint is ready."""
    return endpoint.serving and endpoint.terminating


def _targets_here(candidates: list[Candidate], location: NodeLocation) -> set[EndpointAddress]:
    """Return those that run on this node."""
    return {target for target, endpoint in candidates if endpoint.node == location.node}


def _is_on_node(endpoint: EndpointState, location: NodeLocation) -> bool | None:
    """Return whether the endpoint is on this node; None if its slice names no node."""
    return endpoint.node == location.node if endpoint.node else None


def _rank(endpoint: EndpointState, location: NodeLocation) -> tuple[object, ...]:
    """Return a sort key for entries of one endpoint: the best is the greatest; only equal entries tie."""
    if endpoint.ready:
        grade = 3
    elif endpoint.serving:
        grade = 2 if endpoint.terminating else 1
    else:
        grade = 0
    on_node = endpoint.node == location.node
    rest = (endpoint.serving, endpoint.node, sorted(endpoint.nodes), sorted(endpoint.zones))
    return grade, on_node, not endpoint.terminating, *rest
