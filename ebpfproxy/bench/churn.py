"""Whether any connection fails while endpoints come and go, and the agent with them."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebpfproxy.bench import workload
from ebpfproxy.bench.connect import Progress
from ebpfproxy.bench.load import Load, LoadFailed
from ebpfproxy.bench.report import Result
from ebpfproxy.errors import ConfigError
from ebpfproxy.lab import Agent, Lab, manifests
from ebpfproxy.lab.agent import AgentFailed, is_sync

_FLAPPING = 4
"""How many endpoints come and go, beside the one that stays. Their servers stay, as pods that are told to
end do for a while: what is sought is not a connection that came too late, but one sent anywhere else."""

_ANSWERING = "10.128.0.0/29"
"""The addresses of those endpoints; elsewhere nothing answers."""

_CLIENTS = 2

_SYNC_WITHIN = 5.0
"""Seconds after which an agent that lives has to have brought something into the kernel."""


def run(
    connects: int,
    seconds: float,
    flap_ms: float,
    crash_s: float,
    replace: bool,
    mode: str,
    progress: Progress,
) -> Iterator[Result]:
    """One Service whose endpoints change every `flap_ms`, but one of them, until `connects` were made or
    `seconds` are over.

    - connects_failed: the figure is how many of `n` connections (with an exchange of a byte) failed;
    - connect_slowest_us: the slowest that did not;
    - syncs: how many changes the agent brought into the kernel meanwhile;
    - crashes: how often the agent was killed and started again, `crash_s` seconds apart (0: never), with
      other programs and maps each time if `replace`.

    Raises EbpfProxyError; AgentFailed where an agent ended by itself, or lived on without a sync, since
    then nothing was measured but a kernel that was left alone.
    """
    if not connects and not seconds:
        raise ConfigError("--connects and --seconds are both 0, so there is no end", "give one of them")
    with Lab("bench") as lab:
        load = Load(lab.folder)
        workload.server_pod(lab, load, _ANSWERING)
        slices = _Slices(lab.folder / "manifests")
        flag = f"--proxy-mode={mode}"
        agent = lab.agent(slices.folder, flag)
        targets = load.targets("service", workload.service_targets(1))
        places = [lab.pod("client"), lab.node]
        started = time.monotonic()
        running = [load.start_churn(place, targets, count=-(-connects // _CLIENTS)) for place in places]
        syncs, crashes, shown = 0, 0, started
        for turn in itertools.count():
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
            slices.flap(turn)
            if now - shown > 10:
                shown = now
                progress(f"{mode}: {now - started:.0f} s, {syncs + _syncs(agent)} syncs, {crashes} crashes")
            time.sleep(max(0.0, flap_ms / 1000 - (time.monotonic() - now)))
        reports = [load.end_churn(client) for client in running]
        check_alive(agent)
        syncs += _syncs(agent)
    yield from _results(mode, reports, syncs, crashes, progress)


def _results(
    mode: str, reports: list[dict[str, Any]], syncs: int, crashes: int, progress: Progress
) -> Iterator[Result]:
    attempts = sum(report["attempts"] for report in reports)
    if not attempts:
        raise LoadFailed("not one connection was made")
    for report in reports:
        if report["errors"]:
            progress(f"errors: {report['errors']}")
    failed = sum(report["failed"] for report in reports)
    figures = {
        "connects_failed": failed,
        "connect_slowest_us": max(report["slowest_us"] for report in reports),
        "syncs": syncs,
        "crashes": crashes,
    }
    for metric, figure in figures.items():
        yield Result(mode, "clusterip", 1, metric, figure, figure, figure, attempts)


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

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        workload.write(folder, 1, 1)
        self._path = folder / "flapping.json"
        self.flap(0)

    def flap(self, turn: int) -> None:
        """Each turn another set, of none up to all."""
        addresses = [
            workload.endpoint_address(1 + index) for index in range(_FLAPPING) if turn * 7 >> index & 1
        ]
        ports = [manifests.port(workload.ENDPOINT_PORT)]
        manifests.write(self._path, manifests.endpoint_slice("flapping", "service-0", addresses, ports))
