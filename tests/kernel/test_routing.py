"""Route lookups by the kernel in a network namespace with two devices."""

import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.linux import sysctl
from ebpfproxy.linux.netlink import routing
from ebpfproxy.model.address import parse_address
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

CLIENT, OWN, UNKNOWN = map(parse_address, ("192.0.2.1", "198.51.100.2", "203.0.113.1"))


@pytest.fixture
def node() -> Iterator[Namespace]:
    """The route to the client's network is by n0. n1 has an address of the host."""
    with namespace("routing") as made:
        made.ip("link add n0 type veth peer name p0", "link add n1 type veth peer name p1")
        made.ip(*(f"link set {device} up" for device in ("lo", "n0", "p0", "n1", "p1")))
        made.ip("addr add 198.51.100.2/32 dev n1", "route add 192.0.2.0/24 dev n0")
        with made.entered():
            yield made


def set_filter(value: str) -> None:
    """Set it for `all`, too: the larger one of both values applies."""
    for device in ("all", "n0", "n1"):
        sysctl.ensure(f"net/ipv4/conf/{device}/rp_filter", value)


def test_the_device_of_a_route_is_found(node: Namespace) -> None:
    assert routing.route_to(CLIENT).ifindex == socket.if_nametoindex("n0")
    assert routing.route_to(UNKNOWN) == routing.Route(0, None)


def test_the_gateway_of_a_route_is_found(node: Namespace) -> None:
    node.ip(
        "route add 203.0.113.0/24 via 192.0.2.1",
        "addr add 2001:db8:1::2/64 dev n0 nodad",
        "route add 2001:db8:2::/64 via 2001:db8:1::1",
        "route add 10.0.0.0/24 via inet6 2001:db8:1::1 dev n0",
    )
    expected = {
        "192.0.2.1": False,
        "203.0.113.1": True,
        "10.0.0.1": True,
        "2001:db8:1::1": False,
        "2001:db8:2::1": True,
    }
    found = {each: routing.route_to(parse_address(each)).has_gateway for each in expected}
    assert found == expected


@pytest.mark.parametrize(("value", "accepted"), [("0", True), ("1", False), ("2", True)])
def test_whether_the_reverse_path_filter_accepts_a_packet_is_predicted(
    node: Namespace, value: str, accepted: bool
) -> None:
    set_filter(value)
    assert routing.accepts(socket.if_nametoindex("n1"), CLIENT, OWN) is accepted
    assert routing.accepts(socket.if_nametoindex("n0"), CLIENT, OWN)
