"""How long a new connection takes through a Service, beside straight to an endpoint."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.report import Result, result
from ebpfproxy.lab import Agent, Lab, Place
from ebpfproxy.retirer import ALONE

METRICS = {"connect": "connect_us", "crr": "crr_us"}
PATHS = ("direct", "clusterip")
NONE = "none"

_PATIENCE = 600.0  # seconds for a first sync, however large

Progress = Callable[[str], None]


class Size(NamedTuple):
    """`samples` are those of each path and metric, over all rounds."""

    services: int
    endpoints: int
    samples: int
    rounds: int


Samples = dict[tuple[str, str], list[float]]
"""Microseconds by path and metric."""


def run(sizes: Iterable[Size], modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Every size: with no proxy, and in every mode, which take turns round by round, since a machine drifts.

    Raises EbpfProxyError.
    """
    for size in sizes:
        with Lab("bench-none", 2) as without, Lab("bench") as lab:
            bare, served = _Side(without, size), _Side(lab, size)
            folder = lab.folder / "manifests"
            workload.write(folder, size.services, size.endpoints)
            samples: dict[str, Samples] = {mode: collections.defaultdict(list) for mode in (NONE, *modes)}
            for number in range(size.rounds):
                progress(f"{size.services} services, round {number + 1} of {size.rounds}: {NONE}")
                bare.measure(number, PATHS[:1], samples[NONE])
                for mode in modes:
                    progress(f"{size.services} services, round {number + 1} of {size.rounds}: {mode}")
                    agent = lab.agent(folder, f"--proxy-mode={mode}", wait=_PATIENCE)
                    await_alone(agent)
                    served.measure(number, PATHS, samples[mode])
                    agent.stop()
        for mode, found in samples.items():
            yield from _results(mode, size, found)


def await_alone(agent: Agent) -> None:
    """Until nothing of other modes is left on its node."""
    agent.await_line(lambda line: ALONE in line.text, timeout=_PATIENCE)


def _results(mode: str, size: Size, samples: Samples) -> Iterator[Result]:
    for path, metric in sorted(samples, key=_order):
        yield result(mode, path, size.services, metric, samples[path, metric])


class _Side:
    """A node with a server and a client."""

    def __init__(self, lab: Lab, size: Size) -> None:
        self._load = Load(lab.folder)
        self._size = size
        workload.server_pod(lab, self._load)
        lists = {
            "direct": workload.endpoint_targets(size.services, size.endpoints),
            "clusterip": workload.service_targets(size.services),
        }
        self._targets: dict[tuple[str, ...], Path] = {
            paths: self._load.targets("-".join(paths), *(lists[path] for path in paths))
            for paths in (PATHS[:1], PATHS)
        }
        self._places: dict[str, Place] = {"": lab.pod("client"), "-host": lab.node}

    def measure(self, number: int, paths: tuple[str, ...], samples: Samples) -> None:
        """Paths take turns connection by connection, so that what disturbs the machine disturbs all alike."""
        count = self._size.samples // self._size.rounds * len(paths)
        for metric, name in METRICS.items():
            for suffix, place in self._places.items():
                took = self._load.measure(place, metric, self._targets[paths], count, seed=number)
                for path, figures in zip(paths, took, strict=True):
                    samples[path + suffix, name] += (each / 1000 for each in figures)


def _order(key: tuple[str, str]) -> tuple[str, bool, int]:
    path, metric = key
    plain = path.removesuffix("-host")
    return metric, path != plain, PATHS.index(plain)
