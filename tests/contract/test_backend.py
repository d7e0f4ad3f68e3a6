"""The contract of all backends: the fake one and the real ones behave alike."""

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpfproxy.backends.delta import Delta, applied, diff
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
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
    PlannedEndpoints,
    PolicyResult,
    Scope,
    ServicePortPlan,
)
from tests.contract.conftest import ROOM, Subject

Entries = dict[Any, Any]
OF_KERNEL = pytest.mark.backends("fake", "ebpf", "iptables-legacy", "iptables-nft", "nftables", "ipvs")
"""Backends whose entries outlast the agent. Those of mode userspace end with its relays, except addresses."""

NODE = NodePlan(
    frozenset({parse_network("127.0.0.0/8"), parse_network("192.0.2.10/32"), parse_network("::1/128")}),
    frozenset({parse_network("192.0.2.10/32")}),
)
CLUSTER = PolicyResult(Scope.CLUSTER, False)
BY_FRONTEND = pytest.mark.backends("fake", "ebpf")
"""Backends that hold frontends in tables of limited size with the frontend address as key, and that manage
devices. The others have independent rules: the plan already assigns each frontend to one ServicePort."""


def frontend(ip: str, port: int = 80, protocol: Protocol = Protocol.TCP) -> FrontendPlan:
    address = Frontend(parse_address(ip), port, protocol)
    return FrontendPlan(address, FrontendKind.CLUSTER_IP, CLUSTER, CLUSTER, CLUSTER)


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
        PlannedEndpoints(
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
    """Bring the backend in sync with `wanted`; the rejected entries."""
    delta = diff(subject.plane.read(), wanted)
    return dict(subject.plane.apply(delta)) if delta else {}


def test_put_entries_are_read_back(subject: Subject) -> None:
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


def test_a_check_finds_no_difference_after_a_read_and_between_own_changes(subject: Subject) -> None:
    one = subject.devices.add("one")
    states = [
        entries(subject, plan("web", "10.96.0.1", endpoints=n), node=watched((one, "one"))) for n in (1, 2)
    ]
    bring(subject, states[0])
    expected = subject.plane.read()
    for number, is_right in enumerate(subject.plane.check(expected), 1):
        assert is_right
        delta = diff(expected, states[number % 2])
        assert not subject.plane.apply(delta)
        expected.update(delta.puts)
    assert all(subject.plane.check(expected))


@BY_FRONTEND
def test_a_check_finds_what_another_program_removed_from_a_device(subject: Subject) -> None:
    """Or `generation` notices it."""
    bring(subject, entries(subject, node=watched((subject.devices.add("one"), "one"))))
    expected, generation = subject.plane.read(), subject.plane.generation()
    subject.devices.strip("one")
    assert not all(subject.plane.check(expected)) or subject.plane.generation() != generation


def test_a_put_replaces_the_previous_entry(subject: Subject) -> None:
    bring(subject, entries(subject, plan("web", "10.96.0.1", "10.96.0.2", endpoints=3)))
    after = entries(subject, plan("web", "10.96.0.2", "10.96.0.3", endpoints=1, affinity=7))
    assert not bring(subject, after)
    assert subject.plane.read() == after


def test_a_drop_removes_only_its_entries(subject: Subject) -> None:
    bring(subject, entries(subject, plan("web", "10.96.0.1"), plan("api", "10.96.0.2")))
    after = entries(subject, plan("api", "10.96.0.2"))
    assert not bring(subject, after)
    assert subject.plane.read() == after


def test_dropping_a_missing_entry_is_no_error(subject: Subject) -> None:
    wanted = entries(subject, plan("web", "10.96.0.1"))
    bring(subject, wanted)
    missing = entries(subject, plan("missing", "10.96.0.9")).keys() - wanted.keys()
    assert not subject.plane.apply(Delta({}, frozenset(missing)))
    assert subject.plane.read() == wanted


@OF_KERNEL
def test_an_empty_delta_changes_nothing(subject: Subject) -> None:
    """Each verification without differences applies an empty delta, also the first one of a run."""
    wanted = entries(subject, plan("web", "10.96.0.1"))
    bring(subject, wanted)
    for _ in range(2):
        assert not subject.plane.apply(Delta({}, frozenset()))
        assert subject.plane.read() == wanted
        subject.reopen()


def test_local_networks_are_added_and_removed(subject: Subject) -> None:
    more = NodePlan(NODE.local_networks | {parse_network("198.51.100.1/32")}, NODE.local_networks)
    for node in (NODE, more, NodePlan(), NODE):
        wanted = entries(subject, node=node)
        assert not bring(subject, wanted)
        assert subject.plane.read() == wanted


# Devices

UPLINK = parse_address("192.0.2.10")


def watched(*devices: tuple[int, str], role: DeviceRole = DeviceRole.UPLINK) -> NodePlan:
    """A node with these managed devices, by ifindex and name, all with the same role."""
    plans = (DevicePlan(ifindex, name, role, False, UPLINK, None) for ifindex, name in devices)
    return dataclasses.replace(NODE, devices=tuple(plans))


def test_devices_are_added_and_removed(subject: Subject) -> None:
    one, two = subject.devices.add("one"), subject.devices.add("two")
    for node in (watched((one, "one")), watched((one, "one"), (two, "two")), watched((two, "two")), NODE):
        wanted = entries(subject, node=node)
        assert not bring(subject, wanted)
        assert subject.plane.read() == wanted


def test_a_devices_role_and_addresses_can_change(subject: Subject) -> None:
    one = subject.devices.add("one")
    plans = [watched((one, "one"), role=role) for role in DeviceRole]
    moved = plans[0].devices[0]._replace(v4=parse_address("192.0.2.11"), v6=parse_address("2001:db8::1"))
    plans.append(dataclasses.replace(NODE, devices=(moved,)))
    for node in (*plans, plans[0]):
        wanted = entries(subject, node=node)
        assert not bring(subject, wanted)
        assert subject.plane.read() == wanted


@BY_FRONTEND
def test_a_stripped_device_gets_its_programs_again(subject: Subject) -> None:
    wanted = entries(subject, node=watched((subject.devices.add("one"), "one")))
    bring(subject, wanted)
    subject.devices.strip("one")
    assert subject.plane.read() != wanted
    assert not bring(subject, wanted)
    assert subject.plane.read() == wanted


def test_putting_or_dropping_a_removed_device_is_no_error(subject: Subject) -> None:
    wanted = entries(subject, node=watched((subject.devices.add("one"), "one")))
    subject.devices.remove("one")
    assert not bring(subject, wanted)  # removed before it was put
    again = entries(subject, node=watched((subject.devices.add("one"), "one")))
    assert not bring(subject, again)
    assert subject.plane.read() == again
    subject.devices.remove("one")
    assert not subject.plane.apply(diff(again, entries(subject)))  # removed before it was dropped
    assert subject.plane.read() == entries(subject)


def test_a_new_device_with_the_name_of_a_removed_one_is_managed(subject: Subject) -> None:
    previous = entries(subject, node=watched((subject.devices.add("one"), "one")))
    bring(subject, previous)
    subject.devices.remove("one")
    wanted = entries(subject, node=watched((subject.devices.add("one"), "one")))
    assert not subject.plane.apply(
        diff(previous, wanted)
    )  # like a proxier after a notification of the new device
    assert subject.plane.read() == wanted


def test_a_device_removed_without_notification_is_dropped_after_a_read(subject: Subject) -> None:
    bring(subject, entries(subject, node=watched((subject.devices.add("one"), "one"))))
    subject.devices.remove("one")
    assert not bring(subject, entries(subject))
    assert subject.plane.read() == entries(subject)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_renamed_device_stays_managed(subject: Subject, at_once: bool) -> None:
    """The old name is dropped in the delta that puts the new name, or later."""
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


@OF_KERNEL
def test_managed_devices_are_kept_over_a_restart(subject: Subject) -> None:
    one, two = subject.devices.add("one"), subject.devices.add("two")
    wanted = entries(subject, node=watched((one, "one"), (two, "two")))
    bring(subject, wanted)
    subject.reopen()
    assert subject.plane.read() == wanted
    assert not bring(subject, entries(subject, node=watched((two, "two"))))
    assert subject.plane.read() == entries(subject, node=watched((two, "two")))


def test_an_applied_delta_leaves_no_difference(subject: Subject) -> None:
    wanted = entries(subject, plan("web", "10.96.0.1", endpoints=2))
    delta = diff(subject.plane.read(), wanted)
    assert delta
    subject.plane.apply(delta)
    assert not diff(subject.plane.read(), wanted)
    assert not subject.plane.apply(delta)  # a second time
    assert subject.plane.read() == wanted


def test_reading_changes_nothing(subject: Subject) -> None:
    bring(subject, entries(subject, plan("web", "10.96.0.1", endpoints=2)))
    assert subject.plane.read() == subject.plane.read()


@OF_KERNEL
def test_entries_are_kept_over_a_restart(subject: Subject) -> None:
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


# Frontends that move to another Service


def test_a_frontend_moves_to_another_service_in_one_delta(subject: Subject) -> None:
    bring(subject, entries(subject, plan("a", "10.96.0.1", "203.0.113.1"), plan("b", "10.96.0.2")))
    after = entries(subject, plan("a", "10.96.0.1"), plan("b", "10.96.0.2", "203.0.113.1"))
    assert not bring(subject, after)
    assert subject.plane.read() == after


def test_a_service_with_a_new_name_takes_over_the_frontends(subject: Subject) -> None:
    """The drop of the old Service is applied last and must not remove them again."""
    bring(subject, entries(subject, plan("old", *many(1, ROOM))))
    after = entries(subject, plan("new", *many(1, ROOM)))
    assert not bring(subject, after)  # replacing needs no room
    assert subject.plane.read() == after


@BY_FRONTEND
def test_a_frontend_belongs_to_the_last_service_that_put_it(subject: Subject) -> None:
    a, b = plan("a", "10.96.0.1", "203.0.113.1"), plan("b", "203.0.113.1")
    bring(subject, entries(subject, a))
    taking = entries(subject, b)
    subject.plane.apply(Delta(taking, frozenset()))
    assert subject.plane.read() == entries(subject, plan("a", "10.96.0.1"), b)


@BY_FRONTEND
def test_a_lost_frontend_can_be_put_back(subject: Subject) -> None:
    """The same entry is put again: it is no longer in force, even if a writer has recorded it."""
    before = entries(subject, plan("a", "10.96.0.1", "203.0.113.1"))
    bring(subject, before)
    taking = entries(subject, plan("b", "203.0.113.1"))
    subject.plane.apply(Delta(taking, frozenset()))
    own = {key: entry for key, entry in before.items() if key not in taking}
    subject.plane.apply(Delta(own, frozenset()))
    assert subject.plane.read() == entries(subject, plan("a", "10.96.0.1", "203.0.113.1"), plan("b"))


@BY_FRONTEND
def test_dropping_a_service_keeps_frontends_that_it_lost(subject: Subject) -> None:
    both = entries(subject, plan("a", "10.96.0.1", "203.0.113.1"))
    bring(subject, both)
    taking = entries(subject, plan("b", "203.0.113.1"))
    subject.plane.apply(Delta(taking, frozenset()))
    subject.plane.apply(Delta({}, frozenset(both.keys() - taking.keys())))
    assert subject.plane.read() == taking


# Room


@BY_FRONTEND
def test_entries_that_do_not_fit_are_rejected_and_the_rest_is_in_force(subject: Subject) -> None:
    fits, too_large, small = plan("a", *many(1, 6)), plan("b", *many(20, 3)), plan("c", *many(30, 2))
    wanted = entries(subject, fits, too_large, small)
    rejected = bring(subject, wanted)
    assert list(rejected) == [key for key in entries(subject, too_large) if key in rejected]
    assert len(rejected) == 1
    assert all(isinstance(failure, TableFull) for failure in rejected.values())
    assert subject.plane.read() == entries(subject, fits, small)


@BY_FRONTEND
def test_a_change_that_does_not_fit_keeps_the_previous_entry(subject: Subject) -> None:
    before = entries(subject, plan("a", "10.96.0.1", endpoints=2), plan("b", *many(20, 7)))
    bring(subject, before)
    after = entries(subject, plan("a", *many(1, 2), endpoints=3), plan("b", *many(20, 7)))
    rejected = bring(subject, after)
    assert len(rejected) == 1
    assert subject.plane.read() == before


@BY_FRONTEND
def test_drops_make_room_only_for_later_deltas(subject: Subject) -> None:
    bring(subject, entries(subject, plan("a", *many(1, ROOM))))
    after = entries(subject, plan("b", *many(20, ROOM)))
    assert len(bring(subject, after)) == 1
    assert subject.plane.read() == entries(subject)
    subject.clock.now += GRACE
    assert not bring(subject, after)
    assert subject.plane.read() == after


def test_a_change_without_new_frontends_is_accepted_in_full_maps(subject: Subject) -> None:
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
    """An entry that several plans have in common is the same in all."""
    plans = [plan("web", "10.96.0.1"), plan("web", "fd00::1", family=Family.IPV6), plan("api", "10.96.0.2")]
    apart: Entries = dict(subject.plane.render((), NODE))
    for each in plans:
        own = subject.plane.render((each,), None)
        assert own.keys() - apart.keys()
        assert all(apart[key] == own[key] for key in own.keys() & apart.keys()), "common entries differ"
        apart |= own
    assert subject.plane.render(plans, NODE) == apart


@BY_FRONTEND
def test_different_plans_render_different_entries(subject: Subject) -> None:
    one = plan("web", "10.96.0.1", endpoints=2)
    others = [
        plan("web", "10.96.0.2", endpoints=2),
        plan("web", "10.96.0.1", endpoints=3),
        plan("web", "10.96.0.1", endpoints=2, affinity=9),
        dataclasses.replace(one, no_endpoint_action=NoEndpointAction.REJECT),
        dataclasses.replace(
            one, endpoints=PlannedEndpoints(each._replace(local=not each.local) for each in one.endpoints)
        ),
        dataclasses.replace(
            one, frontends=(one.frontends[0]._replace(pod=PolicyResult(Scope.LOCAL, False)),)
        ),
    ]
    for other in others:
        (entry,), (other_entry,) = (subject.plane.render((each,), None).values() for each in (one, other))
        assert entry != other_entry


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
def test_any_history_ends_in_the_last_state(
    subject: Subject, history: list[tuple[list[ServicePortPlan], bool]]
) -> None:
    """Like a proxier: deltas are computed from the recorded state, which is sometimes verified."""
    recorded = dict(subject.plane.read())
    for plans, verify in history:
        wanted = entries(subject, *plans)
        delta = diff(recorded, wanted)
        assert not subject.plane.apply(delta)
        recorded = applied(recorded, delta)
        if verify:
            assert subject.plane.read() == recorded
        subject.clock.now += GRACE
    assert subject.plane.read() == recorded


@OF_KERNEL
@pytest.mark.parametrize("twice", [False, True])
def test_closing_without_changes_loses_nothing(subject: Subject, twice: bool) -> None:
    before = subject.plane.read()
    subject.reopen()
    if twice:
        subject.reopen()
    assert subject.plane.read() == before


@pytest.mark.backends("userspace")
def test_after_a_restart_everything_can_be_put_again(subject: Subject) -> None:
    wanted = entries(subject, plan("web", "10.96.0.1", endpoints=2))
    bring(subject, wanted)
    subject.reopen()
    assert not bring(subject, wanted)
    assert subject.plane.read() == wanted
