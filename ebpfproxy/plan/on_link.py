"""On-link frontends: addresses of Services to which the node has a route without a gateway.

The kernel sends a packet to such an address only once a machine has answered ARP or neighbor discovery for
it. For an address that this node itself announces, as with MetalLB (layer 2) and kube-vip, there is none. A
mode that translates packets after that step needs a route of its own for the address.
"""

from collections.abc import Collection, Iterable

from ebpfproxy.model.address import Address, Network, contains, is_unspecified, network
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device import Device
from ebpfproxy.plan.foreign_addresses import is_of_this_node
from ebpfproxy.plan.service_plan import DevicePlan, DeviceRole, FrontendRoute, ServicePortPlan


class FrontendAddresses:
    """The addresses of all frontends but NodePorts, and which of them are in on-link networks."""

    def __init__(self) -> None:
        self._counts: dict[Address, int] = {}
        self._changed: set[Address] = set()
        self._networks: frozenset[Network] = frozenset()
        self._lengths: tuple[int, ...] = ()
        self._found: frozenset[Address] = frozenset()

    def count(self, plan: ServicePortPlan, sign: int) -> None:
        """Add the addresses of a plan, or remove them: `sign` is 1 or -1."""
        for address in {each.frontend.address for each in plan.frontends}:
            if not is_unspecified(address):
                number = self._counts.pop(address, 0) + sign
                if number:
                    self._counts[address] = number
                self._changed.add(address)

    def on_link(self, devices: Iterable[Device]) -> frozenset[Address]:
        """Return the addresses in networks of on-link routes. Cheap without a change since the last call."""
        networks = frozenset(route.network for device in devices for route in device.on_link)
        if networks != self._networks:
            self._networks, self._found = networks, frozenset()
            self._lengths = tuple(sorted({net.length for net in networks}))
            self._changed = set(self._counts)
        if self._changed:
            found = {each for each in self._changed if each in self._counts and self._is_within(each)}
            self._found = (self._found - self._changed) | found
            self._changed.clear()
        return self._found

    def _is_within(self, address: Address) -> bool:
        return any(network(address, length) in self._networks for length in self._lengths)


def frontend_routes(
    addresses: Collection[Address], plans: Collection[DevicePlan], state: ClusterState
) -> frozenset[FrontendRoute]:
    """Return the routes that on-link frontends need: one in each table with an on-link route of an uplink.

    `addresses`: those of frontends (`FrontendAddresses.on_link`). `plans`: the devices that get programs.
    Without programs, or without an Ethernet header, a device needs no routes. An address of another Node
    needs none: that machine answers for it, and all packets to it would take the longer way.
    """
    uplinks = {each.ifindex for each in plans if each.role is DeviceRole.UPLINK and not each.layer3}
    candidates = [
        (route, device.ifindex)
        for device in state.devices
        if device.ifindex in uplinks
        for route in device.on_link
    ]
    return frozenset(
        FrontendRoute(address, route.table, ifindex, route.source)
        for route, ifindex in candidates
        for address in addresses
        if contains(route.network, address)
        and not any(contains(hole, address) for hole in route.holes)
        and not is_of_this_node(address, state)
        and address not in state.node_addresses
    )
