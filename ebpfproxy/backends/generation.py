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
        self._known: T | None = None  # None: `look` was not called yet
        self._missed = False
        self._count = 0

    def reading(self) -> None:
        """Call this before everything is read: the read covers all changes so far."""
        self._known, self._missed = self._look(), False

    @contextlib.contextmanager
    def own_change(self, about: Callable[[T], Hashable] = lambda value: value) -> Iterator[None]:
        """Attribute the changes within the context to the agent. `about` removes from a value the parts that
        do not show changes by other programs, for example parts that follow the agent's own changes.
        """
        if self._known is not None and about(self._look()) != about(self._known):
            self._missed = True
        yield
        self._known = self._look()

    def value(self) -> Hashable:
        """Return a value that differs after any change. After `own_change` detected a change by another
        program, it differs at every call until `reading`.
        """
        self._count += self._missed
        return self._count, self._look()
