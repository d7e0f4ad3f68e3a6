"""Whether any connection fails, a new one or one that lasts, while endpoints come and go, and the agent
with them."""

import ipaddress
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ebpfproxy.bench import workload
from ebpfproxy.bench.connect import Progress
from ebpfproxy.bench.load import Load, LoadFailed
from ebpfproxy.bench.report import Result
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Agent, Lab, Pod, PodNetwork, manifests
from ebpfproxy.lab.agent import AgentFailed, is_sync

_FLAPPING = 4
"""How many endpoints come and go, beside the one that stays. Their servers stay, as pods that are told to
end do for a while: what is sought is not a connection that came too late, but one sent anywhere else."""

_ANSWERING = {0: "10.128.0.0/30", 1: "10.128.0.4/30"}
"""The addresses of those endpoints, by the index of their node; elsewhere nothing answers."""

CLIENTS = ("pod", "node", "outside")
FAILURES = ("connects_failed", "established_failed")
"""Metrics that have to be 0."""
_NODE_PORT = 30000
_KEPT, _EXCHANGES = 100, 1000.0
"""Of each client: connections that last, and how often a second one of them has an exchange."""

_LONGEST_NAP = 0.2
"""Seconds between two looks at clients and agent, however far apart changes are."""

_SYNC_WITHIN = 30.0
"""Seconds after which an agent that lives has to have brought something into the kernel; to compile takes
up to a third of it where clients have all CPUs."""


