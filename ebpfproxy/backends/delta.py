"""The one comparison of desired and actual entries, for every backend."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from ebpfproxy.backends.interface import Delta

K = TypeVar("K")
E = TypeVar("E")


def diff(actual: Mapping[K, E], desired: Mapping[K, E], keys: Iterable[K] | None = None) -> Delta[K, E]:
    """What turns `actual` into `desired`; only among `keys` where they are given.

    >>> diff({"a": 1, "b": 2}, {"b": 3, "c": 4})
    Delta(puts={'b': 3, 'c': 4}, drops=frozenset({'a'}))
    >>> diff({"a": 1}, {"b": 2}, keys=["b"])
    Delta(puts={'b': 2}, drops=frozenset())
    """
    if keys is None:
        puts = {key: entry for key, entry in desired.items() if actual.get(key) != entry}
        return Delta(puts, frozenset(actual.keys() - desired.keys()))
    named = frozenset(keys)  # only they are looked up: the cost is that of the change, not of the whole
    puts = {key: desired[key] for key in named if key in desired and actual.get(key) != desired[key]}
    return Delta(puts, frozenset(key for key in named if key not in desired and key in actual))


def applied(actual: Mapping[K, E], delta: Delta[K, E]) -> dict[K, E]:
    """What `actual` becomes by `delta`: ``applied(a, diff(a, b)) == b``."""
    kept = {key: entry for key, entry in actual.items() if key not in delta.drops}
    return kept | dict(delta.puts)
