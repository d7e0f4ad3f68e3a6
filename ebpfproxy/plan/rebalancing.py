"""Which open connections move to endpoints that were added, so that these do not stay idle.

Long connections (gRPC, databases, message brokers) stay where they are after a scale-up. A Service can
request that some are reset, so that their clients connect again. A node knows its own connections only. Nodes
do not communicate, and need not:

- Each added endpoint has a *quota*: its equal share of this node's connections. If all nodes fill the quotas,
  the sums are even, too.
- The share of few connections is no whole number. A hash of node and endpoint decides which endpoints get one
  of the remainder, so that nodes favor different ones, and a node does not change its mind.
- Connections of the endpoints with most of them are reset. While that takes, only added endpoints below their
  quota get new connections: so nearly every reset moves a connection.
- Only an added endpoint begins this, and it ends when the quotas are filled. Random differences, and clients
  that come and go, cause no resets.

python -m tests.simulation shows the result on many nodes.
"""

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ebpfproxy.plan.connection_owners import EndpointOf
from ebpfproxy.plan.planned_endpoints import target_of
from ebpfproxy.plan.service_plan import PlanKey, Scope, ServicePortPlan

Target = bytes
"""Address and port of an endpoint, as in `PlannedEndpoints.targets`."""

Counts = Mapping[Target, int]
"""How many open connections of this node each endpoint has. Endpoints without any may be missing."""

STEP = 6.0
"""Seconds between two steps: clients have time to connect again."""
_SLACK = 1.1
"""How many resets there are at most, relative to the connections that are missing at the beginning: clients
select at random among several endpoints, so some must move again."""
_ROUNDING = 1e-6
_LONGEST = 3600.0
"""Seconds after which rebalancing ends in any case, for example because clients do not connect again."""


def quotas(total: int, targets: Collection[Target], seed: bytes) -> dict[Target, int]:
    """Divide `total` connections among endpoints as evenly as possible, those with one more first. `seed`: of
    this node and Service, which determines the order.

    >>> sorted(quotas(7, [b"a", b"b", b"c"], b"node").values())
    [2, 2, 3]
    """
    each, rest = divmod(total, len(targets)) if targets else (0, 0)
    order = sorted(targets, key=lambda target: hashlib.blake2b(seed + target, digest_size=8).digest())
    return {target: each + (number < rest) for number, target in enumerate(order)}


