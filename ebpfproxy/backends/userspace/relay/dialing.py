"""Connects to an endpoint for an accepted connection; tries other endpoints if one does not accept it."""

import errno
import socket
from asyncio import TimerHandle

from ebpfproxy.backends.userspace.relay.balancer import Balancer
from ebpfproxy.backends.userspace.relay.connection import Connection, Ends, Info, reset
from ebpfproxy.backends.userspace.relay.counts import Event
from ebpfproxy.backends.userspace.relay.target import Target
from ebpfproxy.backends.userspace.relay.workload import Workload

TIMEOUTS = (0.25, 0.5, 1.0, 2.0)
"""How long each attempt may take, in seconds (endpointDialTimeouts in pkg/proxy/userspace/proxysocket.go of
Kubernetes 1.25). Each attempt is for another endpoint, if there are several."""


class Dialing:
    """The attempts for one client. It ends with a `Connection`, or the client's connection is reset."""

    __slots__ = (
        "_attempt",
        "_balancer",
        "_client",
        "_ends",
        "_local",
        "_server",
        "_service",
        "_target",
        "_timer",
        "_work",
    )

    def __init__(
        self, work: Workload, client: socket.socket, ends: Ends, service: str, balancer: Balancer
    ) -> None:
        self._work = work
        self._client, self._ends = client, ends
        self._service, self._balancer = service, balancer
        self._attempt = 0
        self._target: Target | None = None  # of the last attempt

    def start(self, local: bool) -> None:
        """Begin with an endpoint of scope Local or Cluster."""
        self._local = local
        self._work.dialing[self._client] = self._ends
        for each in range(len(TIMEOUTS)):
            self._attempt = each
            if self._dial():
                return
        self._fail()

    def _dial(self) -> bool:
        """Begin to connect to the next endpoint; return whether the attempt is in progress or done."""
        work = self._work
        chosen = self._balancer.choose(self._ends.client.address, self._local, work.loop.time(), self._target)
        if chosen is None:
            return False
        work.counts[Event.RETRIED] += self._target is not None
        self._target = chosen
        try:
            self._server = socket.socket(chosen.number, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:  # no file descriptors are left
            return False
        number = self._server.connect_ex(chosen[1:])
        if number not in (0, errno.EINPROGRESS):
            self._server.close()
            return False
        self._balancer.began(chosen)
        if number:
            self._timer: TimerHandle = work.loop.call_later(TIMEOUTS[self._attempt], self._give_up)
            work.loop.add_writer(self._server, self._finished)
        else:
            self._connected()
        return True

    def _finished(self) -> None:
        number = self._server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._give_up()
            return
        self._end_attempt()
        self._connected()

    def _end_attempt(self) -> None:
        self._timer.cancel()
        self._work.loop.remove_writer(self._server)

    def _give_up(self) -> None:
        """The attempt failed, or takes too long."""
        self._end_attempt()
        self._abandon()
        while self._attempt + 1 < len(TIMEOUTS):
            self._attempt += 1
            if self._dial():
                return
        self._fail()

    def _abandon(self) -> None:
        """Close the socket to the endpoint."""
        assert self._target
        self._server.close()
        self._balancer.ended(self._target)

    def _fail(self) -> None:
        self._work.counts[Event.FAILED] += 1
        reset(self._client)
        self._work.dialing.pop(self._client, None)

    def _connected(self) -> None:
        client, server, work = self._client, self._server, self._work
        try:
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:  # the client has reset the connection meanwhile
            self._abandon()
            self._fail()
            return
        work.counts[Event.CONNECTED] += 1
        assert self._target
        info = Info(self._service, self._ends, self._target, self._balancer)
        connection = Connection(work.loop, client, server, info, work.ended)
        work.add(connection)
        work.dialing.pop(client, None)
        connection.start()
