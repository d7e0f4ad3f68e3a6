"""Effects of changes of the Node, its addresses and its devices."""

import dataclasses
import logging
from collections.abc import Iterable
from typing import Any

import pytest

from ebpfproxy.agent import reconciler
from ebpfproxy.agent.reconciler import LOCAL_DETECTION, NO_LOCAL_DETECTION, UNSERVED, Reconciler, SyncResult
from ebpfproxy.api.event import AddressesChanged, DevicesChanged, NodeChanged, PodsBypass
from ebpfproxy.model.address import Address, Protocol, parse_address, parse_network
from ebpfproxy.model.device import ETHERNET, LOOPBACK, Device, OnLinkRoute
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service, ServiceType
from ebpfproxy.plan import frontends, node_plan
from ebpfproxy.plan.service_plan import DetectLocal, Frontend, NodePlan, ServicePortPlan
from tests.support.build import CONTEXT, HERE, endpoint, networks, node, port, service, slice_of
from tests.support.fake_backend import Entry, FakeBackend, Key
from tests.unit.agent.agent import API, API_SLICE, LOCAL, WEB, WEB_SLICE, Agent, gone, key


def test_a_change_of_the_node_plans_all_services_again(agent: Agent) -> None:
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
    """The Services that were planned, and how often the node was planned."""

    services: list[str] = dataclasses.field(default_factory=list)
    nodes: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    done = Work()
    original = frontends.plan_service

    def plan_service(service_: Service, *rest: Any) -> tuple[ServicePortPlan, ...]:
        done.services.append(service_.name.name)
        return original(service_, *rest)

    def plan_node(*given: Any) -> NodePlan:
        done.nodes += 1
        return node_plan.plan_node(*given)

    monkeypatch.setattr(frontends, "plan_service", plan_service)
    monkeypatch.setattr(reconciler, "plan_node", plan_node)
    return done


def test_a_new_local_address_plans_the_node_and_no_service(agent: Agent, work: Work) -> None:
    """Each Pod's veth adds an fe80:: address. Planning 10 000 Services for that would take 400 ms."""
    agent.sync(WEB, API, WEB_SLICE, API_SLICE, LOCAL, NodeChanged(node(zone="a")))
    assert work == Work(work.services, 1)
    assert sorted(work.services) == ["api", "web"]
    work.services.clear()
    more = LOCAL.networks.union(networks(["fe80::1/128"]))
    assert agent.sync(AddressesChanged(more)) == SyncResult(1, 0, 0, 0)
    assert work == Work([], 2)
    assert set(agent.kernel.networks) == more


def addresses_with_routes(agent: Agent) -> list[Address]:
    plan = agent.reconciler.node_plan
    return sorted(each.address for each in plan.frontend_routes) if plan else []


def test_an_on_link_frontend_plans_the_node(agent: Agent, work: Work) -> None:
    uplink = ETH0._replace(on_link=(OnLinkRoute(254, parse_network("203.0.113.0/24")),))
    agent.sync(LOCAL, DevicesChanged((uplink,)), NodeChanged(node()))
    before = work.nodes
    near = service("web", balancer=["203.0.113.1"], type_=ServiceType.LOAD_BALANCER)
    agent.sync(API)
    assert work.nodes == before
    agent.sync(near)
    assert work.nodes == before + 1
    assert addresses_with_routes(agent) == [parse_address("203.0.113.1")]
    agent.sync(gone("web"))
    assert work.nodes == before + 2
    assert not addresses_with_routes(agent)


def test_simultaneous_changes_of_node_and_service_plan_each_service_once(agent: Agent, work: Work) -> None:
    agent.sync(WEB, API, LOCAL)
    work.services.clear()
    agent.sync(WEB_SLICE, NodeChanged(node(zone="b")), AddressesChanged(frozenset()))
    assert (sorted(work.services), work.nodes) == (["api", "web"], 2)


def ranged(called: str, number: int, *ranges: str) -> Service:
    balancer = [f"203.0.113.{number}"]
    kind = ServiceType.LOAD_BALANCER
    return service(called, ips=[f"10.96.0.{number}"], balancer=balancer, type_=kind, ranges=ranges)


LO = Device(1, "lo", "", LOOPBACK, up=True)
ETH0 = Device(2, "eth0", "", ETHERNET, up=True, default_route=True)
VETHS = tuple(Device(number, f"veth{number}", "veth", ETHERNET, up=True) for number in (8, 9))


class Recorded(FakeBackend):
    """A backend that records the devices of each node plan."""

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
    agent.reconciler = Reconciler(recorded, CONTEXT)
    agent.sync(DevicesChanged((ETH0, *VETHS)), LOCAL)
    assert recorded.devices == [{"eth0"}]
    recorded.devices.clear()
    return agent


def test_devices_of_pods_are_planned_once_a_service_needs_their_packets(
    host: Agent, recorded: Recorded
) -> None:
    host.sync(ranged("ranged", 8, "198.51.100.0/24"))
    host.sync(WEB, ranged("other", 9, "198.51.100.0/24"))
    assert (recorded.devices, host.reconciler.needing_pods) == ([{"eth0", "veth8", "veth9"}], 2)
    host.sync(gone("ranged"))
    host.sync(ranged("other", 9))
    assert (len(recorded.devices), host.reconciler.needing_pods) == (1, 0)


