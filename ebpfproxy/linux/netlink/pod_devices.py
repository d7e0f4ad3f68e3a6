"""Devices of pods, and the device of the node that leads to each: the other end of its pair (veth, netkit).

IFLA_LINK of one end is the index of the other one, in that one's network namespace. Drivers without a pair
(macvlan, ipvlan) have the index of a parent there, which does not refer back.
"""

import errno
import socket
from typing import NamedTuple

from ebpfproxy.errors import KernelError, NotFound, Rejected
from ebpfproxy.linux.netlink import links, netlink, rtnetlink
from ebpfproxy.model.address import V4_PREFIX, Address, Family, family

RTA_GATEWAY, RTA_VIA = 5, 18  # include/uapi/linux/rtnetlink.h; the second one of another family
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)


class PodDevice(NamedTuple):
    """Indexes of the pod's end, in the pod's network namespace, and of the other end, in the node's."""

    inner: int
    outer: int


def by_address() -> dict[Address, PodDevice]:
    """The devices of the calling thread's network namespace, which is a pod's, by each of their addresses.

    `outer` is a claim only: see `leads_to`. Raises KernelError.
    """
    return {
        address: PodDevice(device.ifindex, _counterpart(device.ifindex))
        for device in links.read()
        for address in device.addresses
    }


def has_gateway(destination: Address) -> bool:
    """Whether the calling thread's network namespace sends to an address by a gateway. Where it does not, it
    sends only while a neighbor answers for that very address. Raises Rejected.
    """
    v4 = family(destination) is Family.IPV4
    raw = destination[len(V4_PREFIX) :] if v4 else destination
    number = socket.AF_INET if v4 else socket.AF_INET6
    request = rtnetlink.ROUTE.pack(number, 8 * len(raw), 0, 0, 0, 0, 0, 0, 0)
    try:
        answers = netlink.get(
            socket.NETLINK_ROUTE, rtnetlink.RTM_GETROUTE, request + netlink.attribute(rtnetlink.RTA_DST, raw)
        )
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return False
        raise Rejected(f"cannot look up a route: {error.strerror or error}") from error
    found = dict(netlink.attributes(answers[0], rtnetlink.ROUTE.size)) if answers else {}
    return RTA_GATEWAY in found or RTA_VIA in found


def leads_to(pod: PodDevice) -> bool:
    """Whether both ends name each other. The calling thread is in the node's network namespace.

    Raises Rejected.
    """
    try:
        return _counterpart(pod.outer) == pod.inner
    except NotFound:
        return False


def _counterpart(ifindex: int) -> int:
    """The index of the other end. A kernel before feadc4b6cf42 (5.13) omits it where it is the same number.

    Raises NotFound where there is no such device, else Rejected.
    """
    try:
        answers = netlink.get(
            socket.NETLINK_ROUTE, rtnetlink.RTM_GETLINK, rtnetlink.LINK.pack(0, 0, ifindex, 0, 0)
        )
    except OSError as error:
        kind: type[KernelError] = NotFound if error.errno == errno.ENODEV else Rejected
        raise kind(f"cannot read the network device {ifindex}: {error.strerror or error}") from error
    for link in map(rtnetlink.link, answers):
        if rtnetlink.IFLA_LINK in link.attributes:
            return netlink.number(link.attributes[rtnetlink.IFLA_LINK])
    return ifindex
