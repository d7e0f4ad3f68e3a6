"""The frontend that a connection reaches; or why there is none, and the nearest ones."""

from collections.abc import Iterator
from typing import NamedTuple

from ebpfproxy.backends.behavior import Unused
from ebpfproxy.diagnose.explain.origin import EBPF, Origin
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import ClientClass, Destination
from ebpfproxy.diagnose.situation import Served, Situation
from ebpfproxy.model.address import (
    Address,
    Network,
    Protocol,
    contains,
    family,
    is_loopback,
    loopback,
    unspecified,
)
from ebpfproxy.model.service import NamespacedName
from ebpfproxy.plan.health_check_node_port import needs_health_check
from ebpfproxy.plan.reason import AnyReason
from ebpfproxy.plan.service_plan import Frontend, FrontendKind, ServicePortPlan

IPTABLES, IPVS, NFTABLES, USERSPACE = "iptables", "ipvs", "nftables", "userspace"

MOST_CANDIDATES = 5
_SINGLE = 128

_REASONS = {
    FrontendKind.CLUSTER_IP: Reason.CLUSTER_IP,
    FrontendKind.EXTERNAL_IP: Reason.EXTERNAL_IP,
    FrontendKind.LOAD_BALANCER: Reason.LOAD_BALANCER_IP,
    FrontendKind.NODE_PORT: Reason.NODE_PORT,
}


class Found(NamedTuple):
    """A frontend of the destination. `node_port`: the NodePort that would have it otherwise."""

    served: Served
    why: AnyReason
    node_port: Served | None = None

    @property
    def plan(self) -> ServicePortPlan:
        return self.served.plan


class Missing(NamedTuple):
    """No frontend. `nearest`: similar ones, the best first.

    `service`: of the health check node port, of the endpoint or of the NodePort.
    """

    why: AnyReason
    nearest: tuple[Served, ...] = ()
    service: str = ""


def find(situation: Situation, destination: Destination, origin: Origin) -> Found | Missing:
    """Return the frontend of the destination: one of its address before a NodePort.

    The destination has a port and a protocol.
    """
    assert destination.protocol
    exact = situation.frontends.get(Frontend(destination.address, destination.port, destination.protocol))
    any_address = unspecified(family(destination.address))
    node_port = situation.frontends.get(Frontend(any_address, destination.port, destination.protocol))
    claimed = exact or node_port
    if claimed and is_loopback(destination.address) and origin.kind is not ClientClass.NODE:
        return Missing(Reason.OTHER_LOOPBACK, (claimed,), str(claimed.plan.name))
    obstacle = _obstacle(situation, destination.address) if node_port else None
    usable = node_port if not obstacle else None
    if exact:
        return Found(exact, _REASONS[exact.frontend.kind], usable)
    if usable:
        return Found(usable, Reason.NODE_PORT)
    return _missing(situation, destination, node_port, obstacle)


def _obstacle(situation: Situation, address: Address) -> Reason | None:
    """Return why NodePorts are not served at the address, None if they are. Loopback is that of the node."""
    if is_loopback(address) and family(address) not in situation.behavior.loopback:
        return Reason.LOOPBACK_EXCLUDED
    if situation.accepts_node_ports(address) and not _needs_device(situation, address):
        return None
    if is_loopback(address):
        return Reason.LOOPBACK_EXCLUDED
    return Reason.ADDRESS_EXCLUDED if situation.is_local(address) else Reason.NOT_THIS_NODE


def _needs_device(situation: Situation, address: Address) -> bool:
    """Whether the mode has no listener or rule for the address, although it is local: no device has it, or it
    is another one of 127.0.0.0/8 than a relay has."""
    if situation.behavior.relays_loopback and is_loopback(address):
        return address != loopback(family(address))
    if situation.mode == IPTABLES and family(address) in situation.node.node_ports_everywhere:
        return False
    has_device = Network(address, _SINGLE) in situation.node.node_port_networks
    return situation.mode in (USERSPACE, IPTABLES) and not has_device


