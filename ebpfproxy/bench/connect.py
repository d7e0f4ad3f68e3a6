"""How long a new connection takes through a Service, beside straight to an endpoint."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.report import Result, result
from ebpfproxy.lab import Lab, Place

METRICS = {"connect": "connect_us", "crr": "crr_us"}
PATHS = ("direct", "clusterip")

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
    """Every size: with no proxy, then in every mode. Each in a lab of its own. Raises EbpfProxyError."""
    for size in sizes:
        yield from _results("none", size, _measure("none", size, progress))
        for mode in modes:
            yield from _results(mode, size, _measure(mode, size, progress))


def _results(mode: str, size: Size, samples: Samples) -> Iterator[Result]:
    for (path, metric), figures in samples.items():
        yield result(mode, path, size.services, metric, figures)


def _measure(mode: str, size: Size, progress: Progress) -> Samples:
    """Paths take turns connection by connection, so that what disturbs the machine disturbs all alike."""
    with Lab("bench") as lab:
        load = Load(lab.folder)
        workload.server_pod(lab, load)
        lists = {"direct": workload.endpoint_targets(size.services, size.endpoints)}
        if mode != "none":
            progress(f"{mode}: {size.services} services with {size.endpoints} endpoints each")
            folder = lab.folder / "manifests"
            workload.write(folder, size.services, size.endpoints)
            lab.agent(folder, f"--proxy-mode={mode}", wait=600)
            lists["clusterip"] = workload.service_targets(size.services)
        targets = load.targets("all", *lists.values())
        places: dict[str, Place] = {"": lab.pod("client"), "-host": lab.node}
        samples: Samples = collections.defaultdict(list)
        for number in range(size.rounds):
            progress(f"{mode}: {size.services} services, round {number + 1} of {size.rounds}")
            for metric in METRICS:
                for suffix, place in places.items():
                    count = size.samples // size.rounds * len(lists)
                    took = load.measure(place, metric, targets, count, seed=number)
                    for path, figures in zip(lists, took, strict=True):
                        samples[path + suffix, METRICS[metric]] += (each / 1000 for each in figures)
        return {key: samples[key] for key in sorted(samples, key=_order)}


def _order(key: tuple[str, str]) -> tuple[str, bool, int]:
    path, metric = key
    plain = path.removesuffix("-host")
    return metric, path != plain, PATHS.index(plain)
