"""More flows than the flow table of mode ebpf has room for."""

from ebpfproxy.bench import flow_tables
from ebpfproxy.bench.crossing import FLAGS
from ebpfproxy.bench.flow_clients import NODE_PORTS, Clients, note_opened, tell_errors
from ebpfproxy.bench.samples import Samples
from ebpfproxy.bench.sides import Progress, side_by_side
from ebpfproxy.lab import Lab, PodNetwork

_BUSY, _EXCHANGES = 500, 5000.0
"""How many connections are busy while the table overflows, and how often a second one of them is."""


def run(mode: str, entries: int, seconds: float, samples: Samples, progress: Progress) -> None:
    """A table of so many entries, new connections as fast as it goes, and others that are busy. Path "full":

    - as of `note_opened`, of those that are new;
    - busy_failed: of those that are busy;
    - event_...: what the agent's metrics say the programs did.

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
        tell_errors(progress, mode, [*new, *busy])
        note_opened(samples, mode, "full", 0, new)
        samples.count(mode, "full", "busy_failed", sum(report["failed"] for report in busy), held.attempts)
        for reason, count in flow_tables.shown_events(side.lab.node).items():
            samples.count(mode, "full", f"event_{reason}", int(count), 1)
