"""Which endpoints are used."""

import dataclasses

from ebpfproxy.model.address import Family, Protocol, format_address, parse_address
from ebpfproxy.model.endpoint import Endpoint, EndpointPort, EndpointSlice
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.endpoints import (
    API_SERVER,
    NodeLocation,
    UsedScopes,
    keep_last_endpoints,
    merge_slices,
    plan_endpoints,
)
from ebpfproxy.plan.service_plan import NoEndpointAction, PlannedEndpoint, ServicePortPlan
from tests.support.build import ELSEWHERE, HERE, draining, endpoint, slice_of

PLACE = NodeLocation(HERE, "zone-a")
CLUSTER, BOTH, LOCAL = UsedScopes(True, False), UsedScopes(True, True), UsedScopes(False, True)
TCP = Protocol.TCP


def planned(
    *slices: EndpointSlice, uses: UsedScopes = CLUSTER, place: NodeLocation = PLACE, name: str = ""
) -> tuple[tuple[PlannedEndpoint, ...], bool]:
    return plan_endpoints(merge_slices(slices, name, TCP, place), uses, place)


def used(*endpoints: Endpoint, uses: UsedScopes = CLUSTER, place: NodeLocation = PLACE) -> dict[str, str]:
    """Address to scopes: "cluster", "local", "cluster local", or "" where it only serves on."""
    found, _ = planned(slice_of("web", *endpoints), uses=uses, place=place)
    return {format_address(e.address): " ".join(["cluster"] * e.cluster + ["local"] * e.local) for e in found}


def test_ready_endpoints_are_used_and_marked_where_they_run() -> None:
    found, has_any = planned(slice_of("web", endpoint("10.1.0.1", HERE), endpoint("10.1.0.2")))
    assert [(e.port, e.cluster, e.local, e.on_node) for e in found] == [
        (8080, True, False, True),
        (8080, True, False, False),
    ]
    assert has_any


def test_nothing_is_planned_from_nothing() -> None:
    for uses in (CLUSTER, BOTH, LOCAL):
        assert planned(uses=uses) == ((), False)


def test_a_ready_endpoint_anywhere_beats_those_that_terminate() -> None:
    assert used(draining("10.1.0.1", HERE), endpoint("10.1.0.2")) == {"10.1.0.1": "", "10.1.0.2": "cluster"}


def test_what_terminates_and_serves_is_used_where_nothing_is_ready() -> None:
    dead = endpoint("10.1.0.3", ready=False, serving=False, terminating=True)
    assert used(draining("10.1.0.1"), dead) == {"10.1.0.1": "cluster"}


def test_what_serves_without_being_ready_or_terminating_is_never_used() -> None:
    found, has_any = planned(slice_of("web", endpoint(ready=False)), uses=BOTH)
    assert [(e.cluster, e.local) for e in found] == [(False, False)]
    assert not has_any


def test_ready_and_terminating_at_once_is_ready() -> None:
    """publishNotReadyAddresses; kubernetes pull request 119394."""
    assert used(endpoint("10.1.0.1", terminating=True), endpoint("10.1.0.2")) == {
        "10.1.0.1": "cluster",
        "10.1.0.2": "cluster",
    }


def test_local_falls_back_to_its_own_terminating_endpoints_though_others_are_ready() -> None:
    """cilium/cilium 37613 is about this case for clients from elsewhere."""
    assert used(draining("10.1.0.1", HERE), endpoint("10.1.0.2"), uses=BOTH) == {
        "10.1.0.1": "local",
        "10.1.0.2": "cluster",
    }


def test_local_with_a_ready_endpoint_leaves_terminating_ones_alone() -> None:
    assert used(draining("10.1.0.1", HERE), endpoint("10.1.0.2", HERE), uses=LOCAL) == {
        "10.1.0.1": "",
        "10.1.0.2": "local",
    }


def test_an_endpoint_elsewhere_counts_as_any_for_local() -> None:
    found, has_any = planned(slice_of("web", draining("10.1.0.1", ELSEWHERE)), uses=LOCAL)
    assert has_any
    assert [(e.cluster, e.local) for e in found] == [(False, False)]


def test_an_endpoint_without_node_is_not_local() -> None:
    assert used(endpoint(node=""), uses=BOTH) == {"10.1.0.1": "cluster"}


ZONED = (
    endpoint("10.1.0.1", zones=["zone-a"]),
    endpoint("10.1.0.2", zones=["zone-b"]),
    endpoint("10.1.0.3", HERE, zones=["zone-b", "zone-a"]),
)


def test_zone_hints_keep_traffic_in_the_zone() -> None:
    assert used(*ZONED) == {"10.1.0.1": "cluster", "10.1.0.2": "", "10.1.0.3": "cluster"}


def test_local_ignores_hints() -> None:
    elsewhere = endpoint("10.1.0.4", HERE, zones=["zone-b"])
    assert used(*ZONED, elsewhere, uses=BOTH)["10.1.0.4"] == "local"


def test_zone_hints_are_ignored_on_a_node_without_zone() -> None:
    assert set(used(*ZONED, place=NodeLocation(HERE, "")).values()) == {"cluster"}


def test_zone_hints_are_ignored_where_none_is_for_this_zone() -> None:
    assert set(used(*ZONED, place=NodeLocation(HERE, "zone-c")).values()) == {"cluster"}


def test_zone_hints_are_ignored_where_a_ready_endpoint_has_none() -> None:
    assert set(used(*ZONED, endpoint("10.1.0.4")).values()) == {"cluster"}


def test_an_endpoint_that_is_not_ready_needs_no_hint() -> None:
    """kubernetes issue 106507."""
    assert used(*ZONED, draining("10.1.0.4"))["10.1.0.2"] == ""


