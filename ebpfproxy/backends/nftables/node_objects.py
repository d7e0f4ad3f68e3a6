"""The objects that all Services share: base chains, containers, and the chains that look them up.

They follow kube-proxy's mode nftables since 1.34. Only source ranges of load balancers are checked before
DNAT. Connections without an endpoint, and unused ports of ClusterIPs, are rejected after DNAT, at priority 0;
those to addresses of a ServiceCIDR that no Service has are dropped.
A connection of a pod or the node that was translated in spite of policy Local no longer has the Service's
address then, and passes (kubernetes/kubernetes#131765, #132456).

As in that mode, 127.0.0.1:nodePort is not served: it requires the sysctl route_localnet, which exposes the
node's loopback services to neighbors (CVE-2020-8558). NodePorts answer on all other addresses in the plan,
while kube-proxy's default is only the node's primary addresses.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Entry,
    Key,
    Map,
    Set,
    nft_family,
)
from ebpfproxy.backends.nftables.port_ranges import Range, network_range, range_text, without
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.linux.nft import types
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.linux.nft.statements import (
    DROP,
    ChangeMark,
    Find,
    Marked,
    Masquerade,
    Match,
    Reject,
    SameByte,
    jump,
)
from ebpfproxy.model.address import Family, network_family
from ebpfproxy.plan.node_ports import LOOPBACK
from ebpfproxy.plan.service_plan import NodePlan

CLUSTER_IPS = "cluster-ips"
SERVICE_IPS = "service-ips"
SERVICE_NODE_PORTS = "service-nodeports"
NO_ENDPOINT_SERVICES = "no-endpoint-services"
NO_ENDPOINT_NODE_PORTS = "no-endpoint-nodeports"
FIREWALL_IPS = "firewall-ips"
EQUAL_BYTES = "equal-bytes"
AFFINITY = "affinity"
AFFINITY_MAX = 1 << 19
"""Clients of all endpoints with session affinity. The kernel reserves 8 bytes for each, if the set exists."""
NODE_PORT_IPS = "nodeport-ips"
NODE_PORT_NETWORKS = "nodeport-networks"
"""Not in kube-proxy: its `nodeport-ips` has single addresses, and the type of a set cannot be changed in
place.
"""

_MOST_SINGLE_ADDRESSES = 64
"""The longest range of adjacent addresses that is in `nodeport-ips`."""

NAT_PREROUTING, NAT_OUTPUT, NAT_POSTROUTING = NAT_CHAINS = (
    "nat-prerouting-first",
    "nat-output-first",
    "nat-postrouting-first",
)
"""They run before the NAT chains of other programs, which have the priorities -100 and 100, as do the chains
`nat-prerouting`, `nat-output` and `nat-postrouting` of kube-proxy. Of two chains with the same priority, the
newer one runs first: see decision 0073. The names differ from those of kube-proxy, since it could not take
over a chain of another priority: the kernel rejects the change.
"""

REJECT_CHAIN = "reject-chain"
MARK_FOR_MASQUERADE = "mark-for-masquerade"

_ADDRESS_TYPE = {Family.IPV4: "ipv4_addr", Family.IPV6: "ipv6_addr"}
_LOOPBACK_TEXT = {Family.IPV4: "127.0.0.0/8", Family.IPV6: "::1"}


class _BaseChain(NamedTuple):
    type: str
    hook: str
    priority: int
    rules: tuple[Rule, ...]


_NEW = Match("ct state", "new")
_NOT_LOCAL = Match("fib daddr type", "local", inverted=True)
"""A ClusterIP on a device of the node belongs to a program, such as NodeLocal DNSCache."""

_BASE_CHAINS = {
    "filter-prerouting-pre-dnat": _BaseChain(
        "filter", "prerouting", -110, (Rule(_NEW, jump("firewall-check")),)
    ),
    "filter-output-pre-dnat": _BaseChain("filter", "output", -110, (Rule(_NEW, jump("firewall-check")),)),
    "filter-input": _BaseChain(
        "filter",
        "input",
        0,
        (Rule(_NEW, jump("nodeport-endpoints-check")), Rule(_NEW, jump("service-endpoints-check"))),
    ),
    "filter-forward": _BaseChain(
        "filter",
        "forward",
        0,
        (Rule(_NEW, jump("service-endpoints-check")), Rule(_NEW, jump("cluster-ips-check"))),
    ),
    "filter-output": _BaseChain(
        "filter",
        "output",
        0,
        (Rule(_NEW, jump("service-endpoints-check")), Rule(_NEW, jump("cluster-ips-check"))),
    ),
    NAT_PREROUTING: _BaseChain("nat", "prerouting", -101, (Rule(jump("services")),)),
    NAT_OUTPUT: _BaseChain("nat", "output", -101, (Rule(jump("services")),)),
    NAT_POSTROUTING: _BaseChain("nat", "postrouting", 99, (Rule(jump("masquerading")),)),
}


def node_objects(node: NodePlan, family: Family, settings: NftablesSettings) -> Iterator[tuple[Key, Entry]]:
    """Yield all entries of the node in one family."""
    for name, base in _BASE_CHAINS.items():
        hook = f"type {base.type} hook {base.hook} priority {base.priority}; policy accept;"
        yield Chain(family, name), ChainEntry(hook, base.rules)
    for name, rules in (_dispatch(node, family) | _masquerade(family, settings.masquerade_mark)).items():
        yield Chain(family, name), ChainEntry("", rules)
    yield from _containers(family)
    yield from _node_port_sets(node, family)


def _dispatch(node: NodePlan, family: Family) -> dict[str, tuple[Rule, ...]]:
    ip = nft_family(family)
    node_port = "meta l4proto", "th dport"
    frontend = (f"{ip} daddr", *node_port)
    matches = _node_port_matches(node, family)
    local = (Match("fib daddr type", "local"),) if family in node.node_ports_everywhere else ()
    cluster_ip = f"{ip} daddr"
    rejection, dropping = (
        "Reject traffic to invalid ports of ClusterIPs",
        "Drop traffic to unallocated ClusterIPs",
    )
    own = sorted(net for net in node.service_cidrs if network_family(net) is family)
    unallocated = (Match(cluster_ip, range_text(network_range(net))) for net in own)
    return {
        "services": (
            Rule(Find(frontend, SERVICE_IPS, verdicts=True)),
            *(Rule(*local, match, Find(node_port, SERVICE_NODE_PORTS, verdicts=True)) for match in matches),
        ),
        "service-endpoints-check": (Rule(Find(frontend, NO_ENDPOINT_SERVICES, verdicts=True)),),
        "nodeport-endpoints-check": tuple(
            Rule(match, Find(node_port, NO_ENDPOINT_NODE_PORTS, verdicts=True)) for match in matches
        ),
        "firewall-check": (Rule(Find(frontend, FIREWALL_IPS, verdicts=True)),),
        "cluster-ips-check": (
            Rule(Match(cluster_ip, f"@{CLUSTER_IPS}"), _NOT_LOCAL, Reject(ip), comment=rejection),
            *(Rule(match, DROP, comment=dropping) for match in unallocated),
        ),
        REJECT_CHAIN: (Rule(Reject(ip)),),
    }


def _masquerade(family: Family, mark: int) -> dict[str, tuple[Rule, ...]]:
    """Return the rules for marked packets, and for hairpin connections.

    The mark is cleared, since an encapsulated packet may pass again. The destination is known only after
    DNAT, so both addresses are compared in postrouting, byte by byte, since no rule can compare more. The
    last byte is compared first: it differs in most connections. `ct status dnat` excludes host-originated
    connections to a local address that belong to no Service.
    """
    source, destination, length = (12, 16, 4) if family is Family.IPV4 else (8, 24, 16)
    same = [
        SameByte(source + offset, destination + offset, EQUAL_BYTES) for offset in reversed(range(length))
    ]
    return {
        MARK_FOR_MASQUERADE: (Rule(ChangeMark(mark)),),
        "masquerading": (
            Rule(Marked(mark), ChangeMark(mark, inverts=True), Masquerade()),
            Rule(Match("ct status", "dnat"), *same, Masquerade()),
        ),
    }


def _containers(family: Family) -> Iterator[tuple[Key, Entry]]:
    address = _ADDRESS_TYPE[family]
    yield Set(family, CLUSTER_IPS), f"type {address};"
    yield from _equal_bytes(family)
    for name in (SERVICE_IPS, NO_ENDPOINT_SERVICES, FIREWALL_IPS):
        yield Map(family, name), f"type {address} . inet_proto . inet_service : verdict;"
    for name in (SERVICE_NODE_PORTS, NO_ENDPOINT_NODE_PORTS):
        yield Map(family, name), "type inet_proto . inet_service : verdict;"


def _equal_bytes(family: Family) -> Iterator[tuple[Key, Entry]]:
    """Yield the set of all pairs of equal bytes, as an expression loads them."""
    yield Set(family, EQUAL_BYTES), "type mark . mark;"
    for byte in range(256):
        text = types.MARK.text(bytes((byte, 0, 0, 0)))
        yield Element(family, EQUAL_BYTES, f"{text} . {text}"), ElementEntry()


def affinity_set(family: Family) -> str:
    """Return the declaration of the set of clients with session affinity, each with the number of its
    endpoint.

    It has no timeout: each rule that adds to it has one.
    """
    return f"type {_ADDRESS_TYPE[family]} . mark; size {AFFINITY_MAX}; flags dynamic,timeout;"


def _node_port_matches(node: NodePlan, family: Family) -> list[Match]:
    ip = nft_family(family)
    if family in node.node_ports_everywhere:
        return [Match(f"{ip} daddr", _LOOPBACK_TEXT[family], inverted=True)]
    names = [NODE_PORT_IPS]
    if any(map(_is_long, _node_port_ranges(node, family))):
        names.append(NODE_PORT_NETWORKS)
    return [Match(f"{ip} daddr", f"@{name}") for name in names]


def _node_port_sets(node: NodePlan, family: Family) -> Iterator[tuple[Key, Entry]]:
    """Yield the addresses that accept NodePorts. The same addresses have the same form, whatever networks
    the plan has: without loopback, the addresses of short ranges one by one, and long ranges.
    """
    if family in node.node_ports_everywhere:
        return
    yield Set(family, NODE_PORT_IPS), f"type {_ADDRESS_TYPE[family]};"
    ranges = _node_port_ranges(node, family)
    long = [each for each in ranges if _is_long(each)]
    for each in ranges:
        for number in () if _is_long(each) else range(each.first, each.last + 1):
            yield Element(family, NODE_PORT_IPS, range_text(Range(number, number))), ElementEntry()
    if long:
        yield Set(family, NODE_PORT_NETWORKS), f"type {_ADDRESS_TYPE[family]}; flags interval;"
    for each in long:
        yield Element(family, NODE_PORT_NETWORKS, range_text(each)), ElementEntry()


def _is_long(range_: Range) -> bool:
    return range_.last - range_.first >= _MOST_SINGLE_ADDRESSES


def _node_port_ranges(node: NodePlan, family: Family) -> list[Range]:
    """Return the addresses of NodePorts in the smallest number of ranges, without loopback. Usually each is
    one address. The kernel's local table has networks if another program added AnyIP routes.
    """
    networks = [net for net in node.node_port_networks if network_family(net) is family]
    return without(map(network_range, networks), map(network_range, LOOPBACK))
