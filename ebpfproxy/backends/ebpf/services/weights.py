"""How weights become the order of a list: an endpoint of weight 3 occurs three times, evenly distributed."""

from collections.abc import Sequence
from math import gcd


def interleaved(weights: Sequence[int]) -> list[int]:
    """The indexes of `weights`, each as often as its weight after division by the greatest common divisor.

    The occurrences of an index are evenly distributed, so a prefix of the list is almost in proportion, too.
    An index of weight 0 does not occur.

    >>> interleaved([1, 1, 1]), interleaved([4, 2]), interleaved([5, 1, 1])
    ([0, 1, 2], [0, 1, 0], [0, 0, 0, 1, 2, 0, 0])
    """
    common = gcd(*weights)
    if not common:
        return []
    turns = [
        ((2 * occurrence + 1) / (2 * times), index)
        for index, times in enumerate(weight // common for weight in weights)
        for occurrence in range(times)
    ]
    turns.sort()
    return [index for _, index in turns]
