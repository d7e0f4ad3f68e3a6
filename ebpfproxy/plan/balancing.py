"""How a ServicePort selects one of its endpoints: the request of the Service, and the defaults of this node.

A weight of 0 is a rule of this package: the endpoint gets no new connections, in every mode. What else a
mode honors is a property of the mode (`Support` and `unsupported`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpfproxy.model.address import Address, format_address
from ebpfproxy.model.balancing import Algorithm, Balancing, Forwarding, WeightRule
from ebpfproxy.model.endpoint import EndpointState
from ebpfproxy.plan.planned_endpoints import PlannedEndpoints

_ADDRESS_BITS = 128
_Ranked = tuple[int, int]
"""The position of a rule, and its weight."""


class PlannedBalancing(NamedTuple):
    """How a ServicePort selects one of its endpoints.

    - `algorithm`, `forwarding`: None for the mode's default.
    - `weights`: of the endpoints, in their order. Empty if all have weight 1.
    - `slow_start`: in seconds. A new endpoint gets its share of connections only after this time.
    - `tunnels`: for direct server return, else empty: for each endpoint, in their order, the address of its
      node at which that node accepts tunneled packets. None for an endpoint on this node, and on a node that
      does not announce direct server return. If all are None, this node only accepts tunneled packets.
    - `dsr`: direct server return is requested, and the ServicePort has frontends for which it matters.
    - `forwarding_limit`: why packets are translated although another method is requested, "" if they need
      not be.
    """

    algorithm: Algorithm | None = None
    weights: tuple[int, ...] = ()
    slow_start: int = 0
    forwarding: Forwarding | None = None
    tunnels: tuple[Address | None, ...] = ()
    dsr: bool = False
    forwarding_limit: str = ""


DEFAULT = PlannedBalancing()
"""The defaults of the mode. One object for all plans with them."""


STATELESS = frozenset({Algorithm.SOURCE_HASH, Algorithm.MAGLEV})
"""The algorithms with which every node selects the same endpoint for a packet. Direct server return needs one
of them, because a node that sees no replies cannot know which flows exist."""


class Support(NamedTuple):
    """What a mode honors besides its defaults.

    `algorithms` include the mode's default. A mode may honor weights for these only. `slow_start`: the
    algorithms with which it honors slow start. If there are any, the mode's default is one of them. `resets`:
    it resets connections to removed endpoints, and some after endpoints were added.
    """

    algorithms: frozenset[Algorithm]
    weights: bool = False
    slow_start: frozenset[Algorithm] = frozenset()
    forwarding: bool = False
    dsr: bool = False
    resets: bool = False


EVERYTHING = Support(frozenset(Algorithm), True, frozenset(Algorithm), True, True, True)


class WeightIndex:
    """The rules of a Service by node and network, so that an endpoint costs the same with 1 and 1,000 rules.

    A Service may have thousands of endpoints on each of many ports, and is planned again at each change.
    """

    def __init__(self, rules: tuple[WeightRule, ...]) -> None:
        self._nodes: dict[str, _Ranked] = {}
        # By the number of host bits, then by the others.
        self._networks: dict[int, dict[int, _Ranked]] = {}
        self._found: dict[tuple[Address, str], int | None] = {}  # ports have the same endpoints
        for rank, rule in enumerate(rules):
            if rule.network:
                shift = _ADDRESS_BITS - rule.network.length
                table = self._networks.setdefault(shift, {})
                table.setdefault(int.from_bytes(rule.network.address) >> shift, (rank, rule.weight))
            else:
                self._nodes.setdefault(rule.node, (rank, rule.weight))

    def weight(self, address: Address, node: str) -> int | None:
        """Return the weight of the first rule that matches an endpoint, None without one. `node` is "" if its
        EndpointSlice names none."""
        key = address, node
        if key not in self._found:
            self._found[key] = min(self._matching(address, node), default=(0, None))[1]
        return self._found[key]

    def _matching(self, address: Address, node: str) -> Iterator[tuple[int, int | None]]:
        if node in self._nodes:
            yield self._nodes[node]
        number = int.from_bytes(address)
        for shift, table in self._networks.items():
            if found := table.get(number >> shift):
                yield found


def endpoint_weights(
    endpoints: Mapping[tuple[Address, int], EndpointState], index: WeightIndex | None
) -> dict[tuple[Address, int], int]:
    """Return the weight of each endpoint that a rule matches. `endpoints` is the result of `merge_slices`.
    `index`: None without rules."""
    if not index:
        return {}
    found = ((target, index.weight(target[0], state.node)) for target, state in endpoints.items())
    return {target: weight for target, weight in found if weight is not None}


def weight_index(requested: Balancing) -> WeightIndex | None:
    """Return the index of the rules of a Service, None without rules."""
    return WeightIndex(requested.weights) if requested.weights else None


def without_weightless(
    endpoints: dict[tuple[Address, int], EndpointState], weights: Mapping[tuple[Address, int], int]
) -> dict[tuple[Address, int], EndpointState]:
    """Return the endpoints, where those of weight 0 get no new connections: they serve, but are not ready."""
    if 0 not in weights.values():
        return endpoints
    return {
        target: state if weights.get(target, 1) else state._replace(ready=False, terminating=False)
        for target, state in endpoints.items()
    }


def plan_balancing(
    requested: Balancing,
    endpoints: PlannedEndpoints,
    weights: Mapping[tuple[Address, int], int],
    algorithm: Algorithm | None,
    slow_start: int,
    dsr: bool = False,
    forwarding_limit: str = "",
) -> PlannedBalancing:
    """Return how one of `endpoints` is selected, without tunnels.

    `algorithm` and `slow_start` are the defaults of this node. `dsr` and `forwarding_limit`: as in
    `PlannedBalancing`.
    """
    in_order = tuple(weights.get(each[:2], 1) for each in endpoints) if weights else ()
    planned = PlannedBalancing(
        requested.algorithm or algorithm,
        in_order if any(each != 1 for each in in_order) else (),
        slow_start if requested.slow_start is None else requested.slow_start,
        requested.forwarding,
        dsr=dsr,
        forwarding_limit=forwarding_limit,
    )
    return planned if planned != DEFAULT else DEFAULT


def forwarding_limit(
    requested: Forwarding | None,
    endpoints: Mapping[tuple[Address, int], EndpointState],
    of_node: Forwarding,
    of_services: bool,
) -> str:
    """Return why IPVS must translate the packets of a Service, "" if it need not.

    The other methods change the node and the network namespaces of endpoints. So only an operator may request
    them, or users if the operator permits that (`of_services`), and only for pods of their own namespace:
    users may write endpoints with any address into an EndpointSlice.

    `endpoints` is the result of `merge_slices`.
    """
    if (requested or of_node) is Forwarding.NAT:
        return ""
    if requested not in (None, of_node) and not of_services:
        return "the annotation needs --ipvs-service-forwarding"
    foreign = (address for (address, _), state in endpoints.items() if not state.own_pod)
    first = next(foreign, None)
    return f"endpoint {format_address(first)} is no pod of the Service's namespace" if first else ""


def with_endpoints_of(planned: PlannedBalancing, other: PlannedBalancing) -> PlannedBalancing:
    """Return the balancing for the endpoints of `other`: what it has for each endpoint is that of `other`."""
    if (planned.weights, planned.tunnels) == (other.weights, other.tunnels):
        return planned
    return planned._replace(weights=other.weights, tunnels=other.tunnels)


def default_algorithm(of_node: Algorithm | None, direct_return: bool) -> Algorithm | None:
    """Return the algorithm of a ServicePort without the annotation. None: the mode's default.

    `of_node`: that of the node. `direct_return`: the ServicePort requests it, and this node has it.
    """
    return Algorithm.MAGLEV if direct_return and of_node not in STATELESS else of_node


def unsupported(planned: PlannedBalancing, support: Support, resets: Iterable[str] = ()) -> Iterator[str]:
    """Yield what a mode does not honor, each as the name of the annotation and its value.

    `resets`: the requests to reset connections (`open_connections.requested_resets`).
    """
    if not support.resets:
        yield from resets
    if planned.algorithm and planned.algorithm not in support.algorithms:
        yield f"lb-algorithm {planned.algorithm.value}"
    if any(each > 1 for each in planned.weights) and not support.weights:
        yield "endpoint-weights other than 0"
    if planned.slow_start and not support.slow_start:
        yield f"slow-start {planned.slow_start}s"
    elif planned.slow_start and planned.algorithm in support.algorithms - support.slow_start:
        yield f"slow-start {planned.slow_start}s (not with {planned.algorithm.value})"
    if planned.forwarding not in (None, Forwarding.NAT) and not support.forwarding:
        yield f"ipvs-forwarding {planned.forwarding.value}"
    if planned.dsr and not support.dsr:
        yield "ebpf-forwarding dsr"
    elif planned.dsr and planned.algorithm and planned.algorithm not in STATELESS:
        yield f"ebpf-forwarding dsr (not with {planned.algorithm.value})"
