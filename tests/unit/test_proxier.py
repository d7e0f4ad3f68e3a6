"""The proxier over the fake: what it touches, what it makes of failures, and that order means nothing."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpfproxy import proxier
from ebpfproxy.dataplanes.fake import Entry, FakeDataplane, FakeKernel, Key
from ebpfproxy.dataplanes.interface import Delta
from ebpfproxy.errors import KernelError, TableFull
from ebpfproxy.model.address import Family, Network, Protocol, parse_address, parse_network
from ebpfproxy.model.device import ETHERNET, Device
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import NamespacedName, Service, ServicePortName, ServiceType, TrafficPolicy
from ebpfproxy.plan import exposure, node_plan, size
from ebpfproxy.plan.service_plan import (
    DetectLocal,
    Frontend,
    NodePlan,
    PlanContext,
    PlanKey,
    ServicePortPlan,
)
from ebpfproxy.proxier import Proxier, SyncResult
from ebpfproxy.source.event import (
    AddressesChanged,
    DevicesChanged,
    Event,
    NodeChanged,
    PodsBypass,
    ServiceChanged,
    SliceChanged,
)
from ebpfproxy.source.tracker import Tracker
from tests.support.build import CONTEXT, HERE, endpoint, name, networks, node, port, service, slice_of
from tests.support.strategies import NODES, SERVICES, slices_of

LOCAL = AddressesChanged(frozenset(networks(("127.0.0.0/8", "192.0.2.10/32"))))


class Agent:
    """Tracker, proxier and fake, as the daemon has them."""

    def __init__(
        self,
        kernel: FakeKernel | None = None,
        plane: FakeDataplane | None = None,
        context: PlanContext = CONTEXT,
    ) -> None:
        self.plane = plane or FakeDataplane(kernel)
        self.plane.open()
        self.kernel = self.plane.kernel
        self.tracker = Tracker(started=0.0)
        self.proxier: Proxier[Key, Entry] = Proxier(self.plane, context)

    def tell(self, *told: Service | EndpointSlice | Event) -> None:
        for each in told:
            if isinstance(each, Service):
                self.tracker.fold(ServiceChanged(each.name, each))
            elif isinstance(each, EndpointSlice):
                self.tracker.fold(SliceChanged(each.name, each))
            else:
                self.tracker.fold(each)

    def plan(self) -> None:
        drained = self.tracker.drain()
        self.proxier.plan(
            drained.state,
            drained.services,
            node_changed=drained.node_changed,
            host_changed=drained.host_changed,
        )

    def sync(self, *told: Service | EndpointSlice | Event, verify: bool = False) -> SyncResult:
        """Take these in and sync; what was written is all that is in `kernel.writes` afterwards."""
        self.tell(*told)
        self.plan()
        self.kernel.writes.clear()
        return self.proxier.sync(verify)

    def served(self) -> set[str]:
        return {str(key[0]) for key in self.kernel.ports}


@pytest.fixture
def agent() -> Agent:
    return Agent()


def key(called: str, family: Family = Family.IPV4, label: str = "") -> PlanKey:
    owner = name(called)
    return ServicePortName(owner.namespace, owner.name, label, Protocol.TCP), family


def gone(called: str) -> ServiceChanged:
    return ServiceChanged(name(called), None)


WEB = service("web", ips=["10.96.0.1"])
API = service("api", ips=["10.96.0.2"])
WEB_SLICE = slice_of("web", endpoint("10.1.0.1"))
API_SLICE = slice_of("api", endpoint("10.1.0.2"))


def test_health_checks_are_of_the_services_that_want_them_now(agent: Agent) -> None:
    asked = service(
        "web",
        ips=["10.96.0.1"],
        type_=ServiceType.LOAD_BALANCER,
        external_policy=TrafficPolicy.LOCAL,
        health_check=32000,
    )
    here = slice_of("web", endpoint("10.1.0.1", HERE))
    agent.sync(asked, API, here, API_SLICE, NodeChanged(node()), LOCAL)
    assert agent.proxier.health_checks == {WEB.name: (WEB.name, 32000, 1)}
    agent.sync(WEB_SLICE)
    assert agent.proxier.health_checks == {WEB.name: (WEB.name, 32000, 0)}
    agent.sync(dataclasses.replace(asked, cluster_ips=()))
    assert agent.proxier.health_checks == {}
    agent.sync(asked)
    agent.sync(gone("web"))
    assert agent.proxier.health_checks == {}


def test_in_a_large_cluster_only_what_changes_anyway_is_planned_tersely(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "LARGE", 1)
    agent.sync(WEB, WEB_SLICE, NodeChanged(node()), LOCAL)
    agent.sync(API, API_SLICE)
    ports = agent.kernel.ports
    assert {str(key[0]): plan.terse for key, plan in ports.items()} == {
        "default/web": False,
        "default/api": True,
    }
    again = Agent()
    again.sync(WEB, WEB_SLICE, API, API_SLICE, NodeChanged(node()), LOCAL)
    assert all(plan.terse for plan in again.kernel.ports.values())


# What is touched


def test_the_first_sync_writes_everything(agent: Agent) -> None:
    done = agent.sync(WEB, API, WEB_SLICE, API_SLICE, NodeChanged(node()), LOCAL)
    assert agent.served() == {"default/web", "default/api"}
    assert set(agent.kernel.networks) == LOCAL.networks
    assert done == SyncResult(put=4, dropped=0, refused=0, drifted=0)


def test_a_change_touches_nothing_but_what_changed(agent: Agent) -> None:
    agent.sync(WEB, API, WEB_SLICE, API_SLICE)
    done = agent.sync(slice_of("web", endpoint("10.1.0.1"), endpoint("10.1.0.9")))
    assert agent.kernel.writes == [("put", key("web")), ("trim", key("web"))]
    assert done == SyncResult(1, 0, 0, 0)


def test_a_change_does_not_read_the_kernel(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.plane.fail_next_read(KernelError("reading is slow"))
    agent.sync(API)
    assert agent.served() == {"default/web", "default/api"}


def test_nothing_changed_writes_nothing(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    assert agent.sync() == SyncResult(0, 0, 0, 0)
    assert agent.sync(verify=True) == SyncResult(0, 0, 0, 0)
    assert agent.kernel.writes == []


def test_a_change_that_is_taken_back_before_the_sync_writes_nothing(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.tell(slice_of("web", endpoint("10.1.0.9")))
    agent.plan()
    assert agent.sync(WEB_SLICE) == SyncResult(0, 0, 0, 0)


def test_a_service_that_is_gone_takes_all_its_keys_along(agent: Agent) -> None:
    two = service("web", port(80, "http"), port(443, "https"), ips=["10.96.0.1", "fd00::1"])
    agent.sync(two, API)
    assert len(agent.kernel.ports) == 5
    done = agent.sync(gone("web"))
    assert (done.put, done.dropped) == (0, 4)
    assert agent.served() == {"default/api"}
    assert {owner[0].name for owner, _ in agent.kernel.frontends.values()} == {"api"}


def test_a_service_that_comes_back_as_it_was_is_written_again(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.sync(gone("web"))
    assert agent.sync(WEB) == SyncResult(1, 0, 0, 0)
    assert agent.served() == {"default/web"}


def test_a_port_that_is_gone_takes_its_key_along(agent: Agent) -> None:
    agent.sync(service("web", port(80, "http"), port(443, "https")))
    done = agent.sync(service("web", port(80, "http")))
    assert (done.put, done.dropped) == (0, 1)
    assert list(agent.kernel.ports) == [key("web", label="http")]


def test_a_change_of_the_node_plans_everything_anew(agent: Agent) -> None:
    local = service(
        "web",
        port(80, node_port=30080),
        balancer=["203.0.113.1"],
        type_=ServiceType.LOAD_BALANCER,
        ranges=["192.0.2.0/24"],
    )
    zoned = slice_of("api", endpoint("10.1.0.1", zones=["a"]), endpoint("10.1.0.2", zones=["b"]))
    agent.sync(local, API, zoned, LOCAL)
    before = dict(agent.kernel.frontends)
    done = agent.sync(NodeChanged(node(zone="a", addresses=["192.0.2.10"])))
    assert done.put == 2
    balancer = Frontend(parse_address("203.0.113.1"), 80, Protocol.TCP)
    assert not before[balancer][1].node_admitted
    assert agent.kernel.frontends[balancer][1].node_admitted
    assert [e.cluster for e in agent.kernel.ports[key("api")].endpoints if e.cluster] == [True]


@dataclasses.dataclass
class Work:
    """What a proxier did: of which Services plans were made, how often one of the node."""

    services: list[str] = dataclasses.field(default_factory=list)
    nodes: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    done = Work()

    def plan_service(service_: Service, *rest: Any) -> tuple[ServicePortPlan, ...]:
        done.services.append(service_.name.name)
        return exposure.plan_service(service_, *rest)

    def plan_node(*given: Any) -> NodePlan:
        done.nodes += 1
        return node_plan.plan_node(*given)

    monkeypatch.setattr(proxier, "plan_service", plan_service)
    monkeypatch.setattr(proxier, "plan_node", plan_node)
    return done


def test_a_new_pods_local_address_plans_the_node_and_no_service(agent: Agent, work: Work) -> None:
    """Each Pod's veth brings an fe80:: address: planning all Services for that takes 400 ms at 10 000."""
    agent.sync(WEB, API, WEB_SLICE, API_SLICE, LOCAL, NodeChanged(node(zone="a")))
    assert work == Work(work.services, 1)
    assert sorted(work.services) == ["api", "web"]
    work.services.clear()
    more = LOCAL.networks.union(networks(["fe80::1/128"]))
    assert agent.sync(AddressesChanged(more)) == SyncResult(1, 0, 0, 0)
    assert work == Work([], 2)
    assert set(agent.kernel.networks) == more


