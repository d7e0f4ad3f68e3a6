"""Results of a benchmark: as one JSON object, and as a table."""

import dataclasses
import datetime
import os
import platform
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

import ebpfproxy

BASELINES = {
    "clusterip": "direct",
    "clusterip-host": "direct-host",
    "nodeport": "direct",
    "nodeport-local": "direct-local",
    "nodeport-remote": "direct-remote",
    "one-node-uplinks": "one-node-bare",
    "one-node-pods": "one-node-bare",
    "two-nodes-uplinks": "two-nodes-bare",
    "two-nodes-pods": "two-nodes-bare",
}
"""Which path a path is compared with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Percentiles of `n` samples. The unit is in the metric's name; `path` is "" where there is none."""

    mode: str
    path: str
    services: int
    metric: str
    p50: float
    p90: float
    p99: float
    n: int


def result(mode: str, path: str, services: int, metric: str, samples: Iterable[float]) -> Result:
    """Sum up samples, of which there is at least one."""
    ordered = sorted(samples)
    p50, p90, p99 = (round(percentile(ordered, share), 3) for share in (0.5, 0.9, 0.99))
    return Result(mode, path, services, metric, p50, p90, p99, len(ordered))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of them do not exceed (nearest rank).

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5), percentile([1.0, 2.0, 3.0, 4.0], 0.99), percentile([7.0], 0.5)
    (2.0, 4.0, 7.0)
    """
    rank = -int(-share * len(ordered) // 1)  # rounded up
    return ordered[max(rank, 1) - 1]


def environment() -> dict[str, Any]:
    return {
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "version": ebpfproxy.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def as_object(bench: str, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "bench": bench,
        "environment": environment(),
        "results": [dataclasses.asdict(entry) for entry in results],
    }


def as_table(bench: str, results: Sequence[Result]) -> Table:
    """With `ratio`: the median over that of the direct path of the same mode, where there is one."""
    baselines = {(entry.mode, entry.path, entry.services, entry.metric): entry.p50 for entry in results}
    table = Table(
        title=f"bench {bench}",
        caption=_caption(),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    table.caption_justify = "left"
    for column in ("mode", "path", "services", "metric"):
        table.add_column(column, justify="right" if column == "services" else "left", no_wrap=True)
    for column in ("p50", "p90", "p99", "n", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in results:
        key = (entry.mode, BASELINES.get(entry.path, "no path"), entry.services, entry.metric)
        ratio = f"{entry.p50 / baselines[key]:.2f}" if baselines.get(key) else ""
        digits = 3 if entry.metric.endswith("_ratio") else 1
        figures = (f"{figure:,.{digits}f}" for figure in (entry.p50, entry.p90, entry.p99))
        words = (entry.mode, entry.path, f"{entry.services:,}", entry.metric)
        table.add_row(*words, *figures, f"{entry.n:,}", ratio)
    return table


def _caption() -> str:
    facts = environment()
    return f"Linux {facts['kernel']}, {facts['cpus']} CPUs, Python {facts['python']}, {facts['date']}"
