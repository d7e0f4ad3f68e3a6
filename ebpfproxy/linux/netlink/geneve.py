"""The Geneve device of direct server return: it sends packets of clients to other nodes, and receives them.

It has no remote address and no network identifier: the program that redirects a packet to it sets the node
and a Geneve option (`external` in ip-link(8)). Only its ingress program sees the packets that it receives,
which redirects or drops each of them. So the stack needs no route, address or reverse path filter for it. The
kernel looks up routes for a packet of this device only if the device forwards packets.

Sources: drivers/net/geneve.c, bpf_ipv4_fib_lookup() of net/core/filter.c. All functions act in the calling
thread's network namespace.
"""

import contextlib
from typing import Any, NamedTuple

from ebpfproxy.errors import AlreadyExists, Rejected
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import iproute, links, netlink, rtnetlink
from ebpfproxy.linux.netlink.netlink import rejecting

DEVICE = "ebpfproxy-gnv"

PORT = 6083
"""The usual UDP port. Other programs use that of Geneve itself, 6081."""

_KIND = "geneve"
_PORT, _COLLECT_METADATA = 5, 6  # IFLA_GENEVE_*
_DEFAULT_MTU = 1500


class _Device(NamedTuple):
    ifindex: int
    kind: str
    up: bool
    port: int
    external: bool


def ensure(port: int, ifindex: int = 0) -> int:
    """Create the device, or repair what differs; return its ifindex.

    `ifindex`: the one that a new device gets if it is free, 0 for any. If nothing differs, nothing is
    written.

    Raises AlreadyExists if another program uses the name or the port, Unsupported if the kernel has no Geneve
    devices, else Rejected.
    """
    device = _find()
    if device and device.kind != _KIND:
        raise AlreadyExists(
            f"device {DEVICE} is another program's, of kind {device.kind or 'unknown'}",
            "rename or delete that device",
        )
    try:
        return _ensure(device, port, ifindex)
    except AlreadyExists as failure:
        message = f"cannot create the device {DEVICE}: UDP port {port} is in use"
        raise AlreadyExists(message, "select another port with --ebpf-dsr-port") from failure


def _ensure(device: _Device | None, port: int, ifindex: int) -> int:
    """Raises AlreadyExists if the port is in use."""
    if device and (device.port != port or not device.external):
        iproute.delete(DEVICE, device.ifindex)
        device = None
    if device is None:
        _create(port, ifindex)
        device = _find()
    if device is None:
        raise Rejected(
            f"cannot create the device {DEVICE}: another program deleted it at once",
            "check for another process that manages this interface",
        )
    for family in ("ipv4", "ipv6"):
        if (sysctl.ROOT / f"net/{family}/conf/{DEVICE}").is_dir():
            sysctl.ensure(f"net/{family}/conf/{DEVICE}/forwarding", "1")
    if (sysctl.ROOT / f"net/ipv6/conf/{DEVICE}").is_dir():
        sysctl.ensure(f"net/ipv6/conf/{DEVICE}/addr_gen_mode", "1")  # IN6_ADDR_GEN_MODE_NONE
    if not device.up:
        iproute.configure(DEVICE, state="up")
    return device.ifindex


def find(port: int = 0) -> int:
    """The ifindex of the device, 0 if it does not exist. Changes nothing. Raises Rejected.

    `port`: a device with another UDP port does not count. 0: any port.
    """
    device = _find()
    return device.ifindex if device and device.kind == _KIND and port in (0, device.port) else 0


def remove() -> bool:
    """Delete the device; return whether it existed. A device of another kind stays. Raises Rejected."""
    ifindex = find()
    return bool(ifindex) and iproute.delete(DEVICE, ifindex)


def path_mtu() -> int:
    """The smallest MTU of the devices of default routes, in bytes; 1500 without such a device.

    Packets to other nodes usually leave by such a device. Raises Rejected.
    """
    with rejecting("cannot read the network devices"):
        found = rtnetlink.links()
        default = links.default_devices(rtnetlink.routes(rtnetlink.RT_TABLE_MAIN, rtnetlink.RTN_UNICAST))
    return min((each.mtu for each in found if each.ifindex in default and each.mtu), default=_DEFAULT_MTU)


def _create(port: int, ifindex: int) -> None:
    """Create the device, down, so that it receives nothing before it is configured."""
    details: dict[str, Any] = {"geneve_port": port, "geneve_collect_metadata": True}
    if ifindex:
        with contextlib.suppress(AlreadyExists):  # another device may have this ifindex
            iproute.create(DEVICE, _KIND, index=ifindex, **details)
            return
    iproute.create(DEVICE, _KIND, **details)


def _find() -> _Device | None:
    link = iproute.find(DEVICE)
    if link is None:
        return None
    data = dict(netlink.attributes(link.details, 0))
    port = int.from_bytes(data.get(_PORT, b""), "big")
    return _Device(link.ifindex, link.kind, link.up, port, _COLLECT_METADATA in data)
