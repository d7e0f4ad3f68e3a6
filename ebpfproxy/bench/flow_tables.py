"""What a node keeps of flows: entries of ours, or tracked connections, and how many there may be."""

import math
import os
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.bench import report
from ebpfproxy.errors import ConfigError, NotFound
from ebpfproxy.lab import Agent, Lab, Netns

_EVENT = re.compile(r'^ebpfproxy_datapath_events_total\{reason="(\w+)"\} ([0-9.e+]+)$', re.MULTILINE)
_SHOWN = (
    "packet_new",
    "icmp_limited",
    "flows_full",
    "flows_busy",
    "ports_exhausted",
    "port_changed",
    "inconsistent",
)
_MAPS = "flows", "replies"
_FINISHED = 60
"""Seconds for which flows that were reset may still be in our table: their time-out, and a sweep."""
_CLOSED = 10
"""Seconds for which connections that were reset are tracked: nf_conntrack_tcp_timeout_close."""


def flows_max(held: int, rate: float, seconds: float) -> int:
    """Established flows that our flow table needs room for, and a half more.

    >>> flows_max(200_000, 1000.0, 60.0), flows_max(0, 1000.0, 1000.0), flows_max(0, 0.0, 1.0)
    (390000, 90000, 65536)
    """
    recent = rate * min(seconds, _FINISHED)
    return max(65536, math.ceil((held + recent) * 1.5))


def require_tracking(mode: str, limit: int | None, held: int, rate: float) -> None:
    """Raises ConfigError where a kernel that tracks no more than `limit` connections would drop some of them.

    It is the same limit in all network namespaces, so a lab cannot have its own.
    """
    recent = math.ceil(1.5 * rate * _CLOSED)
    if limit is not None and held + recent > limit:
        fewer = f"--held={limit - recent}, or " if limit > recent else ""
        raise ConfigError(
            f"mode {mode} has connections tracked, and the kernel tracks {limit} at the most: {held} held "
            f"and {recent} that were just closed are more",
            f"{fewer}sysctl -w net.netfilter.nf_conntrack_max={held + recent}",
        )


def tracked(place: Netns) -> int:
    """How many connections the kernel tracks there."""
    return place.call(lambda: report.conntrack("count")) or 0


def entries(lab: Lab) -> int:
    """Of flows, on the lab's first node: those in our table, and tracked connections."""
    return _ours(lab) + tracked(lab.node)


def _ours(lab: Lab) -> int:
    try:
        maps = Maps(Pins(lab.bpffs).hooked_in() / "maps")
    except NotFound:
        return 0
    try:
        return sum(len(keys) // abi.FLOW_KEY.size for name in _MAPS for keys, _ in maps[name].batches(65536))
    finally:
        maps.close()


def shown_events(node: Netns) -> Mapping[str, float]:
    """What programs on the node did, by its agent's metrics; nothing where there are none."""
    return {reason: count for reason, count in events(node.call(_scrape)).items() if reason in _SHOWN}


def _scrape() -> str:
    """Runs on the node."""
    with urllib.request.urlopen("http://127.0.0.1:10249/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def events(metrics: str) -> dict[str, float]:
    """What the programs did, by why, of an agent's metrics.

    >>> events('ebpfproxy_datapath_events_total{reason="flows_full"} 12.0')
    {'flows_full': 12.0}
    """
    return {reason: float(count) for reason, count in _EVENT.findall(metrics)}


def cpu_seconds(agent: Agent) -> float:
    """That it took so far: proc_pid_stat(5), fields utime and stime."""
    fields = Path(f"/proc/{agent.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
