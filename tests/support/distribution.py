"""Whether connections are distributed among endpoints as an algorithm promises."""

from collections import Counter
from collections.abc import Mapping

CONNECTIONS = 100_000
"""The number of connections of one sample."""


def chi_square(found: Counter[str], weights: Mapping[str, int]) -> float:
    """Pearson's statistic for the shares of endpoints in proportion to `weights`."""
    total, of = found.total(), sum(weights.values())
    assert found.keys() <= weights.keys()
    expected = {each: total * weight / of for each, weight in weights.items()}
    return sum((found[each] - count) ** 2 / count for each, count in expected.items())


def assert_in_proportion(found: Counter[str], weights: Mapping[str, int]) -> None:
    """With k degrees of freedom, the statistic of independent selections has mean k and variance 2k.

    The bound for k = 9 is 72, which independent selections exceed with a probability of 6e-12.
    """
    freedom = len(weights) - 1
    assert chi_square(found, weights) < freedom + 15 * (2 * freedom) ** 0.5


def assert_equal_turns(found: Counter[str], weights: Mapping[str, int]) -> None:
    """Turns are not random: each endpoint gets its exact share, except for the first and the last round."""
    of, total = sum(weights.values()), found.total()
    for each, weight in weights.items():
        assert abs(found[each] - total * weight / of) <= weight
