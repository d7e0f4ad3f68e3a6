"""Many flows through NodePorts: held, opened at a rate, and more than the table has room for."""

import dataclasses
import math
import os
import re
import resource
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ebpfproxy.bench.connect import Progress
from ebpfproxy.bench.crossing import Crossing, crossing_lab
from ebpfproxy.bench.load import Load, LoadFailed
from ebpfproxy.bench.report import Result, result
from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.maps import Maps
from ebpfproxy.dataplanes.ebpf.pins import Pins
from ebpfproxy.kernel import netns
from ebpfproxy.lab import Agent, Lab, Place

_SERVICES, _ENDPOINTS = 10, 10
_DIRECT = ("direct-local", "direct-remote")
_NODE_PORTS = ("nodeport-local", "nodeport-remote")
_CLIENTS = 4
"""Processes that open connections: more than there are CPUs, so that none is idle."""
_BUSY, _EXCHANGES = 500, 5000.0
"""How many connections are busy while the table overflows, and how often a second one of them is."""
_EVENT = re.compile(r'^ebpfproxy_datapath_events_total\{reason="(\w+)"\} ([0-9.e+]+)$', re.MULTILINE)
_SHOWN = (
    "packet_new",
    "healed",
    "flows_full",
    "flows_busy",
    "ports_exhausted",
    "port_changed",
    "inconsistent",
)
_OTHER_FILES = 100
FAILURES = ("held_unopened", "held_silent", "new_failed", "busy_failed")
"""Metrics that have to be 0."""
_ENTRIES = 3
"""Of a flow, at the most."""
_FINISHED = 60
"""Seconds for which flows that were reset may still be in the table: their time-out, and a sweep."""


def run(
    held: int, seconds: float, share: float, small: int, mode: str, progress: Progress
) -> Iterator[Result]:
    """Two labs: one with room for all, one whose agents have --ebpf-flows-max=`small`, unless that is 0.

    Of figures that count failures, `n` is how many there were to fail. Raises EbpfProxyError.
    """
    yield from _with_room(held, seconds, share, mode, progress)
    if small:
        yield from _without_room(min(seconds, 10.0), small, mode, progress)


def _crossing(lab: Lab, held: int) -> Crossing:
    crossing = Crossing(lab, Load(lab.folder), servers=1 + processes(held))
    crossing.write(_SERVICES, _ENDPOINTS)
    with netns.entered(lab.outside.netns):
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("1024 65535")
    return crossing


