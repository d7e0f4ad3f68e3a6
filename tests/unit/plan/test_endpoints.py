"""Which endpoints each scope uses, and the last endpoints of the API server."""

import dataclasses

from ebpfproxy.model.address import Family, Protocol, format_address, parse_address
from ebpfproxy.model.balancing import Algorithm
from ebpfproxy.model.endpoint import Endpoint, EndpointPort, EndpointSlice
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.balancing import PlannedBalancing
from ebpfproxy.plan.endpoints import (
    API_SERVER,
    NodeLocation,
    UsedScopes,
    keep_last_endpoints,
    merge_slices,
    plan_endpoints,
)
from ebpfproxy.plan.service_plan import NoEndpointAction, PlannedEndpoint, PlannedEndpoints, ServicePortPlan
from tests.support.build import ELSEWHERE, HERE, draining, endpoint, slice_of

LOCATION = NodeLocation(HERE, "zone-a")
CLUSTER, BOTH, LOCAL = UsedScopes(True, False), UsedScopes(True, True), UsedScopes(False, True)
TCP = Protocol.TCP


def planned(
    *slices: EndpointSlice, uses: UsedScopes = CLUSTER, location: NodeLocation = LOCATION, name: str = ""
) -> tuple[PlannedEndpoints, bool]:
    return plan_endpoints(merge_slices(slices, name, TCP, location), uses, location)


def used(
    *endpoints: Endpoint, uses: UsedScopes = CLUSTER, location: NodeLocation = LOCATION
) -> dict[str, str]:
    """Return the scopes of each address: "cluster", "local", both, or "" if it only keeps existing flows."""
    found, _ = planned(slice_of("web", *endpoints), uses=uses, location=location)
    return {format_address(e.address): " ".join(["cluster"] * e.cluster + ["local"] * e.local) for e in found}


def test_ready_endpoints_are_used_and_have_on_node() -> None:
    found, has_any = planned(slice_of("web", endpoint("10.1.0.1", HERE), endpoint("10.1.0.2")))
    assert [(e.port, e.cluster, e.local, e.on_node) for e in found] == [
        (8080, True, False, True),
        (8080, True, False, False),
    ]
    assert has_any


def test_without_slices_there_are_no_endpoints() -> None:
    for uses in (CLUSTER, BOTH, LOCAL):
        assert planned(uses=uses) == (PlannedEndpoints(), False)


def test_with_a_ready_endpoint_on_any_node_terminating_ones_are_not_used() -> None:
    assert used(draining("10.1.0.1", HERE), endpoint("10.1.0.2")) == {"10.1.0.1": "", "10.1.0.2": "cluster"}


def test_without_ready_endpoints_those_terminating_and_serving_are_used() -> None:
    dead = endpoint("10.1.0.3", ready=False, serving=False, terminating=True)
    assert used(draining("10.1.0.1"), dead) == {"10.1.0.1": "cluster"}


def test_an_endpoint_that_serves_but_is_neither_ready_nor_terminating_is_not_used() -> None:
    found, has_any = planned(slice_of("web", endpoint(ready=False)), uses=BOTH)
    assert [(e.cluster, e.local) for e in found] == [(False, False)]
    assert not has_any


def test_an_endpoint_that_is_ready_and_terminating_counts_as_ready() -> None:
    """publishNotReadyAddresses; kubernetes pull request 119394."""
    assert used(endpoint("10.1.0.1", terminating=True), endpoint("10.1.0.2")) == {
        "10.1.0.1": "cluster",
        "10.1.0.2": "cluster",
    }


def test_scope_local_uses_local_terminating_endpoints_even_if_other_nodes_have_ready_ones() -> None:
    """cilium/cilium 37613 is this case for clients from outside."""
    assert used(draining("10.1.0.1", HERE), endpoint("10.1.0.2"), uses=BOTH) == {
        "10.1.0.1": "local",
        "10.1.0.2": "cluster",
    }


def test_scope_local_with_a_ready_endpoint_does_not_use_terminating_ones() -> None:
    assert used(draining("10.1.0.1", HERE), endpoint("10.1.0.2", HERE), uses=LOCAL) == {
        "10.1.0.1": "",
        "10.1.0.2": "local",
    }


