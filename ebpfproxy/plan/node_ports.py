"""The addresses of this node: its primary ones, and those that accept NodePorts (--nodeport-addresses)."""

from collections.abc import Iterable, Iterator

from ebpfproxy.model.address import (
    V4_BITS,
    V4_PREFIX,
    Address,
    Family,
    Network,
    contains,
    family,
    network,
    network_family,
)
from ebpfproxy.model.node import Node
from ebpfproxy.plan.service_plan import PlanContext, Role

_ADDRESS_BITS = 128

LOOPBACK = (
    Network(Address(V4_PREFIX + bytes((127, 0, 0, 0))), V4_BITS + 8),
    Network(Address(bytes(15) + b"\x01"), 128),
)
"""127.0.0.0/8 and ::1/128."""


class NodePortAddresses:
    """The addresses in `NodePlan.node_port_networks`, for fast lookups."""

    def __init__(self, networks: frozenset[Network] = frozenset()) -> None:
        self._addresses = frozenset(net.address for net in networks if net.length == _ADDRESS_BITS)
        self._networks = tuple(net for net in networks if net.length != _ADDRESS_BITS)
        self.networks = networks

    def __contains__(self, address: Address) -> bool:
        return address in self._addresses or any(contains(net, address) for net in self._networks)


def host_ips(node: Node | None, context: PlanContext) -> tuple[Address, ...]:
    """Return the node's primary addresses, at most one of each family.

    It is `context.bind_address`, else the Node's first InternalIP, else its first ExternalIP (GetNodeHostIPs
    in pkg/util/node/node.go, detectNodeIPs in cmd/kube-proxy/app/server.go). Without any of them the family
    has no address; kube-proxy uses loopback then, which serves no client.
    """
    bind_addresses = (context.bind_address,) if context.bind_address else ()
    node_addresses = (*node.addresses, *node.external_addresses) if node else ()
    primary: dict[Family, Address] = {}
    for address in (*bind_addresses, *node_addresses):
        primary.setdefault(family(address), address)
    return tuple(primary.values())


def plan_node_ports(
    local_networks: frozenset[Network], node: Node | None, context: PlanContext
) -> frozenset[Network]:
    """Return the part of `local_networks`, the kernel's local table, that accepts NodePorts.

    - `node_port_primary`: the node's primary addresses (`host_ips`), if they are local. While the Node is
      unknown, that is only the bind address.
    - `node_port_cidrs`: additionally, all local addresses in these networks.
    - Without `node_port_primary`, a family without a CIDR accepts NodePorts on all local addresses
      (NewNodePortAddresses in pkg/proxy/util/nodeport_addresses.go).
    - Loopback of both families is included only with `localhost_node_ports`.
    - An edge has no NodePorts.
    """
    if context.role is Role.EDGE:
        return frozenset()
    accepting = {net for each in Family for net in _matching(local_networks, each, context)}
    if context.node_port_primary:
        accepting |= _primary(local_networks, host_ips(node, context))
    if not context.localhost_node_ports:
        for loopback in LOOPBACK:
            accepting = {part for net in accepting for part in _without(net, loopback)}
    return frozenset(accepting)


def node_ports_everywhere(context: PlanContext) -> frozenset[Family]:
    """Return the families in which no option restricts NodePorts to some addresses.

    Whether loopback accepts NodePorts makes no difference.
    """
    cidrs_by_family = {
        each: [cidr for cidr in context.node_port_cidrs if network_family(cidr) is each] for each in Family
    }
    prefix_bits = {Family.IPV4: V4_BITS, Family.IPV6: 0}
    return frozenset(
        ip_family
        for ip_family, cidrs in cidrs_by_family.items()
        if any(cidr.length == prefix_bits[ip_family] for cidr in cidrs)
        or not (cidrs or context.node_port_primary)
    )


def _primary(local_networks: frozenset[Network], addresses: Iterable[Address]) -> set[Network]:
    return {
        Network(address, 128)
        for address in addresses
        if any(_intersection(Network(address, 128), net) for net in local_networks)
    }


def _matching(
    local_networks: frozenset[Network], ip_family: Family, context: PlanContext
) -> Iterable[Network]:
    local = [net for net in local_networks if network_family(net) is ip_family]
    cidrs = [cidr for cidr in context.node_port_cidrs if network_family(cidr) is ip_family]
    if not cidrs and not context.node_port_primary:
        return local
    return [part for net in local for cidr in cidrs if (part := _intersection(net, cidr))]


def _intersection(first: Network, second: Network) -> Network | None:
    """Return the smaller network if the other one contains it, None if they are disjoint."""
    large, small = (first, second) if first.length <= second.length else (second, first)
    if network_family(large) is not network_family(small):
        return None
    return small if contains(large, small.address) else None


def _without(net: Network, excluded: Network) -> Iterator[Network]:
    """Yield the parts of `net` that are not in `excluded`.

    `net` may contain `excluded`: a local table may list all addresses of a family as local (AnyIP).
    """
    shared = _intersection(net, excluded)
    if shared is None:
        yield net
    elif shared != net:
        for length in range(net.length + 1, excluded.length + 1):
            yield network(_with_inverted_bit(excluded.address, length - 1), length)


def _with_inverted_bit(address: Address, bit: int) -> Address:
    """Return `address` with one bit inverted; bit 0 is the most significant."""
    return Address((int.from_bytes(address) ^ 1 << (127 - bit)).to_bytes(16))
