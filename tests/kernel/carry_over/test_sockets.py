"""What one layout remembers of sockets, copied into another: maps of two sizes, and no programs."""

import contextlib
import itertools
import logging
import shutil

import pytest

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.carry_over import CarryOver
from ebpfproxy.dataplanes.ebpf.entries import ServicePortKey
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.model.address import Family
from tests.kernel.carry_over.layouts import (
    CLIENT,
    DNS,
    OTHER,
    TCP,
    TWO,
    U32,
    U64,
    UDP,
    Both,
    Layout,
    datagrams,
    peer,
    service,
)
from tests.kernel.service_table.samples import endpoint, entry, frontend
from tests.support.bpf_place import ARRAY, MMAPABLE, BpfPlace, build_maps, create_map
from tests.support.system_calls import counted

pytestmark = pytest.mark.kernel


def test_a_connected_socket_gets_the_present_ids(both: Both) -> None:
    both.former.connect(1000, both.former.ids())
    both.former.connect(1001, both.former.ids(TWO), TWO, TCP)
    assert both.carry() == 2
    assert both.present.peers() == {
        1000: peer(1000, both.present.ids()),
        1001: peer(1001, both.present.ids(TWO), TWO, TCP),
    }


def test_the_former_maps_stay_as_they_were(both: Both) -> None:
    per_cpu = "counters", "traffic"

    def held() -> list[list[tuple[bytes, bytes]]]:
        return [sorted(map_.items()) for map_ in both.former.maps if map_.name not in per_cpu]

    both.former.connect(1000, both.former.ids())
    both.former.send(1001, both.former.ids())
    both.former.stick(both.former.ids())
    before = held()
    assert both.carry() == 4
    assert held() == before


def test_an_endpoint_that_is_gone_counts_as_stale(both: Both) -> None:
    ids = both.former.ids()[0], 63
    both.former.connect(1000, ids, OTHER)
    both.former.send(1001, ids, OTHER)
    both.carry()
    stale = both.present.ids()[0], 0
    assert both.present.peers() == {1000: peer(1000, stale, OTHER)}
    assert both.present.datagrams() == dict(datagrams(1001, stale, OTHER))
    (first, *_) = (value for _, value in sorted(both.present.maps["endpoints"].items()))
    assert abi.ENDPOINT.unpack(first)[2] & abi.ENDPOINT_LISTED == 0, "0 must be in force nowhere"


@pytest.mark.parametrize("unnamed", [False, True])
def test_a_service_that_is_gone_counts_as_stale(both: Both, unnamed: bool) -> None:
    """Gone in the present layout, or before that in the former one."""
    ids = (60, 63) if unnamed else both.former.ids()
    both.present.serve({} if not unnamed else {DNS: service("10.1.0.1")})
    both.former.connect(1000, ids)
    both.former.send(1001, ids)
    both.former.stick(ids)
    both.carry()
    assert both.present.peers() == {1000: peer(1000, (0, 0))}
    assert both.present.datagrams() == dict(datagrams(1001, (0, 0)))
    assert both.present.affinity() == {}


def test_an_unconnected_socket_gets_the_present_ids(both: Both) -> None:
    both.former.send(1000, both.former.ids(TWO), TWO)
    assert both.carry() == 2
    assert both.present.datagrams() == dict(datagrams(1000, both.present.ids(TWO), TWO))


def test_a_client_keeps_its_endpoint(both: Both) -> None:
    both.former.stick(both.former.ids(TWO), 99)
    assert both.carry() == 1
    service_id, endpoint_id = both.present.ids(TWO)
    assert both.present.affinity() == {(CLIENT, service_id): (99, endpoint_id)}


def test_a_client_whose_endpoint_is_gone_is_forgotten(both: Both) -> None:
    both.present.serve({DNS: service("10.1.0.1")})
    both.former.stick(both.former.ids(TWO))
    assert both.carry() == 0
    assert both.present.affinity() == {}


def test_a_service_without_affinity_now_gets_none(both: Both) -> None:
    """Were it turned on again soon, the old entries would come back."""
    both.present.serve({DNS: service("10.1.0.1", "10.1.0.2", affinity=0)})
    both.former.stick(both.former.ids())
    assert both.carry() == 0
    assert both.present.affinity() == {}


