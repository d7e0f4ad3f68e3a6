"""Processes of the node that are bound to an address that endpoints cannot reply to.

kube-proxy masquerades their packets, so they are answered. A socket that is redirected to the endpoint keeps
its source.
"""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.lab import sockets
from tests.kernel.clients import FAMILIES, SILENT, TCP, UDP, Dial, outcomes
from tests.kernel.cluster import eventually
from tests.kernel.two_nodes import PORTS, name_and_client
from tests.kernel.uplinks import NAMES, PROTOCOLS, Uplinks, endpoint

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.ways("ebpf-on", "ebpf-off", "ebpf-host", "nftables", "iptables"),
]

SOURCES = {
    "loopback": {"v4": "127.0.0.1", "v6": "::1"},
    "bridge": {"v4": "172.17.0.1", "v6": "fd00:172:17::1"},  # as docker0; the network has no route to it
}
ROUTE_LOCALNET = "net/ipv4/conf/all/route_localnet"
by_place = pytest.mark.parametrize("place", NAMES)


@contextlib.contextmanager
def bridge(uplinks: Uplinks) -> Iterator[None]:
    four, six = SOURCES["bridge"]["v4"], SOURCES["bridge"]["v6"]
    uplinks.lab.ip(
        uplinks.node,
        "link add br-test type bridge",
        f"addr add {four}/16 dev br-test",
        f"addr add {six}/64 dev br-test nodad",
        "link set br-test up",
    )
    try:
        yield
    finally:
        uplinks.lab.ip(uplinks.node, "link del br-test")


@by_place
@pytest.mark.parametrize("source", SOURCES)
def test_a_process_that_is_bound_to_an_address_without_replies_is_answered(
    uplinks: Uplinks, source: str, place: str
) -> None:
    web = uplinks.everywhere().to(endpoint(uplinks, place))
    dials = [
        Dial(protocol, address, PORTS[protocol], timeout=2, source=(SOURCES[source][family], 0))
        for family, address in (("v4", web.v4), ("v6", web.v6))
        for protocol in PROTOCOLS
        if SOURCES[source][family] != "::1"  # the kernel has no route from ::1 to another device
    ]

    def names() -> set[str]:
        return {name_and_client(answer)[0] for answer in outcomes(uplinks.node, dials)}

    # Without this setting, connect() from 127.0.0.1 fails in each mode. kube-proxy in mode iptables makes it.
    with bridge(uplinks), uplinks.sysctls(uplinks.node, {ROUTE_LOCALNET: "1"}):
        # The first packets to an endpoint on this node only cause programs to be attached to its device.
        eventually(lambda: names() == {NAMES[place]}, "all are answered")


@by_place
@pytest.mark.parametrize("family", FAMILIES)
def test_datagrams_of_an_unconnected_socket_that_is_bound_are_answered(
    uplinks: Uplinks, family: str, place: str
) -> None:
    web = uplinks.everywhere().to(endpoint(uplinks, place))
    frontend = (getattr(web, family), PORTS[UDP])

    def ask() -> tuple[str, str]:
        with socket.socket(FAMILIES[family], socket.SOCK_DGRAM) as client:
            client.settimeout(1)
            client.bind((SOURCES["bridge"][family], 0))
            client.sendto(b"?", frontend)
            try:
                answer, peer = client.recvfrom(1 << 16)
            except TimeoutError:
                return SILENT, ""
            return name_and_client(answer.decode())[0], peer[0]

    with bridge(uplinks):
        # The agent learns of the bridge's address a moment later.
        expected = NAMES[place], frontend[0]
        eventually(lambda: uplinks.node.call(ask) == expected, "it is answered")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_connected_datagram_socket_may_connect_again(uplinks: Uplinks, family: str) -> None:
    """connect() sets the socket's source address. That is no address that the process has bound."""
    first, second = uplinks.everywhere().to(uplinks.a), uplinks.everywhere().to(uplinks.d)
    frontends = [(getattr(each, family), PORTS[UDP]) for each in (first, second, first)]

    def ask() -> list[str]:
        with socket.socket(FAMILIES[family], socket.SOCK_DGRAM) as client:
            client.settimeout(sockets.ANSWERED)
            answers = []
            for frontend in frontends:
                client.connect(frontend)
                client.sendall(b"?")
                answers.append(name_and_client(client.recv(1 << 16).decode())[0])
            return answers

    assert uplinks.node.call(ask) == ["a", "d", "a"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_process_that_is_bound_to_the_nodes_address_reaches_a_node_port(
    uplinks: Uplinks, family: str
) -> None:
    """The packets of such a connection would take loopback."""
    web = uplinks.everywhere().to(uplinks.d)
    address = getattr(uplinks.node, family)
    dial = Dial(TCP, address, web.node_port, source=(address, 0))
    assert name_and_client(outcomes(uplinks.node, [dial])[0])[0] == "d"
