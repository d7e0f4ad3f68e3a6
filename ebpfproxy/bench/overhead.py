"""What traffic that is no Service's pays for a proxy on its way."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.bench import iperf, workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.modes import NONE
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, side_by_side, turns
from ebpfproxy.lab import Lab, PodNetwork

WAYS = ("one-node", "two-nodes")
"""From a pod to a pod."""

DATAGRAMS = 400
"""Of UDP for each megabyte of TCP: both take about the same time."""

_PORTIONS = 16
"""Into how many turns the exchanges of a round are split, as they take less long than streams."""


class Size(NamedTuple):
    """`samples` are exchanges, of each way in all rounds."""

    services: int
    endpoints: int
    rounds: int
    megabytes: int
    samples: int


def run(size: Size, modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """From pod to pod on one node and across two, in every mode with so many Services, beside no proxy:

    - tcp_mbit_s: one stream of iperf3, of `megabytes`;
    - udp_per_s: datagrams of 64 bytes that arrive of so many that one sender sends, DATAGRAMS for each of the
      megabytes;
    - rr_per_s: one byte there and back, one after another.

    Raises EbpfProxyError.
    """
    iperf.require()
    names = (NONE, *modes)
    samples = Samples(names, size.services)
    parts = [
        (way, metric) for way in WAYS for metric in ("tcp_mbit_s", "udp_per_s", *["rr_per_s"] * _PORTIONS)
    ]
    build = functools.partial(_Testbed, size=size)
    with side_by_side(names, build, progress, pods=PodNetwork.ROUTED) as sides:
        for turn, (way, metric), side in turns(sides, size.rounds, parts, progress):
            samples.add(side.mode, way, metric, turn, [side.testbed.measure(way, metric, turn)])
    yield from samples.results()


class _Testbed:
    """A pod that sends, and one on either node that answers."""

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

    def measure(self, way: str, metric: str, seed: int) -> float:
        address = self._servers[way].v4
        if metric == "tcp_mbit_s":
            return iperf.megabits(self._client, address, self._size.megabytes)
        if metric == "udp_per_s":
            return iperf.datagrams(self._client, address, self._size.megabytes * DATAGRAMS)
        targets = self._load.targets(way, [(address, workload.ENDPOINT_PORT)])
        count = max(1, self._size.samples // self._size.rounds // _PORTIONS)
        (took,) = self._load.measure(self._client, "rr", targets, count, seed=seed)
        return 1e9 * len(took) / sum(took)
