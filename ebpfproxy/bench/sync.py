"""The benchmark sync: how long the agent takes to program a cluster and a change, and its memory."""

import contextlib
import http.client
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebpfproxy.agent.daemon import BUSY
from ebpfproxy.backends.ebpf.programs import object_file
from ebpfproxy.bench import modes as all_modes
from ebpfproxy.bench import workload
from ebpfproxy.bench.agent_use import cpu_seconds
from ebpfproxy.bench.changes import SPACING, ChangingSlice, await_answer, change_all
from ebpfproxy.bench.load import Load
from ebpfproxy.bench.samples import Result, Samples
from ebpfproxy.bench.sides import PATIENCE, Progress, rotated, start
from ebpfproxy.bench.source import MANIFESTS, Source
from ebpfproxy.lab import Agent, Lab, Pod
from ebpfproxy.lab.agent import is_sync

_PERIODS = 3
"""Changes are spread over this number of sync periods, so that verifications run between them."""

_NO_MINIMUM = "--iptables-min-sync-period=0s"
"""Measures only the sync. By default, modes other than ebpf wait for a second since the previous sync."""

_EVERY_SYNC = "-v=4"
"""Logs each sync, also while changes follow each other closely, and when the control thread is busy."""

_OF_CLIENTS = ("first_answer_s", "change_ms")
"""Metrics that a client of a ClusterIP measures."""

Figures = dict[str, list[float]]
"""Samples by metric."""


class Size(NamedTuple):
    """The extent of a run. `changes` is the number in one round, `sync_period` the agent's, in seconds.

    `affinity` percent of the Services have session affinity. `source` is one of source.NAMES.
    """

    services: int
    endpoints: int
    changes: int
    rounds: int
    sync_period: float = 10.0
    affinity: int = 0
    source: str = MANIFESTS


def run(size: Size, modes: Sequence[str], progress: Progress) -> Iterator[Result]:
    """Measure the metrics of `_round` and `_change_all`. Modes alternate with each round, each in a new lab.

    Raises EbpfProxyError.
    """
    samples = Samples(modes, size.services)
    if all_modes.EBPF in map(all_modes.base, modes):
        object_file()  # as in the image: no agent compiles
    for number in range(size.rounds):
        for turn, mode in enumerate(rotated(modes, number), number * len(modes)):
            progress(f"round {number + 1} of {size.rounds}: {mode}", turn / size.rounds / len(modes))
            with Lab("bench") as lab:
                for metric, figures in _round(lab, size, mode).items():
                    path = "clusterip" if metric in _OF_CLIENTS else ""
                    samples.add(mode, path, metric, number, figures)
    yield from samples.results()


def _round(lab: Lab, size: Size, mode: str) -> Figures:
    """Start the agent on an empty kernel, make changes, and restart it after a crash. Metrics:

    - healthz_s: from the agent's start until /healthz answers, with any status;
    - first_sync_s: from the agent's start to its log line about the first sync;
    - first_answer_s: from the agent's start to the first answer through the last Service;
    - idle_cores: CPU seconds of the agent per second without changes, during one sync period;
    - rss_first_mb, rss_mb, peak_rss_mb: the agent's memory after the first sync, and after the changes and
      _PERIODS sync periods, and its peak, without the tools that it starts (iptables-restore);
    - restart_sync_s: as first_sync_s, when the kernel already has the desired state.
    """
    workload.server_pod(lab, Load(lab.folder))
    client = lab.pod("client")
    folder = lab.folder / "manifests"
    workload.write(folder, size.services, size.endpoints, affinity=size.affinity)
    changing = ChangingSlice(size.services, size.services * size.endpoints)
    changing.write(folder)
    source = Source(size.source, lab, folder)
    flags = (_NO_MINIMUM, f"--sync-period={size.sync_period:g}s", *source.flags)

    answer = client.start(lambda: await_answer(size.services))
    health = lab.node.start(_await_healthz)
    (agent,) = start(lab, mode, *flags, _EVERY_SYNC)
    first_sync = agent.await_sync(timeout=PATIENCE).moment
    figures = {"first_sync_s": [first_sync - agent.started], "rss_first_mb": [agent.rss_mb()]}
    figures["healthz_s"] = [health.result(PATIENCE) - agent.started]
    figures["first_answer_s"] = [answer.result(PATIENCE) - agent.started]
    figures |= _change_all(client, agent, changing, source, size)
    figures["idle_cores"] = [_idle_cores(agent, size.sync_period)]
    # Another half period for the last verification to end.
    time.sleep(max(0.0, first_sync + (_PERIODS + 0.5) * size.sync_period - time.monotonic()))
    figures |= {"rss_mb": [agent.rss_mb()], "peak_rss_mb": [agent.peak_rss_mb()]}
    agent.kill()
    (restarted,) = start(lab, mode, *flags)
    figures["restart_sync_s"] = [restarted.await_sync(timeout=PATIENCE).moment - restarted.started]
    return figures


def _idle_cores(agent: Agent, seconds: float) -> float:
    before, began = cpu_seconds(agent), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(agent) - before) / (time.monotonic() - began)


def _await_healthz() -> float:
    """Wait until /healthz answers; return the time of time.monotonic(). Runs on the node."""
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", 10256, timeout=1.0)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/healthz")
            connection.getresponse()
            return time.monotonic()
        time.sleep(0.002)


def _change_all(client: Pod, agent: Agent, changing: ChangingSlice, source: Source, size: Size) -> Figures:
    """Change the endpoint repeatedly, over _PERIODS sync periods. Metrics:

    - change_ms: from the begin of the change (the file is replaced, or the API server gets the object) to a
      connection that reaches the new endpoint;
    - agent_latency_ms: from the agent's receipt of the change to the kernel, by the agent's log;
    - agent_duration_ms: the part of it that the sync takes;
    - stall_ms: the longest time for which the agent's control thread read no events, by its log; 0 if it was
      too short to be logged.
    """
    since = len(agent.lines)
    spacing = max(SPACING, _PERIODS * size.sync_period / size.changes)
    timeout = PATIENCE + (10 + spacing) * size.changes
    durations = client.call(
        lambda: change_all(changing, source.writer(), size.changes, spacing), timeout=timeout
    )
    figures = {"change_ms": durations}
    # The agent logs a sync only after it has changed the kernel.
    agent.await_line(lambda _: sum(map(is_sync, agent.lines[since:])) >= size.changes, since)
    stalls = [0.0]
    lines = agent.lines[since:]
    # The agent may report the first sync as a stall after `since`.
    del lines[: next(index for index, line in enumerate(lines) if is_sync(line))]
    for line in lines:
        for key in ("latency_ms", "duration_ms"):
            if is_sync(line) and key in line.values:
                figures.setdefault(f"agent_{key}", []).append(float(line.values[key]))
        if f" DEBUG {BUSY} " in line.text:
            stalls.append(float(line.values["busy_ms"]))
    return figures | {"stall_ms": [max(stalls)]}
