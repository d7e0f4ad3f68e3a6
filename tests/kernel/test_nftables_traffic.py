"""Connections through the nftables dataplane, and what its removal leaves them."""

import contextlib
import socket
import subprocess
from collections.abc import Iterator

import pytest

from ebpfproxy.dataplanes.delta import diff
from ebpfproxy.dataplanes.nftables import removal
from ebpfproxy.dataplanes.nftables.dataplane import NftablesDataplane
from ebpfproxy.dataplanes.nftables.entries import TABLE
from ebpfproxy.kernel import conntrack, netns
from ebpfproxy.lab import Lab, Pod
from ebpfproxy.model.address import (
    Family,
    Protocol,
    parse_address,
    unspecified,
)
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    NodePlan,
    Otherwise,
    PlannedEndpoint,
    Scope,
    ServicePortPlan,
    Treatment,
)
from tests.kernel.clients import REFUSED, SILENT, TCP, connected, converse, outcome
from tests.kernel.cluster import SERVICE_NETWORKS

pytestmark = pytest.mark.kernel

VIP = {Family.IPV4: "10.96.0.1", Family.IPV6: "fd00:10:96::1"}
IPS = ("ip", "ip6")
PORT, TARGET, NODE_PORT = 80, 8080, 30080
KEPT, MASQUERADED = Treatment(Scope.CLUSTER, False), Treatment(Scope.CLUSTER, True)


