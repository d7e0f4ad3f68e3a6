"""The view of pinned maps with unusual content, and of maps that are replaced while they are opened."""

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from socket import htons

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.inspect import tables
from ebpfproxy.backends.ebpf.inspect.tables import View
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes, slots_in
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.errors import NotFound
from ebpfproxy.model.address import parse_address
from tests.support.bpf_place import BpfPlace, bpf_place, build_maps
from tests.support.service_maps import write_slot

pytestmark = pytest.mark.kernel

_SIZES = MapSizes(services=8, slots=16, endpoints=8, affinity=8, sockets=8)
_U32 = struct.Struct("=I")
_HTTP = htons(80)


@pytest.fixture
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


def hook_in(place: BpfPlace, name: str) -> Path:
    """Create maps in a folder with that name, and make it the current one."""
    folder = build_maps(place, _SIZES, name)
    Pins(place.bpffs).set_current(folder.parent)
    return folder


@pytest.mark.parametrize(
    ("first", "count", "seen"), [(0, 2, 2), (14, 2, 2), (14, 4, 2), (0xFFFFFFF0, 0xFFFFFFFF, 0)]
)
def test_a_service_whose_range_exceeds_the_slots_is_shown_with_a_flag(
    place: BpfPlace, first: int, count: int, seen: int
) -> None:
    with contextlib.closing(Maps(hook_in(place, "programs-odd"))) as maps:
        span = abi.SLOT_RANGE.pack(first, count)
        address = parse_address("10.96.0.1")
        key = abi.SERVICE_KEY.pack(address, _HTTP, 6, 0)
        maps["services"].update(key, abi.SERVICE.pack(span, span, 1, 0, 0, 1, 0, 0))
        for slot in range(slots_in(maps["slots"])):
            write_slot(maps["slots"], slot, slot)
    with contextlib.closing(View(place.bpffs)) as opened:
        (row,) = opened.services()
    assert (len(row.internal), len(row.external)) == (seen, seen)
    assert row.flags == (["beyond-slots"] if seen < count else [])


def test_sockets_are_sorted(place: BpfPlace) -> None:
    names = [f"10.96.0.{number}" for number in range(1, 7)]
    endpoint = parse_address("10.244.0.1")
    with contextlib.closing(Maps(hook_in(place, "programs-sockets"))) as maps:
        for index, name in enumerate(reversed(names)):
            key = abi.SOCKET_FLOW_KEY.pack(7, endpoint, index + 1, 17, abi.TO_FRONTEND, 0)
            maps["socket_flows"].update(key, abi.SOCKET_FLOW.pack(parse_address(name), _HTTP, 0, 1, 1))
    with contextlib.closing(View(place.bpffs)) as opened:
        assert [row.frontend for row in opened.sockets()] == [f"{name}:80" for name in names]


def test_endpoints_show_where_tunneled_packets_go(place: BpfPlace) -> None:
    flags = abi.ENDPOINT_LISTED | abi.ENDPOINT_CLUSTER
    addresses = [parse_address(f"10.244.0.{number}") for number in (1, 2, 3)]
    with contextlib.closing(Maps(hook_in(place, "programs-tunnels"))) as maps:
        for id_, address in enumerate(addresses, 1):
            maps["endpoints"].update(_U32.pack(id_), abi.ENDPOINT.pack(address, _HTTP, flags, 1))
        maps["tunnels"].update(_U32.pack(1), abi.TUNNEL.pack(parse_address("2001:db8::20")))
        maps["tunnel_endpoints"].update(abi.TUNNEL_ENDPOINT.pack(addresses[1], _HTTP, 0, 1), _U32.pack(2))
    with contextlib.closing(View(place.bpffs)) as opened:
        assert [row.tunnel for row in opened.endpoints()] == ["2001:db8::20", "here", ""]


def test_maps_that_are_replaced_while_they_are_opened_are_opened_again(
    place: BpfPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook_in(place, "programs-new")
    fresh = Pins(place.bpffs).hooked_in()
    known = iter([place.bpffs / "programs-old", fresh])
    monkeypatch.setattr(Pins, "hooked_in", lambda pins: next(known))
    with contextlib.closing(tables.View(place.bpffs)) as opened:
        assert opened.services() == []


def test_missing_maps_are_named_with_a_hint(place: BpfPlace) -> None:
    folder = hook_in(place, "programs-torn")
    (folder / "slots").unlink()
    with pytest.raises(NotFound, match="slots") as caught:
        View(place.bpffs)
    assert "start the agent" in caught.value.hint
