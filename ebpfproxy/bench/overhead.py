"""The benchmark overhead: the cost of a mode for traffic that belongs to no Service."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.bench import iperf, workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.modes import NONE
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, side_by_side, turns
from ebpfproxy.lab import Lab, PodNetwork

PATHS = ("one-node", "two-nodes")
"""From a pod to a pod on the same node, and on another node."""

DATAGRAMS = 400
"""UDP datagrams for each megabyte of TCP. Both take about the same time."""

_PORTIONS = 16
"""The number of turns for the exchanges of a round. They are split because streams take longer."""


class Size(NamedTuple):
    """The extent of a run. `samples` is the number of exchanges on each path in all rounds together."""

    services: int
    endpoints: int
    rounds: int
    megabytes: int
    samples: int


def run(size: Size, modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Measure from pod to pod on one node and on two, in every mode and without a proxy. Metrics:

    - tcp_mbit_s: one stream of iperf3, of `megabytes`;
    - udp_per_s: received datagrams of 64 bytes per second. One sender sends DATAGRAMS for each megabyte;
    - rr_per_s: exchanges of a byte per second, one after another.

    Raises EbpfProxyError.
    """
    iperf.require()
    names = (NONE, *modes)
    samples = Samples(names, size.services)
    parts = [
        (path, metric) for path in PATHS for metric in ("tcp_mbit_s", "udp_per_s", *["rr_per_s"] * _PORTIONS)
    ]
    build = functools.partial(_Testbed, size=size)
    with side_by_side(names, build, progress, pods=PodNetwork.ROUTED) as sides:
        for turn, (path, metric), side in turns(sides, size.rounds, parts, progress):
            samples.add(side.mode, path, metric, turn, [side.testbed.measure(path, metric, turn)])
    yield from samples.results()


class _Testbed:
    """A client pod, and a server pod on each node."""

    def __init__(self, lab: Lab, size: Size) -> None:
        self._size = size
        self._load = Load(lab.folder)
        first, second = lab.nodes
        self._client = first.pod("client")
        self._servers = {"one-node": first.pod("near"), "two-nodes": second.pod("far")}
        for server in self._servers.values():
            self._load.serve(server, workload.ENDPOINT_PORT)
            iperf.serve(server)
        workload.write(lab.folder / "manifests", size.services, size.endpoints)

    def measure(self, path: str, metric: str, seed: int) -> float:
        """Return one figure of the metric."""
        address = self._servers[path].v4
        if metric == "tcp_mbit_s":
            return iperf.megabits(self._client, address, self._size.megabytes)
        if metric == "udp_per_s":
            return iperf.datagrams(self._client, address, self._size.megabytes * DATAGRAMS)
        targets = self._load.targets(path, [(address, workload.ENDPOINT_PORT)])
        count = max(1, self._size.samples // self._size.rounds // _PORTIONS)
        (durations,) = self._load.measure(self._client, "rr", targets, count, seed=seed)
        return 1e9 * len(durations) / sum(durations)
