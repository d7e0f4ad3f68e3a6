"""What all Services share in our tables: the base chains, the containers, and what leads to them.

As kube-proxy's nftables mode has it since 1.34: only the source ranges of load balancers are looked at
before DNAT. Who has no endpoint, and unused ports of ClusterIPs, are refused after it, at priority 0: what
was sent to an endpoint in spite of policy Local (a pod's or the node's own connection) is no longer for the
Service's address then, and goes through (kubernetes/kubernetes#131765, #132456). What an endpoint sends to
itself is found in a set, as in later versions (kubernetes/kubernetes#136499).

127.0.0.1:nodePort is not served, as in that mode: it would need the sysctl route_localnet, which lets
neighbors reach what only listens on loopback (CVE-2020-8558). NodePorts answer on all other addresses that
the plan names, where kube-proxy's default is the node's primary ones alone.
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
"""Ours alone: kube-proxy's `nodeport-ips` holds single addresses, and its type cannot be changed in place."""

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


def node_objects(node: NodePlan, of: Family, settings: NftablesSettings) -> Iterator[tuple[Key, Entry]]:
    """All entries of the node in one family."""
    for name, base in _BASE_CHAINS.items():
        hook = f"type {base.type} hook {base.hook} priority {base.priority}; policy accept;"
        yield Chain(of, name), ChainEntry(hook, base.rules)
    for name, rules in (_dispatch(node, of) | _masquerade(of, settings.masquerade_mark)).items():
        yield Chain(of, name), ChainEntry("", rules)
    yield from _containers(of)
    yield from _node_port_sets(node, of)


def _dispatch(node: NodePlan, of: Family) -> dict[str, tuple[str, ...]]:
    ip = nft_family(of)
    frontend = f"{ip} daddr . meta l4proto . th dport"
    node_port = "meta l4proto . th dport"
    here = _node_port_matches(node, of)
    local = "fib daddr type local " if of in node.node_ports_everywhere else ""
    rejection = "Reject traffic to invalid ports of ClusterIPs"
    return {
        "services": (
            f"{frontend} vmap @{SERVICE_IPS}",
            *(f"{local}{match} {node_port} vmap @{SERVICE_NODE_PORTS}" for match in here),
        ),
        "service-endpoints-check": (f"{frontend} vmap @{NO_ENDPOINT_SERVICES}",),
        "nodeport-endpoints-check": tuple(
            f"{match} {node_port} vmap @{NO_ENDPOINT_NODE_PORTS}" for match in here
        ),
        "firewall-check": (f"{frontend} vmap @{FIREWALL_IPS}",),
        "cluster-ips-check": (f'{ip} daddr @{CLUSTER_IPS} reject comment "{rejection}"',),
        REJECT_CHAIN: ("reject",),
    }


def _masquerade(of: Family, mark: int) -> dict[str, tuple[str, ...]]:
    """What is marked, and what an endpoint of this node sends to itself by way of a Service.

    The mark is taken away again, since the packet may come by once more when it has been encapsulated. Where
    the packet goes to is known only after DNAT, and no rule can compare two addresses; so there is a set of
    all that an endpoint may send to itself. `ct status dnat`: the node's own connections to its own address
    are none of a Service.
    """
    ip = nft_family(of)
    connection = f"{ip} saddr . {ip} daddr . meta l4proto . th dport"
    bit = f"0x{mark:08x}"
    return {
        MARK_FOR_MASQUERADE: (f"meta mark set meta mark | {bit}",),
        "masquerading": (
            f"meta mark & {bit} != 0x00000000 meta mark set meta mark ^ {bit} masquerade fully-random",
            f"ct status dnat {connection} @{HAIRPIN_CONNECTIONS} masquerade fully-random",
        ),
    }


def _containers(of: Family) -> Iterator[tuple[Key, Entry]]:
    address = _ADDRESS_TYPE[of]
    yield Set(of, CLUSTER_IPS), f"type {address};"
    yield Set(of, HAIRPIN_CONNECTIONS), f"type {address} . {address} . inet_proto . inet_service;"
    for name in (SERVICE_IPS, NO_ENDPOINT_SERVICES, FIREWALL_IPS):
        yield Map(of, name), f"type {address} . inet_proto . inet_service : verdict;"
    for name in (SERVICE_NODE_PORTS, NO_ENDPOINT_NODE_PORTS):
        yield Map(of, name), "type inet_proto . inet_service : verdict;"


def affinity_set(of: Family) -> str:
    """The declaration of a set of clients. Without a timeout: each rule that adds to it has one."""
    return f"type {_ADDRESS_TYPE[of]}; size 65535; flags dynamic,timeout;"


def _node_port_matches(node: NodePlan, of: Family) -> list[str]:
    ip = nft_family(of)
    if of in node.node_ports_everywhere:
        return [f"{ip} daddr != {_LOOPBACK_TEXT[of]}"]
    names = [NODE_PORT_IPS, NODE_PORT_NETWORKS] if _networks(node, of) else [NODE_PORT_IPS]
    return [f"{ip} daddr @{name}" for name in names]


def _node_port_sets(node: NodePlan, of: Family) -> Iterator[tuple[Key, Entry]]:
    if of in node.node_ports_everywhere:
        return
    yield Set(of, NODE_PORT_IPS), f"type {_ADDRESS_TYPE[of]};"
    for host in _node_port_networks(node, of):
        if host.length == 128:
            yield Element(of, NODE_PORT_IPS, range_text(network_range(host))), ElementEntry()
    networks = merged(map(network_range, _networks(node, of)))
    if networks:
        yield Set(of, NODE_PORT_NETWORKS), f"type {_ADDRESS_TYPE[of]}; flags interval;"
    for each in networks:
        yield Element(of, NODE_PORT_NETWORKS, range_text(each)), ElementEntry()


def _networks(node: NodePlan, of: Family) -> list[Network]:
    """Those of more than one address: the kernel's local table has such where another program put AnyIP
    routes."""
    return [net for net in _node_port_networks(node, of) if net.length < 128]


def _node_port_networks(node: NodePlan, of: Family) -> list[Network]:
    return [
        net
        for net in sorted(node.node_port_networks)
        if network_family(net) is of
        and not any(loop.length <= net.length and contains(loop, net.address) for loop in LOOPBACK)
    ]
