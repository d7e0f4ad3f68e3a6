"""What becomes of one plan, where no golden case has it."""

import dataclasses

import pytest

from ebpfproxy.backends.nftables.backend import render
from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, Element, Entry, Key, Set
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.model.address import Address, Family, Protocol, parse_address, parse_network
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    LocalTraffic,
    NoEndpointAction,
    PlannedEndpoint,
    PolicyResult,
    Scope,
    ServicePortPlan,
)

KEPT, MASQUERADED = PolicyResult(Scope.CLUSTER, False), PolicyResult(Scope.CLUSTER, True)
LOCAL = PolicyResult(Scope.LOCAL, False)
NAME = ServicePortName("default", "web", "http", Protocol.TCP)
CLUSTER_IP = FrontendPlan(
    Frontend(parse_address("10.96.0.10"), 80, Protocol.TCP),
    FrontendKind.CLUSTER_IP,
    KEPT,
    MASQUERADED,
    MASQUERADED,
)
NODE_PORT = FrontendPlan(
    Frontend(parse_address("0.0.0.0"), 30080, Protocol.TCP), FrontendKind.NODE_PORT, KEPT, MASQUERADED, LOCAL
)
BALANCER = FrontendPlan(
    Frontend(parse_address("203.0.113.5"), 80, Protocol.TCP),
    FrontendKind.LOAD_BALANCER,
    MASQUERADED,
    MASQUERADED,
    MASQUERADED,
)
ENDPOINT = PlannedEndpoint(parse_address("10.1.0.1"), 8080, cluster=True, local=False, on_node=False)
PLAN = ServicePortPlan(
    NAME,
    Family.IPV4,
    (CLUSTER_IP, NODE_PORT),
    (ENDPOINT,),
    NoEndpointAction.DROP,
    0,
    LocalTraffic(interface="cbr0"),
)


def entries_of(plan: ServicePortPlan) -> dict[Key, Entry]:
    return render((plan,), None, NftablesSettings())


def rules(plan: ServicePortPlan, prefix: str) -> tuple[str, ...]:
    """Of the only chain whose name begins so; empty where there is none."""
    found = [
        entry.rules
        for key, entry in entries_of(plan).items()
        if isinstance(key, Chain) and isinstance(entry, ChainEntry) and key.name.startswith(f"{prefix}-")
    ]
    assert len(found) <= 1
    return found[0] if found else ()


def test_a_plan_without_frontends_is_nothing() -> None:
    assert entries_of(dataclasses.replace(PLAN, frontends=())) == {}


def test_a_plan_of_a_family_that_is_not_served_is_nothing() -> None:
    assert render((PLAN,), None, NftablesSettings(), [Family.IPV6]) == {}


def test_an_endpoint_that_only_serves_what_is_established_has_no_chain() -> None:
    serving = ENDPOINT._replace(address=parse_address("10.1.0.9"), cluster=False)
    assert entries_of(dataclasses.replace(PLAN, endpoints=(ENDPOINT, serving))) == entries_of(PLAN)


@pytest.mark.parametrize(
    ("traffic", "match", "other"),
    [
        (LocalTraffic(parse_network("10.1.0.0/16")), "ip saddr 10.1.0.0/16", "ip saddr != 10.1.0.0/16"),
        (LocalTraffic(parse_network("10.1.0.1/32")), "ip saddr 10.1.0.1", "ip saddr != 10.1.0.1"),
        (LocalTraffic(interface="cbr0"), 'iifname "cbr0"', 'iifname != "cbr0"'),
        (LocalTraffic(interface="cali", prefix=True), 'iifname "cali*"', 'iifname != "cali*"'),
        # 15 characters are all that a name can have, and the tool takes no asterisk behind them.
        (LocalTraffic(interface="a" * 15, prefix=True), f'iifname "{"a" * 15}"', f'iifname != "{"a" * 15}"'),
    ],
)
def test_pods_are_told_from_others(traffic: LocalTraffic, match: str, other: str) -> None:
    plan = dataclasses.replace(PLAN, local_traffic=traffic)
    assert rules(plan, "service")[0] == f"ip daddr 10.96.0.10 {other} jump mark-for-masquerade"
    assert rules(plan, "external")[0].startswith(f"{match} goto service-")


def test_where_nothing_tells_pods_from_others_they_are_others() -> None:
    plan = dataclasses.replace(PLAN, local_traffic=None)
    assert rules(plan, "service") == ("meta l4proto tcp dnat to 10.1.0.1:8080",)
    assert [rule.split(" ")[0] for rule in rules(plan, "external")] == ["fib", "fib"]


OTHER = ENDPOINT._replace(address=parse_address("10.1.0.2"), port=8081)


