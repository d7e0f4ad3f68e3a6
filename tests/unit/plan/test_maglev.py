"""The tables of the hash algorithms: equal on all nodes, and in proportion to weights."""

import hashlib
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.ebpf.services.client_hash import client_hash, entry_of
from ebpfproxy.backends.ebpf.services.slot_lists import TABLE_SIZES
from ebpfproxy.backends.nftables.shares import TABLE_SIZES as SMALL_SIZES
from ebpfproxy.model.address import parse_address
from ebpfproxy.plan.maglev import TableSizes, table
from ebpfproxy.plan.weights import reduced

MOST_MOVED = 0.02
"""The largest acceptable part of the entries of other endpoints that move when one of 100 endpoints is
removed."""


def target(number: int) -> bytes:
    address = parse_address(f"10.244.{number // 256}.{number % 256}")
    return address + (8080).to_bytes(2, "big")


def targets(count: int) -> list[bytes]:
    return [target(number) for number in range(count)]


def by_target(
    of: list[bytes], weights: list[int] | None = None, sizes: TableSizes = TABLE_SIZES
) -> list[bytes]:
    return [of[index] for index in table(of, weights or [], sizes.of(len(of), sum(weights or [])))]


def moved(before: list[bytes], after: list[bytes], removed: bytes) -> float:
    """The part of the entries of other endpoints that have another endpoint now."""
    others = [pair for pair in zip(before, after, strict=True) if pair[0] != removed]
    return sum(1 for one, other in others if one != other) / len(others)


def test_shuffled_input_results_in_the_same_table() -> None:
    source = random.Random(1)
    ordered = targets(100)
    weights = {each: source.randint(1, 5) for each in ordered}
    shuffled = source.sample(ordered, len(ordered))
    assert by_target(ordered) == by_target(shuffled)
    assert by_target(ordered, [weights[each] for each in ordered]) == by_target(
        shuffled, [weights[each] for each in shuffled]
    )


def test_a_table_is_the_same_in_every_version() -> None:
    """Nodes of two versions forward packets of the same connection."""
    digest = hashlib.sha256(bytes(table(targets(100), [], 16381))).hexdigest()
    assert digest == "619e1d92380298c608a1cbf1722964123ee4dbcb4bdfab537abe81d91a4f9813"


@pytest.mark.parametrize(
    ("sizes", "count", "most"),
    [
        (TABLE_SIZES, 2, 0.0),
        (TABLE_SIZES, 10, 0.03),
        (TABLE_SIZES, 15, 0.03),
        (TABLE_SIZES, 100, MOST_MOVED),
        (TABLE_SIZES, 120, MOST_MOVED),
        (TABLE_SIZES, 500, MOST_MOVED),
        (SMALL_SIZES, 2, 0.0),
        (SMALL_SIZES, 10, 0.1),
        (SMALL_SIZES, 15, 0.1),
        (SMALL_SIZES, 50, 0.08),
        (SMALL_SIZES, 100, 0.05),
        (SMALL_SIZES, 500, MOST_MOVED),
    ],
)
def test_removing_an_endpoint_moves_few_other_entries(sizes: TableSizes, count: int, most: float) -> None:
    of = targets(count)
    before = by_target(of, sizes=sizes)
    for removed in random.Random(2).sample(of, min(count, 5)):
        after = by_target([each for each in of if each != removed], sizes=sizes)
        assert moved(before, after, removed) <= most


def test_removing_one_of_100_endpoints_moves_few_flows() -> None:
    """As above, measured with the flows of clients."""
    of = targets(100)
    before, after = by_target(of), by_target(of[:37] + of[38:])
    source = random.Random(3)
    flows = [(parse_address(f"192.0.2.{source.randrange(256)}"), source.randrange(1024, 65536))]
    flows += [(flows[0][0], source.randrange(1024, 65536)) for _ in range(20_000)]
    entries = [entry_of(client_hash(*flow), len(before)) for flow in flows]
    others = [entry for entry in entries if before[entry] != of[37]]
    assert sum(before[entry] != after[entry] for entry in others) <= MOST_MOVED * len(others)
    assert len(others) < len(entries)


@pytest.mark.parametrize("sizes", [TABLE_SIZES, SMALL_SIZES])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_equal_endpoints_differ_by_one_entry_at_most(sizes: TableSizes, count: int) -> None:
    shares = Counter(table(targets(count), [], sizes.of(count))).values()
    assert len(shares) == count
    assert max(shares) - min(shares) <= 1


def test_entries_are_in_proportion_to_weights() -> None:
    size = TABLE_SIZES.of(3)
    shares = Counter(table(targets(3), [1, 3, 100], size))
    for index, weight in enumerate((1, 3, 100)):
        assert shares[index] == pytest.approx(size * weight / 104, abs=2)


@given(st.lists(st.integers(1, 100), min_size=2, max_size=40))
def test_every_endpoint_has_entries_in_a_small_table(weights: list[int]) -> None:
    """Also one of weight 1 beside many of weight 100."""
    size = SMALL_SIZES.of(len(weights), sum(reduced(weights)))
    assert len(set(table(targets(len(weights)), weights, size))) == len(weights)


@pytest.mark.parametrize("sizes", [TABLE_SIZES, SMALL_SIZES])
def test_sizes_are_primes(sizes: TableSizes) -> None:
    """Otherwise an endpoint would not reach all entries."""
    assert all(size % divisor for size in sizes.sizes for divisor in range(2, math.isqrt(size) + 1))


def test_a_weight_changes_few_entries_of_others() -> None:
    of = targets(100)
    before = by_target(of)
    after = by_target(of, [2, *[1] * 99])
    kept = [pair for pair in zip(before, after, strict=True) if pair[1] != of[0]]
    assert sum(1 for one, other in kept if one != other) <= MOST_MOVED * len(kept)


def test_without_endpoints_there_is_no_table() -> None:
    assert table([], [], 251) == []


def test_more_endpoints_than_entries_get_as_many_as_there_is_room_for() -> None:
    assert len(set(table(targets(256), [], 251))) == 251


def test_weights_that_are_equal_change_nothing() -> None:
    assert table(targets(5), [3] * 5, 251) == table(targets(5), [], 251)


def test_the_hash_of_similar_clients_is_uniform() -> None:
    """Chi-square with 99 degrees of freedom: 200 is exceeded once in 10^8 random samples."""
    shares = Counter(
        entry_of(client_hash(parse_address("10.0.0.1"), port), 100) for port in range(20_000, 60_000)
    )
    assert sum((shares[entry] - 400) ** 2 / 400 for entry in range(100)) < 200
