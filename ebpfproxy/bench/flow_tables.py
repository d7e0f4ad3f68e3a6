"""The flow entries of a node, in ebpfproxy's maps and in netfilter's conntrack, and their limits."""

import math
import re
from collections.abc import Mapping

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.bench import agent_use, report
from ebpfproxy.errors import ConfigError, NotFound
from ebpfproxy.lab import Lab, Netns

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
"""Seconds for which reset flows may stay in ebpfproxy's flow table: their timeout plus a sweep."""
_CLOSED = 10
"""Seconds for which netfilter tracks reset connections: nf_conntrack_tcp_timeout_close."""


def flows_max(held: int, rate: float, seconds: float) -> int:
    """Return the size that the flow table needs for established flows: their number plus one half.

    >>> flows_max(200_000, 1000.0, 60.0), flows_max(0, 1000.0, 1000.0), flows_max(0, 0.0, 1.0)
    (390000, 90000, 65536)
    """
    recent = rate * min(seconds, _FINISHED)
    return max(65536, math.ceil((held + recent) * 1.5))


def require_tracking(mode: str, limit: int | None, held: int, rate: float, seconds: float) -> None:
    """Raise ConfigError if a kernel that tracks at most `limit` connections would drop some.

    `seconds`: for which connections are opened, on all paths of all modes together. The limit applies to all network namespaces together, so that a lab cannot have its own.
    """
    recent = math.ceil(1.5 * rate * min(seconds, _CLOSED))
    if limit is not None and held + recent > limit:
        fewer = f"give --held={limit - recent}, or " if limit > recent else ""
        raise ConfigError(
            f"nf_conntrack_max is too small for mode {mode}: the kernel tracks at most {limit} connections, "
            f"but the benchmark needs {held} held and {recent} recently closed ones",
            f"{fewer}run sysctl -w net.netfilter.nf_conntrack_max={held + recent}",
        )


def tracked(namespace: Netns) -> int:
    """Return the number of connections that the kernel tracks in the network namespace."""
    return namespace.call(lambda: report.conntrack("count")) or 0


def entries(lab: Lab) -> int:
    """Return the number of flow entries on the lab's first node: in ebpfproxy's maps and tracked ones."""
    return _map_entries(lab) + tracked(lab.node)


def _map_entries(lab: Lab) -> int:
    try:
        maps = Maps(Pins(lab.bpffs).hooked_in() / "maps")
    except NotFound:
        return 0
    try:
        return sum(len(keys) // abi.FLOW_KEY.size for name in _MAPS for keys, _ in maps[name].batches(65536))
    finally:
        maps.close()


def shown_events(node: Netns) -> Mapping[str, float]:
    """Return the relevant datapath events of the agent's metrics; empty if the agent has none."""
    return {
        reason: count for reason, count in events(node.call(agent_use.scrape)).items() if reason in _SHOWN
    }


def events(metrics: str) -> dict[str, float]:
    """Return the datapath events in an agent's metrics, by reason.

    >>> events('ebpfproxy_datapath_events_total{reason="flows_full"} 12.0')
    {'flows_full': 12.0}
    """
    return {reason: float(count) for reason, count in _EVENT.findall(metrics)}
