"""When to sync, and when to look for changes of others. Pure: every method is given the time, in seconds of
a clock that never goes back.

kube-proxy's rules (pkg/proxy/runner) with two differences: a change waits only for the least interval
since the last sync, which may be none; and a failure is tried again after seconds, not after 30.
"""

_MOST_DOUBLINGS = 30


class Pacer:
    """Paces the attempts at a sync, of which each ends with `succeeded`, `rejected` or `failed`.

    - Nothing is due before the first `changed`.
    - Between the end of an attempt and the next lie at least `min_interval` seconds.
    - A failed attempt is due again after `backoff_first` seconds, then twice that, up to
      `backoff_max`. A change that comes after the failure may be tried at once, but not within
      `backoff_first` seconds of it.
    - While the kernel rejects some entries, they are tried again `grace` seconds after the last change
      was taken in, then after twice that, up to `backoff_max`; what is freed has room again after such a
      time. Neither do changes wait for that, nor is anything verified because of it.
    - At least every `max_interval` seconds, and after each failure, a sync verifies: it reads the
      kernel back whole.
    """

    def __init__(
        self,
        min_interval: float,
        max_interval: float,
        backoff_first: float = 1.0,
        backoff_max: float = 30.0,
        grace: float = 3.0,
    ) -> None:
        self._min_interval = min_interval
        self._max_interval = max_interval
        self._backoff_first = backoff_first
        self._backoff_max = backoff_max
        self._grace = grace
        self._started = False
        self._changed = False
        self._failures = 0
        self._rejections = 0  # in a row, since the last change that was taken in
        self._ended: float | None = None
        self._verified: float | None = None

    def changed(self, now: float) -> None:
        """There is something to sync. More such calls before the sync ask for no more than one."""
        self._started = self._changed = True

    def keep_to(self, min_interval: float, max_interval: float) -> None:
        """From here on, these count."""
        self._min_interval, self._max_interval = min_interval, max_interval

    def disturbed(self) -> None:
        """Another program has changed what is in the kernel: verify as soon as a change would be synced."""
        self._verified = None

    def due(self, now: float) -> bool:
        """Whether to sync now; with verification where `verify_due` says so."""
        at = self._due_at()
        return at is not None and now >= at

    def verify_due(self, now: float) -> bool:
        """Whether a sync is to read the kernel back: the first, one after a failure, the periodic one."""
        if not self._started:
            return False
        return self._verified is None or self._failures > 0 or now >= self._verified + self._max_interval

    def wait(self, now: float) -> float | None:
        """Seconds until a sync is due, 0 where it is; None while nothing is to be done at all."""
        at = self._due_at()
        return None if at is None else max(0.0, at - now)

    def succeeded(self, now: float, *, verified: bool) -> None:
        """The sync has succeeded, with all changes that were reported before.

        `verified`: it read the kernel back. Until one has where `verify_due` asks for it, it stays due.
        """
        self._rejections = 0
        self._end_well(now, verified)

    def rejected(self, now: float, *, verified: bool) -> None:
        """The sync has ended as in `succeeded`, but for some entries that the kernel rejected."""
        self._rejections = 1 if self._changed else self._rejections + 1
        self._end_well(now, verified)

    def failed(self, now: float) -> None:
        """The sync has ended badly: what it should have done is still to be done."""
        self._ended, self._changed = now, False
        self._failures += 1
        self._rejections = 0

    def _end_well(self, now: float, verified: bool) -> None:
        self._ended, self._failures, self._changed = now, 0, False
        if verified:
            self._verified = now

    def _due_at(self) -> float | None:
        if not self._started:
            return None
        if self._ended is None:
            return float("-inf")
        earliest = self._ended + max(self._min_interval, self._pause())
        if self._changed or self._failures or self._verified is None:
            return earliest
        at = self._verified + self._max_interval
        if self._rejections:
            at = min(at, self._ended + self._doubled(self._grace, self._rejections))
        return max(earliest, at)

    def _pause(self) -> float:
        """Seconds that the failures so far ask for."""
        if not self._failures:
            return 0.0
        if self._changed:
            return self._backoff_first
        return self._doubled(self._backoff_first, self._failures)

    def _doubled(self, first: float, times: int) -> float:
        """`first` the first time, then twice that each time, up to `backoff_max`."""
        return float(min(self._backoff_max, first * 2 ** min(times - 1, _MOST_DOUBLINGS)))


class Looks:
    """When to look whether another program has changed what is in the kernel.

    - Every LOOK seconds. Where changes are notified, the next look waits at least BUSY_FACTOR times as long
      as the last one took, so that looks take at most 1 % of a CPU.
    - At once after `hasten`, but at least LEAST seconds after the last hastened look.
    """

    LOOK = 2.0
    LEAST = 1.0
    BUSY_FACTOR = 100.0

    def __init__(self, now: float) -> None:
        self._due = now + self.LOOK
        self._is_hastened = False
        self._hastened_at = float("-inf")  # the time of the last hastened look

    def hasten(self) -> None:
        """A change was notified. More such calls before the look ask for no more than one."""
        self._is_hastened = True

    def wait(self, now: float) -> float:
        """Seconds until a look is due, 0 where it is."""
        due = min(self._due, self._hastened_at + self.LEAST) if self._is_hastened else self._due
        return max(0.0, due - now)

    def looked(self, now: float, took: float, notified: bool) -> None:
        """`took`: seconds of processor time. `notified`: whether `hasten` is called for changes."""
        if self._is_hastened:
            self._is_hastened, self._hastened_at = False, now
        self._due = now + (max(self.LOOK, self.BUSY_FACTOR * took) if notified else self.LOOK)
