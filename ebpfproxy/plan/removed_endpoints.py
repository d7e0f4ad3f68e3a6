"""Removed endpoints: which open TCP connections go to an endpoint that does not serve its Service any more.

Kubernetes ends no connection when an endpoint is removed: the client must notice by itself, which can take
hours (kubernetes issues 45300, 108523, KEP-5707). A Service can request that its connections are reset
(`ServicePortPlan.serving`). Only its connections count here.

As in `stale_flows`, this is computed from the connections and the plans in force, not from a history of
events. So it is the same in all modes, and an error or a restart loses nothing. Only the time since which an
endpoint is gone is remembered. After a start, endpoints of a previous run are gone from then on.

- A connection is left alone if its endpoint serves, also if no new connection would use it.
- If a Service was deleted, its endpoints count as removed.
"""

from collections.abc import Collection

from ebpfproxy.plan.connection_owners import EndpointOf
from ebpfproxy.plan.service_plan import PlanKey, ServicePortPlan


class RemovedEndpoints:
    """The Services that request a reset, as of the plans in force. The cost of a call depends on the number
    of changed plans.
    """

    def __init__(self) -> None:
        self._serving: dict[PlanKey, frozenset[bytes]] = {}
        self._deleted: set[PlanKey] = set()
        self._since: dict[EndpointOf, float] = {}

    def services(self) -> Collection[PlanKey]:
        """Return those that request it, and deleted ones whose connections may still be open."""
        return self._serving.keys()

    def put(self, key: PlanKey, plan: ServicePortPlan | None) -> bool:
        """Put a plan in force, None for a deleted one. Return whether more connections may go to removed
        endpoints than before."""
        previous = self._serving.get(key)
        if plan is None:
            if previous is None:
                return False
            self._deleted.add(key)
            self._serving[key] = frozenset()
            return True
        if plan.serving is None:
            self._forget(key)
            return False
        serving = frozenset(plan.serving.targets())
        self._serving[key] = serving
        self._deleted.discard(key)
        for gone in [each for each in self._since if each.service == key and each.target in serving]:
            del self._since[gone]
        return previous is None or not previous <= serving

    def _forget(self, key: PlanKey) -> None:
        if self._serving.pop(key, None) is not None:
            self._deleted.discard(key)
            self._since = {each: since for each, since in self._since.items() if each.service != key}

    def __contains__(self, endpoint: EndpointOf) -> bool:
        """Whether the endpoint does not serve a Service that requests a reset."""
        serving = self._serving.get(endpoint.service)
        return serving is not None and endpoint.target not in serving

    def since(self, endpoint: EndpointOf, now: float) -> float:
        """Return the time since which the endpoint is gone: `now` at the first call."""
        return self._since.setdefault(endpoint, now)

    def searched(self, found: Collection[EndpointOf]) -> None:
        """Forget what no connection needs any more. `found`: the removed endpoints of all connections."""
        self._since = {each: since for each, since in self._since.items() if each in found}
        for key in self._deleted - {each.service for each in found}:
            self._forget(key)
