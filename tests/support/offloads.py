"""Offloads of network devices, by ethtool's ioctl."""

import ctypes
import fcntl
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.lab import Netns
from ebpfproxy.linux.netns import netns

_SIOCETHTOOL = 0x8946


class _Commands(NamedTuple):
    """ETHTOOL_G* and ETHTOOL_S* of include/uapi/linux/ethtool.h."""

    get: int
    set: int


# Segmentation depends on checksums: they are switched off last and switched on first.
_OFFLOADS = {
    "gro": _Commands(0x2B, 0x2C),
    "gso": _Commands(0x23, 0x24),
    "tso": _Commands(0x1E, 0x1F),
    "tx-checksumming": _Commands(0x16, 0x17),
}
OFFLOADS = tuple(_OFFLOADS)


def set_offloads(namespace: Netns, device: str, on: bool) -> None:
    """Switch all OFFLOADS on or off, as `ethtool -K DEVICE gro gso tso tx` does. Raises OSError."""
    commands = list(_OFFLOADS.values())
    for each in reversed(commands) if on else commands:
        _ethtool(namespace.netns, device, each.set, on)


def set_offload(namespace: Path, device: str, name: str, on: bool) -> None:
    """Switch one of OFFLOADS on or off. `namespace`: its path. Raises OSError."""
    _ethtool(namespace, device, _OFFLOADS[name].set, on)


def enabled_offloads(namespace: Netns, device: str) -> set[str]:
    """Return the names of the OFFLOADS that are on. Raises OSError."""
    return {name for name, each in _OFFLOADS.items() if _ethtool(namespace.netns, device, each.get, 0)}


def _ethtool(namespace: Path, device: str, command: int, value: int) -> int:
    """Run an ethtool command with struct ethtool_value; return the value in it afterwards."""
    argument = ctypes.create_string_buffer(struct.pack("=II", command, value))
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(argument))
    with netns.entered(namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
    return int(struct.unpack_from("=II", argument.raw)[1])
