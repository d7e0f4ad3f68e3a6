"""The objects of one plan, in situations without a golden case."""

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
    PlannedEndpoints,
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
    PlannedEndpoints((ENDPOINT,)),
    NoEndpointAction.DROP,
    0,
    LocalTraffic(interface="cbr0"),
)


def entries_of(plan: ServicePortPlan) -> dict[Key, Entry]:
    return render((plan,), None, NftablesSettings())


def rules(plan: ServicePortPlan, prefix: str) -> tuple[str, ...]:
    """Return the rules of the only chain with this prefix; empty if there is none."""
    found = [
        entry.rules
        for key, entry in entries_of(plan).items()
        if isinstance(key, Chain) and isinstance(entry, ChainEntry) and key.name.startswith(f"{prefix}-")
    ]
    assert len(found) <= 1
    return found[0] if found else ()


def test_a_plan_without_frontends_has_no_entries() -> None:
    assert entries_of(dataclasses.replace(PLAN, frontends=())) == {}


def test_a_plan_of_a_family_that_is_not_served_has_no_entries() -> None:
    assert render((PLAN,), None, NftablesSettings(), [Family.IPV6]) == {}


def test_an_endpoint_without_new_connections_has_no_chain() -> None:
    serving = ENDPOINT._replace(address=parse_address("10.1.0.9"), cluster=False)
    assert entries_of(
        dataclasses.replace(PLAN, endpoints=PlannedEndpoints((ENDPOINT, serving)))
    ) == entries_of(PLAN)


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
def test_pods_are_matched_by_local_traffic_detection(traffic: LocalTraffic, match: str, other: str) -> None:
    plan = dataclasses.replace(PLAN, local_traffic=traffic)
    assert rules(plan, "service")[0] == f"ip daddr 10.96.0.10 {other} jump mark-for-masquerade"
    assert rules(plan, "external")[0].startswith(f"{match} goto service-")


def test_without_local_traffic_detection_pods_are_external_clients() -> None:
    plan = dataclasses.replace(PLAN, local_traffic=None)
    assert rules(plan, "service") == ("meta l4proto tcp dnat to 10.1.0.1:8080",)
    assert [rule.split(" ")[0] for rule in rules(plan, "external")] == ["fib", "fib"]


OTHER = ENDPOINT._replace(address=parse_address("10.1.0.2"), port=8081)


def test_without_affinity_the_service_chain_translates_directly() -> None:
    plan = dataclasses.replace(PLAN, endpoints=PlannedEndpoints((ENDPOINT, OTHER)))
    assert rules(plan, "endpoint") == ()
    assert rules(plan, "service")[-2] == (
        "meta l4proto tcp dnat ip to numgen random mod 2 map { 0 : 10.1.0.1 . 8080, 1 : 10.1.0.2 . 8081 }"
    )


def test_with_affinity_an_endpoint_has_a_chain() -> None:
    plan = dataclasses.replace(PLAN, affinity_timeout=60)
    update, dnat = rules(plan, "endpoint")
    assert update.endswith("{ ip saddr timeout 60s }")
    assert dnat == "meta l4proto tcp dnat to 10.1.0.1:8080"
    assert " vmap { 0 : goto endpoint-" in rules(plan, "service")[-2]


@pytest.mark.parametrize("affinity", [0, 60])
def test_a_packet_that_finds_a_replaced_map_empty_gets_an_endpoint(
    affinity: int,
) -> None:
    """Without this rule, 8 of 450 000 connections were rejected at 60 changes per second."""
    plan = dataclasses.replace(PLAN, endpoints=PlannedEndpoints((ENDPOINT, OTHER)), affinity_timeout=affinity)
    chosen, otherwise = rules(plan, "service")[-2:]
    assert "map {" in chosen
    assert otherwise.endswith("10.1.0.2/8081" if affinity else " dnat to 10.1.0.2:8081")


@pytest.mark.parametrize("affinity", [0, 60])
@pytest.mark.parametrize("on_node", [True, None], ids=["here", "who knows where"])
def test_a_possibly_local_endpoint_may_open_hairpin_connections(affinity: int, on_node: bool | None) -> None:
    """Packets of an endpoint on another node to itself do not pass this node."""
    here = OTHER._replace(on_node=on_node)
    endpoints = (ENDPOINT, here, here._replace(cluster=False, port=1))
    entries = entries_of(
        dataclasses.replace(PLAN, endpoints=PlannedEndpoints(endpoints), affinity_timeout=affinity)
    )
    found = [
        key.key for key in entries if isinstance(key, Element) and key.container == "hairpin-connections"
    ]
    assert found == ["10.1.0.2 . 10.1.0.2 . tcp . 8081"]


def test_another_affinity_timeout_changes_only_rules() -> None:
    """A set cannot be changed in place, and its elements are the known clients."""
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
def test_clients_outside_the_source_ranges_are_dropped(plan: ServicePortPlan, expected: str) -> None:
    assert rules(plan, "firewall") == (expected,)


@pytest.mark.parametrize(
    "ranges", [["0.0.0.0/0"], ["0.0.0.0/1", "128.0.0.0/1"], ["192.0.2.0/24", "0.0.0.0/0"]]
)
def test_source_ranges_that_cover_everything_have_no_firewall(ranges: list[str]) -> None:
    entries = entries_of(balancer(*ranges))
    assert rules(balancer(*ranges), "firewall") == ()
    assert not any(isinstance(key, Element) and key.container == "firewall-ips" for key in entries)


class Counted(bytes):
    """An address that counts its comparisons."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return super().__eq__(other)

    __hash__ = bytes.__hash__


def test_rendering_many_endpoints_takes_linear_time() -> None:
    endpoints = tuple(
        ENDPOINT._replace(address=Address(Counted(ENDPOINT.address[:13] + number.to_bytes(3))), local=True)
        for number in range(1000)
    )
    assert entries_of(dataclasses.replace(PLAN, endpoints=PlannedEndpoints(endpoints), affinity_timeout=60))
    assert Counted.comparisons < 20_000  # a list, searched for each, makes half a million
