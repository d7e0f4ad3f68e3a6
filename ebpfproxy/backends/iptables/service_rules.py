"""The rules that the plan of one port of a Service becomes. Pure.

They are those of syncProxyRules in pkg/proxy/iptables/proxier.go of kubernetes: what is dialled leads from
KUBE-SERVICES or KUBE-NODEPORTS in the nat table

- by the ClusterIP straight to the chain of its scope: KUBE-SVC (policy Cluster) or KUBE-SVL (Local);
- by anything else to KUBE-EXT, which distinguishes the three classes of sources; to a load balancer's address
  through KUBE-FW where source ranges restrict it;

and from the chain of the scope at random to the KUBE-SEP chain of an endpoint. What finds no endpoint is
still addressed to the Service when it comes to the filter table, and rejected or dropped there.
"""

from collections.abc import Iterator

from ebpfproxy.backends.iptables.names import endpoint_chain, service_chains
from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.entries import FILTER, NAT, Chain, Entry, Key, Rule, RulePosition
from ebpfproxy.backends.xtables.rule_text import (
    REJECT,
    comment,
    from_pods,
    host,
    not_from_pods,
    one_of,
    source,
)
from ebpfproxy.model.address import Family, format_endpoint
from ebpfproxy.plan.service_plan import (
    FrontendKind,
    FrontendPlan,
    NoEndpointAction,
    PlannedEndpoint,
    Scope,
    ServicePortPlan,
)

_MARK = f"-j {names.MARK_MASQ}"
_FROM_NODE = "-m addrtype --src-type LOCAL"
_TO_NODE = "-m addrtype --dst-type LOCAL"

_DIALLED_AS = {
    FrontendKind.CLUSTER_IP: "cluster IP",
    FrontendKind.EXTERNAL_IP: "external IP",
    FrontendKind.LOAD_BALANCER: "loadbalancer IP",
}
_RECENT_MASK = {
    Family.IPV4: "255.255.255.255",
    Family.IPV6: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
}


def service_entries(plan: ServicePortPlan) -> dict[Key, Entry]:
    """What one port of a Service needs in its family, of chains no more than are jumped to.

    Without a usable endpoint anywhere there is nothing in the nat table at all. `plan.local_traffic` None:
    pods count as others, and the ClusterIP masquerades all or none. `plan.terse`: no comments on the rules
    of endpoints, which are two fifths of the table (appendServiceCommentLocked() of kube-proxy).
    """
    port = _Port(plan)
    entries: dict[Key, Entry] = dict.fromkeys(port.shared_rules(), RulePosition.ANYWHERE)
    for name, rules in port.chains():
        entries[Chain(plan.family, NAT, name)] = tuple(rules)
    return entries


class _Endpoint:
    """One that new connections may get. `place` is "address:port"."""

    __slots__ = ("chain", "host", "place")

    def __init__(self, plan: ServicePortPlan, endpoint: PlannedEndpoint) -> None:
        self.place = format_endpoint(endpoint.address, endpoint.port)
        self.host = host(endpoint.address)
        self.chain = endpoint_chain(plan.name, self.place)


