"""The names of all series of the agent's metrics."""

import functools
import runpy

from tests.support.kustomize import REPOSITORY

_SUFFIXES = ("_bucket", "_count", "_sum")


@functools.cache
def all_names() -> frozenset[str]:
    """As on the page docs/metrics.md#all-metrics; a histogram has three."""
    rows = runpy.run_path(str(REPOSITORY / "docs/metrics_reference.py"))["rows"]()
    return frozenset(
        name
        for row in rows
        for name in ([row.name + each for each in _SUFFIXES] if row.kind == "histogram" else [row.name])
    )
