"""Which endpoints a port of a Service may use, for each scope.

The rules are those of CategorizeEndpoints in pkg/proxy/topology.go of Kubernetes, with the hints of 1.33
and later (KEP-2433 zones, KEP-3015 nodes), and KEP-1669 for endpoints that terminate but still serve.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import Address, Protocol
from ebpfproxy.model.endpoint import Endpoint, EndpointSlice
from ebpfproxy.plan.service_plan import PlannedEndpoint

Target = tuple[Address, int]
"""Address and port: what makes two entries of slices the same endpoint."""

Candidate = tuple[Target, Endpoint]


class NodeLocation(NamedTuple):
    """Where this node is. `zone` is "" as long as it is not known."""

    node: str
    zone: str


class Uses(NamedTuple):
    """Which scopes the frontends of a port can ever ask for."""

    cluster: bool
    local: bool


def merge(
    slices: Iterable[EndpointSlice], name: str, protocol: Protocol, place: NodeLocation
) -> dict[Target, Endpoint]:
    """All endpoints of the port of that name *and* protocol, whatever number each slice gives it.

    An address and port may be listed more than once: while an endpoint moves between slices, or when a
    new pod got the address of one that still terminates (kubernetes issue 135266). The best entry
    stays: ready before serving before the rest, then one on this node; the order of slices is of no
    matter.
    """
    found: dict[Target, Endpoint] = {}
    for piece in slices:
        for port in piece.ports:
            if port.name != name or port.protocol != protocol:
                continue
            for endpoint in piece.endpoints:
                target = (endpoint.address, port.port)
                other = found.setdefault(target, endpoint)
                if other is not endpoint and _rank(endpoint, place) > _rank(other, place):
                    found[target] = endpoint
    return found


def plan_endpoints(
    found: Mapping[Target, Endpoint], uses: Uses, place: NodeLocation
) -> tuple[tuple[PlannedEndpoint, ...], bool]:
    """The endpoints, sorted, and whether any endpoint anywhere could be used (kube-proxy's hasAnyEndpoints).

    Whether ready beats terminating is settled within each scope by itself: on a node with only
    terminating endpoints, Local uses those though others are ready elsewhere. What does not serve is
    never used, nor is what serves without being ready or terminating.
    """
    candidates = sorted(found.items())
    ready = [each for each in candidates if each[1].ready]
    near = _nearest(ready, place) if uses.cluster else []
    if not uses.local and len(near) == len(candidates):
        plain = [PlannedEndpoint(a, port, True, False, _is_here(e, place)) for (a, port), e in candidates]
        return tuple(plain), bool(plain)
    draining = [each for each in candidates if _is_draining(each[1])]
    cluster = {target for target, _ in near or draining} if uses.cluster else set()
    local = _on_node(ready, place) or _on_node(draining, place) if uses.local else set()
    has_any = bool(cluster) or (uses.local and bool(ready or draining))
    return _planned(candidates, cluster, local, place), has_any


def _planned(
    candidates: list[Candidate], cluster: set[Target], local: set[Target], place: NodeLocation
) -> tuple[PlannedEndpoint, ...]:
    """Those of either scope, and all others that serve."""
    return tuple(
        PlannedEndpoint(*target, target in cluster, target in local, _is_here(endpoint, place))
        for target, endpoint in candidates
        if endpoint.serving or target in cluster or target in local
    )


def _nearest(ready: list[Candidate], place: NodeLocation) -> list[Candidate]:
    """Those that hints give to this node, else those for its zone, else all.

    Hints count only where every ready endpoint has them, and one is meant for here: a hint that is
    missing may mean that the controller has not seen all yet.
    """
    if all(endpoint.nodes for _, endpoint in ready):
        near = [each for each in ready if place.node in each[1].nodes]
        if near:
            return near
    if place.zone and all(endpoint.zones for _, endpoint in ready):
        near = [each for each in ready if place.zone in each[1].zones]
        if near:
            return near
    return ready


def _is_draining(endpoint: Endpoint) -> bool:
    return endpoint.serving and endpoint.terminating


def _on_node(candidates: list[Candidate], place: NodeLocation) -> set[Target]:
    return {target for target, endpoint in candidates if endpoint.node == place.node}


def _is_here(endpoint: Endpoint, place: NodeLocation) -> bool | None:
    return endpoint.node == place.node if endpoint.node else None


def _rank(endpoint: Endpoint, place: NodeLocation) -> tuple[object, ...]:
    """The greater is the better of two entries for one target; only equal entries are equal."""
    if endpoint.ready:
        grade = 3
    elif endpoint.serving:
        grade = 2 if endpoint.terminating else 1
    else:
        grade = 0
    here = endpoint.node == place.node
    rest = (endpoint.serving, endpoint.node, sorted(endpoint.nodes), sorted(endpoint.zones))
    return grade, here, not endpoint.terminating, *rest
