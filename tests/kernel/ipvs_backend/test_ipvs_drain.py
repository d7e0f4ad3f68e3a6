"""The drain of mode ipvs: what stays for open connections until they end, and what is removed at once."""

import contextlib
import dataclasses
import socket
import subprocess
from collections.abc import Sequence
from typing import NoReturn

import pytest

from ebpfproxy.backends.ipvs import cleanup
from ebpfproxy.backends.ipvs.backend import IpvsBackend
from ebpfproxy.errors import Rejected, Unsupported
from ebpfproxy.linux import ipset
from ebpfproxy.linux.ipvs import ipvs
from ebpfproxy.linux.ipvs.ipvs import Operation, Rejection
from ebpfproxy.linux.netlink import conntrack, dummy
from ebpfproxy.linux.netlink.dummy import KUBE_IPVS0
from ebpfproxy.model.address import Address, Protocol, parse_address
from ebpfproxy.model.service import ServicePortName
from ebpfproxy.plan.service_plan import (
    Frontend,
    FrontendKind,
    FrontendPlan,
    NoEndpointAction,
    PolicyResult,
    Scope,
)
from tests.kernel.cluster import eventually
from tests.kernel.ipvs_backend.testbed import (
    LASTING,
    NODE_ADDRESS,
    ONE,
    TWO,
    VIP,
    bring,
    connected,
    converse,
    key,
    plan,
)

pytestmark = pytest.mark.kernel


def have_another_mode_serve(protocol: Protocol = Protocol.TCP, order: str = "-A") -> None:
    """Add a rule that translates the node's connections to TWO, after the rules of mode ipvs or (`-I`)
    before."""
    to = f"-d {VIP} -p {protocol.name.lower()} --dport 80 -j DNAT --to-destination {TWO}:8080"
    subprocess.run(["iptables-nft", "-t", "nat", order, "OUTPUT", *to.split()], check=True)


def test_a_drain_keeps_only_what_open_connections_need_until_they_end(
    plane: IpvsBackend,
) -> None:
    bring(plane, plan(ONE, node_port=30080), plan(ONE, protocol=Protocol.UDP))
    with connected() as ends:
        removed, left = cleanup.drain((), lambda of: False)
        assert removed
        assert left
        assert list(ipvs.read()) == [key()]
        converse(*ends)
        assert cleanup.drain((), lambda of: False) == ([], True)
    eventually(lambda: not cleanup.drain((), lambda of: False)[1], "nothing is left", LASTING)
    assert (ipvs.read(), dummy.exists(KUBE_IPVS0), ipset.elements()) == ({}, False, {})


def test_during_a_drain_new_connections_of_the_node_have_a_reachable_source(
    plane: IpvsBackend,
) -> None:
    """The address is still on kube-ipvs0, and would be the source of the node's connections to it."""
    bring(plane, plan(ONE))
    with connected(), socket.create_server((TWO, 8080)) as server:
        cleanup.drain((), lambda of: False)
        have_another_mode_serve()
        with socket.create_connection((VIP, 80), timeout=10):
            served, (source, _) = server.accept()
            served.close()
    assert source != VIP


def test_new_connections_of_the_node_survive_the_end_of_the_drain(
    plane: IpvsBackend,
) -> None:
    """The connection's source is the Service's address, which is on kube-ipvs0."""
    bring(plane, plan(ONE))
    with contextlib.ExitStack() as closing:
        server = closing.enter_context(socket.create_server((TWO, 8080)))
        with connected():
            cleanup.drain((), lambda of: False)
            have_another_mode_serve()
            client = closing.enter_context(socket.create_connection((VIP, 80), timeout=10))
            served = closing.enter_context(server.accept()[0])

        def ipvs_is_done() -> bool:
            assert cleanup.drain((), lambda of: False)[1]
            return not ipvs.read()

        eventually(ipvs_is_done, "IPVS has no connections", LASTING)
        assert client.getsockname()[0] == VIP
        converse(client, served)
    eventually(lambda: not cleanup.drain((), lambda of: False)[1], "nothing is left", LASTING)
    assert not dummy.exists(KUBE_IPVS0)


