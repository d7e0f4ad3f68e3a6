"""The address families that a node uses. `auto` prefers a mode that serves all of them."""

import contextlib

from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import local_addresses
from ebpfproxy.model.address import Family, contains, network_family, parse_network
from ebpfproxy.plan.node_ports import LOOPBACK

_IGNORED_NETWORKS = (*LOOPBACK, parse_network("169.254.0.0/16"), parse_network("fe80::/10"))


def used(config: Config) -> frozenset[Family]:
    """Return the families of the pod networks (--cluster-cidr), and those in which the node has an address.

    Loopback and link-local addresses do not count, since a node has them even if it does not use IPv6. Empty
    if the addresses cannot be read and no pod network is configured.
    """
    found = {network_family(net) for net in config.cluster_cidr}
    with contextlib.suppress(KernelError):
        for net in local_addresses.read():
            if not any(contains(ignored, net.address) for ignored in _IGNORED_NETWORKS):
                found.add(network_family(net))
    return frozenset(found)
