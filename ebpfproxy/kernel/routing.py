"""Routes as the kernel chooses them, and the rules by which it chooses a table; for IPv4.

Everything acts in the network namespace of the calling thread. Numbers are of include/uapi/linux/rtnetlink.h
and include/uapi/linux/fib_rules.h.
"""

import errno
import socket
import struct
from typing import NamedTuple

from ebpfproxy.errors import Rejected
from ebpfproxy.kernel import netlink, rtnetlink
from ebpfproxy.model.address import Address

RTM_GETRULE = 34
RTA_SRC, RTA_IIF = 2, 3
FRA_FWMARK, FRA_TABLE = 10, 15

_RULE = rtnetlink.ROUTE  # struct fib_rule_hdr has the layout of struct rtmsg
_U32 = struct.Struct("=I")
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)
_NOT_ACCEPTED = (errno.EXDEV, errno.EINVAL)
"""For a packet whose source is reached by another device. Linux 6.18 gives EINVAL, as for all martians."""


class Rule(NamedTuple):
    """`source_length` is the length of the source prefix in bits, 0 for any source; `mark` is 0 where the
    rule has none; `table` is RT_TABLE_*."""

    source_length: int
    mark: int
    table: int


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


def rules() -> tuple[Rule, ...]:
    """The routing rules of IPv4, in the order of their priority. Raises Rejected."""
    request = _RULE.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)
    try:
        found = netlink.dump(socket.NETLINK_ROUTE, RTM_GETRULE, request)
    except OSError as error:
        raise Rejected(f"cannot read the routing rules: {error.strerror or error}") from error
    return tuple(map(_rule, found))


def _rule(payload: bytes) -> Rule:
    _, _, source_length, _, table, _, _, _, _ = _RULE.unpack_from(payload)
    attributes = dict(netlink.attributes(payload, _RULE.size))
    # The header has room for tables below 256.
    table = netlink.number(attributes.get(FRA_TABLE)) or table
    return Rule(source_length, netlink.number(attributes.get(FRA_FWMARK)), table)


def _route(*attributes: bytes, source_length: int = 0) -> list[bytes]:
    request = rtnetlink.ROUTE.pack(socket.AF_INET, 32, source_length, 0, 0, 0, 0, 0, 0)
    return netlink.get(socket.NETLINK_ROUTE, rtnetlink.RTM_GETROUTE, request + b"".join(attributes))


def _attribute(kind: int, address: Address) -> bytes:
    return netlink.attribute(kind, address[-4:])


def _unreadable(error: OSError) -> Rejected:
    return Rejected(f"cannot look up a route: {error.strerror or error}")
