"""The keys and entries of the eBPF backend, and how they are derived from a plan. No I/O.

One ServicePort in one family is one entry, since it changes in one step. Ids and ranges of slots are not part
of an entry. They are allocated when the entry is written, and resolved when it is read back.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.hooks import Hook
from ebpfproxy.linux.netlink import geneve
from ebpfproxy.linux.netlink.on_link_routes import Path, Target
from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    Protocol,
    contains,
    format_network,
    network,
    unspecified,
)
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.service_plan import (
    By,
    DevicePlan,
    DeviceRole,
    FrontendKind,
    FrontendPlan,
    NodePlan,
    NoEndpointAction,
    PlannedEndpoints,
    PodNamespace,
    Scope,
    ServicePortPlan,
)

_HOST = 128  # the prefix length of one address, of both families
LOOPBACK = 1  # its ifindex in every network namespace


class ServicePortKey(NamedTuple):
    """A ServicePort in one family. `name` is "namespace/name:port", or "namespace/name" for an unnamed
    port."""

    name: str
    protocol: Protocol
    family: Family

    def __str__(self) -> str:
        return f"{self.name}/{self.protocol.name}/{self.family.value}"


class HookKey(NamedTuple):
    """A kernel hook that a program of ebpfproxy is attached to."""

    name: str

    def __str__(self) -> str:
        return self.name


class DeviceKey(NamedTuple):
    """A network device with the classifiers attached. A new device of the same name has another key."""

    ifindex: int
    name: str

    def __str__(self) -> str:
        return f"device {self.name}"


class TunnelSourceKey(NamedTuple):
    """A network of nodes from which this node accepts tunneled packets (direct server return)."""

    network: Network

    def __str__(self) -> str:
        return f"tunnel source {format_network(self.network)}"


class NamespaceKey(NamedTuple):
    """The network namespace of a pod whose sockets the socket path serves."""

    cookie: int

    def __str__(self) -> str:
        return f"netns {self.cookie}"


class NamespaceEntry(NamedTuple):
    """The sources of the pod's packets to Services, the unspecified address of the family for none known."""

    v4: Address
    v6: Address


class SourceKey(NamedTuple):
    """The source address for a network, at a device with several. `side` is abi.h's source_side."""

    ifindex: int
    side: int
    network: Network

    def __str__(self) -> str:
        return f"source of device {self.ifindex} to {format_network(self.network)}"


class FrontendEntry(NamedTuple):
    """A frontend. `kind` and `flags` are abi.h's service_kind and service_flag."""

    address: Address
    port: int
    protocol: int
    kind: int
    flags: int


class ServicePortEntry(NamedTuple):
    """A ServicePort in one family. `affinity_timeout` is in seconds, 0 for none.

    All tuples are sorted, and the endpoints by address and port. The endpoints have their weights.
    `source_ranges` apply to the frontends that are restricted. `algorithm` is abi.h's. `slow_start` is in
    seconds, 0 for none.

    `tunnels`: by endpoint, the node that accepts tunneled packets to it, None if none does. Empty for a
    ServicePort that has neither such an endpoint nor one on this node, or has no direct server return.
    """

    frontends: tuple[FrontendEntry, ...]
    endpoints: PlannedEndpoints
    affinity_timeout: int
    source_ranges: tuple[Network, ...] = ()
    algorithm: int = abi.ALGORITHM_RANDOM
    slow_start: int = 0
    tunnels: tuple[Address | None, ...] = ()


NO_BRIDGE = bytes(6)


class DeviceEntry(NamedTuple):
    """A device. `flags` are abi.h's device_flag without DEVICE_CLSACT. `sides`: where a classifier is
    attached.

    `v4` and `v6` are the addresses to masquerade with, the unspecified address of the family for none.
    `bridge`: the MAC address of its bridge, all zero for none.
    """

    flags: int
    v4: Address
    v6: Address
    sides: tuple[str, ...]
    bridge: bytes = NO_BRIDGE


INGRESS, EGRESS = "ingress", "egress"

_TUNNEL_ENTRY = DeviceEntry(abi.DEVICE_TUNNEL, unspecified(Family.IPV4), unspecified(Family.IPV6), (INGRESS,))
"""The Geneve device needs no egress program: ingress has translated or selected everything."""

