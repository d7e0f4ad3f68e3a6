"""Pacing: when to sync, and when to check for changes by other programs.

No method reads a clock: callers pass the time in seconds of the monotonic clock.

The rules are those of kube-proxy (pkg/proxy/runner) with two differences. A change waits only until the
minimum interval since the last sync has passed, which may be 0. A failed sync is retried after 1 s, not after
30 s.
"""

import math

BATCH = 0.01
"""Seconds from the end of a sync to the next one of changes, at least. Changes in quick succession share a
sync, which costs less than one for each. The first change after a longer pause does not wait."""

_MOST_DOUBLINGS = 30


class Pacer:
    """Decides when a sync is due. The caller ends each sync with `succeeded`, `rejected` or `failed`.

    - Nothing is due before the first `changed`.
    - The next sync is due at least `min_interval` seconds, and at least `BATCH`, after the end of the last
      one.
    - After a failure the next sync is due after `backoff_first` seconds, then after twice that, up to
      `backoff_max`. A change after the failure makes it due earlier, but not within `backoff_first` seconds
      of the failure.
    - While the kernel rejects entries, they are retried `grace` seconds after the sync of the last change,
      then after twice that, up to `backoff_max`. By then freed space can be used again. This delays no change
      and causes no verification.
    - A sync verifies, which means that it reads the kernel back completely, after each failure, after
      `verify_soon`, and at least every `reread_interval` seconds.
    - At least every `max_interval` seconds a check is due, which compares without reading back.
    """

    def __init__(
        self,
        min_interval: float,
        max_interval: float,
        backoff_first: float = 1.0,
        backoff_max: float = 30.0,
        grace: float = 3.0,
        reread_interval: float = math.inf,
    ) -> None:
        self.set_intervals(min_interval, max_interval, reread_interval)
        self._backoff_first = backoff_first
        self._backoff_max = backoff_max
        self._grace = grace
        self._started = False
        self._changed = False
        self._remaining = False
        self._failures = 0
        self._rejections = 0  # consecutive, since the sync of the last change
        self._ended: float | None = None
        self._verified: float | None = None
        self._checked: float = 0.0

    def changed(self, now: float) -> None:
        """Record a change. Several calls before a sync cause only one sync."""
        self._started = self._changed = True

    def remaining(self) -> None:
        """Record that the last sync applied a part of the changes. The next one, which applies further ones,
        is due at once."""
        self._changed = self._remaining = True

    def set_intervals(self, min_interval: float, max_interval: float, reread_interval: float) -> None:
        """Set the intervals, in seconds. `reread_interval` is raised to `max_interval`."""
        self._min_interval, self._max_interval = min_interval, max_interval
        self._reread_interval = max(max_interval, reread_interval)

    def verify_soon(self) -> None:
        """Verify at the time at which a change would be synced: another program has changed the kernel."""
        self._verified = None

    def due(self, now: float) -> bool:
        """Return whether a sync is due. `verify_due` says whether it verifies."""
        at = self._due_at()
        return at is not None and now >= at

    def verify_due(self, now: float) -> bool:
        """Return whether the next sync must verify: the first, one after a failure, and the periodic one."""
        if not self._started:
            return False
        return self._verified is None or self._failures > 0 or now >= self._verified + self._reread_interval

    def check_due(self, now: float) -> bool:
        """Return whether a check is due: some time after the last check or verification."""
        return self._verified is not None and not self._failures and now >= self._check_at()

    def checked(self, now: float) -> None:
        """Record a check that found no difference."""
        self._checked = now

    def wait(self, now: float) -> float | None:
        """Return the seconds until a sync or check is due, 0 if it is due; None before the first change."""
        at = self._due_at()
        if at is None:
            return None
        if self._verified is not None and not self._failures:
            at = min(at, self._check_at())
        return max(0.0, at - now)

    def _check_at(self) -> float:
        return max(self._verified or 0.0, self._checked) + self._max_interval

    def succeeded(self, now: float, *, verified: bool) -> None:
        """Record a successful sync of all changes that were reported before.

        `verified`: the sync read the kernel back. `verify_due` remains true until a sync has done so.
        """
        self._rejections = 0
        self._record_end(now, verified)

    def rejected(self, now: float, *, verified: bool) -> None:
        """Record a sync as in `succeeded`, of which the kernel rejected some entries."""
        self._rejections = 1 if self._changed else self._rejections + 1
        self._record_end(now, verified)

    def failed(self, now: float) -> None:
        """Record a failed sync. All of its changes remain to be synced."""
        self._ended, self._changed, self._remaining = now, False, False
        self._failures += 1
        self._rejections = 0

    def _record_end(self, now: float, verified: bool) -> None:
        self._ended, self._failures, self._changed, self._remaining = now, 0, False, False
        if verified:
            self._verified = now

    def _due_at(self) -> float | None:
        if not self._started:
            return None
        if self._ended is None:
            return float("-inf")
        interval = 0.0 if self._remaining else max(self._min_interval, BATCH)
        earliest = self._ended + max(interval, self._pause())
        if self._changed or self._failures or self._verified is None:
            return earliest
        at = self._verified + self._reread_interval
        if self._rejections:
            at = min(at, self._ended + self._doubled(self._grace, self._rejections))
        return max(earliest, at)

    def _pause(self) -> float:
        """Return the seconds to wait after the failures so far."""
        if not self._failures:
            return 0.0
        if self._changed:
            return self._backoff_first
        return self._doubled(self._backoff_first, self._failures)

    def _doubled(self, first: float, times: int) -> float:
        """Return `first` for the first time and twice as much for each further time, up to `backoff_max`."""
        return float(min(self._backoff_max, first * 2 ** min(times - 1, _MOST_DOUBLINGS)))


