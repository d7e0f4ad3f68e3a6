"""The algorithms that select one of several endpoints for a new connection."""

import math
import random
import zlib
from collections import Counter
from collections.abc import Sequence

from ebpfproxy.backends.userspace.relay.target import Target
from ebpfproxy.model.balancing import Algorithm

ALGORITHMS = (Algorithm.ROUND_ROBIN, Algorithm.RANDOM, Algorithm.SOURCE_HASH, Algorithm.LEAST_CONNECTIONS)
"""Those that a relay has."""


class Selection:
    """The endpoints of one scope, with weights. `select` requires at least one endpoint."""

    def __init__(self, algorithm: Algorithm, weighted: Sequence[tuple[Target, int]], first: int) -> None:
        """`weighted`: endpoints with weights of at least 1. `first`: where round robin begins, and the choice
        among those that have equally few connections.
        """
        self._algorithm = algorithm
        self.members = frozenset(target for target, _ in weighted)
        self._cycle = _cycle(weighted)
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


def _cycle(weighted: Sequence[tuple[Target, int]]) -> list[Target]:
    """Return each endpoint as often as its weight says, evenly distributed (smooth weighted round robin).

    >>> a, b = Target(2, "10.0.0.1", 80), Target(2, "10.0.0.2", 80)
    >>> [each.address[-1] for each in _cycle([(a, 3), (b, 1)])]
    ['1', '1', '2', '1']
    """
    if all(weight == 1 for _, weight in weighted):
        return [target for target, _ in weighted]
    total = sum(weight for _, weight in weighted)
    current = [0] * len(weighted)
    cycle = []
    for _ in range(total):
        current = [value + weight for value, (_, weight) in zip(current, weighted, strict=True)]
        best = current.index(max(current))
        current[best] -= total
        cycle.append(weighted[best][0])
    return cycle


def _score(client: str, target: Target, weight: int) -> float:
    """Return the score of rendezvous hashing: a change of the endpoints moves few clients."""
    hashed = zlib.crc32(f"{client} {target}".encode()) / (1 << 32)
    return math.pow(hashed, 1 / weight)
