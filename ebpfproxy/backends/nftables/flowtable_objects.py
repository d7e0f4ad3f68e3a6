"""The objects that forward established flows of Services by a flowtable (--nftables-flowtable-devices).

A flow is added after one of its packets has passed all other chains of the forward hook, so that none of them
has dropped it. Only flows of Services are added: the destination to which the client connected is a frontend.
That a flow was translated is not enough, since other programs translate, too: the CNI plugin portmap and
container engines, for example. Their rules may have to see each packet.

Frontends of ClusterIPs are found in `cluster-ips`. The others cannot be looked up in the maps of the NAT
chains: most kernels reject a rule that ignores the value it finds in a map (nft_lookup_init()). So there is a
set for external and load balancer IPs, and one for NodePorts.
"""

from collections.abc import Iterator, Mapping

from ebpfproxy.backends.nftables.entries import (
    Chain,
    ChainEntry,
    Element,
    ElementEntry,
    Entry,
    Flowtable,
    FlowtableDevice,
    Key,
    Set,
    nft_family,
)
from ebpfproxy.backends.nftables.node_objects import (
    ADDRESS_TYPE,
    CLUSTER_IPS,
    SERVICE_IPS,
    SERVICE_NODE_PORTS,
    base_chain,
    node_port_sets,
)
from ebpfproxy.linux.nft.flowtables import DECLARATION
from ebpfproxy.linux.nft.rule import Rule
from ebpfproxy.model.address import Family
from ebpfproxy.plan.service_plan import NodePlan

FLOWTABLE = "services"
FLOW_IPS, FLOW_NODE_PORTS = SETS = "flow-ips", "flow-nodeports"
"""The frontends at external and load balancer IPs, and the NodePorts, of Services with endpoints."""
FORWARD_LAST, FLOW_OFFLOAD = CHAINS = "filter-forward-last", "flow-offload"

_SET_OF = {SERVICE_IPS: FLOW_IPS, SERVICE_NODE_PORTS: FLOW_NODE_PORTS}
_LAST = 300
"""The priority of the chain. Those of other programs are at most 100 (NF_IP_PRI_NAT_SRC)."""


def flowtable_objects(node: NodePlan, family: Family) -> Iterator[tuple[Key, Entry]]:
    """Yield the sets and, unless the node has no device for it, the flowtable with its chains."""
    yield Set(family, FLOW_IPS), f"type {ADDRESS_TYPE[family]} . inet_proto . inet_service;"
    yield Set(family, FLOW_NODE_PORTS), "type inet_proto . inet_service;"
    if node.flowtable_devices:
        yield Flowtable(family, FLOWTABLE), DECLARATION
        for ifindex, device in node.flowtable_devices:
            yield FlowtableDevice(family, FLOWTABLE, device), ifindex
        yield from _chains(node, family)


def _chains(node: NodePlan, family: Family) -> Iterator[tuple[Key, Entry]]:
    address, add = f"ct original {nft_family(family)} daddr", f"flow add @{FLOWTABLE}"
    port = "meta l4proto . ct original proto-dst"
    of_node = [key.name for key, _ in node_port_sets(node, family) if isinstance(key, Set)]
    established = f"ct state established ct status dnat jump {FLOW_OFFLOAD}"
    yield Chain(family, FORWARD_LAST), base_chain("filter", "forward", _LAST, established)
    rules = (
        f"{address} @{CLUSTER_IPS} {add}",
        f"{address} . {port} @{FLOW_IPS} {add}",
        *(f"{address} @{name} {port} @{FLOW_NODE_PORTS} {add}" for name in of_node),
    )
    yield Chain(family, FLOW_OFFLOAD), ChainEntry("", tuple(map(Rule, rules)))


def flow_elements(entries: Mapping[Key, Entry]) -> dict[Key, Entry]:
    """Return the elements for the frontends in the entries of a plan, without those of ClusterIPs."""
    return {
        Element(key.family, _SET_OF[key.container], key.key): ElementEntry()
        for key in entries
        if isinstance(key, Element) and key.container in _SET_OF and not _is_cluster_ip(key, entries)
    }


def _is_cluster_ip(key: Element, entries: Mapping[Key, Entry]) -> bool:
    address = key.key.partition(" ")[0]
    return key.container == SERVICE_IPS and Element(key.family, CLUSTER_IPS, address) in entries
