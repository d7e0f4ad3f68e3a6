"""Distinguishes changes by other programs from the agent's own, if the kernel reports only that something
changed.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Generation(Generic[T]):
    """A counter of changes by other programs.

    `look` returns a value that differs after any change, including the agent's own. So `look` is called
    before each own change: otherwise a change that another program made just before it would be attributed to
    the agent. A detected change is remembered until everything is read.
    """

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._known: T | None = None  # the value after the last read or own change
        self._missed = False
        self._count = 0

    def reading(self) -> None:
        """Call this before everything is read: the read covers all changes so far."""
        self._known, self._missed = self._look(), False

    @contextlib.contextmanager
    def own_change(
        self,
        about: Callable[[T], Hashable] = lambda value: value,
        is_own: Callable[[T, T], bool] = lambda before, after: True,
    ) -> Iterator[None]:
        """Attribute the changes within the context to the agent.

        `about` removes from a value the parts that do not show changes by other programs, for example parts
        that follow the agent's own changes. `is_own`: whether the values before and after differ only by the
        agent's change. By default this is unknown, and a simultaneous change by another program is missed.
        """
        before = self._look()
        if self._known is not None and about(before) != about(self._known):
            self._missed = True
        yield
        self._known = self._look()
        if not is_own(before, self._known):
            self._missed = True

    def value(self) -> Hashable:
        """Return a value that differs at every call after a change by another program, until `reading`."""
        if self._known is not None and self._look() != self._known:
            self._missed = True
        self._count += self._missed
        return self._count