def test_a_socket_opened_during_the_removal_of_its_address_keeps_working(
    plane: IpvsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new socket gets the address between the check of sockets and the removal. The address is restored."""
    bring(plane, plan(ONE))
    looks = []
    look = cleanup._source_addresses

    def too_early(addresses: frozenset[Address]) -> set[Address]:
        looks.append(look(addresses))
        return set() if len(looks) == 1 else looks[-1]

    monkeypatch.setattr(cleanup, "_source_addresses", too_early)
    with socket.create_server((TWO, 8080)) as server:
        have_another_mode_serve(order="-I")
        with socket.create_connection((VIP, 80), timeout=10) as client, server.accept()[0] as served:
            assert client.getsockname()[0] == VIP
            assert cleanup.drain((), lambda of: False)[1]
            converse(client, served)
    eventually(lambda: not cleanup.drain((), lambda of: False)[1], "nothing is left", LASTING)


def test_udp_flows_are_deleted_before_steps_that_may_fail(
    plane: IpvsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards it would be unknown that they belong to the mode."""
    bring(plane, plan(ONE, protocol=Protocol.UDP))
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.connect((VIP, 80))
        client.send(b"one")
        assert list(conntrack.flows(Protocol.UDP))
        monkeypatch.setattr(ipvs, "apply", fail)
        with pytest.raises(Rejected):
            cleanup.drain((), lambda of: False)
        assert not list(conntrack.flows(Protocol.UDP))


def test_a_udp_client_answered_during_the_drain_is_served_by_the_other_mode(
    plane: IpvsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late answer begins a new flow, of which the client's next datagram would be an untranslated reply.
    The flow is deleted with IPVS' connection, and that with its virtual server (vs/expire_nodest_conn, Linux
    5.9)."""
    bring(plane, plan(ONE, protocol=Protocol.UDP))
    apply = ipvs.apply

    def answer_and_apply(operations: Sequence[Operation]) -> list[Rejection]:
        one.sendto(b"late", peer)
        return apply(operations)

    with contextlib.ExitStack() as closing:
        client, one, two = (closing.enter_context(socket.socket(type=socket.SOCK_DGRAM)) for _ in range(3))
        for sock, at in ((client, (NODE_ADDRESS, 0)), (one, (ONE, 8080)), (two, (TWO, 8080))):
            sock.bind(at)  # also the client: otherwise its source is the Service's address, and masqueraded
            sock.settimeout(10)
        client.connect((VIP, 80))
        client.send(b"first")
        _, peer = one.recvfrom(16)
        have_another_mode_serve(Protocol.UDP)
        subprocess.run(["ip", "route", "add", VIP, "dev", "lo"], check=True)  # the device does not matter
        monkeypatch.setattr(ipvs, "apply", answer_and_apply)
        cleanup.drain((), lambda of: False)
        assert client.recv(16) == b"late"
        client.send(b"next")
        assert two.recv(16) == b"next"


@pytest.mark.parametrize("step", ["flows", "delete"])
def test_if_no_flow_can_be_deleted_everything_else_is_removed(
    plane: IpvsBackend, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """For example on a kernel without nf_conntrack_netlink, or if the flow is in a flow table."""
    bring(plane, plan(ONE, protocol=Protocol.UDP))
    with socket.socket(type=socket.SOCK_DGRAM) as client:
        client.connect((VIP, 80))
        client.send(b"one")
    monkeypatch.setattr(conntrack, step, lacking if step == "flows" else fail)
    removed, left = cleanup.drain((), lambda of: False)
    assert removed
    assert not left
    assert (ipvs.read(), dummy.exists(KUBE_IPVS0), ipset.elements()) == ({}, False, {})


def lacking(*_: object) -> NoReturn:
    raise Unsupported("the kernel lists no flows")


def fail(*_: object) -> NoReturn:
    raise Rejected("not now")


def test_rules_that_stay_for_open_connections_reject_no_other_connection(plane: IpvsBackend) -> None:
    """A process now listens on a port of the node for which policy Local had no endpoint."""
    local = PolicyResult(Scope.LOCAL, False)
    address = Frontend(parse_address(NODE_ADDRESS), 8443, Protocol.TCP)
    balancer = FrontendPlan(address, FrontendKind.LOAD_BALANCER, local, local, local)
    empty = dataclasses.replace(
        plan(), frontends=(balancer,), name=OTHER, no_endpoint_action=NoEndpointAction.DROP
    )
    bring(plane, plan(ONE), empty)
    with connected() as ends, socket.create_server((NODE_ADDRESS, 8443)):
        with pytest.raises(TimeoutError):
            socket.create_connection((NODE_ADDRESS, 8443), timeout=1)
        assert cleanup.drain((), lambda of: False)[1]
        socket.create_connection((NODE_ADDRESS, 8443), timeout=10).close()
        converse(*ends)


OTHER = ServicePortName("default", "other", "", Protocol.TCP)


def test_a_dry_run_reports_what_it_would_remove(plane: IpvsBackend) -> None:
    bring(plane, plan(ONE, node_port=30080))
    wanted = plane.read()
    reported = cleanup.remove((), dry_run=True)
    assert "virtual servers: 2, such as 10.96.0.10:80/TCP" in reported
    assert "device kube-ipvs0 with 1 addresses" in reported
    assert plane.read() == wanted
    assert cleanup.remove(()) == reported
    assert cleanup.remove(()) == []
