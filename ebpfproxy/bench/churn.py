"""The benchmark churn: whether connections fail while endpoints are added and removed.

It has new connections, lasting connections and downloads. The agent may be killed or switch modes meanwhile.
"""

import ipaddress
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.agent_runner import AgentRunner, FaultSchedule
from ebpfproxy.bench.agent_use import LEAKABLE, Meter
from ebpfproxy.bench.load import Load, LoadFailed
from ebpfproxy.bench.other_services import OtherServices
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import Progress, part_of
from ebpfproxy.bench.source import MANIFESTS, Source, Write, manifest_path
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Lab, Pod, PodNetwork, manifests
from ebpfproxy.lab.agent import LogLine, is_sync

Reports = list[dict[str, Any]]
"""The reports of all clients: see `Load.churn`."""

CLIENTS = ("pod", "node", "outside")
FAILURES = ("connects_failed", "established_failed", "download_failed")
"""Metrics that must be 0."""
LEAKS = tuple(f"leaked_{name}" for name in LEAKABLE)
"""Metrics that must be 0. They are missing if the first or last mode is not ebpf."""

_LASTING, _EXCHANGES = 100, 1000.0
"""Lasting connections of each client, and the exchanges per second on all of them together."""
_MEGABYTES = 1.0
"""Rate of each download in MB of 10^6 bytes per second: it runs all the time without using up the CPUs."""

_CHECK_INTERVAL = 0.2
"""Longest time in seconds between two checks of clients and agent."""
_SAMPLE_INTERVAL = 1.0
"""Seconds between two readings of the agent's memory."""
_PROGRESS_INTERVAL = 10.0
"""Seconds between two lines of progress."""

_NODE_PORT = 30000
_CHANGING_ENDPOINTS = 4
"""The number of endpoints that are added and removed, besides the permanent one. Their servers keep running,
as terminating pods do for a while. So late connections succeed, and only those to other destinations fail."""

_ENDPOINT_NETWORKS = {0: "10.128.0.0/30", 1: "10.128.0.4/30"}
"""The networks of the endpoints, by the index of their node. No server answers at other addresses."""


class Size(NamedTuple):
    """The extent of a run. It ends after `connects` connections or `seconds`; 0 means no such limit.

    Changes are `flap_ms` milliseconds apart. `rate` is the number of new connections of each client per
    second, and the maximum of exchanges per second on lasting connections. 0: as many as possible, which
    leaves little CPU time for the agent on a slow machine.

    Besides the Service of the clients, there are `services` - 1 others with `endpoints` endpoints each. They
    have `changes` changes per second. `source` is one of source.NAMES.
    """

    connects: int
    seconds: float
    flap_ms: float
    rate: float = 0.0
    services: int = 1
    endpoints: int = 10
    changes: float = 0.0
    source: str = MANIFESTS


