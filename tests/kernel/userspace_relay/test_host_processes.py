"""Host processes that listen at all addresses at the port of a Service, beside relays in mode userspace."""

import contextlib
import dataclasses
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ebpfproxy.backends.delta import Delta, diff
from ebpfproxy.backends.userspace import addresses as service_addresses
from ebpfproxy.backends.userspace.entries import Listen, UserspaceSettings, other_port
from ebpfproxy.backends.userspace.inspection import UserspaceInspection
from ebpfproxy.model.address import Family, Network, Protocol, parse_address
from ebpfproxy.plan.service_plan import FrontendKind, NodePlan, PlanContext, ServicePortPlan
from tests.kernel.cluster import eventually
from tests.kernel.loopback import add_addresses
from tests.kernel.userspace_relay.conftest import Place, plan

pytestmark = pytest.mark.kernel

_SO_NO_CHECK = 11


class Addresses(NamedTuple):
    """Of a Service, of the node, and of any node."""

    service: str
    node: str
    any: str


FAMILIES = {
    "v4": Addresses("10.96.0.1", "198.51.100.1", "0.0.0.0"),
    "v6": Addresses("fd00:96::1", "fd00::1", "::"),
}


@pytest.fixture(params=FAMILIES)
def addresses(request: pytest.FixtureRequest, place: Place) -> Addresses:
    """Those of one family, of which the node has its own."""
    found = FAMILIES[request.param]
    add_addresses(found.node)
    return found


def opened(address: str, kind: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
    sock.settimeout(10.0)
    return sock


@contextlib.contextmanager
def host_process(address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Listen at TCP port 443 and UDP port 53, with the options that most programs use."""
    with opened(address, socket.SOCK_STREAM) as web, opened(address, socket.SOCK_DGRAM) as dns:
        for sock in (web, dns):
            if sock.family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        web.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        web.bind((address, 443))
        web.listen()
        dns.bind((address, 53))
        yield web, dns


def reaches(address: str, port: int, server: socket.socket) -> None:
    """A client at this address and port is connected to the server, in both directions."""
    with opened(address, server.type) as client:
        client.connect((address, port))
        client.send(b"?")
        if server.type == socket.SOCK_DGRAM:
            request, peer = server.recvfrom(100)
            server.sendto(request + b"!", peer)
        else:
            accepted, _ = server.accept()
            with accepted:
                accepted.send(accepted.recv(100) + b"!")
        assert client.recv(100) == b"?!"


def is_rejected(address: str, port: int, kind: int) -> None:
    with opened(address, kind) as client:
        error = client.connect_ex((address, port))
        if kind == socket.SOCK_DGRAM:
            client.send(b"?")
            with pytest.raises(ConnectionRefusedError):
                client.recv(100)
        else:
            assert error == errno.ECONNREFUSED


def is_dropped(address: str, port: int) -> None:
    with opened(address, socket.SOCK_STREAM) as client:
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.connect((address, port))


class Served(NamedTuple):
    """Servers of two Services at one address, and their plans: TCP at port 443, UDP at port 53."""

    web: socket.socket
    dns: socket.socket
    plans: list[ServicePortPlan]


def served(place: Place, addresses: Addresses) -> Served:
    web, dns = place.listen(addresses.node), place.udp(addresses.node)
    plans = [
        plan(web.getsockname()[:2], at=[(addresses.service, 443)]),
        plan(dns.getsockname()[:2], protocol=Protocol.UDP, at=[(addresses.service, 53)]),
    ]
    return Served(web, dns, plans)


def without_endpoints(addresses: Addresses) -> list[ServicePortPlan]:
    return [
        plan(at=[(addresses.service, 443)]),
        plan(protocol=Protocol.UDP, at=[(addresses.service, 53)]),
    ]


@pytest.mark.parametrize("first", ["process", "relays"])
def test_a_host_process_listens_at_the_ports_of_services(
    place: Place, addresses: Addresses, first: str
) -> None:
    """Issue 33, C1: an ingress controller at *:443 and a DNS server at *:53 did not start."""
    services = served(place, addresses)
    with contextlib.ExitStack() as stack:
        if first == "process":
            web, dns = stack.enter_context(host_process(addresses.any))
        place.serve(*services.plans)
        if first == "relays":
            web, dns = stack.enter_context(host_process(addresses.any))
        for _ in range(10):  # each relay accepts some of them
            reaches(addresses.service, 443, services.web)
            reaches(addresses.service, 53, services.dns)
        reaches(addresses.node, 443, web)
        reaches(addresses.node, 53, dns)


def test_a_host_process_gets_no_packets_of_a_service_without_endpoints_or_relays(
    place: Place, addresses: Addresses
) -> None:
    services = served(place, addresses)
    with host_process(addresses.any) as (web, _):
        place.serve(*without_endpoints(addresses))
        inspection = UserspaceInspection(PlanContext("node"))
        listeners = [pair for pair in inspection.read().items() if isinstance(pair[0], Listen)]
        assert [inspection.shown(*pair) for pair in listeners] == ["none, packets are rejected"] * 2
        is_rejected(addresses.service, 443, socket.SOCK_STREAM)
        is_rejected(addresses.service, 53, socket.SOCK_DGRAM)
        place.serve(*services.plans)
        reaches(addresses.service, 443, services.web)
        reaches(addresses.service, 53, services.dns)
        place.serve(*without_endpoints(addresses))
        is_rejected(addresses.service, 443, socket.SOCK_STREAM)
        place.serve(*services.plans)
        place.backend.close()
        is_rejected(addresses.service, 443, socket.SOCK_STREAM)
        is_rejected(addresses.service, 53, socket.SOCK_DGRAM)
        reaches(addresses.node, 443, web)
        assert any("nftables table" in line for line in service_addresses.remove())
        assert service_addresses.remove() == []


def test_connections_are_rejected_after_relays_were_killed(place: Place, addresses: Addresses) -> None:
    """The kernel's reset comes from the port of the frontend."""
    place.serve(*served(place, addresses).plans)
    with host_process(addresses.any), pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.backend.relays, "_replace", lambda number: False)
        for pid in place.backend.relays.pids():
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not place.backend.relays.pids(), "the relays end")
        is_rejected(addresses.service, 443, socket.SOCK_STREAM)


