"""The steps of a long run in order, and how much time remains."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """A step: the seconds it is expected to take, what it does, and its function."""

    expected: float
    text: str
    run: Callable[[], None]


class Reached(NamedTuple):
    """A step begins. `share` of the run is done, 0 to 1. `remaining` seconds are left; None: unknown yet."""

    share: float
    remaining: float | None
    text: str


def run_all(
    steps: Sequence[Step], show: Callable[[Reached], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Run the steps, and call `show` before each and after the last, with the text "done".

    The machine may be slower or faster than expected. So the remaining time is the expected one, multiplied
    by the ratio of elapsed to expected time so far.
    """
    total = sum(step.expected for step in steps)
    done, began = 0.0, clock()
    for step in steps:
        show(Reached(done / total, _remaining(clock() - began, done, total), step.text))
        step.run()
        done += step.expected
    show(Reached(1.0, 0.0, "done"))


def _remaining(elapsed: float, done: float, total: float) -> float | None:
    """
    >>> _remaining(30.0, 20.0, 60.0), _remaining(0.0, 0.0, 60.0)
    (60.0, None)
    """
    return elapsed / done * (total - done) if done else None


def duration(seconds: float) -> str:
    """Return a duration for people.

    >>> duration(42.4), duration(150), duration(3700)
    ('42 s', '2 min 30 s', '61 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes} min"
