"""A sync writes exactly what changed."""

import copy
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping

import pytest

from ebpfproxy.agent.reconciler import FRONTEND_CONFLICT, SyncResult
from ebpfproxy.api.event import NodeChanged
from ebpfproxy.errors import KernelError
from ebpfproxy.model.address import Family, Network, Protocol, parse_address, parse_network
from ebpfproxy.model.service import ServiceType, TrafficPolicy
from ebpfproxy.plan import counts
from ebpfproxy.plan.service_plan import Frontend, NodePlan, ServicePortPlan
from tests.support.build import HERE, endpoint, node, port, service, slice_of
from tests.support.fake_backend import Entry, FakeBackend, Key
from tests.unit.agent.agent import API, API_SLICE, LOCAL, WEB, WEB_SLICE, Agent, gone, key


def test_the_first_sync_writes_everything(agent: Agent) -> None:
    done = agent.sync(WEB, API, WEB_SLICE, API_SLICE, NodeChanged(node()), LOCAL)
    assert agent.served() == {"default/web", "default/api"}
    assert set(agent.kernel.networks) == LOCAL.networks
    assert done == SyncResult(put=4, dropped=0, rejected=0, drifted=0)


def test_a_sync_writes_only_what_changed(agent: Agent) -> None:
    agent.sync(WEB, API, WEB_SLICE, API_SLICE)
    done = agent.sync(slice_of("web", endpoint("10.1.0.1"), endpoint("10.1.0.9")))
    assert agent.kernel.writes == [("put", key("web")), ("trim", key("web"))]
    assert done == SyncResult(1, 0, 0, 0)


