"""A simple and slow reference for the endpoints that each client reaches.

It follows Kubernetes' CategorizeEndpoints (pkg/proxy/topology.go), the predicates of a ServicePort
(pkg/proxy/serviceport.go) and the chains of pkg/proxy/iptables/proxier.go. It is intentionally independent of
ebpfproxy/plan: the two are compared on random clusters.
"""

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ebpfproxy.model.address import Address, Family, Protocol, contains, family, network, network_family
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.endpoint import Endpoint, EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service, ServicePort, ServiceType, TrafficPolicy
from ebpfproxy.plan.service_plan import DetectLocal, PlanContext

SOURCES = ("pod", "node", "outside")

Target = tuple[Address, int]
"""Address and port of an endpoint."""

FrontendAddress = tuple[Address, int, Protocol]
"""A frontend. The address of a NodePort is the unspecified address."""


class Outcome(NamedTuple):
    """The outcome of a new connection: the possible endpoints, or None with the verdict "reject" or "drop".

    `masquerade` is False without endpoints. `restricted`: only for clients in the Service's source ranges.
    """

    targets: frozenset[Target] | None
    verdict: str
    masquerade: bool
    restricted: bool


class Question(NamedTuple):
    service: Service
    port: ServicePort
    of: Family
    slices: Sequence[EndpointSlice]
    node: Node | None
    context: PlanContext


class Claim(NamedTuple):
    """A claim of a Service's port to a frontend. Claims are granted in sort order.

    The order is ClusterIP, NodePort, load balancer address, external IP; for equal kinds, the smaller name.
    """

    rank: int
    name: tuple[str, str, str, Protocol]
    kind: str
    question: Question


class Client(NamedTuple):
    """`source`: one of SOURCES. `address`: the source address of its packets."""

    source: str
    address: Address


class FlowsEnd(enum.Enum):
    """When an established UDP flow leaves its endpoint.

    - UNSERVED: once the endpoint no longer serves.
    - UNUSED: once new flows of the client would not get the endpoint.
    - WITHOUT_ANY: once new flows of the client would get no endpoint.
    """

    UNSERVED = "unserved"
    UNUSED = "unused"
    WITHOUT_ANY = "without any"


class Reached(NamedTuple):
    """The possible results of a client's new connection. `targets`: for each possible endpoint, whether it
    sees the node's address instead of the client's (None: unspecified). `verdict`: "reject" or "drop" without
    endpoints, or if this is also possible; "either" if both are possible.

    `relayed`: a process of the node connects to the endpoint, so the endpoint sees an address of the node.
    """

    targets: Mapping[Target, bool | None]
    verdict: str = ""
    flows_end: FlowsEnd = FlowsEnd.UNSERVED
    relayed: bool = False


def granted(state: ClusterState, context: PlanContext) -> dict[FrontendAddress, Claim]:
    """The winning claim for each frontend."""
    claims: dict[FrontendAddress, list[Claim]] = {}
    for service, of in itertools.product(state.services.values(), Family):
        slices = state.slices_of(service.name)
        for port in service.ports:
            q = Question(service, port, of, slices, state.node, context)
            for kind, address, number in frontend_addresses(q):
                name = (*service.name, port.name, port.protocol)
                claim = Claim(_RANKS.index(kind), name, kind, q)
                claims.setdefault((address, number, port.protocol), []).append(claim)
    return {frontend: min(rivals, key=lambda claim: claim[:2]) for frontend, rivals in claims.items()}


_RANKS = ("ClusterIP", "NodePort", "LoadBalancer", "ExternalIP")


def reached(claim: Claim, client: Client) -> Reached:
    """This includes the last two rows of the truth table: an endpoint that connects to itself, and source
    ranges, which admit the node if they contain its address."""
    q = claim.question
    found = outcome(q, claim.kind, client.source)
    if found.restricted and not admitted(q, client):
        return Reached({}, "drop")
    targets = found.targets or frozenset()
    return Reached({t: found.masquerade or t[0] == client.address for t in targets}, found.verdict)


def admitted(q: Question, client: Client) -> bool:
    """Whether the source ranges of the Service contain the client."""
    if client.source == "node":
        return node_admitted(q)
    ranges = (net for net in q.service.source_ranges if network_family(net) is q.of)
    return any(contains(net, client.address) for net in ranges)


def keeps_flows(q: Question) -> tuple[frozenset[Target], frozenset[Target]]:
    """The endpoints that must keep their established UDP flows, and those that may (pkg/proxy/conntrack).

    Flows to serving endpoints are kept, even if new flows get other endpoints. For a contradictory endpoint
    that is ready and does not serve, both are allowed.
    """
    found = endpoints(q)
    serving = frozenset(target for target, endpoint in found.items() if endpoint.serving)
    return serving, serving | frozenset(target for target, endpoint in found.items() if endpoint.ready)


def frontend_addresses(q: Question) -> Iterator[tuple[str, Address, int]]:
    """The Service's frontends in that family: kind, address, port. Without a ClusterIP there are none."""
    zero = (bytes(16), bytes(10) + b"\xff\xff" + bytes(4))
    seen = set()
    for kind, addresses in (
        ("ClusterIP", q.service.cluster_ips),
        ("ExternalIP", q.service.external_ips),
        ("LoadBalancer", q.service.load_balancer_ips),
    ):
        for address in addresses:
            if kind == "ExternalIP" and address in q.service.load_balancer_ips:
                continue  # as in mode nftables, the source ranges of the load balancer IP apply
            if family(address) is q.of and address not in zero and address not in seen:
                seen.add(address)
                yield kind, address, q.port.port
        if kind == "ClusterIP" and not seen:
            return
    if q.port.node_port != 0:
        yield "NodePort", Address(zero[0] if q.of is Family.IPV6 else zero[1]), q.port.node_port


