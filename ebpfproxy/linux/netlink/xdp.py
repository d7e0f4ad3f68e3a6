"""XDP of network devices: the attached programs, and which devices send frames of XDP programs.

All functions act in the calling thread's network namespace. Sources: include/uapi/linux/{if_link,netdev}.h;
rtnl_xdp_fill() of net/core/rtnetlink.c; d3d854fd6a1d ("netdev-genl: create a simple family for netdev stuff",
6.3).
"""

import errno
import struct
import sys
from typing import NamedTuple

from ebpfproxy.linux.netlink import links, netlink
from ebpfproxy.linux.netlink.netlink import rejecting
from ebpfproxy.model.device import ETHERNET

_IFLA_XDP = 43
_DRIVER_PROGRAM, _SKB_PROGRAM, _DEVICE_PROGRAM = 5, 6, 7  # IFLA_XDP_*_PROG_ID (4.19, a25717d2b604)

_NETLINK_GENERIC = 16
_GENERIC = struct.Struct("=BBxx")  # struct genlmsghdr: cmd, version
_CONTROLLER, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 0x10, 3, 1, 2  # GENL_ID_CTRL, CTRL_*
_DEV_GET, _IFINDEX, _FEATURES = 1, 1, 3  # NETDEV_CMD_DEV_GET, NETDEV_A_DEV_*
RUNS, SENDS = 1, 4  # NETDEV_XDP_ACT_BASIC, NETDEV_XDP_ACT_NDO_XMIT

NATIVE, GENERIC, OFFLOADED = "native", "generic", "offloaded"


class XdpDevice(NamedTuple):
    """A device with Ethernet frames.

    - `address`: its Ethernet address, 6 bytes.
    - `programs`: the ids of its XDP programs by mode (NATIVE, GENERIC, OFFLOADED).
    - `has_vlans`: whether a VLAN device of this network namespace uses it.
    """

    ifindex: int
    name: str
    kind: str
    address: bytes
    programs: dict[str, int]
    has_vlans: bool


def devices() -> dict[int, XdpDevice]:
    """Every device with Ethernet frames, by ifindex. Raises Rejected."""
    found = links.all_links()
    below = {link.linked for link in found if link.kind == "vlan"}
    return {
        link.ifindex: XdpDevice(
            link.ifindex,
            link.name,
            link.kind,
            link.mac,
            _programs(link.attributes.get(_IFLA_XDP, b"")),
            link.ifindex in below,
        )
        for link in found
        if link.type == ETHERNET
    }


def _programs(attribute: bytes) -> dict[str, int]:
    parts = dict(netlink.attributes(attribute, 0))
    ids = {
        NATIVE: netlink.number(parts.get(_DRIVER_PROGRAM)),
        GENERIC: netlink.number(parts.get(_SKB_PROGRAM)),
        OFFLOADED: netlink.number(parts.get(_DEVICE_PROGRAM)),
    }
    return {mode: number for mode, number in ids.items() if number}


def features() -> dict[int, int]:
    """The XDP features of each device by ifindex: RUNS, programs in native mode; SENDS, it now accepts frames
    that programs of other devices redirect (ndo_xdp_xmit).

    SENDS depends on the peer of a veth device. For other drivers it may depend on an attached program. Empty
    if the kernel does not report features (before Linux 6.3). Raises Rejected.
    """
    with rejecting("cannot read the XDP features of devices"):
        family = _family()
        if not family:
            return {}
        payloads = netlink.dump(_NETLINK_GENERIC, family, _GENERIC.pack(_DEV_GET, 1))
    found = (dict(netlink.attributes(payload, _GENERIC.size)) for payload in payloads)
    return {
        netlink.number(each.get(_IFINDEX)): int.from_bytes(each.get(_FEATURES, b""), sys.byteorder)
        for each in found
    }


def _family() -> int:
    """The id of the generic netlink family netdev. 0 if the kernel has none."""
    request = _GENERIC.pack(_GET_FAMILY, 1) + netlink.encoded({_FAMILY_NAME: "netdev"})
    try:
        replies = netlink.get(_NETLINK_GENERIC, _CONTROLLER, request)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return 0
        raise
    attributes = dict(netlink.attributes(replies[0], _GENERIC.size)) if replies else {}
    return int.from_bytes(attributes.get(_FAMILY_ID, b""), sys.byteorder)
