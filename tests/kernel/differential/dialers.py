"""Small processes in a lab. Servers answer with their name and the client's address. Clients dial a list of
frontends concurrently.

Silence is not decided by a timeout. A datagram or a few SYNs count as unanswered when packets that were sent
after them are answered, see `Fence`.
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
"""The outcome of a connected UDP socket that was destroyed, or that has no route any more."""

_QUESTION = b"?"
_PORTS = [port for port in range(1024, 1 << 16) if port not in places.PORTS]
_FORGOTTEN = 1.1 * places.REMEMBERED
_ABORT = struct.pack("=ii", 1, 0)  # SO_LINGER: a reset, so that the port is free at once
_ATTEMPTS = 3  # SYNs after the first one
_MOST_ATTEMPTS = 100  # TCP_SYNCNT: the kernel shall not give up
_SYN_SENT = 2  # TCP_SYN_SENT
_PAUSE = 0.01  # seconds between two checks of the SYNs
_LEISURE = 0.1
"""Seconds between two exchanges of one kept socket. The kernel's workers that delete its flow share the
processor, and need pauses: with EEVDF and autogroup (seen on 6.18) they did not run for a minute beside
processes that wake each other without a pause."""
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_REJECTED = 1.0  # seconds, within which a datagram is rejected
_ENDED = (
    errno.ECONNABORTED,
    errno.EDESTADDRREQ,
    errno.ENOTCONN,
    errno.EINVAL,  # mode userspace: the socket's source is 127.0.0.1, and the Service's local route is gone
)
_PATIENCE = 60.0  # seconds, for answers that must arrive, also on a busy machine
_STALE = 75.0  # seconds, until the backend has deleted a stale flow; it retries after 30 seconds


# Servers


def serve(
    netns: Netns, name: str, addresses: Sequence[str], ports: Mapping[Protocol, Sequence[int]], processor: int
) -> None:
    """Serve on each address and port: answer connections and datagrams with "name:port client"."""

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

    netns.start_until_ready(child)


def _answer_all(listener: object, protocol: Protocol, who: str) -> None:
    """Answer all waiting clients, so that none waits longer than later clients of another port."""
    assert isinstance(listener, socket.socket)
    while True:
        try:
            _answer(listener, protocol, who)
        except BlockingIOError:
            return
        except OSError:
            continue  # an error of one client


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
    """The outcomes that a kept socket may get: names of servers without client addresses, or errors. If not
    `eventually`, at once."""

    dial: Dial
    outcomes: frozenset[str]
    eventually: bool


class Fence(NamedTuple):
    """Questions that are sent after those of a client, to each socket of the servers. When they are answered,
    all packets from before have been answered, if any process or the kernel answers them.

    `places`: addresses and UDP ports that lead to these sockets. `laps`: how often each question is asked.

    All processes of a lab, and so all its packets, are on one processor. It handles packets in the order of
    their arrival, one device further each time, and one socket is read in that order. The order of two
    sockets is unknown, but a process handles all that are readable before it waits for others. So what was
    sent before a lap is handled by the next process on its way at the latest when the following lap reaches
    that process.
    """

    places: tuple[tuple[str, int], ...]
    laps: int


DIRECT_LAPS = 3
"""Of a fence that leads to the servers directly, beside Services that the kernel translates. More than one,
since a path through a Service may have more devices in both directions."""
RELAYED_LAPS = 2 * DIRECT_LAPS
"""Of a fence through a relay, which reads each exchange twice, in addition to the server."""


class Dialer:
    """A client process in a network namespace. Its methods start an operation; `result` awaits it."""

    def __init__(self, netns: Netns, fence: Fence, processor: int) -> None:
        self._netns = netns
        self._pipe, child_end = multiprocessing.Pipe()

        def child(ready: int) -> None:
            os.sched_setaffinity(0, {processor})
            ports = _Ports()
            client = _Client(_Crossing(fence, ports), _Rejections(ports), ports)
            os.write(ready, b"!")
            while True:
                name, arguments = child_end.recv()
                child_end.send(getattr(client, name)(*arguments))

        self._child = netns.start_until_ready(child)
        child_end.close()

    def dial(self, rounds: Sequence[Sequence[Dial]]) -> None:
        """Dial the rounds one after the other. The result has for each dial the server's answer, REFUSED or
        SILENT."""
        self._pipe.send(("dial", (rounds,)))

    def keep(self, dials: Sequence[Dial]) -> None:
        """As a round of `dial`, but keep the UDP sockets, instead of all that were kept before."""
        self._pipe.send(("keep", (dials,)))

    def exchange_again(self, wanted: Sequence[Kept]) -> None:
        """Exchange again by the kept sockets. The result has each last outcome, which may be BROKEN."""
        self._pipe.send(("exchange_again", (wanted,)))

    def result(self) -> list[str]:
        """The outcomes; those of all rounds of `dial` are in one list."""
        try:
            answer: list[str] = self._pipe.recv()
        except EOFError:
            self._child.result()
            raise
        return answer


class _Rejections:
    """Datagrams to a closed port, which show whether the kernel sends rejections at present.

    All network namespaces of a processor share one socket for ICMP errors (icmp_xmit_lock()). While errors
    of any namespace wait for a neighbor, there is no room for others, and no rejection arrives for seconds.
    """

    def __init__(self, ports: "_Ports") -> None:
        self._ports = ports
        self._sockets: list[socket.socket] = []

    def arrive(self) -> bool:
        if not self._sockets:
            self._sockets = [self._connected(address) for address in places.NODE]
        return all(self._is_rejected(sock) for sock in self._sockets)

    def wait(self) -> None:
        """Wait until they arrive. Raises TimeoutError."""
        deadline = time.monotonic() + _PATIENCE
        while not self.arrive():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{places.NODE} port {places.CLOSED_PORT}: no rejection")

    def _connected(self, address: str) -> socket.socket:
        sock = socket.socket(family_of(address), socket.SOCK_DGRAM)
        sock.settimeout(_REJECTED)
        sock.bind(("", self._ports.take()))
        sock.connect((address, places.CLOSED_PORT))
        return sock

    @staticmethod
    def _is_rejected(sock: socket.socket) -> bool:
        with contextlib.suppress(TimeoutError):
            try:
                sock.send(_QUESTION)
                sock.recv(256)
            except ConnectionRefusedError:
                return True
        return False


class _Crossing:
    """The sockets of a client that ask the questions of a fence."""

    def __init__(self, fence: Fence, ports: "_Ports") -> None:
        self._fence = fence
        self._ports = ports
        self._sockets: list[socket.socket] = []

    def cross(self) -> None:
        """Raises TimeoutError."""
        if not self._sockets:
            self._sockets = [self._connected(*place) for place in self._fence.places]
        for _ in range(self._fence.laps):
            for sock in self._sockets:
                sock.send(_QUESTION)
            for sock in self._sockets:
                sock.recv(256)

    def _connected(self, address: str, port: int) -> socket.socket:
        """Not before the address is served: a connected IPv6 socket keeps its route if another table gets a
        better one (rt6_check() in net/ipv6/route.c)."""
        sock = socket.socket(family_of(address), socket.SOCK_DGRAM)
        sock.settimeout(_PATIENCE)
        sock.bind(("", self._ports.take()))
        sock.connect((address, port))
        return sock


class _Client:
    def __init__(self, fence: _Crossing, rejections: _Rejections, ports: "_Ports") -> None:
        self._fence = fence
        self._rejections = rejections
        self._ports = ports
        self._kept: dict[Dial, socket.socket] = {}

    def dial(self, rounds: Sequence[Sequence[Dial]]) -> list[str]:
        found: list[str] = []
        for dials in rounds:
            outcomes, opened = self._round(dials)
            found += outcomes
            for each in opened:
                self._close(each.sock)
        return found

    def keep(self, dials: Sequence[Dial]) -> list[str]:
        for sock in self._kept.values():
            self._close(sock)
        outcomes, opened = self._round(dials)
        self._kept = {each.dial: each.sock for each in opened}
        return outcomes

    def _round(self, dials: Sequence[Dial]) -> tuple[list[str], list["_Conversation"]]:
        """Dial again if something is silent that may have been rejected. Rejections must arrive before, since
        the first packet follows at once, and afterwards: the repeated SYNs take seconds. They may be missing
        just in between, so the same dials must be silent twice."""
        silent: set[int] = set()
        while True:
            self._rejections.wait()
            opened = [self._open(each) for each in dials]
            outcomes = self._outcomes(opened)
            before, silent = silent, {n for n, each in enumerate(outcomes) if each == SILENT}
            if not silent or (silent == before and self._rejections.arrive()):
                return outcomes, opened
            for each in opened:
                self._close(each.sock)

    def exchange_again(self, wanted: Sequence[Kept]) -> list[str]:
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
    """Client ports that no other socket and no remembered flow has.

    A port that was given back is used last, and not before `_FORGOTTEN` seconds have passed.
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
    """One question by a nonblocking socket. `outcome` is "" until there is one."""

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
        """Whether enough SYNs were sent without any answer."""
        state, _, attempts = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 3)
        return state == _SYN_SENT and attempts >= _ATTEMPTS

    def _connect(self) -> str:
        self.sock.connect((self.dial.address, self.dial.port))
        return ""

    def _send(self) -> str:
        with contextlib.suppress(PermissionError):  # a rule of OUTPUT: a rejection may follow
            self.sock.send(_QUESTION)
        return ""

    def _receive(self) -> str:
        return self.sock.recv(256).decode() or "end without an answer"

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


def _await(streams: Iterable[_Conversation], fence: _Crossing) -> None:
    """Wait until each one has an answer or a rejection, or is known to be unanswered."""
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
