"""Plans become virtual servers and members of sets: one property at a time. Complete cases: tests/golden."""

import pytest

from ebpfproxy.backends.ipvs import sets
from ebpfproxy.backends.ipvs.entries import Entry, IpvsSettings, Key, Local, Member, Server, ServerEntry
from ebpfproxy.backends.ipvs.service_entries import service_entries
from ebpfproxy.linux.ipvs.messages import Flag
from ebpfproxy.model.address import Family, Protocol, format_endpoint, parse_address, parse_network
from ebpfproxy.model.service import ServicePortName
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

VIP, HERE, THERE = "203.0.113.1", "10.1.0.1", "10.1.1.1"
CLUSTER, LOCAL = PolicyResult(Scope.CLUSTER, False), PolicyResult(Scope.LOCAL, False)
MASQUERADED = PolicyResult(Scope.CLUSTER, True)


def frontend(kind: FrontendKind, *, local: bool = False, address: str = VIP) -> FrontendPlan:
    dialled = Frontend(parse_address(address), 80, Protocol.TCP)
    if kind is FrontendKind.CLUSTER_IP:
        how = LOCAL if local else CLUSTER
        return FrontendPlan(dialled, kind, how, how, how)
    if local:
        return FrontendPlan(dialled, kind, CLUSTER, MASQUERADED, LOCAL)
    return FrontendPlan(dialled, kind, MASQUERADED, MASQUERADED, MASQUERADED)


def rendered(
    *frontends: FrontendPlan, here: bool = True, there: bool = True, scheduler: str = "rr", affinity: int = 0
) -> dict[Key, Entry]:
    endpoints = [PlannedEndpoint(parse_address(HERE), 8080, True, True, True)] * here
    endpoints += [PlannedEndpoint(parse_address(THERE), 8080, True, False, False)] * there
    plan = ServicePortPlan(
        ServicePortName("default", "web", "", Protocol.TCP),
        Family.IPV4,
        frontends,
        PlannedEndpoints(endpoints),
        NoEndpointAction.DROP if endpoints else NoEndpointAction.REJECT,
        affinity,
    )
    return service_entries(plan, IpvsSettings(scheduler=scheduler))


def reals(entries: dict[Key, Entry]) -> list[str]:
    (entry,) = (entry for entry in entries.values() if isinstance(entry, ServerEntry))
    return [format_endpoint(real.address, real.port) for real in entry.reals]


def members(entries: dict[Key, Entry], base: str) -> list[str]:
    return sorted(key.text for key in entries if isinstance(key, Member) and key.set == base)


@pytest.mark.parametrize("kind", FrontendKind)
def test_with_policy_cluster_a_frontend_has_all_endpoints(kind: FrontendKind) -> None:
    assert reals(rendered(frontend(kind))) == [f"{HERE}:8080", f"{THERE}:8080"]


@pytest.mark.parametrize("kind", FrontendKind)
def test_with_policy_local_it_has_those_of_this_node(kind: FrontendKind) -> None:
    entries = rendered(frontend(kind, local=True))
    assert reals(entries) == [f"{HERE}:8080"]
    assert not members(entries, sets.NO_LOCAL) + members(entries, sets.NO_LOCAL_BUT_PODS)


@pytest.mark.parametrize(
    ("kind", "keeps_source"),
    [
        (FrontendKind.EXTERNAL_IP, sets.EXTERNAL_IP_LOCAL),
        (FrontendKind.LOAD_BALANCER, sets.LOAD_BALANCER_LOCAL),
        (FrontendKind.NODE_PORT, sets.NODE_PORT_LOCAL[Protocol.TCP]),
    ],
)
def test_only_external_policy_local_keeps_the_source_address(kind: FrontendKind, keeps_source: str) -> None:
    assert len(members(rendered(frontend(kind, local=True)), keeps_source)) == 1
    assert not members(rendered(frontend(kind)), keeps_source)


def test_an_external_ip_is_in_one_of_two_sets() -> None:
    """The one whose clients are masqueraded, or the one whose clients are not."""
    cluster, local = (rendered(frontend(FrontendKind.EXTERNAL_IP, local=local)) for local in (False, True))
    assert members(cluster, sets.EXTERNAL_IP) == [f"{VIP},tcp:80"]
    assert not members(local, sets.EXTERNAL_IP)


