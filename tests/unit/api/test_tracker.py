"""What the tracker calls a change, and that nothing it handed out changes afterwards."""

import dataclasses
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.api.event import (
    ENDPOINT_SLICE,
    LISTENING,
    NODE,
    PEER_NODE,
    SERVICE,
    AddressesChanged,
    ApiServerReached,
    ChecksChanged,
    DevicesChanged,
    EndpointsFull,
    Event,
    Invalid,
    ListeningChanged,
    NamespaceChanged,
    NodeChanged,
    PeerChanged,
    PodChanged,
    PodsBypass,
    ServiceChanged,
    ServiceCidrChanged,
    SliceChanged,
    Synced,
)
from ebpfproxy.api.tracker import AWAITED, REJECTED, Tracker
from ebpfproxy.model.address import Family, Network, Protocol, parse_address
from ebpfproxy.model.device import ETHERNET, Device
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import PeerNode
from ebpfproxy.model.node_check import NodeCheck
from ebpfproxy.model.pod import Pod
from ebpfproxy.model.service import NamespacedName, ServicePortName
from tests.support.build import endpoint, name, networks, node, service, slice_of

WEB, API = name("web"), name("api")
STARTED = 1000.0


def put_service(called: str = "web", ip: str = "10.96.0.10") -> ServiceChanged:
    return ServiceChanged(name(called), service(called, ips=[ip]))


def put_slice(
    of: str = "web", ip: str = "10.1.0.1", at: float | None = None, called: str = "s"
) -> SliceChanged:
    made = slice_of(of, endpoint(ip), called=called)
    return SliceChanged(
        made.name, EndpointSlice(made.name, made.service, made.family, made.ports, made.endpoints, at)
    )


def drop_slice(called: str = "s") -> SliceChanged:
    return SliceChanged(name(called), None)


def tracker_with(*events: Event) -> Tracker:
    """Return a tracker that has drained these events."""
    tracker = Tracker(STARTED)
    for event in events:
        tracker.fold(event)
    tracker.drain()
    return tracker


def local(*texts: str) -> AddressesChanged:
    return AddressesChanged(frozenset(networks(texts)))


def eth(ifindex: int, *, up: bool = True) -> Device:
    return Device(ifindex, f"eth{ifindex}", "", ETHERNET, up)


def host(*ifindexes: int) -> DevicesChanged:
    return DevicesChanged(tuple(map(eth, ifindexes)))


def bypass(*ifindexes: int) -> PodsBypass:
    return PodsBypass(frozenset(ifindexes))


# --- Synced ---


@pytest.mark.parametrize("last", sorted(AWAITED))
def test_the_tracker_is_synced_once_all_kinds_are_synced(last: str) -> None:
    tracker = Tracker(STARTED)
    for event in (local("192.0.2.1/32"), host(1), bypass(1), NodeChanged(node())):
        tracker.fold(event)
    for kind in AWAITED - {last}:
        tracker.fold(Synced(kind))
        assert not tracker.synced
    assert tracker.lacking == {last}
    tracker.fold(Synced(last))
    assert tracker.synced
    tracker.fold(Synced(SERVICE))
    assert tracker.synced


# --- What is a change ---


def test_no_change_is_pending_at_the_start_and_after_a_drain() -> None:
    tracker = Tracker(STARTED)
    assert not tracker.pending
    tracker.fold(put_service())
    assert tracker.pending
    assert tracker.drain().services == {WEB}
    assert not tracker.pending
    empty = tracker.drain()
    assert (empty.services, empty.node_changed, empty.host_changed) == (frozenset(), False, False)
    assert empty.service_changes == 0
    assert empty.state.services == {WEB: put_service().service}


@pytest.mark.parametrize(
    "event",
    [
        put_service(),
        put_slice(),
        NodeChanged(node("zone-a")),
        local("10.0.0.1/32"),
        host(1, 2),
        host(2, 1),
        bypass(1),
        bypass(),
    ],
)
def test_an_equal_value_is_no_change(event: Event) -> None:
    tracker = tracker_with(
        put_service(),
        put_slice(),
        NodeChanged(node("zone-a")),
        local("10.0.0.1/32"),
        host(1, 2),
        bypass(1),
    )
    tracker.fold(event)
    assert not tracker.pending


