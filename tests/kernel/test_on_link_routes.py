"""On-link routes and the routes of on-link frontends, in a real kernel."""

from collections.abc import Iterator

import pytest

from ebpfproxy.linux.netlink import links, on_link_routes, routing
from ebpfproxy.linux.netlink.on_link_routes import Path, Target
from ebpfproxy.model.address import format_network, parse_address
from tests.support.namespace import Namespace, namespace

pytestmark = pytest.mark.kernel

MAIN, OTHER = 254, 1000
V4, V6, SOURCE = map(parse_address, ("192.0.2.50", "2001:db8::50", "192.0.2.1"))


@pytest.fixture
def place() -> Iterator[Namespace]:
    with namespace("onlink") as made, made.entered():
        made.ip(
            "link add n0 type veth peer name n1",
            "link set n0 up",
            "link set n1 up",
            "addr add 192.0.2.1/24 dev n0",
            "addr add 2001:db8::1/64 dev n0 nodad",
            "route add 198.51.100.0/24 dev n0 table 1000",
            "route add 203.0.113.0/24 via 192.0.2.9",
        )
        yield made


def ifindex() -> int:
    return next(each.ifindex for each in links.read() if each.name == "n0")


def test_the_on_link_routes_of_a_device_are_read(place: Namespace) -> None:
    (device,) = (each for each in links.read() if each.name == "n0")
    assert [(each.table, format_network(each.network)) for each in device.on_link] == [
        (MAIN, "192.0.2.0/24"),
        (MAIN, "2001:db8::/64"),
        (OTHER, "198.51.100.0/24"),
    ]
    assert device.on_link[0].source == SOURCE


def test_routes_are_put_with_their_gateways_and_removed(place: Namespace) -> None:
    n0, before = ifindex(), links.read()
    wanted = {
        Target(MAIN, V4): Path(n0, SOURCE),
        Target(OTHER, V4): Path(n0, None),
        Target(MAIN, V6): Path(n0, None),
    }
    assert not on_link_routes.put(dict.fromkeys(wanted, Path(n0, None)))
    assert not on_link_routes.put(wanted)
    assert on_link_routes.read() == wanted
    assert links.read() == before  # they are not on-link routes themselves
    place.ip("neighbor del 192.0.0.8 dev n0")
    assert on_link_routes.read().keys() == {Target(MAIN, V6)}
    assert not on_link_routes.put(wanted)
    assert not on_link_routes.remove([Target(OTHER, V4), Target(OTHER, V6)])
    assert on_link_routes.read().keys() == {Target(MAIN, V4), Target(MAIN, V6)}
    assert on_link_routes.remove_all(dry_run=True) == 2
    assert on_link_routes.remove_all() == 2
    assert on_link_routes.read() == {}
    assert not on_link_routes._gateways()


def test_a_route_of_another_program_to_the_same_address_has_precedence(place: Namespace) -> None:
    place.ip("addr add 192.0.2.3/24 dev n0", "route add 192.0.2.50 via 192.0.2.9 metric 100 src 192.0.2.3")
    assert not on_link_routes.put({Target(MAIN, V4): Path(ifindex(), SOURCE)})
    assert routing.route_to(V4).source == parse_address("192.0.2.3")
    assert on_link_routes.remove_all() == 1
    assert routing.route_to(V4).source == parse_address("192.0.2.3")


def test_a_device_that_is_down_rejects_routes(place: Namespace) -> None:
    n0 = ifindex()
    place.ip("link set n0 down")
    assert on_link_routes.put({Target(MAIN, V4): Path(n0, None)}).keys() == {Target(MAIN, V4)}
    assert on_link_routes.read() == {}
