"""Devices of pods, and the device of the node that leads to each: its peer in a veth or netkit pair.

IFLA_LINK of one device is the ifindex of its peer, in the network namespace of the peer. For drivers without
pairs (macvlan, ipvlan), IFLA_LINK is the ifindex of the parent. The parent does not refer back.
"""

import contextlib
import socket
import struct
from typing import NamedTuple

from ebpfproxy.errors import NotFound
from ebpfproxy.linux.netlink import links, netlink, rtnetlink
from ebpfproxy.linux.netlink.netlink import rejecting
from ebpfproxy.model.address import Address

RTM_GETNSID = 90  # include/uapi/linux/rtnetlink.h
NETNSA_NSID, NETNSA_FD = 1, 3  # include/uapi/linux/net_namespace.h
_NOT_ASSIGNED = struct.pack("=i", -1)
_GENERAL_SIZE = 4  # struct rtgenmsg, padded


class PodDevice(NamedTuple):
    """The ifindexes of the pod's device, in the pod's network namespace, and of its peer, in the node's."""

    inner: int
    outer: int


def by_address() -> dict[Address, PodDevice]:
    """The devices of the calling thread's network namespace, which is a pod's, by each of their addresses.

    Verify `outer` with `leads_to`. Raises KernelError.
    """
    found = {}
    for device in links.read():
        with contextlib.suppress(NotFound):  # it is gone since it was listed
            for address in device.addresses:
                found[address] = PodDevice(device.ifindex, _counterpart(device.ifindex))
    return found


def leads_to(pod: PodDevice) -> bool:
    """Whether both devices refer to each other. The calling thread is in the node's network namespace.

    Raises Rejected.
    """
    try:
        return _counterpart(pod.outer) == pod.inner
    except NotFound:
        return False


def are_linked_to(namespace: int) -> bool:
    """Whether a device of the calling thread's network namespace has its counterpart in another one.

    `namespace`: a descriptor of the other namespace. Addresses and ifindexes do not tell whose pods those
    of several nodes on one machine are: both can be equal. Raises Rejected.
    """
    found = links.all_links()
    with rejecting("cannot read the network namespaces of devices"):
        ids = ids_of(namespace)
    return any(each.attributes.get(rtnetlink.IFLA_LINK_NETNSID) in ids for each in found)


def ids_of(namespace: int) -> frozenset[bytes]:
    """The numbers by which IFLA_LINK_NETNSID names a namespace. `namespace`: a descriptor of it.

    The kernel assigns the number when it first shows a device with it, so dump the devices before. Raises
    OSError.
    """
    wanted = bytes(_GENERAL_SIZE) + netlink.encoded({NETNSA_FD: namespace})
    return frozenset(
        value
        for each in netlink.get(socket.NETLINK_ROUTE, RTM_GETNSID, wanted)
        for kind, value in netlink.attributes(each, _GENERAL_SIZE)
        if kind == NETNSA_NSID and value != _NOT_ASSIGNED
    )


def _counterpart(ifindex: int) -> int:
    """The ifindex of the peer. A kernel before feadc4b6cf42 (5.13) omits IFLA_LINK if both are equal.

    Raises NotFound if the device does not exist, else Rejected.
    """
    with rejecting(f"cannot read the network device {ifindex}"):
        link = rtnetlink.find_link(ifindex=ifindex)
    if link is None:
        raise NotFound(f"network device {ifindex} does not exist")
    return link.linked if rtnetlink.IFLA_LINK in link.attributes else ifindex
