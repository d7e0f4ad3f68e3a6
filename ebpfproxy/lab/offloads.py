"""What a network device does in place of the stack: checksums, segmentation, and receive aggregation."""

import ctypes
import fcntl
import socket
import struct
from typing import NamedTuple

from ebpfproxy.lab.netns import Netns
from ebpfproxy.linux.netns import netns

_SIOCETHTOOL = 0x8946


class _Commands(NamedTuple):
    """ETHTOOL_G* and ETHTOOL_S* of include/uapi/linux/ethtool.h."""

    get: int
    set: int


# Segmentation needs checksums, so they come last when all is taken away, and first when given back.
_FEATURES = {
    "gro": _Commands(0x2B, 0x2C),
    "gso": _Commands(0x23, 0x24),
    "tso": _Commands(0x1E, 0x1F),
    "tx-checksumming": _Commands(0x16, 0x17),
}
NAMES = tuple(_FEATURES)


def set_offloads(place: Netns, device: str, on: bool) -> None:
    """All of them, as `ethtool -K DEVICE gro gso tso tx` does. Raises OSError."""
    features = list(_FEATURES.values())
    for feature in reversed(features) if on else features:
        _ethtool(place, device, feature.set, on)


def enabled(place: Netns, device: str) -> set[str]:
    """The names of those that are on. Raises OSError."""
    return {name for name, feature in _FEATURES.items() if _ethtool(place, device, feature.get, 0)}


def _ethtool(place: Netns, device: str, command: int, value: int) -> int:
    """struct ethtool_value: the command, and what it takes or gives back."""
    argument = ctypes.create_string_buffer(struct.pack("=II", command, value))
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(argument))
    with netns.entered(place.netns), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
    return int(struct.unpack_from("=II", argument.raw)[1])
