"""A network device of this node, as the kernel describes it."""

from typing import NamedTuple

from ebpfproxy.model.address import Address

ETHERNET, LOOPBACK = 1, 772
"""ARPHRD_ETHER and ARPHRD_LOOPBACK of include/uapi/linux/if_arp.h; both have an Ethernet header."""

PAIRS = frozenset({"veth", "netkit"})
"""Kinds of devices that are made in pairs, of which one end mostly is a pod's."""


class Device(NamedTuple):
    """`kind` is IFLA_INFO_KIND (veth, vxlan, bridge, tun, ...), "" for hardware and for loopback.

    `link_type` is ARPHRD_*; `master` is the index of the bridge, bond or VRF that it is a part of, 0 for
    none; `master_kind` that one's kind. `addresses` are of global scope, in the kernel's order, so the
    first of each family is the one that the kernel would masquerade with. `default_route`: whether a
    default route of the main table leads there, in either family. `peer_elsewhere`: it is one end of a pair,
    and the other end is in another network namespace (IFLA_LINK_NETNSID).
    """

    ifindex: int
    name: str
    kind: str
    link_type: int
    up: bool
    master: int = 0
    master_kind: str = ""
    addresses: tuple[Address, ...] = ()
    default_route: bool = False
    peer_elsewhere: bool = False
