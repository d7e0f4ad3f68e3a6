"""Converts the plan of a ServicePort into rules. Pure.

The rules are those of syncProxyRules in pkg/proxy/iptables/proxier.go of kubernetes. In the table nat,
packets to a frontend jump from KUBE-SERVICES or KUBE-NODEPORTS:

- For the ClusterIP, to the chain of its scope: KUBE-SVC (policy Cluster) or KUBE-SVL (policy Local).
- For other frontends, to KUBE-EXT, which distinguishes three classes of sources. If source ranges restrict a
  load balancer's address, KUBE-FW comes first.

The chain of the scope jumps at random to the KUBE-SEP chain of an endpoint. A packet without an endpoint
still has the frontend address in the table filter, which rejects or drops it.
"""

from collections.abc import Iterator

from ebpfproxy.backends.iptables import chains
from ebpfproxy.backends.iptables.chains import LOCALHOST_NODE_PORTS, counting, endpoint_chain, service_chains
from ebpfproxy.backends.iptables.entries import FILTER, NAT, Chain, Entry, Key, Rule, RulePosition
from ebpfproxy.backends.iptables.rules import (
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

_MARK = f"-j {chains.MARK_MASQ}"
_FROM_NODE = "-m addrtype --src-type LOCAL"
_LOCALHOST = "127.0.0.0/8"
_TO_NODE = "-m addrtype --dst-type LOCAL"

_FRONTEND_LABELS = {
    FrontendKind.CLUSTER_IP: "cluster IP",
    FrontendKind.EXTERNAL_IP: "external IP",
    FrontendKind.LOAD_BALANCER: "loadbalancer IP",
}
_RECENT_MASK = {
    Family.IPV4: "255.255.255.255",
    Family.IPV6: "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
}


def service_entries(plan: ServicePortPlan, counts_localhost: bool = False) -> dict[Key, Entry]:
    """Return the entries of one ServicePort in its family. Only chains that are jumped to are included.

    - Without a usable endpoint in the cluster, there is nothing in the table nat.
    - `plan.local_traffic` is None: pods count as external clients, and connections to the ClusterIP are
      masqueraded all or not at all.
    - `plan.terse`: rules of endpoints have no comments, which otherwise are two fifths of the table
      (appendServiceCommentLocked() of kube-proxy).
    - `counts_localhost`: packets to a NodePort on 127.0.0.0/8 have a rule of their own, which counts them.
      The other rules of NodePorts are LAST: they would match these packets first.
    """
    port = _PortRules(plan)
    entries: dict[Key, Entry] = dict.fromkeys(port.shared_rules(), RulePosition.ANYWHERE)
    entries |= dict.fromkeys(port.node_port_rules(), RulePosition.LAST)
    if counts_localhost and plan.family is Family.IPV4:
        entries |= dict.fromkeys(port.node_port_rules(counted=True), RulePosition.ANYWHERE)
    for name, rules in port.chains():
        entries[Chain(plan.family, NAT, name)] = tuple(rules)
    return entries


class _Endpoint:
    """An endpoint that may get new connections. `target` is "address:port"."""

    __slots__ = ("chain", "host", "target")

    def __init__(self, plan: ServicePortPlan, endpoint: PlannedEndpoint) -> None:
        self.target = format_endpoint(endpoint.address, endpoint.port)
        self.host = host(endpoint.address)
        self.chain = endpoint_chain(plan.name, self.target)


class _PortRules:
    """The rules of one plan, with the values that several of them share."""

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
        scopes = {t.scope for each in plan.frontends for t in (each.pod, each.node, each.outside)}
        cluster, local = Scope.CLUSTER in scopes, Scope.LOCAL in scopes
        reachable = [
            (each, _Endpoint(plan, each))
            for each in plan.endpoints
            if (each.cluster and cluster) or (each.local and local)
        ]
        # Rules are in the order of endpoints, which kube-proxy sorts as text.
        reachable.sort(key=lambda pair: pair[1].target)
        self.endpoints = [endpoint for _, endpoint in reachable]
        self.usable = {
            Scope.CLUSTER: [endpoint for each, endpoint in reachable if each.cluster and cluster],
            Scope.LOCAL: [endpoint for each, endpoint in reachable if each.local and local],
        }

    # --- Rules in shared chains ---

    def shared_rules(self) -> Iterator[Rule]:
        plan = self.plan
        for each in self.internal:
            if self.usable[each.outside.scope]:
                yield self._dispatch_rule(each, chains.SERVICES, self.chain_of[each.outside.scope])
            else:
                yield Rule(plan.family, FILTER, chains.SERVICES, self._without_endpoints(each))
        for each in self.external:
            if self.has_any and each.kind is not FrontendKind.NODE_PORT:
                target = self.names.firewall if each.restricted else self.names.external
                yield self._dispatch_rule(each, chains.SERVICES, target)
                if each.restricted:
                    note = comment(f"{self.name} traffic not accepted by {self.names.firewall}")
                    drop = self._frontend_rule(each, note, "DROP")
                    yield Rule(plan.family, FILTER, chains.PROXY_FIREWALL, drop)
            if not self.usable[each.outside.scope]:
                yield Rule(plan.family, FILTER, chains.EXTERNAL_SERVICES, self._without_endpoints(each))
        if plan.health_check_node_port:
            note = comment(f"{self.name} health check node port")
            match = f"-m tcp --dport {plan.health_check_node_port}"
            yield Rule(plan.family, FILTER, chains.NODE_PORTS, f"-p tcp {note} {match} -j ACCEPT")

    def node_port_rules(self, counted: bool = False) -> Iterator[Rule]:
        """Yield the rules that translate NodePorts; with `counted`, those that count connections to
        127.0.0.0/8.
        """
        for each in self.external:
            if self.has_any and each.kind is FrontendKind.NODE_PORT:
                text = self._frontend_rule(each, comment(self.name), self.names.external)
                if counted:
                    match, _, target = text.rpartition(" -j ")
                    text = f"-d {_LOCALHOST} {match} {counting(LOCALHOST_NODE_PORTS)} -j {target}"
                yield Rule(self.plan.family, NAT, chains.NODE_PORTS, text)

    def _dispatch_rule(self, frontend: FrontendPlan, chain: str, target: str) -> Rule:
        note = comment(f"{self.name} {_FRONTEND_LABELS[frontend.kind]}")
        return Rule(self.plan.family, NAT, chain, self._frontend_rule(frontend, note, target))

    def _without_endpoints(self, frontend: FrontendPlan) -> str:
        """Return the rule for packets to `frontend` that were not translated: reject them, or drop them if
        other clients have an endpoint.
        """
        if not self.has_any:
            text, target = f"{self.name} has no endpoints", REJECT[self.plan.family]
        else:
            text, target = f"{self.name} has no local endpoints", "DROP"
        if frontend.kind is FrontendKind.NODE_PORT:
            return self._frontend_rule(frontend, f"{comment(text)} {_TO_NODE}", target)
        return self._frontend_rule(frontend, comment(text), target)

    def _frontend_rule(self, frontend: FrontendPlan, matches: str, target: str) -> str:
        """Return a rule for packets to `frontend`. A NodePort's rule matches no address."""
        destination, port, _ = frontend.frontend
        address = "" if frontend.kind is FrontendKind.NODE_PORT else f"-d {host(destination)} "
        return f"{address}-p {self.protocol} {matches} -m {self.protocol} --dport {port} -j {target}"

    # --- The Service's own chains in the table nat ---

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
        """Yield the rules that mark connections to the ClusterIP for masquerading.

        The destination is matched again, since connections to other frontends also pass this chain, through
        KUBE-EXT.
        """
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
        """Yield the rules of KUBE-EXT. `frontend` is any external one: all of a Service have the same policy
        results.
        """
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
        """Yield the rules of KUBE-FW: the source ranges, which are the same for all frontends of a Service,
        then the node.

        A host-originated packet to a load balancer's address that is local has that address as its source.
        """
        accept = f"{comment(f'{self.name} loadbalancer IP')} -j {self.names.external}"
        for net in restricted[0].source_ranges:
            yield f"{source(net)}{accept}"
        for each in restricted:
            if each.node_admitted:
                yield f"-s {host(each.frontend.address)} {accept}"
        yield comment(f"other traffic to {self.name} will be dropped by {chains.PROXY_FIREWALL}")

    def _balanced(self, usable: list[_Endpoint]) -> Iterator[str]:
        """Yield the rules that select an endpoint: first the previous one of a client, then any with equal
        probability.
        """
        timeout = self.plan.affinity_timeout
        notes = [self._endpoint_comment(each) for each in usable]
        if timeout:
            for note, each in zip(notes, usable, strict=True):
                recent = f"--rcheck --seconds {timeout} --reap {self._recent_list(each)}"
                yield f"{note}-m recent {recent} -j {each.chain}"
        for count, note, each in zip(range(len(usable), 1, -1), notes, usable, strict=False):
            yield f"{note}{one_of(count)} -j {each.chain}"
        yield f"{notes[-1]}-j {usable[-1].chain}"

    def _endpoint_rules(self, endpoint: _Endpoint) -> list[str]:
        """Return the rules of KUBE-SEP. The first one masquerades hairpin connections: otherwise the endpoint
        would answer itself directly, past the node.
        """
        recent = f"-m recent --set {self._recent_list(endpoint)} " if self.plan.affinity_timeout else ""
        protocol = self.protocol
        return [
            f"-s {endpoint.host} {self.comment}{_MARK}",
            f"-p {protocol} {self.comment}{recent}-m {protocol} -j DNAT --to-destination {endpoint.target}",
        ]

    def _recent_list(self, endpoint: _Endpoint) -> str:
        """Return the options for the list of an endpoint's clients, which has the name of its chain."""
        return f"--name {endpoint.chain} --mask {_RECENT_MASK[self.plan.family]} --rsource"

    def _endpoint_comment(self, endpoint: _Endpoint) -> str:
        return "" if self.plan.terse else f"{comment(f'{self.name} -> {endpoint.target}')} "