def run(
    size: Size,
    faults: FaultSchedule,
    modes: Sequence[str],
    progress: Progress,
    clients: Sequence[str] = CLIENTS[:2],
) -> Iterator[Result]:
    """Run one Service on two nodes. All its endpoints but one are added and removed.

    `clients`, a subset of CLIENTS, connect to its ClusterIP, but outside to its NodePort. An agent that
    switches modes (`faults`) has all `modes` in one run; otherwise each mode has its own run. Metrics:

    - connects_failed: failed ones of `n` new connections, each with an exchange of a byte;
    - established_failed: failed ones of `n` lasting connections;
    - download_failed: failed ones of `n` downloads. They broke off, reached another end than the server's, or
      received a byte that the server had not sent;
    - download_mb: the volume of the downloads;
    - connect_slowest_us: the slowest successful connection;
    - syncs: the syncs of the agent during the run;
    - crashes, switches: how often the agent was killed and restarted, and switched to another mode;
    - leaked_services, leaked_slots, leaked_endpoints, leaked_source_ranges: see `Meter`;
    - without crashes, the other metrics of `Meter`;
    - with `changes`, changes_per_s: those that were made; without crashes, lag_ms: see `_lags`.

    Raises EbpfProxyError. Raises AgentFailed if an agent ends by itself or does not sync, because then the
    run proves nothing about changes.
    """
    if not size.connects and not size.seconds:
        raise ConfigError(
            "--connects and --seconds are both 0, so the benchmark would never end",
            "set at least one of them",
        )
    if size.changes and size.services < 2:
        raise ConfigError(
            "--changes needs other Services than the one that clients use", "give --services=2 or more"
        )
    runners = [tuple(modes)] if faults.switch_s else [(mode,) for mode in modes]
    samples = Samples([",".join(runner) for runner in runners], services=size.services)
    for number, runner in enumerate(runners):
        _run_one(size, faults, runner, clients, samples, part_of(progress, number, len(runners)))
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
        _serve_endpoints(lab, load)
        slices = _Slices(lab.folder / "manifests", [node.name for node in lab.nodes])
        others = OtherServices(slices.folder, size.services - 1, size.endpoints)
        source = Source(size.source, lab, slices.folder)
        runner = AgentRunner(lab, slices.folder, modes, faults, source.flags, each_sync=bool(size.changes))
        slices.write = source.writer()
        meter, since = Meter(lab.node, runner.agent), len(runner.agent.lines)
        group = _ClientGroup(lab, load, clients, size)
        changes = others.start_changes(lab.node, source, size.changes)
        _run_until_done(size, group, slices, runner, meter, progress)
        rate = changes.end()
        use = meter.end() if meter.agent is runner.agent else {}
        lags = _lags(runner.agent.lines[since:]) if rate else []
        group.end()
        slices.change(0)
        others.reset(lab.node, source)
        runner.end()
        leaks = meter.leaks()
    for client, reports in group.reports.items():
        for report in reports:
            if report["errors"]:
                progress(f"{client}: errors: {report['errors']}")
    path = "clusterip" if "outside" not in clients else "nodeport" if len(clients) == 1 else "both"
    name = ",".join(modes)
    note(samples, name, path, group.new, group.lasting, group.downloads, runner.figures() | leaks)
    if lags and use:
        samples.add(name, "", "lag_ms", 0, lags)
    if rate:
        use = {"changes_per_s": rate} | use
    for metric, figure in use.items():
        samples.add(name, "", metric, 0, [figure])


def _lags(lines: Sequence[LogLine]) -> list[float]:
    """Return the milliseconds from the agent's receipt of a change to the kernel, for each sync.

    Those of its oldest change, if a sync has several.
    """
    return [float(line.values["latency_ms"]) for line in lines if is_sync(line)]


def _run_until_done(
    size: Size,
    group: "_ClientGroup",
    slices: "_Slices",
    runner: AgentRunner,
    meter: Meter,
    progress: Progress,
) -> None:
    """Change endpoints and cause the agent's faults until the run has its size."""
    started = time.monotonic()
    turn, reported, sampled, due = 1, started, started, started
    while not group.is_done():
        now = time.monotonic()
        if size.seconds and now - started > size.seconds:
            return
        runner.advance(now - started)
        if now >= due:
            slices.change(turn)
            turn, due = turn + 1, now + size.flap_ms / 1000
        if now - sampled > _SAMPLE_INTERVAL and meter.agent is runner.agent:
            sampled = now
            meter.sample()
        if now - reported > _PROGRESS_INTERVAL:
            reported = now
            # Until the clients have made all connections it takes size.seconds at most.
            done = min(1.0, (now - started) / size.seconds) if size.seconds else None
            progress(f"{runner}: {now - started:.0f} s", done)
        time.sleep(min(_CHECK_INTERVAL, max(0.0, due - time.monotonic())))


