"""The share of each endpoint: places in a list, and rules with session affinity."""

import collections
import itertools
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.backends.nftables.shares import Shares, shares
from ebpfproxy.linux.nft.draws import Draw
from ebpfproxy.model.address import Address
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


@given(WEIGHTS)
def test_rules_in_turn_select_in_proportion(weights: list[int]) -> None:
    """Each rule counts the packets that reach it, as the kernel does."""
    of = shares_of(Algorithm.ROUND_ROBIN, *weights)
    selectors = [
        (each, itertools.cycle(range(conditions[0].total)) if conditions else None, conditions)
        for each, conditions in of.conditions("ip")
    ]
    counts: collections.Counter[PlannedEndpoint] = collections.Counter()
    for _ in range(sum(of.weights)):
        counts[
            next(
                each
                for each, counter, conditions in selectors
                if counter is None or next(counter) < conditions[0].part
            )
        ] += 1
    assert [counts[each] for each in of.endpoints] == of.weights


@given(WEIGHTS)
def test_rules_with_a_hash_divide_its_values(weights: list[int]) -> None:
    of = shares_of(Algorithm.SOURCE_HASH, *weights)
    rules = list(of.conditions("ip6"))
    selected = collections.Counter(
        next(each for each, conditions in rules if not conditions or value < conditions[0].part)
        for value in range(sum(of.weights))
    )
    assert [selected[each] for each in of.endpoints] == of.weights
    assert {share.total for _, conditions in rules for share in conditions} <= {sum(of.weights)}


@given(WEIGHTS)
def test_rules_by_chance_have_the_probability_of_the_weight(weights: list[int]) -> None:
    of = shares_of(Algorithm.RANDOM, *weights)
    left, total = Fraction(1), sum(of.weights)
    for weight, (_, conditions) in zip(of.weights, of.conditions("ip"), strict=True):
        chance = Fraction(conditions[0].part, conditions[0].total) if conditions else Fraction(1)
        assert left * chance == Fraction(weight, total)
        left *= 1 - chance
    assert left == 0
