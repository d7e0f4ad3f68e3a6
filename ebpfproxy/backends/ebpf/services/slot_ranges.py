"""Allocates ranges of the array `slots`, and ids. Released ones are free only after a grace period.

A program may use the old range of a service while the new one is already in force. So a released range or id
rests before it is allocated again. It is free

- after `GRACE` seconds. That is long enough: a BPF program runs for microseconds, and the kernel warns of one
  that runs for seconds. The caller passes the time;
- earlier, if nothing else is free: an allocation then calls `end_grace`, which waits until no program that
  could find the released ones still runs (docs/decisions/0026).
"""

from collections import deque
from collections.abc import Callable

GRACE = 3.0

EndGrace = Callable[[], bool]
"""Waits until no program that is running now still runs. Returns whether that is so; False at once if the
kernel offers no way to wait."""


def _cannot_wait() -> bool:
    return False


class Ranges:
    """Allocates ranges of `capacity` places by the buddy system. A range of n takes the next power of two."""

    def __init__(self, capacity: int, end_grace: EndGrace = _cannot_wait) -> None:
        self.used = 0
        self.resting = 0  # places
        self._end_grace = end_grace
        self._free: dict[int, set[int]] = {}  # order -> firsts
        # The time when it is free, the first place, the order, and whether new programs still find it.
        self._resting: deque[tuple[float, int, int, bool]] = deque()
        self.capacity = capacity
        first = 0
        while first < capacity:  # a block starts at a multiple of its size
            order = (capacity - first).bit_length() - 1
            if first:
                order = min(order, (first & -first).bit_length() - 1)
            self._put_back(first, order)
            first += 1 << order

    @staticmethod
    def order_of(count: int) -> int:
        """The exponent of the power of two that `count` places take.

        >>> [Ranges.order_of(n) for n in (1, 2, 3, 4, 5, 1000)]
        [0, 1, 2, 2, 3, 10]
        """
        return max(count - 1, 0).bit_length()

    def allocate(self, count: int, now: float) -> int | None:
        """The first place of a range of `count` places, at least 1. None if there is no room."""
        self._wake(now)
        order = self.order_of(count)
        first = self._take(order)
        free_and_resting = self.capacity - self.used
        if first is None and self.resting and free_and_resting >= 1 << order and self._end_grace():
            self._wake_all()
            first = self._take(order)
        return first

    def _take(self, order: int) -> int | None:
        larger = order
        while not self._free.get(larger):
            larger += 1
            if larger > self.capacity.bit_length():
                return None
        first = self._free[larger].pop()
        while larger > order:
            larger -= 1
            self._free.setdefault(larger, set()).add(first + (1 << larger))
        self.used += 1 << order
        return first

    def reserve(self, first: int, count: int) -> bool:
        """Take a given range of a previous run; return whether it was free. False for an invalid range."""
        order = self.order_of(count)
        if first % (1 << order):
            return False
        for larger in range(order, self.capacity.bit_length() + 1):
            start = first >> larger << larger
            if start not in self._free.get(larger, ()):
                continue
            self._free[larger].remove(start)
            while larger > order:
                larger -= 1
                middle = start + (1 << larger)
                kept, start = (middle, start) if first < middle else (start, middle)
                self._free.setdefault(larger, set()).add(kept)
            self.used += 1 << order
            return True
        return False

    def release(self, first: int, count: int, now: float, *, in_force: bool = False) -> None:
        """Release a range. It can be allocated again after the grace period.

        `in_force`: new programs still find it, until a later change. Then it rests for `GRACE` seconds in any
        case.
        """
        order = self.order_of(count)
        self._resting.append((now + GRACE, first, order, in_force))
        self.used -= 1 << order
        self.resting += 1 << order

    def shrink(self, first: int, count: int, kept: int, now: float) -> None:
        """Release what a range of `count` places has beyond its first `kept` ones, at least 1."""
        for order in range(self.order_of(kept), self.order_of(count)):
            self.release(first + (1 << order), 1 << order, now)

    def undo(self, first: int, count: int) -> None:
        """Release a range that no reader can have found. It can be allocated again at once."""
        self._put_back(first, self.order_of(count))
        self.used -= 1 << self.order_of(count)

    def inherit(self, previous: "Ranges") -> None:
        """Take over the resting ranges of `previous`, which this object replaces, as far as they are free."""
        for until, first, order, in_force in previous._resting:
            if self.reserve(first, 1 << order):
                self.used -= 1 << order
                self.resting += 1 << order
                self._resting.append((until, first, order, in_force))
        self._resting = deque(sorted(self._resting))

    def _wake(self, now: float) -> None:
        while self._resting and self._resting[0][0] <= now:
            _, first, order, _ = self._resting.popleft()
            self.resting -= 1 << order
            self._put_back(first, order)

    def _wake_all(self) -> None:
        """Free all resting ranges that no new program finds."""
        resting, self._resting = self._resting, deque()
        for entry in resting:
            _, first, order, in_force = entry
            if in_force:
                self._resting.append(entry)
            else:
                self.resting -= 1 << order
                self._put_back(first, order)

    def _put_back(self, first: int, order: int) -> None:
        while first ^ (1 << order) in self._free.get(order, ()):  # join with its buddy
            self._free[order].remove(first ^ (1 << order))
            first &= ~(1 << order)
            order += 1
        self._free.setdefault(order, set()).add(first)


