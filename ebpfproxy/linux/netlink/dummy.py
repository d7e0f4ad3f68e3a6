"""A dummy device, and many addresses on it: how IPVS mode makes addresses of Services local to the node.

IPVS looks at packets that are for the node itself, so what is addressed to a Service has to be. The device
stays down, as kube-proxy's does: its addresses are local all the same, and nothing is ever sent by it. Other
devices answer ARP for them, unless the sysctl arp_ignore says not to.

Everything here acts in the network namespace that the calling thread is in. Addresses by raw netlink, not by
pyroute2: see `netlink`. Sources: drivers/net/dummy.c; inet_rtm_newaddr() of net/ipv4/devinet.c,
inet6_rtm_newaddr() of net/ipv6/addrconf.c.
"""

import errno
import os
import socket
import struct
from collections.abc import Collection, Mapping

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.netlink import iproute, netlink, rtnetlink
from ebpfproxy.linux.netlink.netlink import Request, attribute
from ebpfproxy.model.address import V4_PREFIX, Address, Family, family, format_address

KUBE_IPVS0 = "kube-ipvs0"
"""As kube-proxy calls it."""

_KIND = "dummy"
_HINT = "modprobe dummy"
_U32 = struct.Struct("=I")


def index(name: str) -> int:
    """Of whatever device has that name; 0 where there is none."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def exists(name: str) -> bool:
    """Whether there is such a dummy device. Raises Rejected."""
    return _find(name) is not None


def ensure(name: str) -> bool:
    """Have it, down where it has to be made; whether it was made.

    Raises AlreadyExists where a device of another kind has the name; Unsupported where the kernel has no
    dummy devices; Rejected.
    """
    if _find(name):
        return False
    if index(name):
        raise AlreadyExists(f"device {name} is another program's, and no dummy", "rename or delete it")
    try:
        with iproute.opened(f"cannot make the device {name}") as changes:
            changes.link("add", ifname=name, kind=_KIND)
    except Unsupported as error:
        raise Unsupported(
            f"cannot make the device {name}: this kernel has no dummy devices", _HINT
        ) from error
    except AlreadyExists:
        return ensure(name)  # another program was faster
    return True


def remove(name: str) -> bool:
    """Delete it, with its addresses; whether there was one. One of another kind stays. Raises Rejected."""
    device = _find(name)
    if device is None:
        return False
    try:
        with iproute.opened(f"cannot remove the device {name}") as changes:
            changes.link("del", index=device.ifindex)
    except NotFound:
        return False  # another program was faster
    return True


def addresses(name: str) -> frozenset[Address]:
    """Those that are a /32 or /128, as `change_addresses` makes them. Raises NotFound, Rejected."""
    ifindex = _index(name)
    try:
        body = rtnetlink.ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, ifindex)
        messages = netlink.dump(socket.NETLINK_ROUTE, rtnetlink.RTM_GETADDR, body, strict=True)
    except OSError as error:
        raise _failure(f"addresses of {name} cannot be read", error.errno or 0) from error
    return frozenset(filter(None, (_address(message, ifindex) for message in messages)))


def change_addresses(
    name: str, add: Collection[Address] = (), drop: Collection[Address] = ()
) -> Mapping[Address, KernelError]:
    """Give it addresses, and take some from it; what the kernel rejected. All the rest is in force.

    To add what is there, or to drop what is not, is fine. Each is a /32 or /128; one of IPv6 is spared
    duplicate address detection (RFC 4862 5.4), which it would never pass on a device that is down.

    Raises NotFound, Rejected.
    """
    ifindex = _index(name)
    wanted = [(rtnetlink.RTM_DELADDR, each) for each in drop] + [
        (rtnetlink.RTM_NEWADDR, each) for each in add
    ]
    try:
        requests = [_request(kind, address, ifindex) for kind, address in wanted]
        rejected = netlink.changes(socket.NETLINK_ROUTE, requests)
    except OSError as error:
        raise _failure(f"addresses of {name} cannot be changed", error.errno or 0) from error
    rejections: dict[Address, KernelError] = {}
    for position, why in rejected.items():
        kind, address = wanted[position]
        fine = errno.EEXIST if kind == rtnetlink.RTM_NEWADDR else errno.EADDRNOTAVAIL
        if why.errno != fine:
            rejections[address] = _failure(
                f"address {format_address(address)} of {name}", why.errno, why.reason
            )
    return rejections


def _request(kind: int, address: Address, ifindex: int) -> Request:
    """Of IPv6 the kernel would make a route of the prefix, too, which for one address says nothing new."""
    four = family(address) is Family.IPV4
    raw = address[len(V4_PREFIX) :] if four else address
    number, flags = (socket.AF_INET, 0) if four else (socket.AF_INET6, _IPV6_FLAGS)
    body = rtnetlink.ADDRESS.pack(number, 8 * len(raw), 0, 0, ifindex)
    body += attribute(rtnetlink.IFA_LOCAL, raw) + attribute(rtnetlink.IFA_ADDRESS, raw)
    if flags:
        body += attribute(rtnetlink.IFA_FLAGS, _U32.pack(flags))
    making = netlink.NLM_F_CREATE | netlink.NLM_F_EXCL if kind == rtnetlink.RTM_NEWADDR else 0
    return Request(kind, making, body)


_IPV6_FLAGS = rtnetlink.IFA_F_NODAD | rtnetlink.IFA_F_NOPREFIXROUTE


def _address(message: bytes, wanted: int) -> Address | None:
    """None for one of another length, or of another device, which a kernel before 4.20 reports, too."""
    number, length, _, _, ifindex = rtnetlink.ADDRESS.unpack_from(message)
    attributes = dict(netlink.attributes(message, rtnetlink.ADDRESS.size))
    raw = attributes.get(rtnetlink.IFA_LOCAL) or attributes.get(rtnetlink.IFA_ADDRESS, b"")
    if ifindex != wanted or length != 8 * len(raw):
        return None
    return Address(V4_PREFIX + raw if number == socket.AF_INET else raw)


def _index(name: str) -> int:
    device = _find(name)
    if device is None:
        raise NotFound(f"there is no dummy device {name}")
    return device.ifindex


def _find(name: str) -> rtnetlink.Link | None:
    try:
        device = rtnetlink.link_named(name)
    except OSError as error:
        raise _failure(f"device {name} cannot be read", error.errno or 0) from error
    return device if device and device.kind == _KIND else None


def _failure(what: str, number: int, reason: str = "") -> KernelError:
    if number == errno.EACCES:
        return Rejected(f"{what}: IPv6 is off on this device", "set its sysctl disable_ipv6 to 0")
    if number == errno.ENODEV:
        return NotFound(f"{what}: the device is gone")
    return iproute.error(number, what, reason or os.strerror(number))