@pytest.mark.parametrize(
    "event",
    [
        ServiceChanged(API, None),
        drop_slice("other"),
        NodeChanged(None),
        AddressesChanged(frozenset()),
        DevicesChanged(()),
    ],
)
def test_deleting_an_unknown_object_is_no_change(event: Event) -> None:
    tracker = tracker_with(put_service())
    tracker.fold(event)
    assert not tracker.pending


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (put_service(ip="10.96.0.99"), put_service()),
        (ServiceChanged(WEB, None), put_service()),
        (put_service("api"), ServiceChanged(API, None)),
        (put_slice(ip="10.1.0.9"), put_slice()),
        (drop_slice(), put_slice()),
        (put_slice("api"), put_slice()),
        (put_slice("api", called="t"), drop_slice("t")),
        (NodeChanged(None), NodeChanged(node("zone-a"))),
        (local(), local("10.0.0.1/32")),
        (host(1, 2), host(1)),
    ],
)
def test_changes_that_cancel_each_other_out_are_none(there: Event, back: Event) -> None:
    tracker = tracker_with(
        put_service(), put_slice(), NodeChanged(node("zone-a")), local("10.0.0.1/32"), host(1)
    )
    before = tracker.drain().state
    tracker.fold(there)
    assert tracker.pending
    tracker.fold(back)
    assert not tracker.pending
    drained = tracker.drain()
    assert (drained.services, drained.node_changed, drained.host_changed) == (frozenset(), False, False)
    assert drained.state == before


def test_a_change_that_was_drained_is_not_cancelled_by_its_opposite() -> None:
    tracker = tracker_with(put_service())
    tracker.fold(put_service(ip="10.96.0.99"))
    tracker.drain()
    tracker.fold(put_service())
    assert tracker.drain().services == {WEB}


def test_heartbeats_of_the_node_change_nothing_and_its_zone_changes_the_node() -> None:
    tracker = tracker_with(NodeChanged(node("zone-a")))
    for _ in range(3):
        tracker.fold(NodeChanged(node("zone-a")))
    assert not tracker.pending
    tracker.fold(NodeChanged(node("zone-b")))
    drained = tracker.drain()
    assert (drained.node_changed, drained.host_changed) == (True, False)
    assert drained.services == frozenset()
    assert drained.state.node == node("zone-b")


def test_an_address_of_the_node_changes_the_node() -> None:
    tracker = tracker_with(NodeChanged(node("zone-a")))
    tracker.fold(NodeChanged(node("zone-a", addresses=["192.0.2.11"])))
    drained = tracker.drain()
    assert (drained.node_changed, drained.host_changed) == (True, False)


def test_the_eligibility_of_the_node_for_load_balancers_changes_no_plan() -> None:
    """Load balancers read it from the health server; no plan depends on it."""
    tracker = tracker_with(NodeChanged(node("zone-a")))
    leaving = dataclasses.replace(node("zone-a"), eligible=False)
    tracker.fold(NodeChanged(leaving))
    assert not tracker.pending
    drained = tracker.drain()
    assert not drained.node_changed
    assert drained.state.node == leaving


def test_pod_cidrs_that_are_assigned_later_change_the_node() -> None:
    """kubernetes issue 111321: a Node may get its podCIDRs long after its creation."""
    tracker = tracker_with(NodeChanged(node()))
    given = dataclasses.replace(node(), pod_cidrs=networks(["10.1.0.0/24"]))
    tracker.fold(NodeChanged(given))
    assert tracker.pending
    drained = tracker.drain()
    assert (drained.node_changed, drained.state.node) == (True, given)


def test_a_deleted_node_keeps_its_addresses_and_loses_its_zone() -> None:
    """The machine still exists and serves."""
    whole = dataclasses.replace(
        node("zone-a"),
        external_addresses=(parse_address("198.51.100.1"),),
        pod_cidrs=networks(["10.1.0.0/24"]),
    )
    tracker = tracker_with(NodeChanged(whole))
    tracker.fold(NodeChanged(None))
    drained = tracker.drain()
    assert drained.node_changed
    assert drained.state.node == dataclasses.replace(whole, zone="")


def test_deleting_a_node_without_a_zone_is_no_change() -> None:
    tracker = tracker_with(NodeChanged(node()))
    tracker.fold(NodeChanged(None))
    assert not tracker.pending