Key = ServicePortKey | Network | HookKey | DeviceKey | TunnelSourceKey | NamespaceKey | SourceKey | Target
Entry = ServicePortEntry | int | str | DeviceEntry | NamespaceEntry | Address | Path
"""For a Network: abi.h's network_flag. For a SourceKey: the address. For a hook: its state, where ATTACHED is
the desired one. For a tunnel source: 1."""

ATTACHED, OUTDATED = "attached", "outdated"
BEHIND = "behind"
"""For a side of a device: another program runs before the required one, which must be moved before it."""

ALGORITHMS = {
    Algorithm.RANDOM: abi.ALGORITHM_RANDOM,
    Algorithm.ROUND_ROBIN: abi.ALGORITHM_ROUND_ROBIN,
    Algorithm.SOURCE_HASH: abi.ALGORITHM_SOURCE_HASH,
    Algorithm.MAGLEV: abi.ALGORITHM_MAGLEV,
    Algorithm.LEAST_CONNECTIONS: abi.ALGORITHM_LEAST_CONNECTIONS,
}
"""The algorithms that this mode honors, as abi.h's algorithm."""

SLOW_START = frozenset(ALGORITHMS) - {Algorithm.SOURCE_HASH, Algorithm.MAGLEV}
"""The algorithms with slow start. Hashes select the same endpoint on all nodes, so they have none."""

_SIDE = {By.NEXT_HOP: abi.SOURCE_OF_NEXT_HOP, By.DESTINATION: abi.SOURCE_OF_DESTINATION}
_KIND = {FrontendKind(name): number for number, name in abi.KINDS.items()}


def render(
    plans: Iterable[ServicePortPlan],
    node: NodePlan | None,
    hooks: Iterable[Hook],
    tunnel_device: int = 0,
    routes: bool = True,
) -> dict[Key, Entry]:
    """The desired entries of the plans. With a `node`, they include its networks and devices, and `hooks`.

    `tunnel_device`: the ifindex of the Geneve device, 0 if this node accepts no tunneled packets. `routes`:
    whether the kernel has what routes of on-link frontends need.
    """
    entries: dict[Key, Entry] = {}
    for plan in plans:
        key = ServicePortKey(str(plan.name), plan.name.protocol, plan.family)
        entries[key] = ServicePortEntry(
            tuple(sorted(_frontend(frontend, plan) for frontend in plan.frontends)),
            plan.endpoints.with_weights(plan.balancing.weights),
            plan.affinity_timeout if plan.frontends else 0,  # the maps store it with each frontend
            _source_ranges(plan),
            _algorithm(plan),
            _slow_start(plan),
            _tunnels(plan),
        )
    if node is not None:
        entries.update(_networks(node))
        entries.update({NamespaceKey(each.cookie): _namespace(each) for each in node.pod_namespaces})
        entries.update({DeviceKey(each.ifindex, each.name): _device(each) for each in node.devices})
        entries.update(_sources(node))
        entries.update({HookKey(hook.name): ATTACHED for hook in hooks})
        for address, table, ifindex, source in node.frontend_routes if routes else ():
            entries[Target(table, address)] = Path(ifindex, source)
        if tunnel_device:
            entries.update({TunnelSourceKey(each): 1 for each in node.tunnel_sources})
            entries[DeviceKey(tunnel_device, geneve.DEVICE)] = _TUNNEL_ENTRY
    return entries


def _algorithm(plan: ServicePortPlan) -> int:
    """The maps store it with each frontend. An algorithm that this mode cannot honor counts as missing."""
    requested = plan.balancing.algorithm
    return ALGORITHMS.get(requested, abi.ALGORITHM_RANDOM) if requested and plan.frontends else 0


def _slow_start(plan: ServicePortPlan) -> int:
    """Also stored with each frontend."""
    algorithm, _, slow_start, *_ = plan.balancing
    return slow_start if plan.frontends and (algorithm is None or algorithm in SLOW_START) else 0


def _tunnels(plan: ServicePortPlan) -> tuple[Address | None, ...]:
    """The maps store them with each endpoint that has one, or is on this node."""
    found = plan.balancing.tunnels
    return found if any(found) or (found and plan.endpoints.has(abi.ENDPOINT_ON_NODE)) else ()


