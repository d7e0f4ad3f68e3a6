"""Node (core/v1): the object of the node on which the agent runs, and what is known of other nodes."""

import dataclasses
from typing import NamedTuple

from ebpfproxy.model.address import Address, Network


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """The Node object of this node.

    - `zone`: the label topology.kubernetes.io/zone, "" if it is missing.
    - `eligible`: whether load balancers may send traffic to this node. False if the Node is being deleted or
      has the taint ToBeDeletedByClusterAutoscaler (KEP-3836).
    - `addresses`: status.addresses of type InternalIP, in the API's order.
    - `pod_cidrs`: spec.podCIDRs, the networks of this node's pods.
    - `external_addresses`: status.addresses of type ExternalIP, in the API's order.

    - `dsr_port`: the UDP port that the Node announces (`PeerNode`), 0 if it announces none.

    The addresses and `pod_cidrs` are empty until the Node has such values.
    """

    name: str
    zone: str = ""
    eligible: bool = True
    addresses: tuple[Address, ...] = ()
    pod_cidrs: tuple[Network, ...] = ()
    external_addresses: tuple[Address, ...] = ()
    dsr_port: int = 0


class PeerNode(NamedTuple):
    """What this machine needs of any Node.

    - `addresses`: status.addresses of type InternalIP, in the API's order.
    - `dsr_port`: the UDP port at which the node accepts tunneled packets, by its own announcement. 0 if it
      accepts none.
    - `other_addresses`: all other IP addresses of status.addresses, in the API's order.
    """

    addresses: tuple[Address, ...] = ()
    dsr_port: int = 0
    other_addresses: tuple[Address, ...] = ()
