"""The share of each endpoint: places in a list, and rules with session affinity."""

import collections
import itertools
import random
import re
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.nftables.shares import Shares, shares
from ebpfproxy.linux.nft.draws import Draw
from ebpfproxy.model.address import Address, parse_address
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.balancing import DEFAULT, PlannedBalancing
from ebpfproxy.plan.planned_endpoints import PlannedEndpoint

WEIGHTS = st.lists(st.integers(1, 100), min_size=1, max_size=20)


def endpoint(number: int, cluster: bool = True) -> PlannedEndpoint:
    return PlannedEndpoint(Address(number.to_bytes(16)), 80, cluster, False, True)


def shares_of(algorithm: Algorithm, *weights: int) -> Shares:
    endpoints = [endpoint(number) for number in range(len(weights))]
    found = shares(endpoints, PlannedBalancing(algorithm, weights), lambda each: each.cluster)
    assert found
    return found


def numbers(of: Shares) -> str:
    return "".join("abcdef"[int.from_bytes(each.address)] for each in of.places)


def test_places_are_evenly_spread() -> None:
    assert numbers(shares_of(Algorithm.ROUND_ROBIN, 5, 1, 1)) == "aaabcaa"
    assert numbers(shares_of(Algorithm.ROUND_ROBIN, 2, 2, 2)) == "abc"
    assert numbers(shares_of(Algorithm.ROUND_ROBIN, 2, 3)) == "babab"


@given(WEIGHTS)
def test_places_are_proportional_to_weights(weights: list[int]) -> None:
    counts = collections.Counter(shares_of(Algorithm.RANDOM, *weights).places)
    assert len({Fraction(counts[endpoint(n)], weight) for n, weight in enumerate(weights)}) == 1


def test_no_usable_endpoint_has_no_shares() -> None:
    assert shares([endpoint(1, cluster=False)], DEFAULT, lambda each: each.cluster) is None
    assert shares([], DEFAULT, lambda each: True) is None


def test_weights_of_other_endpoints_do_not_count() -> None:
    balancing = PlannedBalancing(weights=(4, 3, 2))
    found = shares([endpoint(0), endpoint(1, cluster=False), endpoint(2)], balancing, lambda e: e.cluster)
    assert found == Shares(Draw.RANDOM, [endpoint(0), endpoint(2)], [2, 1])


def part_and_total(condition: str) -> tuple[int, int]:
    """How many of how many packets the condition selects."""
    found = re.search(r" mod ([0-9]+) .*?(?:< ([0-9]+)|0) $", condition)
    assert found
    return int(found[2] or 1), int(found[1])


@given(WEIGHTS)
def test_rules_in_turn_select_in_proportion(weights: list[int]) -> None:
    """Each rule counts the packets that reach it, as the kernel does."""
    of = shares_of(Algorithm.ROUND_ROBIN, *weights)
    selectors = [
        (each, itertools.cycle(range(part_and_total(condition)[1])) if condition else None, condition)
        for each, condition in of.conditions("ip")
    ]
    counts: collections.Counter[PlannedEndpoint] = collections.Counter()
    for _ in range(sum(of.weights)):
        counts[
            next(
                each
                for each, counter, condition in selectors
                if counter is None or next(counter) < part_and_total(condition)[0]
            )
        ] += 1
    assert [counts[each] for each in of.endpoints] == of.weights


@given(WEIGHTS)
def test_rules_with_a_hash_divide_its_values(weights: list[int]) -> None:
    of = shares_of(Algorithm.SOURCE_HASH, *weights)
    rules = list(of.conditions("ip6"))
    selected = collections.Counter(
        next(each for each, condition in rules if not condition or value < part_and_total(condition)[0])
        for value in range(sum(of.weights))
    )
    assert [selected[each] for each in of.endpoints] == of.weights
    assert {part_and_total(condition)[1] for _, condition in rules if condition} <= {sum(of.weights)}


