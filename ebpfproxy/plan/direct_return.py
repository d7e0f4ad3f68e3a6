"""Direct server return (DSR): which ServicePorts use it, and the tunnels to the nodes of their endpoints.

A packet of an outside client is sent unchanged, in a tunnel, to the node of the selected endpoint, which
replies to the client directly. See docs/decisions/0048-direct-server-return-by-geneve.md.
"""

from collections.abc import Callable, Iterable, Mapping

from ebpfproxy.model.address import Address, Network, family
from ebpfproxy.model.balancing import Algorithm, Balancing, EbpfForwarding
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.endpoint import EndpointState
from ebpfproxy.model.node import Node, PeerNode
from ebpfproxy.plan.balancing import STATELESS, PlannedBalancing, Support
from ebpfproxy.plan.planned_endpoints import ON_NODE, PlannedEndpoints
from ebpfproxy.plan.service_plan import PlanContext, Role


def requests_direct_return(requested: Balancing, context: PlanContext) -> bool:
    """Return whether a Service, or this node for it, requests direct server return."""
    if requested.ebpf_forwarding is None:
        return context.direct_return
    return requested.ebpf_forwarding is EbpfForwarding.DSR


def support_on_node(support: Support, context: PlanContext) -> Support:
    """Return what a mode honors on this node: direct server return only with a UDP port for tunnels."""
    return support if context.dsr_port else support._replace(dsr=False)


def with_tunnels(
    planned: PlannedBalancing,
    requested: Balancing,
    endpoints: PlannedEndpoints,
    states: Mapping[tuple[Address, int], EndpointState],
    tunnel: Callable[[str], Address | None],
) -> PlannedBalancing:
    """Return the balancing with the tunnels to the nodes of `endpoints`. `tunnel` is `tunnel_to`.

    Without a stateless algorithm, it is unchanged. If this node does not request direct server return, but
    another machine may do so for the same Service, no endpoint has a tunnel, but this node accepts tunneled
    packets to its own endpoints. The other machine is a node, because the Service leaves it to the nodes, or
    an edge, because the Service has traffic policy Local.
    """
    algorithm = planned.algorithm if planned.dsr else requested.algorithm or Algorithm.MAGLEV
    if algorithm not in STATELESS:
        return planned
    if planned.dsr:
        return planned._replace(tunnels=tuple(tunnel(states[each[:2]].node) for each in endpoints))
    if requested.ebpf_forwarding is not EbpfForwarding.SNAT and endpoints.has(ON_NODE):
        return planned._replace(tunnels=(None,) * len(endpoints))
    return planned


def tunnel_to(
    endpoint_node: str, node: Node | None, peers: Mapping[str, PeerNode], context: PlanContext
) -> Address | None:
    """Return where the node of an endpoint accepts tunneled packets: its first InternalIP of a family in
    which this node has one, too.

    None if the endpoint is on this node, or if its node announces no port or another one.
    """
    peer = peers.get(endpoint_node)
    if peer is None or endpoint_node == context.node_name or peer.dsr_port != context.dsr_port:
        return None
    families = {family(each) for each in node.addresses} if node else ()
    return next((each for each in peer.addresses if not families or family(each) in families), None)


def tunnel_sources(state: ClusterState, context: PlanContext) -> frozenset[Network]:
    """Return whose tunneled packets this node accepts: all other Nodes, and --ebpf-dsr-sources.

    Empty if direct server return is not enabled, and for an edge, which has no endpoints.
    """
    if not context.dsr_port or context.role is Role.EDGE:
        return frozenset()
    return frozenset((*context.tunnel_sources, *_other_nodes(state.peers, context.node_name)))


def _other_nodes(peers: Mapping[str, PeerNode], own: str) -> Iterable[Network]:
    for name, peer in peers.items():
        if name != own:
            yield from (Network(each, 128) for each in peer.addresses)
