"""Packets larger than the path MTU: fragments, path MTU discovery, offloads, and tunnels."""

import contextlib
import os
from collections.abc import Iterator

import pytest

from ebpfproxy.lab import Netns, PodNetwork
from ebpfproxy.model.address import Protocol
from tests.kernel.clients import TCP, UDP, outcome
from tests.kernel.cluster import eventually
from tests.kernel.differences import DIFFERENCES
from tests.kernel.two_nodes import NARROW, PORTS, TwoNodes, echoed, name_and_client, route_mtu, streamed

pytestmark = pytest.mark.kernel

both_families = pytest.mark.parametrize("family", ["v4", "v6"])
both_ends = pytest.mark.parametrize("place", ["here", "there"])
STREAM = os.urandom(1 << 21)
DATAGRAM = os.urandom(6000)


def node_port(pair: TwoNodes, family: str, place: str) -> tuple[str, int]:
    """Address and port of a NodePort on the first node. The endpoint is on the first node ("here") or on the
    second."""
    web = pair.everywhere().to(pair.a if place == "here" else pair.d)
    return getattr(pair.node, family), web.node_port


@both_ends
@both_families
def test_a_datagram_of_several_fragments_is_echoed_completely(
    two_nodes: TwoNodes, family: str, place: str
) -> None:
    """Regression: cilium #8185, where only the first fragment found the Service."""
    address, port = node_port(two_nodes, family, place)
    assert echoed(two_nodes.x, address, port, DATAGRAM) == DATAGRAM


@pytest.mark.ways("ebpf-off")
@both_ends
@both_families
def test_a_pods_datagram_of_several_fragments_is_echoed_completely(
    two_nodes: TwoNodes, family: str, place: str
) -> None:
    web = two_nodes.everywhere().to(two_nodes.a if place == "here" else two_nodes.d)
    for client in (two_nodes.p, two_nodes.node):
        assert echoed(client, web.address(family), PORTS[UDP], DATAGRAM) == DATAGRAM


def learned(pair: TwoNodes) -> int:
    """The path MTU that clients and endpoints learn of a narrow path on the other side of the node. A relay
    has a connection to each side, and only the node learns it."""
    return 0 if DIFFERENCES[pair.mode].by_relay else NARROW


@both_families
def test_path_mtu_discovery_works_to_an_endpoint_on_another_node(two_nodes: TwoNodes, family: str) -> None:
    """Regression: cilium #47755, where the packet that an ICMP error quotes was not translated.

    The router's error quotes the translated packet to the second node, and is sent to the first one.
    """
    address, port = node_port(two_nodes, family, "there")
    with two_nodes.narrow_to_second_node():
        assert streamed(two_nodes.x, address, port, STREAM) == STREAM
        assert route_mtu(two_nodes.x, address) == learned(two_nodes)


@both_families
def test_path_mtu_discovery_works_to_an_endpoint_on_this_node(two_nodes: TwoNodes, family: str) -> None:
    """The node's own stack sends the error, about a packet of which only the destination is translated."""
    address, port = node_port(two_nodes, family, "here")
    with two_nodes.narrow_to(two_nodes.a):
        assert streamed(two_nodes.x, address, port, STREAM) == STREAM
        assert route_mtu(two_nodes.x, address) == learned(two_nodes)


@both_ends
@both_families
def test_path_mtu_discovery_works_from_an_endpoint_to_an_external_client(
    two_nodes: TwoNodes, family: str, place: str
) -> None:
    address, port = node_port(two_nodes, family, place)
    endpoint, client = {  # the address at which the endpoint sees the client
        "here": (two_nodes.a, two_nodes.seen_here(two_nodes.x, family)),
        "there": (two_nodes.d, getattr(two_nodes.node, family)),
    }[place]
    with two_nodes.narrow_to_outside():
        assert streamed(two_nodes.x, address, port, STREAM) == STREAM
        assert route_mtu(endpoint, client) == learned(two_nodes)


@both_families
def test_path_mtu_discovery_works_from_an_external_ip_to_an_external_client(
    two_nodes: TwoNodes, family: str
) -> None:
    """In mode userspace, the error quotes the port of the frontend, at which the relay does not listen."""
    web = two_nodes.everywhere().to(two_nodes.a)
    address = web.external_ips[family == "v6"]
    route = f"{address} via {getattr(two_nodes.node, family)}"  # for the router's errors
    two_nodes.lab.ip(two_nodes.lab.router, f"route add {route}")
    with two_nodes.narrow_to_outside():
        assert streamed(two_nodes.x, address, PORTS[TCP], STREAM) == STREAM


