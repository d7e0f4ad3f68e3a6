"""Removed endpoints: which open TCP connections go to an endpoint that does not serve its Service any more.

Kubernetes ends no connection when an endpoint is removed: the client must notice by itself, which can take
hours (kubernetes issues 45300, 108523, KEP-5707). A Service can request that its connections are reset
(`ServicePortPlan.serving`). Only its connections count here.

Which endpoints count is decided by the plans in force:

- An endpoint is removed if it served the Service while this agent ran, and does not any more. Endpoints that
  another Service had under the same frontend, or that were removed before the agent started, do not count:
  their connections may be right.
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
        self._gone: dict[PlanKey, dict[bytes, float]] = {}  # since when endpoints do not serve any more
        self._expected: dict[PlanKey, frozenset[bytes]] = {}
        self._deleted: set[PlanKey] = set()

    def services(self) -> Collection[PlanKey]:
        """Return those that request it, and deleted ones whose connections may still be open."""
        return self._serving.keys()

    def expect(self, key: PlanKey, plan: ServicePortPlan | None) -> None:
        """Take in a plan that is about to be in force. Its endpoints may get connections from now on."""
        self._expected[key] = _serving(plan)

    def put(self, key: PlanKey, plan: ServicePortPlan | None, now: float) -> bool:
        """Put a plan in force, None for a deleted one. Return whether more endpoints are removed than
        before."""
        self._expected.pop(key, None)
        if plan and plan.serving is None:
            self._forget(key)
            return False
        previous = self._serving.get(key)
        if plan is None:
            if previous is None:
                return False
            self._deleted.add(key)
        else:
            self._deleted.discard(key)
        serving = self._serving[key] = _serving(plan)
        before = self._gone.get(key, {})
        gone = before.keys() | (previous or frozenset())
        self._gone[key] = {each: before.get(each, now) for each in gone - serving}
        return not self._gone[key].keys() <= before.keys()

    def _forget(self, key: PlanKey) -> None:
        if self._serving.pop(key, None) is not None:
            del self._gone[key]
            self._deleted.discard(key)

    def __contains__(self, endpoint: EndpointOf) -> bool:
        """Whether the endpoint no longer serves a Service that requests a reset."""
        key, target = endpoint
        return target in self._gone.get(key, ()) and target not in self._expected.get(key, ())

    def since(self, endpoint: EndpointOf) -> float:
        """Return the time of the removal of an endpoint that is contained."""
        return self._gone[endpoint.service][endpoint.target]

    def searched(self, found: Collection[EndpointOf]) -> None:
        """Forget what no connection needs any more. `found`: the removed endpoints of all connections."""
        needed: dict[PlanKey, set[bytes]] = {}
        for service, target in found:
            needed.setdefault(service, set()).add(target)
        for key, gone in self._gone.items():
            self._gone[key] = {each: since for each, since in gone.items() if each in needed.get(key, ())}
        for key in self._deleted - needed.keys():
            self._forget(key)


def _serving(plan: ServicePortPlan | None) -> frozenset[bytes]:
    return frozenset(plan.serving.targets()) if plan and plan.serving is not None else frozenset()
