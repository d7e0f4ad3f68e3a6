"""What all parts of a relay share: event loop, counters, tables of limited size, open connections."""

import asyncio
import socket
from collections import Counter
from collections.abc import Iterator

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.messages import Find, Start
from ebpfproxy.backends.userspace.relay.affinity import Affinity
from ebpfproxy.backends.userspace.relay.connection import Connection, Ends
from ebpfproxy.backends.userspace.relay.counts import Counts, Event
from ebpfproxy.backends.userspace.relay.flows import Flows

_SWEEP = 30.0  # seconds between two searches for idle connections


class Workload:
    """The state of a relay that does not depend on its entries."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: Start) -> None:
        self.loop = loop
        self.start = start
        self.counts: Counts = Counter()
        self.affinity = Affinity(start.affinity_clients)
        self.flows = Flows(loop, start, self.counts)
        self.dialing: dict[socket.socket, Ends] = {}
        """The sockets of clients for which no endpoint has accepted a connection yet."""
        self._connections: set[Connection] = set()
        loop.call_later(_SWEEP, self._sweep)

    def add(self, connection: Connection) -> None:
        """Count a connection as open, until `ended`."""
        self._connections.add(connection)

    def ended(self, connection: Connection, was_reset: bool) -> None:
        """An open connection has ended."""
        self._connections.discard(connection)
        connection.info.balancer.ended(connection.info.target)
        self.counts[Event.RESET] += was_reset

    def counters(self) -> messages.Counters:
        """Return the counters, and what is open."""
        return messages.Counters(len(self._connections), len(self.flows), dict(self.counts))

    def listed(self, most: int) -> list[messages.Connection]:
        """Return up to `most` connections and flows, connections first."""
        found = [*self._listed_connections(most)]
        return found + self.flows.listed(most - len(found))

    def found(self, wanted: Find) -> messages.Connections:
        """Return the connection or flow that a request describes. Empty without one."""
        ends = wanted.client, wanted.frontend
        if wanted.protocol == "UDP":
            flows = self.flows.listed(len(self.flows))
            return messages.Connections([each for each in flows if (each.client, each.frontend) == ends])
        shown = (each for each in self._connections if tuple(map(str, each.info.ends)) == ends)
        return messages.Connections(
            list(map(self._shown, shown)),
            dialing=any(tuple(map(str, each)) == ends for each in self.dialing.values()),
        )

    def _listed_connections(self, most: int) -> Iterator[messages.Connection]:
        for _, each in zip(range(most), self._connections, strict=False):
            yield self._shown(each)

    def _shown(self, connection: Connection) -> messages.Connection:
        info, idle = connection.info, round(self.loop.time() - connection.used, 1)
        client, frontend = map(str, info.ends)
        return messages.Connection(info.service, "TCP", client, frontend, str(info.target), idle)

    def _sweep(self) -> None:
        """End connections on which nothing arrived for too long."""
        now = self.loop.time()
        idle = [each for each in self._connections if now - each.used > self._timeout(each)]
        for each in idle:
            each.reset()
        self.counts[Event.IDLE] += len(idle)
        self.loop.call_later(_SWEEP, self._sweep)

    def _timeout(self, connection: Connection) -> float:
        return self.start.tcp_closing_timeout if connection.is_half_closed else self.start.tcp_timeout