def test_what_a_change_of_the_node_and_one_of_a_service_ask_for_is_planned_once(
    agent: Agent, work: Work
) -> None:
    agent.sync(WEB, API, LOCAL)
    work.services.clear()
    agent.sync(WEB_SLICE, NodeChanged(node(zone="b")), AddressesChanged(frozenset()))
    assert (sorted(work.services), work.nodes) == (["api", "web"], 2)


def ranged(called: str, number: int, *ranges: str) -> Service:
    balancer = [f"203.0.113.{number}"]
    kind = ServiceType.LOAD_BALANCER
    return service(called, ips=[f"10.96.0.{number}"], balancer=balancer, type_=kind, ranges=ranges)


ETH0 = Device(2, "eth0", "", ETHERNET, up=True, default_route=True)
VETHS = tuple(Device(number, f"veth{number}", "veth", ETHERNET, up=True) for number in (8, 9))


class Recorded(FakeDataplane):
    """Remembers the devices of each plan of the node that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[set[str]] = []

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        if node is not None:
            self.devices.append({each.name for each in node.devices})
        return super().render(plans, node)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def host(recorded: Recorded) -> Agent:
    """An agent on a node with an uplink and two pods."""
    agent = Agent()
    agent.plane = recorded
    recorded.open()
    agent.proxier = Proxier(recorded, CONTEXT)
    agent.sync(DevicesChanged((ETH0, *VETHS)), LOCAL)
    assert recorded.devices == [{"eth0"}]
    recorded.devices.clear()
    return agent


def test_pods_devices_are_taken_once_a_service_needs_their_packets(host: Agent, recorded: Recorded) -> None:
    host.sync(ranged("ranged", 8, "198.51.100.0/24"))
    host.sync(WEB, ranged("other", 9, "198.51.100.0/24"))
    assert (recorded.devices, host.proxier.needing_pods) == ([{"eth0", "veth8", "veth9"}], 2)
    host.sync(gone("ranged"))
    host.sync(ranged("other", 9))
    assert (len(recorded.devices), host.proxier.needing_pods) == (1, 0)


def test_pods_that_were_served_stay_so_when_nothing_needs_them_and_new_ones_are_left_alone(
    host: Agent, recorded: Recorded
) -> None:
    host.sync(ranged("ranged", 8, "198.51.100.0/24"))
    host.sync(gone("ranged"))
    newcomer = VETHS[0]._replace(ifindex=10, name="veth10")
    host.sync(DevicesChanged((ETH0, *VETHS, newcomer)))
    assert recorded.devices == [{"eth0", "veth8", "veth9"}]
    host.sync(DevicesChanged((ETH0, VETHS[1], newcomer)))
    host.sync(DevicesChanged((ETH0, *VETHS, newcomer)))
    assert recorded.devices[1:] == [{"eth0", "veth9"}], "its life ended, so it is another one"


def test_a_device_with_the_index_of_one_that_was_served_and_another_name_is_another_one(
    host: Agent, recorded: Recorded
) -> None:
    host.sync(ranged("ranged", 8, "198.51.100.0/24"))
    host.sync(gone("ranged"))
    host.sync(DevicesChanged((ETH0, VETHS[0]._replace(name="other"), VETHS[1])))
    assert recorded.devices[1:] == [{"eth0", "veth9"}]


def test_what_the_first_services_need_is_in_the_first_plan_of_the_node() -> None:
    agent, recorded = Agent(), Recorded()
    recorded.open()
    agent.proxier = Proxier(recorded, CONTEXT)
    agent.tell(ranged("ranged", 8, "198.51.100.0/24"), DevicesChanged((ETH0, *VETHS)))
    agent.plan()
    assert recorded.devices == [{"eth0", "veth8", "veth9"}]


def test_the_device_of_a_pod_that_bypasses_is_taken(host: Agent, recorded: Recorded) -> None:
    host.sync(PodsBypass(frozenset({9})))
    assert recorded.devices == [{"eth0", "veth9"}]


def test_a_device_that_means_nothing_here_leaves_the_entries_alone(host: Agent, recorded: Recorded) -> None:
    """With sockets looked at, a pod's veth is one of those."""
    for veths in (VETHS[:1], (*VETHS, VETHS[0]._replace(ifindex=10, name="veth10"))):
        assert host.sync(DevicesChanged((ETH0, *veths))) == SyncResult(0, 0, 0, 0)
    assert recorded.devices == []
    host.sync(DevicesChanged(VETHS))
    assert recorded.devices == [set()]


