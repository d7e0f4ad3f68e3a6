"""Converts the plan of a ServicePort into entries. Pure.

Follows syncProxyRules in pkg/proxy/ipvs/proxier.go of kubernetes, except where that breaks Kubernetes' rules:

- A frontend whose policy leaves it no endpoint on this node does not get the endpoints of other nodes: its
  connections are dropped (`sets.NO_LOCAL`). With policy Local this may apply to external clients, but not to
  the node, or to pods if local traffic detection is configured. Then the virtual server has the endpoints of
  all nodes, and only external connections are dropped (`sets.NO_LOCAL_BUT_PODS`).
- Each frontend has its own virtual server, so the policies of one do not affect another.

A virtual server has one list of real servers for all sources. So if policy Local finds endpoints on this
node, pods and the node also get only those, while in other modes they may get any.

If an endpoint in the network of this node itself gets untranslated packets, the virtual server has only the
endpoints on this node. The packets may come from another node, whose choice IPVS here does not know. Two
nodes that choose each other would otherwise send such a packet in a circle.

IPVS has no scheduler that selects at random, so `Algorithm.RANDOM` is not supported (`IpvsMode.balancing`).
"""

from collections.abc import Callable, Iterator

from ebpfproxy.backends.iptables.rules import is_everything
from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import (
    Entry,
    IpvsSettings,
    Key,
    Local,
    Member,
    PodAddress,
    ReturnPath,
    Server,
    ServerEntry,
    Tunnel,
)
from ebpfproxy.backends.ipvs.forwarding import METHODS, Surroundings, choose, requested
from ebpfproxy.backends.ipvs.sets import member_text, set_name
from ebpfproxy.linux.ipvs.messages import Flag, Method, RealServer
from ebpfproxy.model.address import Address, Family, Network, format_address, format_network
from ebpfproxy.model.balancing import Algorithm, Forwarding
from ebpfproxy.plan.balancing import PlannedBalancing
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    NoEndpointAction,
    PlannedEndpoint,
    Scope,
    ServicePortPlan,
)

_BY_ALGORITHM = {
    Algorithm.ROUND_ROBIN: "rr",
    Algorithm.LEAST_CONNECTIONS: "lc",
    Algorithm.SOURCE_HASH: "sh",
    Algorithm.MAGLEV: "mh",
}
_WEIGHTED = {"rr": "wrr", "lc": "wlc"}
"""By scheduler that ignores weights: the one that selects in the same way, and honors them."""


def scheduler(
    planned: PlannedBalancing, default: str, is_available: Callable[[str], bool]
) -> tuple[str, str | None]:
    """Return the scheduler, and the preferred one if this kernel lacks that, else None.

    `default`: for ServicePorts that request no algorithm, and instead of one that the kernel lacks.

    >>> from ebpfproxy.plan.balancing import PlannedBalancing
    >>> scheduler(PlannedBalancing(Algorithm.ROUND_ROBIN, weights=(1, 3)), "rr", lambda name: True)
    ('wrr', None)
    >>> scheduler(PlannedBalancing(Algorithm.MAGLEV), "rr", lambda name: False)
    ('rr', 'mh')
    """
    wanted = _BY_ALGORITHM.get(planned.algorithm, default) if planned.algorithm else default
    if planned.weights:
        wanted = _WEIGHTED.get(wanted, wanted)
    if wanted == default or is_available(wanted):
        return wanted, None
    return default, wanted


_SINGLE = 128
"""The length of a network that is a single address."""

_FLAGS = {"mh": Flag.PORT | Flag.FALLBACK, "sh": Flag.FALLBACK}
"""Flags for some schedulers.

- PORT: otherwise all connections of a client address would be sent to one endpoint.
- FALLBACK: otherwise both schedulers reject clients that their table assigns to an endpoint of weight 0,
  which stays in the table (net/netfilter/ipvs/ip_vs_sh.c, ip_vs_mh.c).
"""


PLAIN = Surroundings(lambda _name: True, lambda _address: False, lambda _address: False)
"""A kernel with all schedulers, where every endpoint is in a pod, and reached without a gateway."""


def service_entries(
    plan: ServicePortPlan, settings: IpvsSettings, surroundings: Surroundings = PLAIN
) -> dict[Key, Entry]:
    """Return the entries of one ServicePort in its family."""
    entries: dict[Key, Entry] = {}
    name, _ = scheduler(plan.balancing, settings.scheduler, surroundings.has_scheduler)
    for each in plan.frontends:
        used = _endpoints(plan, each)
        choice = choose(plan, each, used, settings.forwarding, surroundings)
        if choice.method is not Forwarding.NAT and any(
            endpoint.on_node and surroundings.is_local(endpoint.address) for endpoint in used
        ):
            used = [endpoint for endpoint in used if endpoint.on_node]
        reals = _real_servers(plan, used, METHODS[choice.method])
        entries[Server(plan.family, each.frontend)] = ServerEntry(
            name, _FLAGS.get(name, Flag(0)), plan.affinity_timeout, reals
        )
        if choice.untranslated is not Forwarding.NAT:
            entries |= _untranslated(plan, each.frontend, choice.untranslated, surroundings)
        if each.kind is not FrontendKind.NODE_PORT:
            entries[Local(plan.family, each.frontend.address)] = True
        for base, text in _members(plan, each):
            entries[_member(plan, base, text)] = True
    for endpoint in plan.endpoints:
        if endpoint.on_node and (endpoint.cluster or endpoint.local):
            text = member_text(endpoint.address, endpoint.port, plan.name.protocol)
            entries[_member(plan, sets.LOOP_BACK, f"{text},{text.partition(',')[0]}")] = True
    if plan.health_check_node_port:
        entries[_member(plan, sets.HEALTH_CHECK_NODE_PORT, str(plan.health_check_node_port))] = True
    return entries


