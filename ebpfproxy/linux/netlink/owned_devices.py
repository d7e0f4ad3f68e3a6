"""Dummy devices and tunnel devices that the agent creates, each with a note for its later runs.

The note is the device's alias (`ip link show`), so it exists exactly as long as the device. A tunnel device
here only receives: it removes the outer header of packets to its local address, from any sender. The outer
and the inner header are of the same family.

All functions act in the calling thread's network namespace. They use raw netlink, since pyroute2 runs an
event loop, which must not run in the namespace of a pod. Sources: include/uapi/linux/{if_link,if_tunnel}.h;
net/ipv4/ipip.c, net/ipv6/ip6_tunnel.c.
"""

import errno
import os
import socket
import struct
from typing import NamedTuple

from ebpfproxy.errors import KernelError, NotFound, Unsupported
from ebpfproxy.linux.netlink import iproute, links, netlink, rtnetlink
from ebpfproxy.linux.netlink.netlink import attribute
from ebpfproxy.model.address import V4_PREFIX, Address, Family, family, parse_address

_RTM_DELLINK = 17
_IFLA_IFALIAS = 20
_INFO_DATA = 2  # IFLA_INFO_DATA
_LOCAL, _PROTOCOL = 2, 9  # IFLA_IPTUN_*
_IPV6_IN_IPV6 = 41

DUMMY_ADDRESS: Address = parse_address("192.0.0.8")
"""The IPv4 dummy address (RFC 7600), which no host has."""

DUMMY = "dummy"
TUNNELS = {Family.IPV4: "ipip", Family.IPV6: "ip6tnl"}
"""The kinds of tunnel devices (IFLA_INFO_KIND)."""
MODULES = {DUMMY: "dummy", "ipip": "ipip", "ip6tnl": "ip6_tunnel"}
"""The kernel module of each kind."""


class OwnedDevice(NamedTuple):
    """`local`: the address of a tunnel device, None for a dummy device."""

    name: str
    ifindex: int
    kind: str
    up: bool
    note: str
    local: Address | None = None


def read(*prefixes: str) -> list[OwnedDevice]:
    """The dummy and tunnel devices whose names start with one of the prefixes. Raises Rejected."""
    try:
        found = links.dump()
    except OSError as error:
        raise _failure("cannot read the network devices", error) from error
    devices = map(_device, map(rtnetlink.link, found))
    return [each for each in devices if each.kind in MODULES and each.name.startswith(prefixes)]


def create(name: str, kind: str, local: Address | None = None) -> None:
    """Create a device. A dummy device stays down; a tunnel device is set up, and has the address `local`.

    Raises AlreadyExists, Unsupported if the kernel lacks the kind of device, else Rejected.
    """
    flags = rtnetlink.IFF_UP if local else 0
    info = attribute(rtnetlink.IFLA_INFO_KIND, kind.encode() + b"\0")
    if local:
        info += attribute(_INFO_DATA, _tunnel(local))
    body = (
        rtnetlink.LINK.pack(0, 0, 0, flags, flags) + _named(name) + attribute(rtnetlink.IFLA_LINKINFO, info)
    )
    try:
        netlink.change(
            socket.NETLINK_ROUTE, rtnetlink.RTM_NEWLINK, body, netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
        )
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            module = MODULES[kind]
            raise Unsupported(
                f"cannot create the device {name}: this kernel has no devices of kind {kind}",
                f"modprobe {module}",
            ) from error
        raise _failure(f"cannot create the device {name}", error) from error


def add_dummy_address(name: str) -> None:
    """Add DUMMY_ADDRESS, if it is missing. It is of scope host: no packet has it as its source.

    Raises NotFound, Rejected.
    """
    try:
        ifindex = socket.if_nametoindex(name)
        raw = attribute(rtnetlink.IFA_LOCAL, DUMMY_ADDRESS[len(V4_PREFIX) :])
        body = rtnetlink.ADDRESS.pack(socket.AF_INET, 32, 0, rtnetlink.RT_SCOPE_HOST, ifindex) + raw
        flags = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL
        netlink.change(socket.NETLINK_ROUTE, rtnetlink.RTM_NEWADDR, body, flags)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise _failure(f"cannot add an address to the device {name}", error) from error