class Clinging(FakeDataplane):
    """Can drop nothing."""

    def apply(self, delta: Delta[Key, Entry]) -> dict[Key, KernelError]:
        refused = dict(super().apply(Delta(delta.puts, frozenset())))
        return refused | {key: KernelError("it clings") for key in delta.drops}


def test_a_drop_that_is_refused_counts_as_refused_and_as_nothing_else() -> None:
    agent, plane = Agent(), Clinging()
    plane.open()
    agent.proxier = Proxier(plane, CONTEXT)
    assert agent.sync(WEB, WEB_SLICE) == SyncResult(put=1, dropped=0, refused=0, drifted=0)
    assert agent.sync(gone("web")) == SyncResult(put=0, dropped=0, refused=1, drifted=0)


def test_a_service_that_goes_as_the_node_changes_is_gone(agent: Agent) -> None:
    agent.sync(WEB, API)
    agent.sync(gone("web"), NodeChanged(node(zone="b")))
    assert agent.served() == {"default/api"}


def test_a_node_that_has_no_local_address_is_planned_in_the_first_sync_too(agent: Agent, work: Work) -> None:
    """What it asks for besides its networks is there to be attached."""
    agent.sync(WEB)
    assert work.nodes == 1
    agent.sync(API)
    assert work.nodes == 1


