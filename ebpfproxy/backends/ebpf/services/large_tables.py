"""Computes large tables of hash algorithms in parts, so that other changes need not wait for 0.1 s."""

import dataclasses
from collections.abc import Callable, Sequence

from ebpfproxy.backends.ebpf.entries import ServicePortKey
from ebpfproxy.backends.ebpf.services.shares import namespace_of
from ebpfproxy.errors import NotYet
from ebpfproxy.plan.maglev import Filling

SMALL = 20_000
"""Entries of a table that takes less than 0.03 s."""

_PART = 0.015  # seconds
_IDLE = 1.0  # seconds after which a table that is not requested again is discarded
_MOST_RESTARTS = 3
_LISTS = 2  # of a ServicePort

_Input = tuple[tuple[bytes, ...], tuple[int, ...], int]


@dataclasses.dataclass(slots=True)
class _Begun:
    """The tables of a ServicePort. `restarts`: how often its endpoints changed before they were complete."""

    key: ServicePortKey
    requested: float
    restarts: int = 0
    fillings: dict[_Input, Filling] = dataclasses.field(default_factory=dict)


class LargeTables:
    """The tables that are begun: those of one ServicePort of each namespace."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun: dict[str, _Begun] = {}

    def table(
        self, key: ServicePortKey, targets: Sequence[bytes], weights: Sequence[int], size: int
    ) -> list[int]:
        """The table of `maglev.table`. Raises NotYet if it needs further calls, or if another ServicePort of
        the namespace has begun. The last call is `end`.

        If the endpoints change again and again, the table is completed at once: its ServicePort would keep
        removed endpoints otherwise.
        """
        now = self._clock()
        self.expire()
        begun = self._begun.setdefault(namespace_of(key), _Begun(key, now))
        if begun.key != key:
            raise NotYet(f"{key.name}: waits for the table of {begun.key.name}")
        begun.requested = now
        input_ = tuple(targets), tuple(weights), size
        if input_ not in begun.fillings:
            if len(begun.fillings) == _LISTS:
                begun.fillings.clear()
                begun.restarts += 1
            begun.fillings[input_] = Filling(*input_)
        is_late = begun.restarts > _MOST_RESTARTS
        found = begun.fillings[input_].fill(lambda: is_late or self._clock() < now + _PART)
        if found is None:
            raise NotYet(f"{key.name}: its table takes too long")
        return found

    def has_begun(self, key: ServicePortKey) -> bool:
        """Whether a table of the ServicePort is incomplete."""
        return any(each.key == key for each in self._begun.values())

    def end(self, key: ServicePortKey) -> None:
        """Discard the tables of the ServicePort: they are written."""
        if self.has_begun(key):
            del self._begun[namespace_of(key)]

    def expire(self) -> None:
        """Discard tables that were not requested for some time. Call it every few seconds."""
        since = self._clock() - _IDLE
        self._begun = {name: each for name, each in self._begun.items() if each.requested >= since}
