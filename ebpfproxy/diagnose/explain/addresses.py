"""Masquerading for each endpoint, and the addresses that the server may see."""

from typing import NamedTuple

from ebpfproxy.diagnose.explain.lookup import is_ebpf
from ebpfproxy.diagnose.explain.origin import Origin
from ebpfproxy.diagnose.explain.reasons import Reason
from ebpfproxy.diagnose.explain.result import ClientClass, Destination, Path, Via
from ebpfproxy.diagnose.situation import Situation
from ebpfproxy.model.address import Address, Family, family, loopback
from ebpfproxy.plan.service_plan import FrontendKind, FrontendPlan, PlannedEndpoint, PolicyResult
from ebpfproxy.plan.sources import plan_sources, source_for


class Source(NamedTuple):
    """`masqueraded`: None if unknown. `seen`: the addresses that the server may see, empty if unknown."""

    masqueraded: bool | None
    why: Reason
    seen: tuple[Address, ...]


def source(
    situation: Situation,
    origin: Origin,
    destination: Destination,
    frontend: FrontendPlan,
    policy: PolicyResult,
    path: Path,
    endpoint: PlannedEndpoint,
) -> Source:
    """Return how an endpoint sees the client."""
    if path.via is Via.RELAY:
        return Source(True, Reason.RELAY_IS_CLIENT, _of_relay(situation, endpoint))
    if situation.is_local(endpoint.address):
        return Source(False, Reason.ENDPOINT_IS_NODE, _own(situation, origin, endpoint))
    if path.via is Via.SOCKET:
        return Source(False, Reason.SOCKET_IS_REWRITTEN, _unmasqueraded(situation, origin, endpoint.address))
    masqueraded, why = _decide(situation, origin, frontend, policy, endpoint)
    seen: tuple[Address, ...] = ()
    if masqueraded is not False:
        seen += _masquerade_addresses(situation, endpoint.address)
    if not masqueraded:
        seen += _unmasqueraded(situation, origin, destination.address)
    return Source(masqueraded, why, tuple(dict.fromkeys(seen)))


def _of_relay(situation: Situation, endpoint: PlannedEndpoint) -> tuple[Address, ...]:
    """Return the addresses of a relay's socket: an endpoint on the node itself sees its own address."""
    if situation.is_local(endpoint.address):
        return (endpoint.address,)
    route = situation.routes(endpoint.address)
    if route and route.source:
        return (route.source,)
    return _masquerade_addresses(situation, endpoint.address)


def _decide(
    situation: Situation,
    origin: Origin,
    frontend: FrontendPlan,
    policy: PolicyResult,
    endpoint: PlannedEndpoint,
) -> tuple[bool | None, Reason]:
    is_node = origin.kind is ClientClass.NODE
    is_hairpin = not is_node and endpoint.address in origin.addresses
    if not is_ebpf(situation):
        if is_hairpin:
            return True, Reason.HAIRPIN
        return (
            (True, _why(situation, origin, frontend)) if policy.masquerade else (False, Reason.POLICY_KEEPS)
        )
    if is_node:  # docs/decisions/0011: replies must return to the node's own address
        return True, Reason.POLICY_MASQUERADES
    if not is_hairpin:
        if endpoint.on_node:
            return False, Reason.REPLY_PASSES_NODE
        if not policy.masquerade:
            return False, Reason.POLICY_KEEPS
    why = Reason.HAIRPIN if is_hairpin else _why(situation, origin, frontend)
    route = situation.routes(endpoint.address)
    if route is None:
        return (None if endpoint.on_node is None and not is_hairpin else True), why
    if situation.device_plan(route.ifindex) is None:
        return False, Reason.NO_PROGRAM_AT_DEVICE
    return True, why


def _why(situation: Situation, origin: Origin, frontend: FrontendPlan) -> Reason:
    is_inside = origin.kind is ClientClass.POD and frontend.kind is FrontendKind.CLUSTER_IP
    if situation.context.masquerade_all and is_inside:
        return Reason.MASQUERADE_ALL
    return Reason.POLICY_MASQUERADES


def _masquerade_addresses(situation: Situation, endpoint: Address) -> tuple[Address, ...]:
    """Return the address with which packets to the endpoint are masqueraded.

    Mode ebpf: the address in the device's plan; with several, the source that the kernel selects. Other
    modes: as netfilter selects it, which ignores preferred sources of routes. A device without an address
    uses those of others. Without a known route, any address of the node.
    """
    of = family(endpoint)
    route = situation.routes(endpoint)
    device = situation.device(route.ifindex) if route else None
    if device:
        planned = situation.device_plan(device.ifindex)
        if is_ebpf(situation) and planned:
            chosen = planned.v4 if of is Family.IPV4 else planned.v6
            if planned.sources and route and route.source:
                chosen = route.source
            return (chosen,) if chosen else ()
        own = [address for address in device.addresses if family(address) is of]
        if own:
            sources = plan_sources(device._replace(preferred=()), ())
            return (source_for(sources, (route and route.gateway) or endpoint, endpoint) or own[0],)
    return tuple(situation.own_addresses(of))


def _unmasqueraded(situation: Situation, origin: Origin, towards: Address) -> tuple[Address, ...]:
    """Return the client's own address: for the node, the one that its route to the first destination has."""
    of = family(towards)
    own = origin.address(of)
    if own or origin.kind is not ClientClass.NODE:
        return (own,) if own else ()
    route = situation.routes(towards)
    if route and route.source:
        return (route.source,)
    return tuple(situation.own_addresses(of))


def _own(situation: Situation, origin: Origin, endpoint: PlannedEndpoint) -> tuple[Address, ...]:
    """Return how a process of this node sees a client: the node itself with any of its addresses."""
    of = family(endpoint.address)
    if origin.kind is not ClientClass.NODE:
        own = origin.address(of)
        return (own,) if own else ()
    return (*situation.own_addresses(of), loopback(of))
