"""Routes as the kernel chooses them, for IPv4.

Everything acts in the network namespace of the calling thread. Numbers are of include/uapi/linux/rtnetlink.h.
"""

import errno
import socket
import struct

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import netlink, rtnetlink
from ebpfproxy.model.address import Address

RTA_SRC, RTA_IIF = 2, 3

_U32 = struct.Struct("=I")
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)
_NOT_ACCEPTED = (errno.EXDEV, errno.EINVAL)
"""For a packet whose source is reached by another device. Linux 6.18 gives EINVAL, as for all martians."""


def device_to(address: Address) -> int:
    """The index of the device by which the host would send to an IPv4 address; 0 where there is no route.

    Raises Rejected.
    """
    try:
        answers = _route(_attribute(rtnetlink.RTA_DST, address))
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return 0
        raise _unreadable(error) from error
    attributes = dict(netlink.attributes(answers[0], rtnetlink.ROUTE.size)) if answers else {}
    return netlink.number(attributes.get(rtnetlink.RTA_OIF))


def accepts(ifindex: int, source: Address, destination: Address) -> bool:
    """Whether the host accepts a packet that comes in by the device, from and to these IPv4 addresses.

    False where the reverse path filter (rp_filter) drops it, or where it is a martian for another reason.
    Marks count as 0. Raises Rejected.
    """
    asked = (
        _attribute(rtnetlink.RTA_DST, destination),
        _attribute(RTA_SRC, source),
        netlink.attribute(RTA_IIF, _U32.pack(ifindex)),
    )
    try:
        _route(*asked, source_length=32)
    except OSError as error:
        if error.errno in _NOT_ACCEPTED:
            return False
        raise _unreadable(error) from error
    return True


def _route(*attributes: bytes, source_length: int = 0) -> list[bytes]:
    request = rtnetlink.ROUTE.pack(socket.AF_INET, 32, source_length, 0, 0, 0, 0, 0, 0)
    return netlink.get(socket.NETLINK_ROUTE, rtnetlink.RTM_GETROUTE, request + b"".join(attributes))


def _attribute(kind: int, address: Address) -> bytes:
    return netlink.attribute(kind, address[-4:])


def _unreadable(error: OSError) -> Rejected:
    return Rejected(f"cannot look up a route: {error.strerror or error}")
