"""Network devices: which of them get programs of the packet path, and in which role.

While the socket path serves a pod, its veth device gets no programs until a ServicePort or the pod needs
them, since programs there cost time for every packet between pods. Attached programs stay as long as
connections may depend on them. The device of any other network namespace gets programs at once.
"""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from ebpfproxy.model.address import Address, Family, Protocol, contains, family
from ebpfproxy.model.device import ETHERNET, LOOPBACK, PAIRS, Device
from ebpfproxy.model.node import Node
from ebpfproxy.plan.planned_endpoints import CLUSTER, LOCAL
from ebpfproxy.plan.service_plan import (
    DevicePlan,
    DeviceRole,
    FrontendPlan,
    NoEndpointAction,
    PlanContext,
    Role,
    Scope,
    ServicePortPlan,
    SocketLb,
)
from ebpfproxy.plan.sources import plan_sources

REINJECTION_PAIR = frozenset({"ebpfproxy0", "ebpfproxy1"})
"""The reinjection veth pair, which the backend manages."""

OWN_DEVICES = REINJECTION_PAIR | {"ebpfproxy-gnv"}
"""The devices that the backend manages: the reinjection veth pair and the Geneve device of direct server
return."""

NO_DEVICES = ("none",)
"""Device patterns with which no device gets programs, not even loopback."""

# IFLA_INFO_KIND: rtnl_link_ops.kind of the modules in drivers/net, net/ipv4 and net/ipv6.
_TUNNELS = frozenset({"vxlan", "geneve", "wireguard", "ipip", "sit", "ip6tnl"}) | frozenset(
    {"gre", "gretap", "erspan", "ip6gre", "ip6gretap", "ip6erspan"}
)
_WITHOUT_ROLE = frozenset({"dummy", "ifb", "nlmon", "vrf"})  # packets of a VRF are seen on its ports
_ONE_PEER = 127  # bits of the prefix of a network with one other host: /31 of IPv4 has 127, too
_TUN = "tun"  # the kind of tap devices, too, which have link type ETHERNET


def plan_devices(
    devices: Collection[Device],
    node: Node | None,
    context: PlanContext,
    pods: bool,
    bypassing: Collection[int],
    of_node: bool = False,
    by_socket: Collection[int] = (),
    of_pods: Collection[int] = (),
) -> tuple[DevicePlan, ...]:
    """Return the devices that get programs, sorted by ifindex. The order of `devices` does not matter.

    - Uplinks, and tunnels that are up, always get programs.
    - Loopback gets them if no socket is load balanced (`SocketLb.OFF`), if `of_node` is set, or if it is in
      `bypassing`.
    - A pod's veth or netkit device gets them if it leads to a network namespace and is not in `by_socket`, if
      sockets of pods are not load balanced, with `context.redirect`, if `pods` is set, or if it is in
      `bypassing`.
    - A tap device always gets them. It leads to a guest with its own kernel, whose sockets are invisible to
      this node.
    - So do the ports of a bridge that is not the pods', such as Docker's. They lead to guests.

    `pods`: whether any ServicePort needs the packets of pods. `of_node`: the same for the node's own packets.
    `bypassing`: the ifindexes of devices whose pods were seen to need programs, or whose devices have had
    programs so far. Loopback is one if packets of the node itself reached Services by the packet path.
    `by_socket`: the ifindexes of devices whose pods the socket path serves. `of_pods`: those of devices that
    lead to known pods.

    An edge has no pods: its veth and netkit devices with an address are uplinks, as in a container.

    With `context.device_patterns`, exactly the matching devices get programs, and loopback as above. A
    matching device without a role counts as an uplink. With `NO_DEVICES` no device gets programs.
    """
    if context.device_patterns == NO_DEVICES:
        return ()
    host = _Host(devices, node, context.role, of_pods)
    plans = []
    for device in sorted(devices, key=lambda each: each.ifindex):
        role = host.role_of(device)
        if role is DeviceRole.LOOPBACK:
            wanted = context.socket_lb is SocketLb.OFF or of_node or device.ifindex in bypassing
        elif context.device_patterns:
            wanted = device.name not in OWN_DEVICES and _matches(device.name, context.device_patterns)
        elif role is DeviceRole.POD and device.kind in PAIRS:
            # Packets of a bridge port have the bridge as their ingress device (skb_iif), so `bypassing` may
            # have the bridge instead of the port.
            is_bypassing = device.ifindex in bypassing or device.master in bypassing
            needs_packets = device.peer_elsewhere and device.ifindex not in by_socket
            needs_packets = needs_packets or context.socket_lb is not SocketLb.ON
            wanted = needs_packets or context.redirect or pods or is_bypassing
        else:
            wanted = role is not None
        if wanted:
            plans.append(host.plan(device, role or DeviceRole.UPLINK))
    return tuple(plans)


