"""Small processes in a lab: servers that tell who they are and whom they see, and clients that dial by the
list, all of it at once.

Silence is never a matter of time: that nobody answers a datagram, or a few SYNs, is known by what was sent
after them and answered, see `_Fence`.
"""

import collections
import contextlib
import errno
import itertools
import multiprocessing
import os
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ebpfproxy.lab import Netns, sockets
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import KINDS, REFUSED, SILENT, TCP, UDP, family_of
from tests.kernel.differential import places

BROKEN = "broken"
"""A connected UDP socket that was ended."""

_QUESTION = b"?"
_PORTS = [port for port in range(1024, 1 << 16) if port not in places.PORTS]
_FORGOTTEN = 1.1 * places.REMEMBERED
_ABORT = struct.pack("=ii", 1, 0)  # SO_LINGER: a reset, so that nothing waits for the port
_ATTEMPTS = 3  # of SYNs, beside the first one
_MOST_ATTEMPTS = 100  # TCP_SYNCNT: it is not for the kernel to give up
_SYN_SENT = 2  # TCP_SYN_SENT
_PAUSE = 0.01  # seconds, in which SYNs are sent
_LEISURE = 0.1
"""Seconds between two questions of one kept socket. To end its flow takes workers of the kernel that share
its processor, and do not always get their part of that (EEVDF with autogroup, seen on 6.18: a minute without
a turn beside processes that wake each other without a pause)."""
_LAPS = 3
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_ENDED = (errno.ECONNABORTED, errno.EDESTADDRREQ, errno.ENOTCONN)
_PATIENCE = 60.0  # for what has to come, on however busy a machine
_STALE = 75.0  # until a thread of the backend has ended a stale flow, which it tries again after 30 seconds


# Servers


def serve(
    place: Netns, name: str, addresses: Sequence[str], ports: Mapping[Protocol, Sequence[int]], processor: int
) -> None:
    """Answer on each of these: whoever connects, and every datagram, is told "name:port client"."""

    def child(ready: int) -> None:
        os.sched_setaffinity(0, {processor})
        with selectors.DefaultSelector() as selector:
            for address, (protocol, numbers) in itertools.product(addresses, ports.items()):
                for port in numbers:
                    listener = sockets.listening(protocol, port, address)
                    listener.setblocking(False)
                    selector.register(listener, selectors.EVENT_READ, (protocol, f"{name}:{port} "))
            os.write(ready, b"!")
            os.close(ready)
            while True:
                for key, _ in selector.select():
                    _answer_all(key.fileobj, *key.data)

    place.start_until_ready(child)


def _answer_all(listener: object, protocol: Protocol, who: str) -> None:
    """All that are waiting, so that nobody waits longer than who comes next to another port."""
    assert isinstance(listener, socket.socket)
    while True:
        try:
            _answer(listener, protocol, who)
        except BlockingIOError:
            return
        except OSError:
            continue  # the client's business


def _answer(listener: socket.socket, protocol: Protocol, who: str) -> None:
    if protocol is UDP:
        _, peer = listener.recvfrom(64)
        listener.sendto((who + peer[0].removeprefix("::ffff:")).encode(), peer)
        return
    accepted, peer = listener.accept()
    with accepted:
        accepted.sendall((who + peer[0].removeprefix("::ffff:")).encode())


# Clients


class Dial(NamedTuple):
    protocol: Protocol
    address: str
    port: int


class Kept(NamedTuple):
    """What a socket that was kept may meet: one of `outcomes`, servers without what they see; where not
    `eventually`, at once."""

    dial: Dial
    outcomes: frozenset[str]
    eventually: bool


class Dialer:
    """A client process in a place. Its methods begin something; `result` awaits it."""

    def __init__(self, place: Netns, fence: Iterable[tuple[str, int]], processor: int) -> None:
        """`fence`: each address and UDP port of the servers."""
        self._place = place
        self._pipe, theirs = multiprocessing.Pipe()

        def child(ready: int) -> None:
            os.sched_setaffinity(0, {processor})
            ports = _Ports()
            client = _Client(_Fence(fence, ports), ports)
            os.write(ready, b"!")
            while True:
                name, arguments = theirs.recv()
                theirs.send(getattr(client, name)(*arguments))

        self._child = place.start_until_ready(child)
        theirs.close()

    def dial(self, rounds: Sequence[Sequence[Dial]]) -> None:
        """Each round after the one before. For each dial the server's answer, REFUSED or SILENT."""
        self._pipe.send(("dial", (rounds,)))

    def keep(self, dials: Sequence[Dial]) -> None:
        """Have one UDP socket for each, in place of all that were kept before; else as a round of `dial`."""
        self._pipe.send(("keep", (dials,)))

    def go_on(self, wanted: Sequence[Kept]) -> None:
        """Ask again by the sockets that are kept. For each its last outcome, of which BROKEN may be one."""
        self._pipe.send(("go_on", (wanted,)))

    def result(self) -> list[str]:
        """Of `dial` the outcomes of all rounds in one list."""
        try:
            answer: list[str] = self._pipe.recv()
        except EOFError:
            self._child.result()
            raise
        return answer


