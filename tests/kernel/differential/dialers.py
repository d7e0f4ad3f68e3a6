"""Small processes in a lab: servers that tell who they are and whom they see, and clients that dial by the
list. Everything is dialed at once and awaited together, so that silence is waited for only once.
"""

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

from ebpfproxy.lab import Place, sockets
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import KINDS, REFUSED, SILENT, TCP, UDP, family_of

BROKEN = "broken"
"""A connected UDP socket that was ended."""

_QUESTION = b"?"
_PORTS = range(10_000, 29_000)
_ABORT = struct.pack("=ii", 1, 0)  # SO_LINGER: a reset, so that nothing waits for the port
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)
_ENDED = (errno.ECONNABORTED, errno.EDESTADDRREQ, errno.ENOTCONN)
_PATIENCE = 60.0  # for a whole list


# Servers


def serve(place: Place, name: str, addresses: Sequence[str], ports: Mapping[Protocol, Sequence[int]]) -> None:
    """Answer on each of these: whoever connects, and every datagram, is told "name:port client"."""

    def child(ready: int) -> None:
        with selectors.DefaultSelector() as selector:
            for address, (protocol, numbers) in itertools.product(addresses, ports.items()):
                for port in numbers:
                    listener = sockets.listening(protocol, port, address)
                    selector.register(listener, selectors.EVENT_READ, (protocol, f"{name}:{port} "))
            os.write(ready, b"!")
            os.close(ready)
            while True:
                for key, _ in selector.select():
                    with contextlib.suppress(OSError):  # the client's business
                        _answer(key.fileobj, *key.data)

    place.start_until_ready(child)


def _answer(listener: object, protocol: Protocol, who: str) -> None:
    assert isinstance(listener, socket.socket)
    if protocol is UDP:
        _, peer = listener.recvfrom(64)
        listener.sendto((who + peer[0].removeprefix("::ffff:")).encode(), peer)
        return
    accepted, peer = listener.accept()
    with accepted:
        accepted.sendall((who + peer[0].removeprefix("::ffff:")).encode())


# Clients


class Dial(NamedTuple):
    """`patience` in seconds: how long nobody may answer before that is silence."""

    protocol: Protocol
    address: str
    port: int
    patience: float


class Kept(NamedTuple):
    """What a socket that was kept may meet: one of `outcomes`, servers without what they see, within
    `patience` seconds; where not `eventually`, at once."""

    dial: Dial
    outcomes: frozenset[str]
    eventually: bool


class Dialer:
    """A client process in a place. Its methods begin something; `result` awaits it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._pipe, theirs = multiprocessing.Pipe()

        def child(ready: int) -> None:
            os.write(ready, b"!")
            client = _Client()
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
        if not self._pipe.poll(_PATIENCE):
            raise TimeoutError(f"the client in {self._place.name} does not answer")
        try:
            answer: list[str] = self._pipe.recv()
        except EOFError:
            self._child.result()
            raise
        return answer


class _Client:
    def __init__(self) -> None:
        self._ports = itertools.cycle(_PORTS)
        self._kept: dict[tuple[Protocol, str, int], socket.socket] = {}

    def dial(self, rounds: Sequence[Sequence[Dial]]) -> list[str]:
        found: list[str] = []
        for dials in rounds:
            opened = [self._open(each) for each in dials]
            found += _await(opened)
            for each in opened:
                each.close()
        return found

    def keep(self, dials: Sequence[Dial]) -> list[str]:
        for sock in self._kept.values():
            sock.close()
        opened = [self._open(each) for each in dials]
        found = _await(opened)
        self._kept = {each.dial[:3]: each.sock for each in opened}
        return found

    def go_on(self, wanted: Sequence[Kept]) -> list[str]:
        return [_go_on(self._kept[each.dial[:3]], each) for each in wanted]

    def _open(self, dial: Dial) -> "_Conversation":
        """From a port of its own: none that an earlier flow is remembered by."""
        sock = socket.socket(family_of(dial.address), KINDS[dial.protocol])
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dial.protocol is TCP:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        sock.bind(("", next(self._ports)))
        return _Conversation(dial, sock)


class _Conversation:
    """One dial: `outcome` is "" until it is known."""

    def __init__(self, dial: Dial, sock: socket.socket) -> None:
        self.dial = dial
        self.sock = sock
        self.close = sock.close
        self.outcome = ""
        self._attempt(self._begin)
        self.ends = time.monotonic() + dial.patience

    def read(self) -> None:
        self._attempt(self._read)

    def _begin(self) -> str:
        with contextlib.suppress(BlockingIOError):
            self.sock.connect((self.dial.address, self.dial.port))
        if self.dial.protocol is UDP:
            with contextlib.suppress(PermissionError):  # a rule of OUTPUT: a refusal is still to come, or not
                self.sock.send(_QUESTION)
        return ""

    def _read(self) -> str:
        return self.sock.recv(256).decode() or "nothing, and an end"

    def _attempt(self, what: Callable[[], str]) -> None:
        try:
            self.outcome = what()
        except BlockingIOError:
            pass
        except OSError as error:
            self.outcome = _named(error)


def _named(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return REFUSED
    return SILENT if error.errno in _NO_WAY else f"{errno.errorcode.get(error.errno or 0, error.errno)}"


def _await(conversations: Iterable[_Conversation]) -> list[str]:
    conversations = list(conversations)
    waiting = {each.sock.fileno(): each for each in conversations if not each.outcome}
    with select.epoll() as poll:
        for fd in waiting:
            poll.register(fd, select.EPOLLIN)
        while waiting:
            rest = min(each.ends for each in waiting.values()) - time.monotonic()
            for fd, _ in poll.poll(max(rest, 0.0)):
                waiting[fd].read()
                if waiting[fd].outcome:
                    poll.unregister(fd)
                    del waiting[fd]
            now = time.monotonic()
            for fd in [fd for fd, each in waiting.items() if each.ends <= now]:
                poll.unregister(fd)
                waiting.pop(fd).outcome = SILENT
    return [each.outcome for each in conversations]


def _go_on(sock: socket.socket, kept: Kept) -> str:
    """Ask until the outcome is one that is wanted."""
    deadline = time.monotonic() + kept.dial.patience
    while True:
        outcome = _ask_again(sock).partition(" ")[0]
        if outcome in kept.outcomes or (not kept.eventually and outcome != SILENT):
            return outcome
        if time.monotonic() > deadline:
            return outcome
        time.sleep(0.01)  # between two looks at what another thread brings about


def _ask_again(sock: socket.socket) -> str:
    try:
        with contextlib.suppress(BlockingIOError):  # what came too late for the last question
            while sock.recv(256):
                pass
        with contextlib.suppress(PermissionError):
            sock.send(_QUESTION)
        if not select.select([sock], [], [], 0.06)[0]:
            return SILENT
        return sock.recv(256).decode()
    except OSError as error:
        return BROKEN if error.errno in _ENDED else _named(error)