class Ground:
    """A node with a server in the pod a and a client in p. What `within` does is done on the node."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.a, self.p = lab.pod("a"), lab.pod("p")
        self.a.serve(Protocol.TCP, TARGET)
        lab.ip(lab.outside, *(f"route add blackhole {network}" for network in SERVICE_NETWORKS))

    def within(self) -> contextlib.AbstractContextManager[None]:
        return netns.entered(self.lab.node.netns)

    def address(self, place: Pod, of: Family) -> str:
        return place.v4 if of is Family.IPV4 else place.v6

    def plans(self, *endpoints: Pod) -> list[ServicePortPlan]:
        """One Service, with a ClusterIP and a NodePort in both families."""
        return [self._plan(of, endpoints) for of in Family]

    def _plan(self, of: Family, endpoints: tuple[Pod, ...]) -> ServicePortPlan:
        cluster_ip = Frontend(parse_address(VIP[of]), PORT, Protocol.TCP)
        node_port = Frontend(unspecified(of), NODE_PORT, Protocol.TCP)
        addresses = [parse_address(self.address(pod, of)) for pod in endpoints]
        return ServicePortPlan(
            ServicePortName("default", "web", "", Protocol.TCP),
            of,
            (
                FrontendPlan(cluster_ip, FrontendKind.CLUSTER_IP, KEPT, KEPT, KEPT),
                FrontendPlan(node_port, FrontendKind.NODE_PORT, MASQUERADED, MASQUERADED, MASQUERADED),
            ),
            tuple(PlannedEndpoint(each, TARGET, True, True, True) for each in sorted(addresses)),
            Otherwise.REJECT,
        )

    def serve(self, *endpoints: Pod) -> None:
        """Bring it into the kernel."""
        with self.within(), contextlib.closing(NftablesDataplane()) as plane:
            plane.open()
            wanted = plane.render(self.plans(*endpoints), NodePlan())
            assert not plane.apply(diff(plane.read(), wanted))
            assert plane.read() == wanted

    def nft(self, commands: str) -> str:
        with self.within():
            done = subprocess.run(
                ["nft", "-f", "-"], input=commands, capture_output=True, text=True, check=True, timeout=60
            )
        return done.stdout

    def reset(self) -> None:
        """Nothing is translated any more, and nothing remembered."""
        self.nft("flush ruleset")
        with self.within():
            for flow in conntrack.flows(Protocol.TCP):
                conntrack.delete(flow)


@pytest.fixture(scope="module")
def _ground() -> Iterator[Ground]:
    with Lab("test-nftables", 34) as lab:
        yield Ground(lab)


@pytest.fixture
def ground(_ground: Ground) -> Iterator[Ground]:
    yield _ground
    _ground.reset()


@pytest.fixture(params=list(Family), ids=lambda of: of.value)
def of(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


def test_a_service_is_reached_at_its_cluster_ip_and_its_node_port(ground: Ground, of: Family) -> None:
    ground.serve(ground.a)
    assert outcome(ground.p, TCP, VIP[of], PORT) == "a"
    assert outcome(ground.lab.node, TCP, VIP[of], PORT) == "a"
    node = ground.address(ground.lab.node, of)
    assert outcome(ground.p, TCP, node, NODE_PORT) == "a"
    assert outcome(ground.lab.outside, TCP, node, NODE_PORT) == "a"


def test_an_endpoint_reaches_itself_through_its_service(ground: Ground, of: Family) -> None:
    ground.serve(ground.a)
    assert outcome(ground.a, TCP, VIP[of], PORT) == "a"


def test_endpoints_come_and_go(ground: Ground, of: Family) -> None:
    ground.serve()
    assert outcome(ground.p, TCP, VIP[of], PORT, 0.5) == (REFUSED if of is Family.IPV4 else SILENT)
    ground.serve(ground.a)
    assert outcome(ground.p, TCP, VIP[of], PORT) == "a"


@contextlib.contextmanager
def conversing(ground: Ground, of: Family) -> Iterator[list[socket.socket]]:
    """Two connections through the Service that are open, one of a pod and one of the node itself; also one of
    outside through the NodePort, which is masqueraded."""
    node = ground.address(ground.lab.node, of)
    dials = (
        (ground.p, VIP[of], PORT),
        (ground.lab.node, VIP[of], PORT),
        (ground.lab.outside, node, NODE_PORT),
    )
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connected(place, TCP, to, port)) for place, to, port in dials]
        assert [converse(client) for client in clients] == ["a"] * 3
        yield clients


def test_open_connections_go_on_when_the_mode_is_retired(ground: Ground, of: Family) -> None:
    ground.serve(ground.a)
    with conversing(ground, of) as clients:
        with ground.within():
            removed, left = removal.retire(conntrack.nat_in_use)
        assert (len(removed), left) == (2, True)
        assert [converse(client) for client in clients] == ["a"] * 3
        assert outcome(ground.p, TCP, VIP[of], PORT, 0.5) == SILENT, "a new one is nobody's"
        with ground.within():
            assert removal.retire(conntrack.nat_in_use) == ([], True), "as long as they are open"
        assert [converse(client) for client in clients] == ["a"] * 3


def test_what_open_connections_needed_goes_when_nothing_is_translated(ground: Ground) -> None:
    translated = True
    ground.serve(ground.a)
    with ground.within():
        assert removal.retire(lambda of: translated)[1] is True
        assert "nat" in ground.nft("list ruleset")
        translated = False
        removed, left = removal.retire(lambda of: translated)
    assert (len(removed), left) == (2, False)
    assert ground.nft("list ruleset") == ""
    with ground.within():
        assert removal.retire(conntrack.nat_in_use) == ([], False)


def test_one_family_waits_for_its_own_connections_alone(ground: Ground) -> None:
    ground.serve(ground.a)
    with ground.within():
        assert removal.retire(lambda of: of is Family.IPV6)[1] is True
    assert f"table ip {TABLE}" not in ground.nft("list ruleset")
    assert f"table ip6 {TABLE}" in ground.nft("list ruleset")


def test_the_mode_begins_again_where_it_was_being_retired(ground: Ground, of: Family) -> None:
    ground.serve(ground.a)
    with conversing(ground, of) as clients:
        with ground.within():
            removal.retire(conntrack.nat_in_use)
        ground.serve(ground.a)
        assert [converse(client) for client in clients] == ["a"] * 3
        assert outcome(ground.p, TCP, VIP[of], PORT) == "a"


def test_removal_takes_our_tables_and_nothing_else(ground: Ground) -> None:
    ground.nft("table ip theirs { chain one { }; }; table inet kube-proxy { chain two { }; }")
    others = ground.nft("list ruleset")
    ground.serve(ground.a)
    whole = ground.nft("list ruleset")
    with ground.within():
        told = removal.remove(dry_run=True)
        assert ground.nft("list ruleset") == whole
        assert removal.remove() == told
        assert removal.remove() == []
    assert [line.partition(":")[0] for line in told] == [
        f"nftables table {ip} {TABLE}" for ip in ("ip", "ip6")
    ]
    assert ground.nft("list ruleset") == others


def test_kube_proxys_own_table_is_removed_whatever_is_in_it(ground: Ground) -> None:
    ground.nft(
        f"""
        table ip {TABLE} {{
            counter seen {{ }}
            map numbers {{ type ipv4_addr : mark; }}
            chain somewhere {{ counter drop; }}
            chain here {{ type filter hook input priority 5; policy drop; jump somewhere; }}
        }}
        """
    )
    with ground.within():
        assert removal.retire(lambda of: True) == (
            [f"nftables table ip {TABLE}: 1 sets and maps, 2 chains, 1 of them base chains"],
            False,
        )
    assert ground.nft("list ruleset") == ""
