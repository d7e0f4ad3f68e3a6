"""The benchmark flows: many connections through NodePorts, held, new, and more than the flow table holds."""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.bench import agent_use, flow_tables, report
from ebpfproxy.bench.crossing import FLAGS
from ebpfproxy.bench.flow_clients import (
    DIRECT,
    NODE_PORTS,
    SERVICES,
    Clients,
    note_opened,
    per_second,
    report_errors,
)
from ebpfproxy.bench.modes import EBPF, NONE, base
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, Side, side_by_side, turns
from ebpfproxy.lab import Lab, PodNetwork

FAILURES = ("held_unopened", "held_silent", "new_failed", "busy_failed")
"""Metrics that must be 0."""

_PATHS = {"direct": DIRECT, "nodeport": NODE_PORTS}
_SLICE, _PREVIEW = 5.0, 1.0
"""Seconds of one turn of a path, and of a rough measurement of a rate."""
_BUSY, _EXCHANGES = 500, 5000.0
"""Busy connections while the table overflows, and the exchanges per second on all of them together."""


class Size(NamedTuple):
    """The extent of a run: `held` connections, and in each round new ones for `seconds` on each path.

    `small` is the size of a flow table of mode ebpf that is too small; 0: leave this part out.
    """

    held: int
    seconds: float
    rounds: int
    small: int


def run(size: Size, modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Measure every mode, and direct paths without a proxy.

    For metrics that count failures, `n` is the number of attempts. Raises EbpfProxyError.
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
        seconds = size.seconds * size.rounds * len(_PATHS) * len(sides)
        for side in sides:
            _require_room(side, size, seconds)
        for turn, _, side in turns(sides, size.rounds, [None], progress):
            _measure(side, size, turn, samples, progress)
        for side in sides:
            if side.agents:
                for reason, count in flow_tables.shown_events(side.lab.node).items():
                    samples.count(side.mode, "nodeport", f"event_{reason}", int(count), 1)
    for mode in modes:
        if size.small and base(mode) == EBPF:
            _overflow_table(mode, size.small, min(size.seconds, 2 * _SLICE), samples, progress)
    yield from samples.results()


class _Testbed(Clients):
    """The clients of a mode. They measure the rate before agents start, which determines the map size."""

    def __init__(self, lab: Lab, size: Size) -> None:
        super().__init__(lab, size.held)
        self.rate = per_second(self.open(DIRECT, min(size.seconds, _PREVIEW)))
        seconds = size.seconds * size.rounds
        entries = flow_tables.flows_max(size.held, 2 * self.rate, seconds)  # twice: the rate may increase
        self.flags = [*FLAGS, f"--ebpf-flows-max={entries}"]


def _require_room(side: Side[_Testbed], size: Size, seconds: float) -> None:
    """Raise ConfigError if the mode tracks connections and the kernel's limit is too small."""
    side.testbed.open(DIRECT, min(size.seconds, _PREVIEW))
    if flow_tables.tracked(side.lab.node):
        limit = report.conntrack("max")
        flow_tables.require_tracking(side.mode, limit, size.held, side.testbed.rate, seconds)


def _measure(side: Side[_Testbed], size: Size, turn: int, samples: Samples, progress: Progress) -> None:
    """Add the metrics of one turn.

    - held_unopened, held_silent: connections to hold that could not be opened, and that no longer answered at
      the end of the turn;
    - entries: flow entries on the first node while connections are held;
    - agents_cpu: CPUs that the agents used while connections were opened through NodePorts. Clients and
      servers use the same CPUs;
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
            before = sum(map(agent_use.cpu_seconds, side.agents))
            new = side.testbed.open(ways, size.seconds / slices, number)
            used = sum(map(agent_use.cpu_seconds, side.agents)) - before
            note_opened(samples, side.mode, path, number, new)
            report_errors(progress, side.mode, new)
            if path != "direct":
                samples.add(side.mode, path, "agents_cpu", number, [used * slices / size.seconds])
    ends = side.testbed.end(held)
    report_errors(progress, side.mode, ends)
    silent = sum(report["failed"] for report in ends) - held.unopened
    samples.count(side.mode, last, "held_silent", silent, held.attempts)


def _overflow_table(mode: str, entries: int, seconds: float, samples: Samples, progress: Progress) -> None:
    """Overflow a flow table of `entries` with new connections, while other connections are busy.

    The metrics of the path "full":

    - those of `note_opened` for new connections;
    - busy_failed: failed ones of the busy connections;
    - event_...: datapath events in the agent's metrics.

    Raises EbpfProxyError.
    """

    def build(lab: Lab) -> Clients:
        return Clients(lab, _BUSY)

    with side_by_side(
        [mode],
        build,
        progress,
        flags=lambda _: [*FLAGS, f"--ebpf-flows-max={entries}"],
        pods=PodNetwork.ROUTED,
    ) as (side,):
        progress(f"{mode}: a table of {entries} entries")
        held = side.testbed.hold(NODE_PORTS, _BUSY, busy=_EXCHANGES)
        new = side.testbed.open(NODE_PORTS, seconds)
        busy = side.testbed.end(held)
        report_errors(progress, mode, [*new, *busy])
        note_opened(samples, mode, "full", 0, new)
        samples.count(mode, "full", "busy_failed", sum(report["failed"] for report in busy), held.attempts)
        for reason, count in flow_tables.shown_events(side.lab.node).items():
            samples.count(mode, "full", f"event_{reason}", int(count), 1)
