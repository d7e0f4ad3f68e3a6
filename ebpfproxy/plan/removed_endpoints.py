"""Removed endpoints: which open TCP connections go to an endpoint that does not serve its Service any more.

Kubernetes ends no connection when an endpoint is removed: the client must notice by itself, which can take
hours (kubernetes issues 45300, 108523, KEP-5707). A Service can request that its connections are reset
(`ServicePortPlan.serving`). Only its connections count here.

As in `stale_flows`, this is computed from the connections and the plans in force, not from a history of
events. So it is the same in all modes, and an error or a restart loses nothing. Only the time since which an
endpoint is gone is remembered. After a start, endpoints of a previous run are gone from then on.

- A connection belongs to the Service that has its frontend, or that had it last.
- It is left alone if its endpoint serves, also if no new connection would use it.
- If a Service was deleted, its endpoints count as removed.
- A connection that is not translated belongs to no Service, although its destination is a frontend.
"""

import typing
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import Address, Network, Protocol, family, unspecified
from ebpfproxy.plan.node_ports import NodePortAddresses
from ebpfproxy.plan.planned_endpoints import target_of
from ebpfproxy.plan.service_plan import PlanKey, ServicePortPlan
from ebpfproxy.plan.stale_flows import FrontendAddress


class TrackedConnection(typing.Protocol):
    """An open TCP connection: where the client sends its packets, and which address and port answers."""

    @property
    def destination(self) -> Address: ...
    @property
    def destination_port(self) -> int: ...
    @property
    def reply_source(self) -> Address: ...
    @property
    def reply_source_port(self) -> int: ...


class RemovedEndpoint(NamedTuple):
    """An endpoint that does not serve the Service. `target`: as in `PlannedEndpoints.targets`."""

    service: PlanKey
    target: bytes


class RemovedEndpoints:
    """The Services that request a reset, as of the plans in force. The cost of a call depends on the number
    of changed plans.
    """

    def __init__(self) -> None:
        self._serving: dict[PlanKey, frozenset[bytes]] = {}
        self._deleted: set[PlanKey] = set()
        self._owners: dict[FrontendAddress, PlanKey] = {}
        self._expected: dict[PlanKey, ServicePortPlan | None] = {}
        self._node_ports = NodePortAddresses()
        self._since: dict[RemovedEndpoint, float] = {}

    def expect(self, changed: Mapping[PlanKey, ServicePortPlan | None]) -> None:
        """Take in plans that are about to be in force, None for a deleted one. Only TCP plans count."""
        self._expected.update({key: plan for key, plan in changed.items() if key[0].protocol is Protocol.TCP})

    def expect_node_ports(self, networks: frozenset[Network]) -> None:
        """Take in `NodePlan.node_port_networks`. Initially it is empty."""
        self._node_ports = NodePortAddresses(networks)

    def in_force(self, rejected: Collection[PlanKey] = ()) -> bool:
        """Put the expected plans in force, except those that the kernel `rejected`, which remain expected.

        Return whether more connections may go to removed endpoints than before.
        """
        arrived = {key: plan for key, plan in self._expected.items() if key not in rejected}
        self._expected = {key: plan for key, plan in self._expected.items() if key in rejected}
        gained = [self._put(key, plan) for key, plan in arrived.items()]
        return any(gained)

    def _put(self, key: PlanKey, plan: ServicePortPlan | None) -> bool:
        previous = self._serving.get(key)
        if plan is None:
            if previous is None:
                return False
            self._deleted.add(key)
            self._serving[key] = frozenset()
            return True
        self._own(key, plan)
        if plan.serving is None:
            self._forget(key)
            return False
        serving = frozenset(plan.serving.targets())
        self._serving[key] = serving
        self._deleted.discard(key)
        for gone in [each for each in self._since if each.service == key and each.target in serving]:
            del self._since[gone]
        return previous is None or not previous <= serving

    def _own(self, key: PlanKey, plan: ServicePortPlan) -> None:
        """Give the frontends of a plan to it. Those that it no longer has stay its own: connections to them
        continue."""
        for each in plan.frontends:
            frontend = each.frontend.address, each.frontend.port
            if plan.serving is not None:
                self._owners[frontend] = key
            else:
                self._owners.pop(frontend, None)

    def _forget(self, key: PlanKey) -> None:
        if self._serving.pop(key, None) is None:
            return
        self._deleted.discard(key)
        self._owners = {frontend: owner for frontend, owner in self._owners.items() if owner != key}
        self._since = {each: since for each, since in self._since.items() if each.service != key}

    def removed(self, connection: TrackedConnection) -> RemovedEndpoint | None:
        """Return the removed endpoint that the connection goes to, None if it goes to none."""
        frontend = connection.destination, connection.destination_port
        endpoint = connection.reply_source, connection.reply_source_port
        if endpoint == frontend:
            return None
        owner = self._owners.get(frontend)
        if owner is None and connection.destination in self._node_ports:
            any_address = unspecified(family(connection.destination))
            owner = self._owners.get((any_address, connection.destination_port))
        if owner is None:
            return None
        target = target_of(*endpoint)
        return None if target in self._serving[owner] else RemovedEndpoint(owner, target)

    def since(self, endpoint: RemovedEndpoint, now: float) -> float:
        """Return the time since which the endpoint is gone: `now` at the first call."""
        return self._since.setdefault(endpoint, now)

    def searched(self, found: Collection[RemovedEndpoint]) -> None:
        """Forget what no connection needs any more. `found`: the result of a complete search."""
        self._since = {each: since for each, since in self._since.items() if each in found}
        in_use = {each.service for each in found}
        for key in self._deleted - in_use:
            self._forget(key)
