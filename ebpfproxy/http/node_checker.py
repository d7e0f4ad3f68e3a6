"""Checks of nodes by an edge: GET /healthz, for all nodes in one thread.

Connections stay open between checks, so that a check costs a write and a read. Port 10256 and
healthCheckNodePort are served without TLS (pkg/proxy/healthcheck).
"""

import contextlib
import heapq
import itertools
import os
import random
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

from ebpfproxy.log import Logger
from ebpfproxy.model.address import Address, Family, family, format_address, format_endpoint
from ebpfproxy.model.node_check import NodeCheck

log = Logger(__name__)

NODE_DOWN = "Node failed its health checks"
"""Its endpoints get no new connections from this edge, unless all nodes of a Service are down. `reason` is
the result of the last check."""
NODE_UP = "Node passed a health check again"
"""Its endpoints get new connections again."""

FAILURES = 3
"""A node is down after so many failed checks in succession."""
TIMEOUT = 1.0
"""Seconds from the start of a check to its complete answer."""

_TOGETHER_MAX = 5
_LONGEST_ANSWER = 16384
_LONGEST_WAIT = 1.0  # seconds until the thread sees that it must end
_STATUS = re.compile(rb"HTTP/1\.([01]) ([0-9]{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


class _Failed(Exception):
    """A check has failed. The message is the reason."""


class _Target:
    """One node and port, with its connection. `wake`: when it is due, or when its answer is too late."""

    def __init__(self, check: NodeCheck, address: Address, due: float) -> None:
        self.check = check
        self.address = address
        self.due = self.wake = due
        self.failures = 0
        self.is_down = False
        self.socket: socket.socket | None = None
        self.is_busy = False  # from the start of a check to its end
        self.is_connecting = False
        self.is_reused = False  # the connection of an earlier check
        self.received = b""
        host = format_endpoint(address, check.port)
        self.request = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nUser-Agent: ebpfproxy\r\n\r\n".encode()


class NodeChecker:
    """Checks the nodes of `set_targets` every `interval` seconds, in the thread that calls `run`.

    After each change, `changed` is called in this thread with all checks that have failed so often that their
    node is down. A new target counts as up.

    A node that is down is reported at once. Nodes that are up again are reported together, when no other one
    has followed for a while: an edge whose link was interrupted would otherwise use the first ones alone, and
    select other endpoints than other edges do.
    """

    def __init__(self, interval: float, changed: Callable[[frozenset[NodeCheck]], object]) -> None:
        self._interval = interval
        self._changed = changed
        self._wanted: Mapping[NodeCheck, Address] = {}
        self._targets: dict[NodeCheck, _Target] = {}
        self._timers: list[tuple[float, int, _Target]] = []
        self._order = itertools.count()
        self._reported: frozenset[NodeCheck] = frozenset()
        self._down: set[NodeCheck] = set()
        self._first_up = self._last_up = 0.0  # when nodes came up that are not reported yet
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set_targets(self, targets: Mapping[NodeCheck, Address]) -> None:
        """Replace the nodes to check, each with its address. Any thread may call it."""
        self._wanted = dict(targets)
        os.eventfd_write(self._awake, 1)

    def run(self, stop: threading.Event) -> None:
        """Check until `stop` is set. Call it only once."""
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._awake, selectors.EVENT_READ)
            self._replace_targets()
            try:
                while not stop.is_set():
                    for key, _ in self._selector.select(self._wait()):
                        if key.data is None:
                            os.eventfd_read(self._awake)
                            self._replace_targets()
                        elif key.data.socket is key.fileobj:  # not closed since select()
                            self._guarded(self._proceed, key.data)
                    self._run_timers()
                    self._report()
            finally:
                for target in self._targets.values():
                    self._close(target)

    # --- Targets and timers

    def _replace_targets(self) -> None:
        wanted = self._wanted
        for check in [each for each in self._targets if each not in wanted]:
            self._close(self._targets.pop(check))
            self._down.discard(check)
        now = time.monotonic()
        for check, address in wanted.items():
            previous = self._targets.get(check)
            if previous and previous.address == address:
                continue
            target = _Target(check, address, now + random.uniform(0.0, self._interval))
            if previous:
                self._close(previous)
                target.failures, target.is_down = previous.failures, previous.is_down
            self._targets[check] = target
            self._schedule(target, target.due)

    def _schedule(self, target: _Target, wake: float) -> None:
        target.wake = wake
        heapq.heappush(self._timers, (wake, next(self._order), target))

    def _wait(self) -> float:
        """Return the seconds until the next timer, at most `_LONGEST_WAIT`."""
        if not self._timers:
            return _LONGEST_WAIT
        return min(max(0.0, self._timers[0][0] - time.monotonic()), _LONGEST_WAIT)

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            wake, _, target = heapq.heappop(self._timers)
            if target.wake != wake or self._targets.get(target.check) is not target:
                continue  # rescheduled or removed
            if target.is_busy:
                self._finish(target, f"no answer within {TIMEOUT:g} s")
            else:
                self._guarded(self._start, target)

    def _report(self) -> None:
        waiting = {each for each in self._reported - self._down if each in self._targets}
        down = frozenset(self._down | waiting if waiting and not self._has_settled() else self._down)
        if down != self._reported:
            self._reported = down
            self._changed(down)

    def _came_up(self, check: NodeCheck) -> None:
        now = time.monotonic()
        if not any(each in self._targets for each in self._reported - self._down):
            self._first_up = now
        self._last_up = now
        self._down.discard(check)

    def _has_settled(self) -> bool:
        """Return whether no other node will come up together with the last one."""
        now, together = time.monotonic(), self._interval + TIMEOUT
        return now - self._last_up >= together or now - self._first_up >= _TOGETHER_MAX * together

    # --- One check

    def _guarded(self, step: Callable[[_Target], object], target: _Target) -> None:
        """Run a step of a check; an error ends the check."""
        try:
            step(target)
        except BlockingIOError:
            return
        except OSError as error:
            self._retry_or_fail(target, error.strerror or str(error))
        except _Failed as failure:
            self._finish(target, str(failure))

    def _retry_or_fail(self, target: _Target, reason: str) -> None:
        """Retry on a new connection, once, if the node has closed the connection of an earlier check."""
        self._close(target)
        if target.is_busy and target.is_reused and not target.received:
            self._guarded(self._connect, target)
        elif target.is_busy:
            self._finish(target, reason)

    def _start(self, target: _Target) -> None:
        now = time.monotonic()
        target.due, target.is_busy, target.received = now, True, b""
        self._schedule(target, now + TIMEOUT)
        if target.socket:
            target.is_reused = True
            target.socket.send(target.request)
        else:
            self._connect(target)

    def _connect(self, target: _Target) -> None:
        is_v4 = family(target.address) is Family.IPV4
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        target.is_reused, target.is_connecting = False, True
        target.socket = socket.socket(socket.AF_INET if is_v4 else socket.AF_INET6, kind)
        self._selector.register(target.socket, selectors.EVENT_WRITE, target)
        with contextlib.suppress(BlockingIOError):  # EINPROGRESS
            target.socket.connect((format_address(target.address), target.check.port))

    def _proceed(self, target: _Target) -> None:
        """Handle an event of the connection: it is established, or bytes or its end were received."""
        assert target.socket
        if target.is_connecting:
            number = target.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, os.strerror(number))
            target.is_connecting = False
            self._selector.modify(target.socket, selectors.EVENT_READ, target)
            target.socket.send(target.request)
            return
        received = target.socket.recv(_LONGEST_ANSWER)
        if not target.is_busy:  # the node closes an idle connection
            self._close(target)
            return
        if not received:
            self._end_of_stream(target)
            return
        target.received += received
        if (status := _complete(target.received)) is not None:
            self._answered(target, status)

    def _end_of_stream(self, target: _Target) -> None:
        """An answer without Content-Length ends with the connection."""
        found = _STATUS.match(target.received)
        if found and b"\r\n\r\n" in target.received:
            self._answered(target, int(found[2]))
        else:
            self._retry_or_fail(target, "the connection was closed without an answer")

    def _answered(self, target: _Target, status: int) -> None:
        if _must_close(target.received):
            self._close(target)
        self._finish(target, "" if status == 200 else f"status {status}", keep=True)

    def _finish(self, target: _Target, reason: str, *, keep: bool = False) -> None:
        """Record the result of a check, and schedule the next one. `reason`: why it failed, "" if it passed.

        `keep`: the connection can be used again.
        """
        target.is_busy, target.received = False, b""
        if not keep:
            self._close(target)
        self._schedule(target, max(target.due + self._interval, time.monotonic()))
        target.failures = target.failures + 1 if reason else 0
        check = target.check
        if reason and target.failures >= FAILURES:
            if not target.is_down:
                log.warning(NODE_DOWN, node=check.node, port=check.port, reason=reason)
            target.is_down = True
            self._down.add(check)
        elif not reason and target.is_down:
            log.info(NODE_UP, node=check.node, port=check.port)
            target.is_down = False
            self._came_up(check)

    def _close(self, target: _Target) -> None:
        if target.socket:
            self._selector.unregister(target.socket)
            target.socket.close()
            target.socket = None
        target.is_connecting = False


def _complete(received: bytes) -> int | None:
    """Return the status of a complete answer with a Content-Length, else None. Raises _Failed."""
    if not b"HTTP/1.".startswith(received[:7]) or len(received) > _LONGEST_ANSWER:
        raise _Failed("the answer is not HTTP")
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    status = _STATUS.match(received)
    if not status:
        raise _Failed("the answer is not HTTP")
    length = _LENGTH.search(received, 0, end)
    if length is None or len(received) < end + 4 + int(length[1]):
        return None
    return int(status[2])


def _must_close(received: bytes) -> bool:
    """Whether the connection cannot be used again after this answer."""
    status, head = _STATUS.match(received), received[: received.find(b"\r\n\r\n")]
    return not status or status[1] == b"0" or bool(_CLOSES.search(head)) or not _LENGTH.search(head)
