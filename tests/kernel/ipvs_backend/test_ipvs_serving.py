"""The IPVS backend: its kernel state, the selection of endpoints, and changes by other programs."""

import contextlib
import dataclasses
import json
import select
import socket
import subprocess
from collections.abc import Iterable, Mapping

import pytest

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.ipvs import cleanup
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.backends.ipvs.entries import IpvsSettings, Key, Member, Server, ServerEntry
from ebpfproxy.backends.ipvs.servers import Servers
from ebpfproxy.backends.ipvs.service_entries import service_entries
from ebpfproxy.backends.ipvs.sets import LOAD_BALANCER_FW, LOAD_BALANCER_SOURCE_CIDR, NAMES, IpSets
from ebpfproxy.errors import KernelError
from ebpfproxy.linux import ipset
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.ipvs.messages import RealServer, VirtualServer
from ebpfproxy.linux.netlink import dummy
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.model.address import Family, Network, Protocol, family, parse_address, parse_network
from ebpfproxy.plan.service_plan import Frontend, FrontendKind, PlannedEndpoints, PolicyResult, Scope
from tests.golden.ipvs_text import entries_of
from tests.golden.situation import load
from tests.kernel.cluster import eventually
from tests.kernel.ipvs_backend.testbed import (
    LASTING,
    NODE,
    NODE_ADDRESS,
    ONE,
    TWO,
    VIP,
    bring,
    connected,
    converse,
    key,
    plan,
    run,
    weights,
)

pytestmark = pytest.mark.kernel

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
def test_the_entries_of_each_situation_are_read_back_as_written(case: str, plane: IpvsBackend) -> None:
    wanted = {k: e for of in Family for k, e in entries_of(load(case), of).items()}
    assert not plane.apply(diff(plane.read(), wanted))
    assert not diff(plane.read(), wanted)


def test_a_removed_endpoint_keeps_its_connections_and_gets_no_new_ones(plane: IpvsBackend) -> None:
    bring(plane, plan(ONE))
    with connected() as ends:
        bring(plane, plan())
        assert weights() == {f"{ONE}:8080": 0}
        converse(*ends)
        with pytest.raises(OSError):
            socket.create_connection((VIP, 80), timeout=5)
        with run() as next_run:  # the state is read from the kernel
            bring(next_run, plan())
            assert weights() == {f"{ONE}:8080": 0}
        converse(*ends)

    def ended() -> bool:
        bring(plane, plan())
        return weights() == {}

    eventually(ended, "the endpoint is removed with its last connection", LASTING)


def test_an_endpoint_that_returns_gets_new_connections(plane: IpvsBackend) -> None:
    bring(plane, plan(ONE))
    with connected() as ends:
        bring(plane, plan(TWO))
        assert weights() == {f"{ONE}:8080": 0, f"{TWO}:8080": 1}
        bring(plane, plan(ONE, TWO))
        converse(*ends)
        assert weights() == {f"{ONE}:8080": 1, f"{TWO}:8080": 1}


def test_a_removed_endpoint_without_connections_is_deleted_by_the_next_sync(plane: IpvsBackend) -> None:
    bring(plane, plan(ONE, TWO))
    bring(plane, plan(TWO))
    assert weights() == {f"{ONE}:8080": 0, f"{TWO}:8080": 1}
    bring(plane, plan(TWO))
    assert weights() == {f"{TWO}:8080": 1}


@pytest.mark.usefixtures("_node")
@pytest.mark.parametrize("scheduler", ["rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sed", "nq", "sh", "mh"])
def test_a_client_of_a_removed_endpoint_gets_another_one(scheduler: str) -> None:
    """Also with schedulers that select an endpoint only by the client's address."""
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


def test_a_udp_flow_moves_to_another_endpoint_when_its_endpoint_is_removed(plane: IpvsBackend) -> None:
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

        eventually(arrives, "the client's next datagrams reach the other endpoint")


def test_a_node_port_follows_the_addresses_of_the_node(plane: IpvsBackend) -> None:
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


def test_virtual_servers_of_other_programs_are_neither_changed_nor_removed(plane: IpvsBackend) -> None:
    foreign = VirtualServer(key(NODE_ADDRESS, 8443), "wlc")
    assert not ipvs.apply([ipvs.add_server(foreign)])
    bring(plane, plan(ONE, node_port=30080))
    bring(plane)
    cleanup.remove(())
    assert list(ipvs.read()) == [foreign.key]


@pytest.mark.usefixtures("_node")
@pytest.mark.parametrize("excluded", [(), (parse_network("10.96.0.0/16"),)])
def test_virtual_servers_of_addresses_on_kube_ipvs0_are_managed_unless_excluded(
    excluded: tuple[Network, ...],
) -> None:
    with run(IpvsSettings(exclude_cidrs=excluded)) as plane:
        bring(plane, plan(ONE))
        stale = VirtualServer(key(port=81), "rr")
        assert not ipvs.apply([ipvs.add_server(stale)])
        bring(plane, plan(ONE))
        assert (stale.key in ipvs.read()) is bool(excluded)


