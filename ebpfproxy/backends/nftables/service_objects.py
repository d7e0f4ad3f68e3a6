"""Converts the plan of a ServicePort into its chains, lists of endpoints and elements in the shared
containers.

The chains have the names of kube-proxy's (syncProxyRules in pkg/proxy/nftables/proxier.go);
docs/dataplanes/nftables.md lists what differs. `external-` decides by the client's class and continues to
`service-` (policy Cluster) or `local-` (policy Local). These select an endpoint from a list and do DNAT. So
if the number of endpoints is unchanged, a change consists of elements, and the kernel need not validate any
rule (docs/decisions/0024-lists-of-endpoints.md).
"""

import struct
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Endpoints,
    Entry,
    Key,
    Set,
    endpoint_map,
    nft_family,
)
from ebpfproxy.backends.nftables.names import affinity_number, comment, list_identity, port_name
from ebpfproxy.backends.nftables.node_objects import (
    AFFINITY,
    CLUSTER_IPS,
    FIREWALL_IPS,
    MARK_FOR_MASQUERADE,
    NO_ENDPOINT_NODE_PORTS,
    NO_ENDPOINT_SERVICES,
    REJECT_CHAIN,
    SERVICE_IPS,
    SERVICE_NODE_PORTS,
    affinity_set,
)
from ebpfproxy.backends.nftables.port_ranges import is_everything, merged, network_range, range_text
from ebpfproxy.backends.nftables.shares import Shares, shares
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.model.address import Address, Family, Network, format_address, format_endpoint
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

