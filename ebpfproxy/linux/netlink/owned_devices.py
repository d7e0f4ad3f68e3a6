"""Dummy devices and tunnel devices that the agent creates, each with a note for its later runs.

The note is the device's alias (`ip link show`), so it exists exactly as long as the device. A tunnel device
here only receives: it removes the outer header of packets to its local address, from any sender. The outer
and the inner header are of the same family.

All functions act in the calling thread's network namespace. Sources: include/uapi/linux/if_tunnel.h;
net/ipv4/ipip.c, net/ipv6/ip6_tunnel.c.
"""

from typing import NamedTuple

from ebpfproxy.errors import NotFound
from ebpfproxy.linux.netlink import iproute, links, rtnetlink
from ebpfproxy.linux.netlink.netlink import rejecting
from ebpfproxy.model.address import Address, Family, format_address, parse_address

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
    devices = map(_device, links.all_links())
    return [each for each in devices if each.kind in MODULES and each.name.startswith(prefixes)]


def create(name: str, kind: str, local: Address | None = None) -> None:
    """Create a device. A dummy device stays down; a tunnel device is set up, and has the address `local`.

    Raises AlreadyExists, Unsupported if the kernel lacks the kind of device, else Rejected.
    """
    details: dict[str, object] = {}
    if local:
        details = {f"{kind}_local": format_address(local), "state": "up"}
        if kind == TUNNELS[Family.IPV6]:  # otherwise it also takes IPv4 packets
            details["ip6tnl_proto"] = _IPV6_IN_IPV6
    iproute.create(name, kind, MODULES[kind], **details)


def add_dummy_address(name: str) -> None:
    """Add DUMMY_ADDRESS, if it is missing. Raises NotFound, Rejected."""
    iproute.ensure_address(name, _existing(name).ifindex, format_address(DUMMY_ADDRESS))


def delete(name: str) -> bool:
    """Delete the device of that name; return whether it existed. Raises Rejected."""
    found = iproute.find(name)
    return found is not None and iproute.delete(name, found.ifindex)


def note(name: str) -> str:
    """The note of a device of any kind, "" without one. Raises NotFound, Rejected."""
    return _existing(name).note


def set_note(name: str, text: str) -> None:
    """Set the note of a device, "" for none. Raises NotFound, Rejected."""
    iproute.configure(name, ifalias=text)


def addresses() -> dict[int, set[Address]]:
    """The addresses of all devices of the network namespace, by ifindex. Raises Rejected."""
    result: dict[int, set[Address]] = {}
    with rejecting("cannot read the addresses"):
        for each in rtnetlink.addresses():
            result.setdefault(each.ifindex, set()).add(each.address)
    return result


def _existing(name: str) -> rtnetlink.Link:
    found = iproute.find(name)
    if found is None:
        raise NotFound(f"network device {name} does not exist")
    return found


def _device(link: rtnetlink.Link) -> OwnedDevice:
    is_tunnel = link.kind in TUNNELS.values() and len(link.mac) in (4, 16)
    local = rtnetlink.mapped(link.mac) if is_tunnel else None
    return OwnedDevice(link.name, link.ifindex, link.kind, link.up, link.note, local)
