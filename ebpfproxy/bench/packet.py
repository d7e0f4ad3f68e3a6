"""The benchmark packet: the cost of a packet through a node in each mode, and of the BPF programs alone."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.bench import prog_test_run, workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.modes import EBPF, NONE
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, part_of, side_by_side, turns
from ebpfproxy.lab import Lab

METRICS = {"packet": "sent_ns", "first": "sent_first_ns"}
PATHS = ("direct", "nodeport")


class Size(NamedTuple):
    """The extent of a run.

    `samples` is the number for each path and metric in all rounds together, `runs` the number of test runs
    for one sample.
    """

    services: int
    endpoints: int
    samples: int
    rounds: int
    runs: int


def run(sizes: Sequence[Size], modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Measure datagrams in every mode, and direct paths without a proxy. Mode ebpf also has test runs.

    Metrics:

    - sent_ns: the duration of send() of an outside client. Its datagram goes through the node to a pod, which
      drops it. Across veth pairs all of this happens within send(), so that the difference between modes is
      the cost of a mode for one packet. The flow has been answered before;
    - sent_first_ns: the same for the first datagram of a flow;
    - others: see `prog_test_run`.

    Raises EbpfProxyError.
    """
    for number, size in enumerate(sizes):
        part = part_of(progress, number, len(sizes))
        part(f"{size.services} services with {size.endpoints} endpoints each", 0.0)
        names = (NONE, *modes)
        samples = Samples(names, size.services)
        with side_by_side(names, functools.partial(_Testbed, size=size), part) as sides:
            for turn, metric, side in turns(sides, size.rounds, list(METRICS), part):
                paths = PATHS if side.agents else PATHS[:1]
                for path, figures in side.testbed.measure(metric, paths, turn).items():
                    samples.add(side.mode, path, METRICS[metric], turn, figures)
        if EBPF in modes:
            tested = prog_test_run.Size(size.services, size.endpoints, size.runs, size.rounds)
            prog_test_run.run(tested, samples, part)
        yield from samples.results()


class _Testbed:
    """A node with a pod that drops all datagrams, and an outside client."""

    def __init__(self, lab: Lab, size: Size) -> None:
        self._size = size
        self._client = lab.outside
        self._load = Load(lab.folder)
        workload.write(lab.folder / "manifests", size.services, size.endpoints, "UDP", node_ports=True)
        workload.server_pod(lab, self._load)
        lists = (
            list(workload.other_targets(size.services, size.endpoints)),
            list(workload.node_port_targets(lab.node.v4, size.services)),
        )
        self._targets: dict[tuple[str, ...], Path] = {
            PATHS[:1]: self._load.targets("direct", lists[0]),
            PATHS: self._load.targets("both", *lists),
        }

    def measure(self, metric: str, paths: tuple[str, ...], seed: int) -> dict[str, Sequence[int]]:
        """Return nanoseconds by path. Paths alternate with each datagram."""
        count = max(1, self._size.samples // self._size.rounds) * len(paths)
        durations = self._load.measure(self._client, metric, self._targets[paths], count, seed=seed)
        return dict(zip(paths, durations, strict=True))
