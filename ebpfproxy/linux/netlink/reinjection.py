"""The inner: a device of ours by which the packet path gives packets to the node itself.

A reply from a Service's endpoint to a client on this node comes in by an uplink or a pod's device, and
there gets the Service's address back as its source. What the kernel thinks of such a source is not for
us to change on another program's device: a reverse path filter drops it, since no way to it leads there,
and a source that is an address of this node (its own NodePort, or 127.0.0.1) is a martian. So such
replies are sent on by a veth pair, ebpfproxy1 to ebpfproxy0, and on the latter, the inner, all of that
is allowed. It opens nothing to others: no other program is on this pair, and no route leads there.

rp_filter is 2 and not 0, since the kernel takes the stricter of this one and that for all devices. Any
way to the source will do then, and the client had one when it sent to the Service. But to a device
without an address the kernel is as strict as with 1 (`no_addr` in __fib_validate_source()), so the
inner has one that the node has anyway, in 127.0.0.0/8, and of host scope: no packet ever gets it as
its source. accept_local and route_localnet are for sources that are the node's. IPv6 has no such filter.

Sources: net/ipv4/fib_frontend.c, ip_route_input_slow() of net/ipv4/route.c, Documentation/networking/
ip-sysctl.rst. Everything here acts in the network namespace that the calling thread is in.
"""

import errno
import socket
from typing import NamedTuple

from ebpfproxy.errors import AlreadyExists, KernelError, Rejected
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import iproute, netlink, rtnetlink

INNER = "ebpfproxy0"
OUTER = "ebpfproxy1"
MAC = bytes.fromhex("02ebbf000001")
"""Of the inner, locally administered (IEEE 802): the packet path writes it into what it sends there.
Given at its making, so that it counts as chosen and systemd-udevd's MACAddressPolicy lets it be."""

MTU = 65535
"""The largest of a veth (ETH_MAX_MTU): whatever fitted through another device fits through this one."""

ADDRESS = "127.235.0.1"
"""Of the inner, as a /32. 235 is 0xeb."""

SYSCTLS = {"rp_filter": "2", "accept_local": "1", "route_localnet": "1"}

RT_SCOPE_HOST = 254


class _Device(NamedTuple):
    """`peer` is the index of the other end of a veth, 0 where that is in another network namespace."""

    ifindex: int
    kind: str
    peer: int
    up: bool
    mtu: int
    mac: bytes


def ensure_pair() -> int:
    """Have the pair as described above, repairing what differs; the inner's ifindex.

    Nothing is changed, nor reported by the kernel, where all is as it should be.

    Raises AlreadyExists where a device that is no veth has one of the names; Unsupported where the
    kernel has no veth; NotFound where another program takes it away meanwhile; Rejected.
    """
    ends = _pair()
    if ends is None:
        _make_pair()
        ends = _pair()
    if ends is None:
        raise Rejected(f"{INNER} and {OUTER} do not stay as they were made", "who else changes devices here?")
    for name in (INNER, OUTER):
        _quiet_ipv6(name)
    for setting, value in SYSCTLS.items():
        sysctl.ensure(f"net/ipv4/conf/{INNER}/{setting}", value)
    _ensure_address(ends[0].ifindex)
    _repair(INNER, ends[0], MAC)
    _repair(OUTER, ends[1], ends[1].mac)
    return ends[0].ifindex


def remove_pair() -> bool:
    """Remove the pair, or what is left of one; whether there was anything. Raises Rejected."""
    with_inner = _remove(INNER)
    return _remove(OUTER) or with_inner


def has_pair() -> bool:
    """Whether `remove_pair` would find anything. Raises Rejected."""
    return any(device and device.kind == "veth" for device in map(_find, (INNER, OUTER)))


def _pair() -> tuple[_Device, _Device] | None:
    inner, outer = _find(INNER), _find(OUTER)
    if inner is None or outer is None or (inner.kind, outer.kind) != ("veth", "veth"):
        return None
    return (inner, outer) if (inner.peer, outer.peer) == (outer.ifindex, inner.ifindex) else None


