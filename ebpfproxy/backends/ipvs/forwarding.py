"""Selects how IPVS forwards the packets of a frontend to its endpoints.

With direct routing and tunnels, the address and port of the frontend reach the endpoint unchanged, and it
replies to the client itself. So its network namespace needs the address (`real_servers`), and its port must
be that of the frontend. With direct routing the node also needs a route to the endpoint without a gateway:
a gateway that is a node would treat the packet as one of a new client.

ClusterIPs and NodePorts are always translated. For a ClusterIP, the node that forwards is the client's own,
and replies pass it anyway. A NodePort is never the endpoint's port and address (docs/decisions/0018).

The choice depends on plans, settings and `Surroundings`, which `KernelSurroundings` reads. Answers are kept
until `forget`, so that a plan with many endpoints needs one lookup for each of them. If the kernel fails to
answer, the Service gets the defaults.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ebpfproxy.backends.ipvs import prerequisites
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.ipvs.messages import Method
from ebpfproxy.linux.netlink import local_addresses, routing
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Address, Network, contains, format_address, format_endpoint
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


_T = TypeVar("_T")
_SINGLE = 128


class KernelSurroundings:
    """The surroundings in the calling thread's network namespace."""

    def __init__(self) -> None:
        self._schedulers: dict[str, bool] = {}
        self._gateways: dict[Address, bool] = {}
        self._local: frozenset[Network] | None = None
        self._wide: list[Network] = []
        self.may_differ = False
        """Whether `forget` was called since the caller last set this to False."""

    def forget(self) -> None:
        """Read routes and addresses again. The schedulers of a kernel do not change."""
        self._gateways.clear()
        self._local = None
        self.may_differ = True

    def answers(self) -> Surroundings:
        return Surroundings(
            _or(self._has_scheduler, False), _or(self._is_local, False), _or(self._has_gateway, True)
        )

    def _is_local(self, address: Address) -> bool:
        if self._local is None:
            self._local = local_addresses.read()
            self._wide = [net for net in self._local if net.length != _SINGLE]
        return Network(address, _SINGLE) in self._local or any(contains(net, address) for net in self._wide)

    def _has_scheduler(self, name: str) -> bool:
        if name not in self._schedulers:
            with netns.throw_away():
                self._schedulers[name] = prerequisites.has_scheduler(name)
        return self._schedulers[name]

    def _has_gateway(self, address: Address) -> bool:
        if address not in self._gateways:
            self._gateways[address] = routing.route_to(address).has_gateway
        return self._gateways[address]


def _or(answer: Callable[[_T], bool], unknown: bool) -> Callable[[_T], bool]:
    """Return the function with the answer `unknown` instead of an error of the kernel."""

    def answered(question: _T) -> bool:
        try:
            return answer(question)
        except KernelError:
            return unknown

    return answered
