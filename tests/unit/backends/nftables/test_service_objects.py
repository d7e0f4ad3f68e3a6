"""The objects of one plan, in situations without a golden case."""

import collections
import dataclasses
import re

import pytest

from ebpfproxy.backends.nftables.backend import render
from ebpfproxy.backends.nftables.entries import Chain, ChainEntry, Element, Endpoints, Entry, Key, Set
from ebpfproxy.backends.nftables.settings import NftablesSettings
from ebpfproxy.model.address import Address, Family, Protocol, parse_address, parse_network
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.balancing import DEFAULT, PlannedBalancing
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
from tests.support.nft_listing import endpoints_of

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
CHOICE = (
    "meta l4proto tcp dnat ip to numgen random mod 1 offset 306253139 . numgen random mod 1 offset 3788147980"
)
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
        tuple(map(str, entry.rules))
        for key, entry in entries_of(plan).items()
        if isinstance(key, Chain) and isinstance(entry, ChainEntry) and key.name.startswith(f"{prefix}-")
    ]
    assert len(found) <= 1
    return found[0] if found else ()


def test_a_plan_without_frontends_has_no_entries() -> None:
    assert entries_of(dataclasses.replace(PLAN, frontends=())) == {}


def test_a_plan_of_a_family_that_is_not_served_has_no_entries() -> None:
    assert render((PLAN,), None, NftablesSettings(), [Family.IPV6]) == {}


def test_an_endpoint_without_new_connections_is_not_listed() -> None:
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
    assert rules(plan, "service") == (f"{CHOICE} . numgen random mod 1 map @endpoints-083",)
    assert [rule.split(" ")[0] for rule in rules(plan, "external")] == ["fib", "fib"]


OTHER = ENDPOINT._replace(address=parse_address("10.1.0.2"), port=8081)


def listed(plan: ServicePortPlan) -> list[list[str]]:
    """Return the endpoints of each list."""
    return [endpoints_of(key, entry) for key, entry in entries_of(plan).items() if isinstance(key, Endpoints)]


def test_a_service_has_a_list_of_its_endpoints() -> None:
    plan = dataclasses.replace(PLAN, endpoints=PlannedEndpoints((ENDPOINT, OTHER)))
    assert listed(plan) == [["10.1.0.1 . 8080", "10.1.0.2 . 8081"]]
    assert rules(plan, "service")[-2] == f"{CHOICE} . numgen random mod 2 map @endpoints-083"


def test_policy_local_has_a_list_of_its_own() -> None:
    here = OTHER._replace(local=True)
    local = NODE_PORT._replace(node=LOCAL)
    plan = dataclasses.replace(
        PLAN, endpoints=PlannedEndpoints((ENDPOINT, here)), frontends=(CLUSTER_IP, local)
    )
    assert listed(plan) == [["10.1.0.1 . 8080", "10.1.0.2 . 8081"], ["10.1.0.2 . 8081"]]


def test_a_replaced_endpoint_changes_only_a_list() -> None:
    """If a rule changes, the kernel validates all rules of the table."""
    one, other = (
        entries_of(dataclasses.replace(PLAN, endpoints=PlannedEndpoints((each,))))
        for each in (ENDPOINT, OTHER)
    )
    assert one.keys() == other.keys()
    assert [type(key) for key in one if one[key] != other[key]] == [Endpoints]


def test_with_affinity_each_endpoint_has_a_rule_for_known_clients_and_one_for_others() -> None:
    plan = dataclasses.replace(PLAN, endpoints=PlannedEndpoints((ENDPOINT, OTHER)), affinity_timeout=60)
    known, other_known, first, second, *_ = rules(plan, "service")[1:]
    dnat = "meta l4proto tcp dnat to 10.1.0.1:8080"
    client = known.partition(" @")[0]
    assert re.fullmatch(r"ip saddr \. numgen random mod 1 offset [0-9]+", client)
    assert known == f"{client} @affinity update @affinity {{ {client} timeout 60s }} {dnat}"
    assert first == f"numgen random mod 2 0 update @affinity {{ {client} timeout 60s }} {dnat}"
    assert second == other_known.partition(" @affinity ")[2]
    assert entries_of(plan)[Set(Family.IPV4, "affinity")] == (
        "type ipv4_addr . mark; size 524288; flags dynamic,timeout;"
    )


@pytest.mark.parametrize("affinity", [0, 60])
def test_a_packet_that_finds_a_shorter_list_gets_its_first_endpoint(affinity: int) -> None:
    """A packet may be in the chain while the rules and the list are replaced. With session affinity, these
    rules also serve clients that the full set does not accept."""
    plan = dataclasses.replace(PLAN, endpoints=PlannedEndpoints((ENDPOINT, OTHER)), affinity_timeout=affinity)
    chosen, otherwise = rules(plan, "service")[-2:]
    assert chosen.endswith("numgen random mod 2 map @endpoints-083")
    assert otherwise.endswith("numgen random mod 1 map @endpoints-083")


def test_another_affinity_timeout_changes_only_rules() -> None:
    """The elements of the set are the known clients."""
    short, long = (entries_of(dataclasses.replace(PLAN, affinity_timeout=seconds)) for seconds in (60, 86400))
    changed = [key for key in short if short[key] != long[key]]
    assert short.keys() == long.keys()
    assert [type(key) for key in changed] == [Chain]


