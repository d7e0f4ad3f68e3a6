"""Which Service an open TCP connection belongs to, for Services that request something for theirs."""

import typing
from collections.abc import Collection

from ebpfproxy.model.address import Address, Network, family, unspecified
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


class EndpointOf(typing.NamedTuple):
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
        self._node_ports = NodePortAddresses()

    def expect_node_ports(self, networks: frozenset[Network]) -> None:
        """Take in `NodePlan.node_port_networks`. Initially it is empty."""
        self._node_ports = NodePortAddresses(networks)

    def put(self, key: PlanKey, plan: ServicePortPlan, requests: bool) -> None:
        """Give the frontends of a plan to it, if it `requests` something. Those that it no longer has stay
        its own: connections to them continue."""
        for each in plan.frontends:
            frontend = each.frontend.address, each.frontend.port
            if requests:
                self._owners[frontend] = key
            else:
                self._owners.pop(frontend, None)

    def keep(self, keys: Collection[PlanKey]) -> None:
        """Forget all others."""
        self._owners = {frontend: owner for frontend, owner in self._owners.items() if owner in keys}

    def endpoint(self, connection: TrackedConnection) -> EndpointOf | None:
        """Return the endpoint that the connection goes to. None if no such Service has its frontend."""
        frontend = connection.destination, connection.destination_port
        endpoint = connection.reply_source, connection.reply_source_port
        if endpoint == frontend:
            return None
        owner = self._owners.get(frontend)
        if owner is None and connection.destination in self._node_ports:
            any_address = unspecified(family(connection.destination))
            owner = self._owners.get((any_address, connection.destination_port))
        return EndpointOf(owner, target_of(*endpoint)) if owner else None