def test_what_the_programs_wrote_already_stays(both: Both) -> None:
    newer = both.present.ids(TWO)
    both.present.connect(1000, newer, TWO, way=3)
    both.present.send(1001, newer, TWO)
    both.present.stick(newer, 500)
    both.former.connect(1000, both.former.ids())
    both.former.send(1001, both.former.ids())
    both.former.stick(both.former.ids(), 400)
    both.carry()
    assert both.present.peers() == {1000: peer(1000, newer, TWO)}
    theirs = dict(datagrams(1001, both.present.ids()))  # another endpoint's way back is another key
    assert both.present.datagrams() == theirs | dict(datagrams(1001, newer, TWO))
    assert both.present.affinity() == {(CLIENT, newer[0]): (500, newer[1])}


def test_twice_is_as_once(both: Both) -> None:
    both.former.connect(1000, both.former.ids())
    both.former.send(1001, both.former.ids())
    both.former.stick(both.former.ids())
    present = both.present
    with both.carrying() as carry_over:
        assert carry_over.copy() == 4
        once = present.peers(), present.datagrams(), present.affinity()
        assert carry_over.copy() == 0
    assert both.carry() == 0
    assert (present.peers(), present.datagrams(), present.affinity()) == once


def test_what_happened_between_the_two_copies(both: Both) -> None:
    """Sockets connect, connect elsewhere and are closed while the hooks are switched."""
    here, there = both.former.ids(), both.former.ids(TWO)
    for cookie in (1000, 1001, 1002):
        both.former.connect(cookie, here)
    with both.carrying() as carry_over:
        carry_over.copy()
        both.former.connect(1000, there, TWO)  # elsewhere
        both.former.forget(1001)
        both.former.connect(1003, here)
        both.former.send(1004, here)
        both.present.forget(1002)  # closed when the present programs were hooked in
        assert carry_over.copy() == 4
    here, there = both.present.ids(), both.present.ids(TWO)
    assert both.present.peers() == {1000: peer(1000, there, TWO), 1003: peer(1003, here)}
    assert both.present.datagrams() == dict(datagrams(1004, here))


def test_a_socket_that_connects_anew_through_the_present_programs(both: Both) -> None:
    """Even where the former ones saw it do so before."""
    both.former.connect(1000, both.former.ids())
    with both.carrying() as carry_over:
        carry_over.copy()
        both.former.connect(1000, (60, 63), OTHER)
        both.present.connect(1000, both.present.ids(TWO), TWO)
        carry_over.copy()
    assert both.present.peers() == {1000: peer(1000, both.present.ids(TWO), TWO)}


def test_what_went_between_the_two_copies_does_not_come_back(both: Both) -> None:
    """The present programs forget a flow where a socket asks an endpoint itself."""
    both.former.send(1000, both.former.ids())
    with both.carrying() as carry_over:
        carry_over.copy()
        back = datagrams(1000, both.present.ids())[1][0]
        both.present.maps["socket_flows"].delete(back)
        assert carry_over.copy() == 0
    assert back not in both.present.datagrams()


def test_a_smaller_array_keeps_udp_before_tcp(both: Both) -> None:
    """It has room for 24: 24 of TCP come, then 24 of UDP. Of UDP sockets stale ones have to be found."""
    former, size = both.former, both.present.maps["socket_peers"].shape.max_entries
    for cookie in range(1000, 1000 + size):
        former.connect(cookie, former.ids(), protocol=TCP)
    with both.carrying() as carry_over:
        assert carry_over.copy() == size
        for cookie in range(1000 + size, 1000 + 2 * size):
            former.connect(cookie, former.ids())
        assert carry_over.copy() == size
    assert both.present.peers().keys() == set(range(1000 + size, 1000 + 2 * size))


def test_a_tcp_socket_never_makes_room_for_another(both: Both) -> None:
    size = both.present.maps["socket_peers"].shape.max_entries
    for cookie in range(size):
        both.present.connect(5000 + cookie, both.present.ids(), protocol=TCP)
    before = both.present.peers()
    both.former.connect(1000, both.former.ids(), protocol=TCP)
    assert both.carry() == 0
    assert both.present.peers() == before
    both.former.connect(1001, both.former.ids(), protocol=UDP)
    assert both.carry() == 1
    assert 1001 in both.present.peers()