def test_a_change_does_not_read_the_kernel(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.plane.fail_next_read(KernelError("reading is slow"))
    agent.sync(API)
    assert agent.served() == {"default/web", "default/api"}


def test_a_sync_without_changes_writes_nothing(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    assert agent.sync() == SyncResult(0, 0, 0, 0)
    assert agent.sync(verify=True) == SyncResult(0, 0, 0, 0)
    assert agent.kernel.writes == []


def test_a_change_that_is_reverted_before_the_sync_writes_nothing(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.fold(slice_of("web", endpoint("10.1.0.9")))
    agent.plan()
    assert agent.sync(WEB_SLICE) == SyncResult(0, 0, 0, 0)


def test_all_keys_of_a_deleted_service_are_dropped(agent: Agent) -> None:
    two = service("web", port(80, "http"), port(443, "https"), ips=["10.96.0.1", "fd00::1"])
    agent.sync(two, API)
    assert len(agent.kernel.ports) == 5
    done = agent.sync(gone("web"))
    assert (done.put, done.dropped) == (0, 4)
    assert agent.served() == {"default/api"}
    assert {owner[0].name for owner, _ in agent.kernel.frontends.values()} == {"api"}


def test_a_recreated_service_is_written_again(agent: Agent) -> None:
    agent.sync(WEB, WEB_SLICE)
    agent.sync(gone("web"))
    assert agent.sync(WEB) == SyncResult(1, 0, 0, 0)
    assert agent.served() == {"default/web"}


def test_the_key_of_a_removed_port_is_dropped(agent: Agent) -> None:
    agent.sync(service("web", port(80, "http"), port(443, "https")))
    done = agent.sync(service("web", port(80, "http")))
    assert (done.put, done.dropped) == (0, 1)
    assert list(agent.kernel.ports) == [key("web", label="http")]


# Claims


def test_a_frontend_moves_to_its_new_owner_before_the_old_one_is_dropped(agent: Agent) -> None:
    contested = "203.0.113.1"
    agent.sync(
        service("a", ips=["10.96.0.1"], external=[contested]),
        service("b", ips=["10.96.0.2"], external=[contested]),
    )
    frontend = Frontend(parse_address(contested), 80, Protocol.TCP)
    assert agent.kernel.frontends[frontend][0] == key("a")
    assert agent.reconciler.conflicts == 1
    agent.sync(gone("a"))
    assert agent.kernel.frontends[frontend][0] == key("b")
    assert agent.reconciler.conflicts == 0
    assert agent.kernel.writes == [("put", key("b")), ("trim", key("b")), ("drop", key("a"))]


def test_a_better_claim_takes_a_frontend_from_its_current_owner(agent: Agent) -> None:
    """CVE-2020-8554: an external IP that is another Service's ClusterIP."""
    thief = service("a", ips=["10.96.0.1"], external=["10.96.0.2"])
    frontend = Frontend(parse_address("10.96.0.2"), 80, Protocol.TCP)
    agent.sync(thief)
    assert agent.kernel.frontends[frontend][0] == key("a")
    agent.sync(API)
    assert agent.kernel.frontends[frontend][0] == key("api")
    agent.sync(gone("api"))
    assert agent.kernel.frontends[frontend][0] == key("a")


def test_a_lost_claim_is_logged_once(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    a, b = (service(n, ips=[f"10.96.0.{i}"], external=["203.0.113.1"]) for i, n in enumerate("ab", start=1))
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        agent.sync(a, b)
        agent.sync(slice_of("a", endpoint("10.1.0.1")), slice_of("b", endpoint("10.1.0.1")))
        agent.sync(verify=True)
    assert [record.getMessage() for record in caplog.records] == [FRONTEND_CONFLICT]


# Entries that several plans share


class Addresses(FakeBackend):
    """Adds an entry for each frontend address, which ports of a Service share."""

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        plans = tuple(plans)
        addresses = {Network(each.frontend.address, 128): True for plan in plans for each in plan.frontends}
        return super().render(plans, node) | addresses


def test_an_entry_that_two_ports_share_stays_until_both_are_removed() -> None:
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


# Memory


class Recording(FakeBackend):
    """Records what was rendered and what a check expects. It reads copies, as real backends do."""

    def __init__(self) -> None:
        super().__init__()
        self.rendered: list[tuple[Key, Entry]] = []
        self.expected: Mapping[Key, Entry] = {}

    def render(self, plans: Iterable[ServicePortPlan], node: NodePlan | None) -> dict[Key, Entry]:
        entries = super().render(plans, node)
        self.rendered += entries.items()
        return entries

    def read(self) -> dict[Key, Entry]:
        return copy.deepcopy(super().read())

    def check(self, expected: Mapping[Key, Entry]) -> Iterator[bool]:
        self.expected = expected
        return super().check(expected)


def test_keys_and_entries_that_were_read_do_not_stay_beside_equal_desired_ones() -> None:
    plane = Recording()
    agent = Agent(plane=plane)
    agent.sync(WEB, WEB_SLICE)
    agent.sync(verify=True)
    assert all(agent.reconciler.check())
    rendered = {id(each) for pair in plane.rendered for each in pair}
    assert plane.expected
    assert {id(each) for pair in plane.expected.items() for each in pair} <= rendered


# Results for other parts of the agent


def test_health_checks_exist_only_for_services_that_currently_need_them(agent: Agent) -> None:
    asked = service(
        "web",
        ips=["10.96.0.1"],
        type_=ServiceType.LOAD_BALANCER,
        external_policy=TrafficPolicy.LOCAL,
        health_check=32000,
    )
    here = slice_of("web", endpoint("10.1.0.1", HERE))
    agent.sync(asked, API, here, API_SLICE, NodeChanged(node()), LOCAL)
    assert agent.reconciler.health_checks == {WEB.name: (WEB.name, 32000, 1)}
    version = agent.reconciler.health_version
    agent.sync(service("api", ips=["10.96.0.3"]))
    assert agent.reconciler.health_version == version
    agent.sync(WEB_SLICE)
    assert agent.reconciler.health_checks == {WEB.name: (WEB.name, 32000, 0)}
    assert agent.reconciler.health_version > version
    version = agent.reconciler.health_version
    agent.sync(dataclasses.replace(asked, cluster_ips=()))
    assert agent.reconciler.health_checks == {}
    assert agent.reconciler.health_version > version
    agent.sync(asked)
    agent.sync(gone("web"))
    assert agent.reconciler.health_checks == {}


def test_when_a_cluster_becomes_large_only_changed_plans_become_terse(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "LARGE", 1)
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


def test_changed_and_deleted_plans_are_returned_once(agent: Agent) -> None:
    agent.sync(WEB, API)
    assert agent.reconciler.take_changed().keys() == {key("web"), key("api")}
    agent.sync(gone("web"))
    assert agent.reconciler.take_changed() == {key("web"): None}
    assert agent.reconciler.take_changed() == {}


def test_the_sums_for_metrics_follow_the_plans(agent: Agent) -> None:
    def sums() -> tuple[int, int, int, int]:
        p = agent.reconciler
        assert p.no_local[Family.IPV6] == (0, 0)
        return p.services, p.endpoints, *p.no_local[Family.IPV4]

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