def _missing(
    situation: Situation, destination: Destination, node_port: Served | None, obstacle: Reason | None
) -> Missing:
    of_address = situation.addresses.get(destination.address, ())
    assert destination.protocol
    frontend = Frontend(destination.address, destination.port, destination.protocol)
    if protection := situation.protection_of(frontend):
        claiming, owner = protection
        return Missing(owner, service=str(claiming))
    if node_port and obstacle:
        return Missing(obstacle, (node_port,), str(node_port.plan.name))
    if of_address:
        kinds = {each.frontend.kind for each in of_address}
        why = Reason.PORT_NOT_SERVED
        if FrontendKind.CLUSTER_IP in kinds and rejects_unused_ports(situation, destination.address):
            why = Reason.UNUSED_PORT_REJECTED
        elif situation.behavior.has_addresses and not situation.is_local(destination.address):
            why = Reason.UNUSED_PORT_ON_NODE
        nearest = sorted(of_address, key=lambda each: _distance(each, destination))
        return Missing(why, tuple(nearest[:MOST_CANDIDATES]))
    if destination.protocol is Protocol.TCP and situation.is_local(destination.address):
        for name in _checked_at(situation, destination.port):
            return Missing(Reason.HEALTH_CHECK_NODE_PORT, service=str(name))
    if is_unallocated(situation, destination.address):
        return Missing(Reason.UNALLOCATED_CLUSTER_IP, tuple(_similar(situation, destination)))
    for plan in _with_endpoint(situation, destination):
        return Missing(Reason.ENDPOINT_ADDRESS, service=str(plan.name))
    return Missing(Reason.NO_FRONTEND, tuple(_similar(situation, destination)))


def rejects_unused_ports(situation: Situation, address: Address) -> bool:
    """Whether the mode rejects packets to the ports of this ClusterIP that its Service does not have."""
    unused = situation.behavior.unused_cluster_ips
    return unused is Unused.PORTS_REJECTED or is_unallocated(situation, address)


def is_unallocated(situation: Situation, address: Address) -> bool:
    """Whether the mode drops or rejects packets to the address if no Service has it: one of a ServiceCIDR,
    not the node's own, and in mode ebpf not one that another machine may have."""
    unused = situation.behavior.unused_cluster_ips
    if unused is Unused.ROUTED or situation.is_local(address):
        return False
    if unused is Unused.REJECTED and situation.is_foreign(address):
        return False
    return any(contains(net, address) for net in situation.node.service_cidrs)


def _distance(served: Served, destination: Destination) -> tuple[bool, bool, int, int]:
    """Sort by port, then protocol, then the difference of the ports."""
    frontend = served.frontend.frontend
    return (
        frontend.port != destination.port,
        frontend.protocol is not destination.protocol,
        abs(frontend.port - destination.port),
        frontend.port,
    )


def _similar(situation: Situation, destination: Destination) -> Iterator[Served]:
    """Yield frontends with the same port whose address begins alike, or NodePorts of another protocol."""
    of_family = family(destination.address)
    same_port = [
        served
        for served in situation.frontends.values()
        if served.frontend.frontend.port == destination.port
        and family(served.frontend.frontend.address) is of_family
    ]
    number = int.from_bytes(destination.address)
    same_port.sort(
        key=lambda each: (
            (int.from_bytes(each.frontend.frontend.address) ^ number).bit_length(),
            each.frontend.frontend,
        )
    )
    yield from same_port[:MOST_CANDIDATES]


def _checked_at(situation: Situation, port: int) -> Iterator[NamespacedName]:
    """Yield the Services whose health check node port this is."""
    for service in situation.state.services.values():
        if needs_health_check(service) and service.health_check_node_port == port:
            yield service.name


def _with_endpoint(situation: Situation, destination: Destination) -> Iterator[ServicePortPlan]:
    """Yield the plans with an endpoint at this address, the same port first."""
    plans = [
        plan
        for plan in situation.plans.values()
        if any(each.address == destination.address for each in plan.endpoints)
    ]
    plans.sort(
        key=lambda plan: (
            not any((e.address, e.port) == (destination.address, destination.port) for e in plan.endpoints),
            plan.name,
        )
    )
    yield from plans


def is_ebpf(situation: Situation) -> bool:
    """Whether the mode has a socket path."""
    return situation.mode == EBPF
