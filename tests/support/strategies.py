"""Random clusters for hypothesis with few addresses, names and zones, so that objects conflict."""

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ebpfproxy.model.address import Address, Family, Protocol, parse_address, parse_network
from ebpfproxy.model.balancing import DEFAULT_BALANCING, Algorithm, Balancing, WeightRule
from ebpfproxy.model.endpoint import Endpoint, EndpointPort, Endpoints, EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName, Service, ServicePort, ServiceType, TrafficPolicy
from ebpfproxy.plan.service_plan import DetectLocal, PlanContext
from tests.support.build import ELSEWHERE, HERE

_RANGES = tuple(
    map(parse_network, ("192.0.2.0/24", "10.0.0.0/8", "0.0.0.0/0", "0.0.0.0/1", "2001:db8::/32", "::/0"))
)
_ZONES = st.frozensets(st.sampled_from(("zone-a", "zone-b")))
_PROTOCOLS = st.sampled_from((Protocol.TCP, Protocol.UDP))
_PORT_NAMES = st.sampled_from(("", "http"))


def _few(*texts: str, most: int = 3) -> SearchStrategy[tuple[Address, ...]]:
    addresses = st.sampled_from([parse_address(text) for text in texts])
    return st.lists(addresses, max_size=most).map(tuple)


_CIDRS = st.lists(st.sampled_from(_RANGES), max_size=2).map(tuple)

CONTEXTS = st.builds(
    PlanContext,
    node_name=st.just(HERE),
    masquerade_all=st.booleans(),
    detect_local=st.sampled_from(DetectLocal),
    cluster_cidrs=_CIDRS,
    pod_interface=st.sampled_from(("", "cni0")),
)

NODES = st.none() | st.builds(
    Node,
    name=st.just(HERE),
    zone=st.sampled_from(("", "zone-a", "zone-c")),
    addresses=_few("192.0.2.10", "2001:db8::10", most=2),
    pod_cidrs=_CIDRS,
)

PORTS = st.builds(
    ServicePort,
    name=_PORT_NAMES,
    protocol=_PROTOCOLS,
    port=st.sampled_from((80, 53)),
    node_port=st.sampled_from((0, 0, 30080, 30053)),
)

_SOME_PORTS = st.lists(PORTS, min_size=1, max_size=3, unique_by=lambda port: (port.name, port.protocol)).map(
    tuple
)

BALANCINGS = st.builds(
    Balancing,
    algorithm=st.none() | st.sampled_from(Algorithm),
    weights=st.lists(
        st.builds(
            WeightRule,
            node=st.sampled_from((HERE, ELSEWHERE)),
            network=st.none() | st.sampled_from((parse_network("10.1.0.1/32"), parse_network("fd01::/64"))),
            weight=st.sampled_from((0, 1, 2, 3)),
        ),
        max_size=2,
    ).map(tuple),
    slow_start=st.none() | st.sampled_from((0, 30)),
)

SERVICES = st.builds(
    Service,
    name=st.sampled_from([NamespacedName("default", name) for name in ("web", "api", "dns")]),
    ports=_SOME_PORTS | _SOME_PORTS | st.just(()),
    cluster_ips=st.just((parse_address("10.96.0.10"), parse_address("fd00::10")))
    | _few("10.96.0.10", "10.96.0.11", "fd00::10", "0.0.0.0", most=2),
    external_ips=_few("203.0.113.1", "10.96.0.10", "2001:db8::1", "0.0.0.0"),
    load_balancer_ips=_few("203.0.113.1", "203.0.113.2", "2001:db8::2", "::", most=2),
    source_ranges=st.lists(st.sampled_from(_RANGES), max_size=2).map(tuple),
    type=st.sampled_from(ServiceType),
    internal_policy=st.sampled_from(TrafficPolicy),
    external_policy=st.sampled_from(TrafficPolicy),
    affinity_timeout=st.sampled_from((0, 10800)),
    health_check_node_port=st.sampled_from((0, 32000)),
    balancing=st.just(DEFAULT_BALANCING) | BALANCINGS,
)


def endpoints(of: Family) -> SearchStrategy[Endpoint]:
    prefix = "10.1.0." if of is Family.IPV4 else "fd01::"
    addresses = st.sampled_from([parse_address(f"{prefix}{number}") for number in range(1, 5)])
    places = st.tuples(addresses, st.sampled_from((HERE, ELSEWHERE, "")))
    return endpoints_at(places, (HERE, ELSEWHERE))


def endpoints_at(
    places: SearchStrategy[tuple[Address, str]], nodes: tuple[str, ...]
) -> SearchStrategy[Endpoint]:
    """Endpoints with an address and a node name. They have all combinations of conditions, including
    contradictory ones; most are ready. Hints name any of `nodes`.
    """
    plain = st.just((True, True, False))
    any_conditions = st.tuples(st.booleans(), st.booleans(), st.booleans())
    no_hints = st.just((frozenset[str](), frozenset[str]()))
    hints = no_hints | st.tuples(_ZONES, st.frozensets(st.sampled_from(nodes)))
    return st.builds(
        lambda place, state, hints: Endpoint(
            place[0], state[0], state[1], state[2], place[1], hints[0], hints[1]
        ),
        places,
        plain | any_conditions,
        hints,
    )


@st.composite
def slices_of(draw: st.DrawFn, service: NamespacedName, wanted: Sequence[ServicePort] = ()) -> EndpointSlice:
    """`wanted`: ports of the Service. The slice then has endpoints, mostly with one of these ports."""
    of = draw(st.sampled_from(Family))
    names = st.tuples(_PORT_NAMES, _PROTOCOLS)
    if wanted:
        names = st.sampled_from([(port.name, port.protocol) for port in wanted]) | names
    ports = st.builds(
        lambda name, number: EndpointPort(name[0], name[1], number), names, st.sampled_from((8080, 8081))
    )
    least = min(len(wanted), 1)
    return EndpointSlice(
        NamespacedName(service.namespace, draw(st.sampled_from(("one", "two", "three")))),
        service,
        of,
        draw(st.lists(ports, min_size=least, max_size=2).map(tuple)),
        draw(st.lists(endpoints(of), min_size=least, max_size=4).map(Endpoints)),
    )


@st.composite
def exposed_services(draw: st.DrawFn) -> tuple[Service, tuple[EndpointSlice, ...]]:
    """A Service and its EndpointSlices. Most Services have endpoints."""
    service = draw(SERVICES)
    some = st.lists(slices_of(service.name, service.ports), min_size=1, max_size=3)
    return service, tuple(draw(some | some | st.just([])))
