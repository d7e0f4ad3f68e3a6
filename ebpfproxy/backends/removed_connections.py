"""Resets open TCP connections to removed endpoints, for Services that request it.

`plan.removed_endpoints` decides which connections. This module decides when: after a grace period, and at a
limited rate, so that the clients of a large Service do not all connect again at once. The mode finds its
connections and ends them (`Resetter`).
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from ebpfproxy import threads
from ebpfproxy.config import Config
from ebpfproxy.errors import KernelError, NotFound
from ebpfproxy.linux.sockets import sockets
from ebpfproxy.linux.sockets.sockets import DiagSocket
from ebpfproxy.log import Logger
from ebpfproxy.plan.removed_endpoints import RemovedEndpoint, RemovedEndpoints, TrackedConnection
from ebpfproxy.plan.service_plan import NodePlan, PlanKey, ServicePortPlan

log = Logger(__name__)

RESET = "Reset connections to removed endpoints"
"""With --removed-endpoints=reset, or by the annotation of a Service. `failed` connections are tried again."""
SEARCH_FAILED = "Failed to search connections to removed endpoints, retrying"
"""Connections to an endpoint that is gone may stay open."""

NOT_RESET = "Failed to reset a connection to a removed endpoint"
"""One connection; `Reset connections to removed endpoints` counts them."""

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
    """

    grace: float = 30.0
    rate: int = 100


def pace(config: Config) -> Pace:
    """Return what the configuration says."""
    return Pace(max(config.removed_endpoints_grace, _SHORTEST_GRACE), config.removed_endpoints_rate)


class RemovedConnections(Generic[C]):
    """A thread that resets connections. It starts with the first plan that requests it, and uses the network
    namespace of the thread that calls `expect`.

    Call `expect` before each sync, and `in_force` after it succeeded. `counted(reset, failed)` is called in
    the thread after each search that reset connections or failed to.
    """

    def __init__(self, resetter: Resetter[C], when: Pace, counted: Callable[[int, int], object]) -> None:
        self._resetter = resetter
        self._when = when
        self._counted = counted
        self._endpoints = RemovedEndpoints()
        self._done: set[C] = set()  # connections that were reset, as long as they are found
        self._due: float | None = None
        self._retry = 0.0
        self._closing = False
        self._node: NodePlan | None = None
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None = None) -> None:
        """Announce the next sync: its plans (None for a plan that is removed), and the node if it changed."""
        plans = dict(changed)
        self._node = node or self._node
        if not self._thread:
            if all(plan is None or plan.serving is None for plan in plans.values()):
                return
            self._closing = False
            self._thread = threading.Thread(target=self._run, name="removed-endpoints", daemon=True)
            self._thread.start()
            node = self._node
        self._jobs.put(lambda: self._endpoints.expect(plans))
        if node is not None:
            networks = node.node_port_networks
            self._jobs.put(lambda: self._endpoints.expect_node_ports(networks))

    def in_force(self, rejected: Callable[[], Collection[PlanKey]]) -> None:
        """Report that the sync succeeded: everything expected is in the kernel, except the plans that
        `rejected` returns."""
        if self._thread:
            not_in_force = frozenset(rejected())
            self._jobs.put(lambda: self._put_in_force(not_in_force))

    def close(self) -> None:
        """End the thread. It waits at most 5 s. The next `expect` may start another one."""
        if self._thread:
            self._jobs.put(self._end)
            threads.join(self._thread, _PATIENCE)
            self._thread = None

    def _put_in_force(self, rejected: frozenset[PlanKey]) -> None:
        if self._endpoints.in_force(rejected):
            self._due = time.monotonic()

    def _end(self) -> None:
        self._closing = True

    def _run(self) -> None:
        while not self._closing:
            self._wait()
            if self._closing or self._due is None or time.monotonic() < self._due:
                continue
            try:
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
        """Search connections to removed endpoints, and reset those whose grace period is over."""
        began = time.monotonic()
        found: dict[C, RemovedEndpoint] = {}
        for connection in self._resetter.connections():
            endpoint = self._endpoints.removed(connection)
            if endpoint:
                found[connection] = endpoint
        self._done &= found.keys()
        now = time.monotonic()
        waiting = {each: found[each] for each in found.keys() - self._done}
        endpoints = set(waiting.values())
        self._endpoints.searched(endpoints)
        due = {each: self._endpoints.since(each, now) + self._when.grace for each in endpoints}
        ripe = [each for each, endpoint in waiting.items() if due[endpoint] <= now]
        if ripe:
            # Then everything is searched again, since an endpoint may be back.
            seconds = max(_AGAIN, _BUSY_FACTOR * (time.monotonic() - began))
            self._reset(ripe[: math.ceil(self._when.rate * seconds)], seconds)
        else:
            self._due, self._retry = min(due.values(), default=None), 0.0

    def _reset(self, ripe: Sequence[C], seconds: float) -> None:
        """Reset connections at the rate. `seconds`: the time until the next search."""
        began = time.monotonic()
        results = [0, 0]
        with contextlib.closing(self._resetter.reset(ripe)) as outcomes:
            for succeeded in outcomes:
                results[succeeded] += 1
                time.sleep(max(0.0, began + sum(results) / self._when.rate - time.monotonic()))
        failed, reset = results
        if reset or failed:
            log.info(RESET, reset=reset, failed=failed)
            self._counted(reset, failed)
        if failed:
            self._back_off()
        else:
            self._done.update(ripe)
            self._due, self._retry = max(began + seconds, time.monotonic()), 0.0


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
