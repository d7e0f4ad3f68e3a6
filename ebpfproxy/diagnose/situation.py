"""The plans of all Services at one moment, as an agent makes them, and the frontends by address."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from ebpfproxy.api.event import ENDPOINT_SLICE, SERVICE, Unserved
from ebpfproxy.backends.behavior import BEHAVIOR, Behavior
from ebpfproxy.backends.interface import Inspection
from ebpfproxy.config import Config
from ebpfproxy.diagnose import agent_pages
from ebpfproxy.diagnose.cluster import Cluster, Complaint
from ebpfproxy.http import rebalancing
from ebpfproxy.linux.netlink.routing import Route
from ebpfproxy.model.address import Address, Family, contains, family
from ebpfproxy.model.balancing import Forwarding
from ebpfproxy.model.cluster import ClusterState, Full
from ebpfproxy.model.device import LOOPBACK, Device
from ebpfproxy.model.endpoint import EndpointState
from ebpfproxy.model.service import NamespacedName, ServicePortName
from ebpfproxy.plan.claims import Claims
from ebpfproxy.plan.counts import ClusterSize
from ebpfproxy.plan.devices import needs_packets_of_node, needs_packets_of_pods
from ebpfproxy.plan.endpoints import EndpointAddress, Reasons, Trace
from ebpfproxy.plan.frontends import is_unserved, plan_name
from ebpfproxy.plan.node_plan import plan_node
from ebpfproxy.plan.on_link import FrontendAddresses
from ebpfproxy.plan.protected_addresses import Protected, is_local, protected, without_protected
from ebpfproxy.plan.service_plan import (
    DevicePlan,
    Frontend,
    FrontendPlan,
    NodePlan,
    PlanContext,
    PlanKey,
    ServicePortPlan,
)

Routes = Callable[[Address], Route | None]
"""The node's route to an address; None if it is unknown, for example because it cannot be read."""


def no_routes(_: Address) -> None:
    """No route is known, for example with manifests only."""


class Served(NamedTuple):
    """A frontend, and the plan of the ServicePort that claims it."""

    plan: ServicePortPlan
    frontend: FrontendPlan


@dataclasses.dataclass(frozen=True)
class Situation:
    """Everything that the plan knows, in one mode.

    - `plans`: with the frontends that each ServicePort gets. `requested`: with all that it claims.
    - `scheduler`, `forwarding`: --ipvs-scheduler and --ipvs-forwarding.
    - `routes`: the node's routes.
    - `is_from_tables`: the plans were read from the kernel or a dump; there are no EndpointSlices.
    """

    mode: str
    state: ClusterState
    context: PlanContext
    node: NodePlan
    plans: Mapping[PlanKey, ServicePortPlan]
    requested: Mapping[NamespacedName, tuple[ServicePortPlan, ...]]
    unserved: Mapping[NamespacedName, Unserved] = dataclasses.field(default_factory=dict)
    complaints: tuple[Complaint, ...] = ()
    scheduler: str = ""
    routes: Routes = no_routes
    forwarding: Forwarding = Forwarding.NAT
    is_from_tables: bool = False

    @property
    def behavior(self) -> Behavior:
        """What the mode does differently from others."""
        return BEHAVIOR[self.mode]

    @cached_property
    def frontends(self) -> Mapping[Frontend, Served]:
        """The ServicePort of each frontend, after conflicts of claims."""
        return {
            frontend.frontend: Served(plan, frontend)
            for plan in self.plans.values()
            for frontend in plan.frontends
        }

    @cached_property
    def addresses(self) -> Mapping[Address, tuple[Served, ...]]:
        """The frontends of each address, NodePorts excluded."""
        found: dict[Address, list[Served]] = {}
        for served in self.frontends.values():
            found.setdefault(served.frontend.frontend.address, []).append(served)
        return {address: tuple(of) for address, of in found.items()}

    def trace_of(self, plan: ServicePortPlan) -> tuple[dict[EndpointAddress, EndpointState], Reasons]:
        """The endpoints of a Service's plan and their reasons, recorded by planning the Service again."""
        trace: Trace = {}
        name = NamespacedName(plan.name.namespace, plan.name.name)
        plan_name(name, self.state, self.context, trace=trace)
        return trace[plan.key]

    def claims_of(self, frontend: Frontend) -> list[ServicePortName]:
        """The names of all ServicePorts that claim a frontend, sorted."""
        return sorted(self._claims.get(frontend, ()))

    def protection_of(self, frontend: Frontend) -> tuple[ServicePortName, Protected] | None:
        """A ServicePort that claims a frontend which must not be served, and why."""
        for plan in (plan for plans in self.requested.values() for plan in plans):
            if any(each.frontend == frontend for each in plan.frontends):
                why = protected(plan, self.state, self.context).get(frontend)
                if why:
                    return plan.name, why
        return None

    @cached_property
    def _claims(self) -> Mapping[Frontend, list[ServicePortName]]:
        found: dict[Frontend, list[ServicePortName]] = {}
        for plan in (plan for plans in self.requested.values() for plan in plans):
            for each in plan.frontends:
                found.setdefault(each.frontend, []).append(plan.name)
        return found

    def complaints_about(self, service: NamespacedName) -> tuple[str, ...]:
        """What cannot be served of a Service and its EndpointSlices, a line for each."""
        slices = {str(each.name) for each in self.state.slices_of(service)}
        return tuple(
            f"{each.kind} {each.name}: {each.reason}"
            for each in self.complaints
            if (each.kind == SERVICE and each.name == str(service))
            or (each.kind == ENDPOINT_SLICE and each.name in slices)
        )

    def is_local(self, address: Address) -> bool:
        """Whether the node delivers packets to this address to itself."""
        return is_local(address, self.state)

    def is_foreign(self, address: Address) -> bool:
        """Whether a machine may have this address (`plan/foreign_addresses.py`)."""
        return not self.is_local(address) and any(
            contains(net, address) for net in self.node.foreign_networks
        )

    def has_gateway(self, address: Address) -> bool:
        """Whether the node's route to an address has a gateway. False if the route is unknown."""
        route = self.routes(address)
        return route is not None and route.has_gateway

    def accepts_node_ports(self, address: Address) -> bool:
        """Whether NodePorts are served at this address."""
        return any(contains(net, address) for net in self.node.node_port_networks)

    def device(self, ifindex: int) -> Device | None:
        return next((each for each in self.state.devices if each.ifindex == ifindex), None)

    def device_plan(self, ifindex: int) -> DevicePlan | None:
        """The plan of a device, None if it gets no programs."""
        return next((each for each in self.node.devices if each.ifindex == ifindex), None)

    def own_addresses(self, ip_family: Family) -> Iterator[Address]:
        """The addresses of the node's devices, else those of its Node object."""
        found = [address for each in self.state.devices for address in each.addresses]
        if self.is_from_tables:
            found = [a for each in self.node.devices for a in (each.v4, each.v6) if a]
        if not found and self.state.node:
            found = [*self.state.node.addresses, *self.state.node.external_addresses]
        return (address for address in dict.fromkeys(found) if family(address) is ip_family)