class Counted(FakeDataplane):
    """Counts the deltas that it was given."""

    deltas = 0

    def apply(self, delta):  # type: ignore[no-untyped-def]
        self.deltas += 1
        return super().apply(delta)


class CountedAgent(Agent):
    plane: Counted

    def __init__(self, kernel: FakeKernel | None = None) -> None:
        super().__init__(kernel)
        self.plane = Counted(self.kernel)
        self.plane.open()
        self.proxier = Proxier(self.plane, CONTEXT)


def test_what_an_earlier_run_left_that_nobody_wants_is_told_once() -> None:
    first = Agent()
    first.sync(WEB, API, NodeChanged(node()), LOCAL)
    again = Agent(first.kernel)
    again.sync(WEB, NodeChanged(node()), LOCAL)
    left = again.proxier.take_left_over()
    assert {str(each[0]) for each in left if isinstance(each[0], ServicePortName)} == {"default/api"}
    assert not again.proxier.take_left_over()
    again.sync(gone("web"))
    assert not again.proxier.take_left_over()


def test_what_an_earlier_run_left_is_told_though_it_went_with_a_sync_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Agent()
    first.sync(WEB, API, NodeChanged(node()), LOCAL)
    again = Agent(first.kernel)
    apply = FakeDataplane.apply

    def apply_and_fail(plane: FakeDataplane, delta: Delta[Key, Entry]) -> None:
        apply(plane, delta)
        raise KernelError("only half of it is known")

    with monkeypatch.context() as failing:
        failing.setattr(FakeDataplane, "apply", apply_and_fail)
        with pytest.raises(KernelError):
            again.sync(WEB, NodeChanged(node()), LOCAL)
    again.sync()
    assert again.proxier.take_left_over()


def test_a_restart_that_finds_nothing_to_do_lets_the_dataplane_settle() -> None:
    before = CountedAgent()
    before.sync(WEB, WEB_SLICE, LOCAL, verify=True)
    again = CountedAgent(before.kernel)
    assert again.sync(WEB, WEB_SLICE, LOCAL, verify=True) == SyncResult(0, 0, 0, 0)
    assert again.plane.deltas == 1
    assert again.kernel.writes == []


def test_a_sync_that_has_nothing_to_do_and_is_no_verification_asks_the_dataplane_for_nothing() -> None:
    agent = CountedAgent()
    agent.sync(WEB)
    agent.sync()
    assert agent.plane.deltas == 1


