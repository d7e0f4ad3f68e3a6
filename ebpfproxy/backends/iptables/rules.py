"""The chains and rules that all Services of this node share, and parts of the text of any rule. Pure.

Parts are in the order of iptables-save: addresses, devices, protocol, then the matches in the given order,
then the target. The wording is kube-proxy's (iptablesJumpChains and syncProxyRules in
pkg/proxy/iptables/proxier.go of kubernetes).
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.iptables import chains
from ebpfproxy.backends.iptables.chains import INVALID_DROPPED, LOCALNET_GUARD, SHARED_CHAINS, counting
from ebpfproxy.backends.iptables.entries import (
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
from ebpfproxy.model.address import (
    V4_BITS,
    Address,
    Family,
    Network,
    contains,
    family,
    format_address,
    format_network,
    network_family,
)
from ebpfproxy.plan.node_ports import LOOPBACK
from ebpfproxy.plan.service_plan import LocalTraffic, NodePlan


@dataclasses.dataclass(frozen=True, slots=True)
class IptablesSettings:
    """Settings of the iptables backend.

    - `masquerade_bit`: the bit of the packet mark that requests masquerading, 0 to 31.
    - `tcp_be_liberal`: the sysctl nf_conntrack_tcp_be_liberal is on, so packets that conntrack marks INVALID
      are not dropped. Configured or detected.
    - `localhost_node_ports`: NodePorts answer on 127.0.0.1, so that new connections to them are counted. The
      plan of the node defines which rules NodePorts have.
    - `counts_packets`: rules count packets with nfacct. Requires a kernel and tools with it. Detected.
    """

    masquerade_bit: int = 14
    tcp_be_liberal: bool = False
    localhost_node_ports: bool = True
    counts_packets: bool = False

    @property
    def counts_localhost(self) -> bool:
        """Whether connections to NodePorts on 127.0.0.0/8 are counted."""
        return self.counts_packets and self.localhost_node_ports

    @property
    def masquerade_mark(self) -> int:
        return 1 << self.masquerade_bit


_MAX_COMMENT = 255
"""The tools truncate longer comments: the kernel's XT_MAX_COMMENT_LEN is 256 with the zero byte."""

_MAX_DEVICE_NAME = 15
"""IFNAMSIZ without the zero byte. The + of a prefix also counts."""

_DENOMINATOR = 1 << 31
"""The kernel stores a probability as a multiple of one part in this."""

REJECT = {
    Family.IPV4: "REJECT --reject-with icmp-port-unreachable",
    Family.IPV6: "REJECT --reject-with icmp6-port-unreachable",
}


def comment(text: str) -> str:
    """Return the comment match. `text` must contain a / or a blank, so that the tools quote it, and nothing
    to escape.
    """
    return f'-m comment --comment "{text[:_MAX_COMMENT]}"'


def host(address: Address) -> str:
    """Return an address as a network with its length, which the tools print even for a single address."""
    return f"{format_address(address)}/{32 if family(address) is Family.IPV4 else 128}"


def is_everything(network: Network) -> bool:
    """Return whether the network covers its complete family. The tools print no match for it."""
    return network.length == (V4_BITS if network_family(network) is Family.IPV4 else 0)


def source(network: Network) -> str:
    """Return the match of the sources in a network, with a trailing blank; "" if it covers everything."""
    return "" if is_everything(network) else f"-s {format_network(network)} "


def from_pods(traffic: LocalTraffic) -> str:
    """Return the match of packets from pods, with a trailing blank; "" if all packets are from pods.

    >>> from_pods(LocalTraffic(interface="veth", prefix=True))
    '-i veth+ '
    """
    return source(traffic.network) if traffic.network else f"-i {_device(traffic)} "


def not_from_pods(traffic: LocalTraffic, destination: str = "") -> str | None:
    """Return the match of packets that are not from pods, to `destination` if given. None if there are no
    such packets.

    iptables-nft rejects a rule "not from everywhere".

    >>> not_from_pods(LocalTraffic(interface="cbr0"), "10.96.0.1/32")
    '-d 10.96.0.1/32 ! -i cbr0'
    """
    destinations = [f"-d {destination}"] if destination else []
    if not traffic.network:
        return " ".join([*destinations, f"! -i {_device(traffic)}"])
    if is_everything(traffic.network):
        return None
    return " ".join([f"! {source(traffic.network).rstrip()}", *destinations])


def _device(traffic: LocalTraffic) -> str:
    """Return the interface match. A prefix of the maximum length of a name is that name."""
    wildcard = traffic.prefix and len(traffic.interface) < _MAX_DEVICE_NAME
    return traffic.interface + "+" * wildcard


