"""Direct routing and tunnels: which frontends get them, what their endpoints need, and the limits."""

from collections.abc import Callable

import pytest

from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import (
    Entry,
    IpvsSettings,
    Key,
    Local,
    Member,
    PodAddress,
    ReturnPath,
    Server,
    ServerEntry,
    Tunnel,
)
from ebpfproxy.backends.ipvs.forwarding import Surroundings
from ebpfproxy.backends.ipvs.service_entries import PLAIN, limits, service_entries
from ebpfproxy.linux.ipvs.messages import Method
from ebpfproxy.model.address import Address, Family, Protocol, format_address, parse_address
from ebpfproxy.model.balancing import Algorithm, Forwarding
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.balancing import PlannedBalancing
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    NoEndpointAction,
    PlannedEndpoint,
    PlannedEndpoints,
    PolicyResult,
    Scope,
    ServicePortPlan,
)

VIPS = {Family.IPV4: "203.0.113.1", Family.IPV6: "2001:db8::1"}
HERE = {Family.IPV4: "10.1.0.1", Family.IPV6: "fd00:1::1"}
THERE = {Family.IPV4: "10.1.1.1", Family.IPV6: "fd00:1:1::1"}
DIRECT, TUNNEL, NAT = Forwarding.DIRECT_ROUTING, Forwarding.TUNNEL, Forwarding.NAT
EXTERNAL = (FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)
METHODS = {DIRECT: Method.DIRECT, TUNNEL: Method.TUNNEL, NAT: Method.MASQUERADE}


def planned(
    forwarding: Forwarding | None,
    kind: FrontendKind = FrontendKind.EXTERNAL_IP,
    *,
    port: int = 80,
    of: Family = Family.IPV4,
    local: bool = False,
    balancing: PlannedBalancing | None = None,
) -> ServicePortPlan:
    """An endpoint on this node and one on another, with one frontend."""
    how = PolicyResult(Scope.LOCAL if local else Scope.CLUSTER, not local)
    frontend = Frontend(parse_address(VIPS[of]), 80, Protocol.TCP)
    endpoints = [
        PlannedEndpoint(parse_address(HERE[of]), port, True, True, True),
        PlannedEndpoint(parse_address(THERE[of]), port, True, False, False),
    ]
    return ServicePortPlan(
        ServicePortName("default", "web", "", Protocol.TCP),
        of,
        (FrontendPlan(frontend, kind, how, how, how),),
        PlannedEndpoints(endpoints),
        NoEndpointAction.DROP,
        balancing=balancing or PlannedBalancing(forwarding=forwarding),
    )


def surroundings(*, local: str = "", behind: str = "", lacking: str = "") -> Surroundings:
    """`local`: an address of this node; `behind`: one that has a gateway; `lacking`: a scheduler."""

    def equals(text: str) -> Callable[[Address], bool]:
        return lambda address: format_address(address) == text

    return Surroundings(lambda name: name != lacking, equals(local), equals(behind))


def methods(entries: dict[Key, Entry]) -> dict[str, Method]:
    """By endpoint."""
    (entry,) = (entry for entry in entries.values() if isinstance(entry, ServerEntry))
    return {format_address(real.address): real.method for real in entry.reals}


def of_endpoints(entries: dict[Key, Entry]) -> set[str]:
    return {str(key) for key in entries if isinstance(key, PodAddress | Tunnel | ReturnPath)}


def untranslated(entries: dict[Key, Entry]) -> list[str]:
    names = {sets.set_name(sets.UNTRANSLATED, of) for of in Family}
    return [key.text for key in entries if isinstance(key, Member) and key.set in names]


