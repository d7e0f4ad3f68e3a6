"""Frontends that must not be served: a program of a node or the API server already listens there, or the
namespace may not have the address.

Every user who may write a Service may put any address into externalIPs, also that of a Node or of the API
server. kube-proxy sends their connections to the Service then: those to sshd, the kubelet or the API server
(CVE-2020-8554). Addresses of load balancers are written by controllers, but from fields that users write.

A NodePort is allocated by the API server. A host port is arbitrated by the scheduler, and some container
runtimes listen at the ports of their own pods. Neither is limited.

A ClusterIP is allocated by the API server. But NodeLocal DNSCache adds that of the DNS Service to a device of
the node and listens there. With kube-proxy it gets the connections of this node by NOTRACK rules.
"""

import dataclasses

from ebpfproxy.model.address import (
    Address,
    Network,
    Protocol,
    contains,
    family,
    is_loopback,
    is_unspecified,
    network_family,
    unspecified,
)
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.plan.endpoints import API_SERVER
from ebpfproxy.plan.host_ports import is_host_port
from ebpfproxy.plan.reason import AnyReason
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


class Protected(AnyReason):
    """Why a frontend is not served."""

    OUTSIDE_NETWORKS = (
        "frontend: no network that --external-ip-cidrs permits in this namespace contains the address"
    )
    OF_API_SERVER = (
        "frontend: the address is that of the API server, and no Service gets it (--protected-addresses)"
    )
    OF_HOST_PROCESS = (
        "frontend: a program of this node listens there, and no Service gets it (--protected-addresses)"
    )
    OF_LOCAL_SERVER = (
        "frontend: a program of this node, such as NodeLocal DNSCache, listens at this ClusterIP"
    )
    OF_OTHER_NODE = (
        "frontend: the address is that of another Node, which serves it or not (--protected-addresses)"
    )


def is_checked(plan: ServicePortPlan) -> bool:
    """Return whether users have written addresses of the plan, so that these may be protected ones."""
    if is_host_port(plan.name) or (plan.name.namespace, plan.name.name) == API_SERVER:
        return False
    return any(each.kind in _BY_USERS for each in plan.frontends)


def protected(plan: ServicePortPlan, state: ClusterState, context: PlanContext) -> dict[Frontend, Protected]:
    """Return the frontends of a plan that must not be served, and why. Usually empty."""
    found = {
        each.frontend: Protected.OF_LOCAL_SERVER
        for each in plan.frontends
        if each.kind is FrontendKind.CLUSTER_IP and _has_local_server(each.frontend, state)
    }
    if not is_checked(plan):
        return found
    of_users = [each for each in plan.frontends if each.kind in _BY_USERS]
    if context.protection is not Protection.NONE or context.role is Role.EDGE:
        for each in of_users:
            if why := _protection(each, state, context):
                found[each.frontend] = why
    if context.external_networks:
        permitted = [net for name, net in context.external_networks if name in ("*", plan.name.namespace)]
        for each in of_users:
            address = each.frontend.address
            of_family = (net for net in permitted if network_family(net) is family(address))
            if not any(contains(net, address) for net in of_family):
                found[each.frontend] = Protected.OUTSIDE_NETWORKS
    return found


def local_servers(state: ClusterState) -> frozenset[tuple[Address, int, Protocol]]:
    """Return where programs of the node listen at an address of their own, with address, port and protocol.

    Without loopback, which no ClusterIP is.
    """
    return frozenset(
        (address, port, protocol)
        for (protocol, port), addresses in state.listening.items()
        for address in addresses
        if not is_unspecified(address) and not is_loopback(address) and is_local(address, state)
    )


def without_protected(plan: ServicePortPlan, state: ClusterState, context: PlanContext) -> ServicePortPlan:
    """Return the plan without the frontends that must not be served."""
    excluded = protected(plan, state, context)
    if not excluded:
        return plan
    kept = tuple(each for each in plan.frontends if each.frontend not in excluded)
    return dataclasses.replace(plan, frontends=kept)


def _has_local_server(frontend: Frontend, state: ClusterState) -> bool:
    """Whether a program of the node listens at this very address, which the node delivers to itself."""
    address, port, protocol = frontend
    return address in state.listening.get((protocol, port), ()) and is_local(address, state)


def _protection(of: FrontendPlan, state: ClusterState, context: PlanContext) -> Protected | None:
    (address, port, protocol), kind = of.frontend, of.kind
    if context.protection is not Protection.NONE:
        if _is_of_api_server(of.frontend, state):
            return Protected.OF_API_SERVER
        listening = state.listening.get((protocol, port), ())
        is_everywhere = unspecified(family(address)) in listening
        if address in listening or (is_everywhere and _is_of_node(address, kind, state, context)):
            return Protected.OF_HOST_PROCESS
    of_nodes = context.protection is Protection.NODES or context.role is Role.EDGE
    is_elsewhere = of_nodes and address in state.node_addresses and not _is_own(address, state)
    return Protected.OF_OTHER_NODE if is_elsewhere else None


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
        _is_own(address, state) or is_local(address, state)
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
    return is_local(address, state)


def is_local(address: Address, state: ClusterState) -> bool:
    """Return whether the node delivers packets to this address to itself. Addresses that an agent has made
    local do not count.
    """
    return Network(address, _SINGLE) in state.local_networks or any(
        net.length < _SINGLE and contains(net, address) for net in state.local_networks
    )


def _is_own(address: Address, state: ClusterState) -> bool:
    node = state.node
    return node is not None and (address in node.addresses or address in node.external_addresses)
