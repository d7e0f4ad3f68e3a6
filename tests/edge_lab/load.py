"""Load from the client: many connections that stay open, and new connections all the time."""

import errno
import math
import multiprocessing
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from ebpfproxy.lab import Pod
from tests.edge_lab.echo import raise_limit

_PATIENCE = 300.0
_OF_PROCESS = 12_000  # connections
_OPENING = 256  # connections that are being opened at the same time
_STALLED = 15.0
_SLOW = 0.5  # seconds after which a new connection counts as failed; a lost SYN takes 1 s
_PAUSE = 0.01  # seconds between new connections
_SILENT, _ENDED = "no answer", "ended"
_PAYLOAD = b"0123456789abcdef"

Target = tuple[str, int]


class Answers(NamedTuple):
    """How many connections were opened or echoed a request, and how many failed, by error.

    The error is a name of errno, "ended" if the peer closed the connection, or "no answer".
    """

    alive: int
    errors: Counter[str]

    @property
    def lost(self) -> int:
        return self.errors.total()


class Attempts(NamedTuple):
    """New connections: how many were tried, how many failed, and when the first and the last of these began.

    Times are seconds of time.monotonic(), 0.0 if none failed.
    """

    tried: int
    failed: int
    first: float
    last: float


class _Worker:
    """A process on the client that runs a function, which gets commands by a pipe."""

    def __init__(self, client: Pod, function: Callable[[Connection], None]) -> None:
        self._own, other = multiprocessing.Pipe()
        client.start(lambda: function(other))
        other.close()

    def call(self, *command: Any) -> Any:
        self.send(*command)
        return self.receive()

    def send(self, *command: Any) -> None:
        self._own.send(command)

    def receive(self) -> Any:
        if not self._own.poll(_PATIENCE):
            raise TimeoutError(f"the client did not finish within {_PATIENCE:g} s")
        return self._own.recv()


