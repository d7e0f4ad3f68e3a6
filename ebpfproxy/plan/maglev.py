"""The tables of the hash algorithms: Maglev hashing (Eisenbud et al., NSDI 2016), with weights.

A table depends only on addresses, ports and weights. So all nodes with the same endpoints have the same
table, and a packet that reaches another node selects the same endpoint. Another version of ebpfproxy must
compute the same tables: change nothing here without a plan for clusters that have both versions.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import cycle, islice
from typing import NamedTuple

from ebpfproxy.plan.weights import interleaved

_HALF = 8  # bytes


class TableSizes(NamedTuple):
    """The sizes that the tables of a mode may have: primes in ascending order.

    `per_endpoint`: a table has at least so many entries for each endpoint, unless it has the largest size.
    The more entries, the more even are the shares, and the fewer entries of other endpoints move if one is
    removed: on average 2 % with 128, 7 % with 16.
    """

    sizes: tuple[int, ...]
    per_endpoint: int

    def of(self, endpoints: int, weights: int = 0) -> int:
        """The number of entries of a table for so many endpoints, whose weights have this sum in `reduced`.

        >>> [TableSizes((251, 1021), 16).of(n) for n in (1, 15, 16, 5000)]
        [251, 251, 1021, 1021]
        >>> TableSizes((251, 1021), 16).of(3, 260)
        1021
        """
        least = max(self.per_endpoint * endpoints, weights)
        return next((size for size in self.sizes if size >= least), self.sizes[-1])


def table(targets: Sequence[bytes], weights: Sequence[int], size: int) -> list[int]:
    """The table of endpoints, as indexes of `targets`. Empty without targets.

    `targets`: their addresses and ports, all different, in any order. `weights`: theirs, from 1. Empty: all
    are equal. `size`: the number of entries, a prime.
    """
    return (Filling(targets, weights, size).fill(lambda: True) or []) if targets else []


class Filling:
    """The table of one endpoint or more, filled in parts. The arguments are those of `table`."""

    def __init__(self, targets: Sequence[bytes], weights: Sequence[int], size: int) -> None:
        order = sorted(range(len(targets)), key=targets.__getitem__)
        turns = [order[at] for at in interleaved([weights[index] for index in order])] if weights else order
        self._turns = cycle(turns)
        self._free = bytearray(b"\1") * size
        self._preferences = {index: _preferences(targets[index], self._free) for index in order}
        self._found = [0] * size
        self._left = size

    def fill(self, continues: Callable[[], bool]) -> list[int] | None:
        """Fill entries while `continues` returns True; it is called after each part. Return the complete
        table, None if entries are left.

        The fewer entries are left, the longer takes each. So a part is a sixteenth of them, and takes some
        milliseconds at most.
        """
        free, found, preferences = self._free, self._found, self._preferences
        while self._left:
            part = -(-self._left // 16)
            for index in islice(self._turns, part):
                slot = next(preferences[index])
                free[slot] = 0
                found[slot] = index
            self._left -= part
            if self._left and not continues():
                return None
        return found


def _preferences(target: bytes, free: bytearray) -> Iterator[int]:
    """The entries that are free when the iterator reaches them, in the order of preference of an endpoint.

    Everything here is a C iterator: a table of 65,521 entries takes 0.1 s instead of 1 s.
    """
    size = len(free)
    digest = blake2b(target, digest_size=2 * _HALF).digest()
    first = int.from_bytes(digest[:_HALF], "big") % size
    step = int.from_bytes(digest[_HALF:], "big") % (size - 1) + 1
    every = map(size.__rmod__, range(first, first + size * step, step))
    return filter(free.__getitem__, every)
