"""Tracked UDP flows that no plan wants, in the node's own network namespace: they are ended.

For every backend that leaves translating to the kernel's NAT. Which flows are stale is settled in
`plan.stale_flows`; here is when they are looked for: after the rules are in force, never before, else a
client's next packet makes the entry again by the old rules (kubernetes pull request 98305).
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from ebpfproxy.errors import KernelError, Unsupported
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.log import Logger
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.plan.service_plan import Frontend, NodePlan, PlanKey, ServicePortPlan
from ebpfproxy.plan.stale_flows import StaleFlows

log = Logger(__name__)

STILL_SEARCHING = "Ending while stale flows are searched"
"""The agent does not wait any longer for the search."""
ENDED = "Ended stale UDP flows"
"""Conntrack entries to endpoints that are gone were removed."""
SEARCH_FAILED = "Failed to search stale UDP flows, retrying"
"""A UDP client may keep sending to an endpoint that is gone."""
NOT_ENDED = "Failed to end a stale flow"
"""One conntrack entry; it ends by its timeout, or at the next search."""

_RETRY = 30.0  # seconds after a look that failed, or left some; a change brings the next one earlier
_PATIENCE = 5.0  # seconds that an agent's end waits for a look

_Job = Callable[[StaleFlows], Collection[Family] | None]
"""Something to tell the book of flows; it returns where to look, if anywhere."""


class Look(NamedTuple):
    """One search through the flows of a family: how many were ended, how many could not be ended, how long it
    took."""

    family: Family
    deleted: int
    failed: int
    seconds: float


class StaleConntrack:
    """A thread of its own, so that no sync waits for it, in the network namespace of its maker.

    Around each sync `expect` is called before, and `in_force` after it has succeeded. What comes in while the
    thread is looking is looked for in one go. Where nothing that matters to UDP flows changed, the kernel is
    not asked. `counted` is called in the thread after each look.
    """

    def __init__(self, counted: Callable[[Look], object]) -> None:
        self._counted = counted
        self._flows = StaleFlows()
        self._due: set[Family] = set()
        self._failed: set[Family] = set()
        self._retry_at = 0.0
        self._reported = ""
        self._ends = False
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stale-conntrack", daemon=True)
        self._thread.start()

    def inherit(self, frontends: Iterable[Frontend]) -> None:
        """What the rules that an earlier run left in the kernel serve; before the first sync."""
        left = tuple(frontends)
        self._jobs.put(lambda flows: flows.inherit(left))

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None], node: NodePlan | None = None) -> None:
        """The sync to come brings in these plans, None for one that goes; `node` where that is another one.

        Said before the first rule is changed: then no flow that such a rule makes is taken for stale. After a
        sync that failed, the next one needs only what changed since.
        """
        plans = dict(changed)
        self._jobs.put(lambda flows: flows.expect(plans))
        if node is not None:
            networks = node.node_port_networks
            self._jobs.put(lambda flows: flows.expect_node_ports(networks))

    def in_force(self, rejected: Collection[PlanKey] = ()) -> None:
        """The sync succeeded: all that was expected is in the kernel, but for the plans that it `rejected`.

        Those are in force once this is called without them.
        """
        kept_out = frozenset(rejected)
        self._jobs.put(lambda flows: flows.in_force(kept_out))

    def look(self) -> None:
        """Look in any case: the rules were not in force for a while, since another program had removed
        them."""
        self._jobs.put(lambda flows: frozenset(Family))

    def close(self) -> None:
        """Finish what was asked for, and end. Where that takes longer than 5 s, it is not waited for."""
        self._jobs.put(self._end)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            log.warning(STILL_SEARCHING, seconds=_PATIENCE)

    def _end(self, flows: StaleFlows) -> None:
        self._ends = True

    def _run(self) -> None:
        while not self._ends:
            self._wait()
            while self._due:
                family = self._due.pop()
                try:
                    self._look(family)
                except Unsupported as failure:  # it will not do better next time
                    self._report(failure.message, failure.hint)
                except KernelError as failure:
                    self._report(failure.message, failure.hint)
                    self._retry(family)
                except Exception as failure:  # the thread continues: no other program looks for later ones
                    self._report(repr(failure), "")
                    self._retry(family)

    def _wait(self) -> None:
        """For something to do, or for the time at which what failed is tried again."""
        rest = max(0.0, self._retry_at - time.monotonic()) if self._failed else None
        with contextlib.suppress(queue.Empty):
            self._do(self._jobs.get(timeout=rest))
        self._do_waiting()
        if self._due or time.monotonic() >= self._retry_at:
            self._due |= self._failed
            self._failed.clear()

    def _do_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._do(self._jobs.get_nowait())

    def _do(self, job: _Job) -> None:
        self._due |= frozenset(job(self._flows) or ())

    def _retry(self, family: Family) -> None:
        self._failed.add(family)
        self._retry_at = time.monotonic() + _RETRY

    def _look(self, family: Family) -> None:
        began = time.monotonic()
        found = [flow for flow in conntrack.flows(Protocol.UDP, family) if self._flows.is_stale(flow)]
        # A sync that began meanwhile has said so before it changed a rule. So all flows in `found` that a
        # newer rule made are known as such from here on, and what begins from here on is not in `found`.
        self._do_waiting()
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
        self._reported = ""
        self._count(Look(family, deleted, failed, time.monotonic() - began))

    def _count(self, look: Look) -> None:
        if look.deleted or look.failed:
            log.info(
                ENDED,
                family=look.family.value,
                deleted=look.deleted,
                failed=look.failed,
                duration_ms=round(1000 * look.seconds, 3),
            )
        self._counted(look)

    def _report(self, reason: str, hint: str) -> None:
        """Once, until there is another reason."""
        if reason != self._reported:
            log.error(SEARCH_FAILED, reason=reason, hint=hint)
        self._reported = reason
