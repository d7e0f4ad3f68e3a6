"""Random histories of a few Services and their EndpointSlices.

There are few names, addresses and ports, so that Services conflict, and one Service takes over addresses of
another.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    format_address,
    network,
    parse_address,
    parse_network,
)
from ebpfproxy.model.balancing import DEFAULT_BALANCING, Algorithm, Balancing, WeightRule
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.endpoint import Endpoint, EndpointPort, Endpoints, EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName, Service, ServicePort, ServiceType, TrafficPolicy
from tests.kernel.differential.places import (
    ADDRESSES,
    BALANCER_IPS,
    BY_ADDRESS,
    CLIENTS,
    EXTERNAL_IPS,
    FENCE_IPS,
    FENCE_PORTS,
    HERE,
    NODE,
    NODE_PORTS,
    SERVERS,
    TARGET_PORTS,
    TCP,
    THERE,
    UDP,
    Server,
    cluster_ips,
    of_family,
)
from tests.support import build
from tests.support.strategies import endpoints_at

Exposed = tuple[Service, tuple[EndpointSlice, ...]]

NAMES = tuple(NamespacedName("default", name) for name in ("alpha", "bravo", "charlie"))

_PORTS = (("http", TCP, 80, 0), ("dns", UDP, 53, 1), ("dns-tcp", TCP, 53, 1), ("quic", UDP, 80, 0))
"""Name, protocol, number, and the last digit of its NodePort: one number is for both protocols."""

_CLASH = ("clash", TCP, NODE_PORTS[0], 2)
"""The same number as the NodePort of alpha's http, for external IPs that are the node's address."""

_HOSTS = [
    f"{getattr(pair, of)}/{bits}" for pair in CLIENTS.values() for of, bits in (("v4", 32), ("v6", 128))
]
_RANGES = tuple(
    parse_network(text)
    for text in (
        *_HOSTS,
        *ADDRESSES.all_pods,
        *("0.0.0.0/0", "::/0", "0.0.0.0/1", "192.0.2.0/24", "2001:db8::/32"),
    )
)


class Step(NamedTuple):
    """Changes at one time: new or changed Services, None for a deleted one, and the zone of the node."""

    services: Mapping[NamespacedName, Exposed | None]
    zone: str

    def __repr__(self) -> str:
        """The format for hypothesis' output."""
        lines = [f"zone {self.zone!r}"]
        for name, exposed in self.services.items():
            lines += _described(*exposed) if exposed else [f"{name.name}: None"]
        return "\n    ".join(["Step", *lines])


def _described(service: Service, slices: tuple[EndpointSlice, ...]) -> Iterator[str]:
    own = {"name", "ports", "cluster_ips", "health_check_node_port"}
    rest = [each for each in dataclasses.fields(Service) if each.name not in own]
    changed = {
        each.name: getattr(service, each.name) for each in rest if getattr(service, each.name) != each.default
    }
    ports = " ".join(f"{p.name}={p.port}/{p.protocol.name}/{p.node_port}" for p in service.ports)
    texts = [f"{field}={_text(value)}" for field, value in changed.items()]
    yield f"{service.name.name}: {_text(service.cluster_ips)} {ports} {' '.join(texts)}"
    for piece in slices:
        yield f"  {piece.name.name}: {' '.join(f'{p.name}={p.port}' for p in piece.ports)}"
        for e in piece.endpoints:
            conditions = "r-"[not e.ready] + "s-"[not e.serving] + "t-"[not e.terminating]
            hints = f"zones={sorted(e.zones)} nodes={sorted(e.nodes)}" if e.zones or e.nodes else ""
            yield f"    {BY_ADDRESS[e.address].name} {conditions} on {e.node!r} {hints}"


def _text(value: object) -> str:
    if isinstance(value, Balancing):
        return repr(value)
    if isinstance(value, tuple):
        return ",".join(str(each) if isinstance(each, Network) else format_address(each) for each in value)
    return str(value.value) if isinstance(value, Enum) else str(value)


@dataclasses.dataclass(frozen=True)
class Change:
    """The state after a step, and the names that a proxier is notified of."""

    state: ClusterState
    services: frozenset[NamespacedName]
    node_changed: bool


NOTHING = ClusterState({}, {})