@given(WEIGHTS, st.sampled_from((Algorithm.SOURCE_HASH, Algorithm.MAGLEV)), st.integers(0, 0xFFFF))
def test_the_selected_endpoint_is_that_of_the_rules(
    weights: list[int], algorithm: Algorithm, port: int
) -> None:
    of = shares_of(algorithm, *weights)
    client = parse_address("192.0.2.7")

    def drawn(modulus: int) -> int:
        return of.draw.number(client[12:], port, modulus)

    def is_true(condition: str) -> bool:
        part, total = part_and_total(condition)
        return drawn(total) < part

    with_affinity = next(each for each, found in of.conditions("ip") if not found or is_true(found))
    assert of.selected(client, port, has_affinity=True) == with_affinity
    assert of.selected(client, port, has_affinity=False) == of.places[drawn(len(of.places))]


def test_an_algorithm_without_a_hash_selects_no_certain_endpoint() -> None:
    with pytest.raises(ValueError, match="RANDOM is no hash"):
        shares_of(Algorithm.RANDOM, 1, 1).selected(parse_address("192.0.2.7"), 80, has_affinity=False)


@given(st.sets(st.integers(0, 200), min_size=2, max_size=30), st.data())
def test_maglev_moves_few_places_if_an_endpoint_is_removed(numbers: set[int], data: st.DataObject) -> None:
    """The order of the endpoints does not matter: nodes may list them in another one.

    The largest of 6000 random removals was 27 %, a hash modulo the number of endpoints moves 67 % or more.
    """
    removed = data.draw(st.sampled_from(sorted(numbers)))
    shuffled = data.draw(st.permutations(sorted(numbers)))
    before = _maglev_places(sorted(numbers))
    after = _maglev_places([each for each in shuffled if each != removed])
    assert _maglev_places(shuffled) == before
    if len(before) == len(after):  # else the number of endpoints has another size of the table
        assert _moved(before, after, removed) <= 0.4


def test_maglev_moves_7_percent_on_average_if_one_of_15_endpoints_is_removed() -> None:
    source = random.Random(1)
    found = []
    for _ in range(100):
        numbers = source.sample(range(1000), 15)
        removed = numbers[0]
        found.append(_moved(_maglev_places(numbers), _maglev_places(numbers[1:]), removed))
    assert 0.04 < sum(found) / len(found) < 0.08


def _moved(before: Sequence[PlannedEndpoint], after: Sequence[PlannedEndpoint], removed: int) -> float:
    """The part of the places of other endpoints that have another endpoint now."""
    kept = [pair for pair in zip(before, after, strict=True) if pair[0] != endpoint(removed)]
    return sum(one != other for one, other in kept) / len(kept)


def _maglev_places(numbers: Sequence[int]) -> Sequence[PlannedEndpoint]:
    endpoints = [endpoint(number) for number in numbers]
    found = shares(endpoints, PlannedBalancing(Algorithm.MAGLEV), lambda each: each.cluster)
    assert found
    return found.places


@given(WEIGHTS)
def test_maglev_has_places_by_weight_for_every_endpoint(weights: list[int]) -> None:
    of = shares_of(Algorithm.MAGLEV, *weights)
    counts = collections.Counter(of.places)
    for each, weight in zip(of.endpoints, of.weights, strict=True):
        assert counts[each] >= 1
        assert abs(counts[each] - len(of.places) * weight / sum(of.weights)) <= 2


@given(WEIGHTS)
def test_rules_by_chance_have_the_probability_of_the_weight(weights: list[int]) -> None:
    of = shares_of(Algorithm.RANDOM, *weights)
    left, total = Fraction(1), sum(of.weights)
    for weight, (_, condition) in zip(of.weights, of.conditions("ip"), strict=True):
        chance = Fraction(*part_and_total(condition)) if condition else Fraction(1)
        assert left * chance == Fraction(weight, total)
        left *= 1 - chance
    assert left == 0
