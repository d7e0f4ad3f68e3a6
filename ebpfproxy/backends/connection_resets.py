"""Resets open TCP connections, for Services that request it: those to removed endpoints, and some of others
after endpoints were added.

`plan.open_connections` decides which. This module limits the rate, so that the clients of a large Service do
not all connect again at once. The mode finds its connections and ends them (`Resetter`).
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from ebpfproxy import threads
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import DiagSocket
from ebpfproxy.log import Logger
from ebpfproxy.plan.open_connections import OpenConnections, requested_resets
from ebpfproxy.plan.service_plan import NodePlan, PlanKey, ServicePortPlan
from ebpfproxy.plan.tracked_connection import TrackedConnection

log = Logger(__name__)

RESET = "Reset connections"
"""`reason` is removed-endpoints or rebalance, which a flag or an annotation of the Service requests. `failed`
connections are tried again."""
SEARCH_FAILED = "Failed to search the connections to reset, retrying"
"""Connections to an endpoint that is gone may stay open."""

NOT_RESET = "Failed to reset a connection"
"""One connection; `Reset connections` counts them."""

REMOVED, MOVING = "removed-endpoints", "rebalance"
"""Reasons."""

_SHORTEST_GRACE = 1.0
"""In seconds. A connection that a new rule creates may be found before its plan is known to be in force."""
_AGAIN = 1.0  # seconds from the beginning of resets to the next search
_BUSY_FACTOR = 10.0  # it rests as many times as long as a search takes
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0  # seconds after a failed search
_TRY_AGAIN = 60.0  # seconds until a connection is tried again that could not be reset
_PATIENCE = 5.0  # seconds that `close` waits

C = TypeVar("C", bound=TrackedConnection)


class Resetter(Protocol[C]):
    """What a mode does for this module. Both methods are called in its thread, and raise KernelError."""

    def connections(self) -> Iterable[C]:
        """Return the established TCP connections that the mode translates. They are hashable."""

    def reset(self, connections: Sequence[C]) -> Generator[tuple[C, bool]]:
        """Reset the connections one after the other. Yield each and whether it succeeded. Those that have
        ended meanwhile are skipped."""


class Pace(NamedTuple):
    """When connections are reset.

    - `grace`: seconds from the removal of an endpoint on.
    - `rate`: connections per second at most.
    - `node`: the name of this node, from which nodes derive different decisions.
    """

    grace: float = 30.0
    rate: int = 100
    node: str = ""


def pace(config: Config) -> Pace:
    """Return what the configuration says."""
    return Pace(
        max(config.removed_endpoints_grace, _SHORTEST_GRACE), config.removed_endpoints_rate, config.node_name
    )


class ConnectionResets(Generic[C]):
    """A thread that resets connections. It starts with the first plan that requests it, and uses the network
    namespace of the thread that calls `expect`.

    Call `expect` before each sync, and `in_force` after it succeeded. The thread calls
    `Callbacks.connections_reset` and `endpoints_full`.
    """

    def __init__(self, resetter: Resetter[C], when: Pace, callbacks: Callbacks) -> None:
        self._resetter = resetter
        self._when = when
        self._callbacks = callbacks
        self._open: OpenConnections[C] = OpenConnections(when.grace, when.node.encode())
        # By connection, as long as it is found: when it is tried again. Infinity: it was reset.
        self._tried: dict[C, float] = {}
        self._due: float | None = None
        self._rested = -math.inf  # no search before this time
        self._retry = 0.0
        self._stop = threading.Event()
        self._node: NodePlan | None = None
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None = None) -> None:
        """Announce the next sync: its plans (None for a plan that is removed), and the node if it changed."""
        plans = dict(changed)
        self._node = node or self._node
        if not self._thread:
            if not any(plan and requested_resets(plan) for plan in plans.values()):
                return
            self._stop.clear()
            self._tried = {}
            self._thread = threading.Thread(target=self._run, name="connection-resets", daemon=True)
            self._thread.start()
            node = self._node
        self._jobs.put(lambda: self._open.expect(plans))
        if node is not None:
            networks = node.node_port_networks
            self._jobs.put(lambda: self._open.expect_node_ports(networks))

    def in_force(self, rejected: Callable[[], Collection[PlanKey]]) -> None:
        """Report that the sync succeeded: everything expected is in the kernel, except the plans that
        `rejected` returns."""
        if self._thread:
            not_in_force = frozenset(rejected())
            self._jobs.put(lambda: self._put_in_force(not_in_force))

    def close(self) -> None:
        """End the thread. It waits at most 5 s. The next `expect` may start another one.

        All endpoints get new connections again: nothing else would end their exclusion.
        """
        if self._thread:
            self._stop.set()
            self._jobs.put(lambda: None)
            threads.join(self._thread, _PATIENCE)
            self._thread = None

    def _put_in_force(self, rejected: frozenset[PlanKey]) -> None:
        due = self._open.in_force(time.monotonic(), rejected)
        if due is not None:
            self._due = due if self._due is None else min(due, self._due)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._wait()
                due = self._next_search()
                if due is not None and time.monotonic() >= due and not self._stop.is_set():
                    self._search()
            except KernelError as failure:
                self._failed(failure.message, failure.hint)
            except Exception as failure:  # the thread must continue: nothing else finds the connections
                self._failed(repr(failure), "")
        self._open.end()
        self._report_full()

    def _next_search(self) -> float | None:
        return None if self._due is None else max(self._due, self._rested)

    def _wait(self) -> None:
        """Do all jobs; wait for one, or until a search is due."""
        due = self._next_search()
        timeout = None if due is None else max(0.0, due - time.monotonic())
        with contextlib.suppress(queue.Empty):
            self._jobs.get(timeout=timeout)()
            while True:
                self._jobs.get_nowait()()

    def _failed(self, reason: str, hint: str) -> None:
        self._retry = min(2 * self._retry or _FIRST_RETRY, _LAST_RETRY)
        self._due = time.monotonic() + self._retry
        log.error(SEARCH_FAILED, reason=reason, hint=hint)

    def _search(self) -> None:
        """Search the connections to reset, and reset as many as the rate permits until the next search."""
        began = time.monotonic()
        found: dict[C, float] = {}
        selected = self._open.search(self._others(found, began), began)
        self._tried = found
        self._report_full()
        took = time.monotonic() - began
        self._rested = began + (_BUSY_FACTOR + 1) * took
        most = math.ceil(self._when.rate * max(_AGAIN, _BUSY_FACTOR * took))
        removed, moving = selected.removed[:most], selected.moving[:most]
        self._reset(removed, REMOVED)
        self._reset(moving, MOVING)
        again = [at for at in self._tried.values() if not math.isinf(at)]
        if removed:
            again.append(began + _AGAIN)
        if selected.due is not None:
            again.append(selected.due)
        self._due, self._retry = min(again, default=None), 0.0

    def _report_full(self) -> None:
        for (service, family), targets in self._open.take_full().items():
            self._callbacks.endpoints_full(service, family, targets)

    def _others(self, found: dict[C, float], now: float) -> Iterator[C]:
        """Yield the connections to select from. Those that were reset, or are not tried again yet, are added
        to `found` instead. There may be too many to hold all of them."""
        for each in self._resetter.connections():
            at = self._tried.get(each)
            if at is not None and at > now:
                found[each] = at
            else:
                yield each

    def _reset(self, connections: Sequence[C], reason: str) -> None:
        """Reset connections at the rate."""
        began = time.monotonic()
        results = [0, 0]
        with contextlib.closing(self._resetter.reset(connections)) as outcomes:
            for connection, succeeded in outcomes:
                results[succeeded] += 1
                self._tried[connection] = math.inf if succeeded else time.monotonic() + _TRY_AGAIN
                if self._stop.wait(max(0.0, began + sum(results) / self._when.rate - time.monotonic())):
                    break
            else:
                for each in connections:
                    self._tried.setdefault(each, math.inf)  # it has ended, although it is still found
        failed, reset = results
        if reset or failed:
            log.info(RESET, reason=reason, reset=reset, failed=failed)
            self._callbacks.connections_reset(reason, reset, failed)


def destroyed(sock: DiagSocket) -> bool | None:
    """Destroy a socket of the calling thread's network namespace; return whether it succeeded. None if its
    process has closed it meanwhile."""
    try:
        sockets.destroy(sock)
    except NotFound:
        return None
    except KernelError as failure:
        log.debug(NOT_RESET, reason=failure.message)
        return False
    return True
