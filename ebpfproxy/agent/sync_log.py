"""The log line about completed syncs: one for each, but under churn one for all syncs of 10 s.

No method reads a clock: callers pass the time in seconds of the monotonic clock.
"""

import dataclasses

from ebpfproxy.log import Logger

log = Logger(__name__)

SYNCED = "Synced services"
"""All changes so far are in the kernel, except `rejected` entries. Under churn, a line sums up several
`syncs`."""


@dataclasses.dataclass
class SyncSummary:
    """The values of a line. Durations are in seconds; of several syncs, they are the longest."""

    services: int
    endpoints: int
    put: int
    dropped: int
    rejected: int
    latency: float
    duration: float
    syncs: int = 1

    def after(self, previous: "SyncSummary") -> "SyncSummary":
        """Return the values for both: of this sync, and of `previous` ones."""
        return dataclasses.replace(
            self,
            put=previous.put + self.put,
            dropped=previous.dropped + self.dropped,
            latency=max(previous.latency, self.latency),
            duration=max(previous.duration, self.duration),
            syncs=previous.syncs + self.syncs,
        )


class SyncLog:
    """Logs syncs.

    - A sync at least `QUIET` seconds after the previous one is logged at once, and so is the first.
    - The others are logged `INTERVAL` seconds after the last line, or with the next sync that is logged at
      once. The caller calls `flush` when `wait` has passed, and at the end.
    """

    QUIET = 1.0
    INTERVAL = 10.0

    def __init__(self, each: bool) -> None:
        """`each`: log every sync at once."""
        self._quiet = 0.0 if each else self.QUIET
        self._pending: SyncSummary | None = None
        self._last_sync = self._last_line = float("-inf")

    def add(self, synced: SyncSummary, now: float) -> None:
        """Record a sync that ended at `now`."""
        self._pending = synced.after(self._pending) if self._pending else synced
        is_first = now - self._last_sync >= self._quiet
        self._last_sync = now
        if is_first or not self.wait(now):
            self.flush(now)

    def wait(self, now: float) -> float | None:
        """Return the seconds until `flush` is due, 0 if it is due; None if all syncs are logged."""
        return max(0.0, self._last_line + self.INTERVAL - now) if self._pending else None

    def flush(self, now: float) -> None:
        """Log the syncs that are not logged yet. Does nothing if there are none."""
        synced, self._pending = self._pending, None
        if synced is None:
            return
        self._last_line = now
        log.info(
            SYNCED,
            services=synced.services,
            endpoints=synced.endpoints,
            put=synced.put,
            dropped=synced.dropped,
            rejected=synced.rejected,
            syncs=synced.syncs,
            latency_ms=round(1000 * synced.latency, 3),
            duration_ms=round(1000 * synced.duration, 3),
        )
