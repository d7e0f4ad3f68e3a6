"""Finds configurations of the node's uplinks in which clients get no answer, in any mode."""

import errno
from collections.abc import Iterator

from ebpfproxy.backends.findings import Finding
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.netlink import links, routing
from ebpfproxy.model.address import Address, Family, family, parse_address
from ebpfproxy.model.device import ETHERNET, Device
from ebpfproxy.plan.devices import uplinks

CLIENT: Address = parse_address("192.0.2.1")
"""A client behind the default route: no host has an address of this network (RFC 5737)."""


def probe() -> tuple[Finding, ...]:
    """Return for each uplink without the default route whether the kernel accepts requests of such clients.

    Empty if there is only one uplink, or no default route. Covers IPv4 only, since IPv6 has no reverse path
    filter.
    """
    try:
        return tuple(_uplinks())
    except KernelError as failure:
        number = getattr(failure.__cause__, "errno", None) or -1
        return (Finding("routes of uplinks", number, failure.message, failure.hint, needed=False),)


def _uplinks() -> Iterator[Finding]:
    devices = links.read()
    default_ifindex = routing.route_to(CLIENT).ifindex
    names = {device.ifindex: device.name for device in devices}
    for device in uplinks(devices):
        own = next((each for each in device.addresses if family(each) is Family.IPV4), None)
        if own and default_ifindex and default_ifindex != device.ifindex and device.link_type == ETHERNET:
            yield _requests_by(device, own, names.get(default_ifindex, ""))


def _requests_by(device: Device, own: Address, default_name: str) -> Finding:
    feature = f"requests by {device.name}"
    if routing.accepts(device.ifindex, CLIENT, own):
        return Finding(feature, needed=False)
    return Finding(
        feature,
        errno.EXDEV,
        f"the reverse path filter drops IPv4 clients whose replies leave by {default_name}",
        f"route these clients by {device.name}, or sysctl -w net.ipv4.conf.{device.name}.rp_filter=2",
        needed=False,
    )