def test_a_smaller_map_keeps_the_clients_seen_last(both: Both) -> None:
    room = both.present.maps["affinity"].shape.max_entries
    for number in range(2 * room):
        both.former.stick(both.former.ids(), last_used=number, client=U64.pack(number) + bytes(8))
    known = len(both.former.affinity())
    assert known > room
    both.carry()
    used = sorted(used for used, _ in both.former.affinity().values())
    assert {used for used, _ in both.present.affinity().values()} <= set(used[-room:])
    assert both.present.affinity()


def test_a_map_of_another_shape_is_left_behind(
    both: Both, place: BpfPlace, caplog: pytest.LogCaptureFixture
) -> None:
    """The others come along; one line of the log names it."""
    changed = place.bpffs / f"v{abi.ABI_VERSION}-changed" / "maps"
    changed.mkdir(parents=True)
    other = create_map(ARRAY, 4, abi.SOCKET_PEER.size + 8, 16, MMAPABLE)
    try:
        other.pin(changed / "socket_peers")
        for map_ in both.former.maps:
            if map_.name != "socket_peers":
                map_.pin(changed / map_.name)
        both.former.send(1000, both.former.ids())
        with (
            caplog.at_level(logging.WARNING),
            contextlib.closing(
                CarryOver(changed, both.present.maps, both.present.table.ids_of)
            ) as carry_over,
        ):
            assert carry_over.copy() == 2
            assert carry_over.copy() == 0
        assert both.present.datagrams() == dict(datagrams(1000, both.present.ids()))
        (record,) = caplog.records
        assert vars(record)["values"]["maps"] == "socket_peers"
    finally:
        other.close()
        shutil.rmtree(changed.parent)


@pytest.mark.parametrize("folder", ["v0-former/maps", f"v{abi.ABI_VERSION}-nothing/maps"])
def test_another_abi_or_no_layout_at_all_is_left_behind(
    both: Both, place: BpfPlace, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes do not tell a change of meaning; the version does. No socket may be destroyed for that."""
    with caplog.at_level(logging.WARNING):
        carry_over = CarryOver(place.bpffs / folder, both.present.maps, both.present.table.ids_of)
    with contextlib.closing(carry_over):
        assert carry_over.copy() == 0
    (record,) = caplog.records
    assert vars(record)["values"]["maps"] == "socket_peers,socket_flows,affinity"


def test_65536_connected_sockets_take_few_system_calls(
    place: BpfPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8192 endpoints, as on a large node. They are copied in memory: one call for each would take seconds,
    in which the former programs go on without the copies."""
    sizes = (
        MapSizes(4096, 16384, 16384, 1024, 131072, 16, 16),
        MapSizes(4096, 16384, 16384, 2048, 262144, 16, 16),
    )
    many = {
        ServicePortKey(f"default/s{n}", UDP, Family.IPV4): entry(
            [frontend(f"10.96.{n >> 8}.{n & 255}", 53, protocol=UDP)],
            [endpoint(f"10.{i}.{n >> 8}.{n & 255}", port=5353) for i in range(8)],
        )
        for n in range(1024)
    }
    with contextlib.ExitStack() as stack:
        layouts = []
        for name, size in zip(("large", "larger"), sizes, strict=True):
            layout = Layout(build_maps(place, size, f"v{abi.ABI_VERSION}-{name}"))
            stack.callback(layout.close)
            layout.serve(many)
            layouts.append(layout)
        both = Both(*layouts)
        ids = []
        for key, value in many.items():
            known = both.former.table.ids_of(key)
            assert known
            ids += [((known[0], known[1][e.address, e.port]), e.address) for e in value.endpoints]
        sockets = list(zip(range(10_000, 10_000 + 65_536), itertools.cycle(ids)))
        entries = [(U32.pack(n % 131072), peer(n, of, at)) for n, (of, at) in sockets]
        both.former.maps["socket_peers"].update_all(entries)
        calls = counted(monkeypatch)
        with both.carrying() as carry_over:
            assert (carry_over.copy(), carry_over.copy()) == (65_536, 0)
        assert 0 < calls() < 65_536 / 10
        assert len(both.present.peers()) == 65_536
