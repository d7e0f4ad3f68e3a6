"""Local routes of single addresses, in a real kernel."""

import socket
from collections.abc import Iterator

import pytest

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.netlink import local_addresses, local_routes
from ebpfproxy.linux.netns import netns
from ebpfproxy.model.address import Address, Network, format_address, parse_address
from tests.kernel.clients import family_of
from tests.kernel.loopback import add_addresses
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

V4, V6 = parse_address("10.96.0.1"), parse_address("fd00:10:96::1")
_IPV6_FREEBIND = 78


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


@pytest.mark.parametrize("address", [V4, V6], ids=["v4", "v6"])
def test_a_client_of_the_node_takes_no_port_at_the_address(place: Namespace, address: Address) -> None:
    """Until TIME_WAIT ends, a port of such a client is in use, and a relay could not listen at it."""
    netns.set_loopback_up()
    local_routes.change({address})
    with _listening(address, 80), socket.create_connection((format_address(address), 80), 10.0) as client:
        host, port, *_ = client.getsockname()
        _listening(address, port).close()
    assert host != format_address(address)


def _listening(address: Address, port: int) -> socket.socket:
    """A socket that listens with the options of the relays."""
    where = format_address(address)
    sock = socket.socket(family_of(where))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if address == V6:
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
    sock.bind((where, port))
    sock.listen()
    return sock


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