def test_local_networks_come_and_go_with_the_nodes_addresses(agent: Agent) -> None:
    agent.sync(WEB, LOCAL)
    more = networks(("127.0.0.0/8", "192.0.2.11/32"))
    done = agent.sync(AddressesChanged(frozenset(more)))
    assert set(agent.kernel.networks) == set(more)
    assert (done.put, done.dropped) == (1, 1)


def test_what_another_run_left_and_nobody_wants_is_dropped_in_the_first_sync(agent: Agent) -> None:
    agent.sync(WEB, API, WEB_SLICE)
    again = Agent(agent.kernel)
    done = again.sync(WEB, WEB_SLICE)
    assert (done.put, done.dropped, done.drifted) == (0, 1, 0)
    assert again.served() == {"default/web"}
    assert agent.kernel.writes == [("drop", key("api"))]


# Claims


def test_a_frontend_is_handed_over_by_a_put_before_the_old_owner_is_dropped(agent: Agent) -> None:
    contested = "203.0.113.1"
    agent.sync(
        service("a", ips=["10.96.0.1"], external=[contested]),
        service("b", ips=["10.96.0.2"], external=[contested]),
    )
    frontend = Frontend(parse_address(contested), 80, Protocol.TCP)
    assert agent.kernel.frontends[frontend][0] == key("a")
    assert agent.proxier.conflicts == 1
    agent.sync(gone("a"))
    assert agent.kernel.frontends[frontend][0] == key("b")
    assert agent.proxier.conflicts == 0
    assert agent.kernel.writes == [("put", key("b")), ("trim", key("b")), ("drop", key("a"))]


def test_a_better_claim_takes_a_frontend_away_from_whom_it_served(agent: Agent) -> None:
    """CVE-2020-8554: an external IP that is another Service's ClusterIP."""
    thief = service("a", ips=["10.96.0.1"], external=["10.96.0.2"])
    frontend = Frontend(parse_address("10.96.0.2"), 80, Protocol.TCP)
    agent.sync(thief)
    assert agent.kernel.frontends[frontend][0] == key("a")
    agent.sync(API)
    assert agent.kernel.frontends[frontend][0] == key("api")
    agent.sync(gone("api"))
    assert agent.kernel.frontends[frontend][0] == key("a")


