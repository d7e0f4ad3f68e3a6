"""Failures of the connection to the API server: how long to wait after one, and which are logged."""

import random
import time
from collections.abc import Callable

from ebpfproxy.errors import SourceError
from ebpfproxy.log import Logger

log = Logger(__name__)

UNREACHABLE = "API server unreachable, retrying"
"""The kernel continues to forward. After a start the agent programs nothing, and its pod is not ready, until
the API server answers."""
REACHABLE = "API server reachable again"
"""Objects are listed and watched again."""


class Backoff:
    """The seconds to wait after each failure, drawn from a range that doubles.

    The range is [`first`, 2 * `first`) at first and [`last`, 2 * `last`) at most. It starts again after a
    failure that follows the previous one by `reset_after` seconds or more. These are the rules of client-go
    (tools/cache/reflector.go, NewExponentialBackoffManager with a jitter of 1). The width of the range keeps
    the agents of many nodes apart after a restart of the API server.

    >>> backoff = Backoff(0.8, 30, uniform=lambda low, high: low)
    >>> [backoff.next() for _ in range(8)]
    [0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
    """

    def __init__(
        self,
        first: float,
        last: float,
        reset_after: float = 120.0,
        uniform: Callable[[float, float], float] = random.uniform,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first, self._last, self._reset_after = first, last, reset_after
        self._uniform, self._clock = uniform, clock
        self._low, self._failed_at = first, clock()

    def next(self) -> float:
        now = self._clock()
        if now - self._failed_at >= self._reset_after:
            self._low = self._first
        low, self._low, self._failed_at = self._low, min(self._last, self._low * 2), now
        return self._uniform(low, 2 * low)


LIST, OPEN, STREAM = 1, 2, 3
"""The stages of an attempt, in order: list, open the watch, read the watch."""


class Outage:
    """Logs a failure once, again after `warn_again` seconds, and once when the API server works again."""

    def __init__(self, kind: str, warn_again: float, clock: Callable[[], float]) -> None:
        self._kind, self._warn_again, self._clock = kind, warn_again, clock
        self._stage = 0
        self._since = self._reported_at = 0.0
        self._attempts = 0
        self._reported: set[object] = set()

    def failed(self, stage: int, error: SourceError) -> None:
        """Record a failure at `stage`. Log it if its kind is new or was last logged long ago."""
        now = self._clock()
        if not self._stage:
            self._since, self._attempts = now, 0
        self._stage, self._attempts = stage, self._attempts + 1
        if now - self._reported_at >= self._warn_again:
            self._reported.clear()
        failure = (type(error), getattr(error, "code", None), error.hint)
        if failure not in self._reported:
            self._reported.add(failure)
            self._reported_at = now
            seconds = round(now - self._since, 1)
            log.warning(
                UNREACHABLE, kind=self._kind, reason=error.message, hint=error.hint,
                attempts=self._attempts, seconds=seconds,
            )  # fmt: skip

    def passed(self, stage: int) -> None:
        """Record that `stage` succeeded. This ends an outage at this or an earlier stage."""
        if self._stage and stage >= self._stage:
            seconds = round(self._clock() - self._since, 1)
            log.info(REACHABLE, kind=self._kind, attempts=self._attempts, seconds=seconds)
            self._stage = 0
            self._reported.clear()
