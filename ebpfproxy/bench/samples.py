"""What was measured, and what becomes of it: percentiles, and ratios of what was measured together. Pure."""

import collections
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

BASELINES = {
    "clusterip": "direct",
    "clusterip-host": "direct-host",
    "nodeport": "direct",
    "nodeport-local": "direct-local",
    "nodeport-remote": "direct-remote",
}
"""Which path of the same mode a path is compared with."""


class Ratio(NamedTuple):
    """The median of the ratios of all turns, the least of them and the most."""

    median: float
    least: float
    most: float


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Percentiles of `n` samples; of what is counted they are all the count, of `n` that there were.

    The unit is in the metric's name; `path` is "" where there is none. `of_direct`: over the direct path of
    the same mode; `of_first`: over the first mode that has this path. None where there is no such.
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
"""Figures by turn."""


class Samples:
    """Of one size of a cluster. Modes stand in the order in which they are compared: all to the first."""

    def __init__(self, modes: Sequence[str], services: int) -> None:
        self._modes = modes
        self._services = services
        self._found: dict[_Key, _Turns] = {}
        self._counts: dict[_Key, tuple[float, int]] = {}

    def add(self, mode: str, path: str, metric: str, turn: int, figures: Iterable[float]) -> None:
        """What is compared with others has the same turn."""
        turns = self._found.setdefault(_Key(metric, path, mode), collections.defaultdict(list))
        turns[turn] += figures

    def count(self, mode: str, path: str, metric: str, count: float, of: int) -> None:
        """So many more, of so many more that there were."""
        key = _Key(metric, path, mode)
        before, of_before = self._counts.get(key, (0, 0))
        self._counts[key] = before + count, of_before + of

    def results(self) -> list[Result]:
        """By metric and path, in the order in which they came, then by mode, so that modes are neighbors."""
        keys = [*self._found, *self._counts]
        metrics, paths = ([*dict.fromkeys(each[at] for each in keys)] for at in (0, 1))
        order = {name: at for at, name in enumerate(self._modes)}
        keys.sort(key=lambda key: (metrics.index(key.metric), paths.index(key.path), order[key.mode]))
        return [self._result(key) for key in keys]

    def _result(self, key: _Key) -> Result:
        if key in self._counts:
            count, of = self._counts[key]
            return Result(*key, self._services, count, count, count, of)
        turns = self._found[key]
        ordered = sorted(figure for figures in turns.values() for figure in figures)
        p50, p90, p99 = (round(percentile(ordered, share), 3) for share in (0.5, 0.9, 0.99))
        direct = self._found.get(key._replace(path=BASELINES.get(key.path, "no path")))
        first = next(
            key._replace(mode=mode) for mode in self._modes if key._replace(mode=mode) in self._found
        )
        return Result(
            *key,
            self._services,
            p50,
            p90,
            p99,
            len(ordered),
            ratio(turns, direct) if direct else None,
            ratio(turns, self._found[first]) if first != key else None,
        )


def ratio(turns: _Turns, base: _Turns) -> Ratio | None:
    """Turn by turn, so that a machine that drifts does no harm; None where they share none.

    >>> ratio({0: [98.0], 1: [196.0], 2: [400.0]}, {0: [100.0], 1: [200.0], 2: [400.0], 3: [7.0]})
    Ratio(median=0.98, least=0.98, most=1.0)
    """
    found = [
        statistics.median(turns[turn]) / statistics.median(base[turn])
        for turn in turns
        if base.get(turn) and statistics.median(base[turn])
    ]
    if not found:
        return None
    return Ratio(*(round(each, 4) for each in (statistics.median(found), min(found), max(found))))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of them do not exceed (nearest rank).

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0, 3.0, 4.0], 0.99), percentile([7.0], 0.5)
    (2.0, 4.0, 7.0)
    """
    rank = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[max(rank, 1) - 1]