def test_for_scope_local_an_endpoint_on_another_node_counts_as_any() -> None:
    found, has_any = planned(slice_of("web", draining("10.1.0.1", ELSEWHERE)), uses=LOCAL)
    assert has_any
    assert [(e.cluster, e.local) for e in found] == [(False, False)]


def test_an_endpoint_without_node_name_is_not_local() -> None:
    assert used(endpoint(node=""), uses=BOTH) == {"10.1.0.1": "cluster"}


ZONED = (
    endpoint("10.1.0.1", zones=["zone-a"]),
    endpoint("10.1.0.2", zones=["zone-b"]),
    endpoint("10.1.0.3", HERE, zones=["zone-b", "zone-a"]),
)


def test_zone_hints_keep_traffic_in_the_zone() -> None:
    assert used(*ZONED) == {"10.1.0.1": "cluster", "10.1.0.2": "", "10.1.0.3": "cluster"}


def test_scope_local_ignores_hints() -> None:
    elsewhere = endpoint("10.1.0.4", HERE, zones=["zone-b"])
    assert used(*ZONED, elsewhere, uses=BOTH)["10.1.0.4"] == "local"


def test_zone_hints_are_ignored_on_a_node_without_zone() -> None:
    assert set(used(*ZONED, location=NodeLocation(HERE, "")).values()) == {"cluster"}


def test_zone_hints_are_ignored_if_none_is_for_this_zone() -> None:
    assert set(used(*ZONED, location=NodeLocation(HERE, "zone-c")).values()) == {"cluster"}


def test_zone_hints_are_ignored_if_a_ready_endpoint_has_none() -> None:
    assert set(used(*ZONED, endpoint("10.1.0.4")).values()) == {"cluster"}


def test_an_endpoint_that_is_not_ready_needs_no_hint() -> None:
    """kubernetes issue 106507."""
    assert used(*ZONED, draining("10.1.0.4"))["10.1.0.2"] == ""


def test_terminating_endpoints_are_used_in_every_zone() -> None:
    gone = endpoint("10.1.0.5", ready=False, terminating=True, zones=["zone-b"])
    assert used(gone) == {"10.1.0.5": "cluster"}


def test_node_hints_take_precedence_over_zone_hints() -> None:
    mine = endpoint("10.1.0.1", nodes=[HERE], zones=["zone-b"])
    other = endpoint("10.1.0.2", nodes=[ELSEWHERE], zones=["zone-a"])
    assert used(mine, other) == {"10.1.0.1": "cluster", "10.1.0.2": ""}


def test_zone_hints_apply_if_no_node_hint_is_for_this_node() -> None:
    one = endpoint("10.1.0.1", nodes=["third"], zones=["zone-b"])
    two = endpoint("10.1.0.2", nodes=[ELSEWHERE], zones=["zone-a"])
    assert used(one, two) == {"10.1.0.1": "", "10.1.0.2": "cluster"}


def test_ports_are_matched_by_name_and_protocol() -> None:
    ports = (EndpointPort("http", Protocol.UDP, 1), EndpointPort("http", TCP, 2), EndpointPort("", TCP, 3))
    found, _ = planned(slice_of("web", endpoint(), ports=ports), name="http")
    assert [e.port for e in found] == [2]


def test_a_port_name_may_have_different_numbers_in_different_slices() -> None:
    one = slice_of("web", endpoint("10.1.0.1"), ports=[EndpointPort("http", TCP, 8080)])
    two = slice_of("web", endpoint("10.1.0.2"), ports=[EndpointPort("http", TCP, 9090)], called="web-2")
    found, _ = planned(two, one, name="http")
    assert [(format_address(e.address), e.port) for e in found] == [("10.1.0.1", 8080), ("10.1.0.2", 9090)]


def test_two_ports_of_one_address_are_two_endpoints() -> None:
    """Regression of kpng: it added address and port, so 10.0.0.1:81 equaled 10.0.0.2:80."""
    ports = [EndpointPort("", TCP, 80), EndpointPort("", TCP, 81)]
    found, _ = planned(slice_of("web", endpoint("10.0.0.1"), endpoint("10.0.0.2"), ports=ports))
    assert [(format_address(e.address), e.port) for e in found] == [
        ("10.0.0.1", 80),
        ("10.0.0.1", 81),
        ("10.0.0.2", 80),
        ("10.0.0.2", 81),
    ]