def test_terminating_endpoints_are_used_in_every_zone() -> None:
    gone = endpoint("10.1.0.5", ready=False, terminating=True, zones=["zone-b"])
    assert used(gone) == {"10.1.0.5": "cluster"}


def test_node_hints_go_before_zone_hints() -> None:
    mine = endpoint("10.1.0.1", nodes=[HERE], zones=["zone-b"])
    other = endpoint("10.1.0.2", nodes=[ELSEWHERE], zones=["zone-a"])
    assert used(mine, other) == {"10.1.0.1": "cluster", "10.1.0.2": ""}


def test_node_hints_for_others_leave_it_to_the_zones() -> None:
    one = endpoint("10.1.0.1", nodes=["third"], zones=["zone-b"])
    two = endpoint("10.1.0.2", nodes=[ELSEWHERE], zones=["zone-a"])
    assert used(one, two) == {"10.1.0.1": "", "10.1.0.2": "cluster"}


def test_ports_are_found_by_name_and_protocol() -> None:
    ports = (EndpointPort("http", Protocol.UDP, 1), EndpointPort("http", TCP, 2), EndpointPort("", TCP, 3))
    found, _ = planned(slice_of("web", endpoint(), ports=ports), name="http")
    assert [e.port for e in found] == [2]


def test_slices_may_give_one_name_different_numbers() -> None:
    one = slice_of("web", endpoint("10.1.0.1"), ports=[EndpointPort("http", TCP, 8080)])
    two = slice_of("web", endpoint("10.1.0.2"), ports=[EndpointPort("http", TCP, 9090)], called="web-2")
    found, _ = planned(two, one, name="http")
    assert [(format_address(e.address), e.port) for e in found] == [("10.1.0.1", 8080), ("10.1.0.2", 9090)]


def test_ports_of_one_address_are_two_endpoints() -> None:
    """kpng's eBPF backend added address and port up, so that 10.0.0.1:81 was 10.0.0.2:80."""
    ports = [EndpointPort("", TCP, 80), EndpointPort("", TCP, 81)]
    found, _ = planned(slice_of("web", endpoint("10.0.0.1"), endpoint("10.0.0.2"), ports=ports))
    assert [(format_address(e.address), e.port) for e in found] == [
        ("10.0.0.1", 80),
        ("10.0.0.1", 81),
        ("10.0.0.2", 80),
        ("10.0.0.2", 81),
    ]


def test_an_endpoint_in_two_slices_is_one_and_its_better_entry_counts() -> None:
    """kubernetes issues 121231 and 135266: the address of a pod that terminates was given to a new one."""
    old = slice_of("web", endpoint("10.1.0.1", ELSEWHERE, ready=False, serving=False, terminating=True))
    new = slice_of("web", endpoint("10.1.0.1", HERE), called="web-2")
    for slices in ((old, new), (new, old)):
        assert planned(*slices, uses=BOTH)[0] == planned(new, uses=BOTH)[0]


def test_ready_elsewhere_beats_terminating_here() -> None:
    here = slice_of("web", draining("10.1.0.1", HERE))
    there = slice_of("web", endpoint("10.1.0.1", ELSEWHERE), called="web-2")
    for slices in ((here, there), (there, here)):
        (found,), _ = planned(*slices, uses=BOTH)
        assert (found.cluster, found.local, found.on_node) == (True, False, False)


def test_where_an_endpoint_is_whose_slice_names_no_node_nobody_knows() -> None:
    for uses in (CLUSTER, BOTH):
        found, _ = planned(slice_of("web", endpoint("10.1.0.1", ""), endpoint("10.1.0.2")), uses=uses)
        assert [(e.cluster, e.local, e.on_node) for e in found] == [(True, False, None), (True, False, False)]


def test_of_two_ready_entries_the_one_here_counts() -> None:
    here = slice_of("web", endpoint("10.1.0.1", HERE))
    there = slice_of("web", endpoint("10.1.0.1", ELSEWHERE), called="web-2")
    for slices in ((here, there), (there, here)):
        (found,), _ = planned(*slices, uses=BOTH)
        assert (found.local, found.on_node) == (True, True)


NAME = ServicePortName(*API_SERVER, "https", Protocol.TCP)
EMPTY = ServicePortPlan(NAME, Family.IPV4, (), (), NoEndpointAction.REJECT)


def serving_plan(*addresses: str) -> ServicePortPlan:
    endpoints = tuple(PlannedEndpoint(parse_address(a), 6443, True, False, False) for a in addresses)
    return dataclasses.replace(EMPTY, endpoints=endpoints)


def test_the_last_endpoints_stay_when_all_go() -> None:
    """Regression: calico ee3dc51152."""
    assert keep_last_endpoints((EMPTY,), lambda _: serving_plan("192.0.2.1")) == (serving_plan("192.0.2.1"),)


def test_endpoints_that_only_drain_are_none() -> None:
    terminating = tuple(e._replace(cluster=False) for e in serving_plan("192.0.2.2").endpoints)
    plan = dataclasses.replace(EMPTY, endpoints=terminating)
    assert keep_last_endpoints((plan,), lambda _: serving_plan("192.0.2.1")) == (serving_plan("192.0.2.1"),)


def test_new_endpoints_take_over() -> None:
    assert keep_last_endpoints((serving_plan("192.0.2.2"),), lambda _: serving_plan("192.0.2.1")) == (
        serving_plan("192.0.2.2"),
    )


def test_a_service_that_never_had_endpoints_has_none() -> None:
    assert keep_last_endpoints((EMPTY,), lambda _: None) == (EMPTY,)
    assert keep_last_endpoints((EMPTY,), lambda _: EMPTY) == (EMPTY,)