@pytest.mark.parametrize("how", ["delete table {} ebpfproxy", "flush chain {} ebpfproxy input"])
def test_removed_rules_are_noticed_and_restored(place: Place, addresses: Addresses, how: str) -> None:
    services = served(place, addresses)
    place.serve(*services.plans)
    with host_process(addresses.any):
        before = place.backend.generation()
        family = "ip6" if ":" in addresses.service else "ip"
        subprocess.run(["nft", how.format(family)], check=True)
        assert place.backend.generation() != before
        inspection = UserspaceInspection(PlanContext("node"))
        expected = inspection.render(services.plans, NodePlan())
        missing = [key for key in diff(inspection.read(), expected).puts if isinstance(key, Listen)]
        assert len(missing) == 2
        place.serve(*services.plans)
        assert not diff(inspection.read(), expected)
        settled = place.backend.generation()
        assert place.backend.generation() == settled
        reaches(addresses.service, 443, services.web)
        reaches(addresses.service, 53, services.dns)


def test_redirects_of_a_previous_run_without_a_service_are_removed(
    place: Place, addresses: Addresses
) -> None:
    """They were in force when it was killed."""
    services = served(place, addresses)
    place.serve(*services.plans)
    place.backend.relays.close()
    place.backend.relays.open()
    left = place.backend.read()
    assert [entry for key, entry in left.items() if isinstance(key, Listen)] == [False, False]
    place.serve(services.plans[0])
    reaches(addresses.service, 443, services.web)
    place.serve()


def test_a_packet_to_the_port_of_the_relays_itself_is_dropped(place: Place, addresses: Addresses) -> None:
    """Its reply would come from another port."""
    services = served(place, addresses)
    place.serve(*services.plans)
    is_dropped(addresses.service, other_port(443))
    with opened(addresses.service, socket.SOCK_DGRAM) as client:
        client.sendto(b"?", (addresses.service, other_port(53)))
    services.dns.settimeout(0.3)
    with pytest.raises(TimeoutError):
        services.dns.recv(100)


def test_a_service_may_have_a_port_and_its_other_port(place: Place, addresses: Addresses) -> None:
    one, other = place.listen(addresses.node), place.listen(addresses.node)
    place.serve(
        plan(one.getsockname()[:2], at=[(addresses.service, 443)], name="one"),
        plan(other.getsockname()[:2], at=[(addresses.service, other_port(443))], name="other"),
    )
    reaches(addresses.service, 443, one)
    reaches(addresses.service, other_port(443), other)


def test_port_32768_has_no_other_port(place: Place, addresses: Addresses) -> None:
    web = place.listen(addresses.node)
    place.serve(plan(web.getsockname()[:2], at=[(addresses.service, 32768)]))
    reaches(addresses.service, 32768, web)


