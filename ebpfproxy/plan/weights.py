"""How weights become the order of a list: an endpoint of weight 3 occurs three times, evenly distributed."""

from collections.abc import Sequence
from math import gcd


def reduced(weights: Sequence[int]) -> list[int]:
    """Return the weights after division by their greatest common divisor. Unchanged if all are 0.

    >>> reduced([4, 2]), reduced([0, 0]), reduced([])
    ([2, 1], [0, 0], [])
    """
    divisor = gcd(*weights) or 1
    return [weight // divisor for weight in weights]


def interleaved(weights: Sequence[int]) -> list[int]:
    """Return the indexes of `weights`, each as often as its weight in `reduced`.

    The occurrences of an index are evenly distributed, so a prefix of the list is almost in proportion, too.
    An index of weight 0 does not occur.

    >>> interleaved([1, 1, 1]), interleaved([4, 2]), interleaved([5, 1, 1])
    ([0, 1, 2], [0, 1, 0], [0, 0, 0, 1, 2, 0, 0])
    """
    turns = [
        ((2 * occurrence + 1) / times, index)
        for index, times in enumerate(reduced(weights))
        for occurrence in range(times)
    ]
    turns.sort()
    return [index for _, index in turns]
