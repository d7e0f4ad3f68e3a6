"""What all parts of a relay share."""

import asyncio
from collections import Counter

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.messages import Start
from ebpfproxy.backends.userspace.relay.balancer import Affinity
from ebpfproxy.backends.userspace.relay.target import Target


class Workload:
    """Event loop, settings, counters by `Event`, and the table of clients."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: Start) -> None:
        self.loop = loop
        self.start = start
        self.counts: Counter[str] = Counter()
        self.affinity = Affinity(start.settings.affinity_clients)


class Relayed:
    """A TCP connection or UDP flow of a client.

    `service`: as in `Balanced`. `target`: its endpoint. `used`: when it was last active, in the time of the
    event loop.
    """

    __slots__ = ("client", "frontend", "service", "target", "used")
    protocol = ""

    client: Target
    frontend: Target
    service: str
    target: Target
    used: float

    def is_between(self, client: str, frontend: str) -> bool:
        """Return whether these are its ends for the client, as texts with ports."""
        return (str(self.client), str(self.frontend)) == (client, frontend)

    def shown(self, now: float) -> messages.Connection:
        """Return it for readers."""
        ends = str(self.client), str(self.frontend), str(self.target)
        return messages.Connection(self.service, self.protocol, *ends, round(now - self.used, 1))