class OpenConnections:
    """Connections from several source addresses to several targets, which stay open. They are distributed
    to processes, because the number of files that a process may open is limited.
    """

    def __init__(self, client: Pod, sources: Sequence[str], targets: Sequence[Target], count: int) -> None:
        number = math.ceil(count / _OF_PROCESS)
        self._counts = [count // number + (each < count % number) for each in range(number)]
        self._workers = [_Worker(client, lambda pipe: _hold(pipe, sources, targets)) for _ in range(number)]

    def open(self) -> Answers:
        """Open the connections. Those that fail count as lost."""
        return self._total(
            each.call("open", count) for each, count in zip(self._workers, self._counts, strict=True)
        )

    def check(self, seconds: float) -> Answers:
        """Send a request on each connection, and wait for the echoes up to `seconds`."""
        for each in self._workers:
            each.send("check", seconds)
        return self._total(each.receive() for each in self._workers)

    def close(self) -> None:
        for each in self._workers:
            each.call("close")

    @staticmethod
    def _total(answers: Iterable[Any]) -> Answers:
        alive, errors = zip(*answers, strict=True)
        return Answers(sum(alive), sum(errors, Counter()))


class NewConnections(_Worker):
    """Opens a connection every 10 ms, from `start` to `stop`."""

    def __init__(self, client: Pod, target: Target) -> None:
        super().__init__(client, lambda pipe: _dial(pipe, target))

    def start(self) -> None:
        self.call("start")

    def stop(self) -> Attempts:
        return Attempts(*self.call("stop"))


# --- In the processes of the client


def _hold(pipe: Connection, sources: Sequence[str], targets: Sequence[Target]) -> None:
    raise_limit()
    held: list[socket.socket] = []
    while True:
        command, *arguments = pipe.recv()
        if command == "open":
            opened, errors = _open(arguments[0], sources, targets)
            held += opened
            pipe.send((len(opened), errors))
        elif command == "check":
            pipe.send(_check(held, arguments[0]))
        else:
            for each in held:
                each.close()
            held.clear()
            pipe.send(())


def _open(
    count: int, sources: Sequence[str], targets: Sequence[Target]
) -> tuple[list[socket.socket], Counter[str]]:
    """Open connections, and return those that are established, and the errors. Source addresses take turns.

    The others are given up when none was established for 15 s.
    """
    pending: dict[int, socket.socket] = {}
    errors: Counter[str] = Counter()
    opened: list[socket.socket] = []
    poll, started, progress = select.epoll(), 0, time.monotonic()
    while (pending or started < count) and time.monotonic() - progress < _STALLED:
        while started < count and len(pending) < _OPENING:
            made = _dialing(sources[started % len(sources)], targets[started // len(sources) % len(targets)])
            pending[made.fileno()] = made
            poll.register(made, select.EPOLLOUT)
            started += 1
        for number, _ in poll.poll(0.1):
            made = pending.pop(number)
            poll.unregister(number)
            progress = time.monotonic()
            if error := made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                errors[errno.errorcode[error]] += 1
                made.close()
            else:
                opened.append(made)
    for made in pending.values():
        errors[_SILENT] += 1
        made.close()
    return opened, errors


def _dialing(source: str, target: Target) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in target[0] else socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)  # so that all targets share the ports
    made.bind((source, 0))
    result = made.connect_ex(target)
    if result not in (0, errno.EINPROGRESS):
        raise OSError(result, f"cannot connect to {target}")
    return made


_BIND_ADDRESS_NO_PORT = 24


def _check(held: Sequence[socket.socket], seconds: float) -> tuple[int, Counter[str]]:
    """Return how many connections echo a request, and the errors of the others."""
    errors: Counter[str] = Counter()
    waiting: dict[int, int] = {}  # the number of bytes that are missing, by descriptor
    by_number = {each.fileno(): each for each in held}
    poll, deadline = select.epoll(), time.monotonic() + seconds
    for number, each in by_number.items():
        try:
            each.send(_PAYLOAD)
        except OSError as failure:
            errors[errno.errorcode[failure.errno or 0]] += 1
            continue
        waiting[number] = len(_PAYLOAD)
        poll.register(number, select.EPOLLIN)
    alive = 0
    while waiting and time.monotonic() < deadline:
        for number, _ in poll.poll(0.1):
            try:
                received = len(by_number[number].recv(4096))
            except OSError as failure:
                received, error = 0, errno.errorcode[failure.errno or 0]
            else:
                error = "" if received else _ENDED
            waiting[number] -= received
            if error or waiting[number] <= 0:
                if error:
                    errors[error] += 1
                else:
                    alive += 1
                poll.unregister(number)
                del waiting[number]
    errors[_SILENT] += len(waiting)
    return alive, +errors


def _dial(pipe: Connection, target: Target) -> None:
    while True:
        pipe.recv()
        pipe.send(())
        pipe_ready = select.poll()
        pipe_ready.register(pipe.fileno(), select.POLLIN)
        results: list[tuple[float, bool]] = []
        pending: dict[socket.socket, float] = {}
        while not pipe_ready.poll(1000 * _PAUSE):
            pending[_dialing("0.0.0.0", target)] = time.monotonic()
            _collect(pending, results)
        pipe.recv()
        end = time.monotonic() + _SLOW
        while pending and time.monotonic() < end:
            time.sleep(_PAUSE)
            _collect(pending, results)
        failed = sorted(began for began, succeeded in results if not succeeded)
        pipe.send((len(results), len(failed), *((failed[0], failed[-1]) if failed else (0.0, 0.0))))


def _collect(pending: dict[socket.socket, float], results: list[tuple[float, bool]]) -> None:
    """Move the attempts that have ended, or are too slow, to the results."""
    _, writable, _ = select.select([], list(pending), [], 0)
    now = time.monotonic()
    for each in list(pending):
        is_done = each in writable
        if is_done or now - pending[each] > _SLOW:
            error = each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if is_done else errno.ETIMEDOUT
            results.append((pending.pop(each), not error))
            each.close()