class _ClientGroup:
    """The clients. Each has its share of new connections, lasting connections and a download."""

    def __init__(self, lab: Lab, load: Load, clients: Sequence[str], size: Size) -> None:
        """Start the clients. Returns once the lasting connections are open."""
        self._load = load
        pods_and_targets = _pods_and_targets(lab, load, clients)
        self._clients = clients
        busy = min(size.rate or _EXCHANGES, _EXCHANGES)
        self._holders = [load.hold(pod, targets, _LASTING, busy=busy)[0] for pod, targets in pods_and_targets]
        self._downloads = [load.start_download(pod, targets, _MEGABYTES) for pod, targets in pods_and_targets]
        count = -(-size.connects // len(pods_and_targets))
        self._openers = [
            load.start_churn(pod, targets, count=count, rate=size.rate) for pod, targets in pods_and_targets
        ]
        self.new: Reports = []
        self.lasting: Reports = []
        self.downloads: Reports = []

    def is_done(self) -> bool:
        """Whether all clients have made their share, or one has failed."""
        statuses = [client.poll() for client in self._openers]
        return all(status is not None for status in statuses) or any(statuses)

    def end(self) -> None:
        """End all clients and collect their reports. Raises LoadFailed."""
        self.new = [self._load.end_churn(client) for client in self._openers]
        self.lasting = [self._load.end_churn(holder) for holder in self._holders]
        self.downloads = [self._load.end_churn(download) for download in self._downloads]

    @property
    def reports(self) -> dict[str, Reports]:
        """The reports by client."""
        each = zip(self.new, self.lasting, self.downloads, strict=True)
        return dict(zip(self._clients, map(list, each), strict=True))


def _pods_and_targets(lab: Lab, load: Load, clients: Sequence[str]) -> list[tuple[Pod, Path]]:
    """Return the pod of each client and the file of its targets."""
    cluster_ip = load.targets("clusterip", workload.service_targets(1))
    node_port = load.targets("nodeport", [(lab.node.v4, _NODE_PORT)])
    inside = {"pod": lambda: (lab.pod("client"), cluster_ip), "node": lambda: (lab.node, cluster_ip)}
    return [inside[client]() if client in inside else (lab.outside, node_port) for client in clients]


def note(
    samples: Samples,
    mode: str,
    path: str,
    new: Reports,
    lasting: Reports,
    downloads: Reports,
    runner: dict[str, int],
) -> None:
    """Add the metrics of a run. Raises LoadFailed if no connection was attempted."""
    attempts = sum(report["attempts"] for report in new)
    if not attempts:
        raise LoadFailed("no connection was attempted")
    samples.count(mode, path, "connects_failed", sum(report["failed"] for report in new), attempts)
    samples.count(
        mode, path, "established_failed", sum(report["failed"] for report in lasting), _LASTING * len(lasting)
    )
    samples.count(
        mode, path, "download_failed", sum(report["failed"] for report in downloads), len(downloads)
    )
    megabytes = sum(report["bytes"] for report in downloads) / 1e6
    samples.count(mode, path, "download_mb", round(megabytes, 1), len(downloads))
    samples.count(mode, path, "connect_slowest_us", max(report["slowest_us"] for report in new), attempts)
    for name, figure in runner.items():
        samples.count(mode, path, name, figure, attempts)


# --- The Service with changing endpoints ---


def _serve_endpoints(lab: Lab, load: Load) -> None:
    """Start a pod on each node that answers at the addresses of its endpoint network."""
    first, second = lab.nodes
    workload.server_pod(lab, load, _ENDPOINT_NETWORKS[0])
    remote_pod, network = second.pod("server-2"), _ENDPOINT_NETWORKS[1]
    load.serve(remote_pod, workload.ENDPOINT_PORT)
    lab.ip(remote_pod, f"route add local {network} dev lo")
    lab.ip(second.host, f"route add {network} via {remote_pod.v4}")
    lab.ip(lab.router, f"route add {network} via {second.host.v4}")
    lab.ip(first.host, f"route add {network} via {lab.addresses.router.v4}")


class _Slices:
    """The manifests of the Service: a slice with the permanent endpoint, and one with the others.

    `write` writes an object, at first to the folder of manifests.
    """

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        """`nodes` are the names of the nodes in _ENDPOINT_NETWORKS."""
        self.folder = folder
        self._nodes = nodes
        folder.mkdir()
        port = manifests.port(workload.PORT, target=workload.ENDPOINT_PORT, node_port=_NODE_PORT)
        service = manifests.service("service-0", [workload.cluster_ip(0)], [port])
        self.write: Write = lambda value: manifests.write(manifest_path(folder, value), value)
        self.write(service)
        self.write(self._slice("permanent", [0]))
        self.change(0)

    def change(self, turn: int) -> None:
        """Write the endpoints of this turn: another subset in each turn, from none to all."""
        present = [1 + index for index in range(_CHANGING_ENDPOINTS) if turn * 7 >> index & 1]
        self.write(self._slice("changing", present))

    def _slice(self, name: str, indices: Sequence[int]) -> manifests.Object:
        entries = [
            manifests.endpoint(workload.endpoint_address(index), node=self._node(index)) for index in indices
        ]
        ports = [manifests.port(workload.ENDPOINT_PORT)]
        return manifests.endpoint_slice(name, "service-0", entries, ports, family="IPv4")

    def _node(self, index: int) -> str:
        address = ipaddress.ip_address(workload.endpoint_address(index))
        return next(
            self._nodes[node]
            for node, network in _ENDPOINT_NETWORKS.items()
            if address in ipaddress.ip_network(network)
        )
