"""Ends stale UDP flows of conntrack in the agent's network namespace, for modes that use the kernel's NAT.

`plan.stale_flows` decides which flows are stale. This module decides when to search: only after the rules are
in force. An earlier search is useless, because the client's next packet recreates the entry by the old rules
(kubernetes pull request 98305).
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy import threads
from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.plan.service_plan import Frontend, NodePlan, PlanKey, ServicePortPlan
from ebpfproxy.plan.stale_flows import StaleFlows

log = Logger(__name__)

ENDED = "Ended stale UDP flows"
"""Conntrack entries to endpoints that are gone were removed."""
SEARCH_FAILED = "Failed to search stale UDP flows, retrying"
"""A UDP client may keep sending to an endpoint that is gone."""
NOT_ENDED = "Failed to end a stale flow"
"""One conntrack entry; it ends by its timeout, or at the next search."""

_RETRY_S = 30.0  # seconds after an incomplete search; a change causes an earlier one
_CLOSE_TIMEOUT_S = 5.0  # seconds that the end of the agent waits for a search

_Job = Callable[[StaleFlows], Collection[Family] | None]
"""A change of the expected flows. Returns the families to search, if any."""


class SearchResult(NamedTuple):
    """The result of one search through the flows of a family: how many flows were ended, how many could not
    be ended, and the duration.
    """

    family: Family
    deleted: int
    failed: int
    seconds: float


class StaleConntrack:
    """A thread that searches for stale flows, so that no sync waits for it. It uses the network namespace of
    the thread that creates it.

    Call `expect` before each sync, and `in_force` after it succeeded. Requests that arrive during a search
    are combined into one. If no change affects UDP flows, the kernel is not queried. `counted` is called in
    this thread after each search.
    """

    def __init__(self, counted: Callable[[SearchResult], object]) -> None:
        self._counted = counted
        self._flows = StaleFlows()
        self._due: set[Family] = set()
        self._failed: set[Family] = set()
        self._retry_at = 0.0
        self._last_reason = ""
        self._closing = False
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stale-conntrack", daemon=True)
        self._thread.start()

    def inherit(self, frontends: Iterable[Frontend]) -> None:
        """Add the frontends of the rules that a previous run left in the kernel. Call it before the first
        sync.
        """
        frontends_left = tuple(frontends)
        self._jobs.put(lambda flows: flows.inherit(frontends_left))

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None = None) -> None:
        """Announce the next sync: its plans (None for a plan that is removed), and the node if it changed.

        Call it before the first rule changes, so that no flow that a new rule creates counts as stale. After
        a failed sync, announce only the changes since then.
        """
        plans = dict(changed)
        self._jobs.put(lambda flows: flows.expect(plans))
        if node is not None:
            networks = node.node_port_networks
            self._jobs.put(lambda flows: flows.expect_node_ports(networks))

    def in_force(self, rejected: Collection[PlanKey] = ()) -> None:
        """Report that the sync succeeded: everything expected is in the kernel, except the plans in
        `rejected`.

        The rejected plans count as in force once this is called without them.
        """
        not_in_force = frozenset(rejected)
        self._jobs.put(lambda flows: flows.in_force(not_in_force))

    def search(self) -> None:
        """Search all families unconditionally: the rules were not in force for a while, because another
        program had removed them.
        """
        self._jobs.put(lambda flows: frozenset(Family))

    def close(self) -> None:
        """Finish the requested searches and end the thread. Wait at most 5 s."""
        self._jobs.put(self._end)
        threads.join(self._thread, _CLOSE_TIMEOUT_S)

    def _end(self, flows: StaleFlows) -> None:
        self._closing = True

    def _run(self) -> None:
        while not self._closing:
            self._wait()
            while self._due:
                family = self._due.pop()
                try:
                    self._search(family)
                except Unsupported as failure:  # a retry cannot succeed
                    self._report(failure.message, failure.hint)
                except KernelError as failure:
                    self._report(failure.message, failure.hint)
                    self._retry(family)
                except Exception as failure:  # the thread must continue: nothing else ends later stale flows
                    self._report(repr(failure), "")
                    self._retry(family)

    def _wait(self) -> None:
        """Wait for a job, or for the time at which failed searches are retried."""
        timeout = max(0.0, self._retry_at - time.monotonic()) if self._failed else None
        with contextlib.suppress(queue.Empty):
            self._do(self._jobs.get(timeout=timeout))
        self._do_queued()
        if self._due or time.monotonic() >= self._retry_at:
            self._due |= self._failed
            self._failed.clear()

    def _do_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._do(self._jobs.get_nowait())

    def _do(self, job: _Job) -> None:
        self._due |= frozenset(job(self._flows) or ())

    def _retry(self, family: Family) -> None:
        self._failed.add(family)
        self._retry_at = time.monotonic() + _RETRY_S

    def _search(self, family: Family) -> None:
        began = time.monotonic()
        found = [flow for flow in conntrack.flows(Protocol.UDP, family) if self._flows.is_stale(flow)]
        # A sync that began during the search called `expect` before it changed a rule. Its job is processed
        # now, so flows in `found` that its rules created no longer count as stale.
        self._do_queued()
        deleted = failed = 0
        for flow in filter(self._flows.is_stale, found):
            try:
                deleted += conntrack.delete(flow)
            except KernelError as failure:
                failed += 1
                log.debug(NOT_ENDED, flow=flow, reason=failure.message)
        if failed:
            self._retry(family)
        elif family not in self._due:
            self._flows.forget_gone(family)
        self._last_reason = ""
        self._count(SearchResult(family, deleted, failed, time.monotonic() - began))

    def _count(self, result: SearchResult) -> None:
        if result.deleted or result.failed:
            log.info(
                ENDED,
                family=result.family.value,
                deleted=result.deleted,
                failed=result.failed,
                duration_ms=round(1000 * result.seconds, 3),
            )
        self._counted(result)

    def _report(self, reason: str, hint: str) -> None:
        """Log an error once, until the reason changes."""
        if reason != self._last_reason:
            log.error(SEARCH_FAILED, reason=reason, hint=hint)
        self._last_reason = reason
