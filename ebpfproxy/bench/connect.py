"""How long a new connection takes through a Service, beside straight to an endpoint."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.modes import NONE
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, side_by_side, turns
from ebpfproxy.lab import Lab, Netns

METRICS = {"connect": "connect_us", "crr": "crr_us"}
PATHS = ("direct", "clusterip")
PLACES = ("", "-host")
"""Where the client is, by what stands behind a path's name: in a pod, or on the node."""


class Size(NamedTuple):
    """`samples` are those of each path and metric, over all rounds."""

    services: int
    endpoints: int
    samples: int
    rounds: int

    @property
    def each(self) -> int:
        """Samples of a path and metric in one round."""
        return max(1, self.samples // self.rounds)


def run(sizes: Iterable[Size], modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Every size in every mode, beside no proxy, where paths are direct alone. Raises EbpfProxyError."""
    parts = [(metric, place) for metric in METRICS for place in PLACES]
    for size in sizes:
        progress(f"{size.services} services with {size.endpoints} endpoints each")
        names = (NONE, *modes)
        samples = Samples(names, size.services)
        with side_by_side(names, functools.partial(_Testbed, size=size), progress) as sides:
            for turn, (metric, place), side in turns(sides, size.rounds, parts, progress):
                paths = PATHS if side.agents else PATHS[:1]
                took = side.testbed.measure(metric, place, paths, turn)
                for path, figures in took.items():
                    samples.add(side.mode, path, METRICS[metric], turn, figures)
        yield from samples.results()


class _Testbed:
    """A node with a server and a client."""

    def __init__(self, lab: Lab, size: Size) -> None:
        self._load = Load(lab.folder)
        self._size = size
        workload.write(lab.folder / "manifests", size.services, size.endpoints)
        workload.server_pod(lab, self._load)
        lists = {
            "direct": workload.endpoint_targets(size.services, size.endpoints),
            "clusterip": workload.service_targets(size.services),
        }
        every = {path: list(targets) for path, targets in lists.items()}
        self._targets: dict[tuple[str, ...], Path] = {
            paths: self._load.targets("-".join(paths), *(every[path] for path in paths))
            for paths in (PATHS[:1], PATHS)
        }
        self._places: dict[str, Netns] = dict(zip(PLACES, (lab.pod("client"), lab.node), strict=True))

    def measure(self, metric: str, place: str, paths: tuple[str, ...], seed: int) -> dict[str, list[float]]:
        """Microseconds by path. Paths take turns connection by connection, so that what disturbs the machine
        disturbs all alike."""
        count = self._size.each * len(paths)
        took = self._load.measure(self._places[place], metric, self._targets[paths], count, seed=seed)
        return {
            path + place: [each / 1000 for each in figures] for path, figures in zip(paths, took, strict=True)
        }