def test_a_node_that_registers_again_keeps_its_addresses_until_it_has_a_status() -> None:
    whole = dataclasses.replace(node("zone-a"), pod_cidrs=networks(["10.1.0.0/24"]))
    tracker = tracker_with(NodeChanged(whole))
    tracker.fold(NodeChanged(None))
    tracker.fold(NodeChanged(node("zone-a", addresses=[])))
    assert not tracker.pending
    moved = dataclasses.replace(node("zone-a", addresses=["192.0.2.11"]), pod_cidrs=networks(["10.2.0.0/24"]))
    tracker.fold(NodeChanged(moved))
    assert tracker.drain().state.node == moved


def tracker_of_peers(*events: Event) -> Tracker:
    """Return the tracker of an edge that has drained these events."""
    tracker = Tracker(STARTED, node=False, peers=True)
    for event in events:
        tracker.fold(event)
    tracker.drain()
    return tracker


def put_slice_on(host: str, of: str = "web") -> SliceChanged:
    made = slice_of(of, endpoint("10.1.0.1", node=host), called=f"{of}-1")
    return SliceChanged(made.name, made)


def test_an_edge_awaits_all_nodes_and_none_of_its_own() -> None:
    tracker = Tracker(STARTED, node=False, peers=True)
    for kind in AWAITED - {NODE}:
        tracker.fold(Synced(kind))
    assert tracker.lacking == {PEER_NODE}
    tracker.fold(Synced(PEER_NODE))
    assert tracker.synced


def test_a_failed_check_affects_the_services_with_endpoints_on_the_node() -> None:
    tracker = tracker_of_peers(
        put_service(), put_service("api"), put_slice_on("n1"), put_slice_on("n2", of="api")
    )
    failed = frozenset({NodeCheck("n2", 10256)})
    tracker.fold(ChecksChanged(failed))
    drained = tracker.drain()
    assert drained.services == {API}
    assert drained.state.down == failed
    tracker.fold(ChecksChanged(failed))
    assert not tracker.pending
    tracker.fold(ChecksChanged(frozenset()))
    assert tracker.drain().services == {API}


def test_endpoints_that_get_no_new_connections_change_their_service() -> None:
    tracker = tracker_of_peers(put_service(), put_service("api"))
    service = ServicePortName("default", "api", "", Protocol.TCP)
    for targets in (frozenset([b"one"]), frozenset([b"one", b"two"])):
        tracker.fold(EndpointsFull(service, Family.IPV4, targets))
        drained = tracker.drain()
        assert drained.services == {API}
        assert drained.state.full == {(service, Family.IPV4): targets}
        tracker.fold(EndpointsFull(service, Family.IPV4, targets))
        assert not tracker.pending
    tracker.fold(EndpointsFull(service, Family.IPV4, frozenset()))
    assert tracker.drain().state.full == {}
    tracker.fold(EndpointsFull(service, Family.IPV4, frozenset()))
    assert not tracker.pending


def test_a_new_local_address_changes_the_networks_and_not_the_node() -> None:
    tracker = tracker_with(local("192.0.2.1/32"))
    tracker.fold(local("192.0.2.1/32", "192.0.2.2/32"))
    assert tracker.pending
    drained = tracker.drain()
    assert (drained.node_changed, drained.host_changed) == (False, True)
    assert drained.state.local_networks == frozenset(networks(["192.0.2.1/32", "192.0.2.2/32"]))


def test_a_changed_service_cidr_changes_the_host_and_not_the_node() -> None:
    tracker = tracker_with(ServiceCidrChanged("a", networks(["10.96.0.0/16"])))
    assert tracker.drain().state.service_cidrs == frozenset(networks(["10.96.0.0/16"]))
    tracker.fold(ServiceCidrChanged("a", networks(["10.96.0.0/16"])))
    assert not tracker.pending
    tracker.fold(ServiceCidrChanged("b", networks(["fd00::/112"])))
    drained = tracker.drain()
    assert (drained.node_changed, drained.host_changed) == (False, True)
    assert drained.state.service_cidrs == frozenset(networks(["10.96.0.0/16", "fd00::/112"]))
    tracker.fold(ServiceCidrChanged("a", ()))
    assert tracker.drain().state.service_cidrs == frozenset(networks(["fd00::/112"]))