@both_families
def test_a_datagram_above_the_path_mtu_is_lost_once_and_then_fragmented(
    two_nodes: TwoNodes, family: str
) -> None:
    address, port = node_port(two_nodes, family, "there")
    with two_nodes.narrow_to_second_node():
        assert echoed(two_nodes.x, address, port, DATAGRAM[:1440]) == DATAGRAM[:1440]
        assert route_mtu(two_nodes.x, address) == learned(two_nodes)


@contextlib.contextmanager
def offloads(pair: TwoNodes, kind: str) -> Iterator[None]:
    """On everywhere; off everywhere; or off on this node's uplink, which then completes the checksums and
    segments of other devices."""
    uplink: list[tuple[Netns, str]] = [(pair.node, "eth0")]
    devices = {"on": [], "off": list(pair.every_device()), "off-uplink": uplink}[kind]
    with pair.without_offloads(*devices):
        yield


@pytest.mark.parametrize(
    "kind",
    # The tests of path MTU discovery stream with offloads, too.
    [pytest.param("on", marks=pytest.mark.long), "off", "off-uplink"],
)
def test_streams_and_datagrams_arrive_with_and_without_offloads(two_nodes: TwoNodes, kind: str) -> None:
    before = two_nodes.bad_checksums()
    ways = [(family, place) for family in ("v4", "v6") for place in ("here", "there")]
    targets = [node_port(two_nodes, family, place) for family, place in ways]
    with offloads(two_nodes, kind):
        for address, port in targets:
            assert streamed(two_nodes.x, address, port, STREAM) == STREAM
            assert echoed(two_nodes.x, address, port, DATAGRAM) == DATAGRAM
            assert echoed(two_nodes.x, address, port, DATAGRAM[:99]) == DATAGRAM[:99]
    assert two_nodes.bad_checksums() == before


@pytest.mark.parametrize("tunnel", [PodNetwork.VXLAN, PodNetwork.USER, PodNetwork.IPIP], indirect=True)
@both_families
def test_endpoints_behind_a_tunnel_are_reachable_with_all_packet_sizes(
    two_nodes: TwoNodes, tunnel: PodNetwork, family: str
) -> None:
    """The tunnel device was created after the agent's start. It has the smallest MTU of all paths."""
    pair = two_nodes
    web = pair.everywhere().to(pair.d)
    address, port = getattr(pair.node, family), web.node_port
    own = pair.lab.addresses.tunnel(0)
    by_tunnel = family == "v4" or tunnel is not PodNetwork.IPIP
    seen = getattr(own, family) if by_tunnel else pair.node.v6
    # The agents learn of the device by an event.
    eventually(lambda: outcome(pair.x, TCP, address, port, 2.0) == f"d {seen}", "the tunnel is looked after")
    for protocol in (TCP, UDP):
        assert outcome(pair.x, protocol, address, port) == f"d {seen}"
        for client in (pair.p, pair.node):
            assert name_and_client(outcome(client, protocol, web.address(family), PORTS[protocol]))[0] == "d"
    assert streamed(pair.x, address, port, STREAM[: 1 << 19]) == STREAM[: 1 << 19]
    assert echoed(pair.x, address, port, DATAGRAM) == DATAGRAM
    assert 0 < route_mtu(pair.x, address) < 1500 or not by_tunnel or not learned(pair)
    flushed(pair)


def flushed(pair: TwoNodes) -> None:
    """Remove all cached path MTUs."""
    for netns in pair.all_netns:
        for family in ("-4", "-6"):
            netns.run(["ip", family, "route", "flush", "cache"])


@pytest.mark.ways("ebpf-off")
@both_families
def test_path_mtu_discovery_works_for_streams_of_pods_and_the_node_to_a_service(
    two_nodes: TwoNodes, family: str
) -> None:
    web = two_nodes.everywhere().to(two_nodes.d)
    with two_nodes.narrow_to_second_node():
        for client in (two_nodes.p, two_nodes.node):
            address = web.address(family)
            assert streamed(client, address, PORTS[Protocol.TCP], STREAM) == STREAM
            assert route_mtu(client, address) == NARROW