class Ids:
    """Allocates ids from 1 to `capacity` - 1, each again only after the grace period. 0 is not an id."""

    def __init__(self, capacity: int, end_grace: EndGrace = _cannot_wait) -> None:
        self.capacity = capacity
        self.used = 0
        self._end_grace = end_grace
        self._next = 1
        # The time when it is free, the id, and whether new programs still find it.
        self._resting: deque[tuple[float, int, bool]] = deque()

    @property
    def resting(self) -> int:
        """The number of ids that were released. Some of them may be free already."""
        return len(self._resting)

    def adopt(self, taken: set[int]) -> None:
        """Start again with the ids `taken`, which the maps contain. Resting ids continue to rest.

        Invalid ids are ignored.
        """
        taken = set(filter(self._is_own, taken))
        self._next = max(self._next, max(taken, default=0) + 1)
        resting = {id_: (moment, in_force) for moment, id_, in_force in self._resting}
        free = ((id_, *resting.get(id_, (0.0, False))) for id_ in range(1, self._next) if id_ not in taken)
        self._resting = deque(sorted((moment, id_, in_force) for id_, moment, in_force in free))
        self.used = len(taken)

    def allocate(self, now: float) -> int | None:
        """An id. None if none is left."""
        if self._resting and self._resting[0][0] <= now:
            self.used += 1
            return self._resting.popleft()[1]
        if self._next < self.capacity:
            self._next += 1
            self.used += 1
            return self._next - 1
        if any(not in_force for *_, in_force in self._resting) and self._end_grace():
            self._wake_all()
            self.used += 1
            return self._resting.popleft()[1]
        return None

    def release(self, id_: int, now: float, *, in_force: bool = False) -> None:
        """Release an id. It can be allocated again after the grace period; `in_force` as for `Ranges`.

        An invalid id, which another program may have written to a map, is ignored.
        """
        if self._is_own(id_):
            self.used -= 1
            self._resting.append((now + GRACE, id_, in_force))

    def undo(self, id_: int) -> None:
        """Release an id that no reader can have found. It can be allocated again at once."""
        self.used -= 1
        self._resting.appendleft((0.0, id_, False))

    def _wake_all(self) -> None:
        """Free all resting ids that no new program finds, in the order of their release."""
        free = [(0.0, id_, False) for _, id_, in_force in self._resting if not in_force]
        self._resting = deque([*free, *(each for each in self._resting if each[2])])

    def _is_own(self, id_: int) -> bool:
        return 0 < id_ < self.capacity
