"""Samples and their evaluation: percentiles, and ratios of samples from the same turn, without I/O."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

BASELINES = {
    "clusterip": "direct",
    "clusterip-host": "direct-host",
    "nodeport": "direct",
    "nodeport-local": "direct-local",
    "nodeport-remote": "direct-remote",
}
"""The path of the same mode that a path is compared with."""


class Ratio(NamedTuple):
    """Median, minimum and maximum of the ratios of all turns."""

    median: float
    least: float
    most: float


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """The result of one metric, path and mode: percentiles of `n` samples.

    For counts, all percentiles are the count, and `n` is the number of attempts. The metric's name has the
    unit. `path` is "" if the metric has none. `of_direct` is the ratio to the direct path of the same mode,
    `of_first` the ratio to the first mode with this path; None without one.
    """

    metric: str
    path: str
    mode: str
    services: int
    p50: float
    p90: float
    p99: float
    n: int
    of_direct: Ratio | None = None
    of_first: Ratio | None = None


class _Key(NamedTuple):
    metric: str
    path: str
    mode: str


_Turns = dict[int, list[float]]
"""Samples by turn."""


class Samples:
    """The samples for one size of a cluster. All modes are compared with the first."""

    def __init__(self, modes: Sequence[str], services: int) -> None:
        self._modes = modes
        self._services = services
        self._samples: dict[_Key, _Turns] = {}
        self._counts: dict[_Key, tuple[float, int]] = {}

    def add(self, mode: str, path: str, metric: str, turn: int, figures: Iterable[float]) -> None:
        """Add samples. Samples that are compared with each other must have the same turn."""
        turns = self._samples.setdefault(_Key(metric, path, mode), collections.defaultdict(list))
        turns[turn] += figures

    def count(self, mode: str, path: str, metric: str, count: float, attempts: int) -> None:
        """Add to a count and to its number of attempts."""
        key = _Key(metric, path, mode)
        previous_count, previous_attempts = self._counts.get(key, (0, 0))
        self._counts[key] = previous_count + count, previous_attempts + attempts

    def results(self) -> list[Result]:
        """Return the results by metric and path, in order of first use, then by mode."""
        keys = [*self._samples, *self._counts]
        metrics, paths = ([*dict.fromkeys(each[at] for each in keys)] for at in (0, 1))
        order = {name: at for at, name in enumerate(self._modes)}
        keys.sort(key=lambda key: (metrics.index(key.metric), paths.index(key.path), order[key.mode]))
        return [self._result(key) for key in keys]

    def _result(self, key: _Key) -> Result:
        if key in self._counts:
            count, attempts = self._counts[key]
            return Result(*key, self._services, count, count, count, attempts)
        turns = self._samples[key]
        ordered = sorted(figure for figures in turns.values() for figure in figures)
        p50, p90, p99 = (round(percentile(ordered, share), 3) for share in (0.5, 0.9, 0.99))
        direct = self._samples.get(key._replace(path=BASELINES.get(key.path, "no path")))
        first = next(
            key._replace(mode=mode) for mode in self._modes if key._replace(mode=mode) in self._samples
        )
        return Result(
            *key,
            self._services,
            p50,
            p90,
            p99,
            len(ordered),
            ratio(turns, direct) if direct else None,
            ratio(turns, self._samples[first]) if first != key else None,
        )


def ratio(turns: _Turns, base: _Turns) -> Ratio | None:
    """Compare samples of the same turn, so that a change of the machine's speed has no effect.

    Return None if there is no common turn.

    >>> ratio({0: [98.0], 1: [196.0], 2: [400.0]}, {0: [100.0], 1: [200.0], 2: [400.0], 3: [7.0]})
    Ratio(median=0.98, least=0.98, most=1.0)
    """
    found = ratios(turns, base)
    if not found:
        return None
    return Ratio(*(round(each, 4) for each in (statistics.median(found), min(found), max(found))))


def ratios(turns: Mapping[int, Sequence[float]], base: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the ratio of the medians of each turn that both have.

    >>> ratios({0: [3.0], 1: [8.0], 2: [1.0]}, {0: [2.0], 1: [4.0, 4.0, 9.0]})
    [1.5, 2.0]
    """
    return [
        statistics.median(turns[turn]) / statistics.median(base[turn])
        for turn in turns
        if turns[turn] and base.get(turn) and statistics.median(base[turn])
    ]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least `share` of all samples do not exceed (nearest rank).

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0, 3.0, 4.0], 0.99), percentile([7.0], 0.5)
    (2.0, 4.0, 7.0)
    """
    rank = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[max(rank, 1) - 1]
