"""What every backend keeps to, whatever its mechanism: the fake and the kernel behave alike."""

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpfproxy.backends.delta import applied, diff
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.backends.interface import Delta
from ebpfproxy.errors import TableFull
from ebpfproxy.model.address import Family, Protocol, parse_address, parse_network
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import (
    DevicePlan,
    DeviceRole,
    Frontend,
    FrontendKind,
    FrontendPlan,
    NodePlan,
    NoEndpointAction,
    PlannedEndpoint,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.contract.conftest import ROOM, Subject

Entries = dict[Any, Any]

NODE = NodePlan(
    frozenset({parse_network("127.0.0.0/8"), parse_network("192.0.2.10/32"), parse_network("::1/128")}),
    frozenset({parse_network("192.0.2.10/32")}),
)
CLUSTER = PolicyResult(Scope.CLUSTER, False)
BY_FRONTEND = pytest.mark.backends("fake", "ebpf")
"""Those that hold frontends by what is dialled, in tables with an end to them, and look after devices. Others
have rules that do not know each other: that a frontend is one ServicePort's is settled before them."""


def frontend(ip: str, port: int = 80, protocol: Protocol = Protocol.TCP) -> FrontendPlan:
    dialled = Frontend(parse_address(ip), port, protocol)
    return FrontendPlan(dialled, FrontendKind.CLUSTER_IP, CLUSTER, CLUSTER, CLUSTER)


def plan(
    name: str,
    *ips: str,
    endpoints: int = 1,
    protocol: Protocol = Protocol.TCP,
    family: Family = Family.IPV4,
    affinity: int = 0,
) -> ServicePortPlan:
    subnet = "10.1.0." if family is Family.IPV4 else "fd01::"
    return ServicePortPlan(
        ServicePortName("default", name, "", protocol),
        family,
        tuple(frontend(ip, protocol=protocol) for ip in ips),
        tuple(
            PlannedEndpoint(parse_address(f"{subnet}{n}"), 8080, cluster=True, local=n == 1, on_node=n == 1)
            for n in range(1, endpoints + 1)
        ),
        NoEndpointAction.DROP if endpoints else NoEndpointAction.REJECT,
        affinity,
    )


def many(first: int, count: int) -> list[str]:
    return [f"10.96.0.{n}" for n in range(first, first + count)]


def entries(subject: Subject, *plans: ServicePortPlan, node: NodePlan = NODE) -> Entries:
    return dict(subject.plane.render(plans, node))


def bring(subject: Subject, wanted: Entries) -> Entries:
    """Bring the backend in step with `wanted`; what it rejected."""
    delta = diff(subject.plane.read(), wanted)
    return dict(subject.plane.apply(delta)) if delta else {}


def test_what_is_put_is_read_back(subject: Subject) -> None:
    wanted = entries(
        subject,
        plan("web", "10.96.0.1", "203.0.113.1", endpoints=3, affinity=600),
        plan("web", "fd00::1", endpoints=2, family=Family.IPV6),
        plan("dns", "10.96.0.1", protocol=Protocol.UDP),
        plan("idle", "10.96.0.2", endpoints=0),
        plan("without-frontends"),
    )
    assert not bring(subject, wanted)
    assert subject.plane.read() == wanted


def test_a_put_replaces_what_was_there(subject: Subject) -> None:
    bring(subject, entries(subject, plan("web", "10.96.0.1", "10.96.0.2", endpoints=3)))
    after = entries(subject, plan("web", "10.96.0.2", "10.96.0.3", endpoints=1, affinity=7))
    assert not bring(subject, after)
    assert subject.plane.read() == after


def test_a_drop_takes_all_of_it_away_and_nothing_else(subject: Subject) -> None:
    bring(subject, entries(subject, plan("web", "10.96.0.1"), plan("api", "10.96.0.2")))
    after = entries(subject, plan("api", "10.96.0.2"))
    assert not bring(subject, after)
    assert subject.plane.read() == after


def test_what_is_not_there_is_dropped_without_complaint(subject: Subject) -> None:
    wanted = entries(subject, plan("web", "10.96.0.1"))
    bring(subject, wanted)
    nobody = entries(subject, plan("nobody", "10.96.0.9")).keys() - wanted.keys()
    assert not subject.plane.apply(Delta({}, frozenset(nobody)))
    assert subject.plane.read() == wanted


def test_a_delta_of_nothing_is_taken_at_any_time_and_changes_nothing(subject: Subject) -> None:
    """It comes with each verification that finds no difference, the first of a run included."""
    wanted = entries(subject, plan("web", "10.96.0.1"))
    bring(subject, wanted)
    for _ in range(2):
        assert not subject.plane.apply(Delta({}, frozenset()))
        assert subject.plane.read() == wanted
        subject.reopen()


def test_networks_come_and_go(subject: Subject) -> None:
    more = NodePlan(NODE.local_networks | {parse_network("198.51.100.1/32")}, NODE.local_networks)
    for node in (NODE, more, NodePlan(), NODE):
        wanted = entries(subject, node=node)
        assert not bring(subject, wanted)
        assert subject.plane.read() == wanted


# Devices

UPLINK = parse_address("192.0.2.10")


def watched(*devices: tuple[int, str], role: DeviceRole = DeviceRole.UPLINK) -> NodePlan:
    """A node with these devices, by ifindex and name, all to be looked after alike."""
    plans = (DevicePlan(ifindex, name, role, False, UPLINK, None) for ifindex, name in devices)
    return dataclasses.replace(NODE, devices=tuple(plans))


def test_devices_come_and_go(subject: Subject) -> None:
    one, two = subject.devices.add("one"), subject.devices.add("two")
    for node in (watched((one, "one")), watched((one, "one"), (two, "two")), watched((two, "two")), NODE):
        wanted = entries(subject, node=node)
        assert not bring(subject, wanted)
        assert subject.plane.read() == wanted


def test_a_device_is_looked_after_otherwise_than_before(subject: Subject) -> None:
    one = subject.devices.add("one")
    plans = [watched((one, "one"), role=role) for role in DeviceRole]
    moved = plans[0].devices[0]._replace(v4=parse_address("192.0.2.11"), v6=parse_address("2001:db8::1"))
    plans.append(dataclasses.replace(NODE, devices=(moved,)))
    for node in (*plans, plans[0]):
        wanted = entries(subject, node=node)
        assert not bring(subject, wanted)
        assert subject.plane.read() == wanted


@BY_FRONTEND
def test_a_device_that_somebody_stripped_is_looked_after_again(subject: Subject) -> None:
    wanted = entries(subject, node=watched((subject.devices.add("one"), "one")))
    bring(subject, wanted)
    subject.devices.strip("one")
    assert subject.plane.read() != wanted
    assert not bring(subject, wanted)
    assert subject.plane.read() == wanted


def test_a_device_that_is_gone_is_no_error_whether_it_is_put_or_dropped(subject: Subject) -> None:
    wanted = entries(subject, node=watched((subject.devices.add("one"), "one")))
    subject.devices.remove("one")
    assert not bring(subject, wanted)  # it went before it was put
    again = entries(subject, node=watched((subject.devices.add("one"), "one")))
    assert not bring(subject, again)
    assert subject.plane.read() == again
    subject.devices.remove("one")
    assert not subject.plane.apply(diff(again, entries(subject)))  # before it was dropped
    assert subject.plane.read() == entries(subject)


def test_a_device_that_takes_the_name_of_another_one_is_another_one(subject: Subject) -> None:
    previous = entries(subject, node=watched((subject.devices.add("one"), "one")))
    bring(subject, previous)
    subject.devices.remove("one")
    wanted = entries(subject, node=watched((subject.devices.add("one"), "one")))
    assert not subject.plane.apply(diff(previous, wanted))  # as a proxier that was told of the new one
    assert subject.plane.read() == wanted


def test_what_was_gone_unnoticed_is_dropped_by_what_is_read(subject: Subject) -> None:
    bring(subject, entries(subject, node=watched((subject.devices.add("one"), "one"))))
    subject.devices.remove("one")
    assert not bring(subject, entries(subject))
    assert subject.plane.read() == entries(subject)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_renamed_device_stays_looked_after(subject: Subject, at_once: bool) -> None:
    """Whether the old name is dropped with what puts the new one, or later."""
    one = subject.devices.add("one")
    previous = entries(subject, node=watched((one, "one")))
    bring(subject, previous)
    subject.devices.rename("one", "new")
    wanted = entries(subject, node=watched((one, "new")))
    delta = diff(previous, wanted)
    if at_once:
        assert not subject.plane.apply(delta)
    else:
        assert not subject.plane.apply(Delta(delta.puts, frozenset()))
        assert not subject.plane.apply(Delta({}, delta.drops))
    assert subject.plane.read() == wanted


def test_devices_that_are_looked_after_stay_so_from_run_to_run(subject: Subject) -> None:
    one, two = subject.devices.add("one"), subject.devices.add("two")
    wanted = entries(subject, node=watched((one, "one"), (two, "two")))
    bring(subject, wanted)
    subject.reopen()
    assert subject.plane.read() == wanted
    assert not bring(subject, entries(subject, node=watched((two, "two"))))
    assert subject.plane.read() == entries(subject, node=watched((two, "two")))


def test_a_delta_that_is_applied_leaves_no_difference(subject: Subject) -> None:
    wanted = entries(subject, plan("web", "10.96.0.1", endpoints=2))
    delta = diff(subject.plane.read(), wanted)
    assert delta
    subject.plane.apply(delta)
    assert not diff(subject.plane.read(), wanted)
    assert not subject.plane.apply(delta)  # once more
    assert subject.plane.read() == wanted


def test_reading_changes_nothing(subject: Subject) -> None:
    bring(subject, entries(subject, plan("web", "10.96.0.1", endpoints=2)))
    assert subject.plane.read() == subject.plane.read()


def test_what_is_there_outlives_the_run(subject: Subject) -> None:
    wanted = entries(
        subject,
        plan("web", "10.96.0.1", endpoints=2, affinity=5),
        plan("dns", "10.96.0.1", protocol=Protocol.UDP),
    )
    bring(subject, wanted)
    subject.reopen()
    assert subject.plane.read() == wanted
    after = entries(subject, plan("web", "10.96.0.1", endpoints=3))
    assert not bring(subject, after)
    subject.reopen()
    assert subject.plane.read() == after


# Frontends that change hands


def test_a_frontend_moves_to_another_service_in_one_delta(subject: Subject) -> None:
    bring(subject, entries(subject, plan("a", "10.96.0.1", "203.0.113.1"), plan("b", "10.96.0.2")))
    after = entries(subject, plan("a", "10.96.0.1"), plan("b", "10.96.0.2", "203.0.113.1"))
    assert not bring(subject, after)
    assert subject.plane.read() == after


def test_a_service_made_anew_under_another_name_takes_its_frontends_over(subject: Subject) -> None:
    """The drop of the old one comes into force last, and must not take them away again."""
    bring(subject, entries(subject, plan("old", *many(1, ROOM))))
    after = entries(subject, plan("new", *many(1, ROOM)))
    assert not bring(subject, after)  # no room is needed for what is only replaced
    assert subject.plane.read() == after


@BY_FRONTEND
def test_a_frontend_belongs_to_whom_it_was_given_last(subject: Subject) -> None:
    a, b = plan("a", "10.96.0.1", "203.0.113.1"), plan("b", "203.0.113.1")
    bring(subject, entries(subject, a))
    taking = entries(subject, b)
    subject.plane.apply(Delta(taking, frozenset()))
    assert subject.plane.read() == entries(subject, plan("a", "10.96.0.1"), b)


@BY_FRONTEND
def test_a_frontend_that_was_taken_can_be_taken_back(subject: Subject) -> None:
    """By putting what had been put before: it is not in force any more, whatever a writer remembers."""
    before = entries(subject, plan("a", "10.96.0.1", "203.0.113.1"))
    bring(subject, before)
    taking = entries(subject, plan("b", "203.0.113.1"))
    subject.plane.apply(Delta(taking, frozenset()))
    own = {key: entry for key, entry in before.items() if key not in taking}
    subject.plane.apply(Delta(own, frozenset()))
    assert subject.plane.read() == entries(subject, plan("a", "10.96.0.1", "203.0.113.1"), plan("b"))


@BY_FRONTEND
def test_whoever_lost_a_frontend_does_not_take_it_along_when_dropped(subject: Subject) -> None:
    both = entries(subject, plan("a", "10.96.0.1", "203.0.113.1"))
    bring(subject, both)
    taking = entries(subject, plan("b", "203.0.113.1"))
    subject.plane.apply(Delta(taking, frozenset()))
    subject.plane.apply(Delta({}, frozenset(both.keys() - taking.keys())))
    assert subject.plane.read() == taking


# Room


@BY_FRONTEND
def test_what_does_not_fit_is_refused_and_the_rest_is_in_force(subject: Subject) -> None:
    fits, too_large, small = plan("a", *many(1, 6)), plan("b", *many(20, 3)), plan("c", *many(30, 2))
    wanted = entries(subject, fits, too_large, small)
    rejected = bring(subject, wanted)
    assert list(rejected) == [key for key in entries(subject, too_large) if key in rejected]
    assert len(rejected) == 1
    assert all(isinstance(failure, TableFull) for failure in rejected.values())
    assert subject.plane.read() == entries(subject, fits, small)


@BY_FRONTEND
def test_what_outgrows_its_room_keeps_what_it_had(subject: Subject) -> None:
    before = entries(subject, plan("a", "10.96.0.1", endpoints=2), plan("b", *many(20, 7)))
    bring(subject, before)
    after = entries(subject, plan("a", *many(1, 2), endpoints=3), plan("b", *many(20, 7)))
    rejected = bring(subject, after)
    assert len(rejected) == 1
    assert subject.plane.read() == before


@BY_FRONTEND
def test_drops_of_the_same_delta_make_no_room_those_of_an_earlier_one_do(subject: Subject) -> None:
    bring(subject, entries(subject, plan("a", *many(1, ROOM))))
    after = entries(subject, plan("b", *many(20, ROOM)))
    assert len(bring(subject, after)) == 1
    assert subject.plane.read() == entries(subject)
    subject.clock.now += GRACE
    assert not bring(subject, after)
    assert subject.plane.read() == after


def test_a_change_that_needs_no_room_is_taken_where_all_is_full(subject: Subject) -> None:
    bring(subject, entries(subject, plan("a", *many(1, ROOM))))
    after = entries(subject, plan("a", *many(1, ROOM), endpoints=3, affinity=9))
    assert not bring(subject, after)
    assert subject.plane.read() == after


# render


def test_rendering_is_pure(subject: Subject) -> None:
    plans = [plan("web", "10.96.0.2", "10.96.0.1"), plan("dns", "10.96.0.1", protocol=Protocol.UDP)]
    before = subject.plane.read()
    assert subject.plane.render(plans, NODE) == subject.plane.render(list(reversed(plans)), NODE)
    assert subject.plane.read() == before


def test_each_entry_depends_on_one_plan(subject: Subject) -> None:
    """One that several plans have is the same in all."""
    plans = [plan("web", "10.96.0.1"), plan("web", "fd00::1", family=Family.IPV6), plan("api", "10.96.0.2")]
    apart: Entries = dict(subject.plane.render((), NODE))
    for each in plans:
        own = subject.plane.render((each,), None)
        assert own.keys() - apart.keys()
        assert all(apart[key] == own[key] for key in own.keys() & apart.keys()), "what they have in common"
        apart |= own
    assert subject.plane.render(plans, NODE) == apart


@BY_FRONTEND
def test_plans_that_differ_give_entries_that_differ(subject: Subject) -> None:
    one = plan("web", "10.96.0.1", endpoints=2)
    others = [
        plan("web", "10.96.0.2", endpoints=2),
        plan("web", "10.96.0.1", endpoints=3),
        plan("web", "10.96.0.1", endpoints=2, affinity=9),
        dataclasses.replace(one, no_endpoint_action=NoEndpointAction.REJECT),
        dataclasses.replace(
            one, endpoints=tuple(each._replace(local=not each.local) for each in one.endpoints)
        ),
        dataclasses.replace(
            one, frontends=(one.frontends[0]._replace(pod=PolicyResult(Scope.LOCAL, False)),)
        ),
    ]
    for other in others:
        (mine,), (theirs,) = (subject.plane.render((each,), None).values() for each in (one, other))
        assert mine != theirs


# Histories

IPS = ("10.96.0.1", "10.96.0.2", "203.0.113.1", "203.0.113.2")


@st.composite
def states(draw: st.DrawFn) -> list[ServicePortPlan]:
    owners = {ip: draw(st.sampled_from(("a", "b", "c", ""))) for ip in IPS}
    return [
        plan(name, *(ip for ip in IPS if owners[ip] == name), endpoints=draw(st.integers(0, 4)))
        for name in ("a", "b", "c")
        if draw(st.booleans())
    ]


@given(st.lists(st.tuples(states(), st.booleans()), max_size=6))
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_history_ends_where_the_last_state_is(
    subject: Subject, history: list[tuple[list[ServicePortPlan], bool]]
) -> None:
    """Driven as a proxier does: with what it believes to be there, checked now and then."""
    believed = dict(subject.plane.read())
    for plans, verify in history:
        wanted = entries(subject, *plans)
        delta = diff(believed, wanted)
        assert not subject.plane.apply(delta)
        believed = applied(believed, delta)
        if verify:
            assert subject.plane.read() == believed
        subject.clock.now += GRACE
    assert subject.plane.read() == believed


@pytest.mark.parametrize("twice", [False, True])
def test_closing_loses_nothing_and_may_be_done_after_nothing(subject: Subject, twice: bool) -> None:
    before = subject.plane.read()
    subject.reopen()
    if twice:
        subject.reopen()
    assert subject.plane.read() == before
