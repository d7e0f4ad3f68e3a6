"""The settings of mode userspace."""

import dataclasses
import os


@dataclasses.dataclass(frozen=True, slots=True)
class UserspaceSettings:
    """What all relays need.

    - `relays`: their number.
    - Timeouts in seconds: of established TCP connections, of those that one side has closed, of UDP flows
      whose last datagram was a reply, and of those that wait for a reply.
    - `udp_flows`, `affinity_clients`: the largest numbers of UDP flows and of clients with affinity, in each
      relay.
    """

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
