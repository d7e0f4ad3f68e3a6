"""The Node we run on, and the addresses it has."""

import dataclasses

from ebpfproxy.model.address import Address, Network


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """Our own Node object. `zone` is "" where topology.kubernetes.io/zone is missing.

    `eligible` is whether load balancers may send to this node: not being deleted, and without the
    taint ToBeDeletedByClusterAutoscaler (KEP-3836). `addresses` is status.addresses of type InternalIP,
    `external_addresses` of type ExternalIP, in their order; `pod_cidrs` is spec.podCIDRs, where its pods have
    their addresses. Each is empty as long as none are given.
    """

    name: str
    zone: str = ""
    eligible: bool = True
    addresses: tuple[Address, ...] = ()
    pod_cidrs: tuple[Network, ...] = ()
    external_addresses: tuple[Address, ...] = ()
