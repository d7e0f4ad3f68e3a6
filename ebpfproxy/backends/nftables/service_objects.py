"""Converts the plan of a ServicePort into its chains, affinity sets and elements in the shared containers.

The chains are kube-proxy's (writeServiceToEndpointRules and syncProxyRules in pkg/proxy/nftables/proxier.go).
`external-` decides by the client's class and continues to `service-` (policy Cluster) or `local-` (policy
Local). These select an endpoint and do DNAT. Only with session affinity is there an `endpoint-` chain for
each endpoint, which records the client and does DNAT. The cost of a change in the kernel grows with the
number of chains (docs/decisions/0016-endpoints-without-chains.md).
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Entry,
    Key,
    Set,
    nft_family,
)
from ebpfproxy.backends.nftables.names import comment, endpoint_name, port_name
from ebpfproxy.backends.nftables.node_objects import (
    CLUSTER_IPS,
    FIREWALL_IPS,
    HAIRPIN_CONNECTIONS,
    MARK_FOR_MASQUERADE,
    NO_ENDPOINT_NODE_PORTS,
    NO_ENDPOINT_SERVICES,
    REJECT_CHAIN,
    SERVICE_IPS,
    SERVICE_NODE_PORTS,
    affinity_set,
)
from ebpfproxy.backends.nftables.port_ranges import is_everything, merged, network_range, operand, range_text
from ebpfproxy.model.address import Network, format_address, format_endpoint
from ebpfproxy.plan.service_plan import (
    FrontendKind,
    FrontendPlan,
    LocalTraffic,
    NoEndpointAction,
    PlannedEndpoint,
    PolicyResult,
    Scope,
    ServicePortPlan,
)

_POLICY_CHAINS = {Scope.CLUSTER: "service", Scope.LOCAL: "local"}
_MAX_DEVICE_NAME = 15  # IFNAMSIZ, with its final zero, is 16


class _Route(NamedTuple):
    """What happens to the clients that `match` selects, "" for all. `label` names them in comments."""

    match: str
    label: str
    policy_result: PolicyResult


def service_objects(plan: ServicePortPlan) -> Iterator[tuple[Key, Entry]]:
    """Yield all entries of one plan. Empty if it has no frontend.

    If policy results distinguish pods but the plan does not define how (`DetectLocal.DEVICES`), the result is
    that of kube-proxy without a detector. Connections to a ClusterIP are masqueraded all or not at all, and
    policy Local also applies to pods.
    """
    return _PortObjects(plan).objects()


class _PortObjects:
    """The objects of one plan, with the values that several of them share."""

    def __init__(self, plan: ServicePortPlan) -> None:
        self._plan = plan
        self._ip = nft_family(plan.family)
        self._protocol = plan.name.protocol.name.lower()
        self._name = port_name(plan.name)
        self._internal = [each for each in plan.frontends if each.kind is FrontendKind.CLUSTER_IP]
        self._external = [each for each in plan.frontends if each.kind is not FrontendKind.CLUSTER_IP]
        self._routes = self._external_routes()
        self._targets = self._targets_by_scope()
        self._firewall = self._firewall_rule()

    def objects(self) -> Iterator[tuple[Key, Entry]]:
        if self._plan.affinity_timeout:
            for each in dict.fromkeys(itertools.chain.from_iterable(self._targets.values())):
                yield from self._endpoint(each)
        for scope, targets in self._targets.items():
            yield self._chain(
                self._policy_chain(scope), [*self._masquerade_rules(scope), *self._selection_rules(targets)]
            )
        if self._routed:
            yield self._chain(f"external-{self._name}", self._external_rules())
        if self._firewall:
            yield self._chain(f"firewall-{self._name}", [self._firewall])
        for internal in self._internal:
            yield from self._internal_elements(internal)
        for external in self._external:
            yield from self._external_elements(external)
        if self._plan.frontends:
            yield from self._hairpin_elements()

    def _targets_by_scope(self) -> dict[Scope, list[PlannedEndpoint]]:
        """Return the endpoints of each scope that some client uses, without empty scopes."""
        scopes = {each.outside.scope for each in self._internal}
        scopes |= {route.policy_result.scope for route in self._routes}
        endpoints = self._plan.endpoints
        usable = {
            Scope.CLUSTER: [each for each in endpoints if each.cluster],
            Scope.LOCAL: [each for each in endpoints if each.local],
        }
        return {scope: targets for scope, targets in usable.items() if targets and scope in scopes}

    @property
    def _routed(self) -> bool:
        """Whether any client of the external frontends has an endpoint."""
        return any(route.policy_result.scope in self._targets for route in self._routes)

    def _policy_chain(self, scope: Scope) -> str:
        return f"{_POLICY_CHAINS[scope]}-{self._name}"

    def _chain(self, name: str, rules: list[str]) -> tuple[Key, Entry]:
        return Chain(self._plan.family, name), ChainEntry("", tuple(rules))

    # --- chains ---

    def _endpoint(self, each: PlannedEndpoint) -> Iterator[tuple[Key, Entry]]:
        """Yield the objects of an endpoint with session affinity: the set of its clients and its chain."""
        plan, name = self._plan, self._endpoint_name(each)
        clients = f"affinity-{name}"
        yield Set(plan.family, clients), affinity_set(plan.family)
        remember = f"update @{clients} {{ {self._ip} saddr timeout {plan.affinity_timeout}s }}"
        yield self._chain(f"endpoint-{name}", [remember, self._dnat_rule(each)])

    def _selection_rules(self, targets: Sequence[PlannedEndpoint]) -> list[str]:
        """Return the rules that select one of the endpoints.

        For a single endpoint, there is no map. The kernel searches anonymous sets linearly whenever a rule
        names one (kubernetes/kubernetes#140723 has measurements), so each additional one costs time.

        A packet may be in this chain while its rules are replaced. It continues with the old rules but finds
        no element in their map, since elements of the old generation are inactive (nft_mapelem_deactivate()
        of Linux 6.1, not of 5.10). The last rule is for such a packet.
        """
        number = f"numgen random mod {len(targets)}"
        if self._plan.affinity_timeout:
            names = [self._endpoint_name(each) for each in targets]
            rules = [f"{self._ip} saddr @affinity-{name} goto endpoint-{name}" for name in names]
            verdicts = _numbered(f"goto endpoint-{name}" for name in names)
            return [*rules, f"{number} vmap {verdicts}", f"goto endpoint-{names[-1]}"]
        if len(targets) == 1:
            return [self._dnat_rule(targets[0])]
        targets_map = _numbered(f"{format_address(each.address)} . {each.port}" for each in targets)
        to_any = f"meta l4proto {self._protocol} dnat {self._ip} to {number} map {targets_map}"
        return [to_any, self._dnat_rule(targets[-1])]

    def _dnat_rule(self, each: PlannedEndpoint) -> str:
        return f"meta l4proto {self._protocol} dnat to {format_endpoint(each.address, each.port)}"

    def _endpoint_name(self, each: PlannedEndpoint) -> str:
        return endpoint_name(self._plan.name, each.address, each.port)

    def _masquerade_rules(self, scope: Scope) -> Iterator[str]:
        """Yield the rules that mark connections to the ClusterIP for masquerading: all, none, or all but
        those of pods.

        The destination is matched again, since packets to external frontends also reach the chain.
        """
        traffic = self._plan.local_traffic
        for each in self._internal:
            match = f"{self._ip} daddr {format_address(each.frontend.address)}"
            if each.outside.scope is not scope:
                continue
            if each.pod.masquerade:
                yield f"{match} jump {MARK_FOR_MASQUERADE}"
            elif each.outside.masquerade and traffic:
                yield f"{match} {_pods_match(traffic, self._ip, '!= ')} jump {MARK_FOR_MASQUERADE}"

    def _external_routes(self) -> list[_Route]:
        """Return the routes of external frontends. All of a ServicePort have the same policy results."""
        if not self._external:
            return []
        first = self._external[0]
        routes = []
        if self._plan.local_traffic and first.pod != first.outside:
            routes.append(_Route(_pods_match(self._plan.local_traffic, self._ip), "pod", first.pod))
        if first.node != first.outside:
            routes.append(_Route("fib saddr type local", "local", first.node))
        return [*routes, _Route("", "", first.outside)]

    def _external_rules(self) -> list[str]:
        rules = []
        for match, label, (scope, masquerade) in self._routes:
            if masquerade:
                rules.append(
                    _rule(match, f"jump {MARK_FOR_MASQUERADE}", label and f"masquerade {label} traffic")
                )
            if scope in self._targets:
                goto = f"goto {self._policy_chain(scope)}"
                rules.append(_rule(match, goto, label and f"short-circuit {label} traffic"))
        return rules

    def _firewall_rule(self) -> str:
        """Return the rule that enforces source ranges; "" if it would drop no client.

        A node that is allowed and has the load balancer's address itself uses that address as its source.
        """
        restricted = [each for each in self._external if each.restricted]
        sources = {net for each in restricted for net in each.source_ranges}
        if any(each.node_admitted for each in restricted):
            sources |= {Network(each.frontend.address, 128) for each in restricted}
        ranges = merged(map(network_range, sources))
        if not restricted or is_everything(ranges, self._plan.family):
            return ""
        return f"{self._ip} saddr != {operand(ranges)} drop" if ranges else "drop"

    # --- elements ---

    def _internal_elements(self, internal: FrontendPlan) -> Iterator[tuple[Key, Entry]]:
        address = format_address(internal.frontend.address)
        # All ports of a Service share this element, so each of their plans renders it.
        yield Element(self._plan.family, CLUSTER_IPS, address), ElementEntry()
        if internal.outside.scope in self._targets:
            verdict = f"goto {self._policy_chain(internal.outside.scope)}"
            yield self._element(SERVICE_IPS, internal, ElementEntry(verdict))
        else:
            yield self._element(NO_ENDPOINT_SERVICES, internal, self._rejection())

    def _external_elements(self, external: FrontendPlan) -> Iterator[tuple[Key, Entry]]:
        node_port = external.kind is FrontendKind.NODE_PORT
        if self._routed:
            verdict = f"goto external-{self._name}"
            container = SERVICE_NODE_PORTS if node_port else SERVICE_IPS
            yield self._element(container, external, ElementEntry(verdict))
        if external.outside.scope not in self._targets:
            container = NO_ENDPOINT_NODE_PORTS if node_port else NO_ENDPOINT_SERVICES
            yield self._element(container, external, self._rejection())
        if external.restricted and self._firewall:
            verdict = f"goto firewall-{self._name}"
            yield self._element(FIREWALL_IPS, external, ElementEntry(verdict))

    def _hairpin_elements(self) -> Iterator[tuple[Key, Entry]]:
        """Yield the elements for hairpin connections of endpoints that are, or may be, on this node. Packets
        of other endpoints to themselves do not pass this node.

        All Services with such an endpoint have its element in common.
        """
        for each in self._plan.endpoints:
            if each.on_node is not False and (each.cluster or each.local):
                address = format_address(each.address)
                key = f"{address} . {address} . {self._protocol} . {each.port}"
                yield Element(self._plan.family, HAIRPIN_CONNECTIONS, key), ElementEntry()

    def _element(self, container: str, each: FrontendPlan, entry: ElementEntry) -> tuple[Key, Entry]:
        key = f"{self._protocol} . {each.frontend.port}"
        if each.kind is not FrontendKind.NODE_PORT:
            key = f"{format_address(each.frontend.address)} . {key}"
        return Element(self._plan.family, container, key), entry

    def _rejection(self) -> ElementEntry:
        verdict = "drop" if self._plan.no_endpoint_action is NoEndpointAction.DROP else f"goto {REJECT_CHAIN}"
        return ElementEntry(verdict, comment(self._plan.name))


def _numbered(texts: Iterable[str]) -> str:
    return f"{{ {', '.join(f'{number} : {text}' for number, text in enumerate(texts))} }}"


def _rule(match: str, verdict: str, remark: str) -> str:
    return " ".join(filter(None, (match, verdict, remark and f'comment "{remark}"')))


def _pods_match(traffic: LocalTraffic, ip: str, operator: str = "") -> str:
    if traffic.network:
        return f"{ip} saddr {operator}{range_text(network_range(traffic.network))}"
    # A name of the maximum length is no prefix of another one, and has no room for the asterisk.
    is_name = not traffic.prefix or len(traffic.interface) == _MAX_DEVICE_NAME
    return f'iifname {operator}"{traffic.interface}{"" if is_name else "*"}"'