def run(
    connects: int,
    seconds: float,
    flap_ms: float,
    crash_s: float,
    replace: bool,
    mode: str,
    progress: Progress,
    clients: Sequence[str] = CLIENTS[:2],
) -> Iterator[Result]:
    """One Service whose endpoints change every `flap_ms`, but one of them, until `connects` were made or
    `seconds` are over. Endpoints are on this node and on another one. `clients`, of CLIENTS, dial its
    ClusterIP; outside dials its NodePort.

    - connects_failed: the figure is how many of `n` connections (with an exchange of a byte) failed;
    - established_failed: of `n` that lasted all the time;
    - connect_slowest_us: the slowest that did not;
    - syncs: how many changes the agent brought into the kernel meanwhile;
    - crashes: how often the agent was killed and started again, `crash_s` seconds apart (0: never), with
      other programs and maps each time if `replace`.

    Raises EbpfProxyError; AgentFailed where an agent ended by itself, or lived on without a sync, since
    then nothing was measured but a kernel that was left alone.
    """
    if not connects and not seconds:
        raise ConfigError("--connects and --seconds are both 0, so there is no end", "give one of them")
    with Lab("bench", pods=PodNetwork.ROUTED) as lab:
        load = Load(lab.folder)
        _servers(lab, load)
        slices = _Slices(lab.folder / "manifests", [node.name for node in lab.nodes])
        flag = f"--proxy-mode={mode}"
        agent = lab.agent(slices.folder, flag)
        dialed = _dialed(lab, load, clients)
        kept = [load.hold(place, targets, _KEPT, busy=_EXCHANGES) for place, targets in dialed]
        started = time.monotonic()
        count = -(-connects // len(dialed))
        running = [load.start_churn(place, targets, count=count) for place, targets in dialed]
        syncs, crashes, turn, shown, due = 0, 0, 1, started, started
        while True:
            now = time.monotonic()
            over = seconds and now - started > seconds
            ends = [client.poll() for client in running]
            if over or all(end is not None for end in ends) or any(ends):
                break
            check_alive(agent)
            if crash_s and now - started > crash_s * (crashes + 1):
                crashes += 1
                syncs += _syncs(agent)
                agent.kill()
                size = [f"--ebpf-affinity-max={65536 + crashes % 2}"] if replace else []
                agent = lab.agent(slices.folder, flag, *size, wait=0)
            if now >= due:
                slices.flap(turn)
                turn, due = turn + 1, now + flap_ms / 1000
            if now - shown > 10:
                shown = now
                progress(f"{mode}: {now - started:.0f} s, {syncs + _syncs(agent)} syncs, {crashes} crashes")
            time.sleep(min(_LONGEST_NAP, max(0.0, due - time.monotonic())))
        reports = [load.end_churn(client) for client in running]
        lasting = [load.end_churn(holder) for holder, _ in kept]
        for client, new, old in zip(clients, reports, lasting, strict=True):
            if new["errors"] or old["errors"]:
                progress(f"{client}: errors of new connections {new['errors']}, of lasting {old['errors']}")
        check_alive(agent)
        syncs += _syncs(agent)
    path = "clusterip" if "outside" not in clients else "nodeport" if len(clients) == 1 else "both"
    yield from _results(mode, path, reports, lasting, syncs, crashes)


def _servers(lab: Lab, load: Load) -> None:
    """A pod on each node, that answers at addresses of its own."""
    first, second = lab.nodes
    workload.server_pod(lab, load, _ANSWERING[0])
    far, there = second.pod("server-2"), _ANSWERING[1]
    load.serve(far, workload.ENDPOINT_PORT)
    lab.ip(far, f"route add local {there} dev lo")
    lab.ip(second.host, f"route add {there} via {far.v4}")
    lab.ip(lab.router, f"route add {there} via {second.host.v4}")
    lab.ip(first.host, f"route add {there} via {lab.addresses.router.v4}")


def _dialed(lab: Lab, load: Load, clients: Sequence[str]) -> list[tuple[Pod, Path]]:
    """Where each client is, and what it dials."""
    inside = load.targets("clusterip", workload.service_targets(1))
    outside = load.targets("nodeport", [(lab.node.v4, _NODE_PORT)])
    known = {"pod": lambda: (lab.pod("client"), inside), "node": lambda: (lab.node, inside)}
    return [known[client]() if client in known else (lab.outside, outside) for client in clients]


def _results(
    mode: str,
    path: str,
    reports: list[dict[str, Any]],
    lasting: list[dict[str, Any]],
    syncs: int,
    crashes: int,
) -> Iterator[Result]:
    attempts = sum(report["attempts"] for report in reports)
    if not attempts:
        raise LoadFailed("not one connection was made")
    failed = sum(report["failed"] for report in reports)
    figures = {
        "connects_failed": failed,
        "connect_slowest_us": max(report["slowest_us"] for report in reports),
        "syncs": syncs,
        "crashes": crashes,
    }
    for metric, figure in figures.items():
        yield Result(mode, path, 1, metric, figure, figure, figure, attempts)
    ended = sum(report["failed"] for report in lasting)
    yield Result(mode, path, 1, "established_failed", ended, ended, ended, _KEPT * len(lasting))


def check_alive(agent: Agent) -> None:
    """Raises AgentFailed where it ended by itself, or has done nothing in `_SYNC_WITHIN` seconds."""
    status = agent.process.poll()
    if status is not None:
        raise AgentFailed(f"the agent ended by itself with status {status}", agent.lines)
    if time.monotonic() - agent.started >= _SYNC_WITHIN and not _syncs(agent):
        raise AgentFailed(f"the agent did not sync once in {_SYNC_WITHIN:.0f} s", agent.lines)


def _syncs(agent: Agent) -> int:
    return sum(is_sync(line) for line in list(agent.lines))


class _Slices:
    """One Service's manifests: an endpoint that stays in one slice, those that come and go in another."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        """`nodes`: the names of those that have the addresses of _ANSWERING."""
        self.folder = folder
        self._nodes = nodes
        folder.mkdir()
        port = manifests.port(workload.PORT, target=workload.ENDPOINT_PORT, node_port=_NODE_PORT)
        service = manifests.service("service-0", [workload.cluster_ip(0)], [port])
        manifests.write(folder / "service.json", service)
        manifests.write(folder / "staying.json", self._slice("staying", [0]))
        self._path = folder / "flapping.json"
        self.flap(0)

    def flap(self, turn: int) -> None:
        """Each turn another set, of none up to all."""
        present = [1 + index for index in range(_FLAPPING) if turn * 7 >> index & 1]
        manifests.write(self._path, self._slice("flapping", present))

    def _slice(self, name: str, indices: Sequence[int]) -> manifests.Object:
        entries = [
            manifests.endpoint(workload.endpoint_address(index), node=self._node(index)) for index in indices
        ]
        ports = [manifests.port(workload.ENDPOINT_PORT)]
        return manifests.endpoint_slice(name, "service-0", entries, ports, family="IPv4")

    def _node(self, index: int) -> str:
        address = ipaddress.ip_address(workload.endpoint_address(index))
        return next(
            self._nodes[node] for node, own in _ANSWERING.items() if address in ipaddress.ip_network(own)
        )