def _make_pair() -> None:
    """Down, so that nothing is sent before IPv6 is configured to be silent. Remains of another pair go."""
    for name in (INNER, OUTER):
        present = _find(name)
        if present and present.kind != "veth":
            kind = present.kind or "unknown"
            raise AlreadyExists(f"device {name} is another program's, of kind {kind}", "rename or delete it")
        _remove(name)
    with iproute.opened(f"cannot make the devices {INNER} and {OUTER}") as changes:
        other = {"ifname": OUTER, "mtu": MTU}
        changes.link("add", ifname=INNER, kind="veth", address=MAC.hex(":"), mtu=MTU, peer=other)


def _repair(name: str, device: _Device, mac: bytes) -> None:
    wanted: dict[str, object] = {}
    if device.mtu != MTU:
        wanted["mtu"] = MTU
    if device.mac != mac:
        wanted["address"] = mac.hex(":")
    if not device.up:
        wanted["state"] = "up"
    if wanted:
        with iproute.opened(f"cannot set up device {name}") as changes:
            changes.link("set", index=device.ifindex, **wanted)


def _ensure_address(ifindex: int) -> None:
    if not _has_address(ifindex):
        with iproute.opened(f"cannot give {INNER} the address {ADDRESS}") as changes:
            changes.addr("add", index=ifindex, address=ADDRESS, prefixlen=32, scope=RT_SCOPE_HOST)


def _has_address(ifindex: int) -> bool:
    wanted = ifindex, socket.inet_aton(ADDRESS)
    try:
        body = rtnetlink.ADDRESS.pack(socket.AF_INET, 0, 0, 0, ifindex)
        messages = netlink.dump(socket.NETLINK_ROUTE, rtnetlink.RTM_GETADDR, body, strict=True)
    except OSError as error:
        if error.errno == errno.ENODEV:
            return False
        raise Rejected(f"addresses of {INNER} cannot be read: {error.strerror or error}") from error
    return any(_address(message) == wanted for message in messages)


def _address(message: bytes) -> tuple[int, bytes]:
    """The device's index, and the address. A kernel before 4.20 returns those of all devices."""
    _, _, _, _, ifindex = rtnetlink.ADDRESS.unpack_from(message)
    return ifindex, dict(netlink.attributes(message, rtnetlink.ADDRESS.size)).get(rtnetlink.IFA_LOCAL, b"")


def _quiet_ipv6(name: str) -> None:
    """No link-local address, so no router or neighbor solicitations; but packets are taken in.

    Nothing to do where the kernel has no IPv6, or was started without it (ipv6.disable=1).
    """
    if (sysctl.ROOT / f"net/ipv6/conf/{name}").is_dir():
        sysctl.ensure(f"net/ipv6/conf/{name}/addr_gen_mode", "1")  # IN6_ADDR_GEN_MODE_NONE


def _remove(name: str) -> bool:
    """Delete a veth of that name, its other end included; whether there was one."""
    device = _find(name)
    if device is None or device.kind != "veth":
        return False
    try:
        with iproute.opened(f"cannot remove device {name}") as changes:
            changes.link("del", index=device.ifindex)
    except KernelError:
        if _find(name) is not None:
            raise
        return False  # another program was faster
    return True


def _find(name: str) -> _Device | None:
    try:
        link = rtnetlink.link_named(name)
    except OSError as error:
        raise Rejected(f"device {name} cannot be read: {error.strerror or error}") from error
    return _device(link) if link else None


def _device(link: rtnetlink.Link) -> _Device:
    elsewhere = rtnetlink.IFLA_LINK_NETNSID in link.attributes
    return _Device(
        ifindex=link.ifindex,
        kind=link.kind,
        peer=0 if elsewhere else netlink.number(link.attributes.get(rtnetlink.IFLA_LINK)),
        up=link.up,
        mtu=netlink.number(link.attributes.get(rtnetlink.IFLA_MTU)),
        mac=link.attributes.get(rtnetlink.IFLA_ADDRESS, b""),
    )
