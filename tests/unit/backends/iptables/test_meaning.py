"""The rules treat packets as the plan requires, for random Services. A model evaluates their text."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from hypothesis import given, settings

from ebpfproxy.backends.iptables.chains import NODE_CHAINS, SHARED_CHAINS
from ebpfproxy.backends.iptables.entries import Chain, Entry, Key, Rule
from ebpfproxy.backends.iptables.rules import IptablesSettings, node_entries
from ebpfproxy.backends.iptables.service_rules import service_entries
from ebpfproxy.model.address import (
    Address,
    Family,
    contains,
    format_endpoint,
    parse_address,
    parse_network,
)
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service
from ebpfproxy.plan.claims import Claims
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import (
    DetectLocal,
    FrontendKind,
    FrontendPlan,
    NodePlan,
    NoEndpointAction,
    PlanContext,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.support.examples import examples
from tests.support.iptables_walk import Packet, PacketOutcome, outcomes, ruleset
from tests.support.strategies import CONTEXTS, NODES, exposed_services

TOLD_BY_RULES = CONTEXTS.filter(lambda context: context.detect_local is not DetectLocal.DEVICES)
SETTINGS = IptablesSettings()

OWN = {Family.IPV4: parse_address("192.0.2.10"), Family.IPV6: parse_address("2001:db8::10")}
CLIENTS = {
    Family.IPV4: tuple(map(parse_address, ("10.1.0.77", "192.0.2.77", "203.0.113.77", "198.51.100.7"))),
    Family.IPV6: tuple(map(parse_address, ("fd01::77", "2001:db8::77", "2001:db9::77"))),
}
LOCAL = frozenset(map(parse_network, ("127.0.0.0/8", "192.0.2.10/32", "::1/128", "2001:db8::10/128")))
NODE_PLAN = NodePlan(LOCAL, LOCAL)


class Client(NamedTuple):
    """`source`: a field of FrontendPlan, which is the class that the client is of."""

    address: Address
    device: str
    source: str


@given(exposed_services(), NODES, TOLD_BY_RULES)
@settings(max_examples=examples(300))
def test_a_packet_is_treated_as_planned(
    exposed: tuple[Service, tuple[EndpointSlice, ...]], node: Node | None, context: PlanContext
) -> None:
    plans = claimed_plans(exposed, node, context)
    for family in Family:
        entries = node_entries(NODE_PLAN, family, SETTINGS)
        for plan in plans:
            if plan.family is family:
                entries.update(service_entries(plan))
        rules = ruleset(entries)
        for plan, frontend in frontends_of(plans, family):
            for client in clients(plan, frontend):
                found = outcomes(rules, packet(plan, frontend, client))
                assert found == expected(plan, frontend, client), (plan, frontend, client)


@given(exposed_services(), NODES, CONTEXTS)
def test_a_chain_exists_exactly_if_a_rule_jumps_to_it(
    exposed: tuple[Service, tuple[EndpointSlice, ...]], node: Node | None, context: PlanContext
) -> None:
    known = {name for _, name in (*SHARED_CHAINS, *NODE_CHAINS)}
    for plan in claimed_plans(exposed, node, context):
        entries = service_entries(plan)
        own = {key.name for key in entries if isinstance(key, Chain)}
        targets = {text.rpartition("-j ")[2].split(" ")[0] for text in texts(entries) if "-j " in text}
        assert own == {target for target in targets if target.startswith("KUBE-")} - known


@given(exposed_services(), NODES, CONTEXTS)
def test_two_plans_share_a_key_only_if_one_load_balancer_needs_both(
    exposed: tuple[Service, tuple[EndpointSlice, ...]], node: Node | None, context: PlanContext
) -> None:
    """The exception requires two ports of one name, which the API server rejects."""
    for one, other in itertools.combinations(claimed_plans(exposed, node, context), 2):
        both = service_entries(one).keys() & service_entries(other).keys()
        assert all(isinstance(key, Rule) and "health check" in key.text for key in both)
        assert not both or str(one.name) == str(other.name)


def claimed_plans(
    exposed: tuple[Service, tuple[EndpointSlice, ...]], node: Node | None, context: PlanContext
) -> tuple[ServicePortPlan, ...]:
    """Return the plans of a Service after the claims: no two have a frontend in common."""
    service, slices = exposed
    return Claims().update(service.name, plan_service(service, slices, node, context)).plans


def frontends_of(
    plans: tuple[ServicePortPlan, ...], family: Family
) -> Iterator[tuple[ServicePortPlan, FrontendPlan]]:
    return ((plan, each) for plan in plans if plan.family is family for each in plan.frontends)


def clients(plan: ServicePortPlan, frontend: FrontendPlan) -> Iterator[Client]:
    """Yield clients of each existing class, including endpoints. The node connects from its own address and
    from the frontend address.
    """
    traffic = plan.local_traffic
    by_device = traffic.interface if traffic else ""
    network = traffic.network if traffic else None
    endpoints = tuple(each.address for each in plan.endpoints)
    for address in (*CLIENTS[plan.family], *endpoints):
        is_pod = network is not None and contains(network, address)
        yield Client(address, "eth0", "pod" if is_pod else "outside")
        if by_device:
            yield Client(address, by_device, "pod")
    own = [OWN[plan.family]]
    if frontend.kind is FrontendKind.LOAD_BALANCER:
        own.append(frontend.frontend.address)
    for address in own:
        if network is None or not contains(network, address):
            yield Client(address, "", "node")


def packet(plan: ServicePortPlan, frontend: FrontendPlan, client: Client) -> Packet:
    """Return the packet to a frontend, for a NodePort to the node's address.

    A load balancer's address is local if it is also the source.
    """
    address, port, _ = frontend.frontend
    to_node = frontend.kind is FrontendKind.NODE_PORT
    own = client.device == ""
    return Packet(
        client.address,
        OWN[plan.family] if to_node else address,
        plan.name.protocol.name.lower(),
        port,
        client.device,
        source_local=own,
        destination_local=to_node or (own and client.address == address),
    )


def expected(plan: ServicePortPlan, frontend: FrontendPlan, client: Client) -> set[PacketOutcome]:
    policy_result: PolicyResult = getattr(frontend, client.source)
    has_any = plan.no_endpoint_action is NoEndpointAction.DROP
    if frontend.restricted and has_any and not admitted(frontend, client):
        return {PacketOutcome("DROP", False)}
    local = policy_result.scope is Scope.LOCAL
    usable = [each for each in plan.endpoints if (each.local if local else each.cluster)]
    if not usable:
        external = frontend.kind is not FrontendKind.CLUSTER_IP
        if external and not packet(plan, frontend, client).destination_local and client.source == "node":
            return {
                PacketOutcome("", False)
            }  # kube-proxy has no such rule in OUTPUT: it goes out to whoever has the address
        return {PacketOutcome("DROP" if has_any else "REJECT", False)}
    return {
        PacketOutcome(
            f"DNAT {format_endpoint(each.address, each.port)}",
            policy_result.masquerade or each.address == client.address,
        )
        for each in usable
    }


def admitted(frontend: FrontendPlan, client: Client) -> bool:
    """Return whether source ranges allow the client. The node uses the destination as its source; its other
    addresses are treated like any client's.
    """
    if client.address == frontend.frontend.address and frontend.node_admitted:
        return True
    return any(contains(net, client.address) for net in frontend.source_ranges)


def texts(entries: dict[Key, Entry]) -> Iterator[str]:
    for key, entry in entries.items():
        if isinstance(key, Rule):
            yield key.text
        elif isinstance(entry, tuple):
            yield from entry