def test_of_an_endpoint_in_two_slices_the_better_entry_is_used() -> None:
    """kubernetes issues 121231 and 135266: a new pod got the address of a terminating one."""
    old = slice_of("web", endpoint("10.1.0.1", ELSEWHERE, ready=False, serving=False, terminating=True))
    new = slice_of("web", endpoint("10.1.0.1", HERE), called="web-2")
    for slices in ((old, new), (new, old)):
        assert planned(*slices, uses=BOTH)[0] == planned(new, uses=BOTH)[0]


def test_a_ready_entry_of_another_node_wins_over_a_terminating_local_one() -> None:
    here = slice_of("web", draining("10.1.0.1", HERE))
    there = slice_of("web", endpoint("10.1.0.1", ELSEWHERE), called="web-2")
    for slices in ((here, there), (there, here)):
        (found,), _ = planned(*slices, uses=BOTH)
        assert (found.cluster, found.local, found.on_node) == (True, False, False)


def test_without_node_name_on_node_is_none() -> None:
    for uses in (CLUSTER, BOTH):
        found, _ = planned(slice_of("web", endpoint("10.1.0.1", ""), endpoint("10.1.0.2")), uses=uses)
        assert [(e.cluster, e.local, e.on_node) for e in found] == [(True, False, None), (True, False, False)]


def test_of_two_ready_entries_the_local_one_is_used() -> None:
    here = slice_of("web", endpoint("10.1.0.1", HERE))
    there = slice_of("web", endpoint("10.1.0.1", ELSEWHERE), called="web-2")
    for slices in ((here, there), (there, here)):
        (found,), _ = planned(*slices, uses=BOTH)
        assert (found.local, found.on_node) == (True, True)


NAME = ServicePortName(*API_SERVER, "https", Protocol.TCP)
EMPTY = ServicePortPlan(NAME, Family.IPV4, (), PlannedEndpoints(), NoEndpointAction.REJECT)


def serving_plan(*addresses: str) -> ServicePortPlan:
    endpoints = PlannedEndpoints(
        PlannedEndpoint(parse_address(a), 6443, True, False, False) for a in addresses
    )
    return dataclasses.replace(EMPTY, endpoints=endpoints)


def test_the_api_server_keeps_its_last_endpoints_when_all_are_removed() -> None:
    """Regression: calico ee3dc51152."""
    assert keep_last_endpoints((EMPTY,), lambda _: serving_plan("192.0.2.1")) == (serving_plan("192.0.2.1"),)


def test_the_api_server_keeps_its_last_endpoints_if_new_ones_are_unusable() -> None:
    terminating = PlannedEndpoints(e._replace(cluster=False) for e in serving_plan("192.0.2.2").endpoints)
    plan = dataclasses.replace(EMPTY, endpoints=terminating)
    assert keep_last_endpoints((plan,), lambda _: serving_plan("192.0.2.1")) == (serving_plan("192.0.2.1"),)


def test_the_last_endpoints_of_the_api_server_keep_their_weights_and_tunnels() -> None:
    """Both have a value for each endpoint: those of the removed endpoints would not fit."""
    node = parse_address("192.0.2.11")
    kept = PlannedBalancing(Algorithm.MAGLEV, weights=(2, 3), tunnels=(None, node), dsr=True)
    last = dataclasses.replace(serving_plan("192.0.2.1", "192.0.2.2"), balancing=kept)
    gone = dataclasses.replace(EMPTY, balancing=PlannedBalancing(Algorithm.SOURCE_HASH, dsr=True))
    (plan,) = keep_last_endpoints((gone,), lambda _: last)
    assert plan.balancing == kept._replace(algorithm=Algorithm.SOURCE_HASH)


def test_new_endpoints_of_the_api_server_replace_the_previous_ones() -> None:
    assert keep_last_endpoints((serving_plan("192.0.2.2"),), lambda _: serving_plan("192.0.2.1")) == (
        serving_plan("192.0.2.2"),
    )


def test_an_api_server_that_never_had_endpoints_has_none() -> None:
    assert keep_last_endpoints((EMPTY,), lambda _: None) == (EMPTY,)
    assert keep_last_endpoints((EMPTY,), lambda _: EMPTY) == (EMPTY,)