def test_changes_by_other_programs_are_noticed_and_repaired(plane: IpvsBackend) -> None:
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


def test_an_address_removed_from_kube_ipvs0_is_noticed(plane: IpvsBackend) -> None:
    bring(plane, plan(ONE))
    before = plane.generation()
    assert plane.generation() == before
    subprocess.run(["ip", "addr", "del", f"{VIP}/32", "dev", KUBE_IPVS0], check=True)
    assert plane.generation() != before


def test_a_service_address_on_another_device_is_not_on_kube_ipvs0(
    plane: IpvsBackend,
) -> None:
    """For example if keepalived moves the address. Otherwise all ports of this address without a Service
    would be rejected."""
    for order, is_own in (("add", False), ("del", True)):
        bring(plane, plan(ONE))
        before = plane.generation()
        subprocess.run(["ip", "addr", order, f"{VIP}/32", "dev", "lo"], check=True)
        assert plane.generation() != before
        bring(plane, plan(ONE))
        assert (parse_address(VIP) in dummy.addresses(KUBE_IPVS0)) is is_own


def test_packets_from_a_services_address_are_masqueraded_and_have_no_mark(plane: IpvsBackend) -> None:
    """A mark would cause a second masquerade of the outer packet in a tunnel (kubernetes issue 78948).
    Packets of the node to a Service are marked before; those of a socket bound to the address are not."""
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
    listed = subprocess.run(["nft", "-j", "list", "counters"], capture_output=True, check=True).stdout
    found = [each["counter"] for each in json.loads(listed)["nftables"] if "counter" in each]
    assert {each["name"]: each["packets"] for each in found} == {"marked": 0, "masqueraded": 2}


def test_only_local_endpoints_ever_see_a_clients_address(
    plane: IpvsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a virtual server has other endpoints, before and after a change of the policy."""
    put = Servers.put
    kept = []

    def look_and_put(servers: Servers, entries: dict[Server, ServerEntry]) -> Mapping[Server, KernelError]:
        kept.append([*ipset.read(["KUBE-NODE-PORT-LOCAL-TCP"])["KUBE-NODE-PORT-LOCAL-TCP"].members])
        return put(servers, entries)

    cluster = plan(ONE, TWO, node_port=30080)
    how = PolicyResult(Scope.LOCAL, False)
    frontends = tuple(
        each._replace(outside=how) if each.kind is FrontendKind.NODE_PORT else each
        for each in cluster.frontends
    )
    endpoints = PlannedEndpoints(
        (cluster.endpoints[0], cluster.endpoints[1]._replace(local=False, on_node=False))
    )
    local = dataclasses.replace(cluster, frontends=frontends, endpoints=endpoints)
    bring(plane, cluster)
    monkeypatch.setattr(Servers, "put", look_and_put)
    bring(plane, local)
    assert [*ipset.read(["KUBE-NODE-PORT-LOCAL-TCP"])["KUBE-NODE-PORT-LOCAL-TCP"].members] == ["30080"]
    bring(plane, cluster)
    assert kept == [[], []]


def test_an_admitted_client_is_never_rejected_while_source_ranges_change(
    plane: IpvsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry that rejects is added after the admitted ranges, and removed before them."""
    change = IpSets.change
    done = []

    def record_and_change(
        of: IpSets, puts: Iterable[Member], drops: Iterable[Member]
    ) -> dict[Key, KernelError]:
        members, gone = list(puts), list(drops)
        done.append(({NAMES[each.set][0] for each in members}, {NAMES[each.set][0] for each in gone}))
        return change(of, members, gone)

    monkeypatch.setattr(IpSets, "change", record_and_change)
    wanted = entries_of(load("source_ranges_without_the_node"), Family.IPV4)
    assert not plane.apply(diff(plane.read(), wanted))
    rejecting, admitting = LOAD_BALANCER_FW, LOAD_BALANCER_SOURCE_CIDR
    put = [sets for sets, _ in done if sets & {rejecting, admitting}]
    assert [rejecting in sets for sets in put] == [False, True]
    done.clear()
    plane.apply(diff(plane.read(), plane.render((), NODE)))
    dropped = [sets for _, sets in done if sets & {rejecting, admitting}]
    assert [rejecting in sets for sets in dropped] == [True, False]


def test_a_scheduler_can_be_changed_without_losing_a_connection(plane: IpvsBackend) -> None:
    bring(plane, plan(ONE))
    with connected() as ends, run(IpvsSettings("mh")) as other:
        bring(other, plan(ONE))
        assert ipvs.read_one(key()).server.scheduler == "mh"
        converse(*ends)


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
