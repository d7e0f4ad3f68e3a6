"""Which of the changed Services are next, so that those of one namespace do not delay those of another."""

from collections import deque
from collections.abc import Callable, Collection, Iterator

from ebpfproxy.model.service import NamespacedName

_MOST_PASSED = 3
"""How often others are taken before a Service that is too large."""


class Shares:
    """The Services that wait. They are taken in turns between namespaces, and of a namespace in the order in
    which they were added. One that is too large is taken alone: the next time, or after the Services of other
    namespaces were taken some times, which need not wait for it."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[NamespacedName, None]] = {}  # by namespace, the next one first
        self._skipped: NamespacedName | None = None
        self._passed = 0  # how often others were taken since then

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, name: NamespacedName) -> None:
        """Let a Service wait. One that waits already keeps its place."""
        self._waiting.setdefault(name.namespace, {})[name] = None

    def discard(self, name: NamespacedName) -> None:
        """Let a Service no longer wait, if it does."""
        names = self._waiting.get(name.namespace, {})
        names.pop(name, None)
        if not names:
            self._waiting.pop(name.namespace, None)

    def take_all(self) -> set[NamespacedName]:
        """Return all Services. None waits any more."""
        taken = {name for names in self._waiting.values() for name in names}
        self._waiting.clear()
        self._skipped = None
        return taken

    def take(
        self, size: Callable[[NamespacedName], float], most: float, busy: Collection[str] = ()
    ) -> set[NamespacedName]:
        """Return some Services of namespaces that are not `busy`; they no longer wait. None if none waits.

        Their sizes add up to `most` at most, unless there is only one.

        >>> a1, a2, a3, b = (NamespacedName(*each.split("/")) for each in ("a/1", "a/2", "a/3", "b/1"))
        >>> shares, sizes = Shares(), {a1: 10, a2: 100, a3: 10, b: 1}
        >>> for each in (a1, a2, a3, b):
        ...     shares.add(each)
        >>> [sorted(map(str, shares.take(sizes.get, 20))) for _ in range(4)]
        [['a/1', 'b/1'], ['a/2'], ['a/3'], []]
        """
        taken = self._choose(size, most, busy)
        for name in taken:
            self.discard(name)
            if name.namespace in self._waiting:  # to the end: the others have the next turn
                self._waiting[name.namespace] = self._waiting.pop(name.namespace)
        return taken

    def _choose(
        self, size: Callable[[NamespacedName], float], most: float, busy: Collection[str]
    ) -> set[NamespacedName]:
        skipped = self._skipped
        if skipped and (skipped.namespace in busy or skipped not in self._waiting.get(skipped.namespace, ())):
            skipped = None
        others = self._waiting.keys() - {skipped.namespace if skipped else ""} - set(busy)
        if skipped and (not others or self._passed >= _MOST_PASSED):
            self._skipped = None
            return {skipped}
        self._passed = self._passed + 1 if skipped else 0
        self._skipped = skipped
        chosen: set[NamespacedName] = set()
        left = most
        turns: deque[Iterator[NamespacedName]] = deque(
            iter(names) for namespace, names in self._waiting.items() if namespace in others
        )
        while turns and left >= most / 10:
            names = turns.popleft()
            name = next(names, None)
            if name is None:
                continue
            if (needed := size(name)) <= left:
                chosen.add(name)
                left -= needed
                turns.append(names)
            elif needed > most and not self._skipped:
                self._skipped = name
        if not chosen and self._skipped:
            chosen, self._skipped = {self._skipped}, None
        return chosen
