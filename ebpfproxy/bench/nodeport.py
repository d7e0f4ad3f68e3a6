"""The benchmark nodeport: an outside client through a NodePort, and routed directly to the same pods."""

import functools
from collections.abc import Callable, Iterator, Sequence

from ebpfproxy.bench import iperf
from ebpfproxy.bench.connect import Size
from ebpfproxy.bench.crossing import DIRECT_PATHS, FLAGS, PATHS, Crossing
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.modes import NONE
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, Side, part_of, side_by_side, turns
from ebpfproxy.lab import Lab, PodNetwork

_PORTIONS = 4
"""The number of turns for the connections of a round. They are split because streams take longer."""

METRICS = {"connect": "connect_us", "crr": "crr_us", "rr": "rr_us"}


def run(sizes: Sequence[Size], modes: Sequence[str], megabytes: int, progress: Progress) -> Iterator[Result]:
    """Measure every path of `crossing.PATHS` in every mode, and direct paths without a proxy. Metrics:

    - connect_us, crr_us: as in the benchmark connect;
    - rr_us: one exchange of a byte on an open connection;
    - tcp_mbit_s: one stream of iperf3 from the client, of so many `megabytes`, in each round;
    - download_mbit_s: the same to the client.

    Raises EbpfProxyError.
    """
    iperf.require()
    for number, size in enumerate(sizes):
        part = part_of(progress, number, len(sizes))
        part(f"{size.services} services with {size.endpoints} endpoints each", 0.0)
        names = (NONE, *modes)
        samples = Samples(names, size.services)
        parts: list[Callable[[Side[Crossing], int, Samples], None]] = [
            *[_Connections(metric, size) for metric in METRICS] * _PORTIONS,
            _Streams("tcp_mbit_s", megabytes),
            _Streams("download_mbit_s", megabytes),
        ]
        with side_by_side(
            names,
            functools.partial(_crossing, size=size),
            part,
            flags=lambda _: FLAGS,
            pods=PodNetwork.ROUTED,
        ) as sides:
            for turn, measure, side in turns(sides, size.rounds, parts, part):
                measure(side, turn, samples)
        yield from samples.results()


def _crossing(lab: Lab, size: Size) -> Crossing:
    crossing = Crossing(lab, Load(lab.folder))
    crossing.serve_iperf()
    crossing.write(size.services, size.endpoints)
    return crossing


class _Connections:
    """Measures connections. Paths alternate with each connection: see `connect`."""

    def __init__(self, metric: str, size: Size) -> None:
        self._metric, self._size = metric, size

    def __call__(self, side: Side[Crossing], turn: int, samples: Samples) -> None:
        crossing, size, paths = side.testbed, self._size, _paths(side)
        targets = crossing.targets(paths, size.services, size.endpoints)
        count = max(1, size.each // _PORTIONS) * len(paths)
        durations = crossing.load.measure(crossing.client, self._metric, targets, count, seed=turn)
        for path, figures in zip(paths, durations, strict=True):
            samples.add(side.mode, path, METRICS[self._metric], turn, (each / 1000 for each in figures))


class _Streams:
    """Measures streams. Paths alternate with each stream."""

    def __init__(self, metric: str, megabytes: int) -> None:
        self._metric, self._megabytes = metric, megabytes

    def __call__(self, side: Side[Crossing], turn: int, samples: Samples) -> None:
        for path in _paths(side):
            address, port = side.testbed.iperf_target(path)
            download = self._metric == "download_mbit_s"
            client = side.testbed.client
            throughput = iperf.megabits(client, address, self._megabytes, port, download=download)
            samples.add(side.mode, path, self._metric, turn, [throughput])


def _paths(side: Side[Crossing]) -> Sequence[str]:
    return list(PATHS) if side.agents else DIRECT_PATHS
