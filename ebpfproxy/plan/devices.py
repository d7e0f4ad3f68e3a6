"""On which devices packets have to be looked at, by what each of them is.

A socket path that serves pods leaves their veths alone until something needs them: programs there
cost every packet between pods, and would have nothing to do. Once they are there they stay, since
connections may depend on them.
"""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from ebpfproxy.model.address import Address, Family, family
from ebpfproxy.model.device import ETHERNET, LOOPBACK, PAIRS, Device
from ebpfproxy.model.node import Node
from ebpfproxy.plan.service_plan import DevicePlan, DeviceRole, PlanContext, SocketLb

INLET_PAIR = frozenset({"ebpfproxy0", "ebpfproxy1"})
"""Our own veth pair; the backend cares for it."""

NO_DEVICES = ("none",)
"""Device patterns by which nothing is looked at on any device, loopback included."""

# IFLA_INFO_KIND, as the modules of drivers/net, net/ipv4 and net/ipv6 register it (rtnl_link_ops.kind).
_TUNNELS = frozenset({"vxlan", "geneve", "wireguard", "ipip", "sit", "ip6tnl"}) | frozenset(
    {"gre", "gretap", "erspan", "ip6gre", "ip6gretap", "ip6erspan"}
)
_NOWHERE = frozenset({"dummy", "ifb", "nlmon", "vrf"})  # a VRF's packets are seen on its ports
_TUN = "tun"  # of tap devices, too: those are recognized by their link type


def plan_devices(
    devices: Collection[Device],
    node: Node | None,
    context: PlanContext,
    pods: bool,
    bypassing: Collection[int],
) -> tuple[DevicePlan, ...]:
    """The devices that get our programs, sorted by ifindex; the order of `devices` is of no matter.

    `pods`: whether something needs the packets of pods, `bypassing` the indexes of devices whose pods
    were seen to need it, or have been served so far. A tap device leads to a guest with a kernel of its
    own, whose sockets this node never sees, so it always gets them. Loopback does where no socket is
    looked at.

    With `context.device_patterns` it is exactly those that match, whatever they are, and loopback as
    ever; what is no uplink, tunnel or pod's device counts as an uplink then. With NO_DEVICES none.
    """
    if context.device_patterns == NO_DEVICES:
        return ()
    host = _Host(devices, node)
    plans = []
    for device in sorted(devices, key=lambda each: each.ifindex):
        role = host.role_of(device)
        if role is DeviceRole.LOOPBACK:
            wanted = context.socket_lb is SocketLb.OFF
        elif context.device_patterns:
            wanted = device.name not in INLET_PAIR and _matches(device.name, context.device_patterns)
        elif role is DeviceRole.POD and device.kind in PAIRS:
            # A bridge passes its ports' packets up as its own (skb_iif), so only that much is seen.
            seen = device.ifindex in bypassing or device.master in bypassing
            wanted = context.socket_lb is not SocketLb.ON or context.redirect or pods or seen
        else:
            wanted = role is not None
        if wanted:
            plans.append(host.plan(device, role or DeviceRole.UPLINK))
    return tuple(plans)


def uplinks(devices: Collection[Device]) -> tuple[Device, ...]:
    """Those of `devices` that are up and lead to the node's network, sorted by ifindex."""
    host = _Host(devices, None)
    ordered = sorted(devices, key=lambda each: each.ifindex)
    return tuple(each for each in ordered if each.up and host.role_of(each) is DeviceRole.UPLINK)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _Host:
    """All devices of a node together: what one of them is shows in the others."""

    def __init__(self, devices: Iterable[Device], node: Node | None) -> None:
        ordered = sorted(devices, key=lambda each: each.ifindex)
        self._devices = {each.ifindex: each for each in ordered}
        held = {address for each in ordered for address in each.addresses}
        self._node = tuple(address for address in (node.addresses if node else ()) if address in held)
        self._routed = tuple(a for each in ordered if each.default_route for a in each.addresses)
        self._bridges_out = {
            each.master for each in ordered if each.master_kind == "bridge" and _leads_out(each)
        }

    def role_of(self, device: Device) -> DeviceRole | None:
        """None where nothing of ours belongs there."""
        if device.link_type == LOOPBACK:
            return DeviceRole.LOOPBACK
        if device.name in INLET_PAIR or device.kind in _NOWHERE:
            return None
        if device.kind in _TUNNELS:
            # Each of these modules makes a device of its own, tunl0 or sit0, which is mostly unused.
            return DeviceRole.TUNNEL if device.up else None
        if self._is_uplink(device):
            return DeviceRole.UPLINK
        return DeviceRole.POD if _is_of_pod(device) else None

    def _is_uplink(self, device: Device) -> bool:
        """Whether the node's network is there, be it up or not: it may come up at any time.

        What is part of a bond, a team or a bridge hands its packets over to that; a part of a VRF
        keeps them. A bridge of pods has an address, too, but nothing that leads out of the node.
        """
        if device.master and device.master_kind != "vrf":
            return False
        if device.default_route or any(address in self._node for address in device.addresses):
            return True
        if not device.kind:
            return device.link_type == ETHERNET
        if device.kind == "bridge" and device.ifindex not in self._bridges_out:
            return False
        return bool(device.addresses) and not _is_of_pod(device)

    def plan(self, device: Device, role: DeviceRole) -> DevicePlan:
        return DevicePlan(
            device.ifindex,
            device.name,
            role,
            device.link_type not in (ETHERNET, LOOPBACK),
            self._masquerade(device, Family.IPV4),
            self._masquerade(device, Family.IPV6),
            role is DeviceRole.POD and device.peer_elsewhere,
        )

    def _masquerade(self, device: Device, of: Family) -> Address | None:
        """The device's own address; else the one that the node is best known by from there."""
        master = self._devices.get(device.master)
        for addresses in (
            device.addresses,
            master.addresses if master else (),
            self._node,
            self._routed,
        ):
            for address in addresses:
                if family(address) is of:
                    return address
        return None


def _is_of_pod(device: Device) -> bool:
    """A tun device without Ethernet header leads to a VPN rather than to a guest."""
    return device.kind in PAIRS or (device.kind == _TUN and device.link_type == ETHERNET)


def _leads_out(port: Device) -> bool:
    """Whether a port of a bridge leads out of this node as hardware, a bond or a VLAN does."""
    return not _is_of_pod(port) and port.kind not in _TUNNELS | _NOWHERE
