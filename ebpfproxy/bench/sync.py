"""How long the agent takes to bring a cluster, and then one change, into the kernel; what memory it needs."""

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
"""Seconds between two attempts to reach what is awaited: below what is measured, and not a whole CPU."""
_SPACING = 0.1
"""Seconds between two changes, so that each is one of its own."""

_AT_ONCE = "--iptables-min-sync-period=0s"
"""What is measured is a change, not how long an agent waits on purpose since the last one: by default a
second, in all modes but ebpf."""

Figures = dict[str, list[float]]
"""By metric."""


class Size(NamedTuple):
    """`changes` are those of one round."""

    services: int
    endpoints: int
    changes: int
    rounds: int


def run(size: Size, modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Metrics, by name: see `_round`, `_change_all`. Modes take turns round by round, each in a new lab.

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
    """One run of a node: a start with nothing in the kernel, changes, and a restart after a crash.

    - first_sync_s: from the agent's start to its word that all is in the kernel;
    - first_answer_s: to the first connection through the last Service that is answered;
    - rss_mb, peak_rss_mb: the agent's memory after the changes, and at the most; that of tools that it starts
      (the compiler, iptables-restore) is not in it;
    - restart_sync_s: as first_sync_s, with everything in the kernel already.
    """
    workload.server_pod(lab, Load(lab.folder))
    client = lab.pod("client")
    folder = lab.folder / "manifests"
    workload.write(folder, size.services, size.endpoints)
    changing = _add_changing_service(folder, size.services, size.endpoints)

    answer = client.start(lambda: _await_answer(size.services))
    (agent,) = start(lab, mode, _AT_ONCE)
    found = {"first_sync_s": [agent.await_sync(timeout=PATIENCE).moment - agent.started]}
    found["first_answer_s"] = [answer.result(PATIENCE) - agent.started]
    found |= _change_all(client, agent, changing, size)
    found |= {"rss_mb": [agent.rss_mb()], "peak_rss_mb": [agent.peak_rss_mb()]}
    agent.kill()
    (again,) = start(lab, mode, _AT_ONCE)
    found["restart_sync_s"] = [again.await_sync(timeout=PATIENCE).moment - again.started]
    return found


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


def _change_all(client: Pod, agent: Agent, changing: _Changing, size: Size) -> Figures:
    """Change one endpoint again and again.

    - change_ms: from the file's replacement to a connection that reaches the new endpoint;
    - agent_latency_ms: from the agent's receipt of the change to the kernel's, by its own log;
    - agent_duration_ms: of it, what the sync took.
    """
    since = len(agent.lines)

    def change() -> list[float]:
        took = []
        for number in range(1, size.changes + 1):
            time.sleep(_SPACING)
            start = time.monotonic()
            address = changing.turn_to(number)
            while _who(size.services) != address:
                time.sleep(_POLL)
            took.append((time.monotonic() - start) * 1000)
        return took

    found = {"change_ms": client.call(change, timeout=PATIENCE + 10 * size.changes)}
    # What is in the kernel is logged after it.
    agent.await_line(lambda _: sum(map(is_sync, agent.lines[since:])) >= size.changes, since)
    for line in agent.lines[since:]:
        for key in ("latency_ms", "duration_ms"):
            if is_sync(line) and key in line.values:
                found.setdefault(f"agent_{key}", []).append(float(line.values[key]))
    return found
