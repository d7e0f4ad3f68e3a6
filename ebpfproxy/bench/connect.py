"""The benchmark connect: the duration of a new connection through a Service and directly to an endpoint."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.modes import NONE
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, part_of, side_by_side, turns
from ebpfproxy.lab import Lab, Netns

METRICS = {"connect": "connect_us", "crr": "crr_us"}
PATHS = ("direct", "clusterip")
CLIENT_SUFFIXES = ("", "-host")
"""Suffixes of path names for the location of the client: in a pod, or on the node."""


class Size(NamedTuple):
    """The extent of a run. `samples` is the number for each path and metric in all rounds together."""

    services: int
    endpoints: int
    samples: int
    rounds: int

    @property
    def each(self) -> int:
        """The number of samples of each path and metric in one round."""
        return max(1, self.samples // self.rounds)


def run(sizes: Sequence[Size], modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Measure every size in every mode, and without a proxy on direct paths. Raises EbpfProxyError."""
    parts = [(metric, suffix) for metric in METRICS for suffix in CLIENT_SUFFIXES]
    for number, size in enumerate(sizes):
        part = part_of(progress, number, len(sizes))
        part(f"{size.services} services with {size.endpoints} endpoints each", 0.0)
        names = (NONE, *modes)
        samples = Samples(names, size.services)
        with side_by_side(names, functools.partial(_Testbed, size=size), part) as sides:
            for turn, (metric, suffix), side in turns(sides, size.rounds, parts, part):
                paths = PATHS if side.agents else PATHS[:1]
                durations = side.testbed.measure(metric, suffix, paths, turn)
                for path, figures in durations.items():
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
        by_path = {path: list(targets) for path, targets in lists.items()}
        self._targets: dict[tuple[str, ...], Path] = {
            paths: self._load.targets("-".join(paths), *(by_path[path] for path in paths))
            for paths in (PATHS[:1], PATHS)
        }
        clients = (lab.pod("client"), lab.node)
        self._clients: dict[str, Netns] = dict(zip(CLIENT_SUFFIXES, clients, strict=True))

    def measure(self, metric: str, suffix: str, paths: tuple[str, ...], seed: int) -> dict[str, list[float]]:
        """Return microseconds by path.

        Paths alternate with each connection, so that disturbances of the machine affect all paths equally.
        """
        count = self._size.each * len(paths)
        client = self._clients[suffix]
        durations = self._load.measure(client, metric, self._targets[paths], count, seed=seed)
        return {
            path + suffix: [each / 1000 for each in figures]
            for path, figures in zip(paths, durations, strict=True)
        }