class Rebalancing:
    """One rebalancing of the connections of a ServicePort, from the addition of endpoints to its end."""

    def __init__(self, percent: int, seed: bytes, added: Collection[Target], now: float) -> None:
        """`percent`: of the connections, that may be reset in a minute. `seed`: see `quotas`."""
        self._percent = percent
        self._seed = seed
        self.added = frozenset(added)
        self._ends = now + _LONGEST
        self._total = 0
        self._left: int | None = None  # how many may still be reset
        self._credit = 0.0  # how many the percentage permits now
        self.full: frozenset[Target] = frozenset()
        """The endpoints that should get no new connections for now."""
        self.has_ended = False

    def step(
        self, counts: Counts, targets: Collection[Target], closed: Collection[Target], now: float
    ) -> dict[Target, int]:
        """Return how many connections of each endpoint to reset now, and set `full`. Call it every STEP
        seconds.

        `targets`: the endpoints that would get new connections without rebalancing. `closed`: those of them
        that get none. Only their connections are reset, so that they do not come back.
        """
        self._total = max(self._total, sum(counts.get(each, 0) for each in targets))
        wanted = quotas(self._total, targets, self._seed)
        # In an order of this node, so that not all nodes take from the same endpoint first.
        of = {each: counts.get(each, 0) for each in reversed(wanted)}
        missing = {
            each: wanted[each] - of[each] for each in of if each in self.added and of[each] < wanted[each]
        }
        donors = {each: of[each] for each in of if each not in missing and of[each] > self._total // len(of)}
        if self._left is None:
            self._left = math.ceil(_SLACK * sum(missing.values()))
        if not missing or not donors or not self._left or now >= self._ends:
            self.full, self.has_ended = frozenset(), True
            return {}
        # Clients get any of the missing endpoints: none should exceed its quota.
        room = min(sum(missing.values()), len(missing) * min(missing.values()))
        per_step = self._total * self._percent / 100 * STEP / 60
        self._credit = min(self._credit + per_step, per_step + 1)
        most = min(self._left, room, math.floor(self._credit + _ROUNDING))
        known = {each: number for each, number in donors.items() if each in closed}
        moving = _from_largest(known, most, self._total // len(of))
        self._left -= sum(moving.values())
        self._credit -= sum(moving.values())
        self.full = frozenset(each for each in of if each not in missing)
        return moving


class Rebalancings:
    """The Services that request rebalancing, as of the plans in force.

    Moments are in seconds of a steady clock.
    """

    def __init__(self, seed: bytes) -> None:
        """`seed`: of this node."""
        self._seed = seed
        self._plans: dict[PlanKey, _Known] = {}
        self._running: dict[PlanKey, Rebalancing] = {}
        self._ended: set[PlanKey] = set()

    def known(self) -> Collection[PlanKey]:
        """Return those that request it."""
        return self._plans.keys()

    def services(self) -> Collection[PlanKey]:
        """Return those whose connections are moved now."""
        return self._running.keys()

    def put(self, key: PlanKey, plan: ServicePortPlan | None, now: float) -> bool:
        """Put a plan in force, None for a deleted one. Return whether this begins a rebalancing."""
        previous = self._plans.pop(key, None)
        if plan is None or plan.rebalancing is None:
            self._end(key)
            return False
        percent, planned = plan.rebalancing
        targets = frozenset(planned.targets())
        usable = frozenset(target_of(each.address, each.port) for each in plan.usable(Scope.CLUSTER))
        self._plans[key] = _Known(targets, targets - usable)
        added = targets - previous.targets if previous and previous.targets else frozenset()
        if not added:
            return False
        name, family = key
        seed = self._seed + f"{name}/{name.protocol.name}/{family.value}".encode()
        running = self._running.get(key)
        if running:
            added |= running.added & targets  # pods become ready one after the other
        self._running[key] = Rebalancing(percent, seed, added, now)
        if running:
            self._running[key].full = running.full & targets
        return True

    def step(self, counts: Mapping[PlanKey, Counts], now: float) -> dict[EndpointOf, int]:
        """Return how many connections of each endpoint to reset now."""
        moving: dict[EndpointOf, int] = {}
        for key, running in list(self._running.items()):
            known = self._plans[key]
            found = running.step(counts.get(key, {}), known.targets, known.closed, now)
            moving.update({EndpointOf(key, target): number for target, number in found.items()})
            if running.has_ended:
                self._end(key)
        return moving

    def end(self) -> None:
        """End all of them."""
        for key in list(self._running):
            self._end(key)

    def _end(self, key: PlanKey) -> None:
        if self._running.pop(key, None):
            self._ended.add(key)

    def take_full(self) -> dict[PlanKey, frozenset[Target]]:
        """Return the endpoints that should get no new connections for now, of all Services that are
        rebalanced or were so since the last call."""
        found = {key: running.full for key, running in self._running.items()}
        found |= dict.fromkeys(self._ended - found.keys(), frozenset())
        self._ended.clear()
        return found


class _Known(NamedTuple):
    """`closed`: those of `targets` that get no new connections."""

    targets: frozenset[Target]
    closed: frozenset[Target]


def _from_largest(counts: Counts, most: int, least: int) -> dict[Target, int]:
    """Take up to `most` connections, each from the endpoint that has most, down to `least` of each.

    >>> _from_largest({b"a": 6, b"b": 4, b"c": 1}, 4, 1)
    {b'a': 3, b'b': 1}
    """
    left = [(-count, order, target) for order, (target, count) in enumerate(counts.items())]
    heapq.heapify(left)
    taken: Counter[Target] = Counter()
    while left and -left[0][0] > least and taken.total() < most:
        count, order, target = left[0]
        heapq.heapreplace(left, (count + 1, order, target))
        taken[target] += 1
    return dict(taken)
