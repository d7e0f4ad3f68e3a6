"""Which endpoint a client of a ServicePort gets: an algorithm, by default round robin, and session affinity.

This is what kube-proxy's first mode did (LoadBalancerRR, pkg/proxy/userspace/roundrobin.go of Kubernetes
1.25): each new connection gets the next endpoint. A client with affinity gets the endpoint of its previous
connection, unless that one was too long ago or the endpoint is gone. If the endpoint does not accept the
connection, the client's affinity moves to the next one.
"""

from collections import Counter
from itertools import repeat

from ebpfproxy.backends.userspace.entries import Balancing
from ebpfproxy.backends.userspace.relay.affinity import Affinity
from ebpfproxy.backends.userspace.relay.selection import Selection
from ebpfproxy.backends.userspace.relay.target import Target, target
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.planned_endpoints import PlannedEndpoints


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
        cluster, local = [], []
        listed = []
        weights = entry.weights or repeat(1)
        for each, weight in zip(PlannedEndpoints.packed(entry.rows), weights, strict=False):
            at = target(each.address, each.port)
            listed.append(at)
            if each.cluster:
                cluster.append((at, max(weight, 1)))
            if each.local:
                local.append((at, max(weight, 1)))
        self._listed = frozenset(listed)
        self._scopes = Selection(algorithm, cluster, positions[0]), Selection(algorithm, local, positions[1])

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
