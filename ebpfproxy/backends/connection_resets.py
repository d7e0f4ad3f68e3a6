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
from ebpfproxy.plan.connection_owners import TrackedConnection
from ebpfproxy.plan.open_connections import OpenConnections, requested_resets
from ebpfproxy.plan.service_plan import NodePlan, PlanKey, ServicePortPlan

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
_BUSY_FACTOR = 10.0  # ... or as many times as long as a search took
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0  # seconds after a failure
_PATIENCE = 5.0  # seconds that `close` waits

C = TypeVar("C", bound=TrackedConnection)


class Resetter(Protocol[C]):
    """What a mode does for this module. Both methods are called in its thread, and raise KernelError."""

    def connections(self) -> Iterable[C]:
        """Return the established TCP connections that the mode translates. They are hashable."""

    def reset(self, connections: Sequence[C]) -> Generator[bool]:
        """Reset the connections one after the other. Yield for each whether it succeeded. Those that have
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
        self._done: set[C] = set()  # connections that were reset, as long as they are found
        self._due: float | None = None
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
            if threads.join(self._thread, _PATIENCE):
                self._open.end()
                self._report_full()
            self._thread = None

    def _put_in_force(self, rejected: frozenset[PlanKey]) -> None:
        now = time.monotonic()
        if self._open.in_force(now, rejected):
            self._due = now

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._wait()
                if self._due is not None and time.monotonic() >= self._due and not self._stop.is_set():
                    self._search()
            except KernelError as failure:
                self._failed(failure.message, failure.hint)
            except Exception as failure:  # the thread must continue: nothing else finds the connections
                self._failed(repr(failure), "")

    def _wait(self) -> None:
        """Do all jobs; wait for one, or until a search is due."""
        timeout = None if self._due is None else max(0.0, self._due - time.monotonic())
        with contextlib.suppress(queue.Empty):
            self._jobs.get(timeout=timeout)()
            while True:
                self._jobs.get_nowait()()

    def _failed(self, reason: str, hint: str) -> None:
        self._back_off()
        log.error(SEARCH_FAILED, reason=reason, hint=hint)

    def _back_off(self) -> None:
        self._retry = min(2 * self._retry or _FIRST_RETRY, _LAST_RETRY)
        self._due = time.monotonic() + self._retry

    def _search(self) -> None:
        """Search the connections to reset, and reset as many as the rate permits until the next search."""
        began = time.monotonic()
        done: set[C] = set()
        selected = self._open.search(self._others(done), began)
        self._done = done
        self._report_full()
        seconds = max(_AGAIN, _BUSY_FACTOR * (time.monotonic() - began))
        most = math.ceil(self._when.rate * seconds)
        removed, moving = selected.removed[:most], selected.moving[:most]
        if removed or moving:
            failed = self._reset(removed, REMOVED) + self._reset(moving, MOVING)
            if failed:
                self._back_off()
                return
            again = max(began + seconds, time.monotonic())
            self._due = again if removed else min(filter(None, (selected.due, again)))
        else:
            self._due = selected.due
        self._retry = 0.0

    def _report_full(self) -> None:
        for (service, family), targets in self._open.take_full().items():
            self._callbacks.endpoints_full(service, family, targets)

    def _others(self, done: set[C]) -> Iterator[C]:
        """Yield the connections that were not reset yet, and add the others to `done`. There may be too many
        to hold all of them."""
        for each in self._resetter.connections():
            if each in self._done:
                done.add(each)
            else:
                yield each

    def _reset(self, connections: Sequence[C], reason: str) -> int:
        """Reset connections at the rate. Return how many could not be reset."""
        began = time.monotonic()
        results = [0, 0]
        with contextlib.closing(self._resetter.reset(connections)) as outcomes:
            for succeeded in outcomes:
                results[succeeded] += 1
                if self._stop.wait(max(0.0, began + sum(results) / self._when.rate - time.monotonic())):
                    break
        failed, reset = results
        if reset or failed:
            log.info(RESET, reason=reason, reset=reset, failed=failed)
            self._callbacks.connections_reset(reason, reset, failed)
        if not failed:
            self._done.update(connections)
        return failed


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