def test_services_of_a_busy_namespace_wait() -> None:
    tracker = Tracker(STARTED)
    other = NamespacedName("other", "web")
    tracker.fold(put_service())
    tracker.fold(ServiceChanged(other, dataclasses.replace(service("web"), name=other)))
    drained = tracker.drain(1000, {WEB.namespace})
    assert (drained.services, drained.remaining) == (frozenset({other}), True)
    assert not tracker.drain(1000, {WEB.namespace}).services
    assert tracker.drain(1000).services == {WEB}


def test_an_added_deleted_or_changed_device_changes_the_host_and_not_the_node() -> None:
    tracker = tracker_with(host(1))
    for told in (host(2, 1), DevicesChanged((eth(1), eth(2, up=False))), host()):
        tracker.fold(told)
        assert tracker.pending
        drained = tracker.drain()
        assert (drained.node_changed, drained.host_changed) == (False, True)
        assert drained.state.devices == tuple(sorted(told.devices))


def test_a_pod_counts_as_bypassing_as_long_as_its_device_exists() -> None:
    tracker = tracker_with(host(1, 2))
    tracker.fold(bypass(1))
    drained = tracker.drain()
    assert drained.host_changed
    assert drained.state.bypassing == {1}
    tracker.fold(bypass(2))
    assert tracker.drain().state.bypassing == {1, 2}
    for told in (bypass(), host(1, 2), host(1, 2, 3)):
        tracker.fold(told)
        assert tracker.drain().state.bypassing == {1, 2}
    tracker.fold(host(1))
    assert tracker.drain().state.bypassing == {1}
    tracker.fold(host(1, 2))
    assert tracker.drain().state.bypassing == {1}


def test_the_annotation_of_a_pod_changes_the_host() -> None:
    opted_out = Pod(name("web-0"), (parse_address("10.1.0.1"),), (), socket_lb=False)
    tracker = tracker_with()
    for pod in (opted_out, None):
        tracker.fold(PodChanged(opted_out.name, pod))
        assert tracker.drain().host_changed
    assert not tracker.drain().host_changed


def test_a_pod_is_opted_out_by_its_annotation_or_else_by_that_of_its_namespace() -> None:
    pods = {
        socket_lb: Pod(name(f"web-{socket_lb}"), (parse_address("10.1.0.1"),), (), socket_lb)
        for socket_lb in (None, True, False)
    }
    tracker = Tracker(0.0, pods=True, namespaces=True)
    for pod in pods.values():
        tracker.fold(PodChanged(pod.name, pod))
    drained = tracker.drain()
    assert drained.host_changed
    assert not drained.services  # pods without host ports have no plans
    assert drained.state.opted_out == {pods[False]}
    for annotation, expected in ((False, {pods[None], pods[False]}), (None, {pods[False]})):
        tracker.fold(NamespaceChanged("other", False))
        tracker.fold(NamespaceChanged(pods[None].name.namespace, annotation))
        drained = tracker.drain()
        assert drained.state.opted_out == expected
        assert drained.host_changed
    tracker.fold(NamespaceChanged("other", None))
    assert not tracker.drain().host_changed


def test_namespaces_are_ignored_unless_they_are_awaited() -> None:
    pod = Pod(name("web-0"), (parse_address("10.1.0.1"),), ())
    tracker = Tracker(0.0, pods=True)
    tracker.fold(PodChanged(pod.name, pod))
    tracker.fold(NamespaceChanged(pod.name.namespace, False))
    assert tracker.drain().state.opted_out == frozenset()


def test_a_pod_may_bypass_before_its_device_is_known() -> None:
    tracker = tracker_with(host(1))
    tracker.fold(bypass(2))
    assert not tracker.pending
    assert tracker.drain().state.bypassing == frozenset()
    tracker.fold(host(1, 3))
    tracker.fold(host(1, 2))
    assert tracker.drain().state.bypassing == {2}


# --- Slices and Services ---


def test_a_slice_that_moves_to_another_service_leaves_the_first() -> None:
    tracker = tracker_with(put_slice("web"))
    tracker.fold(put_slice("api"))
    drained = tracker.drain()
    assert drained.services == {WEB, API}
    assert drained.state.slices_of(WEB) == ()
    assert WEB not in drained.state.slices
    assert [each.name for each in drained.state.slices_of(API)] == [name("s")]


