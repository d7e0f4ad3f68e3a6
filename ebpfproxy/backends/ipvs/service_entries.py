"""What the plan of one port of a Service becomes. Pure.

As syncProxyRules in pkg/proxy/ipvs/proxier.go of kubernetes, but for what breaks Kubernetes' rules there:

- a frontend whose policy leaves it no endpoint here is not given those of other nodes instead: it is dropped
  (`sets.NO_LOCAL`). Where policy Local does that to others, but not to the node, nor to pods of the cluster
  with local traffic detection the virtual server has the endpoints of all nodes, and only what comes
  from elsewhere is dropped (`sets.NO_LOCAL_BUT_PODS`);
- each frontend has a virtual server of its own, so policies of one do not leak into another.

A virtual server has one list of real servers for all sources. So where policy Local finds endpoints on this
node, pods and the node itself are given those, too, while in other modes they may have any.
"""

from collections.abc import Iterator

from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Entry, Key, Local, Member, Server, ServerEntry
from ebpfproxy.backends.ipvs.sets import place, set_name
from ebpfproxy.backends.ipvs.settings import IpvsSettings
from ebpfproxy.backends.xtables.rule_text import is_everything
from ebpfproxy.linux.ipvs.messages import Flag, RealServer
from ebpfproxy.model.address import Address, Network, format_address, format_network
from ebpfproxy.plan.service_plan import (
    FrontendKind,
    FrontendPlan,
    NoEndpointAction,
    PlannedEndpoint,
    Scope,
    ServicePortPlan,
)

_SINGLE = 128
"""The length of a network that is one address."""

_FLAGS = {"mh": Flag.PORT | Flag.FALLBACK, "sh": Flag.FALLBACK}
"""Of some schedulers. PORT: by the address alone all connections of a client would be sent to one endpoint.
FALLBACK: without it both refuse clients that their table leads to an endpoint of weight 0, which stays there
(net/netfilter/ipvs/ip_vs_sh.c, ip_vs_mh.c)."""


def service_entries(plan: ServicePortPlan, settings: IpvsSettings) -> dict[Key, Entry]:
    """What one port of a Service needs in its family."""
    entries: dict[Key, Entry] = {}
    for each in plan.frontends:
        reals = tuple(
            sorted(RealServer(endpoint.address, endpoint.port) for endpoint in _endpoints(plan, each))
        )
        entries[Server(plan.family, each.frontend)] = ServerEntry(
            settings.scheduler, _FLAGS.get(settings.scheduler, Flag(0)), plan.affinity_timeout, reals
        )
        if each.kind is not FrontendKind.NODE_PORT:
            entries[Local(plan.family, each.frontend.address)] = True
        for base, text in _members(plan, each):
            entries[_member(plan, base, text)] = True
    for endpoint in plan.endpoints:
        if endpoint.on_node and (endpoint.cluster or endpoint.local):
            own = place(endpoint.address, endpoint.port, plan.name.protocol)
            entries[_member(plan, sets.LOOP_BACK, f"{own},{own.partition(',')[0]}")] = True
    if plan.health_check_node_port:
        entries[_member(plan, sets.HEALTH_CHECK_NODE_PORT, str(plan.health_check_node_port))] = True
    return entries


def _usable(plan: ServicePortPlan, scope: Scope) -> list[PlannedEndpoint]:
    return [each for each in plan.endpoints if (each.local if scope is Scope.LOCAL else each.cluster)]


def _endpoints(plan: ServicePortPlan, frontend: FrontendPlan) -> list[PlannedEndpoint]:
    """Those that others have; where there are none, those that pods and the node have."""
    by_scope = (_usable(plan, each.scope) for each in (frontend.outside, frontend.pod, frontend.node))
    return next(filter(None, by_scope), [])


def _members(plan: ServicePortPlan, frontend: FrontendPlan) -> Iterator[tuple[str, str]]:
    """Of which sets a frontend is a member; a set, and the member's text."""
    address, port, protocol = frontend.frontend
    dialled = place(address, port, protocol)
    keeps_source = not frontend.outside.masquerade
    match frontend.kind:
        case FrontendKind.CLUSTER_IP:
            yield sets.CLUSTER_IP, dialled
        case FrontendKind.EXTERNAL_IP:
            yield (sets.EXTERNAL_IP_LOCAL if keeps_source else sets.EXTERNAL_IP), dialled
        case FrontendKind.LOAD_BALANCER:
            yield sets.LOAD_BALANCER, dialled
            if keeps_source:
                yield sets.LOAD_BALANCER_LOCAL, dialled
        case FrontendKind.NODE_PORT:
            text = dialled if sets.SETS[sets.NODE_PORT[protocol]].type != sets.BITMAP else str(port)
            yield sets.NODE_PORT[protocol], text
            if keeps_source:
                yield sets.NODE_PORT_LOCAL[protocol], text
    if frontend.restricted:
        yield sets.LOAD_BALANCER_FW, dialled
        for net in frontend.source_ranges:
            for part in _storable(net):
                yield sets.LOAD_BALANCER_SOURCE_CIDR, f"{dialled},{part}"
        if frontend.node_admitted:
            yield sets.LOAD_BALANCER_SOURCE_IP, f"{dialled},{dialled.partition(',')[0]}"
    if plan.no_endpoint_action is NoEndpointAction.DROP and not _usable(plan, frontend.outside.scope):
        yield (sets.NO_LOCAL_BUT_PODS if _endpoints(plan, frontend) else sets.NO_LOCAL), dialled


def _storable(net: Network) -> Iterator[str]:
    """As a set has them: a single address without a length, and everything as two halves."""
    if is_everything(net):
        half = net.length + 1
        upper = int.from_bytes(net.address) | 1 << (128 - half)
        yield format_network(Network(net.address, half))
        yield format_network(Network(Address(upper.to_bytes(16)), half))
    elif net.length == _SINGLE:
        yield format_address(net.address)
    else:
        yield format_network(net)


def _member(plan: ServicePortPlan, base: str, text: str) -> Member:
    return Member(plan.family, set_name(base, plan.family), text)
