"""Which connections move after endpoints were added, without a kernel."""

import dataclasses
from collections import Counter

import pytest

from ebpfproxy.model.address import Family, format_address, parse_address
from ebpfproxy.model.balancing import Algorithm, Balancing, parse_weights
from ebpfproxy.model.service import TrafficPolicy
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.open_connections import OpenConnections
from ebpfproxy.plan.planned_endpoints import target_of
from ebpfproxy.plan.rebalancing import STEP, Rebalancing, quotas
from ebpfproxy.plan.service_plan import PlanContext, PlanKey, Scope, ServicePortPlan
from tests.simulation import simulate
from tests.support import build
from tests.support.build import CONTEXT, draining, endpoint, port, slice_of
from tests.unit.plan.udp_flows import TCP, UDP, Flow, flow

OLD, NEW = ("10.1.0.1", "10.1.0.2"), ("10.1.0.3", "10.1.0.4")
VIP = "10.96.0.10"

Plans = dict[PlanKey, ServicePortPlan | None]
Full = dict[PlanKey, frozenset[bytes]]


def plans(*addresses: str, full: Full | None = None, percent: int | None = 100, **fields: object) -> Plans:
    service = dataclasses.replace(build.service("web", port(80)), rebalance=percent, **fields)  # type: ignore[arg-type]
    slices = [slice_of("web", *map(endpoint, addresses))]
    return {each.key: each for each in plan_service(service, slices, None, CONTEXT, full=full or {})}


def target(address: str) -> bytes:
    return target_of(parse_address(address), 8080)


def connections(*counts: int) -> list[Flow]:
    """As many different connections to each endpoint."""
    return [
        flow(f"{VIP}:80", f"{address}:8080", protocol=TCP, zone=number)
        for address, count in zip((*OLD, *NEW), counts, strict=False)
        for number in range(count)
    ]


class Node:
    """A node with connections, whose clients connect again to endpoints that get new connections."""

    def __init__(self, *counts: int) -> None:
        self.open: OpenConnections[Flow] = OpenConnections(10.0, b"node")
        self.counts = Counter(dict(zip(OLD, counts, strict=True)))
        self.full: Full = {}
        self.now = 0.0

    def bring(self, *addresses: str) -> None:
        self.open.expect(plans(*addresses, full=self.full))
        self.open.in_force(self.now)

    def step(self, *addresses: str) -> int:
        """Let a step pass. Return how many connections were reset."""
        found = self.open.search(connections(*(self.counts[each] for each in (*OLD, *NEW))), self.now)
        self.now += STEP
        (key,) = plans()
        for each in found.moving:
            lost = next(a for a in addresses if target(a) == target_of(each.reply_source, 8080))
            self.counts[lost] -= 1
            usable = [a for a in addresses if target(a) not in self.full.get(key, ())]
            self.counts[min(usable, key=self.counts.__getitem__)] += 1
        self.full |= self.open.take_full()
        self.bring(*addresses)
        return len(found.moving)


def test_added_endpoints_get_their_share_with_the_least_resets() -> None:
    node = Node(20, 20)
    node.bring(*OLD)
    everyone = *OLD, *NEW
    node.bring(*everyone)
    resets = [node.step(*everyone) for _ in range(20)]
    assert sum(resets) == 20
    assert max(resets) <= 5  # 100 % of 40 in ten steps a minute, and what earlier steps left
    assert set(node.counts.values()) == {10}
    assert not any(node.full.values()), "all endpoints get new connections again"


def test_nothing_moves_before_full_endpoints_get_no_new_connections() -> None:
    """A client would get the same endpoint again."""
    rule = Rebalancing(100, b"", [b"new"], 0.0)
    for _ in range(3):
        assert rule.step({b"old": 10}, [b"old", b"new"], (), 0.0) == {}
        assert rule.full == {b"old"}
    assert rule.step({b"old": 10}, [b"old", b"new"], [b"old"], 0.0) == {b"old": 2}
    assert rule.step({b"old": 10}, [b"old", b"new"], [b"old"], 0.0) == {b"old": 1}


def test_without_an_addition_nothing_moves() -> None:
    node = Node(30, 2)
    node.bring(*OLD)
    assert [node.step(*OLD) for _ in range(5)] == [0] * 5
    node.bring(OLD[0])
    assert [node.step(OLD[0]) for _ in range(5)] == [0] * 5


def test_the_number_of_resets_is_limited_although_clients_do_not_move() -> None:
    """Their connections may all end at one endpoint again, for example by another node."""
    rule = Rebalancing(100, b"", [b"new"], 0.0)
    total = 0
    for number in range(100):
        total += sum(rule.step({b"old": 10}, [b"old", b"new"], [b"old"], number).values())
    assert total == 6  # 1.1 times what is missing
    assert rule.has_ended


def test_it_ends_after_an_hour() -> None:
    rule = Rebalancing(1, b"", [b"new"], 0.0)
    assert rule.step({b"old": 1000}, [b"old", b"new"], [b"old"], 3599.0)
    assert rule.step({b"old": 1000}, [b"old", b"new"], [b"old"], 3600.0) == {}
    assert rule.has_ended
    assert rule.full == frozenset()