def test_slices_stay_when_their_service_is_deleted() -> None:
    tracker = tracker_with(put_service(), put_slice())
    tracker.fold(ServiceChanged(WEB, None))
    drained = tracker.drain()
    assert drained.services == {WEB}
    assert drained.state.services == {}
    assert drained.state.slices_of(WEB)
    tracker.fold(put_service())
    assert tracker.drain().state.slices_of(WEB)


def test_a_service_stays_when_its_slices_are_deleted() -> None:
    tracker = tracker_with(put_service(), put_slice(), put_slice(ip="10.1.0.2", called="t"))
    tracker.fold(drop_slice())
    assert [each.name for each in tracker.drain().state.slices_of(WEB)] == [name("t")]
    tracker.fold(drop_slice("t"))
    state = tracker.drain().state
    assert WEB in state.services
    assert WEB not in state.slices


def test_a_slice_that_no_longer_belongs_to_a_service_is_removed() -> None:
    tracker = tracker_with(put_service(), put_slice())
    tracker.fold(drop_slice())
    drained = tracker.drain()
    assert drained.services == {WEB}
    assert drained.state.slices == {}


# --- Trigger times ---


def test_changes_that_cancel_out_leave_no_trigger_time() -> None:
    tracker = tracker_with(put_slice(ip="10.1.0.1"))
    for ip in ("10.1.0.2", "10.1.0.1"):
        tracker.fold(put_slice(ip=ip, at=STARTED + 1))
    assert not tracker.pending
    tracker.fold(put_slice(ip="10.1.0.3", at=STARTED + 2))
    assert tracker.drain().trigger_times == ((Family.IPV4, STARTED + 2),)


def test_trigger_times_are_those_of_changes_since_the_start() -> None:
    tracker = Tracker(STARTED)
    tracker.fold(put_slice(ip="10.1.0.1", at=STARTED - 1))
    tracker.fold(put_slice(ip="10.1.0.2", at=STARTED))
    tracker.fold(put_slice(ip="10.1.0.3", at=STARTED + 1))
    tracker.fold(put_slice(ip="10.1.0.4", at=None))
    tracker.fold(put_slice(ip="10.1.0.5", at=STARTED + 2))
    tracker.fold(put_slice("api", at=STARTED + 3, called="t"))
    times = [STARTED + 1, STARTED + 2, STARTED + 3]
    drained = tracker.drain().trigger_times
    assert sorted(drained, key=lambda each: each[1]) == [(Family.IPV4, each) for each in times]
    assert tracker.drain().trigger_times == ()


def test_a_new_trigger_time_alone_is_no_change() -> None:
    tracker = tracker_with(put_slice(at=STARTED + 1))
    tracker.fold(put_slice(at=STARTED + 2))
    assert not tracker.pending
    assert tracker.drain().trigger_times == ()


def test_the_removal_of_any_slice_drops_the_trigger_times_of_its_service() -> None:
    """kubernetes PR 81360: a deletion has no trigger time of its own and would get an old one."""
    tracker = tracker_with(
        put_slice(called="s"), put_slice(called="t", ip="10.1.0.2"), put_slice("api", called="u")
    )
    tracker.fold(put_slice(called="s", ip="10.1.0.3", at=STARTED + 1))
    tracker.fold(put_slice("api", called="u", ip="10.1.0.4", at=STARTED + 2))
    tracker.fold(drop_slice("t"))
    assert tracker.drain().trigger_times == ((Family.IPV4, STARTED + 2),)


def test_changes_that_cancel_each_other_out_have_no_trigger_times() -> None:
    tracker = tracker_with(put_slice())
    tracker.fold(put_slice(ip="10.1.0.9", at=STARTED + 1))
    tracker.fold(put_slice(at=STARTED + 2))
    assert tracker.drain().trigger_times == ()
    tracker.fold(put_slice("api", called="t"))
    assert tracker.drain().trigger_times == ()


# --- Counts and logs ---


