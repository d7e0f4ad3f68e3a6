"""The IPVS dataplane in a network namespace of its own, where endpoints are the node's own addresses.

Few kernels of containers have IPVS: tests/vm has others.
"""

import contextlib
import dataclasses
import json
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

import pytest

from ebpfproxy.dataplanes.delta import diff
from ebpfproxy.dataplanes.interface import Delta
from ebpfproxy.dataplanes.ipvs import probes, removal
from ebpfproxy.dataplanes.ipvs.dataplane import IpvsDataplane
from ebpfproxy.dataplanes.ipvs.entries import Key, Member, Server, ServerEntry
from ebpfproxy.dataplanes.ipvs.ip_sets import IpSets
from ebpfproxy.dataplanes.ipvs.servers import Servers
from ebpfproxy.dataplanes.ipvs.service_entries import service_entries
from ebpfproxy.dataplanes.ipvs.sets import LOAD_BALANCER_FW, LOAD_BALANCER_SOURCE_CIDR, NAMES
from ebpfproxy.dataplanes.ipvs.settings import IpvsSettings
from ebpfproxy.errors import KernelError, Rejected, Unsupported
from ebpfproxy.kernel import conntrack, dummy, ipset, ipvs, netns, sysctl
from ebpfproxy.kernel.dummy import KUBE_IPVS0
from ebpfproxy.kernel.ipvs_messages import RealServer, ServerKey, VirtualServer
from ebpfproxy.model.address import (
    Address,
    Family,
    Network,
    Protocol,
    family,
    format_endpoint,
    parse_address,
    parse_network,
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
from tests.golden.ipvs_text import entries_of
from tests.golden.situation import load
from tests.kernel.cluster import eventually

pytestmark = pytest.mark.kernel

VIP, ONE, TWO = "10.96.0.10", "192.0.2.101", "192.0.2.102"
NODE_ADDRESS = "192.0.2.1"
NODE = NodePlan(node_port_networks=frozenset({parse_network(f"{NODE_ADDRESS}/32")}))
LASTING = 30.0  # seconds; a connection that was reset is forgotten after ten


@pytest.fixture
def _node() -> Iterator[None]:
    """The calling thread is on a node of its own, with the addresses of endpoints."""
    with netns.throw_away():
        try:
            ipvs.available()
        except Unsupported as lack:
            pytest.skip(lack.message)
        for command in (
            "link set lo up",
            *(f"addr add {address}/32 dev lo" for address in (ONE, TWO, NODE_ADDRESS)),
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield


@pytest.fixture
def plane(_node: None) -> Iterator[IpvsDataplane]:
    with run() as made:
        bring(made)
        yield made


@contextlib.contextmanager
def run(settings: IpvsSettings = IpvsSettings()) -> Iterator[IpvsDataplane]:  # noqa: B008 -- frozen
    """One run of the agent."""
    plane = IpvsDataplane(settings, "nft")
    plane.open()
    try:
        yield plane
    finally:
        plane.close()


def plan(
    *endpoints: str, protocol: Protocol = Protocol.TCP, node_port: int = 0, here: bool = True
) -> ServicePortPlan:
    """A Service on port 80 of VIP, and a NodePort where one is given, with policy Cluster."""
    plain, masqueraded = Treatment(Scope.CLUSTER, False), Treatment(Scope.CLUSTER, True)
    frontends = [(Frontend(parse_address(VIP), 80, protocol), FrontendKind.CLUSTER_IP, plain)]
    if node_port:
        dialled = Frontend(parse_address("0.0.0.0"), node_port, protocol)
        frontends.append((dialled, FrontendKind.NODE_PORT, masqueraded))
    return ServicePortPlan(
        ServicePortName("default", "web", "", protocol),
        Family.IPV4,
        tuple(FrontendPlan(dialled, kind, how, how, how) for dialled, kind, how in frontends),
        tuple(PlannedEndpoint(parse_address(each), 8080, True, here, here) for each in endpoints),
        Otherwise.DROP if endpoints else Otherwise.REJECT,
    )


def bring(plane: IpvsDataplane, *plans: ServicePortPlan, node: NodePlan = NODE) -> None:
    """From whatever there is; and then nothing is left to do."""
    wanted = plane.render(plans, node)
    assert not plane.apply(diff(plane.read(), wanted))
    assert not diff(plane.read(), wanted)


def key(address: str = VIP, port: int = 80, protocol: Protocol = Protocol.TCP) -> ServerKey:
    return ServerKey(parse_address(address), port, protocol)


def weights(at: ServerKey | None = None) -> dict[str, int]:
    """By the endpoints of the virtual server."""
    reals = ipvs.read_one(at or key()).reals
    return {format_endpoint(real.address, real.port): real.weight for real in reals}


@contextlib.contextmanager
def connected(address: str = VIP, port: int = 80) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection to a Service, both ends; the endpoint is ONE. It ends by a reset, soon forgotten."""
    with socket.create_server((ONE, 8080)) as server:
        client = socket.create_connection((address, port), timeout=10)
        served, _ = server.accept()
    try:
        yield client, served
    finally:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        served.close()


def converse(client: socket.socket, served: socket.socket) -> None:
    served.settimeout(10)
    client.sendall(b"hello")
    assert served.recv(16) == b"hello"
    served.sendall(b"there")
    assert client.recv(16) == b"there"


CASES = (
    "cluster_ip",
    "dual_stack",
    "external_local_none_here",
    "load_balancer_health_check",
    "masquerade_all",
    "no_endpoints",
    "sctp",
    "session_affinity",
    "source_ranges_without_the_node",
    "tcp_and_udp_53",
)


@pytest.mark.parametrize("case", CASES)
def test_what_a_situation_needs_is_read_back_as_it_was_written(case: str, plane: IpvsDataplane) -> None:
    wanted = {k: e for of in Family for k, e in entries_of(load(case), of).items()}
    assert not plane.apply(diff(plane.read(), wanted))
    assert not diff(plane.read(), wanted)


def test_a_connection_outlives_its_endpoint_in_the_plan_and_nobody_else_gets_it(plane: IpvsDataplane) -> None:
    bring(plane, plan(ONE))
    with connected() as ends:
        bring(plane, plan())
        assert weights() == {f"{ONE}:8080": 0}
        converse(*ends)
        with pytest.raises(OSError):
            socket.create_connection((VIP, 80), timeout=5)
        with run() as next_run:  # state is read, not remembered
            bring(next_run, plan())
            assert weights() == {f"{ONE}:8080": 0}
        converse(*ends)

    def ended() -> bool:
        bring(plane, plan())
        return weights() == {}

    eventually(ended, "the endpoint goes with its last connection", LASTING)


def test_an_endpoint_that_comes_back_gets_new_connections_again(plane: IpvsDataplane) -> None:
    bring(plane, plan(ONE))
    with connected() as ends:
        bring(plane, plan(TWO))
        assert weights() == {f"{ONE}:8080": 0, f"{TWO}:8080": 1}
        bring(plane, plan(ONE, TWO))
        converse(*ends)
        assert weights() == {f"{ONE}:8080": 1, f"{TWO}:8080": 1}


def test_an_endpoint_without_connections_goes_at_the_next_look(plane: IpvsDataplane) -> None:
    bring(plane, plan(ONE, TWO))
    bring(plane, plan(TWO))
    assert weights() == {f"{ONE}:8080": 0, f"{TWO}:8080": 1}
    bring(plane, plan(TWO))
    assert weights() == {f"{TWO}:8080": 1}


@pytest.mark.usefixtures("_node")
@pytest.mark.parametrize("scheduler", ["rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sed", "nq", "sh", "mh"])
def test_who_had_an_endpoint_that_ends_gets_another(scheduler: str) -> None:
    """Also where a client's address alone says which one it gets."""
    with (
        run(IpvsSettings(scheduler)) as plane,
        socket.create_server((ONE, 8080)) as one,
        socket.create_server((TWO, 8080)) as two,
    ):
        bring(plane, plan(ONE, TWO))
        with socket.create_connection((VIP, 80), timeout=10):
            (ready,), _, _ = select.select((one, two), (), (), 10)
            served, _ = ready.accept()
            bring(plane, plan(TWO if ready is one else ONE))
            for _ in range(4):
                socket.create_connection((VIP, 80), timeout=10).close()
            served.close()


def test_a_udp_flow_goes_with_its_endpoint_to_another(plane: IpvsDataplane) -> None:
    bring(plane, plan(ONE, protocol=Protocol.UDP))
    with contextlib.ExitStack() as sockets:
        servers = []
        for address in (ONE, TWO):
            server = sockets.enter_context(socket.socket(type=socket.SOCK_DGRAM))
            server.bind((address, 8080))
            server.settimeout(2)
            servers.append(server)
        client = sockets.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        client.connect((VIP, 80))
        client.send(b"one")
        assert servers[0].recv(16) == b"one"
        bring(plane, plan(TWO, protocol=Protocol.UDP))
        assert weights(key(protocol=Protocol.UDP)) == {f"{TWO}:8080": 1}

        def arrives() -> bool:
            with contextlib.suppress(OSError):  # the first one goes with the flow
                client.send(b"two")
                return servers[1].recv(16) == b"two"
            return False

        eventually(arrives, "the client's next datagrams come to the other endpoint")


def test_a_node_port_is_answered_on_addresses_of_the_node_as_they_come_and_go(plane: IpvsDataplane) -> None:
    bring(plane, plan(ONE, node_port=30080))
    with connected(NODE_ADDRESS, 30080) as ends:
        converse(*ends)
    more = dataclasses.replace(
        NODE, node_port_networks=NODE.node_port_networks | {parse_network(f"{TWO}/32")}
    )
    bring(plane, plan(ONE, node_port=30080), node=more)
    assert key(TWO, 30080) in ipvs.read()
    bring(plane, plan(ONE, node_port=30080))
    assert key(TWO, 30080) not in ipvs.read()


def test_virtual_servers_of_others_are_neither_changed_nor_removed(plane: IpvsDataplane) -> None:
    theirs = VirtualServer(key(NODE_ADDRESS, 8443), "wlc")
    assert not ipvs.apply([ipvs.add_server(theirs)])
    bring(plane, plan(ONE, node_port=30080))
    bring(plane)
    removal.remove(())
    assert list(ipvs.read()) == [theirs.key]


@pytest.mark.usefixtures("_node")
@pytest.mark.parametrize("excluded", [(), (parse_network("10.96.0.0/16"),)])
def test_what_is_on_our_device_is_ours_but_in_excluded_networks(excluded: tuple[Network, ...]) -> None:
    with run(IpvsSettings(exclude_cidrs=excluded)) as plane:
        bring(plane, plan(ONE))
        stale = VirtualServer(key(port=81), "rr")
        assert not ipvs.apply([ipvs.add_server(stale)])
        bring(plane, plan(ONE))
        assert (stale.key in ipvs.read()) is bool(excluded)


def test_what_somebody_changed_is_noticed_and_repaired(plane: IpvsDataplane) -> None:
    bring(plane, plan(ONE, node_port=30080))
    wanted = plane.render((plan(ONE, node_port=30080),), NODE)
    for harm in (
        lambda: ipvs.apply([ipvs.delete_server(key())]),
        lambda: ipvs.apply([ipvs.change_server(VirtualServer(key(), "lc"))]),
        lambda: ipvs.apply([ipvs.add_real(key(), RealServer(parse_address(TWO), 8080))]),
        lambda: ipvs.apply([ipvs.delete_server(key(NODE_ADDRESS, 30080))]),
        lambda: dummy.remove(KUBE_IPVS0),
        lambda: subprocess.run(["iptables-nft", "-t", "nat", "-F", "KUBE-SERVICES"], check=True),
    ):
        before = plane.generation()
        harm()
        assert plane.generation() != before
        plane.apply(Delta({}, frozenset()))
        assert plane.generation() != plane.generation()
        assert diff(plane.read(), wanted)
        bring(plane, plan(ONE, node_port=30080))


def test_where_another_mode_serves_only_what_open_connections_need_stays_until_they_end(
    plane: IpvsDataplane,
) -> None:
    bring(plane, plan(ONE, node_port=30080), plan(ONE, protocol=Protocol.UDP))
    with connected() as ends:
        removed, left = removal.retire((), lambda of: False)
        assert removed
        assert left
        assert list(ipvs.read()) == [key()]
        converse(*ends)
        assert removal.retire((), lambda of: False) == ([], True)
    eventually(lambda: not removal.retire((), lambda of: False)[1], "nothing is left", LASTING)
    assert (ipvs.read(), dummy.exists(KUBE_IPVS0), ipset.sets()) == ({}, False, {})


def test_an_address_that_somebody_takes_off_kube_ipvs0_is_noticed(plane: IpvsDataplane) -> None:
    bring(plane, plan(ONE))
    before = plane.generation()
    assert plane.generation() == before
    subprocess.run(["ip", "addr", "del", f"{VIP}/32", "dev", KUBE_IPVS0], check=True)
    assert plane.generation() != before


def test_a_service_address_that_another_device_gets_leaves_kube_ipvs0_and_comes_back(
    plane: IpvsDataplane,
) -> None:
    """Else all ports of the node there that no Service has would be refused, as when keepalived moves it."""
    for order, is_ours in (("add", False), ("del", True)):
        bring(plane, plan(ONE))
        before = plane.generation()
        subprocess.run(["ip", "addr", order, f"{VIP}/32", "dev", "lo"], check=True)
        assert plane.generation() != before
        bring(plane, plan(ONE))
        assert (parse_address(VIP) in dummy.addresses(KUBE_IPVS0)) is is_ours


def test_what_the_node_dials_anew_while_connections_last_comes_from_an_address_that_answers_reach(
    plane: IpvsDataplane,
) -> None:
    """The address is still on kube-ipvs0, and what the node dials from itself would have it as its source."""
    bring(plane, plan(ONE))
    with connected(), socket.create_server((TWO, 8080)) as server:
        removal.retire((), lambda of: False)
        serving = f"-t nat -A OUTPUT -d {VIP} -p tcp --dport 80 -j DNAT --to-destination {TWO}:8080"
        subprocess.run(["iptables-nft", *serving.split()], check=True)
        with socket.create_connection((VIP, 80), timeout=10):
            served, (source, _) = server.accept()
            served.close()
    assert source != VIP


def test_what_leaves_from_a_services_address_is_masqueraded_and_has_no_mark(plane: IpvsDataplane) -> None:
    """With one, the packet around it would be masqueraded once more where it goes into a tunnel (kubernetes
    issue 78948). What the node dials a Service with is marked; what is only bound to its address is not."""
    bring(plane, plan(ONE))
    probe = """table ip probe {
        counter marked {}
        counter masqueraded {}
        chain behind {
            type filter hook postrouting priority 300
            meta mark & 0x4000 != 0 counter name marked
            ct state new ct status snat counter name masqueraded
        }
    }"""
    subprocess.run(["nft", "-f", "-"], input=probe, text=True, check=True)
    with connected() as ends:
        converse(*ends)
    with socket.create_server((TWO, 8443)):
        socket.create_connection((TWO, 8443), timeout=10, source_address=(VIP, 0)).close()
    told = subprocess.run(["nft", "-j", "list", "counters"], capture_output=True, check=True).stdout
    found = [each["counter"] for each in json.loads(told)["nftables"] if "counter" in each]
    assert {each["name"]: each["packets"] for each in found} == {"marked": 0, "masqueraded": 2}


def test_what_the_node_dialed_anew_goes_on_when_the_last_connection_of_ipvs_has_ended(
    plane: IpvsDataplane,
) -> None:
    """Its own address is the Service's, which is on kube-ipvs0."""
    bring(plane, plan(ONE))
    with contextlib.ExitStack() as closing:
        server = closing.enter_context(socket.create_server((TWO, 8080)))
        with connected():
            removal.retire((), lambda of: False)
            serving = f"-t nat -A OUTPUT -d {VIP} -p tcp --dport 80 -j DNAT --to-destination {TWO}:8080"
            subprocess.run(["iptables-nft", *serving.split()], check=True)
            client = closing.enter_context(socket.create_connection((VIP, 80), timeout=10))
            served = closing.enter_context(server.accept()[0])

        def ipvs_is_done() -> bool:
            assert removal.retire((), lambda of: False)[1]
            return not ipvs.read()

        eventually(ipvs_is_done, "IPVS has no connections", LASTING)
        assert client.getsockname()[0] == VIP
        converse(client, served)
    eventually(lambda: not removal.retire((), lambda of: False)[1], "nothing is left", LASTING)
    assert not dummy.exists(KUBE_IPVS0)


def test_what_the_node_dials_while_addresses_are_taken_off_has_its_own_back(
    plane: IpvsDataplane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at sockets and the removal another one has got the address."""
    bring(plane, plan(ONE))
    looks = []
    look = removal._of_open_sockets

    def too_early(addresses: frozenset[Address]) -> set[Address]:
        looks.append(look(addresses))
        return set() if len(looks) == 1 else looks[-1]

    monkeypatch.setattr(removal, "_of_open_sockets", too_early)
    with socket.create_server((TWO, 8080)) as server:
        serving = f"-t nat -I OUTPUT -d {VIP} -p tcp --dport 80 -j DNAT --to-destination {TWO}:8080"
        subprocess.run(["iptables-nft", *serving.split()], check=True)
        with socket.create_connection((VIP, 80), timeout=10) as client, server.accept()[0] as served:
            assert client.getsockname()[0] == VIP
            assert removal.retire((), lambda of: False)[1]
            converse(client, served)
    eventually(lambda: not removal.retire((), lambda of: False)[1], "nothing is left", LASTING)


def test_udp_flows_end_before_anything_that_may_fail(
    plane: IpvsDataplane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards nothing would tell whose they were."""
    bring(plane, plan(ONE, protocol=Protocol.UDP))
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.connect((VIP, 80))
        client.send(b"one")
        assert list(conntrack.flows(Protocol.UDP))
        monkeypatch.setattr(ipvs, "apply", fail)
        with pytest.raises(Rejected):
            removal.retire((), lambda of: False)
        assert not list(conntrack.flows(Protocol.UDP))


@pytest.mark.parametrize("step", ["flows", "delete"])
def test_where_no_flow_can_be_ended_all_else_goes(
    plane: IpvsDataplane, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A kernel without nf_conntrack_netlink; a flow that is in a flow table."""
    bring(plane, plan(ONE, protocol=Protocol.UDP))
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.connect((VIP, 80))
        client.send(b"one")
    monkeypatch.setattr(conntrack, step, lacking if step == "flows" else fail)
    removed, left = removal.retire((), lambda of: False)
    assert removed
    assert not left
    assert (ipvs.read(), dummy.exists(KUBE_IPVS0), ipset.sets()) == ({}, False, {})


def lacking(*_: object) -> NoReturn:
    raise Unsupported("the kernel tells no flows")


def fail(*_: object) -> NoReturn:
    raise Rejected("not now")


def test_what_stays_for_connections_refuses_nobody_else(plane: IpvsDataplane) -> None:
    """A port of the node itself where policy Local had no endpoint has somebody who listens now."""
    local = Treatment(Scope.LOCAL, False)
    there = Frontend(parse_address(NODE_ADDRESS), 8443, Protocol.TCP)
    balancer = FrontendPlan(there, FrontendKind.LOAD_BALANCER, local, local, local)
    empty = dataclasses.replace(plan(), frontends=(balancer,), name=OTHER, otherwise=Otherwise.DROP)
    bring(plane, plan(ONE), empty)
    with connected() as ends, socket.create_server((NODE_ADDRESS, 8443)):
        with pytest.raises(TimeoutError):
            socket.create_connection((NODE_ADDRESS, 8443), timeout=1)
        assert removal.retire((), lambda of: False)[1]
        socket.create_connection((NODE_ADDRESS, 8443), timeout=10).close()
        converse(*ends)


OTHER = ServicePortName("default", "other", "", Protocol.TCP)


def test_only_endpoints_of_this_node_ever_see_a_clients_address(
    plane: IpvsDataplane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as a virtual server has others, before a change of the policy and after it."""
    put = Servers.put
    kept = []

    def look_and_put(servers: Servers, entries: dict[Server, ServerEntry]) -> Mapping[Server, KernelError]:
        kept.append([*ipset.members("KUBE-NODE-PORT-LOCAL-TCP")])
        return put(servers, entries)

    cluster = plan(ONE, TWO, node_port=30080)
    how = Treatment(Scope.LOCAL, False)
    frontends = tuple(
        each._replace(outside=how) if each.kind is FrontendKind.NODE_PORT else each
        for each in cluster.frontends
    )
    endpoints = (cluster.endpoints[0], cluster.endpoints[1]._replace(local=False, on_node=False))
    local = dataclasses.replace(cluster, frontends=frontends, endpoints=endpoints)
    bring(plane, cluster)
    monkeypatch.setattr(Servers, "put", look_and_put)
    bring(plane, local)
    assert [*ipset.members("KUBE-NODE-PORT-LOCAL-TCP")] == ["30080"]
    bring(plane, cluster)
    assert kept == [[], []]


def test_who_is_admitted_is_never_refused_while_source_ranges_come_and_go(
    plane: IpvsDataplane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What refuses all others is put after who is admitted, and dropped before."""
    change = IpSets.change
    done = []

    def note_and_change(
        of: IpSets, puts: Iterable[Member], drops: Iterable[Member]
    ) -> dict[Key, KernelError]:
        members, gone = list(puts), list(drops)
        done.append(({NAMES[each.set][0] for each in members}, {NAMES[each.set][0] for each in gone}))
        return change(of, members, gone)

    monkeypatch.setattr(IpSets, "change", note_and_change)
    wanted = entries_of(load("source_ranges_without_the_node"), Family.IPV4)
    assert not plane.apply(diff(plane.read(), wanted))
    refusing, admitting = LOAD_BALANCER_FW, LOAD_BALANCER_SOURCE_CIDR
    put = [sets for sets, _ in done if sets & {refusing, admitting}]
    assert [refusing in sets for sets in put] == [False, True]
    done.clear()
    plane.apply(diff(plane.read(), plane.render((), NODE)))
    dropped = [sets for _, sets in done if sets & {refusing, admitting}]
    assert [refusing in sets for sets in dropped] == [True, False]


def test_a_dry_run_says_what_goes_and_leaves_it(plane: IpvsDataplane) -> None:
    bring(plane, plan(ONE, node_port=30080))
    wanted = plane.read()
    told = removal.remove((), dry_run=True)
    assert "virtual servers: 2, such as 10.96.0.10:80/TCP" in told
    assert "device kube-ipvs0 with 1 addresses" in told
    assert plane.read() == wanted
    assert removal.remove(()) == told
    assert removal.remove(()) == []


@pytest.mark.usefixtures("_node")
def test_a_scheduler_that_the_kernel_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(Unsupported, match=r"no scheduler best for IPVS; it has .*rr"):
        IpvsDataplane(IpvsSettings("best")).open()


@pytest.mark.usefixtures("_node")
def test_a_scheduler_whose_name_no_kernel_takes_is_refused_alike() -> None:
    with pytest.raises(Unsupported, match=r"no scheduler weighted-round-robin for IPVS; it has .*rr"):
        IpvsDataplane(IpvsSettings("weighted-round-robin")).open()


@pytest.mark.usefixtures("_node")
def test_timeouts_that_the_kernel_refuses_are_warned_of_and_the_others_serve(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with run(IpvsSettings(tcp_timeout=2**31 - 1)) as plane:
        bring(plane, plan(ONE))
    (warning,) = [record.__dict__["values"] for record in caplog.records if record.levelname == "WARNING"]
    assert warning["reason"] == "timeouts of IPVS: Invalid argument"


def test_a_scheduler_can_be_changed_without_losing_a_connection(plane: IpvsDataplane) -> None:
    bring(plane, plan(ONE))
    with connected() as ends, run(IpvsSettings("mh")) as other:
        bring(other, plan(ONE))
        assert ipvs.read_one(key()).server.scheduler == "mh"
        converse(*ends)


@pytest.mark.usefixtures("_node")
def test_the_kernel_is_set_up_as_it_has_to_be() -> None:
    with run(IpvsSettings(strict_arp=True, tcp_timeout=100, udp_timeout=7)):
        assert sysctl.read("net/ipv4/vs/conntrack") == "1"
        assert sysctl.read("net/ipv4/vs/expire_nodest_conn") == "1"
        assert sysctl.read("net/ipv4/ip_forward") == "1"
        assert sysctl.read("net/ipv4/conf/all/arp_ignore") == "1"
        assert sysctl.read("net/ipv4/conf/all/arp_announce") == "2"
        assert (ipvs.timeouts().tcp, ipvs.timeouts().udp) == (100, 7)


@pytest.mark.usefixtures("_node")
def test_a_kernel_with_ipvs_has_all_that_is_tried() -> None:
    assert [str(finding) for finding in probes.probe() if not finding.present] == []


_LACKING = """
from ebpfproxy.dataplanes.ipvs import probes
for finding in probes.probe():
    if not finding.present:
        print(finding.missing, finding.remedy, sep=": ")
"""


@pytest.mark.usefixtures("_node")
def test_where_proc_sys_is_read_only_the_probes_say_so() -> None:
    """As in a container that is not privileged."""
    readonly = "mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys"
    command = [
        "unshare",
        "--mount",
        "sh",
        "-ec",
        f'{readonly}; exec "$@"',
        "-",
        sys.executable,
        "-c",
        _LACKING,
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sysctl net/ipv4/vs/conntrack is not 1" in said
    assert "make /proc/sys writable" in said


@pytest.mark.usefixtures("_node")
def test_real_servers_are_counted_through_all_changes() -> None:
    servers = Servers()

    def put(*endpoints: str) -> None:
        entries = service_entries(plan(*endpoints), IpvsSettings()).items()
        assert not servers.put(
            {k: e for k, e in entries if isinstance(k, Server) and isinstance(e, ServerEntry)}
        )

    def counted() -> bool:
        return servers.reals == sum(len(listed.reals) for listed in ipvs.read().values())

    for endpoints in [(ONE, TWO), (ONE,), (), (TWO,)]:
        put(*endpoints)
        assert counted()
    servers.read(lambda _: True)
    assert counted()
    assert not servers.drop(Server(family(key.address), Frontend(*key)) for key in ipvs.read())
    assert servers.reals == 0