def uplinks(devices: Collection[Device]) -> tuple[Device, ...]:
    """Return the devices that are up and lead to the node's network, sorted by ifindex."""
    host = _Host(devices, None)
    ordered = sorted(devices, key=lambda each: each.ifindex)
    return tuple(each for each in ordered if each.up and host.role_of(each) is DeviceRole.UPLINK)


def flowtable_devices(devices: Collection[Device], patterns: Collection[str]) -> tuple[tuple[int, str], ...]:
    """Return ifindex and name of the devices that match a pattern, without loopback, sorted."""
    found = (each for each in devices if each.link_type != LOOPBACK and _matches(each.name, patterns))
    return tuple(sorted((each.ifindex, each.name) for each in found))


def roles(devices: Collection[Device], node: Node | None) -> dict[int, DeviceRole | None]:
    """Return the role of each device by ifindex, None for a device that gets no programs."""
    host = _Host(devices, node)
    return {each.ifindex: host.role_of(each) for each in devices}


def needs_packets_of_pods(plan: ServicePortPlan) -> bool:
    """Return whether pods reach the frontends of `plan` correctly only if their devices have programs.

    - Source ranges apply to the source address, which a socket may not have yet.
    - SCTP sockets run no program at connect() or sendmsg(); only TCP and UDP sockets do.
    - The connect() hook can reject a connection, but it cannot drop packets, which `NoEndpointAction.DROP`
      requires.
    """
    if needs_packets_of_node(plan):
        return True
    return any(each.restricted or _is_dropped(plan, each) for each in plan.frontends)


def needs_packets_of_node(plan: ServicePortPlan) -> bool:
    """Return whether the node's own processes reach the frontends of `plan` only by packets.

    Source ranges do not count: the programs of the other devices drop the node's packets.
    """
    return plan.name.protocol is Protocol.SCTP and bool(plan.frontends)


