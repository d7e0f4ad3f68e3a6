"""Which endpoint a client of a ServicePort gets: an algorithm, by default round robin, and session affinity.

This is what kube-proxy's first mode did (LoadBalancerRR, pkg/proxy/userspace/roundrobin.go of Kubernetes
1.25): each new connection gets the next endpoint. A client with affinity gets the endpoint of its previous
connection, unless that one was too long ago or the endpoint is gone. If the endpoint does not accept the
connection, the client's affinity moves to the next one.
"""

import math
import random
import zlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from itertools import repeat

from ebpfproxy.backends.userspace.entries import Balancing
from ebpfproxy.backends.userspace.relay.workload import Target, target
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.planned_endpoints import PlannedEndpoints
from ebpfproxy.plan.weights import interleaved

ALGORITHMS = (Algorithm.ROUND_ROBIN, Algorithm.RANDOM, Algorithm.SOURCE_HASH, Algorithm.LEAST_CONNECTIONS)
"""Those that a relay has."""


class Affinity:
    """The endpoint that each client got last. The least recently active client is forgotten first.

    All connections of a client to a ServicePort with affinity are accepted by the same relay: the kernel
    selects it by the client's address (see `held.py`). So relays need not share this table.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._choices: OrderedDict[tuple[Hashable, str], tuple[Target, float]] = OrderedDict()

    def get(self, service: Hashable, client: str, timeout: float, now: float) -> Target | None:
        """Return the endpoint of a client that was active within `timeout` seconds, else None."""
        chosen, used = self._choices.get((service, client), (None, now))
        if now - used > timeout:
            del self._choices[service, client]
            return None
        return chosen

    def set(self, service: Hashable, client: str, target: Target, now: float) -> None:
        """The client is active now, and uses this endpoint."""
        self._choices[service, client] = target, now
        self._choices.move_to_end((service, client))
        if len(self._choices) > self._most:
            self._choices.popitem(last=False)


class Balancer:
    """One ServicePort. Each scope, Cluster and Local, has its own round robin."""

    def __init__(self, entry: Balancing, affinity: Affinity, first: int) -> None:
        """`first`: the number of the endpoint that the first connection gets, modulo their number."""
        self._affinity = affinity
        self.connections: Counter[Target] = Counter()
        """The connections of this relay by endpoint: open ones, and attempts."""
        self._put(entry, (first, first))

    def put(self, entry: Balancing) -> None:
        """Replace the endpoints. The round robin continues at its position."""
        self._put(entry, (self._scopes[0].position, self._scopes[1].position))

    def _put(self, entry: Balancing, positions: tuple[int, int]) -> None:
        self.entry = entry
        algorithm = Algorithm(entry.algorithm)
        endpoints = [
            (each, target(each.address, each.port), max(weight, 1))
            for each, weight in zip(
                PlannedEndpoints.packed(entry.rows), entry.weights or repeat(1), strict=False
            )
        ]
        self._listed = frozenset(at for _, at, _ in endpoints)
        cluster = [(at, weight) for each, at, weight in endpoints if each.cluster]
        local = [(at, weight) for each, at, weight in endpoints if each.local]
        self._scopes = _Scope(algorithm, cluster, positions[0]), _Scope(algorithm, local, positions[1])

    def has_any(self, local: bool) -> bool:
        """Return whether this scope has an endpoint."""
        return bool(self._scopes[local].members)

    def is_listed(self, wanted: Target) -> bool:
        """Return whether UDP flows to this endpoint may continue: it is in any scope, or still serves."""
        return wanted in self._listed

    def began(self, to: Target) -> None:
        """Count an attempt to connect to an endpoint, and then the connection, until `ended`."""
        self.connections[to] += 1

    def ended(self, to: Target) -> None:
        """The attempt failed, or the connection has ended."""
        self.connections[to] -= 1
        if not self.connections[to]:
            del self.connections[to]

    def choose(self, client: str, local: bool, now: float, failed: Target | None = None) -> Target | None:
        """Return the endpoint for a new connection, None if this scope has none.

        `failed`: the endpoint that the client got before, and that did not accept the connection.
        """
        scope = self._scopes[local]
        if not scope.members:
            return None
        timeout = self.entry.affinity_timeout
        chosen = None
        if timeout and failed is None:
            chosen = self._affinity.get(self, client, timeout, now)
        if chosen not in scope.members:
            chosen = scope.select(client, self.connections) if failed is None else scope.next_after(failed)
        if timeout and chosen:
            self._affinity.set(self, client, chosen, now)
        return chosen


class _Scope:
    """The endpoints of one scope, with weights. `select` requires at least one endpoint."""

    def __init__(self, algorithm: Algorithm, weighted: Sequence[tuple[Target, int]], first: int) -> None:
        """`weighted`: endpoints with weights of at least 1. `first`: where round robin begins, and the choice
        among those that have equally few connections.
        """
        self._algorithm = algorithm
        self.members = frozenset(target for target, _ in weighted)
        self._cycle = [weighted[at][0] for at in interleaved([weight for _, weight in weighted])]
        self._weighted = weighted
        self.position = first
        """The position of the next choice in turn."""

    def select(self, client: str, connections: Counter[Target]) -> Target:
        """Return the endpoint for a connection of a client. `connections`: those that are open, by
        endpoint.
        """
        if self._algorithm is Algorithm.RANDOM:
            return random.choice(self._cycle)
        if self._algorithm is Algorithm.SOURCE_HASH:
            return max(self._weighted, key=lambda each: _score(client, *each))[0]
        if self._algorithm is Algorithm.LEAST_CONNECTIONS:
            at = self._advanced() % len(self._weighted)  # so that equal ones take turns
            in_turn = (*self._weighted[at:], *self._weighted[:at])
            return min(in_turn, key=lambda each: (connections[each[0]] + 1) / each[1])[0]
        return self._next()

    def next_after(self, failed: Target) -> Target:
        """Return an endpoint for a retry: the next one of the round robin that has not just failed."""
        chosen = self._next()
        return self._next() if chosen == failed and len(self.members) > 1 else chosen

    def _next(self) -> Target:
        return self._cycle[self._advanced() % len(self._cycle)]

    def _advanced(self) -> int:
        """Return the position, and advance it."""
        self.position += 1
        return self.position - 1


def _score(client: str, target: Target, weight: int) -> float:
    """Return the score of rendezvous hashing: a change of the endpoints moves few clients."""
    hashed = zlib.crc32(f"{client} {target}".encode()) / (1 << 32)
    return math.pow(hashed, 1 / weight)
