"""The plans that commands report are those that the agent makes."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpfproxy.agent.reconciler import Reconciler
from ebpfproxy.backends.mode import BackendInspection
from ebpfproxy.config import Config
from ebpfproxy.diagnose.cluster import Cluster
from ebpfproxy.diagnose.explain.result import Verdict
from ebpfproxy.diagnose.situation import plan_situation, situation_of_mode
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.endpoint import EndpointSlice
from ebpfproxy.model.node import Node
from ebpfproxy.model.service import Service
from ebpfproxy.plan.service_plan import PlanContext
from tests.support.build import HERE, endpoint, networks, port, service, slice_of
from tests.support.fake_backend import FakeBackend, FakeKernel
from tests.support.strategies import NODES, exposed_services
from tests.unit.diagnose.explain.scene import DEVICES, REMOTE_POD, THE_NODE, explained, situation, to


@given(st.lists(exposed_services(), max_size=5), NODES, st.sampled_from(("", "no connection tracking")))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


@pytest.mark.parametrize(("forwarding", "verdict"), [("nat", Verdict.CONNECTS), ("tunnel", Verdict.DROPPED)])
def test_canary_connections_consider_the_forwarding_of_mode_ipvs(forwarding: str, verdict: Verdict) -> None:
    """With a tunnel, the node itself cannot connect, so that its path must not be reported as broken."""
    web = service("web", port(8080), external=["203.0.113.3"])
    state = situation(web, slice_of("web", endpoint(REMOTE_POD)), mode="ipvs").state
    inspection = BackendInspection(FakeBackend(FakeKernel()), PlanContext(HERE))
    config = Config(ipvs_forwarding=forwarding)
    found = situation_of_mode(Cluster(state, ()), inspection, "ipvs", config)
    assert explained(found, to("203.0.113.3", 8080), THE_NODE).verdict is verdict