def test_a_datagram_without_checksum_is_relayed(place: Place, addresses: Addresses) -> None:
    services = served(place, addresses)
    place.serve(*services.plans)
    with opened(addresses.service, socket.SOCK_DGRAM) as client:
        client.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
        client.connect((addresses.service, 53))
        client.send(b"?")
        assert services.dns.recv(100) == b"?"


def test_a_node_port_is_served_except_where_relays_of_another_frontend_listen(place: Place) -> None:
    """An address of the node may be an external IP, too. The NodePort must not get its connections."""
    node, loopback = "198.51.100.1", "127.0.0.1"
    add_addresses(node)
    one, other = place.listen(), place.listen()
    node_port = 30443
    plans = (
        plan(one.getsockname(), at=[("0.0.0.0", node_port)], name="one"),
        plan(other.getsockname(), at=[(node, other_port(node_port))], name="other"),
    )
    networks = frozenset(Network(parse_address(each), 128) for each in (node, loopback))
    desired = place.backend.render(plans, NodePlan(node_port_networks=networks))
    for order in (plans, plans[::-1]):
        place.serve(node=NodePlan())
        for each in order:
            partly = place.backend.render([each], NodePlan(node_port_networks=networks))
            assert not place.backend.apply(Delta(partly, frozenset()))
        assert place.backend.read() == desired
        reaches(loopback, node_port, one)
        reaches(node, other_port(node_port), other)
        is_dropped(node, node_port)
    place.serve(plans[0], node=NodePlan(node_port_networks=networks))
    reaches(node, node_port, one)


def test_frontends_of_sctp_are_rejected_and_do_not_disturb_the_others(place: Place) -> None:
    web = place.listen()
    sctp = plan(
        ("127.0.0.1", 9), protocol=Protocol.SCTP, at=[("10.96.0.9", 443), ("0.0.0.0", 30443)], name="sctp"
    )
    idle = plan(protocol=Protocol.SCTP, at=[("10.96.0.8", 443)], name="idle")
    tcp = plan(web.getsockname(), at=[("10.96.0.1", 443), ("0.0.0.0", 30444)], name="tcp")
    loopback = frozenset([Network(parse_address("127.0.0.1"), 128)])
    desired = place.backend.render([sctp, idle, tcp], NodePlan(node_port_networks=loopback))
    rejected = place.backend.apply(diff(place.backend.read(), desired))
    assert set(diff(place.backend.read(), desired).puts) == set(rejected)
    assert set(rejected) == {Listen(Family.IPV4, each.frontend) for each in sctp.frontends}
    reaches("10.96.0.1", 443, web)


def test_an_external_ip_that_is_an_endpoint_of_its_service_is_not_relayed(
    place: Place, addresses: Addresses
) -> None:
    """The relay would connect to itself. The endpoint is a host process, such as an ingress controller."""
    own = plan((addresses.node, 443), at=[(addresses.node, 443)])
    external = tuple(each._replace(kind=FrontendKind.EXTERNAL_IP) for each in own.frontends)
    with host_process(addresses.any) as (web, _):
        place.serve(dataclasses.replace(own, frontends=external))
        reaches(addresses.node, 443, web)
        assert not place.backend.relays.counters().events


@pytest.mark.parametrize("settings", [UserspaceSettings(relays=1)])
def test_a_frontend_whose_other_port_is_in_use_is_rejected_and_tried_again(
    place: Place, addresses: Addresses
) -> None:
    services = served(place, addresses)
    desired = place.backend.render(services.plans, NodePlan())
    taken = other_port(443)
    with opened(addresses.any, socket.SOCK_STREAM) as process:
        process.bind((addresses.any, taken))
        process.listen()
        rejected = place.backend.apply(diff(place.backend.read(), desired))
        host = f"[{addresses.service}]" if ":" in addresses.service else addresses.service
        assert [failure.message for failure in rejected.values()] == [
            f"cannot listen at {host}:{taken}: Address already in use"
        ]
        is_rejected(addresses.service, 443, socket.SOCK_STREAM)  # not answered by the process
        assert set(diff(place.backend.read(), desired).puts) == set(rejected)
    assert not place.backend.apply(diff(place.backend.read(), desired))
    reaches(addresses.service, 443, services.web)


def test_the_families_are_those_of_the_kernel(place: Place) -> None:
    """So the other tests do not pass without redirects."""
    listening = place.backend.render([plan(("127.0.0.1", 9))], None)
    assert {each.port for key, each in listening.items() if isinstance(key, Listen)} == {other_port(80)}  # type: ignore[union-attr]
    assert Family.IPV6 in place.backend._redirects.families
