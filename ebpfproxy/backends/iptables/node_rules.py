"""The chains and rules that all Services share on this node. Pure. In the words of kube-proxy
(iptablesJumpChains and syncProxyRules in pkg/proxy/iptables/proxier.go of kubernetes).
"""

from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.iptables.layout import LOCALNET_GUARD, SHARED_CHAINS
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
    is_everything,
    marking_rule,
    masquerading_rules,
)
from ebpfproxy.model.address import Family, Network, contains, format_network, network_family
from ebpfproxy.plan.node_ports import LOOPBACK
from ebpfproxy.plan.service_plan import NodePlan

_LOOPBACK = {network_family(net): net for net in LOOPBACK}


class _Jump(NamedTuple):
    """From a built-in chain, `source`, to one of ours. Where `new`, only what conntrack has not seen yet."""

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
"""In the order in which kube-proxy prepends them; the last two are the kubelet's as well."""

LOOPBACK_GUARD: frozenset[Key] = frozenset(
    Rule(Family.IPV4, FILTER, chain, text)
    for chain, text in (
        (names.FIREWALL, LOCALNET_GUARD),
        *((jump.source, jump.text) for jump in _JUMPS if jump.target == names.FIREWALL),
    )
)
"""The rules that keep neighbors from 127.0.0.0/8: the guard, and the jumps that lead packets to it."""

_NODE_PORTS_LAST = comment("kubernetes service nodeports; NOTE: this must be the last rule in this chain")


def node_entries(plan: NodePlan, family: Family, settings: IptablesSettings) -> dict[Key, Entry]:
    """What is there once for each family, whatever Services there are.

    The guard of 127.0.0.0/8 is always in it for IPv4, not only where NodePorts answer on loopback as with
    kube-proxy: the kubelet has the same rule in the same chain, so it must never be taken away, and
    route_localnet stays on for good where it was ever turned on.
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
    """Whether NodePorts answer on any of 127.0.0.0/8, for which the kernel needs route_localnet."""
    own = (net for net in plan.node_port_networks if network_family(net) is Family.IPV4)
    return any(_overlap(net, _LOOPBACK[Family.IPV4]) for net in own)


def _forward(settings: IptablesSettings) -> Iterator[str]:
    """What conntrack calls INVALID would reach the client with the endpoint's address, and end in a reset
    (kubernetes issue 74839)."""
    if not settings.tcp_be_liberal:
        yield "-m conntrack --ctstate INVALID -j DROP"
    yield from forwarding_rules(settings.masquerade_mark)


def _node_ports(plan: NodePlan, family: Family) -> Iterator[str]:
    """What is looked up in KUBE-NODEPORTS: what is sent to any address of this node, or to some of them.

    On ::1 NodePorts never work, since nothing leaves the node from there; nor on 127.0.0.0/8 unless
    route_localnet is on.
    """
    own = sorted(net for net in plan.node_port_networks if network_family(net) is family)
    loopback = _LOOPBACK[family]
    if family in plan.node_ports_everywhere:
        answered = family is Family.IPV4 and answers_on_loopback(plan)
        but = "" if answered else f"! -d {format_network(loopback)} "
        yield f"{but}{_NODE_PORTS_LAST} -m addrtype --dst-type LOCAL -j {names.NODE_PORTS}"
        return
    for net in own:
        if family is Family.IPV4 or net != loopback:
            where = "" if is_everything(net) else f"-d {format_network(net)} "
            yield f"{where}{_NODE_PORTS_LAST} -j {names.NODE_PORTS}"


def _overlap(one: Network, other: Network) -> bool:
    return contains(one, other.address) or contains(other, one.address)