def advance(state: ClusterState, step: Step) -> Change:
    services, slices = dict(state.services), dict(state.slices)
    for name, exposed in step.services.items():
        services.pop(name, None)
        slices.pop(name, None)
        if exposed:
            services[name] = exposed[0]
            slices[name] = tuple({piece.name: piece for piece in exposed[1]}.values())
    node = Node(HERE, step.zone, addresses=tuple(of_family(NODE, of) for of in Family))
    after = ClusterState(services, slices, node)
    return Change(after, frozenset(step.services), node != state.node)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Step, ...]:
    """Two to four steps. The first one decides for every Service whether it exists."""
    present: dict[NamespacedName, Exposed] = {}
    steps = []
    for number in range(draw(st.integers(2, 4))):
        changed: dict[NamespacedName, Exposed | None] = {}
        for index, name in enumerate(NAMES):
            what = draw(st.sampled_from(_choices(index, number == 0, name in present)))
            if what == "absent":
                changed[name] = None
                present.pop(name, None)
            elif what != "same":
                changed[name] = present[name] = _changed(draw, what, index, present.get(name))
        zone = draw(st.sampled_from(("zone-a", "zone-a", "zone-a", "", "zone-c")))
        steps.append(Step(changed, zone))
    return tuple(steps)


def _choices(index: int, first: bool, present: bool) -> tuple[str, ...]:
    if first:
        return ("new",) if index == 0 else ("absent", "new", "new")
    if not present:
        return ("same", "new")
    return ("same", "same", "endpoints", "endpoints", "field", "field", "field", "new", "absent")


def _changed(draw: st.DrawFn, what: str, index: int, previous: Exposed | None) -> Exposed:
    if what == "new" or previous is None:
        service = draw(_services(index))
        return service, draw(_slices(service))
    service, slices = previous
    if what == "endpoints":
        return service, draw(_slices(service))
    field = draw(st.sampled_from(sorted(_FIELDS)))
    return dataclasses.replace(service, **{field: draw(_FIELDS[field])}), slices


def _some(pairs: tuple[tuple[str, str], ...]) -> SearchStrategy[tuple[Address, ...]]:
    addresses = st.sampled_from([parse_address(text) for pair in pairs for text in pair])
    return st.just(()) | st.lists(addresses, max_size=3, unique=True).map(tuple)


_NO_RANGES: SearchStrategy[tuple[Network, ...]] = st.just(())

_WEIGHT_RULES = st.builds(
    WeightRule,
    node=st.sampled_from((HERE, THERE)),
    network=st.none() | st.sampled_from([network(address, 128) for address in BY_ADDRESS]),
    weight=st.sampled_from((0, 1, 3)),
)
_BALANCINGS = st.builds(
    Balancing,
    algorithm=st.none() | st.sampled_from(Algorithm),
    weights=st.lists(_WEIGHT_RULES, max_size=2).map(tuple),
    slow_start=st.none() | st.sampled_from((0, 30)),
    forwarding=st.none(),
)
"""Only a weight of 0 is in the outcomes of the reference. The other values must not break anything."""

_FIELDS: Mapping[str, SearchStrategy[Any]] = {
    "external_ips": _some((*EXTERNAL_IPS, *(cluster_ips(index) for index in range(2)))),
    "load_balancer_ips": _some(BALANCER_IPS),
    "source_ranges": _NO_RANGES | st.lists(st.sampled_from(_RANGES), max_size=3, unique=True).map(tuple),
    "type": st.sampled_from(ServiceType),
    "internal_policy": st.sampled_from(TrafficPolicy),
    "external_policy": st.sampled_from(TrafficPolicy),
    "affinity_timeout": st.sampled_from((0, 0, 3600)),
    "balancing": st.just(DEFAULT_BALANCING) | _BALANCINGS,
}
"""The fields of a Service that may change while it exists, except its ports."""


@st.composite
def _services(draw: st.DrawFn, index: int) -> Service:
    pool = (*_PORTS, _CLASH) if index else _PORTS
    chosen = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=2, unique=True))
    ports = tuple(
        ServicePort(name, protocol, number, draw(st.sampled_from((0, NODE_PORTS[10 * index + last]))))
        for name, protocol, number, last in chosen
    )
    own = [of_family(cluster_ips(index), of) for of in Family]
    ips = draw(st.sampled_from((own, own, own[::-1], own[:1], own[1:])))
    rest: dict[str, Any] = {field: draw(strategy) for field, strategy in _FIELDS.items()}
    return dataclasses.replace(Service(NAMES[index], ports, tuple(ips)), **rest)


@st.composite
def _slices(draw: st.DrawFn, service: Service) -> tuple[EndpointSlice, ...]:
    slices = []
    for of in Family:
        for number in range(draw(st.sampled_from((1, 1, 1, 2)))):
            slices.append(
                EndpointSlice(
                    NamespacedName(service.name.namespace, f"{service.name.name}-{of.value}-{number}"),
                    service.name,
                    of,
                    tuple(_endpoint_ports(draw, service)),
                    Endpoints(draw(st.lists(_ENDPOINTS[of], max_size=2 if number else 4))),
                )
            )
    return tuple(slices)