def _is_dropped(plan: ServicePortPlan, frontend: FrontendPlan) -> bool:
    """Return whether a connection of a pod to `frontend` has no endpoint and is dropped."""
    if plan.no_endpoint_action is not NoEndpointAction.DROP:
        return False
    return not plan.endpoints.has(LOCAL if frontend.pod.scope is Scope.LOCAL else CLUSTER)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _Host:
    """All devices of a node. The role of a device may depend on the others."""

    def __init__(
        self,
        devices: Iterable[Device],
        node: Node | None,
        role: Role = Role.NODE,
        of_pods: Collection[int] = (),
    ) -> None:
        self._is_edge = role is Role.EDGE
        self._of_pods = of_pods
        self._pod_cidrs = node.pod_cidrs if node else ()
        ordered = sorted(devices, key=lambda each: each.ifindex)
        self._devices = {each.ifindex: each for each in ordered}
        self._pod_bridges = {each.master for each in ordered if each.ifindex in of_pods}
        local = {address for each in ordered for address in each.addresses}
        self._node = tuple(address for address in (node.addresses if node else ()) if address in local)
        self._routed = tuple(a for each in ordered if each.default_route for a in each.addresses)
        self._uplink_bridges = {
            each.master for each in ordered if each.master_kind == "bridge" and _is_uplink_port(each)
        }

    def role_of(self, device: Device) -> DeviceRole | None:
        """Return the role of a device; None if the device gets no programs."""
        if device.link_type == LOOPBACK:
            return DeviceRole.LOOPBACK
        if device.name in OWN_DEVICES or device.kind in _WITHOUT_ROLE:
            return None
        if device.kind in _TUNNELS:
            # Modules such as ipip and sit create a device (tunl0, sit0) that is down and usually unused.
            return DeviceRole.TUNNEL if device.up else None
        if self._is_uplink(device):
            return DeviceRole.UPLINK
        if self._is_edge or not _is_of_pod(device):
            return None
        return DeviceRole.POD if device.ifindex in self._of_pods else self._role_at(device)

    def _role_at(self, port: Device) -> DeviceRole | None:
        """Return the role of a pair or tap device that leads to no known pod: its bridge decides.

        At a bridge that is an uplink, it may be the cable itself, as on a node in a container, or lead to a
        guest, which is a machine of that network like others. The bridge has programs for packets to the
        node. Without a bridge or the facts about it, the device may lead to a pod.
        """
        bridge = self._devices.get(port.master)
        if not bridge or port.master_kind != "bridge":
            return DeviceRole.POD
        if self._is_uplink(bridge):
            return None
        return DeviceRole.GUEST if self._is_of_guests(bridge) else DeviceRole.POD

    def _is_of_guests(self, bridge: Device) -> bool:
        """Return whether it is known that a bridge leads to guests: to no known pod, and to a network that
        is not the pods'. This needs the pods' CIDRs, or known pods elsewhere."""
        if not self._pod_cidrs and not self._of_pods:
            return False
        return bridge.ifindex not in self._pod_bridges and self._has_network(bridge)

    def _is_uplink(self, device: Device) -> bool:
        """Return whether the device leads to the node's network. A device that is down counts, too.

        A port of a bond, team or bridge is no uplink, since packets are processed on its master; a port of a
        VRF may be one. A bridge of pods may have an address, but it is no uplink without a port that leads
        out of the node.
        """
        if device.master and device.master_kind != "vrf":
            return False
        if device.default_route or any(address in self._node for address in device.addresses):
            return True
        if not device.kind:
            return device.link_type == ETHERNET
        if device.kind == "bridge" and device.ifindex not in self._uplink_bridges:
            return False
        if self._is_edge or not _is_of_pod(device):
            return bool(device.addresses)
        return device.ifindex not in self._of_pods and self._has_network(device)

    def _has_network(self, device: Device) -> bool:
        """Return whether a device has a network of several hosts that is not the pods', as the network card
        of a node in a container does, and the bridge of guests.

        Network plugins give the node's end of a pod's pair no address, one without a network, or one of the
        pods' CIDRs. They give the pods' bridge one of the pods' CIDRs.
        """
        networks = [net for net in device.networks if net.length < _ONE_PEER]
        return bool(networks) and not any(
            contains(cidr, net.address) or contains(net, cidr.address)
            for net in networks
            for cidr in self._pod_cidrs
        )

    def plan(self, device: Device, role: DeviceRole) -> DevicePlan:
        """Return the plan of a device, with the addresses to masquerade with."""
        master = self._devices.get(device.master)
        is_port = device.master_kind == "bridge"
        v4, v6 = (self._masquerade(device, each) for each in (Family.IPV4, Family.IPV6))
        return DevicePlan(
            device.ifindex,
            device.name,
            role,
            device.link_type not in (ETHERNET, LOOPBACK),
            v4,
            v6,
            role is DeviceRole.POD and device.peer_elsewhere,
            master.mac if master and is_port else b"",
            bool(device.master) and not is_port and device.master_kind != "vrf",
            plan_sources(device, (v4, v6)),
        )

    def _masquerade(self, device: Device, ip_family: Family) -> Address | None:
        """Return an address of the device; else of its master, the Node, or a device with a default route."""
        master = self._devices.get(device.master)
        for addresses in (
            device.addresses,
            master.addresses if master else (),
            self._node,
            self._routed,
        ):
            for address in addresses:
                if family(address) is ip_family:
                    return address
        return None


def _is_of_pod(device: Device) -> bool:
    """Return whether the device leads to a pod or guest. A tun device (layer 3) usually leads to a VPN."""
    return device.kind in PAIRS or (device.kind == _TUN and device.link_type == ETHERNET)


def _is_uplink_port(port: Device) -> bool:
    """Return whether a port of a bridge leads out of this node, as hardware, a bond or a VLAN does."""
    return not _is_of_pod(port) and port.kind not in _TUNNELS | _WITHOUT_ROLE
