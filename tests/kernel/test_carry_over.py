"""What one layout's maps remember, copied into those of another: maps of two sizes, and no programs."""

import contextlib
import itertools
import logging
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from socket import htons
from typing import NamedTuple

import pytest

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.carry_over import CarryOver
from ebpfproxy.dataplanes.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.dataplanes.ebpf.maps import Maps, MapSizes
from ebpfproxy.dataplanes.ebpf.service_table import ServiceTable
from ebpfproxy.model.address import Address, Family, Protocol, parse_address
from tests.kernel.service_table.samples import bring, endpoint, entry, frontend, wipe
from tests.support.bpf_place import ARRAY, MMAPABLE, BpfPlace, bpf_place, build_maps, create_map
from tests.support.clock import Clock

pytestmark = pytest.mark.kernel

U32, U64 = struct.Struct("=I"), struct.Struct("=Q")
VIP, ONE, TWO, OTHER = map(parse_address, ("10.96.0.1", "10.1.0.1", "10.1.0.2", "10.1.0.3"))
CLIENT = bytes(range(16))
UDP, TCP = Protocol.UDP, Protocol.TCP
FORMER, PRESENT = MapSizes(64, 64, 64, 32, 64), MapSizes(128, 128, 128, 16, 24)

FILLER = ServicePortKey("default/filler", TCP, Family.IPV4)
DNS = ServicePortKey("default/dns", UDP, Family.IPV4)


def service(*addresses: str, affinity: int = 60) -> ServicePortEntry:
    front = frontend("10.96.0.1", 53, protocol=UDP)
    return entry([front], [endpoint(address, port=5353) for address in addresses], affinity)


