"""The chains and rules that all Services of this node share. Pure.

The wording is kube-proxy's (iptablesJumpChains and syncProxyRules in pkg/proxy/iptables/proxier.go of
kubernetes).
"""

from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.iptables.layout import INVALID_DROPPED, LOCALNET_GUARD, SHARED_CHAINS, counting
from ebpfproxy.backends.iptables.settings import IptablesSettings
from ebpfproxy.backends.xtables import names
from ebpfproxy.backends.xtables.entries import (
    FILTER,
    MANGLE,
    NAT,
    Chain,
    Entry,
    Key,
    Rule,
    RulePosition,
    SharedChain,
)
from ebpfproxy.backends.xtables.rule_text import (
    comment,
    forwarding_rules,
    marking_rule,
    masquerading_rules,
)
from ebpfproxy.model.address import Family, Network, contains, format_network, network_family
from ebpfproxy.plan.node_ports import LOOPBACK
from ebpfproxy.plan.service_plan import NodePlan

_SINGLE = 128
"""The length of a network of one address, in both families."""
_LOOPBACK = {network_family(net): net for net in LOOPBACK}


class _Jump(NamedTuple):
    """A jump from a built-in chain, `source`, to a chain of the mode. `new`: only for new connections."""

    table: str
    source: str
    target: str
    comment: str = ""
    new: bool = False

    @property
    def text(self) -> str:
        state = "-m conntrack --ctstate NEW " if self.new else ""
        note = f"{comment(self.comment)} " if self.comment else ""
        return f"{state}{note}-j {self.target}"


_EXTERNAL = "kubernetes externally-visible service portals"
_PORTALS = "kubernetes service portals"
_LOAD_BALANCERS = "kubernetes load balancer firewall"

_JUMPS = (
    _Jump(FILTER, "INPUT", names.EXTERNAL_SERVICES, _EXTERNAL, new=True),
    _Jump(FILTER, "FORWARD", names.EXTERNAL_SERVICES, _EXTERNAL, new=True),
    _Jump(FILTER, "INPUT", names.NODE_PORTS, "kubernetes health check service ports"),
    _Jump(FILTER, "FORWARD", names.SERVICES, _PORTALS, new=True),
    _Jump(FILTER, "OUTPUT", names.SERVICES, _PORTALS, new=True),
    _Jump(FILTER, "FORWARD", names.FORWARD, "kubernetes forwarding rules"),
    _Jump(FILTER, "INPUT", names.PROXY_FIREWALL, _LOAD_BALANCERS, new=True),
    _Jump(FILTER, "OUTPUT", names.PROXY_FIREWALL, _LOAD_BALANCERS, new=True),
    _Jump(FILTER, "FORWARD", names.PROXY_FIREWALL, _LOAD_BALANCERS, new=True),
    _Jump(NAT, "OUTPUT", names.SERVICES, _PORTALS),
    _Jump(NAT, "PREROUTING", names.SERVICES, _PORTALS),
    _Jump(NAT, "POSTROUTING", names.POSTROUTING, "kubernetes postrouting rules"),
    _Jump(FILTER, "INPUT", names.FIREWALL),
    _Jump(FILTER, "OUTPUT", names.FIREWALL),
)
"""In the order in which kube-proxy prepends them. The last two also belong to the kubelet."""

LOOPBACK_GUARD: frozenset[Key] = frozenset(
    Rule(Family.IPV4, FILTER, chain, text)
    for chain, text in (
        (names.FIREWALL, LOCALNET_GUARD),
        *((jump.source, jump.text) for jump in _JUMPS if jump.target == names.FIREWALL),
    )
)
"""The rules that keep neighbors off 127.0.0.0/8: the guard, and the jumps to its chain."""

_NODE_PORTS_COMMENT = comment("kubernetes service nodeports; NOTE: this must be the last rule in this chain")


def node_entries(plan: NodePlan, family: Family, settings: IptablesSettings) -> dict[Key, Entry]:
    """Return the entries of the node for one family.

    For IPv4 they always include the guard of 127.0.0.0/8. kube-proxy has it only if NodePorts answer on
    loopback. The kubelet has the same rule in the same chain, so it must never be removed. Once set,
    route_localnet is never reset.
    """
    entries: dict[Key, Entry] = {SharedChain(family, *chain): () for chain in SHARED_CHAINS}
    for table in (MANGLE, NAT, FILTER):
        entries[Chain(family, table, names.CANARY)] = ()
    entries[Chain(family, NAT, names.POSTROUTING)] = masquerading_rules(
        settings.masquerade_mark, settings.random_fully
    )
    entries[Chain(family, NAT, names.MARK_MASQ)] = (marking_rule(settings.masquerade_mark),)
    entries[Chain(family, FILTER, names.FORWARD)] = tuple(_forward(settings))
    if family is Family.IPV4:
        entries[Rule(family, FILTER, names.FIREWALL, LOCALNET_GUARD)] = RulePosition.ANYWHERE
    for text in _node_ports(plan, family):
        entries[Rule(family, NAT, names.SERVICES, text)] = RulePosition.LAST
    for jump in _JUMPS:
        entries[Rule(family, jump.table, jump.source, jump.text)] = RulePosition.FIRST
    return entries


def answers_on_loopback(plan: NodePlan) -> bool:
    """Return whether NodePorts answer on an address in 127.0.0.0/8, which requires route_localnet."""
    own = (net for net in plan.node_port_networks if network_family(net) is Family.IPV4)
    return any(_overlap(net, _LOOPBACK[Family.IPV4]) for net in own)


def _forward(settings: IptablesSettings) -> Iterator[str]:
    """Yield the rules of KUBE-FORWARD.

    A packet that conntrack marks INVALID would reach the client with the endpoint's address, which causes a
    TCP reset (kubernetes issue 74839).
    """
    if not settings.tcp_be_liberal:
        count = f"{counting(INVALID_DROPPED)} " if settings.counts_packets else ""
        yield f"-m conntrack --ctstate INVALID {count}-j DROP"
    yield from forwarding_rules(settings.masquerade_mark)


def _node_ports(plan: NodePlan, family: Family) -> Iterator[str]:
    """Yield the jumps to KUBE-NODEPORTS, for all local addresses or one for each of some of them.

    NodePorts never work on ::1, since the kernel does not route packets from there off the node. On
    127.0.0.0/8 they require route_localnet. Networks in the local table, such as 127.0.0.0/8, are no address
    of a device, so they have no rule (GetNodeIPs in pkg/proxy/util/nodeport_addresses.go).
    """
    own = sorted(net for net in plan.node_port_networks if network_family(net) is family)
    loopback = _LOOPBACK[family]
    if family in plan.node_ports_everywhere:
        loopback_served = family is Family.IPV4 and answers_on_loopback(plan)
        exclusion = "" if loopback_served else f"! -d {format_network(loopback)} "
        yield f"{exclusion}{_NODE_PORTS_COMMENT} -m addrtype --dst-type LOCAL -j {names.NODE_PORTS}"
        return
    for net in own:
        if net.length == _SINGLE and (family is Family.IPV4 or net != loopback):
            yield f"-d {format_network(net)} {_NODE_PORTS_COMMENT} -j {names.NODE_PORTS}"


def _overlap(one: Network, other: Network) -> bool:
    return contains(one, other.address) or contains(other, one.address)