def balanced(
    algorithm: Algorithm | None, *weights: int, affinity: int = 0, scope: str = "cluster"
) -> ServicePortPlan:
    """Return the plan of a Service with two endpoints."""
    here = [ENDPOINT._replace(local=True), OTHER._replace(local=scope == "local")]
    return dataclasses.replace(
        PLAN,
        endpoints=PlannedEndpoints(here),
        frontends=(CLUSTER_IP, NODE_PORT),
        affinity_timeout=affinity,
        balancing=PlannedBalancing(algorithm, weights),
    )


@pytest.mark.parametrize(
    ("algorithm", "drawn"),
    [
        (None, "numgen random mod 4"),
        (Algorithm.RANDOM, "numgen random mod 4"),
        (Algorithm.ROUND_ROBIN, "numgen inc mod 4"),
        (Algorithm.SOURCE_HASH, "jhash ip saddr mod 4 seed 0x65627066"),
    ],
)
def test_an_endpoint_has_as_many_places_as_its_weight(algorithm: Algorithm | None, drawn: str) -> None:
    """6 to 2 is 3 to 1."""
    plan = balanced(algorithm, 6, 2)
    assert listed(plan)[0] == [f"10.1.0.{each}" for each in ("1 . 8080", "1 . 8080", "2 . 8081", "1 . 8080")]
    assert rules(plan, "service")[-2:] == (
        f"{CHOICE} . {drawn} map @endpoints-083",
        f"{CHOICE} . numgen random mod 1 map @endpoints-083",
    )


@pytest.mark.parametrize(
    ("algorithm", "share"),
    [
        (Algorithm.RANDOM, "numgen random mod 4 < 3"),
        (Algorithm.ROUND_ROBIN, "numgen inc mod 4 < 3"),
        (Algorithm.SOURCE_HASH, "jhash ip saddr mod 4 seed 0x65627066 < 3"),
    ],
)
def test_with_affinity_an_endpoint_has_one_rule_with_its_weight(algorithm: Algorithm, share: str) -> None:
    plan = balanced(algorithm, 3, 1, affinity=60)
    first, second, *_ = rules(plan, "service")[3:]
    assert first.startswith(f"{share} update @affinity")
    assert second.startswith("update @affinity")


def test_maglev_draws_from_a_table_by_address_and_port() -> None:
    plan = balanced(Algorithm.MAGLEV, 3, 1)
    cluster, local = listed(plan)
    counts = collections.Counter(cluster)
    assert len(cluster) == 251
    assert counts["10.1.0.1 . 8080"] == pytest.approx(251 * 3 / 4, abs=2)
    assert rules(plan, "service")[-2:] == (
        f"{CHOICE} . jhash ip saddr . th sport mod 251 seed 0x65627066 map @endpoints-083",
        f"{CHOICE} . numgen random mod 1 map @endpoints-083",
    )
    assert all(len(set(each)) > 1 or len(each) == 1 for each in (cluster, local))


def test_maglev_with_one_endpoint_needs_no_table() -> None:
    plan = balanced(Algorithm.MAGLEV)
    plan = dataclasses.replace(plan, endpoints=PlannedEndpoints((ENDPOINT,)))
    assert entries_of(plan) == entries_of(dataclasses.replace(plan, balancing=DEFAULT))


def test_with_affinity_maglev_divides_the_hash_by_weights() -> None:
    first, second, *_ = rules(balanced(Algorithm.MAGLEV, 3, 1, affinity=60), "service")[3:]
    assert first.startswith("jhash ip saddr . th sport mod 4 seed 0x65627066 < 3 update @affinity")
    assert second.startswith("update @affinity")


def test_with_affinity_the_hash_decides_in_all_rules() -> None:
    """A rule for one of the packets that remain would need another hash."""
    third = ENDPOINT._replace(address=parse_address("10.1.0.3"))
    plan = dataclasses.replace(
        balanced(Algorithm.SOURCE_HASH, 1, 2, 3, affinity=60),
        endpoints=PlannedEndpoints((ENDPOINT, OTHER, third)),
    )
    drawn = [rule.partition(" update")[0] for rule in rules(plan, "service")[4:6]]
    assert drawn == [f"jhash ip saddr mod 6 seed 0x65627066 {each}" for each in ("0", "< 3")]


def test_weights_are_divided_by_their_common_divisor_in_each_scope() -> None:
    assert [len(each) for each in listed(balanced(None, 4, 6))] == [5, 1]
    assert [len(each) for each in listed(balanced(None, 4, 4, scope="local"))] == [2, 2]


@pytest.mark.parametrize("affinity", [0, 60])
def test_without_annotations_and_with_equal_weights_the_entries_are_the_same(affinity: int) -> None:
    plain = dataclasses.replace(balanced(None, affinity=affinity), balancing=DEFAULT)
    for algorithm in (None, Algorithm.RANDOM, Algorithm.LEAST_CONNECTIONS):
        assert entries_of(balanced(algorithm, 7, 7, affinity=affinity)) == entries_of(plain)


def test_another_algorithm_changes_only_a_chain() -> None:
    one, other = (entries_of(balanced(each, 3, 1)) for each in (None, Algorithm.ROUND_ROBIN))
    assert one.keys() == other.keys()
    changed = {key.kind for key in one if one[key] != other[key] and isinstance(key, Chain)}
    assert changed == {"chain"}


def test_exchanged_weights_change_only_a_list() -> None:
    one, other = (entries_of(balanced(None, *weights)) for weights in ((3, 1), (1, 3)))
    assert [type(key) for key in one if one[key] != other[key]] == [Endpoints]


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
