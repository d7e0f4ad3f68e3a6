"""The steps of a long run in order, and how much time remains."""

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """A step: the seconds it is expected to take, what it does, and its function.

    Steps of a `kind` are slower or faster than expected by about the same factor.
    """

    expected: float
    text: str
    run: Callable[[], None]
    kind: str = ""


class Reached(NamedTuple):
    """A step begins. `share` of the run is done, 0 to 1. `remaining` seconds are left; None: unknown yet."""

    share: float
    remaining: float | None
    text: str


def run_all(
    steps: Sequence[Step], show: Callable[[Reached], None], clock: Callable[[], float] = time.monotonic
) -> None:
    """Run the steps, and call `show` before each and after the last, with the text "done".

    The machine may be slower or faster than expected. So the remaining time of each kind of step is the
    expected one, multiplied by the ratio of elapsed to expected time of that kind so far. The first few
    seconds of a kind say little, and count as if _PRIOR seconds had taken as long as expected.
    """
    left: dict[str, float] = collections.defaultdict(float)
    for step in steps:
        left[step.kind] += step.expected
    total = sum(left.values())
    done: dict[str, float] = collections.defaultdict(float)
    took: dict[str, float] = collections.defaultdict(float)
    for step in steps:
        show(Reached(sum(done.values()) / total, _remaining(took, done, left), step.text))
        began = clock()
        step.run()
        took[step.kind] += clock() - began
        done[step.kind] += step.expected
        left[step.kind] -= step.expected
    show(Reached(1.0, 0.0, "done"))


_PRIOR = 10.0


def _remaining(
    took: Mapping[str, float], done: Mapping[str, float], left: Mapping[str, float]
) -> float | None:
    """Return the seconds for what is `left`, given what was `done` so far and how long it `took`.

    >>> _remaining({"start": 50.0}, {"start": 20.0}, {"start": 10.0, "turn": 2.0})
    22.0
    >>> _remaining({}, {}, {"turn": 2.0})
    """
    if not done:
        return None
    return sum(
        seconds * (took.get(kind, 0.0) + _PRIOR) / (done.get(kind, 0.0) + _PRIOR)
        for kind, seconds in left.items()
    )


def duration(seconds: float) -> str:
    """Return a duration for people.

    >>> duration(42.4), duration(150), duration(3700)
    ('42 s', '2 min 30 s', '61 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes} min"
