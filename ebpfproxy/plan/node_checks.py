"""Health of nodes, as an edge sees it: what it checks, and which endpoints it uses while nodes are down.

An edge replaces the load balancer of a cloud and so checks what that checks: healthCheckNodePort of Services
that have one, else port 10256 of the service proxy on the node (KEP-3458, KEP-3836).
"""

from collections.abc import Iterable, Mapping, Set

from ebpfproxy.model.address import Protocol
from ebpfproxy.model.endpoint import EndpointSlice, EndpointState
from ebpfproxy.model.node_check import NodeCheck
from ebpfproxy.model.service import Service
from ebpfproxy.plan.endpoints import EndpointAddress, is_serving_terminating
from ebpfproxy.plan.health_check_node_port import needs_health_check

PROXY_PORT = 10256
"""The port at which kube-proxy and ebpfproxy serve /healthz by default."""


def plan_checks(service: Service, slices: Iterable[EndpointSlice]) -> frozenset[NodeCheck]:
    """Return the checks of the nodes that have endpoints of `service`. `slices` are all of this Service.

    Endpoints without a node are not checked.
    """
    port = check_port(service)
    states = {state for each in slices for state in each.endpoints.states}
    return frozenset(NodeCheck(each.node, port) for each in states if each.node and each.serving)


def check_port(service: Service) -> int:
    """Return the port at which nodes are checked for this Service."""
    return service.health_check_node_port if needs_health_check(service) else PROXY_PORT


def without_down(
    endpoints: dict[EndpointAddress, EndpointState],
    down: Set[NodeCheck],
    service: Service,
    protocol: Protocol,
) -> dict[EndpointAddress, EndpointState]:
    """Return the endpoints of a port, where those on nodes that are down get no new connections.

    If all usable endpoints are on such nodes, all are used: a wrong check must not end the Service. Open
    connections keep their endpoint, because a node whose check fails may still forward. A UDP flow has no
    end, and so continues with another endpoint.
    """
    if not down:
        return endpoints
    port = check_port(service)
    failed = {node for node, checked in down if checked == port}
    usable = _usable(endpoints)
    if failed.isdisjoint(state.node for state in endpoints.values()) or failed.issuperset(usable):
        return endpoints
    serves = protocol is not Protocol.UDP
    return {
        target: state._replace(ready=False, terminating=False, serving=state.serving and serves)
        if state.node in failed
        else state
        for target, state in endpoints.items()
    }


def _usable(endpoints: Mapping[EndpointAddress, EndpointState]) -> set[str]:
    """Return the nodes of the endpoints that could be used if no node was down. Empty if there are none."""
    ready = {state.node for state in endpoints.values() if state.ready}
    return ready or {state.node for state in endpoints.values() if is_serving_terminating(state)}