def test_all_events_are_counted_and_only_real_changes_are_pending() -> None:
    tracker = tracker_with(put_service(), put_slice())
    for event in (
        put_service(),
        put_service(ip="10.96.0.2"),
        put_slice(),
        put_slice(),
        put_slice(ip="10.1.0.2"),
    ):
        tracker.fold(event)
    drained = tracker.drain()
    assert (drained.service_changes, drained.slice_changes) == (2, 3)
    assert not tracker.pending


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [(record.getMessage(), record.__dict__["values"]) for record in caplog.records]


def test_an_invalid_object_keeps_its_last_value_is_counted_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker = tracker_with(put_service())
    with caplog.at_level(logging.WARNING):
        for reason in ("broken", "broken", "worse", "broken"):
            tracker.fold(Invalid(SERVICE, "default/web", reason))
        tracker.fold(Invalid(ENDPOINT_SLICE, "default/web", "broken"))
    assert tracker.invalid == {SERVICE: 4, ENDPOINT_SLICE: 1}
    assert not tracker.pending
    assert tracker.drain().state.services == {WEB: put_service().service}
    expected = {"kind": SERVICE, "name": "default/web", "reason": "broken"}
    assert lines(caplog) == [
        (REJECTED, expected),
        (REJECTED, expected | {"reason": "worse"}),
        (REJECTED, expected | {"kind": ENDPOINT_SLICE}),
    ]


def test_a_complaint_is_logged_once_for_each_object_until_the_object_is_deleted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker, complaining = Tracker(STARTED), put_service()._replace(complaints=("a port is junk",))
    with caplog.at_level(logging.WARNING):
        tracker.fold(complaining)
        tracker.fold(complaining)
        tracker.fold(put_slice()._replace(complaints=("a port is junk",)))
    assert [values["kind"] for _, values in lines(caplog)] == [SERVICE, ENDPOINT_SLICE]
    with caplog.at_level(logging.WARNING):
        tracker.fold(ServiceChanged(WEB, None))
        tracker.fold(complaining)
    assert len(caplog.records) == 3


# --- Peers ---

PEER = PeerNode((parse_address("192.0.2.11"),), 6083)


def test_peers_are_awaited_and_reported_as_a_change() -> None:
    tracker = Tracker(STARTED, peers=True)
    assert tracker.lacking == AWAITED | {PEER_NODE}
    tracker.fold(PeerChanged("there", PEER))
    assert tracker.pending
    drained = tracker.drain()
    assert drained.peers_changed
    assert not drained.node_changed
    assert drained.state.peers == {"there": PEER}
    for event in PeerChanged("there", PEER), PeerChanged("there", None), PeerChanged("there", PEER):
        tracker.fold(event)
    assert not tracker.pending
    tracker.fold(PeerChanged("there", None))
    tracker.fold(PeerChanged("unknown", None))
    drained = tracker.drain()
    assert drained.peers_changed
    assert drained.state.peers == {}
    assert not tracker.pending


def test_without_direct_server_return_peers_are_ignored() -> None:
    tracker = tracker_with(PeerChanged("there", PEER))
    assert tracker.lacking == AWAITED
    tracker.fold(PeerChanged("there", PEER._replace(dsr_port=1)))
    assert not tracker.pending
    assert tracker.drain().state.peers == {}


def test_the_announcement_of_the_own_node_changes_no_plan() -> None:
    tracker = tracker_with(NodeChanged(node()))
    tracker.fold(NodeChanged(dataclasses.replace(node(), dsr_port=6083)))
    assert not tracker.pending


# --- Snapshots ---

NAMES = st.sampled_from(("a", "b"))
IPS = st.sampled_from(("10.1.0.1", "10.1.0.2"))
EVENTS = st.one_of(
    st.builds(put_service, NAMES, IPS),
    st.builds(lambda called: ServiceChanged(name(called), None), NAMES),
    st.builds(put_slice, NAMES, IPS, st.sampled_from((None, 1.0, 2000.0)), st.sampled_from(("s", "t", "u"))),
    st.builds(drop_slice, st.sampled_from(("s", "t", "u"))),
    st.builds(lambda zone: NodeChanged(node(zone)), NAMES),
    st.builds(
        lambda nets: AddressesChanged(frozenset(nets)),
        st.sets(st.sampled_from(networks(["::1/128", "10.0.0.0/8"]))),
    ),
    st.builds(lambda indexes: host(*indexes), st.lists(st.integers(1, 3), unique=True)),
    st.builds(lambda indexes: bypass(*indexes), st.sets(st.integers(1, 3))),
    st.just(None),
)


