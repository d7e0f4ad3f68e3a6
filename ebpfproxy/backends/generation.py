"""Distinguishes changes of others from ours, where the kernel reports only that something has changed."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Generation(Generic[T]):
    """`look` gives a value that is another one after any change, be it ours.

    A change of another program just before one of ours would count as ours. So it is looked for before each
    of ours, and remembered until everything is read.
    """

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._known: T | None = None  # None: not looked at yet
        self._missed = False
        self._count = 0

    def reading(self) -> None:
        """Everything is about to be read: whatever was changed so far is known then."""
        self._known, self._missed = self._look(), False

    @contextlib.contextmanager
    def own_change(self, about: Callable[[T], Hashable] = lambda value: value) -> Iterator[None]:
        """What is changed within is changed by us. `about` leaves out of a value what is no change of others,
        as what our own one follows."""
        if self._known is not None and about(self._look()) != about(self._known):
            self._missed = True
        yield
        self._known = self._look()

    def value(self) -> Hashable:
        """Another one each time, once a change of another program was met by one of ours."""
        self._count += self._missed
        return self._count, self._look()
