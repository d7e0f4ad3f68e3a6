"""The Geneve device of direct server return: it sends packets of clients to other nodes, and receives them.

It has no remote address and no network identifier: the program that redirects a packet to it sets the node
and a Geneve option (`external` in ip-link(8)). Only its ingress program sees the packets that it receives,
which redirects or drops each of them. So the stack needs no route, address or reverse path filter for it. The
kernel looks up routes for a packet of this device only if the device forwards packets.

Sources: drivers/net/geneve.c, bpf_ipv4_fib_lookup() of net/core/filter.c. All functions act in the calling
thread's network namespace.
"""

import errno
import os
import socket
import struct
from typing import NamedTuple

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import iproute, links, netlink, rtnetlink
from ebpfproxy.linux.netlink.netlink import attribute

DEVICE = "ebpfproxy-gnv"

PORT = 6083
"""The usual UDP port. Other programs use that of Geneve itself, 6081."""

_KIND = "geneve"
_RTM_NEWLINK, _RTM_DELLINK = 16, 17
_INFO_DATA = 2  # IFLA_INFO_DATA
_PORT, _COLLECT_METADATA = 5, 6  # IFLA_GENEVE_*
_HINT = "modprobe geneve"
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
    if device and (device.port != port or not device.external):
        remove()
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
        _set_up(device.ifindex)
    return device.ifindex


def find(port: int = 0) -> int:
    """The ifindex of the device, 0 if it does not exist. Changes nothing. Raises Rejected.

    `port`: a device with another UDP port does not count. 0: any port.
    """
    device = _find()
    return device.ifindex if device and device.kind == _KIND and port in (0, device.port) else 0


def remove() -> bool:
    """Delete the device; return whether it existed. A device of another kind stays. Raises Rejected."""
    if not find():
        return False
    body = rtnetlink.LINK.pack(0, 0, 0, 0, 0) + attribute(rtnetlink.IFLA_IFNAME, DEVICE.encode() + b"\0")
    try:
        netlink.change(socket.NETLINK_ROUTE, _RTM_DELLINK, body)
    except OSError as error:
        if error.errno == errno.ENODEV:
            return False
        raise _failure("delete", error) from error
    return True


def path_mtu() -> int:
    """The smallest MTU of the devices of default routes, in bytes; 1500 without such a device.

    Packets to other nodes usually leave by such a device. Raises Rejected.
    """
    try:
        found = [rtnetlink.link(each) for each in links.dump()]
        default = links.default_devices(rtnetlink.routes(rtnetlink.RT_TABLE_MAIN, rtnetlink.RTN_UNICAST))
    except OSError as error:
        raise Rejected(f"cannot read the network devices: {error.strerror or error}") from error
    mtus = (
        netlink.number(each.attributes.get(rtnetlink.IFLA_MTU)) for each in found if each.ifindex in default
    )
    return min(filter(None, mtus), default=_DEFAULT_MTU)


def _create(port: int, ifindex: int) -> None:
    """Create the device, down, so that it receives nothing before it is configured."""
    data = attribute(_PORT, struct.pack("!H", port)) + attribute(_COLLECT_METADATA, b"")
    info = attribute(rtnetlink.IFLA_INFO_KIND, _KIND.encode() + b"\0") + attribute(_INFO_DATA, data)
    name = attribute(rtnetlink.IFLA_IFNAME, DEVICE.encode() + b"\0")
    body = rtnetlink.LINK.pack(0, 0, ifindex, 0, 0) + name + attribute(rtnetlink.IFLA_LINKINFO, info)
    try:
        netlink.change(socket.NETLINK_ROUTE, _RTM_NEWLINK, body, netlink.NLM_F_CREATE | netlink.NLM_F_EXCL)
    except OSError as error:
        if ifindex and error.errno in (errno.EBUSY, errno.EEXIST):
            _create(port, 0)  # another device has this ifindex
            return
        raise _failure("create", error, port) from error


def _set_up(ifindex: int) -> None:
    body = rtnetlink.LINK.pack(0, 0, ifindex, rtnetlink.IFF_UP, rtnetlink.IFF_UP)
    try:
        netlink.change(socket.NETLINK_ROUTE, _RTM_NEWLINK, body)
    except OSError as error:
        raise _failure("set up", error) from error


def _find() -> _Device | None:
    try:
        link = rtnetlink.link_named(DEVICE)
    except OSError as error:
        raise Rejected(f"cannot read the device {DEVICE}: {error.strerror or error}") from error
    if link is None:
        return None
    info = dict(netlink.attributes(link.attributes.get(rtnetlink.IFLA_LINKINFO, b""), 0))
    data = dict(netlink.attributes(info.get(_INFO_DATA, b""), 0))
    port = int.from_bytes(data.get(_PORT, b""), "big")
    return _Device(link.ifindex, link.kind, link.up, port, _COLLECT_METADATA in data)


def _failure(action: str, error: OSError, port: int = 0) -> KernelError:
    number = error.errno or 0
    message = f"cannot {action} the device {DEVICE}"
    if number == errno.EOPNOTSUPP:
        return Unsupported(f"{message}: this kernel has no devices of kind {_KIND}", _HINT)
    if number in (errno.EADDRINUSE, errno.EBUSY, errno.EEXIST):
        return AlreadyExists(
            f"{message}: UDP port {port} is in use", "select another port with --ebpf-dsr-port"
        )
    if number == errno.ENODEV:
        return NotFound(f"{message}: the device is gone")
    return iproute.error(number, message, error.strerror or os.strerror(number))