def limits(plan: ServicePortPlan, settings: IpvsSettings, surroundings: Surroundings) -> set[str]:
    """Return what the Service requests and does not get, each with the reason."""
    name, lacking = scheduler(plan.balancing, settings.scheduler, surroundings.has_scheduler)
    found = {f"scheduler {name}: this kernel lacks {lacking}"} if lacking else set()
    if requested(plan, settings.forwarding) is Forwarding.NAT:
        return found  # most Services: the endpoints need not be searched again
    for each in plan.frontends:
        choice = choose(plan, each, _endpoints(plan, each), settings.forwarding, surroundings)
        if choice.limit:
            found.add(f"forwarding nat: {choice.limit}")
    return found


def _real_servers(
    plan: ServicePortPlan, used: list[PlannedEndpoint], method: Method
) -> tuple[RealServer, ...]:
    weights: dict[tuple[Address, int], int] = {}
    if plan.balancing.weights:
        targets = (each[:2] for each in plan.endpoints)
        weights = dict(zip(targets, plan.balancing.weights, strict=True))
    return tuple(
        sorted(RealServer(each.address, each.port, weights.get(each[:2], 1), method) for each in used)
    )


def _untranslated(
    plan: ServicePortPlan, frontend: Frontend, forwarding: Forwarding, surroundings: Surroundings
) -> dict[Key, Entry]:
    """Return what endpoints on this node need to receive packets to a frontend, and to reply to them.

    In the network of this node itself, the address is on kube-ipvs0 already.
    """
    entries: dict[Key, Entry] = {_member(plan, sets.UNTRANSLATED, member_text(*frontend)): True}
    if plan.family is Family.IPV4:
        entries[ReturnPath(plan.family)] = True
    for endpoint in plan.endpoints:
        if endpoint.on_node:
            if not surroundings.is_local(endpoint.address):
                entries[PodAddress(plan.family, endpoint.address, frontend.address)] = True
            if forwarding is Forwarding.TUNNEL:
                entries[Tunnel(plan.family, endpoint.address)] = True
    return entries


def _usable(plan: ServicePortPlan, scope: Scope) -> list[PlannedEndpoint]:
    return [each for each in plan.endpoints if (each.local if scope is Scope.LOCAL else each.cluster)]


def _endpoints(plan: ServicePortPlan, frontend: FrontendPlan) -> list[PlannedEndpoint]:
    """Return the endpoints for external clients; if there are none, those for pods or the node."""
    by_scope = (_usable(plan, each.scope) for each in (frontend.outside, frontend.pod, frontend.node))
    return next(filter(None, by_scope), [])


def _members(plan: ServicePortPlan, frontend: FrontendPlan) -> Iterator[tuple[str, str]]:
    """Yield the members for a frontend: the set and the text."""
    address, port, protocol = frontend.frontend
    destination = member_text(address, port, protocol)
    keeps_source = not frontend.outside.masquerade
    match frontend.kind:
        case FrontendKind.CLUSTER_IP:
            yield sets.CLUSTER_IP, destination
        case FrontendKind.EXTERNAL_IP:
            yield (sets.EXTERNAL_IP_LOCAL if keeps_source else sets.EXTERNAL_IP), destination
        case FrontendKind.LOAD_BALANCER:
            yield sets.LOAD_BALANCER, destination
            if keeps_source:
                yield sets.LOAD_BALANCER_LOCAL, destination
        case FrontendKind.NODE_PORT:
            text = destination if sets.SETS[sets.NODE_PORT[protocol]].type != sets.BITMAP else str(port)
            yield sets.NODE_PORT[protocol], text
            if keeps_source:
                yield sets.NODE_PORT_LOCAL[protocol], text
    if frontend.restricted:
        yield sets.LOAD_BALANCER_FW, destination
        for net in frontend.source_ranges:
            for cidr in _storable(net):
                yield sets.LOAD_BALANCER_SOURCE_CIDR, f"{destination},{cidr}"
        if frontend.node_admitted:
            yield sets.LOAD_BALANCER_SOURCE_IP, f"{destination},{destination.partition(',')[0]}"
    if plan.no_endpoint_action is NoEndpointAction.DROP and not _usable(plan, frontend.outside.scope):
        yield (sets.NO_LOCAL_BUT_PODS if _endpoints(plan, frontend) else sets.NO_LOCAL), destination


def _storable(net: Network) -> Iterator[str]:
    """Yield the networks in the form that a set stores: a single address without a length, and everything as
    two halves.
    """
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
