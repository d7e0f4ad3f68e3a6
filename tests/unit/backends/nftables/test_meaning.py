"""The rules treat packets as the plan requires, for random Services. A model evaluates their text."""

import itertools
import re

import pytest
from hypothesis import given, settings

from ebpfproxy.backends.nftables.backend import render
from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, Element, ElementEntry, Entry, Key, Map, Set
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.model.address import Family, format_endpoint, parse_address, parse_network
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service
from ebpfproxy.plan.service_plan import (
    FrontendPlan,
    NodePlan,
    NoEndpointAction,
    PlanContext,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.golden.nftables_text import entries_of
from tests.golden.situation import load
from tests.support.examples import examples
from tests.support.iptables_walk import Packet, PacketOutcome
from tests.support.nftables_walk import Ruleset
from tests.support.strategies import CONTEXTS, NODES, exposed_services
from tests.unit.backends.iptables.test_meaning import (
    NODE_PLAN,
    TOLD_BY_RULES,
    Client,
    admitted,
    claimed_plans,
    clients,
    frontends_of,
    packet,
)

SETTINGS = NftablesSettings()
RESTRICTED = NodePlan(NODE_PLAN.local_networks, NODE_PLAN.node_port_networks, (), frozenset())
CLIENT, OWN = parse_address("203.0.113.77"), parse_address("192.0.2.10")

Exposed = tuple[Service, tuple[EndpointSlice, ...]]


@pytest.mark.parametrize("node_plan", [NODE_PLAN, RESTRICTED], ids=["everywhere", "on some addresses"])
@given(exposed_services(), NODES, TOLD_BY_RULES)
@settings(max_examples=examples(150))
def test_a_packet_is_treated_as_planned(
    node_plan: NodePlan, exposed: Exposed, node: Node | None, context: PlanContext
) -> None:
    plans = claimed_plans(exposed, node, context)
    for family in Family:
        rules = Ruleset(render(plans, node_plan, SETTINGS, [family]))
        for plan, frontend in frontends_of(plans, family):
            for client in clients(plan, frontend):
                found = rules.outcomes(packet(plan, frontend, client))
                assert found == expected(plan, frontend, client), (plan, frontend, client)


@given(exposed_services(), NODES, CONTEXTS)
def test_a_chain_exists_exactly_if_something_jumps_to_it(
    exposed: Exposed, node: Node | None, context: PlanContext
) -> None:
    shared = {key.name for key in render((), NODE_PLAN, SETTINGS) if isinstance(key, Chain)}
    for plan in claimed_plans(exposed, node, context):
        entries = render((plan,), None, SETTINGS)
        own = {key.name for key in entries if isinstance(key, Chain)}
        assert own == targets(entries) - shared


@given(exposed_services(), NODES, CONTEXTS)
def test_two_plans_share_only_the_keys_of_their_cluster_ip_and_session_affinity(
    exposed: Exposed, node: Node | None, context: PlanContext
) -> None:
    for one, other in itertools.combinations(claimed_plans(exposed, node, context), 2):
        first_entries, second_entries = (render((plan,), None, SETTINGS) for plan in (one, other))
        for key in first_entries.keys() & second_entries.keys():
            container = key.container if isinstance(key, Element) else key
            shared = ("cluster-ips", Set(key.family, "affinity"))
            assert container in shared or isinstance(key, Map)
            assert first_entries[key] == second_entries[key]


@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp", "icmp"])
@pytest.mark.parametrize("device", ["", "eth0", "cali1"])
def test_a_port_of_a_cluster_ip_that_no_service_has_is_rejected(protocol: str, device: str) -> None:
    unused = Packet(CLIENT, parse_address("10.96.0.10"), protocol, 81, device)
    assert rules_of("cluster_ip").outcomes(unused) == {PacketOutcome("REJECT", False)}


def test_packets_to_an_address_without_a_service_pass() -> None:
    passing = Packet(CLIENT, parse_address("10.96.0.11"), "tcp", 80)
    assert rules_of("cluster_ip").outcomes(passing) == {PacketOutcome("", False)}


def test_a_connection_of_an_endpoint_to_itself_without_a_service_passes() -> None:
    """Even if the endpoint could reach itself through a Service."""
    own = parse_address("10.1.0.1")
    assert rules_of("cluster_ip").outcomes(Packet(own, own, "tcp", 8080)) == {PacketOutcome("", False)}


def test_other_ports_of_an_external_ip_pass() -> None:
    passing = Packet(CLIENT, parse_address("203.0.113.1"), "tcp", 81)
    assert rules_of("external_ip").outcomes(passing) == {PacketOutcome("", False)}


def test_a_node_port_is_not_served_on_loopback() -> None:
    loopback = parse_address("127.0.0.1")
    frontends_of = Packet(loopback, loopback, "tcp", 30080, "", source_local=True, destination_local=True)
    assert rules_of("node_port").outcomes(frontends_of) == {PacketOutcome("", False)}


def test_a_node_port_is_not_served_on_an_address_that_is_not_the_nodes() -> None:
    passing = Packet(CLIENT, parse_address("192.0.2.11"), "tcp", 30080)
    assert rules_of("node_port").outcomes(passing) == {PacketOutcome("", False)}


def test_a_node_port_is_served_on_the_addresses_that_the_options_name_and_no_others() -> None:
    rules = rules_of("node_port_addresses_one_family")
    named = Packet(CLIENT, OWN, "tcp", 30080, destination_local=True)
    assert {outcome.verdict for outcome in rules.outcomes(named)} == {
        "DNAT 10.1.0.1:8080",
        "DNAT 10.1.0.2:8080",
    }
    other = named._replace(destination=parse_address("198.51.100.10"))
    assert rules.outcomes(other) == {PacketOutcome("", False)}


def test_a_node_port_is_served_on_all_of_a_network_that_is_local() -> None:
    networks = frozenset({parse_network("198.51.100.0/24"), parse_network("198.51.100.7/32")})
    plan = NodePlan(networks, networks, (), frozenset())
    entries = entries_of(load("node_port"))
    entries = {key: entry for key, entry in entries.items() if key not in render((), NODE_PLAN, SETTINGS)}
    rules = Ruleset(entries | render((), plan, SETTINGS, [Family.IPV4]))
    for text in ("198.51.100.7", "198.51.100.0/24"):
        address = parse_network(text).address if "/" in text else parse_address(text)
        frontends_of = Packet(CLIENT, address, "tcp", 30080, destination_local=True)
        assert {outcome.verdict for outcome in rules.outcomes(frontends_of)} == {
            "DNAT 10.1.0.1:8080",
            "DNAT 10.1.0.2:8080",
        }


def rules_of(case: str) -> Ruleset:
    return Ruleset({k: e for k, e in entries_of(load(case)).items() if k.family is Family.IPV4})


def expected(plan: ServicePortPlan, frontend: FrontendPlan, client: Client) -> set[PacketOutcome]:
    if frontend.restricted and not admitted(frontend, client):
        return {PacketOutcome("DROP", False)}
    policy_result: PolicyResult = getattr(frontend, client.source)
    local = policy_result.scope is Scope.LOCAL
    usable = [each for each in plan.endpoints if (each.local if local else each.cluster)]
    if not usable:
        return {
            PacketOutcome("DROP" if plan.no_endpoint_action is NoEndpointAction.DROP else "REJECT", False)
        }
    return {
        PacketOutcome(
            f"DNAT {format_endpoint(each.address, each.port)}",
            policy_result.masquerade or each.address == client.address,
        )
        for each in usable
    }


def targets(entries: dict[Key, Entry]) -> set[str]:
    """Return the chains that rules and elements jump to."""
    texts = [entry.verdict for entry in entries.values() if isinstance(entry, ElementEntry)]
    texts += [
        str(rule) for entry in entries.values() if isinstance(entry, ChainEntry) for rule in entry.rules
    ]
    return {name for text in texts for name in re.findall(r"(?:goto|jump) ([^ ,]+)", text)}
