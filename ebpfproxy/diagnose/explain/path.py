"""The hook, program or chain that sees the connection first."""

from ebpfproxy.backends.nftables.node_objects import NAT_OUTPUT, NAT_PREROUTING
from ebpfproxy.diagnose.explain.lookup import IPVS, NFTABLES, USERSPACE, is_ebpf
from ebpfproxy.diagnose.explain.origin import Origin, namespace_class
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import ClientClass, Destination, Path, Via
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.model.address import Family, Protocol, family, is_loopback
from ebpfproxy.model.namespace import NamespaceClass
from ebpfproxy.plan.service_plan import DeviceRole, FrontendKind, FrontendPlan, SocketLb


def path(
    situation: Situation, origin: Origin, destination: Destination, frontend: FrontendPlan | None = None
) -> Path:
    """Return the path of a connection. Without a `frontend`, the path that would look for one."""
    if not is_ebpf(situation):
        return _netfilter(situation, origin, destination, frontend)
    exception = _socket_exception(situation, origin, destination, frontend)
    if exception is None and origin.kind is not ClientClass.OUTSIDE:
        return _socket(destination)
    if origin.kind is ClientClass.OUTSIDE:
        return Path(Via.PACKET, Reason.INGRESS_OF_UPLINK, _devices(situation, origin))
    if origin.kind is ClientClass.POD:
        place = f"ingress of {origin.interface or 'the device of the pod'}"
        return Path(Via.PACKET, Reason.INGRESS_OF_POD, place, exception)
    if reaches_itself(situation, destination):
        return Path(Via.NOTHING, Reason.NO_DEVICE_PASSED, "no program", exception)
    has_route = any(each.address == destination.address for each in situation.node.frontend_routes)
    by = Reason.ROUTE_OF_FRONTEND if has_route else Reason.EGRESS_OF_DEVICE
    return Path(Via.PACKET, by, _output(situation, destination), exception)


def reaches_itself(situation: Situation, destination: Destination) -> bool:
    """Whether packets of the node to the destination pass no device with a program, in mode ebpf."""
    has_loopback = any(each.role is DeviceRole.LOOPBACK for each in situation.node.devices)
    return situation.is_local(destination.address) and not has_loopback


def _socket_exception(
    situation: Situation, origin: Origin, destination: Destination, frontend: FrontendPlan | None
) -> Reason | None:
    is_pod, is_node = origin.kind is ClientClass.POD, origin.kind is ClientClass.NODE
    socket_lb = situation.context.socket_lb
    if socket_lb is SocketLb.OFF or (is_pod and socket_lb is SocketLb.HOST):
        return Reason.SOCKET_LB_OFF
    if destination.protocol is Protocol.SCTP:
        return Reason.SCTP_NEEDS_PACKETS
    if is_pod and origin.bypasses_hooks:
        return Reason.POD_BYPASSES_HOOKS
    namespace = namespace_class(origin, situation)
    if namespace and namespace[0] is not NamespaceClass.SOCKET_PATH:
        return Reason.NAMESPACE_NEEDS_PACKETS
    if frontend and frontend.restricted and not (is_node and frontend.node_admitted):
        return Reason.RANGES_NEED_PACKETS
    return None


def _socket(destination: Destination) -> Path:
    number = 4 if family(destination.address) is Family.IPV4 else 6
    if destination.protocol is Protocol.UDP:
        return Path(Via.SOCKET, Reason.SENDMSG_HOOK, f"hooks connect{number} and sendmsg{number}")
    return Path(Via.SOCKET, Reason.CONNECT_HOOK, f"hook connect{number}")


def _netfilter(
    situation: Situation, origin: Origin, destination: Destination, frontend: FrontendPlan | None
) -> Path:
    is_node = origin.kind is ClientClass.NODE
    if situation.mode == USERSPACE or _is_relayed_at_loopback(situation, destination, frontend):
        return Path(Via.RELAY, Reason.RELAY, "relay process")
    if situation.mode == IPVS:
        place = "output" if is_node else "input"
        return Path(Via.PACKET, Reason.VIRTUAL_SERVER, f"IPVS, at {place}")
    table = {Family.IPV4: "ip", Family.IPV6: "ip6"}[family(destination.address)]
    if situation.mode == NFTABLES:
        chain = NAT_OUTPUT if is_node else NAT_PREROUTING
        place = f"table {table} kube-proxy, chain {chain}"
    else:
        tool = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}[family(destination.address)]
        place = f"{tool}, table nat, chain {'OUTPUT' if is_node else 'PREROUTING'}, KUBE-SERVICES"
    may_offload = not is_node and destination.protocol is not Protocol.SCTP
    flowtable = Reason.FLOWTABLE if may_offload and situation.node.flowtable_devices else None
    return Path(Via.PACKET, Reason.NAT_OUTPUT if is_node else Reason.NAT_PREROUTING, place, flowtable)


def _is_relayed_at_loopback(
    situation: Situation, destination: Destination, frontend: FrontendPlan | None
) -> bool:
    if not (situation.behavior.relays_loopback and is_loopback(destination.address) and frontend):
        return False
    return frontend.kind is FrontendKind.NODE_PORT and destination.protocol is Protocol.TCP


def _devices(situation: Situation, origin: Origin) -> str:
    names = [
        each.name for each in situation.node.devices if each.role in (DeviceRole.UPLINK, DeviceRole.TUNNEL)
    ]
    if origin.interface:
        names = [origin.interface]
    return f"ingress of {', '.join(names) or 'the uplink'}"


def _output(situation: Situation, destination: Destination) -> str:
    route = situation.routes(destination.address)
    device = situation.device(route.ifindex) if route else None
    return f"egress of {device.name if device else 'the device that the packet leaves by'}"
