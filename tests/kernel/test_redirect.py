"""External clients with --ebpf-redirect: their packets bypass the node's stack, to pods on both nodes."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.lab import Lab, PodNetwork, sockets
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import SILENT, TCP, UDP, outcome
from tests.kernel.cluster import TCP_TARGET
from tests.kernel.two_nodes import NARROW, TwoNodes, echoed, name_and_client, route_mtu, streamed

pytestmark = pytest.mark.kernel

families = pytest.mark.parametrize("family", ["v4", "v6"])
protocols = pytest.mark.parametrize("protocol", [TCP, UDP], ids=["tcp", "udp"])
places = pytest.mark.parametrize("place", ["here", "there"])
REFUSING = (
    "add table inet forwards; "
    "add chain inet forwards refused { type filter hook forward priority 0; policy drop; }"
)
STREAM = os.urandom(1 << 21)
DATAGRAM = os.urandom(6000)


@pytest.fixture(scope="module")
def pair() -> Iterator[TwoNodes]:
    """Both agents have the option."""
    with Lab("test-redirect", 67, PodNetwork.ROUTED) as lab, TwoNodes(lab) as made:
        made.start("--ebpf-redirect")
        made.await_second()
        yield made


@contextlib.contextmanager
def nothing_forwarded(pair: TwoNodes) -> Iterator[None]:
    """Within the block the node's own stack forwards no packet."""
    pair.node.run(["nft", REFUSING])
    try:
        yield
    finally:
        pair.node.run(["nft", "delete table inet forwards"])


@families
@protocols
@places
def test_requests_and_replies_bypass_the_nodes_stack(
    pair: TwoNodes, family: str, protocol: Protocol, place: str
) -> None:
    web = pair.everywhere().to(pair.a if place == "here" else pair.d)
    address, port = web.frontend("NodePort", family, protocol)
    with nothing_forwarded(pair):
        found = name_and_client(outcome(pair.x, protocol, address, port, 3.0))[0]
    assert found == ("a" if place == "here" else "d")


@families
def test_the_nft_rule_of_these_tests_drops_forwarded_packets(pair: TwoNodes, family: str) -> None:
    """The client connects to a pod directly."""
    address = getattr(pair.a, family)
    assert name_and_client(outcome(pair.x, TCP, address, TCP_TARGET, 3.0))[0] == "a"
    with nothing_forwarded(pair):
        assert outcome(pair.x, TCP, address, TCP_TARGET, 0.3) == SILENT


@families
def test_a_local_endpoint_sees_the_client_with_policy_local(pair: TwoNodes, family: str) -> None:
    web = pair.everywhere(externalTrafficPolicy="Local").to(pair.a)
    found = outcome(pair.x, TCP, *web.frontend("NodePort", family, TCP), sockets.ANSWERED)
    assert name_and_client(found) == ("a", getattr(pair.x, family))


@families
@places
def test_a_large_stream_is_echoed_completely(pair: TwoNodes, family: str, place: str) -> None:
    """The packets are as large as the devices accept, and the devices segment them."""
    web = pair.everywhere().to(pair.a if place == "here" else pair.d)
    with nothing_forwarded(pair):
        assert streamed(pair.x, *web.frontend("NodePort", family, TCP), STREAM) == STREAM


@families
@places
def test_fragmented_datagrams_are_echoed_completely(pair: TwoNodes, family: str, place: str) -> None:
    """Fragments pass the node's stack."""
    web = pair.everywhere().to(pair.a if place == "here" else pair.d)
    address, port = web.frontend("NodePort", family, UDP)
    assert echoed(pair.x, address, port, DATAGRAM) == DATAGRAM


@families
def test_path_mtu_discovery_works_from_the_pod_to_the_client(pair: TwoNodes, family: str) -> None:
    """The router sends its error to the frontend address, and the node translates it for the endpoint."""
    web = pair.everywhere(externalTrafficPolicy="Local").to(pair.a)
    address, port = web.frontend("NodePort", family, TCP)
    with pair.narrow_to_outside():
        assert streamed(pair.x, address, port, STREAM) == STREAM
        assert route_mtu(pair.a, getattr(pair.x, family)) == NARROW


@families
def test_path_mtu_discovery_works_from_the_client_to_the_pod(pair: TwoNodes, family: str) -> None:
    web = pair.everywhere().to(pair.a)
    address, port = web.frontend("NodePort", family, TCP)
    with pair.narrow_to(pair.a):
        assert streamed(pair.x, address, port, STREAM) == STREAM


@families
@places
def test_connections_survive_a_restart_without_and_with_the_option(
    pair: TwoNodes, family: str, place: str
) -> None:
    """Connections that began with the option work without it, and the reverse."""
    web = pair.everywhere().to(pair.a if place == "here" else pair.d)
    address, port = web.frontend("NodePort", family, TCP)

    def opened() -> socket.socket:
        with netns.entered(pair.x.netns):
            return sockets.dial(TCP, address, port, sockets.ANSWERED)

    def works(client: socket.socket) -> bool:
        return sockets.exchange(client, b"again") == b"again"

    first = opened()
    assert works(first)
    try:
        pair.restart()
        assert works(first)
        second = opened()
        assert works(second)
    finally:
        pair.restart("--ebpf-redirect")
    assert works(first)
    assert works(second)
    first.close()
    second.close()


def test_pod_devices_have_programs(pair: TwoNodes) -> None:
    """These programs let replies bypass the stack."""
    with contextlib.closing(View(pair.lab.bpffs)) as view:
        rows = pair.node.call(lambda: list(view.devices()))
    assert pair.a.device in {row.device for row in rows if row.role == "pod"}
