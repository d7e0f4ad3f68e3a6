"""Whether any connection fails, a new one or one that lasts, while endpoints come and go, and the agent
with them."""

import ipaddress
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Fate(NamedTuple):
    """What becomes of the agent meanwhile: it is killed and started again every `crash_s` seconds, with other
    programs and maps each time if `replace`; it moves to the next mode every `move_s`. 0: never."""

    crash_s: float = 0.0
    replace: bool = False
    move_s: float = 0.0


def run(
    connects: int,
    seconds: float,
    flap_ms: float,
    fate: Fate,
    modes: Sequence[str],
    progress: Progress,
    clients: Sequence[str] = CLIENTS[:2],
) -> Iterator[Result]:
    """One Service whose endpoints change every `flap_ms`, but one of them, until `connects` were made or
    `seconds` are over. Endpoints are on this node and on another one. `clients`, of CLIENTS, dial its
    ClusterIP; outside dials its NodePort. The agent begins in the first of `modes`.

    - connects_failed: the figure is how many of `n` connections (with an exchange of a byte) failed;
    - established_failed: of `n` that lasted all the time;
    - connect_slowest_us: the slowest that did not;
    - syncs: how many changes the agent brought into the kernel meanwhile;
    - crashes, moves: how often the agent was killed and started again, and moved to another mode.

    Raises EbpfProxyError; AgentFailed where an agent ended by itself, or lived on without a sync, since
    then nothing was measured but a kernel that was left alone.
    """
    if not connects and not seconds:
        raise ConfigError("--connects and --seconds are both 0, so there is no end", "give one of them")
    with Lab("bench", pods=PodNetwork.ROUTED) as lab:
        load = Load(lab.folder)
        _servers(lab, load)
        slices = _Slices(lab.folder / "manifests", [node.name for node in lab.nodes])
        life = _Life(lab, slices.folder, modes, fate)
        dialed = _dialed(lab, load, clients)
        kept = [load.hold(place, targets, _KEPT, busy=_EXCHANGES) for place, targets in dialed]
        started = time.monotonic()
        count = -(-connects // len(dialed))
        running = [load.start_churn(place, targets, count=count) for place, targets in dialed]
        turn, shown, due = 1, started, started
        while True:
            now = time.monotonic()
            over = seconds and now - started > seconds
            ends = [client.poll() for client in running]
            if over or all(end is not None for end in ends) or any(ends):
                break
            life.go_on(now - started)
            if now >= due:
                slices.flap(turn)
                turn, due = turn + 1, now + flap_ms / 1000
            if now - shown > 10:
                shown = now
                progress(f"{life}: {now - started:.0f} s")
            time.sleep(min(_LONGEST_NAP, max(0.0, due - time.monotonic())))
        reports = [load.end_churn(client) for client in running]
        lasting = [load.end_churn(holder) for holder, _ in kept]
        for client, new, old in zip(clients, reports, lasting, strict=True):
            if new["errors"] or old["errors"]:
                progress(f"{client}: errors of new connections {new['errors']}, of lasting {old['errors']}")
        life.end()
    path = "clusterip" if "outside" not in clients else "nodeport" if len(clients) == 1 else "both"
    yield from _results(",".join(modes), path, reports, lasting, life.figures())


class _Life:
    """The agent on the first node, and its successors. Its mode stands in a file, which it follows."""

    def __init__(self, lab: Lab, folder: Path, modes: Sequence[str], fate: Fate) -> None:
        self._lab = lab
        self._folder = folder
        self._modes = modes
        self._fate = fate
        self._crashes = self._moves = 0
        self._syncs_of_former = 0
        self._file = lab.folder / "configuration.json"
        self._configure()
        self._agent = self._start()

    def __str__(self) -> str:
        return ", ".join(f"{figure} {name}" for name, figure in self.figures().items())

    def go_on(self, elapsed: float) -> None:
        """So many seconds after the beginning. Raises AgentFailed."""
        check_alive(self._agent)
        if self._fate.crash_s and elapsed > self._fate.crash_s * (self._crashes + 1):
            self._crashes += 1
            self._syncs_of_former += _syncs(self._agent)
            self._agent.kill()
            self._agent = self._start(wait=0)
        if self._fate.move_s and elapsed > self._fate.move_s * (self._moves + 1):
            self._await_moved()
            self._moves += 1
            self._configure()
            self._moving = True

    def end(self) -> None:
        """Raises AgentFailed where it has ended before, or has not moved as it was told."""
        check_alive(self._agent)
        self._await_moved()

    def figures(self) -> dict[str, int]:
        syncs = self._syncs_of_former + _syncs(self._agent)
        return {"syncs": syncs, "crashes": self._crashes, "moves": self._moves}

    @property
    def _mode(self) -> str:
        return self._modes[self._moves % len(self._modes)]

    def _configure(self) -> None:
        body = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": self._mode,
            "clusterCIDR": ",".join(self._lab.addresses.all_pods),
        }
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(body))
        fresh.rename(self._file)

    def _start(self, wait: float = 60.0) -> Agent:
        size = [f"--ebpf-affinity-max={65536 + self._crashes % 2}"] if self._fate.replace else []
        self._seen, self._moving = 0, False
        return self._lab.agent(self._folder, f"--config={self._file}", *size, wait=wait)

    def _await_moved(self) -> None:
        """Until the agent has done the last move that it was told. Raises AgentFailed."""
        if self._moving:
            self._agent.await_line(lambda line: " INFO moved " in line.text, self._seen)
        self._seen, self._moving = len(self._agent.lines), False


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
    life: Mapping[str, int],
) -> Iterator[Result]:
    attempts = sum(report["attempts"] for report in reports)
    if not attempts:
        raise LoadFailed("not one connection was made")
    failed = sum(report["failed"] for report in reports)
    figures = {
        "connects_failed": failed,
        "connect_slowest_us": max(report["slowest_us"] for report in reports),
        **life,
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
