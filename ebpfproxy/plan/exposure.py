"""What a Service exposes on this node: its frontends, and what each does for which clients."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ebpfproxy.model.address import (
    V4_BITS,
    Address,
    Family,
    Network,
    contains,
    family,
    is_unspecified,
    network_family,
    unspecified,
)
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service, ServicePort, ServicePortName, TrafficPolicy
from ebpfproxy.plan.health import needs_health_check
from ebpfproxy.plan.host_ips import host_ips
from ebpfproxy.plan.local_traffic import has_detector, local_traffic
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    LocalTraffic,
    NoEndpointAction,
    PlanContext,
    ServicePortPlan,
)
from ebpfproxy.plan.topology import NodeLocation, Uses, merge, plan_endpoints
from ebpfproxy.plan.traffic_policy import (
    PolicyResults,
    external_policy_local,
    external_policy_results,
    internal_policy_results,
)


class _Admission(NamedTuple):
    """loadBalancerSourceRanges in one family; the fields are the last ones of `FrontendPlan`."""

    restricted: bool
    ranges: tuple[Network, ...]
    node_admitted: bool


_EVERYBODY = _Admission(False, (), True)


class _Exposure(NamedTuple):
    """What all ports of a Service have in common in one family.

    `addresses` without duplicates, in the order ClusterIP, ExternalIP, LoadBalancer.
    """

    of: Family
    addresses: tuple[tuple[Address, FrontendKind], ...]
    internal: PolicyResults
    external: PolicyResults
    admission: _Admission
    local_traffic: LocalTraffic | None


def plan_service(
    service: Service,
    slices: Iterable[EndpointSlice],
    node: Node | None,
    context: PlanContext,
    large: Collection[Family] = (),
) -> tuple[ServicePortPlan, ...]:
    """One plan for each port of `service` in each family that it has a ClusterIP of, sorted.

    `slices` are those of this Service; their order, and that of their endpoints, is of no matter.
    `node` is None as long as our Node was not seen: no zone, no addresses then. `large`: as of `ClusterSize`.
    Empty where the Service has no usable ClusterIP or no port.
    """
    slices = tuple(slices)
    place = NodeLocation(context.node_name, node.zone if node else "")
    ports = {(port.name, port.protocol): port for port in service.ports}.values()
    plans = []
    for of in Family:
        exposure = _expose(service, of, node, context)
        if exposure:
            pieces = [piece for piece in slices if piece.family is of]
            plans += [_plan_port(service, port, exposure, pieces, place, of in large) for port in ports]
    if len(plans) > 1:
        plans.sort(key=lambda plan: (plan.name, plan.family.value))
    return tuple(plans)


def _plan_port(
    service: Service,
    port: ServicePort,
    exposure: _Exposure,
    slices: list[EndpointSlice],
    place: NodeLocation,
    terse: bool,
) -> ServicePortPlan:
    frontends = _frontends(port, exposure)
    external = frontends[-1].kind is not FrontendKind.CLUSTER_IP
    endpoints, has_any = plan_endpoints(
        merge(slices, port.name, port.protocol, place), _uses(service, external), place
    )
    return ServicePortPlan(
        ServicePortName(*service.name, port.name, port.protocol),
        exposure.of,
        frontends,
        endpoints,
        NoEndpointAction.DROP if has_any else NoEndpointAction.REJECT,
        service.affinity_timeout,
        exposure.local_traffic,
        service.health_check_node_port if needs_health_check(service) else 0,
        terse,
    )


def _uses(service: Service, external: bool) -> Uses:
    """UsesClusterEndpoints and UsesLocalEndpoints of pkg/proxy/serviceport.go.

    `external`: whether the port can be reached by anything but the ClusterIP, in the family at hand.
    """
    internal_local = service.internal_policy is TrafficPolicy.LOCAL
    return Uses(
        cluster=external or not internal_local,
        local=internal_local or (external and external_policy_local(service)),
    )


def _frontends(port: ServicePort, exposure: _Exposure) -> tuple[FrontendPlan, ...]:
    frontends = [
        _frontend_plan(Frontend(address, port.port, port.protocol), kind, exposure)
        for address, kind in exposure.addresses
    ]
    if port.node_port:
        anywhere = Frontend(unspecified(exposure.of), port.node_port, port.protocol)
        frontends.append(_frontend_plan(anywhere, FrontendKind.NODE_PORT, exposure))
    return tuple(frontends)


def _frontend_plan(frontend: Frontend, kind: FrontendKind, exposure: _Exposure) -> FrontendPlan:
    policy_results = exposure.internal if kind is FrontendKind.CLUSTER_IP else exposure.external
    admission = exposure.admission if kind is FrontendKind.LOAD_BALANCER else _EVERYBODY
    return FrontendPlan(frontend, kind, *policy_results, *admission)


def _expose(service: Service, of: Family, node: Node | None, context: PlanContext) -> _Exposure | None:
    """None where the Service has no ClusterIP of that family: then it does not exist in it."""
    addresses = dict.fromkeys(_of_family(service.cluster_ips, of), FrontendKind.CLUSTER_IP)
    if not addresses:
        return None
    balancers = _of_family(service.load_balancer_ips, of)
    for address in _of_family(service.external_ips, of):
        # One that is both has the load balancer's source ranges: no way around them (cilium #44718).
        both = address in balancers
        addresses.setdefault(address, FrontendKind.LOAD_BALANCER if both else FrontendKind.EXTERNAL_IP)
    for address in balancers:
        addresses.setdefault(address, FrontendKind.LOAD_BALANCER)
    detected = has_detector(context, of, node)
    return _Exposure(
        of,
        tuple(addresses.items()),
        internal_policy_results(service, context, detected),
        external_policy_results(service, detected),
        _admission(service, of, node, context) if service.source_ranges else _EVERYBODY,
        local_traffic(context, of, node),
    )


def _of_family(addresses: tuple[Address, ...], of: Family) -> list[Address]:
    """Those of one family. The unspecified address would catch what is meant for NodePorts: never."""
    return [each for each in addresses if family(each) is of and not is_unspecified(each)]


def _admission(service: Service, of: Family, node: Node | None, context: PlanContext) -> _Admission:
    """Who may dial the load balancer's addresses in one family.

    Ranges that are all of the other family restrict nothing here, as newBaseServiceInfo in
    pkg/proxy/serviceport.go has it. The node is admitted where a range holds one of its addresses: what
    it sends to a load balancer's address that is local has this very address as its source. A node whose
    addresses are not known (yet) is admitted only by a range of all addresses.
    """
    ranges = tuple(net for net in service.source_ranges if network_family(net) is of)
    if not ranges:
        return _EVERYBODY
    addresses = (*(node.addresses if node else ()), *host_ips(node, context))
    own = [address for address in addresses if family(address) is of]
    everything = V4_BITS if of is Family.IPV4 else 0
    admitted = any(net.length == everything or any(contains(net, each) for each in own) for net in ranges)
    return _Admission(True, ranges, admitted)
