"""Many flows through NodePorts: held, opened as fast as it goes, and more than a table has room for."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.bench import flow_tables, full_table, report
from ebpfproxy.bench.crossing import FLAGS
from ebpfproxy.bench.flow_clients import (
    DIRECT,
    NODE_PORTS,
    SERVICES,
    Clients,
    note_opened,
    per_second,
    tell_errors,
)
from ebpfproxy.bench.modes import EBPF, NONE, base
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, Side, side_by_side, turns
from ebpfproxy.lab import Lab, PodNetwork

FAILURES = ("held_unopened", "held_silent", "new_failed", "busy_failed")
"""Metrics that have to be 0."""

_PATHS = {"direct": DIRECT, "nodeport": NODE_PORTS}
_SLICE, _GLANCE = 5.0, 1.0
"""Seconds for which one path has its turn, and for which a rate is only looked at."""


class Size(NamedTuple):
    """`held` connections, and new ones for `seconds` by each path, in each round. `small`: entries of a table
    of mode ebpf that is too small; 0: none."""

    held: int
    seconds: float
    rounds: int
    small: int


def run(size: Size, modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Every mode, beside no proxy, where paths are direct alone.

    Of figures that count failures, `n` is how many there were to fail. Raises EbpfProxyError.
    """
    names = (NONE, *modes)
    samples = Samples(names, SERVICES)
    with side_by_side(
        names,
        functools.partial(_Testbed, size=size),
        progress,
        flags=lambda testbed: testbed.flags,
        pods=PodNetwork.ROUTED,
    ) as sides:
        for side in sides:
            _require_room(side, size)
        for turn, _, side in turns(sides, size.rounds, [None], progress):
            _measure(side, size, turn, samples, progress)
        for side in sides:
            if side.agents:
                for reason, count in flow_tables.shown_events(side.lab.node).items():
                    samples.count(side.mode, "nodeport", f"event_{reason}", int(count), 1)
    for mode in modes:
        if size.small and base(mode) == EBPF:
            full_table.run(mode, size.small, min(size.seconds, 2 * _SLICE), samples, progress)
    yield from samples.results()


class _Testbed(Clients):
    """Looks at the rate before there are agents, since their flow table has to have room for as many."""

    def __init__(self, lab: Lab, size: Size) -> None:
        super().__init__(lab, size.held)
        self.rate = per_second(self.open(DIRECT, min(size.seconds, _GLANCE)))
        seconds = size.seconds * size.rounds
        entries = flow_tables.flows_max(size.held, 2 * self.rate, seconds)  # twice: it may be faster then
        self.flags = [*FLAGS, f"--ebpf-flows-max={entries}"]


def _require_room(side: Side[_Testbed], size: Size) -> None:
    """Raises ConfigError where the mode has connections tracked, and there would be too many."""
    side.testbed.open(DIRECT, min(size.seconds, _GLANCE))
    if flow_tables.tracked(side.lab.node):
        limit = report.conntrack("max")
        flow_tables.require_tracking(side.mode, limit, size.held, side.testbed.rate)


def _measure(side: Side[_Testbed], size: Size, turn: int, samples: Samples, progress: Progress) -> None:
    """- held_unopened, held_silent: of those to be held, how many could not be opened, and no longer answered
      after all that follows;
    - entries: what the first node keeps of flows while they stay;
    - agents_cpu: how many CPUs the agents took while connections were made through NodePorts, which share
      them with everybody else here;
    - others: see `note_opened`.
    """
    paths = {path: ways for path, ways in _PATHS.items() if side.agents or path == "direct"}
    last = list(paths)[-1]
    progress(f"{side.mode}: holding {size.held} connections")
    held = side.testbed.hold(paths[last], size.held)
    samples.count(side.mode, last, "held_unopened", held.unopened, held.attempts)
    samples.add(side.mode, last, "entries", turn, [flow_tables.entries(side.lab)])
    slices = max(1, math.ceil(size.seconds / _SLICE))
    for number in range(turn * slices, (turn + 1) * slices):
        for path, ways in paths.items():
            before = sum(map(flow_tables.cpu_seconds, side.agents))
            new = side.testbed.open(ways, size.seconds / slices, number)
            used = sum(map(flow_tables.cpu_seconds, side.agents)) - before
            note_opened(samples, side.mode, path, number, new)
            tell_errors(progress, side.mode, new)
            if path != "direct":
                samples.add(side.mode, path, "agents_cpu", number, [used * slices / size.seconds])
    ends = side.testbed.end(held)
    tell_errors(progress, side.mode, ends)
    silent = sum(report["failed"] for report in ends) - held.unopened
    samples.count(side.mode, last, "held_silent", silent, held.attempts)
