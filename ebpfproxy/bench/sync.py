"""How long the agent takes to bring a cluster, and then one change, into the kernel; what memory it needs."""

import collections
import time
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.bench import workload
from ebpfproxy.bench.connect import Progress
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.report import Result, result
from ebpfproxy.lab import Agent, Lab, Pod, manifests, sockets
from ebpfproxy.lab.agent import is_sync
from ebpfproxy.model.address import Protocol

_PATIENCE = 600.0
_POLL = 0.0002
"""Seconds between two attempts to reach what is awaited: below what is measured, and not a whole CPU."""
_SPACING = 0.1
"""Seconds between two changes, so that each is one of its own."""

Samples = dict[str, list[float]]


def run(
    services: int, endpoints: int, changes: int, rounds: int, mode: str, progress: Progress
) -> Iterator[Result]:
    """Metrics, by name: see `_round`, `_change_all`. Raises EbpfProxyError."""
    samples: Samples = collections.defaultdict(list)
    for number in range(rounds):
        progress(
            f"{mode}: {services} services with {endpoints} endpoints each, round {number + 1} of {rounds}"
        )
        with Lab("bench") as lab:
            _round(lab, services, endpoints, changes, mode, samples)
    for metric, figures in samples.items():
        path = "clusterip" if metric in ("first_answer_s", "change_ms") else ""
        yield result(mode, path, services, metric, figures)


def _round(lab: Lab, services: int, endpoints: int, changes: int, mode: str, samples: Samples) -> None:
    """One life of a node: a start with nothing in the kernel, changes, and a restart after a crash.

    - first_sync_s: from the agent's start to its word that all is in the kernel;
    - first_answer_s: to the first connection through the last Service that is answered;
    - restart_sync_s: as first_sync_s, with everything in the kernel already;
    - rss_mb, peak_rss_mb: after the changes, and at the most.
    """
    load = Load(lab.folder)
    workload.server_pod(lab, load)
    client = lab.pod("client")
    folder = lab.folder / "manifests"
    workload.write(folder, services, endpoints)
    changing = _add_changing_service(folder, services, endpoints)
    flag = f"--proxy-mode={mode}"

    answer = client.start(lambda: _await_answer(services))
    agent = lab.agent(folder, flag, wait=0)
    samples["first_sync_s"].append(agent.await_sync(timeout=_PATIENCE).moment - agent.started)
    samples["first_answer_s"].append(answer.result(_PATIENCE) - agent.started)
    _change_all(client, agent, changing, services, changes, samples)
    samples["rss_mb"].append(agent.rss_mb())
    samples["peak_rss_mb"].append(agent.peak_rss_mb())
    agent.kill()
    again = lab.agent(folder, flag, wait=0)
    samples["restart_sync_s"].append(again.await_sync(timeout=_PATIENCE).moment - again.started)


def _add_changing_service(folder: Path, services: int, endpoints: int) -> "_Changing":
    """One Service more, with one endpoint, in files of its own."""
    ports = [manifests.port(workload.PORT)]
    changing = _Changing(folder / "changing.json", services, services * endpoints)
    service = manifests.service(f"service-{services}", [workload.cluster_ip(services)], ports)
    manifests.write(folder / "changing-service.json", service)
    changing.turn_to(0)
    return changing


class _Changing:
    """The slice that changes: the Service of index `service`, its endpoint the n-th after `first`."""

    def __init__(self, path: Path, service: int, first: int) -> None:
        self._path, self._service, self._first = path, service, first

    def turn_to(self, number: int) -> str:
        address = workload.endpoint_address(self._first + number)
        manifests.write(self._path, workload.endpoint_slice(self._service, [address]))
        return address


def _await_answer(service: int) -> float:
    """Runs in the client: the moment, of time.monotonic(), at which the Service first answers."""
    while _who(service) is None:
        time.sleep(_POLL)
    return time.monotonic()


def _who(service: int) -> str | None:
    """The endpoint that answers; None where none does."""
    try:
        with sockets.dial(
            Protocol.TCP, workload.cluster_ip(service), workload.PORT, timeout=0.1
        ) as connection:
            connection.sendall(b"w")
            return connection.recv(64).decode() or None
    except OSError:
        return None


def _change_all(
    client: Pod, agent: Agent, changing: _Changing, service: int, changes: int, samples: Samples
) -> None:
    """Change one endpoint again and again.

    - change_ms: from the file's replacement to a connection that reaches the new endpoint;
    - agent_latency_ms: from the agent's receipt of the change to the kernel's, by its own log;
    - agent_duration_ms: of it, what the sync took.
    """
    since = len(agent.lines)

    def change() -> list[float]:
        took = []
        for number in range(1, changes + 1):
            time.sleep(_SPACING)
            start = time.monotonic()
            address = changing.turn_to(number)
            while _who(service) != address:
                time.sleep(_POLL)
            took.append((time.monotonic() - start) * 1000)
        return took

    samples["change_ms"] += client.call(change, timeout=_PATIENCE)
    for line in agent.lines[since:]:
        for key in ("latency_ms", "duration_ms"):
            if is_sync(line) and key in line.values:
                samples[f"agent_{key}"].append(float(line.values[key]))
