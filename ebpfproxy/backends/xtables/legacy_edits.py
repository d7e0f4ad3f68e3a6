"""Detects changes by other programs that do not change the number and sizes of the rules of iptables-legacy.

The kernel sends no notification, and returns only complete tables. So a table is compared only after another
program opened /run/xtables.lock, which every tool does that changes a table. A tool in another container may
use a lock file of its own, and its change is missed.

The table is then copied and compared by its checksum. For 1000 Services with 3 endpoints this takes 10 ms of
CPU time. For 10 000 Services with 10 endpoints it would take half a second and 100 to 200 MB of memory, each
time a program uses iptables. So larger tables are compared only when everything is read.
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
"""The lock file of iptables cannot be watched: a replaced rule of the same size is found within an
hour.
"""

LARGEST = 32 << 20
"""The largest table in bytes that is compared."""

_PAUSE_FACTOR = 10
"""The pause after a comparison, as a multiple of its duration. So comparisons take less than a tenth of the
time.
"""

_Digest = Callable[[Family, str, int], int]


class LegacyEdits:
    """Counts such changes, in the calling thread's network namespace."""

    def __init__(
        self,
        families: Collection[Family],
        tables: Collection[str],
        clock: Callable[[], float] = time.monotonic,
        digest: _Digest = legacy.digest,
    ) -> None:
        self._tables = [(family, table) for family in families for table in tables]
        self._clock = clock
        self._digest = digest
        self._count = 0
        self._known_digests: list[int] | None = None  # None: not compared yet
        self._lock_opened = False
        self._not_before = 0.0
        self._lock = _watch_lock()

    def settle(self) -> None:
        """Record the current contents of the tables as the agent's own. Raises KernelError."""
        self._lock_opened = False
        if self._lock:
            self._lock.was_opened()
            self._known_digests = self._digests()

    def count(self) -> int:
        """Return the number of detected changes. Raises KernelError."""
        if self._lock is None:
            return self._count
        self._lock_opened = self._lock.was_opened() or self._lock_opened
        now = self._clock()
        if now >= self._not_before and (self._lock_opened or self._known_digests is None):
            found = self._digests()
            self._count += self._known_digests is not None and found != self._known_digests
            self._known_digests, self._lock_opened = found, False
            ended = self._clock()
            self._not_before = ended + _PAUSE_FACTOR * (ended - now)
        return self._count

    def _digests(self) -> list[int]:
        return [self._digest(*table, LARGEST) for table in self._tables]

    def close(self) -> None:
        """May be called repeatedly."""
        if self._lock:
            self._lock.close()


def _watch_lock() -> OpenedFile | None:
    try:
        return OpenedFile(legacy.LOCK_FILE)
    except KernelError as failure:
        log.warning(NOTICED_LATE, reason=failure.message, hint=failure.hint)
        return None
