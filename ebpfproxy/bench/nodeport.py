"""What a client outside pays for a NodePort, beside the same client routed to the same pods."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.bench import iperf
from ebpfproxy.bench.connect import Progress, Samples, Size, await_alone
from ebpfproxy.bench.crossing import PATHS, Crossing, crossing_lab
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.report import BASELINES, Result, result

METRICS = {"connect": "connect_us", "crr": "crr_us", "rr": "rr_us"}
REDIRECT = "-redirect"
"""What is put behind a mode's name where the agents have --ebpf-redirect."""


def run(
    sizes: Iterable[Size],
    modes: Sequence[str],
    redirects: Sequence[bool],
    megabytes: int,
    progress: Progress,
) -> Iterator[Result]:
    """Metrics of every path of `crossing.PATHS`; raises EbpfProxyError.

    - connect_us, crr_us: as of the benchmark connect;
    - rr_us: one byte there and back on a connection that stays open; rr_per_s: how many of them a second
      one client has that waits for each, by round;
    - tcp_mbit_s: one stream of iperf3, of so many `megabytes`, by round; tcp_mbit_s_ratio: that of a
      NodePort over the direct one of the same round, since a machine drifts.
    """
    for size in sizes:
        with crossing_lab() as lab:
            crossing = Crossing(lab, Load(lab.folder))
            crossing.serve_iperf()
            crossing.write(size.services, size.endpoints)
            ways = [_Way(mode, redirect) for mode in modes for redirect in redirects]
            samples: dict[str, Samples] = {way.name: collections.defaultdict(list) for way in ways}
            for number in range(size.rounds):
                for way in ways:
                    progress(f"{size.services} services, round {number + 1} of {size.rounds}: {way.name}")
                    agents = crossing.agents(*way.flags)
                    for agent in agents:
                        await_alone(agent)
                    _connections(crossing, size, number, samples[way.name])
                    _streams(crossing, megabytes, samples[way.name])
                    for agent in agents:
                        agent.stop()
            for name, found in samples.items():
                yield from _results(name, size, found)


class _Way(NamedTuple):
    mode: str
    redirect: bool

    @property
    def name(self) -> str:
        return self.mode + (REDIRECT if self.redirect else "")

    @property
    def flags(self) -> list[str]:
        return [f"--proxy-mode={self.mode}", *(["--ebpf-redirect"] if self.redirect else [])]


def _results(mode: str, size: Size, samples: Samples) -> Iterator[Result]:
    _compare(samples)
    order = [*METRICS.values(), "rr_per_s", "tcp_mbit_s", "tcp_mbit_s_ratio"]
    for path, metric in sorted(samples, key=lambda key: (order.index(key[1]), list(PATHS).index(key[0]))):
        yield result(mode, path, size.services, metric, samples[path, metric])


def _compare(samples: Samples) -> None:
    for path in PATHS:
        base = BASELINES.get(path)
        if base:
            pairs = zip(samples[path, "tcp_mbit_s"], samples[base, "tcp_mbit_s"], strict=True)
            samples[path, "tcp_mbit_s_ratio"] = [one / other for one, other in pairs]


def _connections(crossing: Crossing, size: Size, number: int, samples: Samples) -> None:
    """Paths take turns connection by connection: see `connect`."""
    targets = crossing.targets(list(PATHS), size.services, size.endpoints)
    for metric, name in METRICS.items():
        count = size.samples // size.rounds * len(PATHS)
        took = crossing.load.measure(crossing.client, metric, targets, count, seed=number)
        for path, figures in zip(PATHS, took, strict=True):
            samples[path, name] += (each / 1000 for each in figures)
            if metric == "rr":
                samples[path, "rr_per_s"].append(1e9 * len(figures) / sum(figures))


def _streams(crossing: Crossing, megabytes: int, samples: Samples) -> None:
    """Paths take turns stream by stream."""
    for path in PATHS:
        address, port = crossing.iperf_target(path)
        samples[path, "tcp_mbit_s"].append(iperf.megabits(crossing.client, address, megabytes, port))
