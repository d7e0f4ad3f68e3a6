"""Which Service an open TCP connection belongs to, for Services that request something for theirs."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ebpfproxy.model.address import Network, family, unspecified
from ebpfproxy.plan.node_ports import NodePortAddresses
from ebpfproxy.plan.planned_endpoints import target_of
from ebpfproxy.plan.service_plan import FrontendKind, FrontendPlan, PlanKey, ServicePortPlan
from ebpfproxy.plan.tracked_connection import FrontendAddress, TrackedConnection


class EndpointOf(NamedTuple):
    """An endpoint of a ServicePort. `target`: as in `PlannedEndpoints.targets`."""

    service: PlanKey
    target: bytes


class ConnectionOwners:
    """The frontends of the Services that request something.

    A connection belongs to the Service that has its frontend, or that had it last. A connection that is not
    translated belongs to none, although its destination is a frontend.
    """

    def __init__(self) -> None:
        self._owners: dict[FrontendAddress, PlanKey] = {}
        self._others: dict[PlanKey, frozenset[FrontendAddress]] = {}
        self._node_ports = NodePortAddresses()

    def expect_node_ports(self, networks: frozenset[Network]) -> None:
        """Take in `NodePlan.node_port_networks`. Initially it is empty."""
        self._node_ports = NodePortAddresses(networks)

    def put(self, key: PlanKey, plan: ServicePortPlan | None, requests: bool) -> None:
        """Put a plan in force, None for a deleted one. If it `requests` something, it gets its frontends.
        Those that it no longer has stay its own: connections to them continue."""
        frontends = frozenset((each.frontend.address, each.frontend.port) for each in _frontends(plan))
        self._others.pop(key, None)
        if requests:
            self._owners.update(dict.fromkeys(frontends, key))
            return
        for each in frontends & self._owners.keys():
            del self._owners[each]
        if others := frozenset((each.frontend.address, each.frontend.port) for each in may_hide(plan)):
            self._others[key] = others

    def keep(self, keys: Collection[PlanKey]) -> None:
        """Forget the frontends of all other Services that request something."""
        self._owners = {frontend: owner for frontend, owner in self._owners.items() if owner in keys}

    def endpoint(self, connection: TrackedConnection) -> EndpointOf | None:
        """Return the endpoint that the connection goes to. None if no such Service has its frontend."""
        frontend = connection.destination, connection.destination_port
        endpoint = connection.reply_source, connection.reply_source_port
        if endpoint == frontend:
            return None
        owner = self._owners.get(frontend)
        if owner is None and connection.destination in self._node_ports and not self._is_hidden(frontend):
            any_address = unspecified(family(connection.destination))
            owner = self._owners.get((any_address, connection.destination_port))
        return EndpointOf(owner, target_of(*endpoint)) if owner else None

    def _is_hidden(self, frontend: FrontendAddress) -> bool:
        """Whether an external IP of another Service precedes the NodePort."""
        return any(frontend in each for each in self._others.values())


def may_hide(plan: ServicePortPlan | None) -> Iterable[FrontendPlan]:
    """Return the frontends that may have an address of a node, so that they precede a NodePort with the same
    port."""
    return (each for each in _frontends(plan) if each.kind not in _ALLOCATED)


def _frontends(plan: ServicePortPlan | None) -> tuple[FrontendPlan, ...]:
    return plan.frontends if plan else ()


_ALLOCATED = (FrontendKind.CLUSTER_IP, FrontendKind.NODE_PORT)
