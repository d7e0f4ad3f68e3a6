"""A dummy device and its addresses: it makes the addresses of Services local.

Mode ipvs needs this, because IPVS handles only packets whose destination is local. Its device stays down, as
in kube-proxy. The addresses are local nevertheless, and nothing is sent through it. Other devices answer ARP
for these addresses unless the sysctl arp_ignore forbids it. An edge has such a device, so that a routing
daemon announces the addresses. It is up, since daemons ignore the addresses of devices that are down.

All functions act in the calling thread's network namespace. Sources: drivers/net/dummy.c; inet_rtm_newaddr()
of net/ipv4/devinet.c, inet6_rtm_newaddr() of net/ipv6/addrconf.c.
"""

import errno
import os
import socket
from collections.abc import Collection, Mapping

from ebpfproxy.errors import AlreadyExists, KernelError, NotFound, Rejected, Unsupported
from ebpfproxy.linux.netlink import iproute, netlink, rtnetlink
from ebpfproxy.linux.netlink.netlink import Request, encoded, rejecting
from ebpfproxy.linux.netlink.rtnetlink import NUMBERS, raw
from ebpfproxy.model.address import Address, Family, family, format_address

KUBE_IPVS0 = "kube-ipvs0"
"""The name that kube-proxy uses."""
VIPS = "ebpfproxy-vip"
"""The device of an edge. Where the kernel has no dummy devices, it is an ifb, which needs no peer either."""

_KIND = "dummy"
_KINDS = {VIPS: (_KIND, "ifb")}
"""The kinds that a device may have, in the order in which they are tried. Others have `_KIND`."""
_HINT = "modprobe dummy"


def index(name: str) -> int:
    """The ifindex of the device of that name, of any kind; 0 if there is none."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0


def exists(name: str) -> bool:
    """Whether a dummy device of that name exists. Raises Rejected."""
    return _find(name) is not None


def ensure(name: str) -> bool:
    """Create the device, down, if it is missing; return whether it was created.

    Raises AlreadyExists if a device of another kind has the name, Unsupported if the kernel has no dummy
    devices, else Rejected.
    """
    if _find(name):
        return False
    if index(name):
        raise AlreadyExists(
            f"cannot create the device {name}: another program has a device of that name and another kind",
            "rename or delete that device",
        )
    for kind in _kinds(name):
        try:
            iproute.create(name, kind)
            return True
        except Unsupported:
            continue
        except AlreadyExists:
            return ensure(name)  # another program created it since `_find`
    raise Unsupported(f"cannot create the device {name}: this kernel has no dummy devices", _HINT)


def set_up(name: str) -> None:
    """Set the device up, if it is down. Raises NotFound, Rejected."""
    if not _existing(name).up:
        iproute.configure(name, state="up")


def remove(name: str) -> bool:
    """Delete the dummy device with its addresses; return whether it existed. Raises Rejected.

    A device of another kind stays.
    """
    device = _find(name)
    return device is not None and iproute.delete(name, device.ifindex)


def addresses(name: str) -> frozenset[Address]:
    """The device's addresses that are a /32 or /128, as `change_addresses` adds them.

    Raises NotFound, Rejected.
    """
    ifindex = _existing(name).ifindex
    with rejecting(f"cannot read the addresses of {name}"):
        found = rtnetlink.addresses(ifindex)
    return frozenset(each.address for each in found if each.length == 8 * len(raw(each.address)))


def change_addresses(
    name: str, add: Collection[Address] = (), drop: Collection[Address] = ()
) -> Mapping[Address, KernelError]:
    """Add and remove addresses of the device; return the ones that the kernel rejected, with the error.

    All other changes are applied. An address that exists already, or is missing already, is no error.
    Addresses are added as /32 or /128. IPv6 addresses skip duplicate address detection (RFC 4862 5.4), which
    never completes on a device that is down.

    Raises NotFound, Rejected.
    """
    ifindex = _existing(name).ifindex
    changes = [(rtnetlink.RTM_DELADDR, each) for each in drop] + [
        (rtnetlink.RTM_NEWADDR, each) for each in add
    ]
    try:
        requests = [_request(kind, address, ifindex) for kind, address in changes]
        rejected = netlink.changes(socket.NETLINK_ROUTE, requests)
    except OSError as error:
        raise _failure(f"cannot change the addresses of {name}", error.errno or 0) from error
    rejections: dict[Address, KernelError] = {}
    for position, rejection in rejected.items():
        kind, address = changes[position]
        adds = kind == rtnetlink.RTM_NEWADDR
        if rejection.errno != (errno.EEXIST if adds else errno.EADDRNOTAVAIL):
            action = "add" if adds else "remove"
            rejections[address] = _failure(
                f"cannot {action} the address {format_address(address)} of {name}",
                rejection.errno,
                rejection.reason,
            )
    return rejections


def _request(kind: int, address: Address, ifindex: int) -> Request:
    """IFA_F_NOPREFIXROUTE: the kernel would also add a prefix route of IPv6, redundant for one address."""
    of, value = family(address), raw(address)
    body = rtnetlink.ADDRESS.pack(NUMBERS[of], 8 * len(value), 0, 0, ifindex)
    body += encoded(
        {
            rtnetlink.IFA_LOCAL: value,
            rtnetlink.IFA_ADDRESS: value,
            rtnetlink.IFA_FLAGS: _IPV6_FLAGS if of is Family.IPV6 else None,
        }
    )
    return Request(
        kind, netlink.NLM_F_CREATE | netlink.NLM_F_EXCL if kind == rtnetlink.RTM_NEWADDR else 0, body
    )


_IPV6_FLAGS = rtnetlink.IFA_F_NODAD | rtnetlink.IFA_F_NOPREFIXROUTE


def _existing(name: str) -> rtnetlink.Link:
    device = _find(name)
    if device is None:
        raise NotFound(f"dummy device {name} does not exist")
    return device


def _find(name: str) -> rtnetlink.Link | None:
    device = iproute.find(name)
    return device if device and device.kind in _kinds(name) else None


def _kinds(name: str) -> tuple[str, ...]:
    return _KINDS.get(name, (_KIND,))


def _failure(message: str, number: int, reason: str = "") -> KernelError:
    if number == errno.EACCES:
        return Rejected(f"{message}: IPv6 is disabled on this device", "set its sysctl disable_ipv6 to 0")
    if number == errno.ENODEV:
        return NotFound(f"{message}: the device is gone")
    return iproute.error(number, message, reason or os.strerror(number))
