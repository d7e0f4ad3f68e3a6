"""The benchmark sync: how long the agent takes to program a cluster and a change, and its memory."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.bench import workload
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import PATIENCE, Progress, rotated, start
from ebpfproxy.lab import Agent, Lab, Pod, manifests, sockets
from ebpfproxy.lab.agent import is_sync
from ebpfproxy.model.address import Protocol

_POLL = 0.0002
"""Seconds between two connection attempts: less than the measured durations, without using up a CPU."""
_SPACING = 0.1
"""Seconds between two changes, so that each is synced separately."""

_NO_MINIMUM = "--iptables-min-sync-period=0s"
"""Measures only the sync. By default, modes other than ebpf wait for a second since the previous sync."""

_EVERY_SYNC = "-v=4"
"""Logs each sync, also while changes follow each other closely."""

Figures = dict[str, list[float]]
"""Samples by metric."""


class Size(NamedTuple):
    """The extent of a run. `changes` is the number in one round."""

    services: int
    endpoints: int
    changes: int
    rounds: int


def run(size: Size, modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Measure the metrics of `_round` and `_change_all`. Modes alternate with each round, each in a new lab.

    Raises EbpfProxyError.
    """
    samples = Samples(modes, size.services)
    for number in range(size.rounds):
        for mode in rotated(modes, number):
            progress(f"round {number + 1} of {size.rounds}: {mode}")
            with Lab("bench") as lab:
                for metric, figures in _round(lab, size, mode).items():
                    path = "clusterip" if metric in ("first_answer_s", "change_ms") else ""
                    samples.add(mode, path, metric, number, figures)
    yield from samples.results()


def _round(lab: Lab, size: Size, mode: str) -> Figures:
    """Start the agent on an empty kernel, make changes, and restart it after a crash. Metrics:

    - first_sync_s: from the agent's start to its log line about the first sync;
    - first_answer_s: from the agent's start to the first answer through the last Service;
    - rss_mb, peak_rss_mb: the agent's memory after the changes, and its peak, without the tools that it
      starts (the compiler, iptables-restore);
    - restart_sync_s: as first_sync_s, when the kernel already has the desired state.
    """
    workload.server_pod(lab, Load(lab.folder))
    client = lab.pod("client")
    folder = lab.folder / "manifests"
    workload.write(folder, size.services, size.endpoints)
    changing = _add_changing_service(folder, size.services, size.endpoints)

    answer = client.start(lambda: _await_answer(size.services))
    (agent,) = start(lab, mode, _NO_MINIMUM, _EVERY_SYNC)
    figures = {"first_sync_s": [agent.await_sync(timeout=PATIENCE).moment - agent.started]}
    figures["first_answer_s"] = [answer.result(PATIENCE) - agent.started]
    figures |= _change_all(client, agent, changing, size)
    figures |= {"rss_mb": [agent.rss_mb()], "peak_rss_mb": [agent.peak_rss_mb()]}
    agent.kill()
    (restarted,) = start(lab, mode, _NO_MINIMUM)
    figures["restart_sync_s"] = [restarted.await_sync(timeout=PATIENCE).moment - restarted.started]
    return figures


def _add_changing_service(folder: Path, services: int, endpoints: int) -> "_ChangingSlice":
    """Add another Service with one endpoint, in files of its own."""
    ports = [manifests.port(workload.PORT)]
    changing = _ChangingSlice(folder / "changing.json", services, services * endpoints)
    service = manifests.service(f"service-{services}", [workload.cluster_ip(services)], ports)
    manifests.write(folder / "changing-service.json", service)
    changing.set_endpoint(0)
    return changing


class _ChangingSlice:
    """The slice of the Service with index `service`. Its endpoint is one of those from index `first` on."""

    def __init__(self, path: Path, service: int, first: int) -> None:
        self._path, self._service, self._first = path, service, first

    def set_endpoint(self, number: int) -> str:
        """Write the slice with the endpoint `first` + `number`; return its address."""
        address = workload.endpoint_address(self._first + number)
        manifests.write(self._path, workload.endpoint_slice(self._service, [address]))
        return address


def _await_answer(service: int) -> float:
    """Wait for the first answer of the Service; return the time of time.monotonic(). Runs in the client."""
    while _answering_endpoint(service) is None:
        time.sleep(_POLL)
    return time.monotonic()


def _answering_endpoint(service: int) -> str | None:
    """Return the address of the endpoint that answers; None without an answer."""
    try:
        with sockets.dial(
            Protocol.TCP, workload.cluster_ip(service), workload.PORT, timeout=0.1
        ) as connection:
            connection.sendall(b"w")
            return connection.recv(64).decode() or None
    except OSError:
        return None


def _change_all(client: Pod, agent: Agent, changing: _ChangingSlice, size: Size) -> Figures:
    """Change the endpoint repeatedly. Metrics:

    - change_ms: from the replacement of the file to a connection that reaches the new endpoint;
    - agent_latency_ms: from the agent's receipt of the change to the kernel, by the agent's log;
    - agent_duration_ms: the part of it that the sync takes.
    """
    since = len(agent.lines)

    def change() -> list[float]:
        durations = []
        for number in range(1, size.changes + 1):
            time.sleep(_SPACING)
            start = time.monotonic()
            address = changing.set_endpoint(number)
            while _answering_endpoint(size.services) != address:
                time.sleep(_POLL)
            durations.append((time.monotonic() - start) * 1000)
        return durations

    figures = {"change_ms": client.call(change, timeout=PATIENCE + 10 * size.changes)}
    # The agent logs a sync only after it has changed the kernel.
    agent.await_line(lambda _: sum(map(is_sync, agent.lines[since:])) >= size.changes, since)
    for line in agent.lines[since:]:
        for key in ("latency_ms", "duration_ms"):
            if is_sync(line) and key in line.values:
                figures.setdefault(f"agent_{key}", []).append(float(line.values[key]))
    return figures