class _Fence:
    """A question to each socket of the servers, by no Service.

    All that runs in a lab, and so all its packets, is on one processor, which takes them in the order of
    their coming, one device further each time; and a socket is read in that order, while nothing is known of
    two. So when the answers are here, what was sent before has been answered, if anybody answers it: by a
    server, or by the kernel, wherever it got to. There is more than one lap since a way by a Service may have
    more devices, there and back.
    """

    def __init__(self, servers: Iterable[tuple[str, int]], ports: "_Ports") -> None:
        self._sockets = []
        for address, port in servers:
            sock = socket.socket(family_of(address), socket.SOCK_DGRAM)
            sock.settimeout(_PATIENCE)
            sock.bind(("", ports.take()))
            sock.connect((address, port))
            self._sockets.append(sock)

    def cross(self) -> None:
        """Raises TimeoutError."""
        for _ in range(_LAPS):
            for sock in self._sockets:
                sock.send(_QUESTION)
            for sock in self._sockets:
                sock.recv(256)


class _Client:
    def __init__(self, fence: _Fence, ports: "_Ports") -> None:
        self._fence = fence
        self._ports = ports
        self._kept: dict[Dial, socket.socket] = {}

    def dial(self, rounds: Sequence[Sequence[Dial]]) -> list[str]:
        found: list[str] = []
        for dials in rounds:
            opened = [self._open(each) for each in dials]
            found += self._outcomes(opened)
            for each in opened:
                self._close(each.sock)
        return found

    def keep(self, dials: Sequence[Dial]) -> list[str]:
        for sock in self._kept.values():
            self._close(sock)
        opened = [self._open(each) for each in dials]
        self._kept = {each.dial: each.sock for each in opened}
        return self._outcomes(opened)

    def go_on(self, wanted: Sequence[Kept]) -> list[str]:
        found = dict.fromkeys(range(len(wanted)), "")
        rest = list(found)
        deadline = time.monotonic() + _STALE
        while rest:
            again = [_Conversation(wanted[n].dial, self._kept[wanted[n].dial]) for n in rest]
            for each in again:
                each.ask()
            for n, outcome in zip(rest, self._outcomes(again), strict=True):
                found[n] = outcome.partition(" ")[0]
            if time.monotonic() > deadline:
                break
            rest = [n for n in rest if wanted[n].eventually and found[n] not in wanted[n].outcomes]
            if rest:
                time.sleep(_LEISURE)
        return list(found.values())

    def _open(self, dial: Dial) -> "_Conversation":
        sock = socket.socket(family_of(dial.address), KINDS[dial.protocol])
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dial.protocol is TCP:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT, _MOST_ATTEMPTS)
        sock.bind(("", self._ports.take()))
        conversation = _Conversation(dial, sock)
        conversation.begin()
        return conversation

    def _close(self, sock: socket.socket) -> None:
        self._ports.give_back(sock.getsockname()[1])
        sock.close()

    def _outcomes(self, conversations: Sequence["_Conversation"]) -> list[str]:
        self._fence.cross()
        for each in conversations:
            if each.dial.protocol is UDP:
                each.read()
        _await([each for each in conversations if each.dial.protocol is TCP], self._fence)
        return [each.outcome or SILENT for each in conversations]


class _Ports:
    """Where to dial from: ports that neither another socket has, nor a flow that is remembered.

    A port that was given back comes last, and after `_FORGOTTEN` seconds.
    """

    def __init__(self) -> None:
        self._free = collections.deque((port, 0.0) for port in _PORTS)

    def take(self) -> int:
        port, since = self._free.popleft()
        time.sleep(max(0.0, since + _FORGOTTEN - time.monotonic()))
        return port

    def give_back(self, port: int) -> None:
        self._free.append((port, time.monotonic()))


class _Conversation:
    """One question by a socket that does not block: `outcome` is "" as long as there is none."""

    def __init__(self, dial: Dial, sock: socket.socket) -> None:
        self.dial = dial
        self.sock = sock
        self.outcome = ""

    def begin(self) -> None:
        self._attempt(self._connect)
        if self.dial.protocol is UDP:
            self.ask()

    def ask(self) -> None:
        self._attempt(self._send)

    def read(self) -> None:
        self._attempt(self._receive)

    def is_unheard(self) -> bool:
        """Whether SYNs were sent, as many as have to be, and nobody said anything."""
        state, _, attempts = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)
        return state == _SYN_SENT and attempts >= _ATTEMPTS

    def _connect(self) -> str:
        self.sock.connect((self.dial.address, self.dial.port))
        return ""

    def _send(self) -> str:
        with contextlib.suppress(PermissionError):  # a rule of OUTPUT: a rejection is still to come, or not
            self.sock.send(_QUESTION)
        return ""

    def _receive(self) -> str:
        return self.sock.recv(256).decode() or "nothing, and an end"

    def _attempt(self, what: Callable[[], str]) -> None:
        if self.outcome:
            return
        try:
            self.outcome = what()
        except BlockingIOError:
            pass
        except OSError as error:
            self.outcome = _named(error)


def _named(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return REFUSED
    if error.errno in _NO_ANSWER:
        return SILENT
    return BROKEN if error.errno in _ENDED else f"{errno.errorcode.get(error.errno or 0, error.errno)}"


def _await(streams: Iterable[_Conversation], fence: _Fence) -> None:
    """Until each has an answer or a rejection, or is not heard."""
    waiting = {each.sock.fileno(): each for each in streams if not each.outcome}
    deadline = time.monotonic() + _PATIENCE
    with select.epoll() as poll:
        for fd in waiting:
            poll.register(fd, select.EPOLLIN)
        while waiting:
            unheard = all(each.is_unheard() for each in waiting.values())
            if unheard:
                fence.cross()
            ready = poll.poll(0 if unheard else _PAUSE)
            for fd, _ in ready:
                waiting[fd].read()
                if waiting[fd].outcome:
                    poll.unregister(fd)
                    del waiting[fd]
            if unheard and all(each.is_unheard() for each in waiting.values()):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer: {[each.dial for each in waiting.values()]}")
