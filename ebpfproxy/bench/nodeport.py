"""The benchmark nodeport: an outside client through a NodePort, and pods that use no Service."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.bench import report
from ebpfproxy.bench.crossing import DIRECT_PATHS, FLAGS, INSIDE_PATHS, PATHS, Crossing, Held, Reports
from ebpfproxy.bench.load import Load, megabits
from ebpfproxy.bench.modes import EBPF, NONE, base
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, Side, part_of, side_by_side, turns
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Lab, PodNetwork
from ebpfproxy.lab.agent import memory_mb
from ebpfproxy.linux.processes import children

_PORTIONS = 4
"""The number of turns for the connections of a round. They are split because streams take longer."""

FAILURES = ("held_unopened", "held_silent")
"""Metrics that must be 0."""

_FLOWS_MIN = 65536
_FLOWS_EACH = 4
"""The size of the flow table of mode ebpf for each connection. With 1.5, which is more than the flows of the
run, 4 % of 200,000 held connections lost theirs; with 4, none did."""

_TRACKED_EACH = 1.5
"""The same for the limit of conntrack."""

_WITHOUT_CONNTRACK = (EBPF, "userspace")


class Size(NamedTuple):
    """The extent of a run. `samples` is the number for each path and metric in all rounds together.

    A stream has so many `megabytes` (MiB). `held` connections stay open during the run.
    """

    services: int
    endpoints: int
    samples: int
    rounds: int
    megabytes: int
    held: int = 0


class Metric(NamedTuple):
    """A metric and the mode of the load generator. `inside`: between pods, without a Service."""

    name: str
    mode: str
    inside: bool = False

    @property
    def is_stream(self) -> bool:
        return self.mode in ("put", "get")


METRICS = (
    Metric("connect_us", "connect"),
    Metric("crr_us", "crr"),
    Metric("rr_us", "rr"),
    Metric("tcp_mbit_s", "put"),
    Metric("download_mbit_s", "get"),
    Metric("rr_us", "rr", inside=True),
    Metric("sent_ns", "packet", inside=True),
    Metric("tcp_mbit_s", "put", inside=True),
)


def run(sizes: Sequence[Size], modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Measure METRICS in every mode: through NodePorts, on the direct paths, and between pods.

    Without a proxy there are only direct paths, and those between pods. Metrics:

    - connect_us, crr_us: as in the benchmark connect;
    - rr_us: one exchange of a byte on an open connection;
    - sent_ns: send() of a small datagram, in which it reaches the other pod and is dropped there;
    - tcp_mbit_s, download_mbit_s: one stream from the client, and to the client, in each round;
    - with held connections, held_unopened and held_silent: those that could not be opened, and that did not
      answer at the end; agents_rss_mb: memory of the agents and the processes that they started.

    Raises EbpfProxyError.
    """
    parts = [each for each in METRICS if not each.is_stream] * _PORTIONS
    parts += [each for each in METRICS if each.is_stream]
    for number, size in enumerate(sizes):
        part = part_of(progress, number, len(sizes))
        part(f"{size.services} services with {size.endpoints} endpoints each", 0.0)
        names = (NONE, *modes)
        _require_room(names, size.held)
        samples = Samples(names, size.services)
        flags = [*FLAGS, f"--ebpf-flows-max={_flows_max(size)}"]
        build = functools.partial(_crossing, size=size)
        with side_by_side(names, build, part, flags=flags, pods=PodNetwork.ROUTED) as sides:
            held = [_hold(side, size, samples, part) for side in sides if size.held]
            for turn, metric, side in turns(sides, size.rounds, parts, part):
                _measure(metric, side, size, turn, samples)
            for side, each in zip(sides, held, strict=False):
                _end(side, each, samples, part)
        yield from samples.results()


def _crossing(lab: Lab, size: Size) -> Crossing:
    crossing = Crossing(lab, Load(lab.folder), size.held)
    crossing.write(size.services, size.endpoints)
    return crossing


