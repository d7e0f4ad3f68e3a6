"""The reinjection veth pair: the packet path delivers IPv4 replies to host-originated packets through it.

A reply from an endpoint to a client on this node arrives at an uplink or at a pod's device. There the program
replaces its source with the frontend address. The stack would drop such a packet:
- The reverse path filter drops it, because no route to that source uses this device.
- A source that is an address of the node (its own NodePort, or 127.0.0.1) is a martian.

Other programs own that device, so its sysctls must not be changed. Instead, the program redirects the reply
to the ingress of ebpfproxy0 (DEVICE), whose sysctls accept it. ebpfproxy1 (PEER) exists because a veth has
two ends. No other program uses the pair and no route leads to it, so the sysctls admit no other packets.

Sysctls and address of ebpfproxy0:
- rp_filter is 2 (loose), because the kernel applies the higher of the device's value and that of `all`. A
  route to the source by any device is enough, and the client used one when it sent to the frontend.
- A loose filter is strict at a device without an address (`no_addr` in __fib_validate_source()). Therefore
  the device has one in 127.0.0.0/8, which is local anyway. It has scope host, so no packet uses it as its
  source.
- accept_local and route_localnet admit sources that are addresses of the node.
IPv6 has no such checks.

Sources: net/ipv4/fib_frontend.c, ip_route_input_slow() of net/ipv4/route.c, Documentation/networking/
ip-sysctl.rst. All functions act in the calling thread's network namespace.
"""

from ebpfproxy.errors import AlreadyExists, Rejected
from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import iproute, rtnetlink
from ebpfproxy.linux.netlink.rtnetlink import Link

DEVICE = "ebpfproxy0"
"""The device at whose ingress packets enter the stack."""

PEER = "ebpfproxy1"

MAC = bytes.fromhex("02ebbf000001")
"""The MAC address of DEVICE, locally administered (IEEE 802). The packet path writes it into the packets.

It is set when the device is created. So the kernel marks it as set by the user, and systemd-udevd's
MACAddressPolicy does not change it.
"""

MTU = 65535
"""The maximum of a veth (ETH_MAX_MTU): every packet that another device received fits."""

ADDRESS = "127.235.0.1"
"""The address of DEVICE, as a /32. 235 is 0xeb."""

SYSCTLS = {"rp_filter": "2", "accept_local": "1", "route_localnet": "1"}
"""The settings of DEVICE below net/ipv4/conf."""


def ensure_pair() -> int:
    """Create the pair, or repair what differs from the module's description; return the ifindex of DEVICE.

    If nothing differs, nothing is written, so the kernel sends no notifications.

    Raises AlreadyExists if a device of another kind has one of the names, Unsupported if the kernel has no
    veth, NotFound if another program deletes the pair meanwhile, else Rejected.
    """
    pair = _pair()
    if pair is None:
        _create_pair()
        pair = _pair()
    if pair is None:
        raise Rejected(
            f"cannot create the devices {DEVICE} and {PEER}: another program changed them at once",
            "check for another process that manages these interfaces",
        )
    for name in (DEVICE, PEER):
        _quiet_ipv6(name)
    for setting, value in SYSCTLS.items():
        sysctl.ensure(f"net/ipv4/conf/{DEVICE}/{setting}", value)
    device, peer = pair
    iproute.ensure_address(DEVICE, device.ifindex, ADDRESS)
    _repair(DEVICE, device, MAC)
    _repair(PEER, peer, peer.mac)
    return device.ifindex


def find_pair() -> int:
    """The ifindex of DEVICE, 0 if the pair does not exist. Changes nothing. Raises Rejected."""
    pair = _pair()
    return pair[0].ifindex if pair else 0


def remove_pair() -> bool:
    """Delete the pair, or the part of it that exists; return whether anything existed. Raises Rejected."""
    had_device = _remove(DEVICE)
    return _remove(PEER) or had_device


def has_pair() -> bool:
    """Whether `remove_pair` would delete anything. Raises Rejected."""
    return any(device and device.kind == "veth" for device in map(iproute.find, (DEVICE, PEER)))


def _pair() -> tuple[Link, Link] | None:
    """DEVICE and PEER, if both exist and are peers of each other."""
    device, peer = iproute.find(DEVICE), iproute.find(PEER)
    if device is None or peer is None or (device.kind, peer.kind) != ("veth", "veth"):
        return None
    return (device, peer) if (_peer(device), _peer(peer)) == (peer.ifindex, device.ifindex) else None


def _peer(device: Link) -> int:
    """The ifindex of a veth's peer, 0 if the peer is in another network namespace."""
    return 0 if rtnetlink.IFLA_LINK_NETNSID in device.attributes else device.linked


def _create_pair() -> None:
    """Create the pair, down, so that it sends nothing before `_quiet_ipv6`. Deletes parts of other pairs."""
    for name in (DEVICE, PEER):
        existing = iproute.find(name)
        if existing and existing.kind != "veth":
            raise AlreadyExists(
                f"device {name} is another program's, of kind {existing.kind or 'unknown'}",
                "rename or delete that device",
            )
        _remove(name)
    with iproute.opened(f"cannot create the devices {DEVICE} and {PEER}") as changes:
        peer = {"ifname": PEER, "mtu": MTU}
        changes.link("add", ifname=DEVICE, kind="veth", address=MAC.hex(":"), mtu=MTU, peer=peer)


def _repair(name: str, device: Link, mac: bytes) -> None:
    wanted: dict[str, object] = {}
    if device.mtu != MTU:
        wanted["mtu"] = MTU
    if device.mac != mac:
        wanted["address"] = mac.hex(":")
    if not device.up:
        wanted["state"] = "up"
    if wanted:
        iproute.configure(name, **wanted)


def _quiet_ipv6(name: str) -> None:
    """Give the device no link-local address, so it sends no router or neighbor solicitations. It still
    receives IPv6. Does nothing if the kernel has no IPv6, or was started without it (ipv6.disable=1)."""
    if (sysctl.ROOT / f"net/ipv6/conf/{name}").is_dir():
        sysctl.ensure(f"net/ipv6/conf/{name}/addr_gen_mode", "1")  # IN6_ADDR_GEN_MODE_NONE


def _remove(name: str) -> bool:
    """Delete the veth of that name with its peer; return whether it existed."""
    device = iproute.find(name)
    return device is not None and device.kind == "veth" and iproute.delete(name, device.ifindex)
