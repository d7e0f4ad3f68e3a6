"""The settings of mode userspace."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True, slots=True)
class UserspaceSettings:
    """The number of relays, and limits. Timeouts are in seconds; see `messages.Start`."""

    relays: int = 1
    tcp_timeout: float = 24 * 3600.0
    tcp_closing_timeout: float = 3600.0
    udp_timeout: float = 0.25
    udp_unreplied_timeout: float = 30.0
    udp_flows: int = 65536
    affinity_clients: int = 65536


def one_per_cpu() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
