"""A UDP socket at one address of a frontend, and the flows of its clients."""

import contextlib
import socket
from functools import partial

from ebpfproxy.backends.userspace.entries import Listening
from ebpfproxy.backends.userspace.relay import admission as admissions
from ebpfproxy.backends.userspace.relay import listening
from ebpfproxy.backends.userspace.relay.admission import Admission, Client
from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.backends.userspace.relay.counts import Event
from ebpfproxy.backends.userspace.relay.flows import Flow
from ebpfproxy.backends.userspace.relay.target import Target
from ebpfproxy.backends.userspace.relay.workload import Workload

_DATAGRAM = memoryview(bytearray(1 << 16))
_ANCILLARY = 128
_BURST = 64  # datagrams before others get their turn
_ATTEMPTS = 2  # endpoints for one datagram


class UdpListener:
    """Receives datagrams until `close`."""

    def __init__(self, work: Workload, address: Target, frontend: Target) -> None:
        """As in `TcpListener`."""
        self._work = work
        self._address, self._frontend = address, frontend
        self._sock: socket.socket | None = None
        self._flows: dict[tuple[str, int], Flow] = {}

    def open(self, entry: Listening, service: Balancer) -> None:
        """Receive; if it does already, use these entries from now on. Raises OSError.

        Flows to endpoints that the ServicePort no longer has end, so that their clients get another one.
        """
        self._entry, self._service = entry, service
        self._admission = Admission(entry, service)
        relays = self._work.start.relays
        if self._sock and self.is_open():
            listening.admit(self._sock, self._admission)
            listening.distribute(self._sock, service, relays)
            for flow in [each for each in self._flows.values() if not service.is_listed(each.target)]:
                self._work.flows.end(flow)
            return
        self.close()
        sock = listening.bound(self._address, socket.SOCK_DGRAM, self._admission)
        try:
            listening.distribute(sock, service, relays)
            admissions.request_interface(sock)
        except BaseException:
            sock.close()
            raise
        self._sock = sock
        self._work.loop.add_reader(sock, self._receive)

    def is_open(self) -> bool:
        """Return whether the socket is bound. Another program may have destroyed it (`ss --kill`)."""
        return bool(self._sock and self._sock.getsockname()[1])

    def close(self) -> None:
        """Stop receiving. All flows end, since their replies need this socket."""
        for flow in list(self._flows.values()):
            self._work.flows.end(flow)
        if self._sock:
            self._work.loop.remove_reader(self._sock)
            self._sock.close()
            self._sock = None

    def _receive(self) -> None:
        for _ in range(_BURST):
            sock = self._sock
            if sock is None:
                return
            try:
                if self._admission.needs_interface:
                    count, ancillary, _, peer = sock.recvmsg_into([_DATAGRAM], _ANCILLARY)
                    interface = admissions.interface_in(ancillary)
                else:
                    count, peer = sock.recvfrom_into(_DATAGRAM)
                    interface = 0
            except OSError:  # nothing is left, or an ICMP error for a reply
                return
            self._relay(_DATAGRAM[:count], peer, interface)

    def _relay(self, datagram: memoryview, peer: tuple[str, int], interface: int) -> None:
        """Send a datagram to the endpoint of its flow; if that rejected a previous one, to another one."""
        flow = self._flows.get(peer)
        failed = None
        for _ in range(_ATTEMPTS):
            if flow is None:
                flow = self._new_flow(peer, interface, failed)
            if flow is None:
                break
            try:
                flow.send(datagram)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                self._work.flows.end(flow)
                failed = flow.target
                flow = None
                continue
            self._work.flows.touch(flow)
            return
        self._work.counts[Event.DATAGRAMS_DROPPED] += 1

    def _new_flow(self, peer: tuple[str, int], interface: int, failed: Target | None) -> Flow | None:
        admission = self._admission
        local: bool | None = self._entry.outside_local
        if admission.needs_interface:
            local = admission.scope(Client(peer[0], interface))
        chosen = None
        if local is not None:
            chosen = self._service.choose(peer[0], local, self._work.loop.time(), failed)
        if chosen is None:
            return None
        client = Target(self._address.number, peer[0], peer[1])
        info = (self._entry.service.service, str(client), str(self._frontend))
        try:
            flow = Flow(chosen, info, partial(self._reply, peer), partial(self._flows.pop, peer, None))
        except OSError:
            return None
        self._flows[peer] = flow
        self._work.flows.add(flow)
        return flow

    def _reply(self, peer: tuple[str, int], datagram: memoryview) -> None:
        with contextlib.suppress(OSError):  # a full buffer, or an ICMP error: datagrams may be lost
            if self._sock:
                self._sock.sendto(datagram, peer)