def test_a_service_chooses_its_endpoint_by_itself() -> None:
    plan = dataclasses.replace(PLAN, endpoints=(ENDPOINT, OTHER))
    assert rules(plan, "endpoint") == ()
    assert rules(plan, "service")[-2] == (
        "meta l4proto tcp dnat ip to numgen random mod 2 map { 0 : 10.1.0.1 . 8080, 1 : 10.1.0.2 . 8081 }"
    )


def test_an_endpoint_that_remembers_its_clients_has_a_chain() -> None:
    plan = dataclasses.replace(PLAN, affinity_timeout=60)
    update, dnat = rules(plan, "endpoint")
    assert update.endswith("{ ip saddr timeout 60s }")
    assert dnat == "meta l4proto tcp dnat to 10.1.0.1:8080"
    assert " vmap { 0 : goto endpoint-" in rules(plan, "service")[-2]


@pytest.mark.parametrize("affinity", [0, 60])
def test_who_finds_nothing_in_a_map_that_is_being_replaced_has_an_endpoint_all_the_same(
    affinity: int,
) -> None:
    """Without that, 8 connections of 450 000 were refused with 60 changes in a second."""
    plan = dataclasses.replace(PLAN, endpoints=(ENDPOINT, OTHER), affinity_timeout=affinity)
    chosen, otherwise = rules(plan, "service")[-2:]
    assert "map {" in chosen
    assert otherwise.endswith("10.1.0.2/8081" if affinity else " dnat to 10.1.0.2:8081")


@pytest.mark.parametrize("affinity", [0, 60])
@pytest.mark.parametrize("on_node", [True, None], ids=["here", "who knows where"])
def test_an_endpoint_that_may_be_on_this_node_may_reach_itself(affinity: int, on_node: bool | None) -> None:
    """One that is elsewhere cannot send anything that comes by here."""
    here = OTHER._replace(on_node=on_node)
    endpoints = (ENDPOINT, here, here._replace(cluster=False, port=1))
    entries = entries_of(dataclasses.replace(PLAN, endpoints=endpoints, affinity_timeout=affinity))
    found = [
        key.key for key in entries if isinstance(key, Element) and key.container == "hairpin-connections"
    ]
    assert found == ["10.1.0.2 . 10.1.0.2 . tcp . 8081"]


def test_another_timeout_of_affinity_changes_rules_only() -> None:
    """A set cannot be changed in place, and its elements are the clients that are remembered."""
    short, long = (entries_of(dataclasses.replace(PLAN, affinity_timeout=seconds)) for seconds in (60, 86400))
    changed = [key for key in short if short[key] != long[key]]
    assert short.keys() == long.keys()
    assert [type(key) for key in changed] == [Chain]
    assert any(isinstance(key, Set) for key in short)


def balancer(*ranges: str, node_admitted: bool = False) -> ServicePortPlan:
    networks = tuple(map(parse_network, ranges))
    restricted = BALANCER._replace(restricted=True, source_ranges=networks, node_admitted=node_admitted)
    return dataclasses.replace(PLAN, frontends=(CLUSTER_IP, restricted))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (balancer("192.0.2.0/24"), "ip saddr != 192.0.2.0/24 drop"),
        (balancer("192.0.2.0/24", node_admitted=True), "ip saddr != { 192.0.2.0/24, 203.0.113.5 } drop"),
        (balancer("203.0.113.0/24", node_admitted=True), "ip saddr != 203.0.113.0/24 drop"),
        (balancer("192.0.2.0/24", "192.0.2.7/32", "192.0.3.0/24"), "ip saddr != 192.0.2.0/23 drop"),
    ],
)
def test_who_is_in_no_source_range_is_dropped(plan: ServicePortPlan, expected: str) -> None:
    assert rules(plan, "firewall") == (expected,)


@pytest.mark.parametrize(
    "ranges", [["0.0.0.0/0"], ["0.0.0.0/1", "128.0.0.0/1"], ["192.0.2.0/24", "0.0.0.0/0"]]
)
def test_ranges_of_all_addresses_need_no_firewall(ranges: list[str]) -> None:
    entries = entries_of(balancer(*ranges))
    assert rules(balancer(*ranges), "firewall") == ()
    assert not any(isinstance(key, Element) and key.container == "firewall-ips" for key in entries)


class Counted(bytes):
    """An address that counts how often one is compared with another."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return super().__eq__(other)

    __hash__ = bytes.__hash__


def test_many_endpoints_are_not_searched_for_each_of_them() -> None:
    endpoints = tuple(
        ENDPOINT._replace(address=Address(Counted(ENDPOINT.address[:13] + number.to_bytes(3))), local=True)
        for number in range(1000)
    )
    assert entries_of(dataclasses.replace(PLAN, endpoints=endpoints, affinity_timeout=60))
    assert Counted.comparisons < 20_000  # a list, searched for each, makes half a million
