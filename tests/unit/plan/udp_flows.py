"""Builders of tracked flows and of the plans of a DNS Service."""

from typing import NamedTuple

from ebpfproxy.model.address import Address, Protocol, parse_address
from ebpfproxy.model.endpoint import Endpoint, EndpointPort
from ebpfproxy.model.service import ServiceType, TrafficPolicy
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import PlanKey, ServicePortPlan
from tests.support import build
from tests.support.build import CONTEXT, endpoint, networks, port, slice_of

UDP, TCP, SCTP = Protocol.UDP, Protocol.TCP, Protocol.SCTP
VIP, NODE, OTHER_NODE = "10.96.0.53", "192.0.2.10", "192.0.2.11"
LOCAL = networks([f"{NODE}/32", "127.0.0.0/8", "2001:db8::10/128"])


class Flow(NamedTuple):
    """A `TrackedFlow`."""

    protocol: int
    destination: Address
    destination_port: int
    reply_source: Address
    reply_source_port: int
    is_dnated: bool
    zone: int = 0


def place(text: str) -> tuple[Address, int]:
    """`10.0.0.1:53`, or `fd00::1:53` for port 53 of fd00::1."""
    address, _, number = text.rpartition(":")
    return parse_address(address), int(number)


def flow(sent: str, answers: str = "", *, protocol: int = UDP, zone: int = 0) -> Flow:
    """Return a flow to `sent` that `answers` answers; without `answers` it is not translated."""
    return Flow(protocol, *place(sent), *place(answers or sent), bool(answers), zone)


def plan(
    *endpoints: Endpoint,
    called: str = "dns",
    ips: tuple[str, ...] = (VIP,),
    external: tuple[str, ...] = (),
    node_port: int = 0,
    protocol: Protocol = UDP,
    policy: TrafficPolicy = TrafficPolicy.CLUSTER,
    target: int = 5353,
) -> dict[PlanKey, ServicePortPlan | None]:
    """Return the plans, by key, of a Service with port 53 whose endpoints have the port `target`."""
    service = build.service(
        called,
        port(53, protocol=protocol, node_port=node_port),
        ips=ips,
        external=external,
        type_=ServiceType.NODE_PORT,
        internal_policy=policy,
        external_policy=policy,
    )
    ports = [EndpointPort("", protocol, target)]
    slices = [slice_of(called, *endpoints, ports=ports)] if endpoints else []
    return {each.key: each for each in plan_service(service, slices, None, CONTEXT)}


def gone(plans: dict[PlanKey, ServicePortPlan | None]) -> dict[PlanKey, ServicePortPlan | None]:
    return dict.fromkeys(plans)


ONE, TWO = endpoint("10.1.0.1"), endpoint("10.1.0.2")
TO_ONE, TO_TWO = flow(f"{VIP}:53", "10.1.0.1:5353"), flow(f"{VIP}:53", "10.1.0.2:5353")
UNTRANSLATED = flow(f"{VIP}:53")