def _endpoint_ports(draw: st.DrawFn, service: Service) -> list[EndpointPort]:
    """Mostly all ports of the Service; the numbers may differ between slices."""
    return [
        EndpointPort(port.name, port.protocol, number)
        for port in service.ports
        if (number := draw(st.sampled_from((*TARGET_PORTS[port.protocol] * 4, 0))))
    ]


_ENDPOINTS = {
    of: endpoints_at(
        st.sampled_from(
            [(of_family(each.at, of), each.node) for each in SERVERS]
            + [(of_family(each.at, of), "") for each in SERVERS]
        ),
        (HERE, THERE),
    )
    for of in Family
}


def fence_service() -> Exposed:
    """A Service with a port for each UDP socket of each server. With its ports as a fence, a client asks each
    server through what serves Services."""
    ports = [
        build.port(number, f"{name}-{port}", protocol=UDP) for (name, port), number in FENCE_PORTS.items()
    ]
    service = build.service("fence/fence", *ports, ips=FENCE_IPS)
    return service, tuple(
        build.slice_of(
            "fence/fence",
            Endpoint(of_family(server.at, of), node=server.node),
            ports=[EndpointPort(f"{server.name}-{port}", UDP, port) for port in TARGET_PORTS[UDP]],
            called=f"{server.name}-{of.value}",
        )
        for server in SERVERS
        for of in Family
    )


def history_of_differences() -> tuple[Step, ...]:
    """A history in which correct backends show all differences; see test_differential.py."""
    dns, clash = build.port(53, "dns", protocol=UDP), build.port(NODE_PORTS[0], "clash")
    http = build.port(80, "http", node_port=NODE_PORTS[0])
    quic = build.port(80, "quic", protocol=UDP, node_port=NODE_PORTS[0])
    alpha = _by_hand(0, http, build.port(53, "dns-tcp"), quic)
    bravo = _by_hand(
        1, dns, clash, external=(NODE.v4, *EXTERNAL_IPS[1]), balancer=BALANCER_IPS[0], ranges=["192.0.2.0/24"]
    )
    charlie = _by_hand(2, clash, balancer=[NODE.v6], ranges=["2001:db8::/32"])
    p, a, d = SERVERS[:3]
    local = dataclasses.replace(
        alpha, ports=(http, quic), external_policy=TrafficPolicy.LOCAL, internal_policy=TrafficPolicy.LOCAL
    )
    open_ = dataclasses.replace(bravo, source_ranges=(), external_policy=TrafficPolicy.LOCAL)
    return (
        Step(
            {
                alpha.name: (alpha, _slices_by_hand(alpha, a, d)),
                bravo.name: (bravo, ()),
                charlie.name: (charlie, _slices_by_hand(charlie, d)),
            },
            "",
        ),
        Step({alpha.name: (local, _slices_by_hand(local, d))}, ""),
        Step({bravo.name: (open_, _slices_by_hand(open_, d))}, ""),
        Step(
            {
                alpha.name: (alpha, _slices_by_hand(alpha, a)),
                bravo.name: (open_, _slices_by_hand(open_, a, d)),
                charlie.name: (charlie, _slices_by_hand(charlie, p._replace(node=""))),
            },
            "",
        ),
        Step({alpha.name: (alpha, _slices_by_hand(alpha, d, leaving=(a,)))}, ""),
    )


def _by_hand(
    index: int,
    *ports: ServicePort,
    external: Sequence[str] = (),
    balancer: Sequence[str] = (),
    ranges: Sequence[str] = (),
) -> Service:
    return build.service(
        str(NAMES[index]),
        *ports,
        ips=cluster_ips(index),
        external=external,
        balancer=balancer,
        ranges=ranges,
        type_=ServiceType.LOAD_BALANCER,
    )


def _slices_by_hand(
    service: Service, *servers: Server, leaving: Sequence[Server] = ()
) -> tuple[EndpointSlice, ...]:
    """`leaving`: servers that still serve, but are not ready."""
    ports = [EndpointPort(port.name, port.protocol, TARGET_PORTS[port.protocol][0]) for port in service.ports]
    return tuple(
        build.slice_of(
            str(service.name),
            *(Endpoint(of_family(server.at, of), node=server.node) for server in servers),
            *(
                Endpoint(of_family(server.at, of), ready=False, terminating=True, node=server.node)
                for server in leaving
            ),
            ports=ports,
            called=f"{service.name.name}-{of.value}",
        )
        for of in Family
    )