def _with_room(held: int, seconds: float, share: float, mode: str, progress: Progress) -> Iterator[Result]:
    """- direct_per_s: connections, with a byte there and back, that clients make as fast as it goes;
    - held_unopened, held_silent: of `held` that are opened before, and stay: those that could not be
      opened, and those that no longer answer in the end;
    - flow_entries: what is in the flow table while they stay;
    - offered_per_s: `share` of direct_per_s; made_per_s: what came of it, in `seconds`;
    - new_failed: those that failed; new_sent_twice: those of which a packet had to be sent once more;
    - agents_cpu: how many CPUs the agents took meanwhile, which share them with everybody else here.
    """
    with crossing_lab() as lab:
        crossing = _crossing(lab, held)
        progress("direct: as many connections as go")
        first = _per_second(_churn(crossing, _DIRECT, min(seconds, 5.0), 0.0))
        size = flows_max(held, 2 * first * share, seconds)  # twice: the machine may be faster then
        progress(f"{mode}: agents with room for {size} entries")
        agents = crossing.agents(f"--proxy-mode={mode}", f"--ebpf-flows-max={size}")
        targets = crossing.targets(_NODE_PORTS, _SERVICES, _ENDPOINTS)
        count = processes(held)
        holders = [crossing.load.hold(crossing.client, targets, -(-held // count)) for _ in range(count)]
        unopened = sum(opened["failed"] for _, opened in holders)
        held = sum(opened["attempts"] for _, opened in holders)
        yield _figure(mode, "nodeport", "held_unopened", unopened, held)
        entries = _entries(lab)
        yield _figure(mode, "nodeport", "flow_entries", entries, held)
        direct = _churn(crossing, _DIRECT, min(seconds, 15.0), 0.0)
        sustained = _per_second(direct)
        yield _figure(mode, "direct", "direct_per_s", sustained, sum(each["attempts"] for each in direct))
        progress(
            f"{mode}: {held} connections held in {entries} entries; {sustained * share:.0f} a second more"
        )
        before = sum(map(_cpu_seconds, agents))
        new = _churn(crossing, _NODE_PORTS, seconds, sustained * share)
        used = sum(map(_cpu_seconds, agents)) - before
        yield from _of_new(mode, "nodeport", new, sustained * share, progress)
        yield _figure(mode, "nodeport", "agents_cpu", used / seconds, len(agents))
        ends = [crossing.load.end_churn(running, timeout=120.0 + held / 1000) for running, _ in holders]
        _tell_errors(progress, ends)
        failed = sum(report["failed"] for report in ends)
        yield _figure(mode, "nodeport", "held_silent", failed - unopened, held)
        yield from _events(mode, "nodeport", lab.node)


def _without_room(seconds: float, small: int, mode: str, progress: Progress) -> Iterator[Result]:
    """The same of path "full", as fast as it goes, while other connections are busy:

    - busy_failed: of those;
    - event_...: what the agent's metrics say the programs did.
    """
    with crossing_lab() as lab:
        crossing = _crossing(lab, _BUSY)
        progress(f"{mode}: agents with room for {small} entries")
        crossing.agents(f"--proxy-mode={mode}", f"--ebpf-flows-max={small}")
        targets = crossing.targets(_NODE_PORTS, _SERVICES, _ENDPOINTS)
        running, opened = crossing.load.hold(crossing.client, targets, _BUSY, busy=_EXCHANGES)
        new = _churn(crossing, _NODE_PORTS, seconds, 0.0)
        yield from _of_new(mode, "full", new, 0.0, progress)
        busy = crossing.load.end_churn(running, timeout=120.0)
        _tell_errors(progress, [opened, busy])
        yield _figure(mode, "full", "busy_failed", busy["failed"], _BUSY)
        yield from _events(mode, "full", lab.node)


def processes(held: int) -> int:
    """How many it takes to hold so many connections, since each may have only so many files."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, math.ceil(held / (files - _OTHER_FILES)))


def flows_max(held: int, rate: float, seconds: float) -> int:
    """Entries that the flow table needs, with a half more, since one that is nearly full evicts.

    >>> flows_max(200_000, 1000.0, 60.0), flows_max(0, 1000.0, 1000.0), flows_max(0, 0.0, 1.0)
    (1170000, 270000, 131072)
    """
    recent = rate * min(seconds, _FINISHED)
    return max(131072, math.ceil((held + recent) * _ENTRIES * 1.5))


def _churn(crossing: Crossing, paths: tuple[str, ...], seconds: float, rate: float) -> list[dict[str, Any]]:
    """Reports of all clients, after so many seconds. `rate`: of all of them together; 0: as many as go."""
    targets = crossing.targets(paths, _SERVICES, _ENDPOINTS)
    load = crossing.load
    running = [
        load.start_churn(crossing.client, targets, seconds=seconds, rate=rate / _CLIENTS, seed=number)
        for number in range(_CLIENTS)
    ]
    reports = [load.end_churn(client, terminate=False, timeout=seconds + 60) for client in running]
    if not all(report["attempts"] for report in reports):
        raise LoadFailed("a client made not one connection")
    return reports


def _of_new(
    mode: str, path: str, reports: list[dict[str, Any]], offered: float, progress: Progress
) -> Iterator[Result]:
    attempts = sum(report["attempts"] for report in reports)
    _tell_errors(progress, reports)
    if offered:
        yield _figure(mode, path, "offered_per_s", offered, attempts)
    yield _figure(mode, path, "made_per_s", _per_second(reports), attempts)
    yield _figure(mode, path, "new_failed", sum(report["failed"] for report in reports), attempts)
    slowest = max(report["slowest_us"] for report in reports)
    yield _figure(mode, path, "new_slowest_us", slowest, attempts)
    yield _figure(mode, path, "new_sent_twice", sum(report["slow"] for report in reports), attempts)


def _per_second(reports: list[dict[str, Any]]) -> float:
    return float(sum(report["attempts"] / report["seconds"] for report in reports))


def _tell_errors(progress: Progress, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        if report["errors"]:
            progress(f"errors: {report['errors']}")


def _cpu_seconds(agent: Agent) -> float:
    """proc_pid_stat(5), fields utime and stime."""
    fields = Path(f"/proc/{agent.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _entries(lab: Lab) -> int:
    maps = Maps(Pins(lab.bpffs).hooked_in() / "maps")
    try:
        return sum(len(keys) // abi.FLOW_KEY.size for keys, _ in maps["flows"].batches(65536))
    finally:
        maps.close()


def _events(mode: str, path: str, node: Place) -> Iterator[Result]:
    for reason, count in events(node.call(_scrape)).items():
        if reason in _SHOWN:
            yield _figure(mode, path, f"event_{reason}", count, 1)


def _scrape() -> str:
    """Runs on the node."""
    with urllib.request.urlopen("http://127.0.0.1:10249/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def events(metrics: str) -> dict[str, float]:
    """What the programs did, by why, of an agent's metrics.

    >>> events('ebpfproxy_datapath_events_total{reason="healed"} 12.0')
    {'healed': 12.0}
    """
    return {reason: float(count) for reason, count in _EVENT.findall(metrics)}


def _figure(mode: str, path: str, metric: str, figure: float, n: int) -> Result:
    return dataclasses.replace(result(mode, path, _SERVICES, metric, [figure]), n=n)