@pytest.mark.parametrize("of", Family)
@pytest.mark.parametrize("kind", EXTERNAL)
@pytest.mark.parametrize("forwarding", [DIRECT, TUNNEL])
def test_external_frontends_are_forwarded_as_requested(
    forwarding: Forwarding, kind: FrontendKind, of: Family
) -> None:
    entries = service_entries(planned(forwarding, kind, of=of), IpvsSettings())
    assert methods(entries) == {HERE[of]: METHODS[forwarding], THERE[of]: METHODS[forwarding]}
    assert untranslated(entries) == [f"{VIPS[of]},tcp:80"]


@pytest.mark.parametrize("kind", [FrontendKind.CLUSTER_IP, FrontendKind.NODE_PORT])
@pytest.mark.parametrize("forwarding", [DIRECT, TUNNEL])
def test_cluster_ips_and_node_ports_are_translated_without_a_report(
    forwarding: Forwarding, kind: FrontendKind
) -> None:
    plan = planned(forwarding, kind)
    entries = service_entries(plan, IpvsSettings())
    assert set(methods(entries).values()) == {Method.MASQUERADE}
    assert not of_endpoints(entries)
    assert not untranslated(entries)
    assert not limits(plan, IpvsSettings(), PLAIN)


def test_the_annotation_takes_precedence_over_the_flag() -> None:
    settings = IpvsSettings(forwarding=TUNNEL)
    assert set(methods(service_entries(planned(None), settings)).values()) == {Method.TUNNEL}
    assert set(methods(service_entries(planned(NAT), settings)).values()) == {Method.MASQUERADE}
    assert set(methods(service_entries(planned(DIRECT), settings)).values()) == {Method.DIRECT}


def test_only_endpoints_on_this_node_are_prepared() -> None:
    entries = service_entries(planned(DIRECT), IpvsSettings())
    assert of_endpoints(entries) == {
        "address 203.0.113.1 at endpoint 10.1.0.1",
        "sysctls accept_local and rp_filter",
    }
    tunneled = service_entries(planned(TUNNEL), IpvsSettings())
    assert of_endpoints(tunneled) - of_endpoints(entries) == {"tunnel device at endpoint 10.1.0.1"}


def test_ipv6_needs_no_sysctls_of_the_node() -> None:
    entries = service_entries(planned(TUNNEL, of=Family.IPV6), IpvsSettings())
    assert not any(isinstance(key, ReturnPath) for key in entries)


@pytest.mark.parametrize("forwarding", [DIRECT, TUNNEL])
def test_with_another_port_packets_are_translated_on_every_node(forwarding: Forwarding) -> None:
    plan = planned(forwarding, port=8080)
    entries = service_entries(plan, IpvsSettings())
    assert set(methods(entries).values()) == {Method.MASQUERADE}
    assert not of_endpoints(entries)
    (why,) = limits(plan, IpvsSettings(), PLAIN)
    assert "10.1.0.1:8080 has another port than 80" in why


def test_direct_routing_needs_a_route_without_a_gateway() -> None:
    """The node translates, but its own endpoint may get packets of a node that has such a route."""
    around = surroundings(behind=THERE[Family.IPV4])
    plan = planned(DIRECT)
    entries = service_entries(plan, IpvsSettings(), around)
    assert set(methods(entries).values()) == {Method.MASQUERADE}
    assert "address 203.0.113.1 at endpoint 10.1.0.1" in of_endpoints(entries)
    (why,) = limits(plan, IpvsSettings(), around)
    assert "endpoint 10.1.1.1 is behind a gateway" in why
    assert set(methods(service_entries(planned(TUNNEL), IpvsSettings(), around)).values()) == {Method.TUNNEL}
    assert not limits(planned(TUNNEL), IpvsSettings(), around)


def test_an_unused_endpoint_behind_a_gateway_does_not_matter() -> None:
    """With policy Local the endpoint of the other node gets nothing."""
    around = surroundings(behind=THERE[Family.IPV4])
    entries = service_entries(planned(DIRECT, local=True), IpvsSettings(), around)
    assert methods(entries) == {HERE[Family.IPV4]: Method.DIRECT}


