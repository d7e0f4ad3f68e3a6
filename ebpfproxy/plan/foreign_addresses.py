"""Addresses of frontends that may be another machine's.

Users and controllers write external IPs and load balancer IPs, and some write the addresses of machines: the
load balancer of k3s writes those of the nodes, and MetalLB (layer 2) one of the nodes' network that a speaker
announces. Connections to the Service's ports are the Service's, as with kube-proxy. Everything else at the
address, such as a ping or another port, is for the machine that has it.

A ClusterIP is virtual by definition, even if a device's network contains it.
"""

import enum
from collections.abc import Iterable

from ebpfproxy.model.address import Address, Network, contains, network
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device import LOOPBACK, Device
from ebpfproxy.plan.protected_addresses import is_local

_SINGLE = 128


class Elsewhere(enum.Enum):
    """Why an address may be another machine's."""

    OTHER_NODE = "the address is that of another Node"
    ON_LINK = "the address is in the network of a device, where another machine may have it"


def elsewhere(address: Address, state: ClusterState) -> Elsewhere | None:
    """Return why an address may be another machine's, None if it is this node's or virtual by all facts.

    Other Nodes are known only if all Nodes are watched (`ClusterState.node_addresses`).
    """
    if is_of_this_node(address, state):
        return None
    if address in state.node_addresses:
        return Elsewhere.OTHER_NODE
    if any(contains(net, address) for net in on_link_networks(state.devices)):
        return Elsewhere.ON_LINK
    return None


def foreign_networks(state: ClusterState) -> frozenset[Network]:
    """Return the networks and addresses for which `elsewhere` is not None.

    An address of this node in such a network is in `state.local_networks`, with a longer prefix.
    """
    local = {net.length for net in state.local_networks}
    others = {Network(each, _SINGLE) for each in state.node_addresses if not is_of_this_node(each, state)}
    return frozenset(
        net
        for net in on_link_networks(state.devices) | others
        if not any(
            network(net.address, length) in state.local_networks for length in local if length <= net.length
        )
    )


def on_link_networks(devices: Iterable[Device]) -> frozenset[Network]:
    """Return the networks in which devices that are up find other machines by ARP or neighbor discovery.

    For an address of its own length it is that address, or the peer's on a point-to-point device.
    """
    return frozenset(
        net for device in devices if device.up and device.link_type != LOOPBACK for net in device.networks
    )


def is_of_this_node(address: Address, state: ClusterState) -> bool:
    """Return whether the kernel delivers packets to the address locally, or the Node object has it."""
    if state.node and address in (*state.node.addresses, *state.node.external_addresses):
        return True
    return is_local(address, state)
