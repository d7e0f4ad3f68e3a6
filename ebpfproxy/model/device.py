"""Network devices of this node, and whether ebpfproxy's programs see their packets."""

from typing import NamedTuple

from ebpfproxy.model.address import Address, Network

ETHERNET, LOOPBACK = 1, 772
"""ARPHRD_ETHER and ARPHRD_LOOPBACK of include/uapi/linux/if_arp.h. Both have an Ethernet header."""

PAIRS = frozenset({"veth", "netkit"})
"""Kinds of devices that are created in pairs. Usually one end of a pair is in a pod's network namespace."""


class OnLinkRoute(NamedTuple):
    """A route without a gateway to several addresses: the kernel finds the machines that have them by ARP or
    neighbor discovery.

    - `table`: the number of the routing table (RT_TABLE_*).
    - `source`: the source address that the route requests, None for none.
    - `holes`: the networks within `network` that have more specific routes in the table, except single
      addresses.
    """

    table: int
    network: Network
    source: Address | None = None
    holes: tuple[Network, ...] = ()


class Device(NamedTuple):
    """A network device, as netlink describes it.

    - `kind`: IFLA_INFO_KIND (veth, vxlan, bridge, tun, ...), "" for hardware and loopback.
    - `link_type`: ARPHRD_*.
    - `master`: the ifindex of the bridge, bond or VRF of which the device is a port, 0 without one.
    - `master_kind`: the `kind` of that bridge, bond or VRF.
    - `addresses`: those of global scope, in the kernel's order. The kernel prefers the first of each family
      as a source.
    - `default_route`: whether a default route of the main table, of either family, uses the device.
    - `peer_elsewhere`: whether the device is one end of a pair whose other end is in another network
      namespace (IFLA_LINK_NETNSID).
    - `mac`: its link-layer address, 6 bytes for Ethernet, empty without one.
    - `connected`: the addresses of global scope that are not deprecated, in the kernel's order, each after
      its network.
    - `preferred`: the preferred source addresses of its routes, each after the network of next hops: that of
      the gateway alone, or the destination of a route without one.
    - `networks`: the networks of its addresses of global scope, sorted. They are on-link: the kernel finds
      the machines in them by ARP or neighbor discovery.
    - `on_link`: its on-link routes, which may be to other networks, sorted.
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
    networks: tuple[Network, ...] = ()
    mac: bytes = b""
    connected: tuple[tuple[Network, Address], ...] = ()
    preferred: tuple[tuple[Network, Address], ...] = ()
    on_link: tuple[OnLinkRoute, ...] = ()


class DeviceSide(NamedTuple):
    """A problem with ebpfproxy's program at one side of one device.

    - `side`: "ingress" or "egress".
    - `before`: programs and filters that run before ebpfproxy's program, in running order. What they do with
      packets is unknown.
    - `contested`: ebpfproxy moved its program to the first position, and a program of `before` took that
      position again at once.
    - `unreached`: packets pass the device, but none of them reach ebpfproxy's program.
    """

    device: str
    side: str
    before: tuple[str, ...] = ()
    contested: bool = False
    unreached: bool = False

    @property
    def position(self) -> int:
        """The position of ebpfproxy's program; 1 is the first."""
        return len(self.before) + 1

    @property
    def is_bypassed(self) -> bool:
        """Whether packets are known to pass the device without ebpfproxy."""
        return self.contested or self.unreached