def delete(name: str) -> bool:
    """Delete the device of that name; return whether it existed. Raises Rejected."""
    try:
        netlink.change(socket.NETLINK_ROUTE, _RTM_DELLINK, rtnetlink.LINK.pack(0, 0, 0, 0, 0) + _named(name))
    except OSError as error:
        if error.errno == errno.ENODEV:
            return False
        raise _failure(f"cannot delete the device {name}", error) from error
    return True


def note(name: str) -> str:
    """The note of a device of any kind, "" without one. Raises NotFound, Rejected."""
    try:
        found = rtnetlink.link_named(name)
    except OSError as error:
        raise _failure(f"cannot read the device {name}", error) from error
    if found is None:
        raise NotFound(f"network device {name} does not exist")
    return netlink.text(found.attributes.get(_IFLA_IFALIAS))


def set_note(name: str, text: str) -> None:
    """Set the note of a device, "" for none. Raises NotFound, Rejected."""
    body = rtnetlink.LINK.pack(0, 0, 0, 0, 0) + _named(name) + attribute(_IFLA_IFALIAS, text.encode())
    try:
        netlink.change(socket.NETLINK_ROUTE, rtnetlink.RTM_NEWLINK, body)
    except OSError as error:
        raise _failure(f"cannot set the alias of the device {name}", error) from error


def addresses() -> dict[int, set[Address]]:
    """The addresses of all devices of the network namespace, by ifindex. Raises Rejected."""
    try:
        found = netlink.dump(
            socket.NETLINK_ROUTE, rtnetlink.RTM_GETADDR, rtnetlink.ADDRESS.pack(0, 0, 0, 0, 0), strict=True
        )
    except OSError as error:
        raise _failure("cannot read the addresses", error) from error
    result: dict[int, set[Address]] = {}
    for message in found:
        number, _, _, _, ifindex = rtnetlink.ADDRESS.unpack_from(message)
        values = dict(netlink.attributes(message, rtnetlink.ADDRESS.size))
        raw = values.get(rtnetlink.IFA_LOCAL) or values.get(rtnetlink.IFA_ADDRESS, b"")
        address = Address(V4_PREFIX + raw if number == socket.AF_INET else raw)
        result.setdefault(ifindex, set()).add(address)
    return result


def _device(link: rtnetlink.Link) -> OwnedDevice:
    name = netlink.text(link.attributes.get(rtnetlink.IFLA_IFNAME))
    text = netlink.text(link.attributes.get(_IFLA_IFALIAS))
    raw = link.attributes.get(rtnetlink.IFLA_ADDRESS, b"")
    local = None
    if link.kind in TUNNELS.values() and len(raw) in (4, 16):
        local = Address(V4_PREFIX + raw if len(raw) == 4 else raw)
    return OwnedDevice(name, link.ifindex, link.kind, link.up, text, local)


def _tunnel(local: Address) -> bytes:
    """A tunnel device of IPv6 also takes IPv4 packets, unless its inner protocol is given."""
    if family(local) is Family.IPV4:
        return attribute(_LOCAL, local[len(V4_PREFIX) :])
    return attribute(_LOCAL, local) + attribute(_PROTOCOL, struct.pack("=B", _IPV6_IN_IPV6))


def _named(name: str) -> bytes:
    return attribute(rtnetlink.IFLA_IFNAME, name.encode() + b"\0")


def _failure(action: str, error: OSError) -> KernelError:
    number = error.errno or 0
    if number == errno.ENODEV:
        return NotFound(f"{action}: the device is gone")
    return iproute.error(number, action, error.strerror or os.strerror(number))
