"""The tables of the hash algorithms: Maglev hashing (Eisenbud et al., NSDI 2016), with weights.

A table depends only on addresses, ports and weights. So all nodes with the same endpoints have the same
table, and a packet that reaches another node selects the same endpoint. Another version of ebpfproxy must
compute the same tables: change nothing here without a plan for clusters that have both versions.
"""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import cycle

from ebpfproxy.plan.weights import interleaved

SIZES = (2039, 16381, 65521)
"""Each is the largest prime below a power of two: a range of slots takes a power of two."""
_SIZE_PER_ENDPOINT = 128
"""With so many entries for each endpoint, its removal moves about 2 % of the entries of other endpoints."""
_HALF = 8  # bytes


def table_size(endpoints: int) -> int:
    """The number of entries for so many endpoints. From 512 endpoints on, there are fewer for each.

    >>> [table_size(n) for n in (1, 15, 16, 100, 127, 128, 5000)]
    [2039, 2039, 16381, 16381, 16381, 65521, 65521]
    """
    return next((size for size in SIZES if size >= _SIZE_PER_ENDPOINT * endpoints), SIZES[-1])


def table(targets: Sequence[bytes], weights: Sequence[int]) -> list[int]:
    """The table of endpoints, as indexes of `targets`. Empty without targets.

    `targets`: their addresses and ports, all different, in any order. `weights`: theirs, from 1. Empty: all
    are equal.
    """
    if not targets:
        return []
    size = table_size(len(targets))
    order = sorted(range(len(targets)), key=targets.__getitem__)
    free = bytearray(b"\1") * size
    preferences = {index: _preferences(targets[index], free) for index in order}
    turns = [order[at] for at in interleaved([weights[index] for index in order])] if weights else order
    found = [0] * size
    for _, index in zip(range(size), cycle(turns), strict=False):
        slot = next(preferences[index])
        free[slot] = 0
        found[slot] = index
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