class SliceSize:
    """Decides how much one sync applies, so that changes that arrive meanwhile wait for a short sync only.

    A sync has costs that do not depend on the number of changes. So it may take `_FIXED` times as long as the
    shortest one that was seen recently, or `TARGET` seconds, whichever is more.
    """

    TARGET = 0.02
    _FIXED = 3.0
    _LEAST = 200.0
    _FIRST = 2000.0
    _FEWEST = 2.0

    def __init__(self) -> None:
        self.most = self._FIRST
        """The sum of sizes for `Tracker.drain`."""
        # Apart from `most`: what a retry costs says nothing about what planning costs.
        self._retries = self._FIRST / 100
        self._shortest = math.inf

    @property
    def retries(self) -> int:
        """How many rejected entries a sync retries."""
        return int(self._retries)

    def took(self, seconds: float, *, full: bool, retrying: bool = False) -> None:
        """Record a sync that did not verify. `full`: changes remained. `retrying`: rejected entries did."""
        self._shortest = min(seconds, 1.05 * self._shortest)
        wanted = max(self.TARGET, self._FIXED * self._shortest)
        if seconds > wanted:
            self.most = max(self._LEAST, self.most / 2)
            self._retries = max(self._FEWEST, self._retries / 2)
        elif seconds < wanted / 2:
            self.most *= 1.25 if full else 1.0
            self._retries *= 1.25 if retrying else 1.0


class CheckTimer:
    """Decides when to check whether another program has changed the kernel.

    - Every INTERVAL seconds. If the backend reports changes, the next check waits at least BUSY_FACTOR times
      as long as the last one took, so that checks use at most 1 % of a CPU.
    - At once after `hasten`, but at least MIN_INTERVAL seconds after the last hastened check.
    """

    INTERVAL = 2.0
    MIN_INTERVAL = 1.0
    BUSY_FACTOR = 100.0

    def __init__(self, now: float) -> None:
        self._due = now + self.INTERVAL
        self._is_hastened = False
        self._hastened_at = float("-inf")  # the time of the last hastened check

    def hasten(self) -> None:
        """Record a reported change. Several calls before a check cause only one check."""
        self._is_hastened = True

    def wait(self, now: float) -> float:
        """Return the seconds until a check is due, 0 if it is due."""
        due = min(self._due, self._hastened_at + self.MIN_INTERVAL) if self._is_hastened else self._due
        return max(0.0, due - now)

    def checked(self, now: float, took: float, notified: bool) -> None:
        """Record a check.

        `took`: its CPU time in seconds. `notified`: whether the backend reports changes, which call `hasten`.
        """
        if self._is_hastened:
            self._is_hastened, self._hastened_at = False, now
        self._due = now + (max(self.INTERVAL, self.BUSY_FACTOR * took) if notified else self.INTERVAL)
