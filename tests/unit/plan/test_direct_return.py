"""Direct server return: which ServicePorts use it, with which algorithm, and where the tunnels end."""

import dataclasses
from collections.abc import Mapping

import pytest

from ebpfproxy.agent.reconciler import Reconciler
from ebpfproxy.api.event import Event, NodeChanged, PeerChanged, ServiceChanged, SliceChanged
from ebpfproxy.api.tracker import Tracker
from ebpfproxy.model.address import format_address, parse_address
from ebpfproxy.model.balancing import DEFAULT_BALANCING, Algorithm, Balancing, EbpfForwarding
from ebpfproxy.model.cluster import ClusterState
from ebpfproxy.model.node import Node, PeerNode
from ebpfproxy.model.service import Service, ServiceType, TrafficPolicy
from ebpfproxy.plan.balancing import DEFAULT, PlannedBalancing, Support, unsupported
from ebpfproxy.plan.direct_return import tunnel_sources
from ebpfproxy.plan.frontends import plan_service
from ebpfproxy.plan.service_plan import PlanContext, Role
from tests.support.build import CONTEXT, ELSEWHERE, HERE, endpoint, networks, node, service, slice_of
from tests.support.fake_backend import Entry, FakeBackend, Key

PORT = 6083
ENABLED = dataclasses.replace(CONTEXT, dsr_port=PORT)
DSR = Balancing(ebpf_forwarding=EbpfForwarding.DSR)
ENDPOINTS = endpoint("10.1.0.1", HERE), endpoint("10.1.0.2", ELSEWHERE), endpoint("10.1.0.3", "third")


def peer(*addresses: str, port: int = PORT) -> PeerNode:
    return PeerNode(tuple(map(parse_address, addresses)), port)


PEERS = {HERE: peer("192.0.2.10"), ELSEWHERE: peer("192.0.2.11"), "third": peer("192.0.2.12", port=0)}


def exposed(balancing: Balancing = DSR, policy: TrafficPolicy = TrafficPolicy.CLUSTER) -> Service:
    made = service("web", balancer=["203.0.113.1"], type_=ServiceType.LOAD_BALANCER, external_policy=policy)
    return dataclasses.replace(made, balancing=balancing)


def planned(
    of: Service,
    context: PlanContext = ENABLED,
    peers: Mapping[str, PeerNode] = PEERS,
    own: Node | None = node(),  # noqa: B008 -- it is immutable
) -> PlannedBalancing:
    (plan,) = plan_service(of, [slice_of("web", *ENDPOINTS)], own, context, peers=peers)
    return plan.balancing


def tunnels(balancing: PlannedBalancing) -> list[str]:
    return [format_address(each) if each else "" for each in balancing.tunnels]


def test_only_nodes_that_announce_the_port_get_tunnels() -> None:
    found = planned(exposed())
    assert tunnels(found) == ["", "192.0.2.11", ""]
    assert found.algorithm is Algorithm.MAGLEV


def test_without_any_tunnel_the_node_accepts_packets_to_its_own_endpoints() -> None:
    for peers in {}, {ELSEWHERE: peer("192.0.2.11", port=PORT + 1)}, {ELSEWHERE: peer()}:
        assert tunnels(planned(exposed(), peers=peers)) == ["", "", ""]


def test_a_tunnel_has_a_family_of_this_node() -> None:
    peers = {ELSEWHERE: peer("fd00::11", "192.0.2.11")}
    assert tunnels(planned(exposed(), peers=peers)) == ["", "192.0.2.11", ""]
    assert tunnels(planned(exposed(), peers=peers, own=node(addresses=["fd00::10"]))) == ["", "fd00::11", ""]
    assert tunnels(planned(exposed(), peers=peers, own=None)) == ["", "fd00::11", ""]
    assert tunnels(planned(exposed(), peers={ELSEWHERE: peer("fd00::11")})) == ["", "", ""]


@pytest.mark.parametrize(
    "of",
    [
        exposed(Balancing(ebpf_forwarding=EbpfForwarding.SNAT)),
        dataclasses.replace(service("web"), balancing=DSR),
    ],
    ids=["snat", "only a ClusterIP"],
)
def test_other_services_cost_nothing(of: Service) -> None:
    assert planned(of) is DEFAULT


def test_with_policy_local_nodes_accept_what_edges_tunnel_and_tunnel_nothing() -> None:
    for balancing in DSR, DEFAULT_BALANCING:
        assert planned(exposed(balancing, policy=TrafficPolicy.LOCAL)) == PlannedBalancing(
            tunnels=(None, None, None)
        )
    edge = dataclasses.replace(ENABLED, role=Role.EDGE, node_name="")
    found = planned(exposed(policy=TrafficPolicy.LOCAL), edge, own=None)
    assert tunnels(found) == tunnels(planned(exposed(), edge, own=None))
    assert "192.0.2.11" in tunnels(found)


def test_an_edge_accepts_no_tunneled_packets() -> None:
    edge = dataclasses.replace(ENABLED, role=Role.EDGE, tunnel_sources=networks(["192.0.2.0/24"]))
    assert tunnel_sources(ClusterState({}, {}, peers=PEERS), edge) == frozenset()


