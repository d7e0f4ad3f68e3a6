"""Route lookups, in the calling thread's network namespace (include/uapi/linux/rtnetlink.h)."""

import errno
from typing import NamedTuple

from ebpfproxy.linux.netlink import rtnetlink
from ebpfproxy.linux.netlink.netlink import rejecting
from ebpfproxy.model.address import Address

_LOOKUP = "cannot look up a route"
_NOT_ACCEPTED = (errno.EXDEV, errno.EINVAL)
"""The reverse path filter dropped the packet. Linux 6.18 returns EINVAL, as for all martians."""


class Route(NamedTuple):
    """The device to which the host sends, and the source address that it selects, None without one.

    Without a gateway, packets are sent only while a neighbor answers for the address itself. `gateway`: its
    address, None without one.
    """

    ifindex: int
    source: Address | None
    gateway: Address | None = None

    @property
    def has_gateway(self) -> bool:
        return self.gateway is not None


def route_to(address: Address) -> Route:
    """The route to an address of either family. The ifindex is 0 without a route. Raises Rejected."""
    with rejecting(_LOOKUP):
        try:
            found = rtnetlink.lookup(address)
        except OSError as error:
            if error.errno not in rtnetlink.NO_ROUTE:
                raise
            found = None
    return Route(found.hop.ifindex, found.source, found.hop.gateway) if found else Route(0, None)


def accepts(ifindex: int, source: Address, destination: Address) -> bool:
    """Whether the host accepts a packet with these IPv4 addresses that arrives at the device.

    False if the reverse path filter (rp_filter) drops it, or if it is a martian for another reason.
    The lookup assumes the mark 0. Raises Rejected.
    """
    with rejecting(_LOOKUP):
        try:
            rtnetlink.lookup(destination, source, arrives_by=ifindex)
        except OSError as error:
            if error.errno not in _NOT_ACCEPTED:
                raise
            return False
    return True
