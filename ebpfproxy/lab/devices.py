"""Network devices: connections between network namespaces by ip(8), and offloads by ethtool's ioctl."""

import ctypes
import fcntl
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.lab.addresses import Pair
from ebpfproxy.lab.netns import Netns
from ebpfproxy.lab.pod import Pod
from ebpfproxy.linux.netns import netns

_SIOCETHTOOL = 0x8946


def ip(pod: Pod, *commands: str) -> None:
    """Run `ip` commands in the pod's network namespace, in one batch.

    Raises Unsupported if the kernel lacks a kind of device, otherwise KernelError with the error of ip.
    """
    done = subprocess.run(
        ["ip", "-n", pod.namespace, "-batch", "-"],
        input="\n".join(commands),
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        kind = Unsupported if "Unknown device type" in done.stderr else KernelError
        raise kind(f"ip -n {pod.namespace}: {done.stderr.strip()}")


def connect_routed(parent: Pod, gateway: Pair, child: Pod, device: str) -> None:
    """Connect both by a veth pair without a bridge, as the CNI plugin ptp does.

    The parent's end is named `device`. It has the gateway's address, and a route to the child's address. The
    child's end is named eth0; the child's default route is the gateway.
    """
    ip(
        parent,
        f"link add {device} type veth peer name eth0 netns {child.namespace}",
        f"addr add {gateway.v4}/32 dev {device}",
        f"addr add {gateway.v6}/128 dev {device} nodad",
        f"link set {device} up",
        f"route add {child.v4}/32 dev {device} src {gateway.v4}",
        f"route add {child.v6}/128 dev {device}",
    )
    ip(
        child,
        "link set lo up",
        f"addr add {child.v4}/32 dev eth0",
        f"addr add {child.v6}/128 dev eth0 nodad",
        "link set eth0 up",
        f"route add {gateway.v4}/32 dev eth0 scope link",
        f"route add {gateway.v6}/128 dev eth0",
        f"route add default via {gateway.v4}",
        f"route add default via {gateway.v6}",
    )


def connect_by_link(router: Pod, address: Pair, child: Pod, device: str) -> None:
    """Connect both by a veth pair with a network of two addresses in each family, /31 and /127.

    The router's end is named `device`, the child's eth0. The router, with `address`, is the default route of
    the child.
    """
    ip(
        router,
        f"link add {device} type veth peer name eth0 netns {child.namespace}",
        f"addr add {address.v4}/31 dev {device}",
        f"addr add {address.v6}/127 dev {device} nodad",
        f"link set {device} up",
    )
    ip(
        child,
        "link set lo up",
        f"addr add {child.v4}/31 dev eth0",
        f"addr add {child.v6}/127 dev eth0 nodad",
        "link set eth0 up",
        *_default(address),
    )


def connect_directly(node: Pod, outside: Pod) -> None:
    """Connect both by a veth pair in one network. Each is the other's default route; both ends are eth0."""
    ip(
        node,
        "link set lo up",
        f"link add eth0 type veth peer name eth0 netns {outside.namespace}",
        *_on_network(node),
    )
    ip(outside, "link set lo up", *_on_network(outside), *_default(Pair(node.v4, node.v6)))
    ip(node, *_default(Pair(outside.v4, outside.v6)))


def _on_network(pod: Pod) -> Iterator[str]:
    yield f"addr add {pod.v4}/24 dev eth0"
    yield f"addr add {pod.v6}/64 dev eth0 nodad"
    yield "link set eth0 up"


def _default(gateway: Pair) -> Iterator[str]:
    yield f"route add default via {gateway.v4}"
    yield f"route add default via {gateway.v6}"


# --- Offloads ---


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
