"""Decides which virtual servers belong to Services (the agent's or kube-proxy's), and which to another
program. Pure.

A virtual server has no field for its owner. But either its address and port is in one of the mode's sets,
from before its creation until after its removal, or its address is on kube-ipvs0. The same is true of
kube-proxy.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Key, Member, Set
from ebpfproxy.backends.ipvs.sets import NAMES, member_text
from ebpfproxy.model.address import Address, Network, contains, parse_address
from ebpfproxy.plan.service_plan import Frontend


class Ownership(NamedTuple):
    """The data that identify the virtual servers of Services.

    - `frontends`: members of sets of addresses with ports.
    - `node_ports`: protocol and port of members of the sets without addresses.
    - `node_addresses`: the addresses that these answer on.
    - `on_device`: the addresses on kube-ipvs0.
    - `excluded`: networks in which only an exact match counts (--ipvs-exclude-cidrs).
    """

    frontends: frozenset[str]
    node_ports: frozenset[tuple[str, str]]
    node_addresses: frozenset[Address]
    on_device: frozenset[Address]
    excluded: tuple[Network, ...]

    def is_own(self, frontend: Frontend) -> bool:
        """Return whether a virtual server belongs to a Service. In excluded networks, its port must also
        match.
        """
        address, port, protocol = frontend
        if member_text(address, port, protocol) in self.frontends:
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
    """Return the ownership data. `found` has sets and members.

    `local`: the local networks of the node. They are used for kube-proxy's virtual servers, since it has no
    set of the addresses that NodePorts answer on.
    """
    frontends: set[str] = set()
    node_ports: set[tuple[str, str]] = set()
    node_addresses: set[Address] = set()
    has_node_port_ips = False
    for key in found:
        base = (
            NAMES[key.set if isinstance(key, Member) else key.name][0]
            if isinstance(key, Member | Set)
            else ""
        )
        if isinstance(key, Set):
            has_node_port_ips = has_node_port_ips or base == sets.NODE_PORT_IP
        elif isinstance(key, Member):
            if base in sets.WITH_PORT:
                frontends.add(key.text)
            elif base == sets.NODE_PORT_IP:
                node_addresses.add(parse_address(key.text))
            elif base in sets.NODE_PORT.values():
                node_ports.add((_PROTOCOL_OF[base], key.text))
    if not has_node_port_ips:
        addresses = (net.address for net in local if net.length == _SINGLE)
        node_addresses |= {each for each in addresses if not any(contains(net, each) for net in excluded)}
    return Ownership(
        frozenset(frontends), frozenset(node_ports), frozenset(node_addresses), on_device, excluded
    )


_SINGLE = 128
_PROTOCOL_OF = {base: protocol.name for protocol, base in sets.NODE_PORT.items()}
