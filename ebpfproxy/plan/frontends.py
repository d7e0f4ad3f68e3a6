"""The plan of one Service: its frontends, each with its traffic policy results and source ranges."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

from ebpfproxy.model.address import (
    V4_BITS,
    Address,
    Family,
    Network,
    Protocol,
    contains,
    family,
    is_unspecified,
    network_family,
    unspecified,
)
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.model.cluster import ClusterState, Full
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node, PeerNode
from ebpfproxy.model.node_check import NodeCheck
from ebpfproxy.model.service import (
    NamespacedName,
    RemovedEndpoints,
    Service,
    ServicePort,
    ServicePortName,
    TrafficPolicy,
)
from ebpfproxy.plan.balancing import (
    STATELESS,
    PlannedBalancing,
    WeightIndex,
    default_algorithm,
    endpoint_weights,
    forwarding_limit,
    plan_balancing,
    weight_index,
    without_weightless,
)
from ebpfproxy.plan.direct_return import requests_direct_return, tunnel_to, with_tunnels
from ebpfproxy.plan.endpoint_reasons import EndpointReason
from ebpfproxy.plan.endpoints import (
    NodeLocation,
    PortOfSlice,
    Reasons,
    Trace,
    UsedScopes,
    by_port,
    merge,
    plan_endpoints,
    serving_endpoints,
)
from ebpfproxy.plan.health_check_node_port import needs_health_check
from ebpfproxy.plan.host_ports import plan_host_ports
from ebpfproxy.plan.local_traffic import has_detector, local_traffic
from ebpfproxy.plan.node_checks import without_down
from ebpfproxy.plan.node_ports import host_ips
from ebpfproxy.plan.planned_endpoints import CLUSTER, target_of
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    LocalTraffic,
    NoEndpointAction,
    PlanContext,
    PlannedEndpoints,
    PlannedRebalancing,
    Role,
    ServicePortPlan,
)
from ebpfproxy.plan.traffic_policy import (
    PolicyResults,
    edge_policy_results,
    external_policy_local,
    external_policy_results,
    internal_policy_results,
)


class _Admission(NamedTuple):
    """Admission of clients by loadBalancerSourceRanges in one family.

    The fields are the last ones of `FrontendPlan`, in the same order.
    """

    restricted: bool
    ranges: tuple[Network, ...]
    node_admitted: bool


_UNRESTRICTED = _Admission(False, (), True)


class _Exposure(NamedTuple):
    """What all ports of a Service share in one family.

    `addresses` are in the order ClusterIP, ExternalIP, LoadBalancer, without duplicates.
    """

    ip_family: Family
    addresses: tuple[tuple[Address, FrontendKind], ...]
    internal: PolicyResults
    external: PolicyResults
    admission: _Admission
    local_traffic: LocalTraffic | None
    terse: bool


def is_unserved(plan: ServicePortPlan, context: PlanContext) -> bool:
    """Return whether the kernel cannot translate the protocol of a ServicePort in this mode."""
    return bool(context.sctp_unserved) and plan.name.protocol is Protocol.SCTP


def plan_name(
    name: NamespacedName,
    state: ClusterState,
    context: PlanContext,
    large: Collection[Family] = (),
    trace: Trace | None = None,
) -> tuple[ServicePortPlan, ...]:
    """Return the plans of a Service or, for a name of `host_ports.name_of`, those of a pod. See
    `plan_service`. Empty if there is neither.
    """
    service = state.services.get(name)
    if service:
        slices = state.slices_of(name)
        return plan_service(
            service, slices, state.node, context, large, state.peers, state.down, trace, state.full
        )
    pod = state.pods.get(name)
    if pod and context.host_ports:
        return plan_host_ports(pod, state.node, state.local_networks, context)
    return ()


def plan_service(
    service: Service,
    slices: Iterable[EndpointSlice],
    node: Node | None,
    context: PlanContext,
    large: Collection[Family] = (),
    peers: Mapping[str, PeerNode] = MappingProxyType({}),
    down: Set[NodeCheck] = frozenset(),
    trace: Trace | None = None,
    full: Full = MappingProxyType({}),
) -> tuple[ServicePortPlan, ...]:
    """Return one plan for each port of `service` in each family of its ClusterIPs, sorted.

    Empty if the Service has no usable ClusterIP or no port; for an edge, if it has no external and no load
    balancer IP.

    - `slices`: those of this Service. Neither their order nor that of their endpoints matters.
    - `node`: None while the Node is unknown; it then has no zone and no addresses.
    - `large`: `ClusterSize.large`; `peers`: `ClusterState.peers`; `down`: `ClusterState.down`.
    - `trace`: where the reasons are recorded; `full`: `ClusterState.full`.
    """
    slices = tuple(slices)
    location = _location(node, context)
    tunnel = functools.partial(tunnel_to, node=node, peers=peers, context=context)
    index = weight_index(service.balancing)
    ports = {(port.name, port.protocol): port for port in service.ports}.values()
    plans = []
    for ip_family in {family(address) for address in service.cluster_ips}:
        exposure = _expose(service, ip_family, node, context, ip_family in large)
        if exposure:
            of_family = (each for each in slices if each.family is ip_family)
            slices_by_port = by_port(of_family)
            planner = _EndpointPlanner(
                service, slices_by_port, location, tunnel, index, down, context, trace, full
            )
            plans += [_plan_port(service, port, exposure, planner, context) for port in ports]
    if len(plans) > 1:
        plans.sort(key=lambda plan: (plan.name, plan.family.value))
    return tuple(plans)


def _location(node: Node | None, context: PlanContext) -> NodeLocation:
    """Return where this machine is. An edge is on no node and in no zone of the cluster."""
    if context.role is Role.EDGE:
        return NodeLocation("", "")
    return NodeLocation(context.node_name, node.zone if node else "")


def _plan_port(
    service: Service,
    port: ServicePort,
    exposure: _Exposure,
    planner: "_EndpointPlanner",
    context: PlanContext,
) -> ServicePortPlan:
    is_edge = context.role is Role.EDGE
    frontends = _frontends(port, exposure, node_port=not is_edge)
    is_external = frontends[-1].kind is not FrontendKind.CLUSTER_IP
    planned = planner.plan(port, exposure.ip_family, is_external)
    return ServicePortPlan(
        ServicePortName(*service.name, port.name, port.protocol),
        exposure.ip_family,
        frontends,
        planned.endpoints,
        NoEndpointAction.DROP if planned.has_any else NoEndpointAction.REJECT,
        service.affinity_timeout,
        exposure.local_traffic,
        service.health_check_node_port if needs_health_check(service) and not is_edge else 0,
        exposure.terse,
        planned.balancing,
        planned.serving,
        planned.rebalancing,
    )


class _OfPort(NamedTuple):
    """The endpoints of a ServicePort, whether any node has a usable one, how one is selected, and which open
    connections may be reset."""

    endpoints: PlannedEndpoints
    has_any: bool
    balancing: PlannedBalancing
    serving: PlannedEndpoints | None
    rebalancing: PlannedRebalancing | None


class _EndpointPlanner:
    """Plans the endpoints of each port of a Service in one family.

    Most ports have the same endpoints, and differ in their numbers only. These endpoints are planned once: a
    Service may have 5,000 ports, or 100 ports of 5,000 endpoints.
    """

    def __init__(
        self,
        service: Service,
        slices: Mapping[tuple[str, Protocol], list[PortOfSlice]],
        location: NodeLocation,
        tunnel: Callable[[str], Address | None],
        index: WeightIndex | None,
        down: Set[NodeCheck],
        context: PlanContext,
        trace: Trace | None,
        full: Full,
    ) -> None:
        """`slices`: the result of `by_port`. With a `trace`, each port is planned."""
        self._service = service
        self._slices = slices
        self._location = location
        self._tunnel = tunnel
        self._index = index
        self._down = down
        self._context = context
        self._trace = trace
        of_service = service.removed_endpoints
        self._resets = of_service is RemovedEndpoints.RESET if of_service else context.reset_removed
        self._percent = _percent(service, context)
        self._full = full
        self._planned: dict[tuple[object, ...], tuple[list[int], _OfPort]] = {}

    def plan(self, port: ServicePort, ip_family: Family, is_external: bool) -> _OfPort:
        """`is_external`: whether the port has any frontend other than ClusterIPs."""
        of_port = self._slices.get((port.name, port.protocol), [])
        name = ServicePortName(*self._service.name, port.name, port.protocol)
        full = self._full.get((name, ip_family), frozenset())
        if self._trace is not None:
            reasons: Reasons = {}
            self._trace[name, ip_family] = merge(of_port, self._location), reasons
            return self._plan(port.protocol, of_port, is_external, full, reasons)
        numbers = sorted({number for number, _ in of_port})
        differs = self._down or self._resets or self._percent
        protocol = port.protocol if differs else None  # otherwise it makes no difference
        slices = ((numbers.index(number), id(endpoints)) for number, endpoints in of_port)
        key = (protocol, is_external, full, *slices)
        if key not in self._planned:
            self._planned[key] = numbers, self._plan(port.protocol, of_port, is_external, full)
        planned_numbers, planned = self._planned[key]
        ports = dict(zip(planned_numbers, numbers, strict=True))
        serving, rebalancing = planned.serving, planned.rebalancing
        return planned._replace(
            endpoints=planned.endpoints.with_ports(ports),
            serving=serving and serving.with_ports(ports),
            rebalancing=rebalancing and rebalancing._replace(targets=rebalancing.targets.with_ports(ports)),
        )

    def _plan(
        self,
        protocol: Protocol,
        of_port: list[PortOfSlice],
        is_external: bool,
        full: frozenset[bytes],
        reasons: Reasons | None = None,
    ) -> _OfPort:
        service, context = self._service, self._context
        is_edge = context.role is Role.EDGE
        merged = merge(of_port, self._location)
        weights = endpoint_weights(merged, self._index)
        usable = without_weightless(merged, weights)
        if is_edge:
            usable = without_down(usable, self._down, service, protocol)
            scopes = UsedScopes(cluster=True, local=False)
        else:
            scopes = _used_scopes(service, is_external)
        endpoints, has_any = plan_endpoints(usable, scopes, self._location, reasons)
        requested = service.balancing
        # With traffic policy Local, clients outside get endpoints of the dialed node only. An edge has none.
        may_tunnel = is_external and (is_edge or not external_policy_local(service))
        dsr = may_tunnel and requests_direct_return(requested, context)
        algorithm = default_algorithm(context.algorithm, dsr and context.dsr_port > 0)
        rebalancing, closed = None, frozenset[bytes]()
        if self._percent and protocol is Protocol.TCP and not scopes.local:
            rebalancing = _rebalancing(self._percent, endpoints, requested.algorithm or algorithm, dsr)
        if rebalancing and not full.issuperset(rebalancing.targets.targets()):
            closed = full
            endpoints = endpoints.without_flag(CLUSTER, closed)
        for of_scope in reasons.values() if reasons else ():
            of_scope |= {each: EndpointReason.FULL for each in usable if target_of(*each) in closed}
            of_scope |= {each: EndpointReason.NO_WEIGHT for each in merged if weights.get(each) == 0}
        limit = forwarding_limit(requested.forwarding, merged, context.forwarding, context.service_forwarding)
        balancing = plan_balancing(requested, endpoints, weights, algorithm, context.slow_start, dsr, limit)
        if is_external and context.dsr_port:
            balancing = with_tunnels(balancing, requested, endpoints, usable, self._tunnel)
        serving = serving_endpoints(merged) if self._resets and protocol is Protocol.TCP else None
        return _OfPort(endpoints, has_any, balancing, serving, rebalancing)


def _percent(service: Service, context: PlanContext) -> int:
    """Return how many of the connections may be reset per minute (`plan.rebalancing`), 0 for none.

    With session affinity, a client would get the same endpoint again. With weights, equal shares are wrong.
    """
    if context.role is Role.EDGE or service.affinity_timeout or service.balancing.weights:
        return 0
    return context.rebalance if service.rebalance is None else service.rebalance


def _rebalancing(
    percent: int, endpoints: PlannedEndpoints, algorithm: Algorithm | None, dsr: bool
) -> PlannedRebalancing | None:
    """Return None if all nodes must select the same endpoint for a packet, or a client the same one again."""
    if dsr or algorithm in STATELESS:
        return None
    return PlannedRebalancing(percent, endpoints.with_flag(CLUSTER))


def _used_scopes(service: Service, is_external: bool) -> UsedScopes:
    """Return the scopes of a port (UsesClusterEndpoints, UsesLocalEndpoints in pkg/proxy/serviceport.go).

    `is_external`: whether the port has any frontend other than ClusterIPs in this family.
    """
    internal_local = service.internal_policy is TrafficPolicy.LOCAL
    return UsedScopes(
        cluster=is_external or not internal_local,
        local=internal_local or (is_external and external_policy_local(service)),
    )


def _frontends(port: ServicePort, exposure: _Exposure, *, node_port: bool) -> tuple[FrontendPlan, ...]:
    """Return the frontends of a port; with `node_port`, also that of its NodePort."""
    frontends = [
        _frontend_plan(Frontend(address, port.port, port.protocol), kind, exposure)
        for address, kind in exposure.addresses
    ]
    if port.node_port and node_port:
        any_address = Frontend(unspecified(exposure.ip_family), port.node_port, port.protocol)
        frontends.append(_frontend_plan(any_address, FrontendKind.NODE_PORT, exposure))
    return tuple(frontends)


def _frontend_plan(frontend: Frontend, kind: FrontendKind, exposure: _Exposure) -> FrontendPlan:
    policy_results = exposure.internal if kind is FrontendKind.CLUSTER_IP else exposure.external
    admission = exposure.admission if kind is FrontendKind.LOAD_BALANCER else _UNRESTRICTED
    return FrontendPlan(frontend, kind, *policy_results, *admission)


def _expose(
    service: Service, ip_family: Family, node: Node | None, context: PlanContext, terse: bool
) -> _Exposure | None:
    """Return what all ports share. None if there is no frontend.

    That is the case without a ClusterIP of this family, and for an edge, which serves no ClusterIP, without
    any other address.
    """
    is_edge = context.role is Role.EDGE
    addresses = dict.fromkeys(_of_family(service.cluster_ips, ip_family), FrontendKind.CLUSTER_IP)
    if not addresses:
        return None
    load_balancer_ips = _of_family(service.load_balancer_ips, ip_family)
    for address in _of_family(service.external_ips, ip_family) if context.external_ips else ():
        # Else an external IP would bypass the load balancer's source ranges (cilium #44718).
        is_both = address in load_balancer_ips
        addresses.setdefault(address, FrontendKind.LOAD_BALANCER if is_both else FrontendKind.EXTERNAL_IP)
    for address in load_balancer_ips:
        addresses.setdefault(address, FrontendKind.LOAD_BALANCER)
    if is_edge:
        addresses = {each: kind for each, kind in addresses.items() if _is_of_edge(each, kind, context)}
        if not addresses:
            return None
    detected = has_detector(context, ip_family, node)
    return _Exposure(
        ip_family,
        tuple(addresses.items()),
        internal_policy_results(service, context, detected),
        edge_policy_results() if is_edge else external_policy_results(service, detected),
        _admission(service, ip_family, node, context) if service.source_ranges else _UNRESTRICTED,
        local_traffic(context, ip_family, node),
        terse,
    )


def _is_of_edge(address: Address, kind: FrontendKind, context: PlanContext) -> bool:
    """Return whether an edge serves the address."""
    if kind is FrontendKind.CLUSTER_IP:
        return False
    return not context.vip_cidrs or any(contains(net, address) for net in context.vip_cidrs)


def _of_family(addresses: tuple[Address, ...], ip_family: Family) -> list[Address]:
    """Return the addresses of one family, without the unspecified one, which is the frontend of NodePorts."""
    return [each for each in addresses if family(each) is ip_family and not is_unspecified(each)]


def _admission(service: Service, ip_family: Family, node: Node | None, context: PlanContext) -> _Admission:
    """Return which clients may connect to the load balancer's addresses in one family.

    Nothing is restricted if all ranges are of the other family, or if one contains all addresses of this one
    (newBaseServiceInfo in pkg/proxy/serviceport.go of Kubernetes 1.36). The node is admitted if a range
    contains one of its addresses. The source address of its packets is not enough: if the load balancer's
    address is local, the node's packets to it have that same address as their source. A node without known
    addresses is not admitted.
    """
    ranges = tuple(net for net in service.source_ranges if network_family(net) is ip_family)
    prefix_bits = V4_BITS if ip_family is Family.IPV4 else 0
    if not ranges or any(net.length == prefix_bits for net in ranges):
        return _UNRESTRICTED
    addresses = (*(node.addresses if node else ()), *host_ips(node, context))
    own = [address for address in addresses if family(address) is ip_family]
    node_admitted = any(contains(net, each) for net in ranges for each in own)
    return _Admission(True, ranges, node_admitted)
