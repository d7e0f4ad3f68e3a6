"""Which virtual servers are a Service's, ours or kube-proxy's, and which are another program's. Pure.

A virtual server has no field for its owner. But its address and port is in one of our sets before it is made
and until it is gone, or its address is on kube-ipvs0; kube-proxy's likewise.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Key, Member, Set
from ebpfproxy.backends.ipvs.sets import NAMES, place
from ebpfproxy.model.address import Address, Network, contains, parse_address
from ebpfproxy.plan.service_plan import Frontend


class Ownership(NamedTuple):
    """`places`: members of sets of addresses with ports. `node_ports`: protocol and port, as members of the
    sets that have no addresses. `node_addresses`: where those answer. `on_device`: what is on kube-ipvs0.
    """

    places: frozenset[str]
    node_ports: frozenset[tuple[str, str]]
    node_addresses: frozenset[Address]
    on_device: frozenset[Address]
    excluded: tuple[Network, ...]

    def is_own(self, frontend: Frontend) -> bool:
        """In excluded networks only what is known to the port."""
        address, port, protocol = frontend
        if place(address, port, protocol) in self.places:
            return True
        if address in self.node_addresses and (protocol.name, str(port)) in self.node_ports:
            return True
        return address in self.on_device and not any(contains(net, address) for net in self.excluded)


def ownership(
    found: Iterable[Key],
    on_device: frozenset[Address],
    local: Collection[Network],
    excluded: tuple[Network, ...],
) -> Ownership:
    """`found`: sets and members. `local`: the node's own networks, for what kube-proxy left: it has no set of
    the addresses that NodePorts answer on.
    """
    places: set[str] = set()
    node_ports: set[tuple[str, str]] = set()
    node_addresses: set[Address] = set()
    has_addresses = False
    for key in found:
        base = (
            NAMES[key.set if isinstance(key, Member) else key.name][0]
            if isinstance(key, Member | Set)
            else ""
        )
        if isinstance(key, Set):
            has_addresses = has_addresses or base == sets.NODE_PORT_IP
        elif isinstance(key, Member):
            if base in sets.BY_PLACE:
                places.add(key.text)
            elif base == sets.NODE_PORT_IP:
                node_addresses.add(parse_address(key.text))
            elif base in sets.NODE_PORT.values():
                node_ports.add((_PROTOCOL_OF[base], key.text))
    if not has_addresses:
        addresses = (net.address for net in local if net.length == _SINGLE)
        node_addresses |= {each for each in addresses if not any(contains(net, each) for net in excluded)}
    return Ownership(frozenset(places), frozenset(node_ports), frozenset(node_addresses), on_device, excluded)


_SINGLE = 128
_PROTOCOL_OF = {base: protocol.name for protocol, base in sets.NODE_PORT.items()}