class _Port:
    """A plan, and what more than one of its rules needs to know."""

    def __init__(self, plan: ServicePortPlan) -> None:
        self.plan = plan
        self.name = str(plan.name)
        self.protocol = plan.name.protocol.name.lower()
        self.names = service_chains(plan.name)
        self.has_any = plan.no_endpoint_action is NoEndpointAction.DROP
        self.internal = [each for each in plan.frontends if each.kind is FrontendKind.CLUSTER_IP]
        self.external = [each for each in plan.frontends if each.kind is not FrontendKind.CLUSTER_IP]
        self.comment = "" if plan.terse else f"{comment(self.name)} "
        self.chain_of = {Scope.CLUSTER: self.names.cluster, Scope.LOCAL: self.names.local}
        asked_for = {t.scope for each in plan.frontends for t in (each.pod, each.node, each.outside)}
        cluster, local = Scope.CLUSTER in asked_for, Scope.LOCAL in asked_for
        reachable = [
            (each, _Endpoint(plan, each))
            for each in plan.endpoints
            if (each.cluster and cluster) or (each.local and local)
        ]
        # kube-proxy sorts endpoints as text, and their order is that of the rules.
        reachable.sort(key=lambda pair: pair[1].place)
        self.endpoints = [endpoint for _, endpoint in reachable]
        self.usable = {
            Scope.CLUSTER: [endpoint for each, endpoint in reachable if each.cluster and cluster],
            Scope.LOCAL: [endpoint for each, endpoint in reachable if each.local and local],
        }

    # --- Rules in chains that all Services share ---

    def shared_rules(self) -> Iterator[Rule]:
        plan = self.plan
        for each in self.internal:
            if self.usable[each.outside.scope]:
                yield self._captured(each, names.SERVICES, self.chain_of[each.outside.scope])
            else:
                yield Rule(plan.family, FILTER, names.SERVICES, self._without_endpoints(each))
        for each in self.external:
            if self.has_any:
                node_port = each.kind is FrontendKind.NODE_PORT
                target = self.names.firewall if each.restricted else self.names.external
                yield self._captured(each, names.NODE_PORTS if node_port else names.SERVICES, target)
                if each.restricted:
                    text = f"{self.name} traffic not accepted by {self.names.firewall}"
                    yield Rule(
                        plan.family, FILTER, names.PROXY_FIREWALL, self._to(each, comment(text), "DROP")
                    )
            if not self.usable[each.outside.scope]:
                yield Rule(plan.family, FILTER, names.EXTERNAL_SERVICES, self._without_endpoints(each))
        if plan.health_check_node_port:
            note = comment(f"{self.name} health check node port")
            dialled = f"-m tcp --dport {plan.health_check_node_port}"
            yield Rule(plan.family, FILTER, names.NODE_PORTS, f"-p tcp {note} {dialled} -j ACCEPT")

    def _captured(self, frontend: FrontendPlan, chain: str, target: str) -> Rule:
        kind = _DIALLED_AS.get(frontend.kind)
        note = comment(f"{self.name} {kind}" if kind else self.name)
        return Rule(self.plan.family, NAT, chain, self._to(frontend, note, target))

    def _without_endpoints(self, frontend: FrontendPlan) -> str:
        """Packets to `frontend` that no rule took: rejected, or dropped where other clients have an
        endpoint."""
        if not self.has_any:
            text, target = f"{self.name} has no endpoints", REJECT[self.plan.family]
        else:
            text, target = f"{self.name} has no local endpoints", "DROP"
        if frontend.kind is FrontendKind.NODE_PORT:
            return self._to(frontend, f"{comment(text)} {_TO_NODE}", target)
        return self._to(frontend, comment(text), target)

    def _to(self, frontend: FrontendPlan, matches: str, target: str) -> str:
        """A rule for what is sent to `frontend`; a NodePort's has no address."""
        dialled, port, _ = frontend.frontend
        address = "" if frontend.kind is FrontendKind.NODE_PORT else f"-d {host(dialled)} "
        return f"{address}-p {self.protocol} {matches} -m {self.protocol} --dport {port} -j {target}"

    # --- The Service's own chains, of the nat table ---

    def chains(self) -> Iterator[tuple[str, list[str]]]:
        if self.has_any and self.external:
            yield self.names.external, list(self._external_rules(self.external[0]))
            restricted = [each for each in self.external if each.restricted]
            if restricted:
                yield self.names.firewall, list(self._source_ranges(restricted))
        for scope, usable in self.usable.items():
            if usable:
                yield self.chain_of[scope], [*self._internal_rules(scope), *self._balanced(usable)]
        for endpoint in self.endpoints:
            yield endpoint.chain, self._endpoint_rules(endpoint)

    def _internal_rules(self, scope: Scope) -> Iterator[str]:
        """Who is masqueraded on the way to the ClusterIP. Others come through this chain, too, by KUBE-EXT,
        so what was dialled is said again."""
        for each in self.internal:
            if each.outside.scope is not scope or not each.outside.masquerade:
                continue
            address, port, _ = each.frontend
            if each.pod.masquerade:
                sources: str | None = f"-d {host(address)}"
            elif self.plan.local_traffic:
                sources = not_from_pods(self.plan.local_traffic, host(address))
            else:
                sources = None
            if sources:
                note = comment(f"{self.name} cluster IP")
                yield f"{sources} -p {self.protocol} {note} -m {self.protocol} --dport {port} {_MARK}"

    def _external_rules(self, frontend: FrontendPlan) -> Iterator[str]:
        """`frontend` is any external one: all of a Service treat sources alike."""
        pod, node, outside = frontend.pod, frontend.node, frontend.outside
        destinations = f"{self.name} external destinations"
        if node == outside:
            if outside.masquerade:
                yield f"{comment(f'masquerade traffic for {destinations}')} {_MARK}"
        else:
            if self.plan.local_traffic and self.usable[pod.scope]:
                note = comment(f"pod traffic for {destinations}")
                yield f"{from_pods(self.plan.local_traffic)}{note} -j {self.chain_of[pod.scope]}"
            if node.masquerade:
                yield f"{comment(f'masquerade LOCAL traffic for {destinations}')} {_FROM_NODE} {_MARK}"
            if self.usable[node.scope]:
                note = comment(f"route LOCAL traffic for {destinations}")
                yield f"{note} {_FROM_NODE} -j {self.chain_of[node.scope]}"
        if self.usable[outside.scope]:
            yield f"-j {self.chain_of[outside.scope]}"

    def _source_ranges(self, restricted: list[FrontendPlan]) -> Iterator[str]:
        """The ranges, which all of a Service's frontends have in common; then the node, whose packets to a
        load balancer's address that is local have that address as their source."""
        admitted = f"{comment(f'{self.name} loadbalancer IP')} -j {self.names.external}"
        for net in restricted[0].source_ranges:
            yield f"{source(net)}{admitted}"
        for each in restricted:
            if each.node_admitted:
                yield f"-s {host(each.frontend.address)} {admitted}"
        yield comment(f"other traffic to {self.name} will be dropped by {names.PROXY_FIREWALL}")

    def _balanced(self, usable: list[_Endpoint]) -> Iterator[str]:
        """First the endpoint that a client had before, then any, each with the same chance."""
        timeout = self.plan.affinity_timeout
        notes = [self._endpoint_comment(each) for each in usable]
        if timeout:
            for note, each in zip(notes, usable, strict=True):
                seen = f"--rcheck --seconds {timeout} --reap {self._clients(each)}"
                yield f"{note}-m recent {seen} -j {each.chain}"
        for left, note, each in zip(range(len(usable), 1, -1), notes, usable, strict=False):
            yield f"{note}{one_of(left)} -j {each.chain}"
        yield f"{notes[-1]}-j {usable[-1].chain}"

    def _endpoint_rules(self, endpoint: _Endpoint) -> list[str]:
        """The hairpin first: an endpoint that came upon itself would answer itself past this node."""
        remember = f"-m recent --set {self._clients(endpoint)} " if self.plan.affinity_timeout else ""
        protocol = self.protocol
        return [
            f"-s {endpoint.host} {self.comment}{_MARK}",
            f"-p {protocol} {self.comment}{remember}-m {protocol} -j DNAT --to-destination {endpoint.place}",
        ]

    def _clients(self, endpoint: _Endpoint) -> str:
        """The list of an endpoint's clients, which has the name of its chain."""
        return f"--name {endpoint.chain} --mask {_RECENT_MASK[self.plan.family]} --rsource"

    def _endpoint_comment(self, endpoint: _Endpoint) -> str:
        return "" if self.plan.terse else f"{comment(f'{self.name} -> {endpoint.place}')} "
