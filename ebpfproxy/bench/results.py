"""The results of a comparison: typed, with JSON and CSV as formats. Without I/O."""

import collections
import csv
import io
import random
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from ebpfproxy.bench.samples import percentile, ratios
from ebpfproxy.errors import ConfigError

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""The percentiles of each figure."""

_CONFIDENCE = 0.95
_RESAMPLES = 1000


class Interval(msgspec.Struct, frozen=True):
    """A median and its 95 % confidence interval, by bootstrap over turns."""

    median: float
    low: float
    high: float


class Figure(msgspec.Struct, frozen=True):
    """One metric of one case in one mode, with so many Services.

    `percentiles` are those of SHARES, over all `n` samples. `ratio` compares with the mode `base`, turn by
    turn; None without samples of `base` in the same turns, and for `base` itself.
    """

    case: str
    metric: str
    mode: str
    services: int
    n: int
    percentiles: tuple[float, ...]
    base: str = ""
    ratio: Interval | None = None

    @property
    def median(self) -> float:
        return self.percentiles[SHARES.index(0.5)]

    def at(self, share: float) -> float:
        """Return a percentile of SHARES."""
        return self.percentiles[SHARES.index(share)]


class Environment(msgspec.Struct, frozen=True):
    """The machine. `governor` is "" if the kernel does not control the frequency. `load_*` are load averages
    of one minute, at the begin and the end of the run. `versions` are those of programs, by name."""

    kernel: str
    cpu: str
    cores: int
    governor: str
    memory_gib: float
    load_begin: float
    load_end: float
    began: str
    ended: str
    versions: dict[str, str]


class Method(msgspec.Struct, frozen=True):
    """How it was measured. `seconds` is the duration of a turn, `starts` the number of starts of each mode,
    `changes` the number of changes after each start, `limit` the longest time in seconds for a start, and
    after which no further change is made, `cpu` the CPU of clients and servers; None: any."""

    command: str
    modes: tuple[str, ...]
    cases: tuple[str, ...]
    services: tuple[int, ...]
    endpoints: int
    rounds: int
    seconds: float
    starts: int
    changes: int
    limit: float
    cpu: int | None = None


class LeftOut(msgspec.Struct, frozen=True):
    """A mode that was not measured with so many Services, because its start took longer than the limit."""

    mode: str
    services: int


class Comparison(msgspec.Struct, frozen=True):
    """A complete comparison: the content of the JSON file."""

    environment: Environment
    method: Method
    figures: tuple[Figure, ...]
    left_out: tuple[LeftOut, ...] = ()

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def to_csv(self) -> str:
        """Return a line for each figure. Columns without a value are empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        shares = [f"p{share * 100:g}" for share in SHARES]
        writer.writerow(
            ["case", "metric", "mode", "services", "n", *shares, "base", "ratio", "ratio_low", "ratio_high"]
        )
        for each in self.figures:
            ratio = (each.ratio.median, each.ratio.low, each.ratio.high) if each.ratio else ("", "", "")
            writer.writerow(
                [
                    each.case,
                    each.metric,
                    each.mode,
                    each.services,
                    each.n,
                    *each.percentiles,
                    each.base,
                    *ratio,
                ]
            )
        return text.getvalue()

    def of(self, metric: str) -> dict[str, list[Figure]]:
        """Return the figures of a metric by mode, ordered by the number of Services."""
        found: dict[str, list[Figure]] = {}
        for mode in self.method.modes:
            figures = [each for each in self.figures if (each.metric, each.mode) == (metric, mode)]
            if figures:
                found[mode] = sorted(figures, key=lambda each: each.services)
        return found


def from_json(raw: bytes, name: str) -> Comparison:
    """Parse the JSON of a comparison. Raises ConfigError, with `name`, for anything else."""
    try:
        return msgspec.json.decode(raw, type=Comparison)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"cannot read {name}: {error}", "give the JSON file of an earlier ebpfproxy bench compare"
        ) from error


class Collector:
    """Collects the samples for one number of Services. Modes are compared with the first that has samples."""

    def __init__(self, services: int, modes: Sequence[str]) -> None:
        self._services = services
        self._modes = modes
        self._turns: dict[tuple[str, str], dict[str, dict[int, list[float]]]] = {}

    def add(self, case: str, metric: str, mode: str, turn: int, samples: Iterable[float]) -> None:
        """Add samples. Those that are compared with each other must have the same turn."""
        by_mode = self._turns.setdefault((case, metric), {})
        by_mode.setdefault(mode, collections.defaultdict(list))[turn].extend(samples)

    def figures(self) -> list[Figure]:
        """Return the figures by case and metric in order of first use, then by mode."""
        found = []
        for (case, metric), by_mode in self._turns.items():
            modes = [mode for mode in self._modes if mode in by_mode]
            for mode in modes:
                ordered = sorted(each for turn in by_mode[mode].values() for each in turn)
                if not ordered:
                    continue
                ratio = interval(ratios(by_mode[mode], by_mode[modes[0]])) if mode != modes[0] else None
                percentiles = tuple(round(percentile(ordered, share), 4) for share in SHARES)
                found.append(
                    Figure(
                        case,
                        metric,
                        mode,
                        self._services,
                        len(ordered),
                        percentiles,
                        modes[0] if ratio else "",
                        ratio,
                    )
                )
        return found


def interval(values: Sequence[float]) -> Interval | None:
    """Return the median and its confidence interval: the percentile bootstrap, always with the same numbers.

    None for no values.

    >>> interval([2.0])
    Interval(median=2.0, low=2.0, high=2.0)
    """
    if not values:
        return None
    chance = random.Random(len(values))
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    tail = (1 - _CONFIDENCE) / 2
    return Interval(
        round(statistics.median(values), 4),
        round(percentile(medians, tail), 4),
        round(percentile(medians, 1 - tail), 4),
    )