def _measure(metric: Metric, side: Side[Crossing], size: Size, turn: int, samples: Samples) -> None:
    """Measure one metric on all its paths, which alternate with each sample: see `connect`."""
    crossing = side.testbed
    paths = INSIDE_PATHS if metric.inside else _paths(side)
    targets = crossing.targets(paths, size.services, size.endpoints)
    client = crossing.inside if metric.inside else crossing.client
    if metric.is_stream:
        measured = crossing.load.measure(
            client, metric.mode, targets, len(paths), seed=turn, megabytes=size.megabytes
        )
    else:
        count = max(1, size.samples // size.rounds // _PORTIONS) * len(paths)
        measured = crossing.load.measure(client, metric.mode, targets, count, seed=turn)
    for path, figures in zip(paths, measured, strict=True):
        samples.add(
            side.mode, path, metric.name, turn, (_figure(metric, each, size.megabytes) for each in figures)
        )


def _figure(metric: Metric, nanoseconds: int, megabytes: int) -> float:
    if metric.is_stream:
        return megabits(megabytes, nanoseconds)
    return nanoseconds / 1000 if metric.name.endswith("_us") else float(nanoseconds)


def _paths(side: Side[Crossing]) -> Sequence[str]:
    return list(PATHS) if side.agents else DIRECT_PATHS


# --- Held connections ---


def _flows_max(size: Size) -> int:
    """Return a size of the flow table of mode ebpf with room for all connections of the run.

    >>> _flows_max(Size(10, 10, 100, 1, 1, held=200_000))
    803200
    """
    opened = size.samples * len(METRICS)
    return max(_FLOWS_MIN, (size.held + opened) * _FLOWS_EACH)


def _require_room(names: Sequence[str], held: int) -> None:
    """Raise ConfigError if the kernel cannot track the held connections of each of these modes.

    The limit applies to all network namespaces together, so that a lab cannot have its own.
    """
    tracking = [name for name in names if name != NONE and base(name) not in _WITHOUT_CONNTRACK]
    needed, limit = math.ceil(held * len(tracking) * _TRACKED_EACH), report.conntrack("max")
    if needed and limit is not None and needed > limit:
        raise ConfigError(
            f"nf_conntrack_max is too small for {', '.join(tracking)}: the kernel tracks at most {limit} "
            f"connections, but the benchmark needs {needed}",
            f"give a smaller --held, or run sysctl -w net.netfilter.nf_conntrack_max={needed}",
        )


def _hold(side: Side[Crossing], size: Size, samples: Samples, progress: Progress) -> Held:
    """Hold connections through NodePorts, in mode none on direct paths."""
    progress(f"{side.mode}: holding {size.held} connections")
    paths = [path for path in _paths(side) if _is_held(side, path)]
    held = side.testbed.hold(side.testbed.targets(paths, size.services, size.endpoints), size.held)
    samples.count(side.mode, "", "held_unopened", held.unopened, held.attempts)
    _report_errors(side, held.opened, progress)
    pids = [agent.process.pid for agent in side.agents]
    pids += [child.pid for pid in pids for child in children(pid)]
    with contextlib.suppress(OSError):  # a process that an agent started has ended meanwhile
        if pids:
            samples.add(side.mode, "", "agents_rss_mb", 0, [sum(memory_mb(pid, "VmRSS") for pid in pids)])
    return held


def _is_held(side: Side[Crossing], path: str) -> bool:
    return path.startswith("nodeport" if side.agents else ("direct-local", "direct-remote"))


def _report_errors(side: Side[Crossing], reports: Reports, progress: Progress) -> None:
    for each in reports:
        if each["errors"]:
            progress(f"{side.mode}: errors: {each['errors']}")


def _end(side: Side[Crossing], held: Held, samples: Samples, progress: Progress) -> None:
    ends = side.testbed.end(held)  # failures to open connections count again
    _report_errors(side, ends, progress)
    silent = sum(int(each["failed"]) for each in ends) - held.unopened
    samples.count(side.mode, "", "held_silent", silent, held.attempts)
