"""On which of this node's addresses NodePorts are answered (kube-proxy's --nodeport-addresses)."""

from collections.abc import Iterable, Iterator

from ebpfproxy.model.address import (
    V4_BITS,
    V4_PREFIX,
    Address,
    Family,
    Network,
    contains,
    network,
    network_family,
)
from ebpfproxy.model.node import Node
from ebpfproxy.plan.host_ips import host_ips
from ebpfproxy.plan.service_plan import PlanContext

LOOPBACK = (
    Network(Address(V4_PREFIX + bytes((127, 0, 0, 0))), V4_BITS + 8),
    Network(Address(bytes(15) + b"\x01"), 128),
)


def plan_node_ports(
    local_networks: frozenset[Network], node: Node | None, context: PlanContext
) -> frozenset[Network]:
    """What NodePorts are answered on, out of `local_networks`, the kernel's local table.

    - `node_port_primary`: the node's own address in each family, as far as it is local (see `host_ips`); as
      long as the Node was not seen, none but a bind address.
    - `node_port_cidrs`: what lies in them, too. Without `node_port_primary` a family that has none has
      all (NewNodePortAddresses in pkg/proxy/util/nodeport_addresses.go).
    - Loopback, of both families, only where `localhost_node_ports` lets it.
    """
    chosen = {net for of in Family for net in _matching(local_networks, of, context)}
    if context.node_port_primary:
        chosen |= _primary(local_networks, host_ips(node, context))
    if not context.localhost_node_ports:
        for hole in LOOPBACK:
            chosen = {part for net in chosen for part in _without(net, hole)}
    return frozenset(chosen)


def node_ports_everywhere(context: PlanContext) -> frozenset[Family]:
    """The families in which no option restricts NodePorts to some addresses; loopback does not count."""
    of_family = {of: [c for c in context.node_port_cidrs if network_family(c) is of] for of in Family}
    everything = {Family.IPV4: V4_BITS, Family.IPV6: 0}
    return frozenset(
        of
        for of, cidrs in of_family.items()
        if any(cidr.length == everything[of] for cidr in cidrs) or not (cidrs or context.node_port_primary)
    )


def _primary(local_networks: frozenset[Network], addresses: Iterable[Address]) -> set[Network]:
    return {
        Network(address, 128)
        for address in addresses
        if any(_overlap(Network(address, 128), net) for net in local_networks)
    }


def _matching(local_networks: frozenset[Network], of: Family, context: PlanContext) -> Iterable[Network]:
    ours = [net for net in local_networks if network_family(net) is of]
    cidrs = [cidr for cidr in context.node_port_cidrs if network_family(cidr) is of]
    if not cidrs and not context.node_port_primary:
        return ours
    return [part for net in ours for cidr in cidrs if (part := _overlap(net, cidr))]


def _overlap(one: Network, other: Network) -> Network | None:
    """What two networks of one family share: the smaller of them, or nothing."""
    large, small = (one, other) if one.length <= other.length else (other, one)
    if network_family(large) is not network_family(small):
        return None
    return small if contains(large, small.address) else None


def _without(net: Network, hole: Network) -> Iterator[Network]:
    """The parts of `net` that are not in `hole`.

    A local table may say that all of a family is local (AnyIP), loopback being a part of it.
    """
    shared = _overlap(net, hole)
    if shared is None:
        yield net
    elif shared != net:
        for length in range(net.length + 1, hole.length + 1):
            yield network(_flipped(hole.address, length - 1), length)


def _flipped(address: Address, bit: int) -> Address:
    """`address` with one bit turned over; bit 0 is the first on the wire."""
    return Address((int.from_bytes(address) ^ 1 << (127 - bit)).to_bytes(16))
