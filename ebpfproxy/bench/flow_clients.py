"""Outside clients that open and hold many connections across two nodes."""

import math
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebpfproxy.bench.crossing import Crossing
from ebpfproxy.bench.load import Load, LoadFailed
from ebpfproxy.bench.samples import Samples
from ebpfproxy.bench.sides import Progress
from ebpfproxy.lab import Lab
from ebpfproxy.linux.netns import netns

SERVICES, ENDPOINTS = 10, 10
DIRECT = ("direct-local", "direct-remote")
NODE_PORTS = ("nodeport-local", "nodeport-remote")

_CLIENTS = 4
"""The number of processes that open connections: more than there are CPUs, so that no CPU is idle."""
_OTHER_FILES = 100

Reports = list[dict[str, Any]]
"""The reports of all clients: see `Load.churn`."""


class Held(NamedTuple):
    """The processes that hold connections open, and their reports about opening them."""

    holders: list["subprocess.Popen[bytes]"]
    opened: Reports

    @property
    def unopened(self) -> int:
        return sum(int(each["failed"]) for each in self.opened)

    @property
    def attempts(self) -> int:
        return sum(int(each["attempts"]) for each in self.opened)


class Clients:
    """The clients. All of them are outside and may use nearly all ports."""

    def __init__(self, lab: Lab, held: int) -> None:
        """`held` is the number of connections to hold at the same time."""
        self._processes = processes(held)
        self.crossing = Crossing(lab, Load(lab.folder), servers=1 + self._processes)
        self.crossing.write(SERVICES, ENDPOINTS)
        with netns.entered(lab.outside.netns):
            Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("1024 65535")

    def hold(self, paths: Sequence[str], count: int, *, busy: float = 0.0) -> Held:
        """Open `count` connections and hold them. `busy` is as in `Load.hold`."""
        crossing = self.crossing
        targets = crossing.targets(paths, SERVICES, ENDPOINTS)
        share = -(-count // self._processes)
        started = [
            crossing.load.hold(crossing.client, targets, share, busy=busy) for _ in range(self._processes)
        ]
        return Held([holder for holder, _ in started], [opened for _, opened in started])

    def end(self, held: Held) -> Reports:
        """Have a last exchange on each connection, end the holders and return their reports.

        The reports count failures to open connections again.
        """
        timeout = 120.0 + held.attempts / 1000
        return [self.crossing.load.end_churn(holder, timeout=timeout) for holder in held.holders]

    def open(self, paths: Sequence[str], seconds: float, seed: int = 0) -> Reports:
        """Open as many connections as possible, each with an exchange of a byte. Raises LoadFailed."""
        crossing = self.crossing
        targets = crossing.targets(paths, SERVICES, ENDPOINTS)
        running = [
            crossing.load.start_churn(
                crossing.client, targets, seconds=seconds, seed=seed * _CLIENTS + number
            )
            for number in range(_CLIENTS)
        ]
        reports = [
            crossing.load.end_churn(client, terminate=False, timeout=seconds + 60) for client in running
        ]
        if not all(report["attempts"] for report in reports):
            raise LoadFailed("a client attempted no connection")
        return reports


def processes(held: int) -> int:
    """Return the number of processes needed to hold so many connections, given RLIMIT_NOFILE."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, math.ceil(held / (files - _OTHER_FILES)))


def per_second(reports: Reports) -> float:
    return float(sum(report["attempts"] / report["seconds"] for report in reports))


def note_opened(samples: Samples, mode: str, path: str, turn: int, reports: Reports) -> None:
    """Add the metrics of new connections.

    - made_per_s: connections per second; new_slowest_us: the slowest one;
    - new_failed: failed ones of all attempts; new_sent_twice: those with a retransmission.
    """
    attempts = sum(report["attempts"] for report in reports)
    samples.add(mode, path, "made_per_s", turn, [per_second(reports)])
    samples.add(mode, path, "new_slowest_us", turn, [max(report["slowest_us"] for report in reports)])
    samples.count(mode, path, "new_failed", sum(report["failed"] for report in reports), attempts)
    samples.count(mode, path, "new_sent_twice", sum(report["slow"] for report in reports), attempts)


def report_errors(progress: Progress, mode: str, reports: Reports) -> None:
    for report in reports:
        if report["errors"]:
            progress(f"{mode}: errors: {report['errors']}")
