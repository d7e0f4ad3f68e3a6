"""The objects that all Services of this node share: ipsets, addresses for NodePorts, chains and jumps. Pure.

Chains and their order are kube-proxy's (syncProxyRules and writeIptablesRules in pkg/proxy/ipvs/proxier.go of
kubernetes). The differences are:

- Rules exist even if a set is empty, so that no rule depends on a Service.
- Only packets to addresses in KUBE-NODE-PORT-IP jump to KUBE-NODE-PORT, not those to any local address.
  Packets to an address and port that another frontend has do not jump there either. Otherwise they would be
  masqueraded like those to the NodePort.
- Host-originated connections are also masqueraded with policy Local.
- Packets to external addresses are accepted on any device, since all these addresses are local.
- Source ranges apply only to new connections.
- KUBE-IPVS-OUT-FILTER is in the table mangle. It drops those host-originated connections that the other
  filters drop for other sources. In that table, a packet still has its original destination, which is in the
  sets. kube-proxy has a rule for each load balancer in the table filter.
- Packets that leave the node with a Service's address as their source are masqueraded in a separate chain,
  KUBE-IPVS-POSTROUTING. It stays with the addresses when another mode takes over (see `cleanup.drain`).
- Pings to a Service's address are answered.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.iptables import chains
from ebpfproxy.backends.iptables.entries import FILTER, MANGLE, NAT, Chain, Rule, RulePosition
from ebpfproxy.backends.iptables.rules import (
    REJECT,
    comment,
    forwarding_rules,
    marking_rule,
    masquerading_rules,
    not_from_pods,
)
from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Entry, IpvsSettings, Key, Member, Set
from ebpfproxy.backends.ipvs.sets import SETS, set_name
from ebpfproxy.model.address import (
    Address,
    Family,
    Protocol,
    contains,
    format_address,
    format_network,
    network_family,
    parse_network,
)
from ebpfproxy.plan.node_ports import LOOPBACK
from ebpfproxy.plan.service_plan import NodePlan

_SINGLE = 128
_LINK_LOCAL = parse_network("fe80::/10")
_LOOPBACK = {network_family(net): net for net in LOOPBACK}
_PINGS = {
    Family.IPV4: "-p icmp -m icmp --icmp-type 8",
    Family.IPV6: "-p ipv6-icmp -m icmp6 --icmpv6-type 128",
}
_MARK = f"-j {chains.MARK_MASQ}"
_NEW = "-m conntrack --ctstate NEW"
_FROM_NODE = "-m addrtype --src-type LOCAL"
_TO_NODE = "-m addrtype --dst-type LOCAL"
_ALLOWED = (sets.LOAD_BALANCER_SOURCE_CIDR, sets.LOAD_BALANCER_SOURCE_IP)


class _Jump(NamedTuple):
    """A jump from a built-in chain, `source`, to a chain of the mode."""

    table: str
    source: str
    target: str
    comment: str


_JUMPS = (
    _Jump(NAT, "OUTPUT", chains.SERVICES, "kubernetes service portals"),
    _Jump(NAT, "PREROUTING", chains.SERVICES, "kubernetes service portals"),
    _Jump(NAT, "POSTROUTING", chains.POSTROUTING, "kubernetes postrouting rules"),
    _Jump(NAT, "POSTROUTING", chains.IPVS_POSTROUTING, "kubernetes ipvs service ips of this node"),
    _Jump(FILTER, "FORWARD", chains.FORWARD, "kubernetes forwarding rules"),
    _Jump(FILTER, "INPUT", chains.NODE_PORT, "kubernetes health check rules"),
    _Jump(FILTER, "INPUT", chains.PROXY_FIREWALL, "kube-proxy firewall rules"),
    _Jump(FILTER, "FORWARD", chains.PROXY_FIREWALL, "kube-proxy firewall rules"),
    _Jump(FILTER, "INPUT", chains.IPVS_FILTER, "kubernetes ipvs access filter"),
    _Jump(MANGLE, "OUTPUT", chains.IPVS_OUT_FILTER, "kubernetes ipvs access filter"),
)


def node_entries(plan: NodePlan, family: Family, settings: IpvsSettings) -> dict[Key, Entry]:
    """Return the entries of the node for one family."""
    entries: dict[Key, Entry] = {
        Set(family, set_name(base, family)): declared.type for base, declared in SETS.items()
    }
    for address in node_port_addresses(plan, family):
        entries[Member(family, set_name(sets.NODE_PORT_IP, family), format_address(address))] = True
    chains = _Chains(plan, family, settings)
    entries |= {Chain(family, *chain): tuple(rules) for chain, rules in chains.by_chain().items()}
    for jump in _JUMPS:
        text = f"{comment(jump.comment)} -j {jump.target}"
        entries[Rule(family, jump.table, jump.source, text)] = RulePosition.FIRST
    return entries


def node_port_addresses(plan: NodePlan, family: Family) -> list[Address]:
    """Return the addresses that NodePorts answer on, sorted.

    A virtual server has one address, so local networks with more than one are not served. Loopback is not
    served, since packets from there do not leave the node, and neither are link-local addresses.
    """
    return sorted(
        net.address
        for net in plan.node_port_networks
        if net.length == _SINGLE
        and network_family(net) is family
        and not any(contains(unserved, net.address) for unserved in (*LOOPBACK, _LINK_LOCAL))
    )


class _Chains:
    """The chains of the mode for one family."""

    def __init__(self, plan: NodePlan, family: Family, settings: IpvsSettings) -> None:
        self._family = family
        self._settings = settings
        self._pods = plan.local_traffic.get(family)
        self._address = next(iter(node_port_addresses(plan, family)), None) if family is Family.IPV6 else None

    def by_chain(self) -> dict[tuple[str, str], Iterator[str]]:
        """Return the rules of each chain in order, by table and name."""
        mark = self._settings.masquerade_mark
        return {
            (NAT, chains.SERVICES): self._services(),
            (NAT, chains.LOAD_BALANCER): self._load_balancer(),
            (NAT, chains.NODE_PORT): self._node_port(),
            (NAT, chains.MARK_MASQ): iter((marking_rule(mark),)),
            (NAT, chains.POSTROUTING): self._postrouting(mark),
            (NAT, chains.IPVS_POSTROUTING): self._own_addresses(mark),
            (FILTER, chains.FORWARD): iter(forwarding_rules(mark)),
            (FILTER, chains.NODE_PORT): self._health_checks(),
            (FILTER, chains.PROXY_FIREWALL): self._proxy_firewall(),
            (FILTER, chains.SOURCE_RANGES_FIREWALL): self._source_ranges(),
            (FILTER, chains.IPVS_FILTER): self._ipvs_filter(),
            (MANGLE, chains.IPVS_OUT_FILTER): self._ipvs_out_filter(),
        }

    def _match(self, base: str, fields: str) -> str:
        return f"-m set --match-set {set_name(base, self._family)} {fields}"

    def _commented(self, base: str, fields: str) -> str:
        return f"{comment(SETS[base].comment)} {self._match(base, fields)}"

    def _services(self) -> Iterator[str]:
        """Yield the rules of KUBE-SERVICES. They mark connections for masquerading, and accept them so that
        no later rule of another program translates packets for IPVS.
        """
        yield f"-s {format_network(_LOOPBACK[self._family])} -j RETURN"
        yield f"{self._commented(sets.LOAD_BALANCER, 'dst,dst')} -j {chains.LOAD_BALANCER}"
        yield from self._cluster_ip()
        for base in (sets.EXTERNAL_IP, sets.EXTERNAL_IP_LOCAL):
            external = self._commented(base, "dst,dst")
            yield f"{external} {_MARK}" if base == sets.EXTERNAL_IP else f"{external} {_FROM_NODE} {_MARK}"
            yield f"{external} {_TO_NODE} -j ACCEPT"
        for base in (sets.CLUSTER_IP, sets.LOAD_BALANCER):
            yield f"{self._match(base, 'dst,dst')} -j ACCEPT"
        yield f"{self._match(sets.NODE_PORT_IP, 'dst')} -j {chains.NODE_PORT}"

    def _cluster_ip(self) -> Iterator[str]:
        """Yield the rule that marks connections to ClusterIPs for masquerading.

        A host-originated packet to an address on kube-ipvs0 also has that address as its source. So it is
        recognized even without local traffic detection.
        """
        if self._settings.masquerade_all:
            yield f"{self._commented(sets.CLUSTER_IP, 'dst,dst')} {_MARK}"
        elif self._pods is None:
            yield f"{self._commented(sets.CLUSTER_IP, 'src,dst')} {_MARK}"
        elif others := not_from_pods(self._pods):
            yield f"{others} {self._commented(sets.CLUSTER_IP, 'dst,dst')} {_MARK}"

    def _load_balancer(self) -> Iterator[str]:
        local = self._commented(sets.LOAD_BALANCER_LOCAL, "dst,dst")
        yield f"{local} {_FROM_NODE} {_MARK}"
        yield f"{local} -j RETURN"
        yield _MARK

    def _node_port(self) -> Iterator[str]:
        for protocol, base in sets.NODE_PORT.items():
            fields = "dst" if SETS[base].type == sets.BITMAP else "dst,dst"
            match = f"-p {protocol.name.lower()}"
            local = f"{match} {self._commented(sets.NODE_PORT_LOCAL[Protocol(protocol)], fields)}"
            yield f"{local} {_FROM_NODE} {_MARK}"
            yield f"{local} -j RETURN"
            yield f"{match} {self._commented(base, fields)} {_MARK}"

    def _postrouting(self, mark: int) -> Iterator[str]:
        """Yield the rules of KUBE-POSTROUTING. The first one masquerades hairpin connections: otherwise the
        endpoint would answer itself directly, past the node.
        """
        yield f"{self._commented(sets.LOOP_BACK, 'dst,dst,src')} -j MASQUERADE"
        yield from masquerading_rules(mark)

    def _own_addresses(self, mark: int) -> Iterator[str]:
        """Yield the rules of KUBE-IPVS-POSTROUTING.

        A host-originated connection to an address on kube-ipvs0 has that address as its source, and no reply
        would reach the node. As in `masquerading_rules`, the mark is cleared first.

        IPv6 masquerades with the destination itself if that is local, as that of an untranslated packet is.
        So such packets get an address of the node instead.

        The first and the last rule keep untranslated connections as they are, also those that a later rule
        would masquerade: what endpoints of this node reply, and what IPVS sends to endpoints. Translated
        connections match neither, because IPVS has replaced the frontend address before.
        """
        yield f"{self._commented(sets.UNTRANSLATED, 'src,src')} -j ACCEPT"
        own = self._commented(sets.IPVS_IPS, "src")
        yield f"{own} -j MARK --set-xmark 0x0/{mark:#x}"
        if self._address:
            untranslated = self._match(sets.UNTRANSLATED, "dst,dst")
            yield f"{own} {untranslated} -j SNAT --to-source {format_address(self._address)}"
        yield f"{own} -j MASQUERADE --random-fully"
        yield f"{self._commented(sets.UNTRANSLATED, 'dst,dst')} -j ACCEPT"

    def _health_checks(self) -> Iterator[str]:
        yield f"{self._commented(sets.HEALTH_CHECK_NODE_PORT, 'dst')} -j ACCEPT"

    def _proxy_firewall(self) -> Iterator[str]:
        yield f"{_NEW} {self._commented(sets.LOAD_BALANCER_FW, 'dst,dst')} -j {chains.SOURCE_RANGES_FIREWALL}"

    def _source_ranges(self) -> Iterator[str]:
        for base in _ALLOWED:
            yield f"{self._commented(base, 'dst,dst,src')} -j RETURN"
        yield "-j DROP"

    def _ipvs_out_filter(self) -> Iterator[str]:
        """Yield the rules for host-originated connections, which pass neither INPUT nor FORWARD.

        Connections to an address on kube-ipvs0 have that address as their source, unless their socket is
        bound to another one.
        """
        others = (f"-m set ! --match-set {set_name(base, self._family)} dst,dst,src" for base in _ALLOWED)
        yield " ".join([_NEW, self._commented(sets.LOAD_BALANCER_FW, "dst,dst"), *others, "-j DROP"])
        yield self._no_local()

    def _no_local(self) -> str:
        return f"{_NEW} {self._commented(sets.NO_LOCAL, 'dst,dst')} -j DROP"

    def _ipvs_filter(self) -> Iterator[str]:
        """Yield the rules of KUBE-IPVS-FILTER. They drop packets to frontends that have no endpoint with
        policy Local.

        They reject packets to addresses of Services on ports that no Service has. Otherwise these would reach
        sockets that listen on all local addresses (kubernetes issue 72236).
        """
        yield self._no_local()
        others = not_from_pods(self._pods) if self._pods else ""
        if others is not None:
            no_pods = f"{_NEW} {self._commented(sets.NO_LOCAL_BUT_PODS, 'dst,dst')} -j DROP"
            yield f"{others} {no_pods}" if others else no_pods
        for base in (sets.LOAD_BALANCER, sets.CLUSTER_IP, sets.EXTERNAL_IP, sets.EXTERNAL_IP_LOCAL):
            yield f"{self._match(base, 'dst,dst')} -j RETURN"
        yield f"{self._match(sets.HEALTH_CHECK_NODE_PORT, 'dst')} -j RETURN"
        yield f"{_PINGS[self._family]} -j RETURN"
        yield f"{_NEW} {self._match(sets.IPVS_IPS, 'dst')} -j {REJECT[self._family]}"
