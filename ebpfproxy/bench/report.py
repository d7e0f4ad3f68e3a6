"""Convert the results of a benchmark to a JSON object or a table."""

import contextlib
import dataclasses
import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

import ebpfproxy
from ebpfproxy.bench.samples import Ratio, Result

_CONNTRACK = Path("/proc/sys/net/netfilter")
_TEXT_COLUMNS = {"metric", "path", "mode"}


def environment() -> dict[str, Any]:
    """Return facts about the machine. `load` is the load average of the last minute, with the benchmark."""
    return {
        "kernel": platform.release(),
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "conntrack_max": conntrack("max"),
        "conntrack_buckets": conntrack("buckets"),
        "python": platform.python_version(),
        "version": ebpfproxy.__version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def conntrack(name: str) -> int | None:
    """Return a figure of netfilter's connection tracking in this namespace; None if the kernel has none."""
    with contextlib.suppress(FileNotFoundError):
        return int((_CONNTRACK / f"nf_conntrack_{name}").read_text())
    return None


def as_object(bench: str, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "bench": bench,
        "environment": environment(),
        "results": [_as_object(entry) for entry in results],
    }


def _as_object(entry: Result) -> dict[str, Any]:
    ratios = {"of_direct": entry.of_direct, "of_first": entry.of_first}
    return dataclasses.asdict(entry) | {key: each and each._asdict() for key, each in ratios.items()}


def as_table(bench: str, results: Sequence[Result]) -> Table:
    """Return a table without empty columns. A ratio is shown as median, minimum and maximum of all turns."""
    table = Table(
        title=f"bench {bench}",
        caption=_caption(results),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    table.caption_justify = "left"
    rows = [_row(entry) for entry in results]
    columns = [column for column in (rows[0] if rows else {}) if any(row[column] for row in rows)]
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT_COLUMNS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def _row(entry: Result) -> dict[str, str]:
    return {
        "services": f"{entry.services:,}",
        "metric": entry.metric,
        "path": entry.path,
        "mode": entry.mode,
        "p50": _figure(entry.p50),
        "p90": _figure(entry.p90),
        "p99": _figure(entry.p99),
        "n": f"{entry.n:,}",
        "of direct": _ratio(entry.of_direct),
        "of first": _ratio(entry.of_first),
    }


def _figure(figure: float) -> str:
    """
    >>> _figure(3), _figure(0.25), _figure(12345.678)
    ('3', '0.25', '12,345.7')
    """
    if isinstance(figure, int):
        return f"{figure:,}"
    return f"{figure:,.2f}" if figure < 10 else f"{figure:,.1f}"


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    spread = f" {ratio.least:.2f}–{ratio.most:.2f}" if ratio.least != ratio.most else ""
    return f"{ratio.median:.3f}{spread}"


def _caption(results: Sequence[Result]) -> str:
    facts = environment()
    machine = (
        f"Linux {facts['kernel']}, {facts['cpus']} CPUs, load {facts['load']}, Python {facts['python']}, "
        f"{facts['date']}."
    )
    if not any(entry.of_direct or entry.of_first for entry in results):
        return machine
    return (
        f"{machine} of direct: ratio to the direct path of the same mode; of first: ratio to the first mode "
        "with the same metric and path. Median, minimum and maximum of the ratios of all turns."
    )
