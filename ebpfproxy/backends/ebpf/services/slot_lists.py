"""The lists in the map `slots`: which endpoints of a ServicePort have how many entries, and in which order.

A list has one entry for each endpoint, in their order, unless it is expanded:
- With weights, an endpoint has as many entries as its weight, after division by the greatest common divisor.
- With a hash algorithm, the list is a table (plan/maglev.py).
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry
from ebpfproxy.plan import maglev
from ebpfproxy.plan.maglev import TableSizes
from ebpfproxy.plan.planned_endpoints import WEIGHT_SHIFT
from ebpfproxy.plan.weights import interleaved, reduced

HASHING = frozenset((abi.ALGORITHM_SOURCE_HASH, abi.ALGORITHM_MAGLEV))
"""The algorithms whose lists are tables."""

TABLE_SIZES = TableSizes((2039, 16381, 65521), 128)
"""Each is the largest prime below a power of two: a range of slots takes a power of two. From 512 endpoints
on, there are fewer entries for each.
"""

_WEIGHTED = 1 << WEIGHT_SHIFT
WEIGHT_BITS = 8
"""The bits of a weight."""


class SlotList(NamedTuple):
    """The ids of a list, in the order of the slots. `digest` is None unless the list is expanded."""

    ids: list[int]
    digest: int | None


Table = Callable[[Sequence[bytes], Sequence[int], int], list[int]]
"""`maglev.table`, or a function with the same results."""


def slot_list(entry: ServicePortEntry, ids: Sequence[int], flag: int, table: Table | None = None) -> SlotList:
    """The list of the endpoints with this flag. `ids`: the ids of all endpoints of the entry. `table`: by
    default `maglev.table`."""
    flags = entry.endpoints.flags()
    listed = [id_ for id_, each in zip(ids, flags, strict=True) if each & flag]
    if not listed or not _is_expanded(entry.algorithm, flags):
        return SlotList(listed, None)
    weights = _weights(flags, flag)
    if entry.algorithm in HASHING:
        targets = zip(entry.endpoints.targets(), flags, strict=True)
        listed_targets = [target for target, each in targets if each & flag]
        order = (table or maglev.table)(listed_targets, weights, TABLE_SIZES.of(len(listed_targets)))
    else:
        order = interleaved(weights)
    expanded = [listed[at] for at in order]
    return SlotList(expanded, digest(expanded))


def _is_expanded(algorithm: int, flags: list[int]) -> bool:
    """Whether an endpoint may have several entries in one list."""
    return algorithm in HASHING or max(flags, default=0) >= _WEIGHTED


def _weights(flags: list[int], flag: int) -> list[int]:
    return [each >> WEIGHT_SHIFT or 1 for each in flags if each & flag]


def places(count: int, algorithm: int) -> int:
    """The number of slots that a list of `count` entries occupies, 0 for an empty list.

    With ALGORITHM_ROUND_ROBIN, the number of the next turn comes after the list.
    """
    return count + (algorithm == abi.ALGORITHM_ROUND_ROBIN) if count else 0


def places_needed(entry: ServicePortEntry, flag: int) -> int:
    """The number of slots that the list of the endpoints with this flag will occupy."""
    flags = entry.endpoints.flags()
    count = sum(1 for each in flags if each & flag)
    if count and _is_expanded(entry.algorithm, flags):
        weights = _weights(flags, flag)
        count = TABLE_SIZES.of(count) if entry.algorithm in HASHING else sum(reduced(weights))
    return places(count, entry.algorithm)


def most_places(count: int, algorithm: int) -> int:
    """No fewer slots than both lists of `count` endpoints can occupy, whatever their weights."""
    return 4 * (TABLE_SIZES.of(count) if algorithm in HASHING else count << WEIGHT_BITS) if count else 0


def digest(ids: Sequence[int]) -> int:
    """A number that is equal for equal lists, and hardly ever for others. It is valid in this process."""
    return hash(array("I", ids).tobytes())
