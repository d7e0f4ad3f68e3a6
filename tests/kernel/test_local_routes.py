"""Local routes of single addresses, in a real kernel."""

import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import local_addresses, local_routes
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Network, parse_address
from tests.kernel.loopback import add_addresses
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

V4, V6 = parse_address("10.96.0.1"), parse_address("fd00:10:96::1")


@pytest.fixture
def place() -> Iterator[Namespace]:
    with namespace("routes") as made, made.entered():
        yield made


def test_routes_are_added_read_and_removed(place: Namespace) -> None:
    netns.set_loopback_up()
    assert local_routes.read() == frozenset()
    assert not local_routes.change({V4, V6})
    assert not local_routes.change({V4})  # it exists already
    assert local_routes.read() == {V4, V6}
    with socket.create_server(("10.96.0.1", 80)):
        socket.create_connection(("10.96.0.1", 80), 10.0).close()
    assert not local_routes.change((), {V4, parse_address("10.96.0.9")})  # one is missing already
    assert local_routes.read() == {V6}


def test_an_address_of_the_node_stays_local_when_the_route_is_removed(place: Namespace) -> None:
    add_addresses("192.0.2.1", "2001:db8::1")
    own = {parse_address("192.0.2.1"), parse_address("2001:db8::1")}
    networks = {Network(each, 128) for each in own}
    assert not local_routes.change(own)
    assert local_routes.read() == own
    assert not local_routes.change((), own)
    assert networks <= local_addresses.read()


def test_they_do_not_count_as_addresses_of_the_node(place: Namespace) -> None:
    netns.set_loopback_up()
    before = local_addresses.read()
    local_routes.change({V4, V6})
    assert local_addresses.read() == before


def test_routes_of_other_programs_are_neither_read_nor_removed(place: Namespace) -> None:
    netns.set_loopback_up()
    place.ip("route add local 10.96.0.1 dev lo table local metric 1024")
    assert local_routes.read() == frozenset()
    assert not local_routes.change((), {V4})
    assert Network(V4, 128) in local_addresses.read()


def test_without_loopback_an_ipv6_address_is_rejected_with_the_remedy(place: Namespace) -> None:
    (failure,) = local_routes.change({V6}).values()
    assert isinstance(failure, Rejected)
    assert (failure.message, failure.hint) == (
        "cannot add the local route of fd00:10:96::1: loopback is down",
        "ip link set lo up",
    )
