"""Which endpoint a client of a ServicePort gets: round robin and session affinity.

This is what kube-proxy's first mode did (LoadBalancerRR, pkg/proxy/userspace/roundrobin.go of Kubernetes
1.25): each new connection gets the next endpoint. A client with affinity gets the endpoint of its previous
connection, unless that one was too long ago or the endpoint is gone. If the endpoint does not accept the
connection, the client's affinity moves to the next one.
"""

from ebpfproxy.backends.userspace.entries import Balancing
from ebpfproxy.backends.userspace.relay.affinity import Affinity
from ebpfproxy.backends.userspace.relay.target import Target, target
from ebpfproxy.plan.planned_endpoints import PlannedEndpoints


class Balancer:
    """One ServicePort. Each scope, Cluster and Local, has its own round robin."""

    def __init__(self, entry: Balancing, affinity: Affinity, first: int) -> None:
        """`first`: the number of the endpoint that the first connection gets, modulo their number."""
        self._affinity = affinity
        self._positions = [first, first]
        self.put(entry)

    def put(self, entry: Balancing) -> None:
        """Replace the endpoints. The round robin continues at its position."""
        self.entry = entry
        endpoints = PlannedEndpoints.packed(entry.rows)
        cluster = tuple(target(each.address, each.port) for each in endpoints if each.cluster)
        local = tuple(target(each.address, each.port) for each in endpoints if each.local)
        self._members = (cluster, local)
        self._listed = frozenset(target(each.address, each.port) for each in endpoints)

    def has_any(self, local: bool) -> bool:
        """Return whether this scope has an endpoint."""
        return bool(self._members[local])

    def is_listed(self, wanted: Target) -> bool:
        """Return whether UDP flows to this endpoint may continue: it is in any scope, or still serves."""
        return wanted in self._listed

    def choose(self, client: str, local: bool, now: float, moves: bool = False) -> Target | None:
        """Return the endpoint for a new connection, None if this scope has none.

        `moves`: the endpoint that the client got before did not accept the connection, so it gets the next
        one.
        """
        members = self._members[local]
        if not members:
            return None
        timeout = self.entry.affinity_timeout
        if timeout and not moves:
            chosen = self._affinity.get(self, client, timeout, now)
            if chosen in members:
                self._affinity.set(self, client, chosen, now)
                return chosen
        position = self._positions[local] % len(members)
        self._positions[local] = position + 1
        chosen = members[position]
        if timeout:
            self._affinity.set(self, client, chosen, now)
        return chosen