def test_a_service_without_the_request_any_more_ends_it() -> None:
    node = Node(20, 20)
    node.bring(*OLD)
    node.bring(*OLD, *NEW)
    node.step(*OLD, *NEW)
    (key,) = plans()
    assert node.full[key] == set(map(target, OLD))
    node.open.expect(plans(*OLD, *NEW, percent=0))
    node.open.in_force(node.now)
    assert node.open.take_full() == {key: frozenset()}


def test_nodes_with_few_connections_favor_different_endpoints() -> None:
    targets = [b"%d" % each for each in range(10)]
    counts = Counter[bytes]()
    for number in range(1000):
        counts.update(quotas(1, targets, b"node-%d" % number))
    assert max(counts.values()) < 140
    assert min(counts.values()) > 60


@pytest.mark.parametrize(("nodes", "each"), [(1, 1000), (100, 10)])
def test_many_nodes_converge_without_coordination(nodes: int, each: int) -> None:
    found = simulate("steered", nodes, each)
    assert found.resets <= 1.1 * found.minimum
    assert found.minutes is not None
    assert found.minutes <= 10
    assert found.late == 0
    assert found.lowest >= 0.85
    assert found.highest <= 1.15


# Plans


def rebalanced(found: Plans) -> list[int | None]:
    return [each.rebalancing.percent if each and each.rebalancing else None for each in found.values()]


def used(found: Plans) -> list[str]:
    (plan,) = found.values()
    assert plan
    assert plan.rebalancing
    assert [each.address for each in plan.rebalancing.targets] == [each.address for each in plan.endpoints]
    return [format_address(each.address) for each in plan.usable(Scope.CLUSTER)]


def test_full_endpoints_get_no_new_connections_and_are_still_listed() -> None:
    (key,) = plans()
    assert used(plans(*OLD, full={key: frozenset([target(OLD[0])])})) == [OLD[1]]


def test_if_all_endpoints_are_full_none_is() -> None:
    """For example because the added one is not ready any more."""
    (key,) = plans()
    full = {key: frozenset(map(target, OLD))}
    assert used(plans(*OLD, full=full)) == list(OLD)
    assert used(plans(OLD[0], full=full)) == [OLD[0]]


def test_endpoints_that_would_get_no_new_connections_do_not_count() -> None:
    """Those in other zones, not ready ones and terminating ones."""
    others = endpoint(NEW[0], ready=False), draining(NEW[1]), endpoint("10.1.0.5", serving=False, ready=False)
    service = dataclasses.replace(build.service("web", port(80)), rebalance=10)
    slices = [slice_of("web", *map(endpoint, OLD), *others)]
    for full in ({}, {key: frozenset(map(target, OLD)) for key in plans()}):
        (found,) = plan_service(service, slices, None, CONTEXT, full=full)
        assert found.rebalancing
        assert found.rebalancing.targets.targets() == list(map(target, OLD))
        assert [format_address(each.address) for each in found.usable(Scope.CLUSTER)] == list(OLD)


def test_pods_that_become_ready_one_after_the_other_all_get_their_share() -> None:
    """Bug: only the last one did."""
    node = Node(20, 20)
    node.bring(*OLD)
    for number in (1, 2):
        everyone = *OLD, *NEW[:number]
        node.bring(*everyone)
        node.step(*everyone)
    for _ in range(20):
        node.step(*OLD, *NEW)
    assert set(node.counts.values()) == {10}


def test_services_whose_clients_would_return_are_not_rebalanced() -> None:
    assert rebalanced(plans(*OLD)) == [100]
    assert rebalanced(plans(*OLD, percent=None)) == rebalanced(plans(*OLD, percent=0)) == [None]
    assert rebalanced(plans(*OLD, affinity_timeout=60)) == [None]
    assert rebalanced(plans(*OLD, balancing=Balancing(weights=parse_weights("10.1.0.1=2")))) == [None]
    assert rebalanced(plans(*OLD, internal_policy=TrafficPolicy.LOCAL)) == [None]
    assert rebalanced(plans(*OLD, balancing=Balancing(Algorithm.ROUND_ROBIN))) == [100]
    for algorithm in (Algorithm.MAGLEV, Algorithm.SOURCE_HASH):
        assert rebalanced(plans(*OLD, balancing=Balancing(algorithm))) == [None]


def test_the_default_of_the_node_applies_without_an_annotation() -> None:
    service = build.service("web", port(80), port(53, protocol=UDP))
    context: PlanContext = dataclasses.replace(CONTEXT, rebalance=7)
    found = plan_service(service, [slice_of("web", endpoint(OLD[0]), draining(OLD[1]))], None, context)
    percents = {each.name.protocol: each.rebalancing and each.rebalancing.percent for each in found}
    assert percents == {TCP: 7, UDP: None}
    assert {each.family for each in found} == {Family.IPV4}