def _source_ranges(plan: ServicePortPlan) -> tuple[Network, ...]:
    """All restricted frontends of a ServicePort have the same source ranges, those of its Service."""
    return tuple(sorted({net for each in plan.frontends if each.restricted for net in each.source_ranges}))


def _namespace(plan: PodNamespace) -> NamespaceEntry:
    return NamespaceEntry(plan.v4 or unspecified(Family.IPV4), plan.v6 or unspecified(Family.IPV6))


def _device(plan: DevicePlan) -> DeviceEntry:
    flags = {DeviceRole.POD: abi.DEVICE_POD, DeviceRole.GUEST: abi.DEVICE_GUEST}.get(plan.role, 0)
    if plan.layer3:
        flags |= abi.DEVICE_LAYER3
    if plan.peer_elsewhere:
        flags |= abi.DEVICE_PEER
    if plan.switched:
        flags |= abi.DEVICE_SWITCHED
    if plan.sources:
        flags |= abi.DEVICE_SOURCES
    return DeviceEntry(
        flags,
        plan.v4 or unspecified(Family.IPV4),
        plan.v6 or unspecified(Family.IPV6),
        (EGRESS,) if plan.role is DeviceRole.LOOPBACK else (INGRESS, EGRESS),
        plan.bridge.ljust(6, b"\0")[:6],
    )


def _sources(node: NodePlan) -> dict[Key, Entry]:
    return {
        SourceKey(device.ifindex, _SIDE[each.by], each.network): each.address
        for device in node.devices
        for each in device.sources
    }


def has_loopback(keys: Iterable[Key]) -> bool:
    """Whether loopback is one of the devices."""
    return any(isinstance(each, DeviceKey) and each.ifindex == LOOPBACK for each in keys)


def _frontend(plan: FrontendPlan, of: ServicePortPlan) -> FrontendEntry:
    flags = 0
    if plan.pod.scope is Scope.LOCAL:
        flags |= abi.SERVICE_INTERNAL_LOCAL
    if plan.outside.scope is Scope.LOCAL:
        flags |= abi.SERVICE_EXTERNAL_LOCAL
    if of.no_endpoint_action is NoEndpointAction.REJECT:
        flags |= abi.SERVICE_REJECT
    if plan.restricted:
        flags |= abi.SERVICE_RESTRICTED
        if plan.node_admitted:
            flags |= abi.SERVICE_NODE_ADMITTED
    if plan.pod.masquerade:
        flags |= abi.SERVICE_MASQUERADE_POD
    if plan.node.masquerade:
        flags |= abi.SERVICE_MASQUERADE_NODE
    if plan.outside.masquerade:
        flags |= abi.SERVICE_MASQUERADE_OUTSIDE
    if any(of.balancing.tunnels):
        flags |= abi.SERVICE_DSR
    return FrontendEntry(*plan.frontend, _KIND[plan.kind], flags)


def _networks(node: NodePlan) -> dict[Key, Entry]:
    """Each network has its own NodePort flag, since the kernel uses only the entry with the longest match."""
    answering = node.node_port_networks
    lengths = sorted({each.length for each in answering})  # few, while networks may be thousands
    found: dict[Key, Entry] = {}
    for net in node.local_networks | answering:
        flags = abi.NETWORK_LOCAL
        around = (network(net.address, length) for length in lengths if length <= net.length)
        if net in answering or any(each in answering for each in around):
            flags |= abi.NETWORK_NODE_PORTS
        if net.length == _HOST and net.address in node.addresses:
            flags |= abi.NETWORK_OF_NODE
        found[net] = flags
    found.update(dict.fromkeys(node.foreign_networks - found.keys(), abi.NETWORK_FOREIGN))
    # In a network of the node or its devices, an address that no Service has may be a machine's.
    wider = [net for net in found if isinstance(net, Network)]
    for cidr in node.service_cidrs:
        if not any(net.length <= cidr.length and contains(net, cidr.address) for net in wider):
            found[cidr] = abi.NETWORK_SERVICE_CIDR
    return found
