"""Why a new connection may or may not use an endpoint: the rules of `endpoints.py`, each with a reason."""

import enum
from collections.abc import Mapping
from types import MappingProxyType

from ebpfproxy.model.endpoint import EndpointState
from ebpfproxy.plan.balancing import without_weightless
from ebpfproxy.plan.endpoints import (
    Candidate,
    EndpointAddress,
    Hint,
    NodeLocation,
    is_serving_terminating,
    nearest,
    targets_here,
)
from ebpfproxy.plan.service_plan import Scope


class EndpointReason(enum.Enum):
    """Why an endpoint is used (the first ones) or excluded."""

    READY = "ready"
    READY_HINT_NODE = "ready, and a hint assigns it to this node"
    READY_HINT_ZONE = "ready, and a hint assigns it to this node's zone"
    READY_ON_NODE = "ready, and on this node"
    ONLY_TERMINATING = "terminating but serving, and no endpoint is ready"
    ONLY_TERMINATING_ON_NODE = "terminating but serving, and none on this node is ready"
    NOT_READY = "not ready"
    NOT_SERVING = "terminating, and no longer serving"
    TERMINATING = "terminating, and others are ready"
    HINT_OTHER_NODE = "a hint assigns it to another node"
    HINT_OTHER_ZONE = "a hint assigns it to another zone"
    NOT_LOCAL = "on another node"
    NODE_UNKNOWN = "its EndpointSlice names no node"
    NO_WEIGHT = "its weight is 0"

    @property
    def is_used(self) -> bool:
        """Whether new connections may use the endpoint."""
        return self in _USED


_USED = frozenset(
    {
        EndpointReason.READY,
        EndpointReason.READY_HINT_NODE,
        EndpointReason.READY_HINT_ZONE,
        EndpointReason.READY_ON_NODE,
        EndpointReason.ONLY_TERMINATING,
        EndpointReason.ONLY_TERMINATING_ON_NODE,
    }
)
_BY_HINT = {
    Hint.NONE: EndpointReason.READY,
    Hint.NODE: EndpointReason.READY_HINT_NODE,
    Hint.ZONE: EndpointReason.READY_HINT_ZONE,
}


def endpoint_reasons(
    endpoints: dict[EndpointAddress, EndpointState],
    scope: Scope,
    location: NodeLocation,
    weights: Mapping[EndpointAddress, int] = MappingProxyType({}),
) -> dict[EndpointAddress, EndpointReason]:
    """Return the reason for each endpoint of a ServicePort, sorted by address and port.

    `endpoints` is the result of `merge_slices`, `weights` that of `endpoint_weights`. Those whose reason is
    `is_used` are the endpoints of that scope in the result of `plan_endpoints`.
    """
    weightless = {each: EndpointReason.NO_WEIGHT for each in endpoints if weights.get(each) == 0}
    usable = without_weightless(endpoints, weights)
    return _by_condition(usable, scope, location) | weightless


def _by_condition(
    endpoints: Mapping[EndpointAddress, EndpointState], scope: Scope, location: NodeLocation
) -> dict[EndpointAddress, EndpointReason]:
    candidates = sorted(endpoints.items())
    ready = [each for each in candidates if each[1].ready]
    terminating = [each for each in candidates if is_serving_terminating(each[1])]
    if scope is Scope.LOCAL:
        return {each[0]: _local_reason(each, ready, terminating, location) for each in candidates}
    near, hint = nearest(ready, location)
    used = {target for target, _ in near or terminating}
    return {target: _cluster_reason(state, target in used, bool(ready), hint) for target, state in candidates}


def _cluster_reason(state: EndpointState, used: bool, any_ready: bool, hint: Hint) -> EndpointReason:
    if used:
        return _BY_HINT[hint] if any_ready else EndpointReason.ONLY_TERMINATING
    if state.ready:
        return EndpointReason.HINT_OTHER_NODE if hint is Hint.NODE else EndpointReason.HINT_OTHER_ZONE
    return _unready_reason(state)


def _local_reason(
    candidate: Candidate, ready: list[Candidate], terminating: list[Candidate], location: NodeLocation
) -> EndpointReason:
    target, state = candidate
    ready_here = targets_here(ready, location)
    if target in ready_here:
        return EndpointReason.READY_ON_NODE
    if not ready_here and target in targets_here(terminating, location):
        return EndpointReason.ONLY_TERMINATING_ON_NODE
    if not state.ready and not is_serving_terminating(state):
        return _unready_reason(state)
    if state.node != location.node:
        return EndpointReason.NOT_LOCAL if state.node else EndpointReason.NODE_UNKNOWN
    return EndpointReason.TERMINATING


def _unready_reason(state: EndpointState) -> EndpointReason:
    if is_serving_terminating(state):
        return EndpointReason.TERMINATING
    return EndpointReason.NOT_SERVING if state.terminating else EndpointReason.NOT_READY