class Model:
    """A reference implementation: the last value of every object."""

    def __init__(self) -> None:
        self.services: dict[NamespacedName, Any] = {}
        self.slices: dict[NamespacedName, Any] = {}
        self.node: Any = None
        self.networks: frozenset[Network] = frozenset()
        self.devices: frozenset[Device] = frozenset()
        self.seen: set[int] = set()

    def fold(self, event: Event) -> None:
        match event:
            case ServiceChanged(key, value):
                self.services[key] = value
            case SliceChanged(key, value):
                self.slices[key] = value
            case NodeChanged(value):
                self.node = value
            case AddressesChanged(value):
                self.networks = value
            case DevicesChanged(value):
                self.seen -= {each.ifindex for each in self.devices - set(value)}
                self.devices = frozenset(value)
            case PodsBypass(value):
                self.seen |= value

    @property
    def host(self) -> tuple[Any, ...]:
        return self.networks, self.devices, self.seen & {each.ifindex for each in self.devices}

    def facts(self) -> set[Any]:
        """What plans depend on, each with the Service that it is about."""
        found: set[Any] = {(key, value) for key, value in self.services.items() if value}
        for key, one in self.slices.items():
            if one:
                found.add((one.service, key, one.family, one.ports, one.endpoints))
        return found


@given(st.lists(EVENTS, max_size=40))
def test_any_history_gives_the_last_values_and_names_exactly_what_changed(
    history: list[Event | None],
) -> None:
    tracker, model, known = Tracker(STARTED), Model(), set[Any]()
    zone, was = "", Model().host
    for event in [*history, None]:
        if event is not None:
            tracker.fold(event)
            model.fold(event)
            continue
        facts = model.facts()
        pending = tracker.pending
        drained = tracker.drain()
        assert isinstance(drained.services, frozenset)
        assert drained.services == {fact[0] for fact in facts ^ known}
        model_zone = model.node.zone if model.node else ""
        assert drained.node_changed is (zone != model_zone)
        assert drained.host_changed is (was != model.host)
        assert pending is bool(drained.services or drained.node_changed or drained.host_changed)
        state = drained.state
        assert (state.local_networks, frozenset(state.devices), state.bypassing) == model.host
        inner = [s for of in state.slices.values() for s in of]
        assert {(s.service, s.name, s.family, s.ports, s.endpoints) for s in inner} | set(
            state.services.items()
        ) == facts
        assert all(s.service == owner for owner, of in state.slices.items() for s in of)
        assert all(state.slices.values())
        known, zone, was = facts, model_zone, model.host


def test_a_drain_copies_no_mapping() -> None:
    """A copy would cost more for each change, the larger the cluster is."""
    tracker = Tracker(STARTED)
    tracker.fold(put_service())
    tracker.fold(put_slice())
    before = tracker.drain().state
    tracker.fold(put_service("api"))
    tracker.fold(drop_slice())
    after = tracker.drain().state
    assert after.services is before.services
    assert after.slices is before.slices
    assert (len(after.services), after.slices) == (2, {})


# Protected addresses


def test_all_addresses_of_nodes_are_known() -> None:
    tracker = Tracker(STARTED, peers=True)
    internal, other = parse_address("192.0.2.11"), parse_address("203.0.113.11")
    tracker.fold(PeerChanged("there", PeerNode((internal,), 0, (other,))))
    assert tracker.drain().state.node_addresses == {internal, other}
    assert tracker.drain().state.node_addresses == {internal, other}
    tracker.fold(PeerChanged("there", None))
    assert tracker.drain().state.node_addresses == frozenset()


def test_listening_programs_are_awaited_and_a_change_is_one_of_the_host() -> None:
    tracker = Tracker(STARTED, listening=True)
    assert tracker.lacking == AWAITED | {LISTENING}
    listening = {(Protocol.TCP, 22): frozenset([parse_address("::")])}
    tracker.fold(ListeningChanged(listening))
    tracker.fold(Synced(LISTENING))
    assert tracker.lacking == AWAITED
    drained = tracker.drain()
    assert drained.host_changed
    assert drained.state.listening == listening
    tracker.fold(ListeningChanged(dict(listening)))
    assert not tracker.pending


