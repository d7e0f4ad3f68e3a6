"""Lists in proportion to weights."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.plan.weights import interleaved, reduced

WEIGHTS = st.lists(st.integers(0, 100), max_size=12)


@given(WEIGHTS)
def test_each_prefix_is_in_proportion(weights: list[int]) -> None:
    """An index may be ahead of its share, or behind it, by less than one occurrence for each index."""
    order, counts = interleaved(weights), reduced(weights)
    assert Counter(order) == Counter(dict(enumerate(counts)))
    so_far = [0] * len(weights)
    for length, index in enumerate(order, 1):
        so_far[index] += 1
        for found, count in zip(so_far, counts, strict=True):
            assert abs(found - length * count / len(order)) <= len(weights)


def test_equal_weights_keep_the_order() -> None:
    assert interleaved([7, 7, 7]) == [0, 1, 2]


def test_without_a_positive_weight_the_list_is_empty() -> None:
    assert interleaved([0, 0]) == interleaved([]) == []