def plan_situation(
    cluster: Cluster,
    context: PlanContext,
    mode: str,
    *,
    scheduler: str = "",
    routes: Routes = no_routes,
    forwarding: Forwarding = Forwarding.NAT,
    served_devices: frozenset[int] = frozenset(),
) -> Situation:
    """Plan all Services and the node, as `agent.reconciler` does. The order of Services does not matter.

    `served_devices`: as in `Inspection`. These devices keep their programs.
    """
    state = cluster.state
    size = ClusterSize()
    for name, service in state.services.items():
        size.update(name, service, state.slices_of(name))
    claims = Claims()
    requested: dict[NamespacedName, tuple[ServicePortPlan, ...]] = {}
    for name in (*state.services, *state.pods):
        plans = plan_name(name, state, context, size.large)
        requested[name] = plans
        served = (each for each in plans if not is_unserved(each, context))
        claims.update(name, tuple(without_protected(each, state, context) for each in served))
    pods = any(map(needs_packets_of_pods, claims.plans.values()))
    of_node = any(map(needs_packets_of_node, claims.plans.values())) or any(
        each.link_type == LOOPBACK and each.ifindex in served_devices for each in state.devices
    )
    addresses = FrontendAddresses()
    for plan in claims.plans.values():
        addresses.count(plan, 1)
    # Not in the result: a pod whose device has programs need not bypass the socket hooks.
    with_programs = dataclasses.replace(state, bypassing=state.bypassing | served_devices)
    return Situation(
        mode,
        state,
        context,
        plan_node(with_programs, context, pods, of_node=of_node, on_link=addresses.on_link(state.devices)),
        claims.plans,
        requested,
        cluster.unserved,
        cluster.complaints,
        scheduler,
        routes,
        forwarding,
    )


def situation_of_mode(
    cluster: Cluster, inspection: Inspection[Any, Any], mode: str, config: Config, routes: Routes = no_routes
) -> Situation:
    """Plan with the options of a mode, with what it recorded in the kernel, which is bypassing pods and
    devices that keep their programs, and with the endpoints to which the running agent sends nothing new."""
    state = dataclasses.replace(
        cluster.state,
        bypassing=inspection.bypassing(),
        namespaces=inspection.namespaces(),
        full=_full(config) if inspection.is_live else {},
    )
    return plan_situation(
        cluster._replace(state=state),
        inspection.context,
        mode,
        scheduler=config.ipvs_scheduler,
        routes=routes,
        forwarding=Forwarding(config.ipvs_forwarding),
        served_devices=inspection.served_devices(),
    )


def _full(config: Config) -> Full:
    """See `ClusterState.full`. Empty if no agent answers."""
    if config.metrics_listen is None:
        return {}
    return rebalancing.decode(agent_pages.read_text(config.metrics_listen, rebalancing.PATH))
