"""What a client outside pays for a NodePort, beside the same client routed to the same pods."""

import collections
from collections.abc import Iterable, Iterator, Sequence

from ebpfproxy.bench import iperf
from ebpfproxy.bench.connect import Progress, Size
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
            for mode in modes:
                for redirect in redirects:
                    name = mode + (REDIRECT if redirect else "")
                    progress(f"{name}: {size.services} services with {size.endpoints} endpoints each")
                    flags = [f"--proxy-mode={mode}", *(["--ebpf-redirect"] if redirect else [])]
                    agents = crossing.agents(*flags)
                    yield from _results(name, crossing, size, megabytes, progress)
                    for agent in agents:
                        agent.stop()


def _results(
    mode: str, crossing: Crossing, size: Size, megabytes: int, progress: Progress
) -> Iterator[Result]:
    samples: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for number in range(size.rounds):
        progress(f"{mode}: {size.services} services, round {number + 1} of {size.rounds}")
        _connections(crossing, size, number, samples)
        _streams(crossing, megabytes, samples)
    _compare(samples)
    order = [*METRICS.values(), "rr_per_s", "tcp_mbit_s", "tcp_mbit_s_ratio"]
    for path, metric in sorted(samples, key=lambda key: (order.index(key[1]), list(PATHS).index(key[0]))):
        yield result(mode, path, size.services, metric, samples[path, metric])


def _compare(samples: dict[tuple[str, str], list[float]]) -> None:
    for path in PATHS:
        base = BASELINES.get(path)
        if base:
            pairs = zip(samples[path, "tcp_mbit_s"], samples[base, "tcp_mbit_s"], strict=True)
            samples[path, "tcp_mbit_s_ratio"] = [one / other for one, other in pairs]


def _connections(
    crossing: Crossing, size: Size, number: int, samples: dict[tuple[str, str], list[float]]
) -> None:
    """Paths take turns connection by connection: see `connect`."""
    targets = crossing.targets(list(PATHS), size.services, size.endpoints)
    for metric, name in METRICS.items():
        count = size.samples // size.rounds * len(PATHS)
        took = crossing.load.measure(crossing.client, metric, targets, count, seed=number)
        for path, figures in zip(PATHS, took, strict=True):
            samples[path, name] += (each / 1000 for each in figures)
            if metric == "rr":
                samples[path, "rr_per_s"].append(1e9 * len(figures) / sum(figures))


def _streams(crossing: Crossing, megabytes: int, samples: dict[tuple[str, str], list[float]]) -> None:
    """Paths take turns stream by stream."""
    for path in PATHS:
        address, port = crossing.iperf_target(path)
        samples[path, "tcp_mbit_s"].append(iperf.megabits(crossing.client, address, megabytes, port))
