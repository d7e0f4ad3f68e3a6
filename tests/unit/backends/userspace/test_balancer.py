"""Which endpoint a client of a relay gets."""

from collections import Counter

import pytest

from ebpfproxy.backends.userspace.entries import Balancing
from ebpfproxy.backends.userspace.relay.balancer import ALGORITHMS, Affinity, Balancer
from ebpfproxy.backends.userspace.relay.workload import Target
from ebpfproxy.model.address import parse_address
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.service_plan import PlannedEndpoint, PlannedEndpoints

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def entry(*addresses: str, local: tuple[str, ...] = (), **others: object) -> Balancing:
    rows = PlannedEndpoints(
        PlannedEndpoint(parse_address(each), 80, True, each in local, None) for each in addresses
    ).rows
    return Balancing(rows, **others)  # type: ignore[arg-type]


def balancer(balancing: Balancing, most: int = 100, first: int = 0) -> Balancer:
    return Balancer(balancing, Affinity(most), first)


def chosen(of: Balancer, client: str = "192.0.2.1", now: float = 0.0, local: bool = False) -> str:
    found = of.choose(client, local, now)
    assert found
    return found.address


def test_round_robin_begins_where_it_is_told_and_continues_after_a_change() -> None:
    of = balancer(entry(A, B, C), first=1)
    assert [chosen(of) for _ in range(4)] == [B, C, A, B]
    of.put(entry(A, C))
    assert [chosen(of) for _ in range(3)] == [C, A, C]


def test_each_scope_has_its_endpoints_and_its_own_position() -> None:
    of = balancer(entry(A, B, C, local=(B,)))
    assert chosen(of, local=True) == B
    assert chosen(of) == A
    of.put(entry(A))
    assert of.choose("192.0.2.1", True, 0.0) is None
    assert not of.has_any(local=True)


def test_a_client_with_affinity_keeps_its_endpoint_until_the_timeout() -> None:
    of = balancer(entry(A, B, affinity_timeout=10))
    assert [chosen(of, "192.0.2.1"), chosen(of, "192.0.2.2")] == [A, B]
    assert chosen(of, "192.0.2.1", now=9.0) == A
    assert chosen(of, "192.0.2.1", now=19.0) == A  # 10 s after the previous connection
    assert chosen(of, "192.0.2.2", now=19.0) == A  # after its timeout, the next in turn


def test_affinity_to_a_removed_endpoint_is_not_used() -> None:
    of = balancer(entry(A, B, affinity_timeout=10))
    assert chosen(of) == A
    of.put(entry(B, C, affinity_timeout=10))
    assert chosen(of) in (B, C)
    assert chosen(of) == chosen(of)


def test_a_failed_endpoint_is_followed_by_another_one_which_gets_the_affinity() -> None:
    of = balancer(entry(A, B, affinity_timeout=10))
    first = of.choose("192.0.2.1", False, 0.0)
    second = of.choose("192.0.2.1", False, 0.0, failed=first)
    assert first
    assert second
    assert (first.address, second.address) == (A, B)
    assert chosen(of) == B


def test_the_table_of_affinity_forgets_the_least_recently_active_client() -> None:
    of = balancer(entry(A, B, affinity_timeout=10), most=2)
    for client in ("192.0.2.1", "192.0.2.2", "192.0.2.1", "192.0.2.3"):
        chosen(of, client)
    known = {client for client in ("192.0.2.1", "192.0.2.2", "192.0.2.3") if _is_known(of, client)}
    assert known == {"192.0.2.1", "192.0.2.3"}


def _is_known(of: Balancer, client: str) -> bool:
    return of._affinity.get(of, client, 10, 0.0) is not None


def test_weights_distribute_connections_evenly_over_a_cycle() -> None:
    of = balancer(entry(A, B, weights=(3, 1)))
    assert Counter(chosen(of) for _ in range(40)) == {A: 30, B: 10}


def test_source_hash_moves_few_clients_when_an_endpoint_is_added() -> None:
    of = balancer(entry(A, B, algorithm="source-hash"))
    clients = [f"192.0.2.{n}" for n in range(200)]
    before = {client: chosen(of, client) for client in clients}
    assert set(before.values()) == {A, B}
    of.put(entry(A, B, C, algorithm="source-hash"))
    after = {client: chosen(of, client) for client in clients}
    assert {after[client] for client in clients if after[client] != before[client]} == {C}


def test_the_least_connected_endpoint_by_weight_is_selected() -> None:
    of = balancer(entry(A, B, algorithm="least-connections", weights=(1, 3)))
    for _ in range(8):
        found = of.choose("192.0.2.1", False, 0.0)
        assert found
        of.began(found)
    assert of.connections == {Target(2, A, 80): 2, Target(2, B, 80): 6}
    of.ended(Target(2, A, 80))
    of.ended(Target(2, A, 80))
    assert of.connections == {Target(2, B, 80): 6}


def test_equally_few_connections_are_followed_by_those_of_the_next_endpoint() -> None:
    """Short connections have ended before the next one begins."""
    of = balancer(entry(A, B, C, algorithm="least-connections"))
    assert [chosen(of) for _ in range(6)] == [A, B, C, A, B, C]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_uses_every_endpoint(algorithm: Algorithm) -> None:
    of = balancer(entry(A, B, C, algorithm=algorithm.value))
    found = set()
    for number in range(300):
        target = of.choose(f"192.0.2.{number % 250}", False, 0.0)
        assert target
        of.began(target)
        found.add(target.address)
    assert found == {A, B, C}
