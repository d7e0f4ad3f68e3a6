"""The objects that all Services share: base chains, containers, and the chains that look them up.

They follow kube-proxy's mode nftables since 1.34. Only source ranges of load balancers are checked before
DNAT. Connections without an endpoint, and unused ports of ClusterIPs, are rejected after DNAT, at priority 0.
A connection of a pod or the node that was translated in spite of policy Local no longer has the Service's
address then, and passes (kubernetes/kubernetes#131765, #132456). Hairpin connections are looked up in a set,
as in later versions (kubernetes/kubernetes#136499).

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
from ebpfproxy.backends.nftables.port_ranges import merged, network_range, range_text
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.model.address import Family, Network, contains, network_family
from ebpfproxy.plan.node_ports import LOOPBACK
from ebpfproxy.plan.service_plan import NodePlan

CLUSTER_IPS = "cluster-ips"
SERVICE_IPS = "service-ips"
SERVICE_NODE_PORTS = "service-nodeports"
NO_ENDPOINT_SERVICES = "no-endpoint-services"
NO_ENDPOINT_NODE_PORTS = "no-endpoint-nodeports"
FIREWALL_IPS = "firewall-ips"
HAIRPIN_CONNECTIONS = "hairpin-connections"
NODE_PORT_IPS = "nodeport-ips"
NODE_PORT_NETWORKS = "nodeport-networks"
"""Not in kube-proxy: its `nodeport-ips` has single addresses, and the type of a set cannot be changed in
place.
"""

REJECT_CHAIN = "reject-chain"
MARK_FOR_MASQUERADE = "mark-for-masquerade"

_ADDRESS_TYPE = {Family.IPV4: "ipv4_addr", Family.IPV6: "ipv6_addr"}
_LOOPBACK_TEXT = {Family.IPV4: "127.0.0.0/8", Family.IPV6: "::1"}


class _BaseChain(NamedTuple):
    type: str
    hook: str
    priority: int
    rules: tuple[str, ...]


_BASE_CHAINS = {
    "filter-prerouting-pre-dnat": _BaseChain(
        "filter", "prerouting", -110, ("ct state new jump firewall-check",)
    ),
    "filter-output-pre-dnat": _BaseChain("filter", "output", -110, ("ct state new jump firewall-check",)),
    "filter-input": _BaseChain(
        "filter",
        "input",
        0,
        ("ct state new jump nodeport-endpoints-check", "ct state new jump service-endpoints-check"),
    ),
    "filter-forward": _BaseChain(
        "filter",
        "forward",
        0,
        ("ct state new jump service-endpoints-check", "ct state new jump cluster-ips-check"),
    ),
    "filter-output": _BaseChain(
        "filter",
        "output",
        0,
        ("ct state new jump service-endpoints-check", "ct state new jump cluster-ips-check"),
    ),
    "nat-prerouting": _BaseChain("nat", "prerouting", -100, ("jump services",)),
    "nat-output": _BaseChain("nat", "output", -100, ("jump services",)),
    "nat-postrouting": _BaseChain("nat", "postrouting", 100, ("jump masquerading",)),
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


def _dispatch(node: NodePlan, family: Family) -> dict[str, tuple[str, ...]]:
    ip = nft_family(family)
    frontend = f"{ip} daddr . meta l4proto . th dport"
    node_port = "meta l4proto . th dport"
    matches = _node_port_matches(node, family)
    local_match = "fib daddr type local " if family in node.node_ports_everywhere else ""
    rejection = "Reject traffic to invalid ports of ClusterIPs"
    return {
        "services": (
            f"{frontend} vmap @{SERVICE_IPS}",
            *(f"{local_match}{match} {node_port} vmap @{SERVICE_NODE_PORTS}" for match in matches),
        ),
        "service-endpoints-check": (f"{frontend} vmap @{NO_ENDPOINT_SERVICES}",),
        "nodeport-endpoints-check": tuple(
            f"{match} {node_port} vmap @{NO_ENDPOINT_NODE_PORTS}" for match in matches
        ),
        "firewall-check": (f"{frontend} vmap @{FIREWALL_IPS}",),
        "cluster-ips-check": (f'{ip} daddr @{CLUSTER_IPS} reject comment "{rejection}"',),
        REJECT_CHAIN: ("reject",),
    }


def _masquerade(family: Family, mark: int) -> dict[str, tuple[str, ...]]:
    """Return the rules for marked packets, and for hairpin connections of local endpoints.

    The mark is cleared, since an encapsulated packet may pass again. The destination is known only after
    DNAT, and no rule can compare two addresses. So a set has all connections that an endpoint may open to
    itself. `ct status dnat` excludes host-originated connections to a local address that belong to no
    Service.
    """
    ip = nft_family(family)
    connection = f"{ip} saddr . {ip} daddr . meta l4proto . th dport"
    bit = f"0x{mark:08x}"
    return {
        MARK_FOR_MASQUERADE: (f"meta mark set meta mark | {bit}",),
        "masquerading": (
            f"meta mark & {bit} != 0x00000000 meta mark set meta mark ^ {bit} masquerade fully-random",
            f"ct status dnat {connection} @{HAIRPIN_CONNECTIONS} masquerade fully-random",
        ),
    }


def _containers(family: Family) -> Iterator[tuple[Key, Entry]]:
    address = _ADDRESS_TYPE[family]
    yield Set(family, CLUSTER_IPS), f"type {address};"
    yield Set(family, HAIRPIN_CONNECTIONS), f"type {address} . {address} . inet_proto . inet_service;"
    for name in (SERVICE_IPS, NO_ENDPOINT_SERVICES, FIREWALL_IPS):
        yield Map(family, name), f"type {address} . inet_proto . inet_service : verdict;"
    for name in (SERVICE_NODE_PORTS, NO_ENDPOINT_NODE_PORTS):
        yield Map(family, name), "type inet_proto . inet_service : verdict;"


def affinity_set(family: Family) -> str:
    """Return the declaration of a set of clients. It has no timeout: each rule that adds to it has one."""
    return f"type {_ADDRESS_TYPE[family]}; size 65535; flags dynamic,timeout;"


def _node_port_matches(node: NodePlan, family: Family) -> list[str]:
    ip = nft_family(family)
    if family in node.node_ports_everywhere:
        return [f"{ip} daddr != {_LOOPBACK_TEXT[family]}"]
    names = [NODE_PORT_IPS, NODE_PORT_NETWORKS] if _networks(node, family) else [NODE_PORT_IPS]
    return [f"{ip} daddr @{name}" for name in names]


def _node_port_sets(node: NodePlan, family: Family) -> Iterator[tuple[Key, Entry]]:
    if family in node.node_ports_everywhere:
        return
    yield Set(family, NODE_PORT_IPS), f"type {_ADDRESS_TYPE[family]};"
    for host in _node_port_networks(node, family):
        if host.length == 128:
            yield Element(family, NODE_PORT_IPS, range_text(network_range(host))), ElementEntry()
    networks = merged(map(network_range, _networks(node, family)))
    if networks:
        yield Set(family, NODE_PORT_NETWORKS), f"type {_ADDRESS_TYPE[family]}; flags interval;"
    for each in networks:
        yield Element(family, NODE_PORT_NETWORKS, range_text(each)), ElementEntry()


def _networks(node: NodePlan, family: Family) -> list[Network]:
    """Return the networks with more than one address. The kernel's local table has such networks if another
    program added AnyIP routes.
    """
    return [net for net in _node_port_networks(node, family) if net.length < 128]


def _node_port_networks(node: NodePlan, family: Family) -> list[Network]:
    return [
        net
        for net in sorted(node.node_port_networks)
        if network_family(net) is family
        and not any(
            loopback.length <= net.length and contains(loopback, net.address) for loopback in LOOPBACK
        )
    ]