def test_each_address_of_the_api_server_is_kept() -> None:
    tracker = Tracker(STARTED)
    first, second = (parse_address(each) for each in ("192.0.2.1", "192.0.2.2"))
    tracker.fold(ApiServerReached(first, 6443))
    assert tracker.drain().state.api_servers == {(first, 6443)}
    tracker.fold(ApiServerReached(first, 6443))
    assert not tracker.pending
    tracker.fold(ApiServerReached(second, 6443))
    assert tracker.drain().state.api_servers == {(first, 6443), (second, 6443)}


def sized(called: str, endpoints: int = 1) -> SliceChanged:
    addresses = [endpoint(f"10.{at >> 8}.{at & 255}.1") for at in range(endpoints)]
    made = slice_of(called, *addresses)
    return SliceChanged(made.name, made)


def test_a_part_of_the_changes_takes_turns_between_namespaces() -> None:
    tracker = tracker_with()
    tenant = [f"tenant/t{number}" for number in range(50)]
    for called in (*tenant, "quiet/web"):
        tracker.fold(sized(called))
    first = tracker.drain(100)
    assert name("quiet/web") in first.services
    assert first.remaining
    assert 1 < len(first.services) < 10
    seen = set(first.services)
    while tracker.pending:
        more = tracker.drain(100).services
        assert seen.isdisjoint(more)
        seen |= more
    assert seen == set(map(name, (*tenant, "quiet/web")))


def test_a_large_service_is_alone_and_small_ones_do_not_delay_it_for_long() -> None:
    tracker = tracker_with()
    tracker.fold(sized("tenant/large", 1000))
    for number in range(4):
        tracker.fold(sized(f"quiet/{number}"))
        assert tracker.drain(100).services == {name(f"quiet/{number}")}
    tracker.fold(sized("quiet/5"))
    assert tracker.drain(100).services == {name("tenant/large")}
    last = tracker.drain(100)
    assert last.services == {name("quiet/5")}
    assert not last.remaining


def test_a_large_service_is_next_if_no_other_namespace_has_changes() -> None:
    tracker = tracker_with()
    tracker.fold(sized("tenant/a"))
    tracker.fold(sized("tenant/large", 1000))
    assert tracker.drain(100).services == {name("tenant/a")}
    tracker.fold(sized("tenant/b"))
    assert tracker.drain(100).services == {name("tenant/large")}
    assert tracker.drain(100).services == {name("tenant/b")}


def test_each_namespace_has_a_turn_although_parts_are_smaller_than_the_number_of_namespaces() -> None:
    tracker = tracker_with()
    namespaces = [f"n{number}" for number in range(20)]
    for namespace in namespaces:
        for number in range(3):
            tracker.fold(sized(f"{namespace}/s{number}"))
    parts = [tracker.drain(100).services for _ in range(5)]
    seen = [each.namespace for part in parts for each in part]
    assert set(seen) == set(namespaces)
    assert len(seen) < 2 * len(namespaces)


def test_a_part_keeps_what_cancels_out_later_and_its_trigger_times() -> None:
    tracker = tracker_with()
    tracker.fold(sized("tenant/large", 1000))
    tracker.fold(put_slice("a", at=STARTED + 1))
    assert tracker.drain(100).trigger_times == ((Family.IPV4, STARTED + 1),)
    tracker.fold(SliceChanged(name("tenant/large-1"), None))
    assert not tracker.pending


def test_a_slice_that_changes_its_service_changes_both_in_one_part() -> None:
    tracker = tracker_with(put_slice("web"), put_slice("big", called="b"))
    for number in range(20):
        tracker.fold(sized(f"tenant/t{number}"))
    tracker.fold(put_slice("api"))
    parts = []
    while tracker.pending:
        parts.append(tracker.drain(100).services)
    assert [part for part in parts if WEB in part] == [part for part in parts if API in part]
    assert len(parts) > 2


def test_a_change_of_the_node_changes_all_services_at_once() -> None:
    tracker = tracker_with(NodeChanged(node("a")))
    for number in range(20):
        tracker.fold(sized(f"tenant/t{number}"))
    tracker.fold(NodeChanged(node("b")))
    assert len(tracker.drain(100).services) == 20
