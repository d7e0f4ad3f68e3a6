"""Which open TCP connections a node resets: those to removed endpoints, and those that rebalancing moves."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from ebpfproxy.model.address import Network, Protocol
from ebpfproxy.plan.connection_owners import ConnectionOwners, EndpointOf
from ebpfproxy.plan.rebalancing import STEP, Rebalancings, Target
from ebpfproxy.plan.removed_endpoints import RemovedEndpoints
from ebpfproxy.plan.service_plan import PlanKey, ServicePortPlan
from ebpfproxy.plan.tracked_connection import TrackedConnection

C = TypeVar("C", bound=TrackedConnection)

_OPENING = 5.0
"""Seconds in which a connection that began to open before the removal is established, or never will be. The
last search is then, or after the grace period."""


class Resets(NamedTuple, Generic[C]):
    """The result of a search.

    - `removed`: connections whose endpoint was removed at least the grace period ago.
    - `moving`: connections that rebalancing moves.
    - `due`: the time of the next search if nothing changes, None if none is necessary.
    """

    removed: list[C]
    moving: list[C]
    due: float | None


class OpenConnections(Generic[C]):
    """Takes plans in, and selects connections. Moments are in seconds of a steady clock."""

    def __init__(self, grace: float, seed: bytes) -> None:
        """`grace`: seconds from the removal of an endpoint until its connections are reset. `seed`: of this
        node, see `rebalancing`."""
        self._grace = grace
        self._owners = ConnectionOwners()
        self._removed = RemovedEndpoints()
        self._rebalancings = Rebalancings(seed)
        self._expected: dict[PlanKey, ServicePortPlan | None] = {}
        self._next_step = 0.0
        self._last_search = -math.inf  # until then, connections to removed endpoints may still be opening

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None]) -> None:
        """Take in plans that are about to be in force, None for a deleted one. Only TCP plans count."""
        for key, plan in changed.items():
            if key[0].protocol is Protocol.TCP:
                self._expected[key] = plan
                self._removed.expect(key, plan)

    def expect_node_ports(self, networks: frozenset[Network]) -> None:
        """Take in `NodePlan.node_port_networks`. Initially it is empty."""
        self._owners.expect_node_ports(networks)

    def in_force(self, now: float, rejected: Collection[PlanKey] = ()) -> float | None:
        """Put the expected plans in force, except those that the kernel `rejected`, which remain expected.

        Return when a search is due because of that, None if none is.
        """
        arrived = {key: plan for key, plan in self._expected.items() if key not in rejected}
        self._expected = {key: plan for key, plan in self._expected.items() if key in rejected}
        due: list[float] = []
        for key, plan in arrived.items():
            self._owners.put(key, plan, bool(plan and requested_resets(plan)))
            if self._removed.put(key, plan, now):
                due.append(now + self._grace)
                self._last_search = now + max(self._grace, _OPENING)
            if self._rebalancings.put(key, plan, now):
                due.append(now)
        return min(due, default=None)

    def search(self, connections: Iterable[C], now: float) -> Resets[C]:
        """Select connections. `connections`: all that are open."""
        removed: dict[EndpointOf, list[C]] = defaultdict(list)
        counts: dict[PlanKey, Counter[Target]] = defaultdict(Counter)
        others: dict[EndpointOf, list[C]] = defaultdict(list)
        moved = self._rebalancings.services()
        for each in connections:
            endpoint = self._owners.endpoint(each)
            if endpoint is None:
                continue
            if endpoint in self._removed:
                removed[endpoint].append(each)
            elif endpoint.service in moved:
                counts[endpoint.service][endpoint.target] += 1
                others[endpoint].append(each)
        due = {each: self._removed.since(each) + self._grace for each in removed}
        if now >= self._last_search:
            self._removed.searched(removed.keys())
        ripe = [each for endpoint, of in removed.items() if due[endpoint] <= now for each in of]
        moving: list[C] = []
        if moved and now >= self._next_step:
            self._next_step = now + STEP
            for endpoint, number in self._rebalancings.step(counts, now).items():
                moving += islice(others[endpoint], number)
        self._owners.keep({*self._removed.services(), *self._rebalancings.known()})
        later = [at for at in due.values() if at > now]
        if self._rebalancings.services():
            later.append(self._next_step)
        if self._last_search > now:
            later.append(self._last_search)
        return Resets(ripe, moving, min(later, default=None))

    def end(self) -> None:
        """End all rebalancing. The next call of `take_full` returns it."""
        self._rebalancings.end()

    def take_full(self) -> dict[PlanKey, frozenset[Target]]:
        """See `Rebalancings.take_full`."""
        return self._rebalancings.take_full()


def requested_resets(plan: ServicePortPlan) -> list[str]:
    """Return the requests to reset connections of a ServicePort, each as the name of the annotation and its
    value."""
    found = [] if plan.serving is None else ["removed-endpoints reset"]
    return found + ([f"rebalance {plan.rebalancing.percent}"] if plan.rebalancing else [])