def test_a_claim_that_is_lost_is_told_once(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    a, b = (service(n, ips=[f"10.96.0.{i}"], external=["203.0.113.1"]) for i, n in enumerate("ab", start=1))
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        agent.sync(a, b)
        agent.sync(slice_of("a", endpoint("10.1.0.1")), slice_of("b", endpoint("10.1.0.1")))
        agent.sync(verify=True)
    assert [record.getMessage() for record in caplog.records] == ["a frontend is claimed twice"]


# Failures


@pytest.mark.parametrize("after", range(6))
def test_a_sync_that_fails_loses_nothing(agent: Agent, after: int) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.plane.fail_next_apply(KernelError("no"), after)
    with pytest.raises(KernelError, match="no"):
        agent.sync(API, gone("web"))
    done = agent.sync()
    assert agent.served() == {"default/api"}
    assert done.drifted == 0  # we did that ourselves
    assert not agent.kernel.frontends.keys() - {Frontend(parse_address("10.96.0.2"), 80, Protocol.TCP)}


def test_after_a_failure_nothing_is_taken_for_granted(agent: Agent) -> None:
    """An error of apply means that nothing is known of the kernel."""
    agent.sync(WEB, WEB_SLICE)
    agent.plane.fail_next_apply(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(API)
    agent.kernel.ports.clear()
    agent.kernel.frontends.clear()
    agent.sync()
    assert agent.served() == {"default/web", "default/api"}


def test_changes_between_a_failure_and_the_next_sync_are_in_it(agent: Agent) -> None:
    agent.sync(WEB)
    agent.plane.fail_next_apply(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(API)
    agent.sync(service("third", ips=["10.96.0.3"]), gone("web"))
    assert agent.served() == {"default/api", "default/third"}


def test_a_kernel_that_cannot_be_read_is_read_again(agent: Agent) -> None:
    agent.plane.fail_next_read(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(WEB)
    assert agent.kernel.writes == []
    agent.sync()
    assert agent.served() == {"default/web"}


def test_a_verification_that_cannot_read_does_not_trust_what_it_believed(agent: Agent) -> None:
    agent.sync(WEB)
    agent.kernel.ports.clear()
    agent.plane.fail_next_read(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(verify=True)
    agent.sync()
    assert agent.served() == {"default/web"}


def test_many_failures_in_a_row_lose_nothing_either(agent: Agent) -> None:
    for number in range(1, 6):
        agent.plane.fail_next_apply(KernelError("no"), after=number)
        with pytest.raises(KernelError):
            agent.sync(service(f"s{number}", ips=[f"10.96.0.{number}"]))
    agent.sync()
    assert agent.served() == {f"default/s{number}" for number in range(1, 6)}


# Refusals


# What several plans have in common


class Addresses(FakeDataplane):
    """Beside each ServicePort, an entry for each address that is dialed: ports of a Service share it."""

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        plans = tuple(plans)
        addresses = {Network(each.frontend.address, 128): True for plan in plans for each in plan.frontends}
        return super().render(plans, node) | addresses


def test_what_two_ports_share_stays_until_both_are_gone() -> None:
    agent = Agent(plane=Addresses())
    both = service("web", port(80, "a"), port(81, "b"), ips=["10.96.0.1"])
    shared = parse_network("10.96.0.1/32")
    agent.sync(both)
    agent.sync(service("web", port(81, "b"), ips=["10.96.0.1"]))
    assert shared in agent.kernel.networks
    agent.sync(gone("web"))
    assert shared not in agent.kernel.networks


def test_an_address_that_another_service_takes_over_in_the_same_sync_stays() -> None:
    agent = Agent(plane=Addresses())
    agent.sync(WEB)
    agent.sync(gone("web"), service("api", ips=["10.96.0.1"]))
    assert parse_network("10.96.0.1/32") in agent.kernel.networks
    agent.sync(gone("api"))
    assert not agent.kernel.networks.keys() & {parse_network("10.96.0.1/32")}


# What others do to the kernel


def test_a_kernel_that_nobody_touches_is_not_disturbed(agent: Agent) -> None:
    assert not agent.proxier.is_disturbed()
    agent.sync(WEB, WEB_SLICE)
    agent.sync(API)
    assert not agent.proxier.is_disturbed()


def test_a_kernel_that_somebody_else_changed_is_disturbed_until_it_is_verified(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.kernel.ports.clear()
    assert agent.proxier.is_disturbed()
    agent.sync(verify=True)
    assert not agent.proxier.is_disturbed()


def test_what_somebody_else_changed_is_not_forgotten_by_a_sync_of_ours(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.kernel.ports.clear()
    agent.sync(API)
    assert agent.proxier.is_disturbed()
    agent.sync()
    assert agent.proxier.is_disturbed()
    agent.sync(verify=True)
    assert not agent.proxier.is_disturbed()


def test_what_somebody_else_changed_is_not_forgotten_by_a_sync_that_has_nothing_to_do(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.kernel.ports.clear()
    agent.sync()
    assert agent.proxier.is_disturbed()


def test_what_changed_is_told_once_with_what_is_gone(agent: Agent) -> None:
    agent.sync(WEB, API)
    assert agent.proxier.take_changed().keys() == {key("web"), key("api")}
    agent.sync(gone("web"))
    assert agent.proxier.take_changed() == {key("web"): None}
    assert agent.proxier.take_changed() == {}


def small_agent(capacity: int) -> Agent:
    return Agent(FakeKernel(capacity))


def test_what_is_refused_is_tried_again_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    agent = small_agent(1)
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        assert agent.sync(WEB).refused == 0
        assert agent.sync(API) == SyncResult(0, 0, 1, 0)
        assert agent.sync() == SyncResult(0, 0, 1, 0)
        assert agent.sync(verify=True) == SyncResult(0, 0, 1, 0)
        assert [record.getMessage() for record in caplog.records] == ["not served"]
        assert agent.served() == {"default/web"}
        agent.sync(gone("web"))
        assert agent.sync() == SyncResult(1, 0, 0, 0)
        assert agent.served() == {"default/api"}
        assert agent.sync() == SyncResult(0, 0, 0, 0)
        assert len(caplog.records) == 1


def test_a_refusal_that_comes_back_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    agent = small_agent(1)
    agent.sync(WEB)
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        agent.sync(API)
        agent.sync(gone("api"))
        assert agent.sync() == SyncResult(0, 0, 0, 0)
        agent.sync(API)
    assert [record.getMessage() for record in caplog.records] == ["not served"] * 2


def test_a_refusal_names_the_reason_and_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    class Full(FakeDataplane):
        def apply(self, delta):  # type: ignore[no-untyped-def]
            return dict.fromkeys(delta.puts, TableFull("map services is full", "raise the limit"))

    agent = Agent()
    agent.plane = Full(agent.kernel)
    agent.plane.open()
    agent.proxier = Proxier(agent.plane, CONTEXT)
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        agent.sync(WEB)
    values = caplog.records[0].__dict__["values"]
    assert values == {"reason": "map services is full", "hint": "raise the limit"}


def test_a_refused_change_leaves_what_was_there_and_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    agent = small_agent(2)
    agent.sync(WEB, API)
    grown = service("web", ips=["10.96.0.1"], external=["203.0.113.1"])
    assert agent.sync(grown).refused == 1
    assert agent.kernel.ports.keys() == {key("web"), key("api")}
    assert len(agent.kernel.frontends) == 2
    agent.sync(gone("api"))
    agent.sync()
    assert len(agent.kernel.frontends) == 2
    assert {owner for owner, _ in agent.kernel.frontends.values()} == {key("web")}


def test_what_is_refused_is_tried_again_without_reading_the_kernel() -> None:
    agent = small_agent(1)
    agent.sync(WEB)
    agent.sync(API)
    agent.sync(gone("web"))
    agent.plane.fail_next_read(KernelError("reading is slow"))
    assert agent.sync() == SyncResult(1, 0, 0, 0)
    assert agent.served() == {"default/api"}


def test_a_refused_service_that_lost_a_frontend_meanwhile_has_it_again_once_it_is_as_it_was() -> None:
    """What it had was kept, but for what another took: so what is believed to be there is not."""
    agent = small_agent(3)
    a, b = service("a", ips=["10.96.0.1"], external=["203.0.113.1"]), service("b", ips=["10.96.0.2"])
    agent.sync(a, b)
    moved = service("a", ips=["10.96.0.1"], external=["203.0.113.2"])
    taking = service("b", ips=["10.96.0.2"], external=["203.0.113.1"])
    frontend = Frontend(parse_address("203.0.113.1"), 80, Protocol.TCP)
    assert agent.sync(moved, taking).refused == 1
    assert agent.kernel.frontends[frontend][0] == key("b")
    assert agent.sync(a, b).refused == 0
    assert agent.kernel.frontends[frontend][0] == key("a")


# Drift


def test_what_a_foreign_writer_did_is_counted_and_repaired(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.sync(WEB, API, WEB_SLICE, API_SLICE, LOCAL)
    agent.kernel.networks.clear()
    del agent.kernel.ports[key("web")]
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        assert agent.sync().drifted == 0  # not looked for
        done = agent.sync(verify=True)
        assert agent.sync(verify=True).drifted == 0
    assert done.drifted == 3
    assert agent.served() == {"default/web", "default/api"}
    assert set(agent.kernel.networks) == LOCAL.networks
    assert [record.getMessage() for record in caplog.records] == ["the kernel had drifted, and is repaired"]


def test_a_change_of_ours_is_not_taken_for_drift(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    done = agent.sync(API, slice_of("web", endpoint("10.1.0.9")), verify=True)
    assert done == SyncResult(put=2, dropped=0, refused=0, drifted=0)


def test_the_first_sync_and_one_after_a_failure_have_nothing_to_compare_with(agent: Agent) -> None:
    first = Agent(FakeKernel(ports={key("x"): ServicePortPlan(*key("x"), (), (), otherwise=None)}))  # type: ignore[arg-type]
    assert first.sync(WEB, verify=True).drifted == 0
    agent.sync(WEB)
    agent.plane.fail_next_apply(KernelError("no"))
    with pytest.raises(KernelError):
        agent.sync(API)
    assert agent.sync(verify=True).drifted == 0


# Sums


def test_the_sums_follow_what_is_planned(agent: Agent) -> None:
    def sums() -> tuple[int, int, int, int]:
        p = agent.proxier
        return p.services, p.endpoints, p.no_local_internal, p.no_local_external

    assert sums() == (0, 0, 0, 0)
    local = service(
        "web",
        port(80, node_port=30080),
        type_=ServiceType.NODE_PORT,
        internal_policy=TrafficPolicy.LOCAL,
        external_policy=TrafficPolicy.LOCAL,
    )
    agent.sync(local, slice_of("web", endpoint("10.1.0.1")), API)
    assert sums() == (2, 1, 1, 1)
    agent.sync(slice_of("web", endpoint("10.1.0.1", HERE), endpoint("10.1.0.2")))
    assert sums() == (2, 2, 0, 0)
    agent.sync(gone("web"))
    assert sums() == (1, 0, 0, 0)
    agent.sync(gone("api"))
    assert sums() == (0, 0, 0, 0)


# Any history


@st.composite
def events(draw: st.DrawFn) -> Event:
    kind = draw(st.integers(0, 9))
    if kind < 4:
        made = draw(SERVICES)
        return ServiceChanged(made.name, made if draw(st.integers(0, 3)) else None)
    if kind < 8:
        owner = draw(st.sampled_from([NamespacedName("default", n) for n in ("web", "api", "dns")]))
        piece = draw(slices_of(owner))
        return SliceChanged(piece.name, piece if draw(st.integers(0, 3)) else None)
    if kind == 8:
        return NodeChanged(draw(NODES))
    texts = draw(st.sets(st.sampled_from(("127.0.0.0/8", "192.0.2.10/32", "::1/128", "fd00::1/128"))))
    return AddressesChanged(frozenset(networks(texts)))


STEPS = st.sampled_from(("wait", "wait", "sync", "verify", "fail", "plan", "vandal"))


def state_events(told: Iterable[Event]) -> list[Event]:
    """The last event of each object, in another order."""
    last: dict[tuple[type, object], Event] = {}
    for event in told:
        match event:
            case ServiceChanged(name_) | SliceChanged(name_):
                last[type(event), name_] = event
            case _:
                last[type(event), None] = event
    return list(reversed(last.values()))


@given(
    st.lists(st.tuples(events(), STEPS), max_size=14),
    st.integers(0, 6),
)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_history_of_events_and_failures_ends_as_if_only_the_last_state_had_been_told(
    history: list[tuple[Event, str]], fails_after: int
) -> None:
    agent = Agent()
    agent.plan()
    for event, step in history:
        agent.tell(event)
        if step == "plan":
            agent.plan()
        elif step == "vandal":
            agent.kernel.ports.clear()
            agent.sync(verify=True)
        elif step == "fail":
            agent.plane.fail_next_apply(KernelError("no"), fails_after)
            with contextlib.suppress(KernelError):  # none where nothing is to be written
                agent.sync()
            agent.plane.fail_next_apply(None)
        elif step in ("sync", "verify"):
            agent.sync(verify=step == "verify")
    agent.sync()
    fresh = Agent()
    fresh.sync(*state_events(event for event, _ in history))
    assert agent.plane.read() == fresh.plane.read()
    assert agent.sync(verify=True) == SyncResult(0, 0, 0, 0)
    sums = [
        (p.services, p.endpoints, p.no_local_internal, p.no_local_external, p.needing_pods, p.conflicts)
        for p in (agent.proxier, fresh.proxier)
    ]
    assert sums[0] == sums[1]


@given(st.lists(events(), max_size=10), st.integers(0, 5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_where_room_is_short_what_is_there_is_what_is_wanted_or_nothing(
    history: list[Event], capacity: int
) -> None:
    """Of a plan that does not fit nothing wrong is in force; retries change nothing more."""
    agent, roomy = small_agent(capacity), Agent()
    for event in history:
        for each in (agent, roomy):
            each.sync(event)
    for _ in range(3):
        agent.sync()
    assert len(agent.kernel.frontends) <= capacity
    before = agent.plane.read()
    refused = agent.sync(verify=True).refused
    assert agent.plane.read() == before
    wanted = roomy.plane.read()
    assert len([k for k in wanted if before.get(k) != wanted[k]]) == refused


def test_one_that_is_not_there_any_more_is_not_missed() -> None:
    """The node's own entries go when the node knows no networks any more."""
    agent = Agent()
    agent.sync(LOCAL, NodeChanged(Node(HERE)))
    agent.sync(AddressesChanged(frozenset()))
    assert agent.kernel.networks == {}


def test_that_pods_cannot_be_told_is_said_once_and_that_they_can_be_at_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, proxier.__name__)
    agent = Agent(context=dataclasses.replace(CONTEXT, detect_local=DetectLocal.NODE_CIDR))
    agent.sync(LOCAL, NodeChanged(node()))
    agent.sync(NodeChanged(node("zone-a")))
    given = dataclasses.replace(node("zone-a"), pod_cidrs=networks(["10.1.0.0/24"]))
    agent.sync(NodeChanged(given))
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", "pods cannot be told from others"),
        ("INFO", "pods are told from others now"),
    ]


def test_services_are_planned_anew_when_the_node_is_given_its_pods_networks() -> None:
    """kubernetes issue 111321."""
    agent = Agent(context=dataclasses.replace(CONTEXT, detect_local=DetectLocal.NODE_CIDR))
    agent.sync(LOCAL, NodeChanged(node()), WEB, WEB_SLICE)
    agent.proxier.take_changed()
    given = dataclasses.replace(node(), pod_cidrs=networks(["10.1.0.0/24"]))
    agent.sync(NodeChanged(given))
    (plan,) = agent.proxier.take_changed().values()
    assert plan is not None
    assert plan.local_traffic is not None
    assert plan.local_traffic.network == parse_network("10.1.0.0/24")
