"""`ebpfproxy dump` marks entries whose Service, frontend, slot or endpoint is gone."""

import contextlib
import struct
import time
from collections.abc import Iterator
from socket import IPPROTO_TCP, IPPROTO_UDP, htons

import pytest
from click.testing import CliRunner

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.inspect import tables
from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.cli.dump import command
from ebpfproxy.model.address import parse_address
from tests.support.bpf_place import BpfPlace, bpf_place, build_maps
from tests.support.flows import ENDPOINT, SERVICE, a_flow, reply_entries, write
from tests.support.service_maps import write_slot

pytestmark = pytest.mark.kernel

_SIZES = MapSizes(services=8, slots=16, endpoints=64, affinity=8, sockets=8, source_ranges=8)
_U32 = struct.Struct("=I")
_ADDRESS = parse_address("10.244.1.3")
_FRONTEND = parse_address("10.96.0.1")
_LISTED = abi.ENDPOINT_LISTED | abi.ENDPOINT_CLUSTER
_COOKIE = 4
_SECTIONS = "services", "endpoints", "ranges", "affinity", "sockets", "conntrack", "nat"
_SERVICE_KEY = abi.SERVICE_KEY.pack(_FRONTEND, htons(80), 6, 0)


@pytest.fixture
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture
def maps(place: BpfPlace) -> Iterator[Maps]:
    """The Service and endpoint of `a_flow`, and an entry of every kind that refers to them."""
    folder = build_maps(place, _SIZES, "programs-orphans")
    Pins(place.bpffs).set_current(folder.parent)
    with contextlib.closing(Maps(folder)) as opened:
        opened["service_names"].update(_U32.pack(SERVICE), abi.SERVICE_NAME.pack(b"default/web:http", 6, 4))
        span = abi.SLOT_RANGE.pack(0, 1)
        opened["services"].update(_SERVICE_KEY, abi.SERVICE.pack(span, span, SERVICE, 3600, 0, 1, 0, 0))
        write_slot(opened["slots"], 0, ENDPOINT)
        _list_endpoint(opened)
        now = time.monotonic_ns()
        client = abi.AFFINITY_KEY.pack(parse_address("192.0.2.9"), SERVICE, 0)
        opened["affinity"].update(client, abi.AFFINITY.pack(now, ENDPOINT, 0))
        peer = abi.SOCKET_PEER.pack(
            *(_COOKIE, _ADDRESS, htons(8080), IPPROTO_TCP, 0, SERVICE),
            *(_FRONTEND, htons(80), 0, ENDPOINT, 0),
        )
        opened["socket_peers"].update(_U32.pack(0), peer)
        datagrams = abi.SOCKET_FLOW_KEY.pack(9, _ADDRESS, htons(8080), IPPROTO_UDP, abi.TO_FRONTEND, 0)
        opened["socket_flows"].update(
            datagrams, abi.SOCKET_FLOW.pack(_FRONTEND, htons(80), 0, SERVICE, ENDPOINT)
        )
        source = abi.SOURCE_RANGE_KEY.pack(32 + 120, SERVICE, parse_address("203.0.113.0"))
        opened["source_ranges"].update(source, _U32.pack(1))
        write(opened, a_flow(1, last_seen=now))
        yield opened


def _list_endpoint(maps: Maps, flags: int = _LISTED, address: str = "10.244.1.3") -> None:
    packed = parse_address(address), htons(8080), flags, SERVICE
    maps["endpoints"].update(_U32.pack(ENDPOINT), abi.ENDPOINT.pack(*packed))


def _marks(place: BpfPlace) -> dict[str, list[str]]:
    """The marks of all entries, by section."""
    with contextlib.closing(View(place.bpffs)) as view:
        return {name: [row.orphaned for row in getattr(view, name)()] for name in _SECTIONS}


def _orphaned(place: BpfPlace) -> dict[str, list[str]]:
    """The marks of each section that has any."""
    return {name: marks for name, marks in _marks(place).items() if any(marks)}


