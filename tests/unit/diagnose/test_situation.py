"""The plans that commands report are those that the agent makes."""

import dataclasses
from collections.abc import Collection

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpfproxy.agent.reconciler import Reconciler
from ebpfproxy.config import Config
from ebpfproxy.diagnose.cluster import Cluster
from ebpfproxy.diagnose.explain.host import origin_of
from ebpfproxy.diagnose.explain.result import Verdict
from ebpfproxy.diagnose.situation import Situation, plan_situation, situation_of_mode
from ebpfproxy.model.address import Protocol
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.device import LOOPBACK, Device
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.namespace import Namespace
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service
from ebpfproxy.plan.service_plan import PlanContext
from tests.support.build import HERE, endpoint, networks, port, service, slice_of
from tests.support.examples import examples
from tests.support.fake_backend import FakeBackend, FakeKernel
from tests.support.strategies import NODES, exposed_services
from tests.unit.diagnose.explain.scene import (
    A_CLIENT,
    DEVICES,
    NAMESPACES,
    POD,
    REMOTE_POD,
    THE_NODE,
    explained,
    route,
    situation,
    to,
)

LO = Device(1, "lo", "", LOOPBACK, True)


@given(st.lists(exposed_services(), max_size=5), NODES, st.sampled_from(("", "no connection tracking")))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
def test_the_plans_and_the_entries_are_those_of_a_starting_agent(
    exposed: list[tuple[Service, tuple[EndpointSlice, ...]]], node: Node | None, sctp_unserved: str
) -> None:
    services = {service.name: service for service, _ in exposed}
    slices = {service.name: pieces for service, pieces in exposed}
    local = frozenset(networks(["127.0.0.0/8", "::1/128", "192.0.2.10/32"]))
    state = ClusterState(services, slices, node, local, DEVICES)
    context = PlanContext(HERE, sctp_unserved=sctp_unserved)
    backend = FakeBackend(FakeKernel())
    agent = Reconciler(backend, context)
    agent.plan(state, frozenset(services), node_changed=True, host_changed=True)
    found = plan_situation(Cluster(state, ()), context, "ebpf")
    assert found.plans == agent.plans
    assert found.node == agent.node_plan
    assert backend.render(found.plans.values(), found.node) == agent.desired


class Recorded(FakeBackend):
    """A mode that recorded these devices in the kernel."""

    def __init__(self, bypassing: Collection[int] = (), served: Collection[int] = ()) -> None:
        super().__init__()
        self.context = PlanContext(HERE)
        self._bypassing, self._served = frozenset(bypassing), frozenset(served)

    def bypassing(self) -> frozenset[int]:
        return self._bypassing

    def namespaces(self) -> tuple[Namespace, ...]:
        return NAMESPACES

    def served_devices(self) -> frozenset[int]:
        return self._served


def of_recorded(inspection: Recorded, state: ClusterState) -> Situation:
    return situation_of_mode(Cluster(state, ()), inspection, "ebpf", Config(), route)


@pytest.mark.parametrize(
    ("needs_packets", "served"),
    [
        (service("web", ranges=["192.0.2.0/24"], balancer=["203.0.113.9"]), {7}),
        (service("web", port(protocol=Protocol.SCTP)), {1, 7}),
    ],
    ids=["ranges", "SCTP"],
)
def test_the_devices_are_those_of_an_agent_that_has_served_other_services(
    needs_packets: Service, served: set[int]
) -> None:
    state = dataclasses.replace(situation().state, devices=(LO, *DEVICES))
    agent = Reconciler(FakeBackend(FakeKernel()), PlanContext(HERE))
    before = dataclasses.replace(state, services={needs_packets.name: needs_packets})
    for each in (before, state):
        agent.plan(each, frozenset({needs_packets.name}), node_changed=True, host_changed=True)
    assert agent.node_plan
    assert {each.ifindex for each in agent.node_plan.devices} == {2, *served}
    assert of_recorded(Recorded(served=served), state).node == agent.node_plan


def test_packets_to_the_device_of_a_pod_are_masqueraded_as_long_as_it_has_programs() -> None:
    state = situation(service("web"), slice_of("web", endpoint(POD, node=""))).state
    for served, masqueraded in (((), False), ({7}, True)):
        found = explained(of_recorded(Recorded(served=served), state), to(), A_CLIENT)
        assert [each.masqueraded for each in found.endpoints] == [masqueraded]


def test_a_pod_whose_device_has_programs_need_not_bypass_the_socket_hooks() -> None:
    state = situation().state
    origin = origin_of(POD, of_recorded(Recorded(served={7}), state), live=False)
    assert (origin.interface, origin.bypasses_hooks) == ("veth7", False)
    origin = origin_of(POD, of_recorded(Recorded(bypassing={7}, served={7}), state), live=False)
    assert (origin.interface, origin.bypasses_hooks) == ("veth7", True)


@pytest.mark.parametrize(("forwarding", "verdict"), [("nat", Verdict.CONNECTS), ("tunnel", Verdict.DROPPED)])
def test_canary_connections_consider_the_forwarding_of_mode_ipvs(forwarding: str, verdict: Verdict) -> None:
    """With a tunnel, the node itself cannot connect, so that its path must not be reported as broken."""
    web = service("web", port(8080), external=["203.0.113.3"])
    state = situation(web, slice_of("web", endpoint(REMOTE_POD)), mode="ipvs").state
    inspection = FakeBackend()
    inspection.context = PlanContext(HERE)
    config = Config(ipvs_forwarding=forwarding)
    found = situation_of_mode(Cluster(state, ()), inspection, "ipvs", config)
    assert explained(found, to("203.0.113.3", 8080), THE_NODE).verdict is verdict
