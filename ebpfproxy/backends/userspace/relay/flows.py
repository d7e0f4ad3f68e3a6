"""The UDP flows of a relay: one connected socket for each client and frontend, with an idle timeout."""

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.messages import Start
from ebpfproxy.backends.userspace.relay.counts import Counts, Event
from ebpfproxy.backends.userspace.relay.target import Target

_DATAGRAM = memoryview(bytearray(1 << 16))
_BURST = 32  # datagrams of one flow before others get their turn
_SHORTEST_SWEEP, _LONGEST_SWEEP = 0.05, 1.0


class Flow:
    """The datagrams of one client to one frontend. `reply(datagram)` sends one to the client."""

    __slots__ = ("_reply", "_sock", "ended", "info", "replied", "target", "used")

    def __init__(
        self,
        target: Target,
        info: tuple[str, str, str],
        reply: Callable[[memoryview], object],
        ended: Callable[[], object],
    ) -> None:
        """Open a socket to the endpoint. Raises OSError.

        `info`: the ServicePort, the client and the frontend, for readers. `ended` is called when the flow
        has ended.
        """
        self.target = target
        self.info = info
        self.replied = False
        self.used = 0.0
        self.ended = ended
        self._reply = reply
        self._sock = socket.socket(target.number, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._sock.connect(target[1:])
        except OSError:
            self._sock.close()
            raise

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def send(self, datagram: memoryview) -> None:
        """Send a datagram of the client to the endpoint. Raises OSError, for example if the endpoint
        rejected a previous one.
        """
        self.replied = False
        self._sock.send(datagram)

    def receive(self) -> None:
        """Relay what the endpoint has sent. Raises OSError if it rejected a datagram."""
        for _ in range(_BURST):
            try:
                count = self._sock.recv_into(_DATAGRAM)
            except (BlockingIOError, InterruptedError):
                return
            self.replied = True
            self._reply(_DATAGRAM[:count])


class Flows:
    """All flows, the least recently active one first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: Start, counts: Counts) -> None:
        self._loop = loop
        self._start = start
        self._counts = counts
        self._flows: OrderedDict[Flow, None] = OrderedDict()
        self._sweeps = False

    def __len__(self) -> int:
        return len(self._flows)

    def add(self, flow: Flow) -> None:
        """Begin to relay replies. If there are too many flows, the least recently active one ends."""
        if len(self._flows) >= self._start.udp_flows:
            self.end(next(iter(self._flows)))
            self._counts[Event.FLOWS_EVICTED] += 1
        self._counts[Event.FLOWS] += 1
        self._flows[flow] = None
        self.touch(flow)
        self._loop.add_reader(flow.sock, self._receive, flow)
        if not self._sweeps:
            self._sweeps = True
            self._loop.call_later(self._interval(), self._sweep)

    def touch(self, flow: Flow) -> None:
        """The flow is active now."""
        flow.used = self._loop.time()
        self._flows.move_to_end(flow)

    def end(self, flow: Flow) -> None:
        """End a flow. Does nothing if it has ended."""
        if flow in self._flows:
            del self._flows[flow]
            self._loop.remove_reader(flow.sock)
            flow.sock.close()
            flow.ended()

    def listed(self, most: int) -> list[messages.Connection]:
        """Return up to `most` flows."""
        now = self._loop.time()
        return [
            messages.Connection(service, "UDP", client, frontend, str(flow.target), round(now - flow.used, 1))
            for _, flow in zip(range(most), self._flows, strict=False)
            for service, client, frontend in (flow.info,)
        ]

    def _receive(self, flow: Flow) -> None:
        try:
            flow.receive()
        except OSError:
            self.end(flow)
        else:
            self.touch(flow)

    def _interval(self) -> float:
        return min(max(self._start.udp_timeout / 4, _SHORTEST_SWEEP), _LONGEST_SWEEP)

    def _sweep(self) -> None:
        now = self._loop.time()
        shortest = min(self._start.udp_timeout, self._start.udp_unreplied_timeout)
        idle = []
        for flow in self._flows:
            age = now - flow.used
            if age <= shortest:
                break
            if age > (self._start.udp_timeout if flow.replied else self._start.udp_unreplied_timeout):
                idle.append(flow)
        for flow in idle:
            self.end(flow)
        self._sweeps = bool(self._flows)
        if self._sweeps:
            self._loop.call_later(self._interval(), self._sweep)