def test_entries_in_use_are_not_orphaned(maps: Maps, place: BpfPlace) -> None:
    marks = _marks(place)
    assert all(marks.values())
    assert not any(mark for each in marks.values() for mark in each)


def test_what_refers_to_a_removed_endpoint_is_orphaned(maps: Maps, place: BpfPlace) -> None:
    _list_endpoint(maps, flags=0)
    gone = tables.ENDPOINT_GONE
    assert _orphaned(place) == {
        "affinity": [gone],
        "sockets": [gone, gone],
        "conntrack": [gone],
        "nat": [gone, gone],
    }


def test_a_flow_to_the_previous_address_of_an_endpoint_id_is_orphaned(maps: Maps, place: BpfPlace) -> None:
    _list_endpoint(maps, address="10.244.1.4")
    assert _orphaned(place).keys() == {"sockets", "conntrack", "nat"}  # an affinity has only the id


def test_what_refers_to_a_removed_service_is_orphaned(maps: Maps, place: BpfPlace) -> None:
    maps["services"].delete(_SERVICE_KEY)
    maps["service_names"].delete(_U32.pack(SERVICE))
    gone = tables.SERVICE_GONE
    assert _orphaned(place) == {
        "endpoints": [tables.NO_FRONTEND],
        "ranges": [gone],
        "affinity": [gone],
        "sockets": [gone, gone],
        "conntrack": [gone],
        "nat": [gone, gone],
    }


def test_a_frontend_whose_service_has_no_name_is_orphaned(maps: Maps, place: BpfPlace) -> None:
    maps["service_names"].delete(_U32.pack(SERVICE))
    assert _orphaned(place)["services"] == [tables.SERVICE_GONE]


def test_an_endpoint_in_no_slot_is_orphaned(maps: Maps, place: BpfPlace) -> None:
    write_slot(maps["slots"], 0, ENDPOINT + 1)
    assert _orphaned(place) == {"endpoints": [tables.IN_NO_SLOT]}


@pytest.mark.parametrize("flags", [abi.ENDPOINT_LISTED, abi.ENDPOINT_LISTED | abi.ENDPOINT_LOCAL])
def test_an_endpoint_for_no_list_of_its_frontends_is_not_orphaned(
    maps: Maps, place: BpfPlace, flags: int
) -> None:
    """It is draining, or all frontends use the other list."""
    write_slot(maps["slots"], 0, ENDPOINT + 1)
    _list_endpoint(maps, flags)
    assert _orphaned(place) == {}


def test_a_socket_that_waits_for_an_endpoint_is_not_orphaned(maps: Maps, place: BpfPlace) -> None:
    peer = abi.SOCKET_PEER.pack(
        *(_COOKIE, _FRONTEND, htons(80), IPPROTO_UDP, 0, SERVICE),
        *(_FRONTEND, htons(80), 0, abi.NO_ENDPOINT, 0),
    )
    maps["socket_peers"].update(_U32.pack(0), peer)
    assert _orphaned(place) == {}


def test_a_reply_entry_without_its_flow_is_orphaned_only_with_its_service(
    maps: Maps, place: BpfPlace
) -> None:
    """It has no endpoint id."""
    for key, _ in list(maps["flows"].items()):
        maps["flows"].delete(key)
    assert reply_entries(a_flow(1)).keys() == {key for key, _ in maps["replies"].items()}
    assert _orphaned(place) == {}
    maps["service_names"].delete(_U32.pack(SERVICE))
    assert _orphaned(place)["nat"] == [tables.SERVICE_GONE]


def test_a_table_has_the_column_orphaned_only_if_an_entry_is(maps: Maps, place: BpfPlace) -> None:
    def shown() -> str:
        arguments = ["conntrack", f"--bpffs-root={place.bpffs}"]
        return CliRunner().invoke(command, arguments, catch_exceptions=False).output

    assert "ORPHANED" not in shown()
    _list_endpoint(maps, flags=0)
    assert "ORPHANED" in shown()
    assert tables.ENDPOINT_GONE in shown()