class Layout:
    """The maps of one layout, what is served there, and short ways to read and write its memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.maps = Maps(folder)
        self.table = ServiceTable(self.maps, Clock())

    def close(self) -> None:
        self.table.close()
        self.maps.close()

    def empty(self) -> None:
        wipe(self.maps)
        for key, _ in list(self.maps["socket_flows"].items()):
            self.maps["socket_flows"].delete(key)
        with contextlib.closing(self.maps["socket_peers"].mapped()) as memory:
            memory[:] = bytes(len(memory))
        self.table.read()

    def serve(self, wanted: dict[ServicePortKey, ServicePortEntry]) -> None:
        bring(self.table, self.table.read(), wanted)

    def ids(self, place: Address = ONE) -> tuple[int, int]:
        """Those of DNS, and of its endpoint at this place."""
        found = self.table.ids_of(DNS)
        assert found
        return found[0], found[1][place, 5353]

    def connect(
        self, cookie: int, ids: tuple[int, int], place: Address = ONE, protocol: Protocol = UDP, way: int = 0
    ) -> None:
        """As peer_write() of socket.h does."""
        at = (cookie + way) % self.maps["socket_peers"].shape.max_entries
        self.maps["socket_peers"].update(U32.pack(at), peer(cookie, ids, place, protocol))

    def forget(self, cookie: int) -> None:
        """As socket_forget() of socket.h does."""
        for key, value in list(self.maps["socket_peers"].items()):
            if U64.unpack_from(value)[0] == cookie:
                self.maps["socket_peers"].update(key, bytes(U64.size) + value[U64.size :])

    def peers(self) -> dict[int, bytes]:
        """By cookie. Each stands where the programs look for it, and once."""
        found: dict[int, bytes] = {}
        size = self.maps["socket_peers"].shape.max_entries
        for key, value in self.maps["socket_peers"].items():
            (cookie,) = U64.unpack_from(value)
            if cookie:
                assert (U32.unpack(key)[0] - cookie) % size < abi.SOCKET_WAYS
                assert cookie not in found
                found[cookie] = value
        return found

    def send(self, cookie: int, ids: tuple[int, int], place: Address = ONE) -> None:
        """As socket_send() of socket.h does."""
        for pair in flows(cookie, ids, place):
            self.maps["socket_flows"].update(*pair)

    def flows(self) -> dict[bytes, bytes]:
        return dict(self.maps["socket_flows"].items())

    def stick(self, ids: tuple[int, int], last_used: int = 7, client: bytes = CLIENT) -> None:
        self.maps["affinity"].update(
            abi.AFFINITY_KEY.pack(client, ids[0], abi.CLIENT_NETNS), abi.AFFINITY.pack(last_used, ids[1], 0)
        )

    def affinity(self) -> dict[tuple[bytes, int], tuple[int, int]]:
        """From client and service to when it was last used, and the endpoint."""
        found = {}
        for key, value in self.maps["affinity"].items():
            client, of, kind = abi.AFFINITY_KEY.unpack(key)
            assert kind == abi.CLIENT_NETNS
            found[client, of] = abi.AFFINITY.unpack(value)[:2]
        return found


def peer(cookie: int, ids: tuple[int, int], place: Address = ONE, protocol: Protocol = UDP) -> bytes:
    there = place, htons(5353), protocol, 0, ids[0]
    return abi.SOCKET_PEER.pack(cookie, *there, VIP, htons(53), 0, ids[1], 0)


def flows(cookie: int, ids: tuple[int, int], place: Address = ONE) -> list[tuple[bytes, bytes]]:
    """Both entries of an unconnected socket."""
    found = []
    for direction, key, value in (
        (abi.TO_ENDPOINT, (VIP, htons(53)), (place, htons(5353))),
        (abi.TO_FRONTEND, (place, htons(5353)), (VIP, htons(53))),
    ):
        packed = abi.SOCKET_FLOW_KEY.pack(cookie, *key, UDP, direction, 0)
        found.append((packed, abi.SOCKET_FLOW.pack(*value, 0, *ids)))
    return found


class Both(NamedTuple):
    former: Layout
    present: Layout

    def carrying(self) -> "contextlib.closing[CarryOver]":
        return contextlib.closing(CarryOver(self.former.folder, self.present.maps, self.present.table.ids_of))

    def carry(self) -> int:
        with self.carrying() as carry_over:
            return carry_over.copy()


@pytest.fixture(scope="module")
def place() -> Iterator[BpfPlace]:
    with bpf_place() as made:
        yield made


@pytest.fixture(scope="module")
def built(place: BpfPlace) -> Iterator[Both]:
    version = f"v{abi.ABI_VERSION}"
    with contextlib.ExitStack() as stack:
        layouts = [
            Layout(build_maps(place, sizes, f"{version}-{name}"))
            for name, sizes in (("former", FORMER), ("present", PRESENT))
        ]
        for layout in layouts:
            stack.callback(layout.close)
        yield Both(*layouts)


@pytest.fixture
def both(built: Both) -> Both:
    """The same Service in both layouts, with other ids in each."""
    for layout in built:
        layout.empty()
    built.former.serve({FILLER: entry([frontend("10.96.0.9")], [endpoint("10.1.0.9"), endpoint("10.1.0.8")])})
    for layout in built:
        layout.serve({DNS: service("10.1.0.1", "10.1.0.2")})
    assert all(ours != theirs for ours, theirs in zip(built.former.ids(), built.present.ids(), strict=True))
    return built


def test_a_connected_socket_gets_the_present_ids(both: Both) -> None:
    both.former.connect(1000, both.former.ids())
    both.former.connect(1001, both.former.ids(TWO), TWO, TCP)
    assert both.carry() == 2
    assert both.present.peers() == {
        1000: peer(1000, both.present.ids()),
        1001: peer(1001, both.present.ids(TWO), TWO, TCP),
    }


def test_the_former_maps_stay_as_they_were(both: Both) -> None:
    def held() -> list[list[tuple[bytes, bytes]]]:
        return [sorted(map_.items()) for map_ in both.former.maps if map_.name != "counters"]

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
    assert both.present.flows() == dict(flows(1001, stale, OTHER))
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
    assert both.present.flows() == dict(flows(1001, (0, 0)))
    assert both.present.affinity() == {}


def test_an_unconnected_socket_gets_the_present_ids(both: Both) -> None:
    both.former.send(1000, both.former.ids(TWO), TWO)
    assert both.carry() == 2
    assert both.present.flows() == dict(flows(1000, both.present.ids(TWO), TWO))


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
    theirs = dict(flows(1001, both.present.ids()))  # another endpoint's way back is another key
    assert both.present.flows() == theirs | dict(flows(1001, newer, TWO))
    assert both.present.affinity() == {(CLIENT, newer[0]): (500, newer[1])}


def test_twice_is_as_once(both: Both) -> None:
    both.former.connect(1000, both.former.ids())
    both.former.send(1001, both.former.ids())
    both.former.stick(both.former.ids())
    present = both.present
    with both.carrying() as carry_over:
        assert carry_over.copy() == 4
        once = present.peers(), present.flows(), present.affinity()
        assert carry_over.copy() == 0
    assert both.carry() == 0
    assert (present.peers(), present.flows(), present.affinity()) == once


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
    assert both.present.flows() == dict(flows(1004, here))


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
        back = flows(1000, both.present.ids())[1][0]
        both.present.maps["socket_flows"].delete(back)
        assert carry_over.copy() == 0
    assert back not in both.present.flows()


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
        assert both.present.flows() == dict(flows(1000, both.present.ids()))
        (record,) = caplog.records
        assert vars(record)["values"]["maps"] == "socket_peers"
    finally:
        other.close()
        shutil.rmtree(changed.parent)


@pytest.mark.parametrize("folder", ["v0-former/maps", "v1-nothing/maps"])
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


def test_65536_connected_sockets_take_less_than_half_a_second(place: BpfPlace) -> None:
    """Of 8192 endpoints, as on a large node; the best of three, since machines are shared."""
    sizes = MapSizes(4096, 16384, 16384, 1024, 131072), MapSizes(4096, 16384, 16384, 2048, 262144)
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
        assert min(seconds_to_carry(both, 65_536) for _ in range(3)) < 0.5
        assert len(both.present.peers()) == 65_536


def seconds_to_carry(both: Both, count: int) -> float:
    """Of CPU time, for both copies, into maps that are empty before."""
    with contextlib.closing(both.present.maps["socket_peers"].mapped()) as memory:
        memory[:] = bytes(len(memory))
    with both.carrying() as carry_over:
        begin = time.process_time()
        assert (carry_over.copy(), carry_over.copy()) == (count, 0)
        return time.process_time() - begin