def test_internal_policy_local_without_an_endpoint_here_has_none_and_is_dropped() -> None:
    """kube-proxy falls back to endpoints of other nodes."""
    entries = rendered(frontend(FrontendKind.CLUSTER_IP, local=True), here=False)
    assert reals(entries) == []
    assert members(entries, sets.NO_LOCAL) == [f"{VIP},tcp:80"]
    assert not members(entries, sets.NO_LOCAL_BUT_PODS)


@pytest.mark.parametrize("kind", [FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER])
def test_external_policy_local_without_an_endpoint_here_is_for_pods_and_the_node(kind: FrontendKind) -> None:
    entries = rendered(frontend(kind, local=True), here=False)
    assert reals(entries) == [f"{THERE}:8080"]
    assert members(entries, sets.NO_LOCAL_BUT_PODS) == [f"{VIP},tcp:80"]
    assert not members(entries, sets.NO_LOCAL)


def test_where_nothing_tells_pods_the_node_alone_has_those_of_other_nodes() -> None:
    """So it is not dropped where the node's own is, too."""
    local, all_ = PolicyResult(Scope.LOCAL, False), PolicyResult(Scope.CLUSTER, True)
    entries = rendered(
        frontend(FrontendKind.EXTERNAL_IP)._replace(pod=local, node=all_, outside=local), here=False
    )
    assert reals(entries) == [f"{THERE}:8080"]
    assert members(entries, sets.NO_LOCAL_BUT_PODS) == [f"{VIP},tcp:80"]
    assert not members(entries, sets.NO_LOCAL)


def test_where_nobody_has_an_endpoint_ipvs_refuses_and_nothing_is_dropped() -> None:
    entries = rendered(frontend(FrontendKind.EXTERNAL_IP, local=True), here=False, there=False)
    assert reals(entries) == []
    assert not members(entries, sets.NO_LOCAL) + members(entries, sets.NO_LOCAL_BUT_PODS)


def test_a_node_port_has_no_address_of_its_own() -> None:
    entries = rendered(frontend(FrontendKind.NODE_PORT, address="0.0.0.0"))
    assert Server(Family.IPV4, Frontend(parse_address("0.0.0.0"), 80, Protocol.TCP)) in entries
    assert not [key for key in entries if isinstance(key, Local)]
    assert members(entries, "KUBE-NODE-PORT-TCP") == ["80"]


def test_endpoints_of_this_node_are_masqueraded_when_they_come_upon_themselves() -> None:
    entries = rendered(frontend(FrontendKind.CLUSTER_IP))
    assert members(entries, sets.LOOP_BACK) == [f"{HERE},tcp:8080,{HERE}"]


@pytest.mark.parametrize(
    ("scheduler", "flags"), [("rr", Flag(0)), ("sh", Flag.FALLBACK), ("mh", Flag.PORT | Flag.FALLBACK)]
)
def test_the_scheduler_and_affinity_are_the_virtual_servers(scheduler: str, flags: Flag) -> None:
    entries = rendered(frontend(FrontendKind.CLUSTER_IP), scheduler=scheduler, affinity=60)
    (entry,) = (entry for entry in entries.values() if isinstance(entry, ServerEntry))
    assert (entry.scheduler, entry.flags, entry.persistence_s) == (scheduler, flags, 60)


@pytest.mark.parametrize(
    ("ranges", "stored"),
    [
        (["192.0.2.0/24", "198.51.100.7/32"], ["192.0.2.0/24", "198.51.100.7"]),
        (["0.0.0.0/0"], ["0.0.0.0/1", "128.0.0.0/1"]),
    ],
)
def test_source_ranges_are_stored_as_a_set_has_them(ranges: list[str], stored: list[str]) -> None:
    restricted = frontend(FrontendKind.LOAD_BALANCER)._replace(
        restricted=True, source_ranges=tuple(map(parse_network, ranges))
    )
    entries = rendered(restricted)
    assert members(entries, sets.LOAD_BALANCER_SOURCE_CIDR) == [f"{VIP},tcp:80,{net}" for net in stored]
    assert members(entries, sets.LOAD_BALANCER_FW) == [f"{VIP},tcp:80"]


def test_a_node_that_is_not_admitted_is_not_a_member() -> None:
    restricted = frontend(FrontendKind.LOAD_BALANCER)._replace(
        restricted=True, source_ranges=(parse_network("192.0.2.0/24"),), node_admitted=False
    )
    entries = rendered(restricted)
    assert members(entries, sets.LOAD_BALANCER_FW) == [f"{VIP},tcp:80"]
    assert not members(entries, sets.LOAD_BALANCER_SOURCE_IP)
