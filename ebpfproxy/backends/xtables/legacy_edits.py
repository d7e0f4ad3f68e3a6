"""Changes of others that leave the number and the sizes of all rules of iptables-legacy as they were.

The kernel announces nothing, and gives out all rules or none. So they are looked at only after another
program has opened /run/xtables.lock, as each tool does that changes a table; a tool of another container may
have a lock of its own, and is missed. Then a copy of the table is compared by its checksum, which is cheap
for a usual one: 10 ms of CPU for 1000 Services with 3 endpoints. At 10 000 with 10 it would be half a second,
and 100 to 200 MB of memory, each time that anybody uses iptables: such a table is left to the reading of
everything.
"""

import time
from collections.abc import Callable, Collection

from ebpfproxy.errors import KernelError
from ebpfproxy.linux.inotify import OpenedFile
from ebpfproxy.linux.xtables import legacy
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family

log = Logger(__name__)

NOTICED_LATE = "Some changes of rules are noticed late"
"""The lock file of iptables cannot be watched: a replaced rule of the same size is found at the next
--sync-period."""

LARGEST = 32 << 20
"""Bytes of a table that is compared."""

_SHARE = 10
"""Of the time at most one part in so many goes into comparing."""

_Digest = Callable[[Family, str, int], int]


class LegacyEdits:
    """In the calling thread's network namespace."""

    def __init__(
        self,
        families: Collection[Family],
        tables: Collection[str],
        clock: Callable[[], float] = time.monotonic,
        digest: _Digest = legacy.digest,
    ) -> None:
        self._places = [(family, table) for family in families for table in tables]
        self._clock = clock
        self._digest = digest
        self._count = 0
        self._known: list[int] | None = None  # None: not looked at yet
        self._touched = False
        self._not_before = 0.0
        self._lock = _watched()

    def settle(self) -> None:
        """What is in the tables now is ours. Raises KernelError."""
        self._touched = False
        if self._lock:
            self._lock.was_opened()
            self._known = self._compared()

    def count(self) -> int:
        """How many there were. Raises KernelError."""
        if self._lock is None:
            return self._count
        self._touched = self._lock.was_opened() or self._touched
        now = self._clock()
        if now >= self._not_before and (self._touched or self._known is None):
            found = self._compared()
            self._count += self._known is not None and found != self._known
            self._known, self._touched = found, False
            ended = self._clock()
            self._not_before = ended + _SHARE * (ended - now)
        return self._count

    def _compared(self) -> list[int]:
        return [self._digest(*place, LARGEST) for place in self._places]

    def close(self) -> None:
        """May be called again."""
        if self._lock:
            self._lock.close()


def _watched() -> OpenedFile | None:
    try:
        return OpenedFile(legacy.LOCK_FILE)
    except KernelError as failure:
        log.warning(NOTICED_LATE, reason=failure.message, hint=failure.hint)
        return None
