"""The objects that all Services share: base chains, containers, and the chains that look them up.

They follow kube-proxy's mode nftables since 1.34. Only source ranges of load balancers are checked before
DNAT. Connections without an endpoint, and unused ports of ClusterIPs, are rejected after DNAT, at priority 0;
those to addresses of a ServiceCIDR that no Service has are dropped.
A connection of a pod or the node that was translated in spite of policy Local no longer has the Service's
address then, and passes (kubernetes/kubernetes#131765, #132456).

No rule translates packets to NodePorts at loopback: see `localhost_node_ports`. NodePorts answer on all
addresses in the plan, while kube-proxy's default is only the node's primary addresses.
"""

from collections.abc import Iterator

from ebpfproxy.backends.nftables import localhost_node_ports
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
newer one runs first: see decision 0020. The names differ from those of kube-proxy, since it could not take
over a chain of another priority: the kernel rejects the change.
"""

REJECT_CHAIN = "reject-chain"
MARK_FOR_MASQUERADE = "mark-for-masquerade"

ADDRESS_TYPE = {Family.IPV4: "ipv4_addr", Family.IPV6: "ipv6_addr"}
"""The type of addresses in sets and maps."""
_LOOPBACK_TEXT = {Family.IPV4: "127.0.0.0/8", Family.IPV6: "::1"}


def base_chain(type_: str, hook: str, priority: int, *rules: str) -> ChainEntry:
    """Return a base chain with the policy accept."""
    text = f"type {type_} hook {hook} priority {priority}; policy accept;"
    return ChainEntry(text, tuple(map(Rule, rules)))


_CHECK_FIREWALL = "ct state new jump firewall-check"
_CHECK_ENDPOINTS = "ct state new jump service-endpoints-check"
_CHECK_NODE_PORTS = "ct state new jump nodeport-endpoints-check"
_CHECK_CLUSTER_IPS = "ct state new jump cluster-ips-check"
_BASE_CHAINS = {
    "filter-prerouting-pre-dnat": base_chain("filter", "prerouting", -110, _CHECK_FIREWALL),
    "filter-output-pre-dnat": base_chain("filter", "output", -110, _CHECK_FIREWALL),
    "filter-input": base_chain("filter", "input", 0, _CHECK_NODE_PORTS, _CHECK_ENDPOINTS),
    "filter-forward": base_chain("filter", "forward", 0, _CHECK_ENDPOINTS, _CHECK_CLUSTER_IPS),
    "filter-output": base_chain("filter", "output", 0, _CHECK_ENDPOINTS, _CHECK_CLUSTER_IPS),
    NAT_PREROUTING: base_chain("nat", "prerouting", -101, "jump services"),
    NAT_OUTPUT: base_chain("nat", "output", -101, "jump services"),
    NAT_POSTROUTING: base_chain("nat", "postrouting", 99, "jump masquerading"),
}


def node_objects(node: NodePlan, family: Family, settings: NftablesSettings) -> Iterator[tuple[Key, Entry]]:
    """Yield all entries of the node in one family."""
    for name, base in _BASE_CHAINS.items():
        yield Chain(family, name), base
    localhost = family in settings.localhost
    chains = _dispatch(node, family, localhost) | _masquerade(family, settings.masquerade_mark)
    for name, rules in chains.items():
        yield Chain(family, name), ChainEntry("", rules)
    if localhost:
        yield from localhost_node_ports.node_objects(family)
    yield from _containers(family)
    if family not in node.node_ports_everywhere or settings.flowtable:
        yield from node_port_sets(node, family)


def _dispatch(node: NodePlan, family: Family, localhost: bool) -> dict[str, tuple[Rule, ...]]:
    ip = nft_family(family)
    node_port = "meta l4proto . th dport vmap"
    frontend = f"{ip} daddr . {node_port}"
    matches = _node_port_matches(node, family)
    local = "fib daddr type local " if family in node.node_ports_everywhere else ""
    own = sorted(net for net in node.service_cidrs if network_family(net) is family)
    unallocated = (f"{ip} daddr {range_text(network_range(net))}" for net in own)
    foreign = "fib daddr type != local"
    dropping = f'{foreign} drop comment "Drop traffic to unallocated ClusterIPs"'
    return {
        "services": (
            Rule(f"{frontend} @{SERVICE_IPS}"),
            *(Rule(f"{local}{match} {node_port} @{SERVICE_NODE_PORTS}") for match in matches),
        ),
        "service-endpoints-check": (Rule(f"{frontend} @{NO_ENDPOINT_SERVICES}"),),
        "nodeport-endpoints-check": (
            *(Rule(f"{match} {node_port} @{NO_ENDPOINT_NODE_PORTS}") for match in matches),
            *([localhost_node_ports.check_rule(family)] if localhost else ()),
        ),
        "firewall-check": (Rule(f"{frontend} @{FIREWALL_IPS}"),),
        # A ClusterIP on a device of the node belongs to a program, such as NodeLocal DNSCache.
        "cluster-ips-check": (
            Rule(
                f"{ip} daddr @{CLUSTER_IPS} {foreign} reject "
                'comment "Reject traffic to invalid ports of ClusterIPs"'
            ),
            *(Rule(f"{match} {dropping}") for match in unallocated),
        ),
        REJECT_CHAIN: (Rule("reject"),),
    }


def _masquerade(family: Family, mark: int) -> dict[str, tuple[Rule, ...]]:
    """Return the rules for marked packets, and for hairpin connections.

    The mark is cleared, since an encapsulated packet may pass again. The destination is known only after
    DNAT, so both addresses are compared in postrouting, byte by byte, since no rule can compare more. The
    last byte is compared first: it differs in most connections. `ct status dnat` excludes host-originated
    connections to a local address that belong to no Service.
    """
    source, destination, length = (12, 16, 4) if family is Family.IPV4 else (8, 24, 16)
    same = " ".join(
        f"@nh,{8 * (source + offset)},8 . @nh,{8 * (destination + offset)},8 @{EQUAL_BYTES}"
        for offset in reversed(range(length))
    )
    bits = f"0x{mark:08x}"
    return {
        MARK_FOR_MASQUERADE: (Rule(f"meta mark set meta mark | {bits}"),),
        "masquerading": (
            Rule(
                f"meta mark & {bits} != 0x00000000 meta mark set meta mark ^ {bits} masquerade fully-random"
            ),
            Rule(f"ct status dnat {same} masquerade fully-random"),
        ),
    }


def _containers(family: Family) -> Iterator[tuple[Key, Entry]]:
    address = ADDRESS_TYPE[family]
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
    return f"type {ADDRESS_TYPE[family]} . mark; size {AFFINITY_MAX}; flags dynamic,timeout;"


def _node_port_matches(node: NodePlan, family: Family) -> list[str]:
    ip = nft_family(family)
    if family in node.node_ports_everywhere:
        return [f"{ip} daddr != {_LOOPBACK_TEXT[family]}"]
    names = [NODE_PORT_IPS]
    if any(map(_is_long, _node_port_ranges(node, family))):
        names.append(NODE_PORT_NETWORKS)
    return [f"{ip} daddr @{name}" for name in names]


def node_port_sets(node: NodePlan, family: Family) -> Iterator[tuple[Key, Entry]]:
    """Yield the addresses that accept NodePorts. The same addresses have the same form, whatever networks
    the plan has: without loopback, the addresses of short ranges one by one, and long ranges.
    """
    yield Set(family, NODE_PORT_IPS), f"type {ADDRESS_TYPE[family]};"
    ranges = _node_port_ranges(node, family)
    long = [each for each in ranges if _is_long(each)]
    for each in ranges:
        for number in () if _is_long(each) else range(each.first, each.last + 1):
            yield Element(family, NODE_PORT_IPS, range_text(Range(number, number))), ElementEntry()
    if long:
        yield Set(family, NODE_PORT_NETWORKS), f"type {ADDRESS_TYPE[family]}; flags interval;"
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
