"""Whether any connection fails, a new one, one that lasts or a download, while endpoints come and go, and
the agent with them."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.bench import flapping, workload
from ebpfproxy.bench.agent_runner import AgentRunner, FaultSchedule
from ebpfproxy.bench.flow_clients import Reports, tell_errors
from ebpfproxy.bench.load import Load, LoadFailed
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Lab, Pod, PodNetwork

CLIENTS = ("pod", "node", "outside")
FAILURES = ("connects_failed", "established_failed", "download_failed")
"""Metrics that have to be 0."""

_KEPT, _EXCHANGES = 100, 1000.0
"""Of each client: connections that last, and how often a second one of them has an exchange."""
_MEGABYTES = 1.0
"""Of 10^6 bytes, of each download in a second: it shall run all the time, and not take the CPUs."""

_LONGEST_NAP = 0.2
"""Seconds between two looks at clients and agent, however far apart changes are."""
_TOLD = 10.0
"""Seconds between two lines of progress."""


class Size(NamedTuple):
    """Until `connects` were made or `seconds` are over, 0 for no such end; changes are `flap_ms` apart.

    `rate`: how many new connections each client begins in a second, and at the most how many exchanges it has
    on those that last; 0: as many as go, which leaves an agent little of a slow machine.
    """

    connects: int
    seconds: float
    flap_ms: float
    rate: float = 0.0


def run(
    size: Size,
    faults: FaultSchedule,
    modes: Sequence[str],
    progress: Progress,
    clients: Sequence[str] = CLIENTS[:2],
) -> Iterator[Result]:
    """One Service whose endpoints change, but one of them. Endpoints are on this node and on another one.
    `clients`, of CLIENTS, dial its ClusterIP; outside dials its NodePort.

    An agent that moves (`faults`) has all of `modes` in one run; otherwise each has a run of its own.

    - connects_failed: how many of `n` connections (with an exchange of a byte) failed;
    - established_failed: of `n` that lasted all the time;
    - download_failed: of `n` downloads that ran all the time, how many broke off, came to another end than
      the server's, or brought a byte that it had not sent;
    - download_mb: what they brought;
    - connect_slowest_us: the slowest that did not fail;
    - syncs: how many changes the agent brought into the kernel meanwhile;
    - crashes, moves: how often the agent was killed and started again, and moved to another mode.

    Raises EbpfProxyError; AgentFailed where an agent ended by itself, or lived on without a sync, since
    then nothing was measured but a kernel that was left alone.
    """
    if not size.connects and not size.seconds:
        raise ConfigError("--connects and --seconds are both 0, so there is no end", "give one of them")
    runners = [tuple(modes)] if faults.move_s else [(mode,) for mode in modes]
    samples = Samples([",".join(runner) for runner in runners], services=1)
    for runner in runners:
        _run_one(size, faults, runner, clients, samples, progress)
    yield from samples.results()


def _run_one(
    size: Size,
    faults: FaultSchedule,
    modes: Sequence[str],
    clients: Sequence[str],
    samples: Samples,
    progress: Progress,
) -> None:
    with Lab("bench", pods=PodNetwork.ROUTED) as lab:
        load = Load(lab.folder)
        flapping.serve(lab, load)
        slices = flapping.Slices(lab.folder / "manifests", [node.name for node in lab.nodes])
        runner = AgentRunner(lab, slices.folder, modes, faults)
        group = _ClientGroup(lab, load, clients, size)
        _run_until_done(size, group, slices, runner, progress)
        group.end()
        runner.end()
    for client, reports in group.reports.items():
        tell_errors(progress, client, reports)
    path = "clusterip" if "outside" not in clients else "nodeport" if len(clients) == 1 else "both"
    note(samples, ",".join(modes), path, group.new, group.lasting, group.downloads, runner.figures())


def _run_until_done(
    size: Size, group: "_ClientGroup", slices: flapping.Slices, runner: AgentRunner, progress: Progress
) -> None:
    """Change endpoints, and have the agent's faults overtake it, until it is enough."""
    started = time.monotonic()
    turn, shown, due = 1, started, started
    while not group.is_done():
        now = time.monotonic()
        if size.seconds and now - started > size.seconds:
            return
        runner.advance(now - started)
        if now >= due:
            slices.flap(turn)
            turn, due = turn + 1, now + size.flap_ms / 1000
        if now - shown > _TOLD:
            shown = now
            progress(f"{runner}: {now - started:.0f} s")
        time.sleep(min(_LONGEST_NAP, max(0.0, due - time.monotonic())))


class _ClientGroup:
    """The clients. Each makes its part of new connections, has some that last, and a download."""

    def __init__(self, lab: Lab, load: Load, clients: Sequence[str], size: Size) -> None:
        """Returns once those that last are open."""
        self._load = load
        dialed = _dialed(lab, load, clients)
        self._clients = clients
        busy = min(size.rate or _EXCHANGES, _EXCHANGES)
        self._kept = [load.hold(place, targets, _KEPT, busy=busy)[0] for place, targets in dialed]
        self._downloads = [load.start_download(place, targets, _MEGABYTES) for place, targets in dialed]
        count = -(-size.connects // len(dialed))
        self._running = [
            load.start_churn(place, targets, count=count, rate=size.rate) for place, targets in dialed
        ]
        self.new: Reports = []
        self.lasting: Reports = []
        self.downloads: Reports = []

    def is_done(self) -> bool:
        """Whether all have made their part, or one has ended otherwise."""
        ends = [client.poll() for client in self._running]
        return all(end is not None for end in ends) or any(ends)

    def end(self) -> None:
        """Raises LoadFailed."""
        self.new = [self._load.end_churn(client) for client in self._running]
        self.lasting = [self._load.end_churn(holder) for holder in self._kept]
        self.downloads = [self._load.end_churn(download) for download in self._downloads]

    @property
    def reports(self) -> dict[str, Reports]:
        """By client."""
        each = zip(self.new, self.lasting, self.downloads, strict=True)
        return dict(zip(self._clients, map(list, each), strict=True))


def _dialed(lab: Lab, load: Load, clients: Sequence[str]) -> list[tuple[Pod, Path]]:
    """Where each client is, and what it dials."""
    inside = load.targets("clusterip", workload.service_targets(1))
    outside = load.targets("nodeport", [(lab.node.v4, flapping.NODE_PORT)])
    known = {"pod": lambda: (lab.pod("client"), inside), "node": lambda: (lab.node, inside)}
    return [known[client]() if client in known else (lab.outside, outside) for client in clients]


def note(
    samples: Samples,
    mode: str,
    path: str,
    new: Reports,
    lasting: Reports,
    downloads: Reports,
    runner: dict[str, int],
) -> None:
    """Raises LoadFailed where there was nothing to fail."""
    attempts = sum(report["attempts"] for report in new)
    if not attempts:
        raise LoadFailed("not one connection was made")
    samples.count(mode, path, "connects_failed", sum(report["failed"] for report in new), attempts)
    samples.count(
        mode, path, "established_failed", sum(report["failed"] for report in lasting), _KEPT * len(lasting)
    )
    samples.count(
        mode, path, "download_failed", sum(report["failed"] for report in downloads), len(downloads)
    )
    brought = sum(report["bytes"] for report in downloads) / 1e6
    samples.count(mode, path, "download_mb", round(brought, 1), len(downloads))
    samples.count(mode, path, "connect_slowest_us", max(report["slowest_us"] for report in new), attempts)
    for name, figure in runner.items():
        samples.count(mode, path, name, figure, attempts)
