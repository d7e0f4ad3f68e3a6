"""Frontends of users at which a program of a node or the API server already listens.

Every user who may write a Service may put any address into externalIPs, also that of a Node or of the API
server. kube-proxy sends their connections to the Service then: those to sshd, the kubelet or the API server
(CVE-2020-8554). Addresses of load balancers are written by controllers, but from fields that users write.

A NodePort is allocated by the API server. A host port is arbitrated by the scheduler, and some container
runtimes listen at the ports of their own pods. Neither is limited.
"""

import dataclasses
import enum

from ebpfproxy.model.address import (
    Address,
    Network,
    Protocol,
    contains,
    family,
    is_loopback,
    unspecified,
)
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.plan.endpoints import API_SERVER
from ebpfproxy.plan.host_ports import is_host_port
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    PlanContext,
    Protection,
    Role,
    ServicePortPlan,
)

_BY_USERS = (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)
_SINGLE = 128


class Protected(enum.Enum):
    """Why a frontend is not served."""

    API_SERVER = "the address is that of the API server"
    HOST_PROCESS = "a program of this node listens at this address and port"
    OTHER_NODE = "the address is that of a Node, which decides itself what it serves"


def is_checked(plan: ServicePortPlan) -> bool:
    """Return whether frontends of the plan may be protected ones: users have written their addresses."""
    if is_host_port(plan.name) or (plan.name.namespace, plan.name.name) == API_SERVER:
        return False
    return any(each.kind in _BY_USERS for each in plan.frontends)


def protected(plan: ServicePortPlan, state: ClusterState, context: PlanContext) -> dict[Frontend, Protected]:
    """Return the frontends of a plan that must not be served, and why. Usually empty."""
    if (context.protection is Protection.NONE and context.role is not Role.EDGE) or not is_checked(plan):
        return {}
    found = {each.frontend: _protection(each, state, context) for each in plan.frontends}
    return {frontend: why for frontend, why in found.items() if why}


def without_protected(plan: ServicePortPlan, state: ClusterState, context: PlanContext) -> ServicePortPlan:
    """Return the plan without the frontends that must not be served."""
    excluded = protected(plan, state, context)
    if not excluded:
        return plan
    kept = tuple(each for each in plan.frontends if each.frontend not in excluded)
    return dataclasses.replace(plan, frontends=kept)


def _protection(of: FrontendPlan, state: ClusterState, context: PlanContext) -> Protected | None:
    (address, port, protocol), kind = of.frontend, of.kind
    if kind not in _BY_USERS:
        return None
    if context.protection is not Protection.NONE:
        if _is_of_api_server(of.frontend, state):
            return Protected.API_SERVER
        listening = state.listening.get((protocol, port), ())
        is_everywhere = unspecified(family(address)) in listening
        if address in listening or (is_everywhere and _is_of_node(address, kind, state, context)):
            return Protected.HOST_PROCESS
    of_nodes = context.protection is Protection.NODES or context.role is Role.EDGE
    is_elsewhere = of_nodes and address in state.node_addresses and not _is_own(address, state)
    return Protected.OTHER_NODE if is_elsewhere else None


def _is_of_api_server(frontend: Frontend, state: ClusterState) -> bool:
    """Whether the agent reaches the API server there, or default/kubernetes has this endpoint.

    If the address is on another machine, no port of it is served: modes ipvs and userspace make addresses of
    Services local, so no other port of that machine could be reached.
    """
    address, port, protocol = frontend
    ports = {at for server, at in state.api_servers if server == address}
    for each in state.slices_of(API_SERVER):
        if any(endpoint.address == address for endpoint in each.endpoints):
            ports.update(of.port for of in each.ports)
    if not ports:
        return False
    return (protocol is Protocol.TCP and port in ports) or not (
        _is_own(address, state) or _is_local(address, state)
    )


def _is_of_node(address: Address, kind: FrontendKind, state: ClusterState, context: PlanContext) -> bool:
    """Whether a program that listens at all addresses is meant to be reached at this one.

    Programs such as kube-vip and keepalived add the address of a load balancer to a device of the node that
    forwards its connections, and an edge adds all that it announces. So for these, only the addresses of the
    Node object and loopback count.
    """
    if is_loopback(address) or _is_own(address, state):
        return True
    if kind is FrontendKind.LOAD_BALANCER or context.role is Role.EDGE:
        return False
    return _is_local(address, state)


def _is_local(address: Address, state: ClusterState) -> bool:
    return Network(address, _SINGLE) in state.local_networks or any(
        net.length < _SINGLE and contains(net, address) for net in state.local_networks
    )


def _is_own(address: Address, state: ClusterState) -> bool:
    node = state.node
    return node is not None and (address in node.addresses or address in node.external_addresses)
