"""Which of the changed Services are next, so that those of one namespace do not delay those of another."""

import itertools
from collections.abc import Callable, Collection, Iterator

from ebpfproxy.model.service import NamespacedName

_MOST_PASSED = 3
"""Choices of other namespaces before a Service that did not fit is chosen."""


class Shares:
    """Chooses Services in turns between namespaces. One that does not fit into a choice is a later choice,
    alone: the next one, or after some choices of other namespaces, which need not wait for it."""

    def __init__(self) -> None:
        self._skipped: NamespacedName | None = None
        self._passed = 0  # choices since then

    def choose(
        self, pending: Collection[NamespacedName], size: Callable[[NamespacedName], float], most: float
    ) -> set[NamespacedName]:
        """Return some of the `pending` Services, at least one. Of a namespace, they are in the given order.

        Their sizes add up to `most` at most, unless there is only one.

        >>> a1, a2, b = NamespacedName("a", "1"), NamespacedName("a", "2"), NamespacedName("b", "1")
        >>> shares, sizes = Shares(), {a1: 100, a2: 10, b: 1}
        >>> sorted(shares.choose((a1, a2, b), sizes.get, 20)) == [a2, b]
        True
        >>> shares.choose((a2, a1, b), sizes.get, 20) == {b}, shares.choose((a2, a1), sizes.get, 20) == {a1}
        (True, True)
        """
        skipped = self._skipped if self._skipped in pending else None
        others = [name for name in pending if skipped and name.namespace != skipped.namespace]
        self._passed = self._passed + 1 if skipped and others else 0
        if skipped and not 0 < self._passed <= _MOST_PASSED:
            self._skipped = None
            return {skipped}
        self._skipped = skipped
        chosen: set[NamespacedName] = set()
        left = most
        for name in _in_turns(others or pending):
            if (needed := size(name)) <= left:
                chosen.add(name)
                left -= needed
            elif not self._skipped:
                self._skipped = name
            if left < most / 10:
                break
        if not chosen:
            chosen = {name for name in (self._skipped,) if name}
            self._skipped = None
        return chosen


def _in_turns(names: Collection[NamespacedName]) -> Iterator[NamespacedName]:
    """One name of each namespace, then the next one of each."""
    by_namespace: dict[str, list[NamespacedName]] = {}
    for name in names:
        by_namespace.setdefault(name.namespace, []).append(name)
    turns = itertools.zip_longest(*by_namespace.values())
    return (name for turn in turns for name in turn if name)
