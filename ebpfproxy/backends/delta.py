"""The comparison of desired and actual entries, for every backend."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
E = TypeVar("E")


@dataclasses.dataclass(frozen=True, slots=True)
class Delta(Generic[K, E]):
    """The difference between two sets of entries: entries to put (new or changed) and keys to drop."""

    puts: Mapping[K, E]
    drops: frozenset[K]

    def __bool__(self) -> bool:
        return bool(self.puts or self.drops)


def diff(actual: Mapping[K, E], desired: Mapping[K, E], keys: Iterable[K] | None = None) -> Delta[K, E]:
    """Return the delta that turns `actual` into `desired`. With `keys`, compare only these keys, in their
    order.

    >>> diff({"a": 1, "b": 2}, {"b": 3, "c": 4})
    Delta(puts={'b': 3, 'c': 4}, drops=frozenset({'a'}))
    >>> diff({"a": 1}, {"b": 2}, keys=["b"])
    Delta(puts={'b': 2}, drops=frozenset())
    """
    if keys is None:
        puts = {key: entry for key, entry in desired.items() if actual.get(key) != entry}
        return Delta(puts, frozenset(actual.keys() - desired.keys()))
    compared = dict.fromkeys(keys)  # others are not looked up: the cost depends on the change
    puts = {key: desired[key] for key in compared if key in desired and actual.get(key) != desired[key]}
    return Delta(puts, frozenset(key for key in compared if key not in desired and key in actual))


def applied(actual: Mapping[K, E], delta: Delta[K, E]) -> dict[K, E]:
    """Return the entries that `delta` makes of `actual`: ``applied(a, diff(a, b)) == b``."""
    remaining = {key: entry for key, entry in actual.items() if key not in delta.drops}
    return remaining | dict(delta.puts)
