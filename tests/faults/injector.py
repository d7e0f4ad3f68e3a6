"""Decides at each call whether it fails, with which errno, and whether the process ends there."""

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_LATEST_KILL = 0.02  # seconds after a point
_CROWDED = 0.1  # the share of phases in which many calls fail
_MANY = 0.3  # the share of calls that fail in these


class Injected(NamedTuple):
    """An error that a call returned: the name of the call, and its errno."""

    point: str
    errno: int


class Injector:
    """Faults of one process. It writes each one to a journal before it happens, since a kill ends everything.

    The decisions depend only on the seed and the order of calls, which threads may change.
    """

    def __init__(self, seed: str, journal: int, rate: float, kill_at: int = 0) -> None:
        """`journal`: a file descriptor opened with O_APPEND. `rate`: the share of calls that fail.

        `kill_at`: the number of calls after which the process is killed, before or during the next one or
        shortly after it. 0: never.
        """
        self.points = 0
        self._random = random.Random(seed)
        self._journal = journal
        self._rate = rate
        self._kill_at = kill_at
        self._armed = False
        self._share = 0.0

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Calls fail only within the block."""
        self._share = _MANY if self._rate and self._random.random() < _CROWDED else self._rate
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def note(self, kind: str, **values: object) -> None:
        """Append a line to the journal."""
        os.write(self._journal, json.dumps({"kind": kind} | values).encode() + b"\n")

    def errno(self, point: str, choices: Sequence[int]) -> int:
        """Return the errno with which this call must fail, 0 if it must run. May end the process."""
        if not self._armed:
            return 0
        self._count(point)
        if not choices or self._random.random() >= self._share:
            return 0
        number = self._random.choice(choices)
        self.note("fault", point=point, errno=number)
        return number

    def call(self, point: str, choices: Sequence[int], function: Callable[[], T]) -> T:
        """Call the function, or raise OSError."""
        number = self.errno(point, choices)
        if number:
            raise OSError(number, os.strerror(number))
        return function()

    def choose(self, count: int) -> int:
        """Return a random number below `count`."""
        return self._random.randrange(count)

    def _count(self, point: str) -> None:
        self.points += 1
        if not self._kill_at or self.points != self._kill_at:
            return
        self.note("kill", point=point)
        if self._random.random() < 0.5:
            _kill()
        delay = self._random.uniform(0, _LATEST_KILL)  # within or after the call, in another thread
        threading.Timer(delay, _kill).start()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