@pytest.mark.parametrize("forwarding", [DIRECT, TUNNEL])
def test_an_address_that_the_node_also_has_is_translated(forwarding: Forwarding) -> None:
    """An endpoint with that address could no longer reach the node."""
    around = surroundings(local=VIPS[Family.IPV4])
    entries = service_entries(planned(forwarding), IpvsSettings(), around)
    assert set(methods(entries).values()) == {Method.MASQUERADE}
    assert not of_endpoints(entries)
    assert "also an address of this node" in next(iter(limits(planned(forwarding), IpvsSettings(), around)))


@pytest.mark.parametrize("forwarding", [DIRECT, TUNNEL])
def test_an_endpoint_in_the_network_of_this_node_gets_all_connections_of_this_node(
    forwarding: Forwarding,
) -> None:
    """Otherwise two such nodes could send a packet of each other in a circle."""
    around = surroundings(local=HERE[Family.IPV4])
    entries = service_entries(planned(forwarding), IpvsSettings(), around)
    assert methods(entries) == {HERE[Family.IPV4]: METHODS[forwarding]}
    assert not any(isinstance(key, PodAddress) for key in entries)  # kube-ipvs0 has the address


@pytest.mark.parametrize(
    ("algorithm", "plain", "weighted"),
    [
        (Algorithm.ROUND_ROBIN, "rr", "wrr"),
        (Algorithm.LEAST_CONNECTIONS, "lc", "wlc"),
        (Algorithm.SOURCE_HASH, "sh", "sh"),
        (Algorithm.MAGLEV, "mh", "mh"),
        (None, "sed", "sed"),
    ],
)
def test_the_algorithm_selects_the_scheduler(algorithm: Algorithm | None, plain: str, weighted: str) -> None:
    for weights, expected in (((), plain), ((3, 1), weighted)):
        plan = planned(None, balancing=PlannedBalancing(algorithm, weights))
        entries = service_entries(plan, IpvsSettings(scheduler="sed"))
        (entry,) = (entry for entry in entries.values() if isinstance(entry, ServerEntry))
        assert entry.scheduler == expected
        assert [real.weight for real in entry.reals] == list(weights or (1, 1))


def test_a_missing_scheduler_affects_only_its_services() -> None:
    around = surroundings(lacking="mh")
    plan = planned(None, balancing=PlannedBalancing(Algorithm.MAGLEV))
    entries = service_entries(plan, IpvsSettings(), around)
    (entry,) = (entry for entry in entries.values() if isinstance(entry, ServerEntry))
    assert (entry.scheduler, entry.flags) == ("rr", 0)
    assert limits(plan, IpvsSettings(), around) == {"scheduler rr: this kernel lacks mh"}
    assert not limits(planned(None), IpvsSettings(), around)


def test_keys_of_different_kinds_are_never_equal() -> None:
    """A tuple would be equal to another kind with the same fields."""
    address: Address = parse_address(HERE[Family.IPV4])
    keys = {
        Tunnel(Family.IPV4, address),
        Local(Family.IPV4, address),
        PodAddress(Family.IPV4, address, address),
        ReturnPath(Family.IPV4),
        Server(Family.IPV4, Frontend(address, 80, Protocol.TCP)),
    }
    assert len(keys) == 5


@pytest.mark.parametrize("method", [DIRECT, TUNNEL])
def test_a_limit_of_the_plan_leaves_nodes_and_endpoints_unchanged(method: Forwarding) -> None:
    plan = planned(None, balancing=PlannedBalancing(forwarding=method, forwarding_limit="no flag"))
    entries = service_entries(plan, IpvsSettings())
    assert not any(isinstance(key, ReturnPath | PodAddress | Tunnel) for key in entries)
    assert {each.method for e in entries.values() if isinstance(e, ServerEntry) for each in e.reals} == {
        METHODS[NAT]
    }
    assert limits(plan, IpvsSettings(), PLAIN) == {"forwarding nat: no flag"}