def outcome(q: Question, kind: str, source: str) -> Outcome:
    """The outcome of a new connection to an address of a kind from a class of sources."""
    if kind == "ClusterIP":
        local = q.service.internal_policy is TrafficPolicy.LOCAL
        masquerade = q.context.masquerade_all or (_detects_local_traffic(q) and source != "pod")
    elif not _external_local(q.service) or source == "node":
        local, masquerade = False, True
    elif source == "pod" and _detects_local_traffic(q):
        local, masquerade = False, False
    else:
        local, masquerade = True, False
    lengths = {each.length for each in q.service.source_ranges if network_family(each) is q.of}
    whole = 96 if q.of is Family.IPV4 else 0
    restricted = kind == "LoadBalancer" and bool(lengths) and whole not in lengths
    usable = _local(q) if local else _cluster(q)
    if usable:
        return Outcome(usable, "", masquerade, restricted)
    return Outcome(None, "drop" if _any_anywhere(q) else "reject", False, restricted)


def _detects_local_traffic(q: Question) -> bool:
    """Whether local traffic detection is configured: newLocalDetector in
    cmd/kube-proxy/app/server_linux.go."""
    match q.context.detect_local:
        case DetectLocal.DEVICES:
            return True
        case DetectLocal.CLUSTER_CIDR:
            cidrs = q.context.cluster_cidrs
        case DetectLocal.NODE_CIDR:
            cidrs = q.node.pod_cidrs if q.node else ()
        case _:
            return q.context.pod_interface != ""
    return any(network_family(cidr) is q.of for cidr in cidrs)


def node_admitted(q: Question) -> bool:
    """Whether the node itself may connect to load balancer addresses that have source ranges."""
    addresses = [each for each in (q.node.addresses if q.node else ()) if family(each) is q.of]
    ranges = [each for each in q.service.source_ranges if network_family(each) is q.of]
    return any(network(address, r.length) == r for r, address in itertools.product(ranges, addresses))


def _external_local(service: Service) -> bool:
    if service.external_policy is not TrafficPolicy.LOCAL:
        return False
    return service.type in (ServiceType.NODE_PORT, ServiceType.LOAD_BALANCER) or len(service.external_ips) > 0


def endpoints(q: Question) -> dict[Target, Endpoint]:
    """The best entry of each address and port, in the order: ready, serving, any; on this node; not
    terminating."""
    entries = [
        ((endpoint.address, port.port), endpoint)
        for piece in q.slices
        if piece.family is q.of
        for port in piece.ports
        if (port.name, port.protocol) == (q.port.name, q.port.protocol)
        for endpoint in piece.endpoints
    ]
    best = {}
    for target in {target for target, _ in entries}:
        same = [endpoint for key, endpoint in entries if key == target]
        for wanted in (_ready, _serving_terminating, lambda e: e.serving, lambda e: True):
            graded = [endpoint for endpoint in same if wanted(endpoint)]
            if graded:
                break
        here = [endpoint for endpoint in graded if endpoint.node == q.context.node_name]
        staying = [endpoint for endpoint in here or graded if not endpoint.terminating]
        best[target] = max(
            staying or here or graded,
            key=lambda e: (e.serving, e.node, sorted(e.nodes), sorted(e.zones)),
        )
        if _weight(q, target[0], best[target].node) == 0:
            best[target] = best[target]._replace(ready=False, terminating=False)
    return best


def _weight(q: Question, address: Address, node: str) -> int:
    """By the first matching rule of the annotation endpoint-weights."""
    for rule in q.service.balancing.weights:
        if contains(rule.network, address) if rule.network else rule.node == node:
            return rule.weight
    return 1


def _ready(endpoint: Endpoint) -> bool:
    return endpoint.ready


def _serving_terminating(endpoint: Endpoint) -> bool:
    return endpoint.serving and endpoint.terminating


def _cluster(q: Question) -> frozenset[Target]:
    found = endpoints(q)
    ready = {target: endpoint for target, endpoint in found.items() if endpoint.ready}
    if not ready:
        return frozenset(target for target, endpoint in found.items() if _serving_terminating(endpoint))
    for_node = {target for target, e in ready.items() if q.context.node_name in e.nodes}
    if for_node and all(e.nodes for e in ready.values()):
        return frozenset(for_node)
    zone = q.node.zone if q.node else ""
    for_zone = {target for target, e in ready.items() if zone in e.zones}
    if zone and for_zone and all(e.zones for e in ready.values()):
        return frozenset(for_zone)
    return frozenset(ready)


def _local(q: Question) -> frozenset[Target]:
    here = {t: e for t, e in endpoints(q).items() if e.node == q.context.node_name}
    ready = frozenset(target for target, endpoint in here.items() if endpoint.ready)
    return ready or frozenset(target for target, endpoint in here.items() if _serving_terminating(endpoint))


def _any_anywhere(q: Question) -> bool:
    return any(e.ready or _serving_terminating(e) for e in endpoints(q).values())
