"""Which families a node uses: a mode that lacks one of them is the second choice of `auto`."""

import contextlib

from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import local_addresses
from ebpfproxy.model.address import Family, contains, network_family, parse_network
from ebpfproxy.plan.node_ports import LOOPBACK

_NOT_OF_THE_NODE = (*LOOPBACK, parse_network("169.254.0.0/16"), parse_network("fe80::/10"))


def used(config: Config) -> frozenset[Family]:
    """Those of the pods' networks (--cluster-cidr), and those in which the node has an address of its own.

    Loopback and link-local addresses do not count: a node has them where IPv6 is not used at all. Empty where
    the addresses cannot be read and no network is configured.
    """
    found = {network_family(net) for net in config.cluster_cidr}
    with contextlib.suppress(KernelError):
        for net in local_addresses.read():
            if not any(contains(other, net.address) for other in _NOT_OF_THE_NODE):
                found.add(network_family(net))
    return frozenset(found)
