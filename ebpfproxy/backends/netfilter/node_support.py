"""What a node offers to the kernel's NAT: the tracking of SCTP, and the address families that it uses."""

import contextlib

from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import local_addresses
from ebpfproxy.model.address import Family, contains, network_family, parse_network
from ebpfproxy.plan.node_ports import LOOPBACK

_TRACKING = "net/netfilter/nf_conntrack_max"
_OF_SCTP = "net/netfilter/nf_conntrack_sctp_timeout_established"
"""It exists with CONFIG_NF_CT_PROTO_SCTP (nf_conntrack_standalone.c)."""


def sctp_is_unserved() -> str:
    """Return why no rule can translate SCTP, "" if rules can, or if conntrack is not loaded yet.

    Without connection tracking of SCTP, the kernel translates no port of it.
    """
    try:
        sysctl.read(_TRACKING)
    except KernelError:
        return ""
    try:
        sysctl.read(_OF_SCTP)
    except NotFound:
        return "this kernel has no connection tracking of SCTP"
    except KernelError:
        return ""
    return ""


_IGNORED_NETWORKS = (*LOOPBACK, parse_network("169.254.0.0/16"), parse_network("fe80::/10"))


def families_used(config: Config) -> frozenset[Family]:
    """Return the families of the pod networks (--cluster-cidr), and those in which the node has an address.
    `auto` prefers a mode that serves all of them.

    Loopback and link-local addresses do not count, since a node has them even if it does not use IPv6. Empty
    if the addresses cannot be read and no pod network is configured.
    """
    found = {network_family(net) for net in config.cluster_cidr}
    with contextlib.suppress(KernelError):
        for net in local_addresses.read():
            if not any(contains(ignored, net.address) for ignored in _IGNORED_NETWORKS):
                found.add(network_family(net))
    return frozenset(found)