def test_loopback_is_planned_once_a_service_needs_packets_of_the_node_and_stays(
    host: Agent, recorded: Recorded
) -> None:
    """Established associations of the node depend on its program."""
    host.sync(DevicesChanged((LO, ETH0, *VETHS)))
    recorded.devices.clear()
    host.sync(service("sctp", port(3868, protocol=Protocol.SCTP), ips=["10.96.0.8"]))
    assert recorded.devices == [{"lo", "eth0", "veth8", "veth9"}]
    host.sync(gone("sctp"))
    host.sync(DevicesChanged((LO, ETH0)))
    assert recorded.devices[-1] == {"lo", "eth0"}


def test_ports_of_sctp_that_the_kernel_cannot_serve_are_reported_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The other ports of the Service are served."""
    agent = Agent()
    agent.plane.open()
    context = dataclasses.replace(CONTEXT, sctp_unserved="no connection tracking of SCTP")
    agent.reconciler = Reconciler(agent.plane, context)
    both = port(80, "http"), port(3868, "sctp", protocol=Protocol.SCTP)
    with caplog.at_level(logging.WARNING):
        for of in (service("web", *both, ips=["10.96.0.8"]), service("web", *both, ips=["10.96.0.9"])):
            assert agent.sync(of, LOCAL).rejected == 1
    assert [record.message for record in caplog.records].count(UNSERVED) == 1
    assert {each.protocol for each in agent.kernel.frontends} == {Protocol.TCP}
    assert agent.sync(gone("web")).rejected == 0


def test_devices_of_pods_stay_planned_when_no_longer_needed_but_new_ones_are_not_added(
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


def test_a_device_with_a_reused_ifindex_and_another_name_is_not_kept(host: Agent, recorded: Recorded) -> None:
    host.sync(ranged("ranged", 8, "198.51.100.0/24"))
    host.sync(gone("ranged"))
    host.sync(DevicesChanged((ETH0, VETHS[0]._replace(name="other"), VETHS[1])))
    assert recorded.devices[1:] == [{"eth0", "veth9"}]


def test_devices_that_the_first_services_need_are_in_the_first_node_plan() -> None:
    agent, recorded = Agent(), Recorded()
    recorded.open()
    agent.reconciler = Reconciler(recorded, CONTEXT)
    agent.fold(ranged("ranged", 8, "198.51.100.0/24"), DevicesChanged((ETH0, *VETHS)))
    agent.plan()
    assert recorded.devices == [{"eth0", "veth8", "veth9"}]


def test_the_device_of_a_bypassing_pod_is_planned(host: Agent, recorded: Recorded) -> None:
    host.sync(PodsBypass(frozenset({9})))
    assert recorded.devices == [{"eth0", "veth9"}]


def test_a_change_of_an_unplanned_device_changes_no_entries(host: Agent, recorded: Recorded) -> None:
    """A pod's veth is not planned while the socket path serves pods."""
    for veths in (VETHS[:1], (*VETHS, VETHS[0]._replace(ifindex=10, name="veth10"))):
        assert host.sync(DevicesChanged((ETH0, *veths))) == SyncResult(0, 0, 0, 0)
    assert recorded.devices == []
    host.sync(DevicesChanged(VETHS))
    assert recorded.devices == [set()]


def test_a_service_deleted_together_with_a_node_change_is_removed(agent: Agent) -> None:
    agent.sync(WEB, API)
    agent.sync(gone("web"), NodeChanged(node(zone="b")))
    assert agent.served() == {"default/api"}


def test_a_node_without_local_addresses_is_planned_in_the_first_sync(agent: Agent, work: Work) -> None:
    """The node plan has more than networks, such as devices."""
    agent.sync(WEB)
    assert work.nodes == 1
    agent.sync(API)
    assert work.nodes == 1


def test_local_network_entries_follow_the_nodes_addresses(agent: Agent) -> None:
    agent.sync(WEB, LOCAL)
    more = networks(("127.0.0.0/8", "192.0.2.11/32"))
    done = agent.sync(AddressesChanged(frozenset(more)))
    assert set(agent.kernel.networks) == set(more)
    assert (done.put, done.dropped) == (1, 1)


def test_the_nodes_entries_are_removed_when_it_has_no_networks() -> None:
    """The node has no local networks any more."""
    agent = Agent()
    agent.sync(LOCAL, NodeChanged(Node(HERE)))
    agent.sync(AddressesChanged(frozenset()))
    assert agent.kernel.networks == {}


def test_missing_local_detection_is_logged_once_and_again_when_it_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, reconciler.__name__)
    agent = Agent(context=dataclasses.replace(CONTEXT, detect_local=DetectLocal.NODE_CIDR))
    agent.sync(LOCAL, NodeChanged(node()))
    agent.sync(NodeChanged(node("zone-a")))
    given = dataclasses.replace(node("zone-a"), pod_cidrs=networks(["10.1.0.0/24"]))
    agent.sync(NodeChanged(given))
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", NO_LOCAL_DETECTION),
        ("INFO", LOCAL_DETECTION),
    ]


def test_services_are_planned_again_when_the_node_gets_its_pod_cidrs() -> None:
    """kubernetes issue 111321."""
    agent = Agent(context=dataclasses.replace(CONTEXT, detect_local=DetectLocal.NODE_CIDR))
    agent.sync(LOCAL, NodeChanged(node()), WEB, WEB_SLICE)
    agent.reconciler.take_changed()
    given = dataclasses.replace(node(), pod_cidrs=networks(["10.1.0.0/24"]))
    agent.sync(NodeChanged(given))
    (plan,) = agent.reconciler.take_changed().values()
    assert plan is not None
    assert plan.local_traffic is not None
    assert plan.local_traffic.network == parse_network("10.1.0.0/24")