_IN_SET = ElementEntry()
_POLICY_CHAINS = {Scope.CLUSTER: "service", Scope.LOCAL: "local"}
_USABLE = {Scope.CLUSTER: attrgetter("cluster"), Scope.LOCAL: attrgetter("local")}
_IDENTITY = struct.Struct("=II")
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
        if self._plan.affinity_timeout and self._targets:
            yield Set(self._plan.family, AFFINITY), affinity_set(self._plan.family)
        for scope, targets in self._targets.items():
            listed = Endpoints(self._plan.family, list_identity(self._policy_chain(scope)))
            places = targets.places
            yield listed.map, endpoint_map(self._plan.family)
            yield listed, self._endpoints(places)
            selection = self._selection_rules(listed, targets, len(places))
            yield self._chain(self._policy_chain(scope), [*self._masquerade_rules(scope), *selection])
        if self._routed:
            yield self._chain(f"external-{self._name}", self._external_rules())
        if self._firewall:
            yield self._chain(f"firewall-{self._name}", [self._firewall])
        for internal in self._internal:
            yield from self._internal_elements(internal)
        for external in self._external:
            yield from self._external_elements(external)

    def _targets_by_scope(self) -> dict[Scope, Shares]:
        """Return the endpoints of each scope that some client uses, without empty scopes."""
        scopes = {each.outside.scope for each in self._internal}
        scopes |= {route.policy_result.scope for route in self._routes}
        endpoints, balancing = tuple(self._plan.endpoints), self._plan.balancing
        found = {
            scope: shares(endpoints, balancing, is_usable)
            for scope, is_usable in _USABLE.items()
            if scope in scopes
        }
        return {scope: targets for scope, targets in found.items() if targets}

    @property
    def _routed(self) -> bool:
        """Whether any client of the external frontends has an endpoint."""
        return any(route.policy_result.scope in self._targets for route in self._routes)

    def _policy_chain(self, scope: Scope) -> str:
        return f"{_POLICY_CHAINS[scope]}-{self._name}"

    def _chain(self, name: str, rules: Sequence[Rule]) -> tuple[Key, Entry]:
        return Chain(self._plan.family, name), ChainEntry("", tuple(rules))

    # --- chains ---

    def _endpoints(self, targets: Sequence[PlannedEndpoint]) -> bytes:
        family = self._plan.family
        return b"".join([_raw(each.address, family) + each.port.to_bytes(2) + bytes(2) for each in targets])

    def _selection_rules(self, listed: Endpoints, targets: Shares, length: int) -> Iterator[Rule]:
        """Yield the rules that select one of the endpoints, from a list with this length.

        With session affinity, each endpoint has a rule that looks up whether the client is known to use it,
        and one that selects it. No rule can look up the client's endpoint and whether it is still
        in use: nft up to 1.0.6 aborts while it lists a rule that looks up the result of another lookup.

        A packet may be in this chain while its rules are replaced. It continues with the old rules, but the
        list may be shorter then. The last rule is for such a packet. If the set of clients is full,
        `Remember` ends its rule, and the last rules select an endpoint.
        """
        if self._plan.affinity_timeout:
            for each in targets.endpoints if len(targets.endpoints) > 1 else ():
                yield self._to(each, f"{self._client(each)} @{AFFINITY} ")
            for each, condition in targets.conditions(self._ip):
                yield self._to(each, condition)
        first, second = _IDENTITY.unpack(listed.identity)
        constant = "numgen random mod 1 offset"
        head = f"{self._l4proto} dnat {self._ip} to {constant} {first} . {constant} {second}"
        if length > 1:
            yield Rule(f"{head} . {targets.draw.text(self._ip, length)} map @{listed.container}")
        yield Rule(f"{head} . numgen random mod 1 map @{listed.container}")

    def _to(self, each: PlannedEndpoint, condition: str) -> Rule:
        """Return the rule that remembers the client and translates to this endpoint."""
        remember = f"update @{AFFINITY} {{ {self._client(each)} timeout {self._plan.affinity_timeout}s }}"
        endpoint = format_endpoint(each.address, each.port)
        return Rule(f"{condition}{remember} {self._l4proto} dnat to {endpoint}")

    def _client(self, each: PlannedEndpoint) -> str:
        number = affinity_number(self._plan.name, each.address, each.port)
        return f"{self._ip} saddr . numgen random mod 1 offset {number}"

    @property
    def _l4proto(self) -> str:
        return f"meta l4proto {self._protocol}"

    def _masquerade_rules(self, scope: Scope) -> Iterator[Rule]:
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
                yield Rule(f"{match} jump {MARK_FOR_MASQUERADE}")
            elif each.outside.masquerade and traffic:
                pods = _pods_match(traffic, self._ip, inverted=True)
                yield Rule(f"{match} {pods}jump {MARK_FOR_MASQUERADE}")

    def _external_routes(self) -> list[_Route]:
        """Return the routes of external frontends. All of a ServicePort have the same policy results."""
        if not self._external:
            return []
        first = self._external[0]
        routes = []
        if self._plan.local_traffic and first.pod != first.outside:
            match = _pods_match(self._plan.local_traffic, self._ip)
            routes.append(_Route(match, "pod", first.pod))
        if first.node != first.outside:
            routes.append(_Route("fib saddr type local ", "local", first.node))
        return [*routes, _Route("", "", first.outside)]

    def _external_rules(self) -> list[Rule]:
        rules = []
        for match, label, (scope, masquerade) in self._routes:
            if masquerade:
                remark = label and f' comment "masquerade {label} traffic"'
                rules.append(Rule(f"{match}jump {MARK_FOR_MASQUERADE}{remark}"))
            if scope in self._targets:
                remark = label and f' comment "short-circuit {label} traffic"'
                rules.append(Rule(f"{match}goto {self._policy_chain(scope)}{remark}"))
        return rules

    def _firewall_rule(self) -> Rule | None:
        """Return the rule that enforces source ranges; None if it would drop no client.

        A node that is allowed and has the load balancer's address itself uses that address as its source.
        """
        restricted = [each for each in self._external if each.restricted]
        sources = {net for each in restricted for net in each.source_ranges}
        if any(each.node_admitted for each in restricted):
            sources |= {Network(each.frontend.address, 128) for each in restricted}
        ranges = merged(map(network_range, sources))
        if not restricted or is_everything(ranges, self._plan.family):
            return None
        texts = ", ".join(map(range_text, ranges))
        return Rule(f"{self._ip} saddr != {texts if len(ranges) == 1 else f'{{ {texts} }}'} drop")

    # --- elements ---

    def _internal_elements(self, internal: FrontendPlan) -> Iterator[tuple[Key, Entry]]:
        address = format_address(internal.frontend.address)
        # All ports of a Service share this element, so each of their plans renders it.
        yield Element(self._plan.family, CLUSTER_IPS, address), _IN_SET
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

    def _element(self, container: str, each: FrontendPlan, entry: ElementEntry) -> tuple[Key, Entry]:
        key = f"{self._protocol} . {each.frontend.port}"
        if each.kind is not FrontendKind.NODE_PORT:
            key = f"{format_address(each.frontend.address)} . {key}"
        return Element(self._plan.family, container, key), entry

    def _rejection(self) -> ElementEntry:
        verdict = "drop" if self._plan.no_endpoint_action is NoEndpointAction.DROP else f"goto {REJECT_CHAIN}"
        return ElementEntry(verdict, comment(self._plan.name))


def _raw(address: Address, family: Family) -> bytes:
    """Return the 4 or 16 bytes of an address in the kernel."""
    return address[12:] if family is Family.IPV4 else address


def _pods_match(traffic: LocalTraffic, ip: str, inverted: bool = False) -> str:
    """Return the match of packets of pods, with a space at its end."""
    how = "!= " if inverted else ""
    if traffic.network:
        return f"{ip} saddr {how}{range_text(network_range(traffic.network))} "
    # A name of the maximum length is no prefix of another one, and has no room for the asterisk.
    is_name = not traffic.prefix or len(traffic.interface) == _MAX_DEVICE_NAME
    return f'iifname {how}"{traffic.interface}{"" if is_name else "*"}" '
