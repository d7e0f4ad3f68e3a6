"""Selects how IPVS forwards the packets of a frontend to its endpoints. Pure.

With direct routing and tunnels, the address and port of the frontend reach the endpoint unchanged, and it
replies to the client itself. So its network namespace needs the address (`real_servers`), and its port must
be that of the frontend. With direct routing the node also needs a route to the endpoint without a gateway:
a gateway that is a node would treat the packet as one of a new client.

ClusterIPs and NodePorts are always translated. For a ClusterIP, the node that forwards is the client's own,
and replies pass it anyway. A NodePort is never the endpoint's port and address (docs/decisions/0045).
"""

from collections.abc import Callable
from typing import NamedTuple

from ebpfproxy.linux.ipvs.messages import Method
from ebpfproxy.model.address import Address, format_address, format_endpoint
from ebpfproxy.model.balancing import Forwarding
from ebpfproxy.plan.service_plan import FrontendKind, FrontendPlan, PlannedEndpoint, ServicePortPlan

METHODS = {
    Forwarding.NAT: Method.MASQUERADE,
    Forwarding.DIRECT_ROUTING: Method.DIRECT,
    Forwarding.TUNNEL: Method.TUNNEL,
}
_EXTERNAL = (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)


class Surroundings(NamedTuple):
    """What the rendering of plans depends on besides plans and settings.

    - `has_scheduler`: whether this kernel has the scheduler of that name.
    - `is_local`: whether a device of this node other than kube-ipvs0 has the address.
    - `has_gateway`: whether the route from this node to the address has a gateway.
    """

    has_scheduler: Callable[[str], bool]
    is_local: Callable[[Address], bool]
    has_gateway: Callable[[Address], bool]


class Choice(NamedTuple):
    """How the packets of a frontend are forwarded.

    - `method`: the one in force on this node.
    - `untranslated`: what endpoints must be prepared for. Not NAT only if the frontend meets the
      requirements that do not depend on the forwarding node.
    - `limit`: why the requested method is not in force, "" if it is.
    """

    method: Forwarding
    untranslated: Forwarding
    limit: str = ""


_NAT = Choice(Forwarding.NAT, Forwarding.NAT)


def requested(plan: ServicePortPlan, default: Forwarding) -> Forwarding:
    """Return the method that a Service requests. `default`: for those that request none."""
    return plan.balancing.forwarding or default


def choose(
    plan: ServicePortPlan,
    frontend: FrontendPlan,
    used: list[PlannedEndpoint],
    default: Forwarding,
    surroundings: Surroundings,
) -> Choice:
    """Return how the packets of a frontend are forwarded. `used`: the endpoints for new connections."""
    wanted = requested(plan, default)
    if wanted is Forwarding.NAT or frontend.kind not in _EXTERNAL:
        return _NAT
    if plan.balancing.forwarding_limit:
        return _NAT._replace(limit=plan.balancing.forwarding_limit)
    address, port, _ = frontend.frontend
    for endpoint in plan.endpoints:
        if endpoint.port != port:
            text = format_endpoint(endpoint.address, endpoint.port)
            return _NAT._replace(limit=f"endpoint {text} has another port than {port}")
    if surroundings.is_local(address):
        text = format_address(address)
        return _NAT._replace(limit=f"address {text} is also an address of this node")
    if wanted is Forwarding.DIRECT_ROUTING:
        for endpoint in used:
            if not surroundings.is_local(endpoint.address) and surroundings.has_gateway(endpoint.address):
                text = format_address(endpoint.address)
                return Choice(Forwarding.NAT, wanted, f"endpoint {text} is behind a gateway")
    return Choice(wanted, wanted)