def test_a_service_that_leaves_it_to_the_nodes_accepts_what_others_tunnel() -> None:
    """Else a node with --ebpf-forwarding=dsr would tunnel to one that does not have this flag yet."""
    found = planned(exposed(DEFAULT_BALANCING))
    assert found == PlannedBalancing(tunnels=(None, None, None))
    (without,) = plan_service(
        exposed(DEFAULT_BALANCING), [slice_of("web", ENDPOINTS[1])], node(), ENABLED, peers=PEERS
    )
    assert without.balancing is DEFAULT
    stateful = Balancing(Algorithm.LEAST_CONNECTIONS)
    assert planned(exposed(stateful)) == PlannedBalancing(Algorithm.LEAST_CONNECTIONS)


def test_the_flag_requests_it_for_services_without_an_annotation() -> None:
    context = dataclasses.replace(ENABLED, direct_return=True)
    assert planned(exposed(DEFAULT_BALANCING), context).tunnels
    assert planned(exposed(Balancing(ebpf_forwarding=EbpfForwarding.SNAT)), context) is DEFAULT
    assert planned(service("web"), context) is DEFAULT


@pytest.mark.parametrize(
    ("requested", "of_node", "used"),
    [
        (None, None, Algorithm.MAGLEV),
        (None, Algorithm.SOURCE_HASH, Algorithm.SOURCE_HASH),
        (None, Algorithm.LEAST_CONNECTIONS, Algorithm.MAGLEV),
        (Algorithm.SOURCE_HASH, None, Algorithm.SOURCE_HASH),
    ],
)
def test_the_algorithm_is_stateless(
    requested: Algorithm | None, of_node: Algorithm | None, used: Algorithm
) -> None:
    context = dataclasses.replace(ENABLED, algorithm=of_node)
    found = planned(exposed(DSR._replace(algorithm=requested)), context)
    assert found.algorithm is used
    assert found.tunnels
    assert list(unsupported(found, Support(frozenset(Algorithm), dsr=True))) == []


def test_another_algorithm_has_precedence_and_is_reported() -> None:
    found = planned(exposed(DSR._replace(algorithm=Algorithm.ROUND_ROBIN)))
    assert found.tunnels == ()
    support = Support(frozenset(Algorithm), dsr=True)
    assert list(unsupported(found, support)) == ["ebpf-forwarding dsr (not with round-robin)"]


def test_a_node_without_it_uses_its_own_algorithm() -> None:
    found = planned(exposed(), CONTEXT)
    assert found == PlannedBalancing(dsr=True)
    assert list(unsupported(found, Support(frozenset()))) == ["ebpf-forwarding dsr"]


def test_the_sources_are_all_other_nodes_and_those_of_the_option() -> None:
    state = ClusterState({}, {}, peers=PEERS | {"fourth": peer("192.0.2.13", "fd00::13")})
    edges = networks(["198.51.100.0/24"])
    context = dataclasses.replace(ENABLED, tunnel_sources=edges)
    accepted = ["192.0.2.11/32", "192.0.2.12/32", "192.0.2.13/32", "fd00::13/128", "198.51.100.0/24"]
    assert tunnel_sources(state, context) == frozenset(networks(accepted))
    assert tunnel_sources(state, dataclasses.replace(context, dsr_port=0)) == frozenset()


class _Agent:
    """A tracker and a reconciler, which count the plans that are rendered."""

    def __init__(self) -> None:
        self.tracker = Tracker(0.0, peers=True)
        self.backend = FakeBackend()
        self.backend.open()
        self.reconciler: Reconciler[Key, Entry] = Reconciler(self.backend, ENABLED)

    def plan(self, *events: Event) -> set[str]:
        """Return the names of the Services whose plans have changed."""
        for each in events:
            self.tracker.fold(each)
        drained = self.tracker.drain()
        self.reconciler.plan(
            drained.state,
            drained.services,
            node_changed=drained.node_changed,
            host_changed=drained.host_changed,
            peers_changed=drained.peers_changed,
        )
        return {key[0].name for key in self.reconciler.take_changed()}


def test_a_changed_peer_changes_only_services_with_direct_server_return() -> None:
    agent = _Agent()
    plain = service("plain", ips=["10.96.0.11"], external=["203.0.113.2"])
    slices = slice_of("web", *ENDPOINTS), slice_of("plain", *ENDPOINTS, called="plain-1")
    agent.plan(
        NodeChanged(node()),
        *(ServiceChanged(each.name, each) for each in (exposed(), plain)),
        *(SliceChanged(each.name, each) for each in slices),
    )
    assert agent.plan(PeerChanged(ELSEWHERE, PEERS[ELSEWHERE])) == {"web"}
    assert agent.reconciler.node_plan
    assert agent.reconciler.node_plan.tunnel_sources == frozenset(networks(["192.0.2.11/32"]))
    assert agent.plan(PeerChanged("fifth", PEERS[ELSEWHERE])) == set()
    assert agent.plan(PeerChanged(ELSEWHERE, PEERS[ELSEWHERE]._replace(dsr_port=0))) == {"web"}
    assert agent.plan(ServiceChanged(exposed().name, exposed(DEFAULT_BALANCING))) == {"web"}
    assert agent.plan(PeerChanged(ELSEWHERE, PEERS[ELSEWHERE])) == set()
