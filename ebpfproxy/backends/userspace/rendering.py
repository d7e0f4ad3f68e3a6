"""Renders plans as entries. Pure."""

from collections.abc import Collection, Iterable

from ebpfproxy.backends.userspace.entries import (
    Balanced,
    Balancing,
    Entry,
    Key,
    Listen,
    Listening,
    Local,
    NodePorts,
    Pods,
    other_port,
)
from ebpfproxy.backends.userspace.redirects import can_redirect
from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    contains,
    is_unspecified,
    network_family,
    parse_network,
)
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.plan.service_plan import (
    FrontendKind,
    FrontendPlan,
    LocalTraffic,
    NodePlan,
    NoEndpointAction,
    Scope,
    ServicePortPlan,
)

_SINGLE = 128
_LINK_LOCAL = parse_network("fe80::/10")


def render(
    plans: Iterable[ServicePortPlan], node: NodePlan | None, redirected: Collection[Family] = ()
) -> dict[Key, Entry]:
    """Return the entries of the plans, and of the node if given. Packets of `redirected` families are
    redirected to other ports.

    Without a usable endpoint on any node there are no listeners, so new connections are rejected. If only the
    traffic policy excludes the endpoints, there are listeners, which drop the packets.
    """
    entries: dict[Key, Entry] = {}
    for plan in plans:
        entries.update(_service(plan, plan.family in redirected))
    if node is not None:
        for family in Family:
            entries[NodePorts(family)] = tuple(sorted(_single(node.node_port_networks, family)))
    return entries


def _single(networks: Iterable[Network], family: Family) -> Iterable[Address]:
    """Return the networks of one address. Others, such as 127.0.0.0/8, have no further address of a device. A
    link-local IPv6 address would need a device.
    """
    return (
        net.address
        for net in networks
        if net.length == _SINGLE and network_family(net) is family and not contains(_LINK_LOCAL, net.address)
    )


def _service(plan: ServicePortPlan, redirected: bool) -> dict[Key, Entry]:
    entries: dict[Key, Entry] = {}
    frontends = [each for each in plan.frontends if not _is_endpoint(each, plan)]
    for each in frontends:
        if not is_unspecified(each.frontend.address):
            entries[Local(plan.family, each.frontend.address)] = True
    if plan.no_endpoint_action is NoEndpointAction.REJECT or not frontends:
        for each in frontends if redirected else ():
            if can_redirect(each.frontend):
                entries[Listen(plan.family, each.frontend)] = True
        return entries
    service = Balanced(plan.family, str(plan.name), plan.name.protocol)
    entries[service] = Balancing(
        plan.endpoints.rows,
        plan.affinity_timeout,
        (plan.balancing.algorithm or Algorithm.ROUND_ROBIN).value,
        plan.balancing.weights,
    )
    for each in frontends:
        port = each.frontend.port
        if redirected and can_redirect(each.frontend):
            port = other_port(port)
        entries[Listen(plan.family, each.frontend)] = _listening(service, port, each, plan.local_traffic)
    return entries


def _is_endpoint(each: FrontendPlan, plan: ServicePortPlan) -> bool:
    """Return whether a frontend is an endpoint of its own ServicePort, such as the address of a node whose
    host process is the server. A relay would connect to itself.
    """
    if each.kind not in (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER):
        return False
    return any((one.address, one.port) == each.frontend[:2] for one in plan.endpoints)


def _listening(service: Balanced, port: int, plan: FrontendPlan, pods: LocalTraffic | None) -> Listening:
    differs = plan.pod.scope is not plan.outside.scope
    return Listening(
        service,
        port,
        plan.pod.scope is Scope.LOCAL,
        plan.node.scope is Scope.LOCAL,
        plan.outside.scope is Scope.LOCAL,
        Pods(*pods) if pods and differs else None,
        plan.source_ranges if plan.restricted else None,
        plan.node_admitted,
    )
