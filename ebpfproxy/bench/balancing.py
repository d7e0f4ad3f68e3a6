"""The benchmark balancing: the duration of a new connection with each algorithm, compared with random."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, rotated
from ebpfproxy.lab import Lab, manifests
from ebpfproxy.model.balancing import Algorithm

_ROWS = tuple(each.value for each in Algorithm)
_OF_EACH = 50
"""Services that clients use, for each algorithm. All others use random."""
SERVICES_MIN = len(_ROWS) * _OF_EACH
_FLAGS = ("--proxy-mode=ebpf", "--sync-period=1h")


class Size(NamedTuple):
    """The extent of a run. `samples` is the number of connections for each algorithm in all rounds."""

    services: int
    endpoints: int
    samples: int
    rounds: int


def run(size: Size, progress: Progress) -> Iterator[Result]:
    """Measure connections from a pod. Algorithms alternate with each connection, in another order each round.

    The metric is connect_us. Raises EbpfProxyError.
    """
    samples = Samples(_ROWS, size.services)
    with Lab("bench-balancing") as lab:
        load = Load(lab.folder)
        folder = lab.folder / "manifests"
        workload.write(folder, size.services, size.endpoints)
        _annotate(folder, size)
        workload.server_pod(lab, load)
        client = lab.pod("client")
        progress("starting an agent")
        lab.nodes[0].agent(folder, *_FLAGS, wait=600)
        for turn in range(size.rounds):
            progress(f"round {turn + 1} of {size.rounds}")
            rows = rotated(_ROWS, turn)
            targets = load.targets(f"turn-{turn}", *(_targets(row) for row in rows))
            count = max(1, size.samples // size.rounds) * len(rows)
            durations = load.measure(client, "connect", targets, count, seed=turn)
            for row, figures in zip(rows, durations, strict=True):
                samples.add(row, "clusterip", "connect_us", turn, [each / 1000 for each in figures])
    yield from samples.results()


def _first(row: str) -> int:
    return _ROWS.index(row) * _OF_EACH


def _targets(row: str) -> Iterator[tuple[str, int]]:
    first = _first(row)
    return ((workload.cluster_ip(index), workload.PORT) for index in range(first, first + _OF_EACH))


def _annotate(folder: Path, size: Size) -> None:
    """Write the Services with their annotations. The first ones are those that clients use."""
    objects = list(workload.services(size.services))
    for row in _ROWS:
        first = _first(row)
        for each in objects[first : first + _OF_EACH]:
            each["metadata"]["annotations"] = {"ebpfproxy/lb-algorithm": row}
    manifests.write(folder / "services.json", manifests.listed(objects))