@functools.lru_cache(maxsize=4096)
def one_of(count: int) -> str:
    """Return the match of one connection in `count`, selected at random.

    kube-proxy writes ten decimals, the kernel stores the nearest number that it can represent, and the tools
    print it with eleven decimals.

    >>> one_of(3)
    '-m statistic --mode random --probability 0.33333333349'
    """
    parts = int(float(f"{1 / count:.10f}") * _DENOMINATOR + 0.5)
    return f"-m statistic --mode random --probability {parts / _DENOMINATOR:.11f}"


def marking_rule(mark: int) -> str:
    """Return the rule of KUBE-MARK-MASQ, which marks a packet for masquerading. Other bits of the mark do not
    change.

    >>> marking_rule(0x4000)
    '-j MARK --set-xmark 0x4000/0x4000'
    """
    return f"-j MARK --set-xmark {mark:#x}/{mark:#x}"


def masquerading_rules(mark: int) -> tuple[str, ...]:
    """Return the rules of KUBE-POSTROUTING. They clear the mark before masquerading, since a tunneled packet
    passes again.
    """
    note = comment("kubernetes service traffic requiring SNAT")
    return (
        f"-m mark ! --mark {mark:#x}/{mark:#x} -j RETURN",
        f"-j MARK --set-xmark {mark:#x}/0x0",
        f"{note} -j MASQUERADE --random-fully",
    )


def forwarding_rules(mark: int) -> tuple[str, ...]:
    """Return the rules of KUBE-FORWARD: marked packets, and packets of known connections, pass whatever the
    policy of FORWARD.
    """
    note = comment("kubernetes forwarding conntrack rule")
    return (
        f"{comment('kubernetes forwarding rules')} -m mark --mark {mark:#x}/{mark:#x} -j ACCEPT",
        f"{note} -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    )


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
    _Jump(FILTER, "INPUT", chains.EXTERNAL_SERVICES, _EXTERNAL, new=True),
    _Jump(FILTER, "FORWARD", chains.EXTERNAL_SERVICES, _EXTERNAL, new=True),
    _Jump(FILTER, "INPUT", chains.NODE_PORTS, "kubernetes health check service ports"),
    _Jump(FILTER, "FORWARD", chains.SERVICES, _PORTALS, new=True),
    _Jump(FILTER, "OUTPUT", chains.SERVICES, _PORTALS, new=True),
    _Jump(FILTER, "FORWARD", chains.FORWARD, "kubernetes forwarding rules"),
    _Jump(FILTER, "INPUT", chains.PROXY_FIREWALL, _LOAD_BALANCERS, new=True),
    _Jump(FILTER, "OUTPUT", chains.PROXY_FIREWALL, _LOAD_BALANCERS, new=True),
    _Jump(FILTER, "FORWARD", chains.PROXY_FIREWALL, _LOAD_BALANCERS, new=True),
    _Jump(NAT, "OUTPUT", chains.SERVICES, _PORTALS),
    _Jump(NAT, "PREROUTING", chains.SERVICES, _PORTALS),
    _Jump(NAT, "POSTROUTING", chains.POSTROUTING, "kubernetes postrouting rules"),
    _Jump(FILTER, "INPUT", chains.FIREWALL),
    _Jump(FILTER, "OUTPUT", chains.FIREWALL),
)
"""In the order in which kube-proxy prepends them. The last two also belong to the kubelet."""

LOOPBACK_GUARD: frozenset[Key] = frozenset(
    Rule(Family.IPV4, FILTER, chain, text)
    for chain, text in (
        (chains.FIREWALL, LOCALNET_GUARD),
        *((jump.source, jump.text) for jump in _JUMPS if jump.target == chains.FIREWALL),
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
        entries[Chain(family, table, chains.CANARY)] = ()
    entries[Chain(family, NAT, chains.POSTROUTING)] = masquerading_rules(settings.masquerade_mark)
    entries[Chain(family, NAT, chains.MARK_MASQ)] = (marking_rule(settings.masquerade_mark),)
    entries[Chain(family, FILTER, chains.FORWARD)] = tuple(_forward(settings))
    if family is Family.IPV4:
        entries[Rule(family, FILTER, chains.FIREWALL, LOCALNET_GUARD)] = RulePosition.ANYWHERE
    for text in _node_ports(plan, family):
        entries[Rule(family, NAT, chains.SERVICES, text)] = RulePosition.LAST
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
        yield f"{exclusion}{_NODE_PORTS_COMMENT} -m addrtype --dst-type LOCAL -j {chains.NODE_PORTS}"
        return
    for net in own:
        if net.length == _SINGLE and (family is Family.IPV4 or net != loopback):
            yield f"-d {format_network(net)} {_NODE_PORTS_COMMENT} -j {chains.NODE_PORTS}"


def _overlap(one: Network, other: Network) -> bool:
    return contains(one, other.address) or contains(other, one.address)
