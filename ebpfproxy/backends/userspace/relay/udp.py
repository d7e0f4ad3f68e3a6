"""UDP: a socket at one address of a frontend, and the flows of its clients.

A flow is a connected socket for each client and frontend, with an idle timeout.
"""

import contextlib
import socket
from collections import OrderedDict
from itertools import islice

from ebpfproxy.backends.userspace import messages
from ebpfproxy.backends.userspace.entries import Listening
from ebpfproxy.backends.userspace.messages import Event
from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.backends.userspace.relay.listening import Listener, interface_in, request_interface
from ebpfproxy.backends.userspace.relay.workload import Relayed, Target, Workload

_DATAGRAM = memoryview(bytearray(1 << 16))
_ANCILLARY = 128
_BURST, _BURST_OF_FLOW = 64, 32  # datagrams before others get their turn
_ATTEMPTS = 2  # endpoints for one datagram
_SHORTEST_SWEEP, _LONGEST_SWEEP = 0.05, 1.0


class Flow(Relayed):
    """The datagrams of one client to one frontend. `replied`: whether the last one was a reply."""

    __slots__ = ("listener", "peer", "replied", "sock")
    protocol = "UDP"

    def __init__(self, listener: "UdpListener", peer: tuple[str, int], target: Target) -> None:
        """Open a socket to the endpoint. Raises OSError."""
        self.listener, self.peer, self.target = listener, peer, target
        self.replied = False
        self.sock = socket.socket(target.number, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self.sock.connect(target[1:])
        except OSError:
            self.sock.close()
            raise

    def send(self, datagram: memoryview) -> None:
        """Send a datagram of the client to the endpoint. Raises OSError, for example if the endpoint
        rejected a previous one.
        """
        self.replied = False
        self.sock.send(datagram)

    def receive(self) -> None:
        """Relay what the endpoint has sent. Raises OSError if it rejected a datagram."""
        for _ in range(_BURST_OF_FLOW):
            try:
                count = self.sock.recv_into(_DATAGRAM)
            except BlockingIOError:
                return
            self.replied = True
            self.listener.reply(self.peer, _DATAGRAM[:count])


class Flows:
    """All flows, the least recently active one first."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self._settings = work.start.settings
        self._flows: OrderedDict[Flow, None] = OrderedDict()
        self._sweeps = False

    def count(self) -> int:
        """Return how many there are."""
        return len(self._flows)

    def add(self, flow: Flow) -> None:
        """Begin to relay replies. If there are too many flows, the least recently active one ends."""
        if len(self._flows) >= self._settings.udp_flows:
            self.end(next(iter(self._flows)))
            self.work.counts[Event.FLOWS_EVICTED] += 1
        self.work.counts[Event.FLOWS] += 1
        self._flows[flow] = None
        self.touch(flow)
        self.work.loop.add_reader(flow.sock, self._receive, flow)
        if not self._sweeps:
            self._sweeps = True
            self.work.loop.call_later(self._interval(), self._sweep)

    def touch(self, flow: Flow) -> None:
        """The flow is active now."""
        flow.used = self.work.loop.time()
        self._flows.move_to_end(flow)

    def end(self, flow: Flow) -> None:
        """End a flow. Does nothing if it has ended."""
        if flow in self._flows:
            del self._flows[flow]
            self.work.loop.remove_reader(flow.sock)
            flow.sock.close()
            flow.listener.flows.pop(flow.peer, None)

    def listed(self, most: int) -> list[messages.Connection]:
        """Return up to `most` flows."""
        now = self.work.loop.time()
        return [each.shown(now) for each in islice(self._flows, most)]

    def found(self, client: str, frontend: str) -> messages.Connections:
        """Return the flow with these ends, as texts with ports. Empty without one."""
        now = self.work.loop.time()
        return messages.Connections(
            [each.shown(now) for each in self._flows if each.is_between(client, frontend)]
        )

    def _receive(self, flow: Flow) -> None:
        try:
            flow.receive()
        except OSError:
            self.end(flow)
        else:
            self.touch(flow)

    def _interval(self) -> float:
        return min(max(self._settings.udp_timeout / 4, _SHORTEST_SWEEP), _LONGEST_SWEEP)

    def _sweep(self) -> None:
        now, settings = self.work.loop.time(), self._settings
        shortest = min(settings.udp_timeout, settings.udp_unreplied_timeout)
        idle = []
        for flow in self._flows:
            age = now - flow.used
            if age <= shortest:
                break
            if age > (settings.udp_timeout if flow.replied else settings.udp_unreplied_timeout):
                idle.append(flow)
        for flow in idle:
            self.end(flow)
        self._sweeps = bool(self._flows)
        if self._sweeps:
            self.work.loop.call_later(self._interval(), self._sweep)


class UdpListener(Listener):
    """Receives datagrams. All flows end at `close`, since their replies need its socket.

    `flows`: by the address and port of the client.
    """

    kind = socket.SOCK_DGRAM

    def __init__(self, flows: Flows, address: Target, frontend: Target) -> None:
        super().__init__(flows.work, address, frontend)
        self._all = flows
        self.flows: dict[tuple[str, int], Flow] = {}

    def open(self, entry: Listening, service: Balancer) -> None:
        """As in `Listener`. Flows to endpoints that the ServicePort no longer has end, so that their clients
        get another one.
        """
        super().open(entry, service)
        for flow in [each for each in self.flows.values() if not service.is_listed(each.target)]:
            self._all.end(flow)

    def is_open(self) -> bool:
        return bool(self._sock and self._sock.getsockname()[1])

    def _prepare(self, sock: socket.socket) -> None:
        request_interface(sock)

    def close(self) -> None:
        for flow in list(self.flows.values()):
            self._all.end(flow)
        super().close()

    def _receive(self) -> None:
        for _ in range(_BURST):
            sock = self._sock
            if sock is None:
                return
            try:
                if self._admission.needs_interface:
                    count, ancillary, _, peer = sock.recvmsg_into([_DATAGRAM], _ANCILLARY)
                    interface = interface_in(ancillary)
                else:
                    count, peer = sock.recvfrom_into(_DATAGRAM)
                    interface = 0
            except OSError:  # nothing is left, or an ICMP error for a reply
                return
            self._relay(_DATAGRAM[:count], peer, interface)

    def _relay(self, datagram: memoryview, peer: tuple[str, int], interface: int) -> None:
        """Send a datagram to the endpoint of its flow; if that rejected a previous one, to another one."""
        flow = self.flows.get(peer)
        failed = None
        for _ in range(_ATTEMPTS):
            flow = flow or self._new_flow(peer, interface, failed)
            if flow is None:
                break
            try:
                flow.send(datagram)
            except BlockingIOError:
                break
            except OSError:
                self._all.end(flow)
                failed = flow.target
                flow = None
                continue
            self._all.touch(flow)
            return
        self._work.counts[Event.DATAGRAMS_DROPPED] += 1

    def _new_flow(self, peer: tuple[str, int], interface: int, failed: Target | None) -> Flow | None:
        local = self._scope(peer[0], lambda: interface)
        chosen = None
        if local is not None:
            chosen = self._service.choose(peer[0], local, self._work.loop.time(), failed)
        if chosen is None:
            return None
        try:
            flow = Flow(self, peer, chosen)
        except OSError:
            return None
        flow.service = self._entry.service.service
        flow.client, flow.frontend = Target(self._address.number, peer[0], peer[1]), self._frontend
        self.flows[peer] = flow
        self._all.add(flow)
        return flow

    def reply(self, peer: tuple[str, int], datagram: memoryview) -> None:
        """Send a datagram of an endpoint to a client."""
        with contextlib.suppress(OSError):  # a full buffer, or an ICMP error: datagrams may be lost
            if self._sock:
                self._sock.sendto(datagram, peer)
