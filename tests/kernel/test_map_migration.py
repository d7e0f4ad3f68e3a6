"""Migration of contents that only BPF programs write into maps of another size."""

import contextlib
import dataclasses
import errno
import itertools
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from socket import htons
from typing import Any

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes, shapes
from ebpfproxy.backends.ebpf.migration import migrate
from ebpfproxy.backends.ebpf.migration.migrate import Migration
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.linux.bpf import bpf
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Protocol, parse_address
from tests.kernel.migration_maps import SIZES, edited, make, opened
from tests.support.bpf_place import bpf_place
from tests.support.flows import a_flow, entries
from tests.support.system_calls import counted

pytestmark = pytest.mark.kernel

U32, U64 = struct.Struct("=I"), struct.Struct("=Q")
PRESENT = MapSizes(64, 64, 64, 64, 24, 2048, 16)
TCP, UDP = Protocol.TCP, Protocol.UDP
VIP, ONE, TWO = map(parse_address, ("10.96.0.1", "10.1.0.1", "10.1.0.2"))
Entries = dict[bytes, bytes]


@pytest.fixture
def pins() -> Iterator[Pins]:
    with bpf_place() as made:
        yield Pins(made.bpffs)


class Both:
    """The maps of the previous programs and of the present programs."""

    def __init__(self, pins: Pins, previous: MapSizes = SIZES, present: MapSizes = PRESENT) -> None:
        self.pins = pins
        self.sizes = present
        make(pins, "a", previous)
        make(pins, "b", present)
        self.previous, self.present = opened(pins, "a"), opened(pins, "b")
        pins.set_current(pins.root / "programs-a")

    def close(self) -> None:
        self.previous.close()
        self.present.close()

    def migration(self) -> "contextlib.closing[Migration]":
        previous = self.pins.maps_of(self.pins.in_force())
        return contextlib.closing(Migration(shapes(self.sizes), self.present, previous))


@pytest.fixture
def both(pins: Pins) -> Iterator[Both]:
    with contextlib.closing(Both(pins)) as made:
        yield made


def peer(cookie: int, endpoint: bytes = ONE, protocol: Protocol = UDP) -> bytes:
    return abi.SOCKET_PEER.pack(cookie, endpoint, htons(5353), protocol, 0, 7, VIP, htons(53), 0, 9, 0)


def connect(maps: Maps, cookie: int, endpoint: bytes = ONE, protocol: Protocol = UDP, way: int = 0) -> None:
    """Like peer_write() of socket.h."""
    at = (cookie + way) % maps["socket_peers"].shape.max_entries
    maps["socket_peers"].update(U32.pack(at), peer(cookie, endpoint, protocol))


def disconnect(maps: Maps, cookie: int) -> None:
    """Like peer_remove() of socket.h."""
    for key, value in list(maps["socket_peers"].items()):
        if U64.unpack_from(value)[0] == cookie:
            maps["socket_peers"].update(key, bytes(U64.size) + value[U64.size :])


def peers(maps: Maps) -> dict[int, bytes]:
    """The entries by cookie. Each must be at an index where programs look for it, and only once."""
    found: dict[int, bytes] = {}
    size = maps["socket_peers"].shape.max_entries
    for key, value in maps["socket_peers"].items():
        (cookie,) = U64.unpack_from(value)
        if cookie:
            assert (U32.unpack(key)[0] - cookie) % size < abi.SOCKET_WAYS
            assert cookie not in found
            found[cookie] = value
    return found


def datagrams(cookie: int, endpoint: bytes = ONE) -> Entries:
    """Both entries of an unconnected socket."""
    found = {}
    for direction, key, value in (
        (abi.TO_ENDPOINT, (VIP, htons(53)), (endpoint, htons(5353))),
        (abi.TO_FRONTEND, (endpoint, htons(5353)), (VIP, htons(53))),
    ):
        packed = abi.SOCKET_FLOW_KEY.pack(cookie, *key, UDP, direction, 0)
        found[packed] = abi.SOCKET_FLOW.pack(*value, 0, 7, 9)
    return found


def client(number: int, last_used: int = 5) -> Entries:
    key = abi.AFFINITY_KEY.pack(U64.pack(number) + bytes(8), 7, abi.CLIENT_NETNS)
    return {key: abi.AFFINITY.pack(last_used, 9, 0)}


def write(of: Map, contents: Entries) -> None:
    of.update_all(list(contents.items()))


def read(of: Map) -> Entries:
    return dict(of.items())


# Sockets and clients


def test_sockets_and_affinity_are_copied_unchanged(both: Both) -> None:
    for cookie, endpoint, protocol in ((1000, ONE, UDP), (1001, TWO, TCP)):
        connect(both.previous, cookie, endpoint, protocol)
    write(both.previous["socket_flows"], datagrams(1002))
    write(both.previous["affinity"], client(1))
    with both.migration() as migration:
        migration.copy()
    assert peers(both.present) == {1000: peer(1000), 1001: peer(1001, TWO, TCP)}
    assert both.present["socket_flows"].shape.id != both.previous["socket_flows"].shape.id
    assert read(both.present["socket_flows"]) == datagrams(1002)
    assert read(both.present["affinity"]) == client(1)


def test_entries_written_by_the_new_programs_are_kept(both: Both) -> None:
    connect(both.present, 1000, TWO, way=3)
    write(both.present["affinity"], client(1, 500))
    connect(both.previous, 1000)
    write(both.previous["affinity"], client(1, 400))
    with both.migration() as migration:
        migration.copy()
    assert peers(both.present) == {1000: peer(1000, TWO)}
    assert read(both.present["affinity"]) == client(1, 500)


def test_a_second_copy_applies_changes_since_the_first(both: Both) -> None:
    with both.migration() as migration:
        for cookie in (1000, 1001, 1002):
            connect(both.previous, cookie)
        migration.copy()
        connect(both.previous, 1000, TWO)
        disconnect(both.previous, 1001)
        connect(both.previous, 1003)
        disconnect(both.present, 1002)  # closed, and only the new programs saw it
        write(both.previous["socket_flows"], datagrams(1004))
        migration.copy()
    assert peers(both.present) == {1000: peer(1000, TWO), 1003: peer(1003)}
    assert read(both.present["socket_flows"]) == datagrams(1004)


def test_a_socket_reconnected_by_the_new_programs_keeps_their_entry(both: Both) -> None:
    with both.migration() as migration:
        connect(both.previous, 1000)
        migration.copy()
        connect(both.present, 1000, TWO)
        disconnect(both.previous, 1000)
        migration.copy()
    assert peers(both.present) == {1000: peer(1000, TWO)}


def test_an_entry_removed_by_the_new_programs_is_not_copied_again(both: Both) -> None:
    write(both.previous["socket_flows"], datagrams(1000))
    with both.migration() as migration:
        migration.copy()
        (first, _) = datagrams(1000)
        both.present["socket_flows"].delete(first)
        migration.copy()
    assert first not in read(both.present["socket_flows"])


def test_a_smaller_array_prefers_udp_sockets_to_tcp_sockets(both: Both) -> None:
    """UDP entries are needed to find stale sockets; a TCP entry only serves getpeername()."""
    size = both.present["socket_peers"].shape.max_entries
    for cookie in range(1000, 1000 + size):
        connect(both.present, cookie, protocol=TCP)
    connect(both.previous, 2000, protocol=TCP)
    for cookie in range(2001, 2001 + size):
        connect(both.previous, cookie)
    with both.migration() as migration:
        migration.copy()
    assert peers(both.present).keys() == set(range(2001, 2001 + size))


def test_sockets_connected_by_the_new_programs_are_not_evicted(both: Both) -> None:
    size = both.present["socket_peers"].shape.max_entries
    for cookie in range(1000, 1000 + size):
        connect(both.present, cookie)
    before = peers(both.present)
    connect(both.previous, 2000)
    with both.migration() as migration:
        migration.copy()
    assert peers(both.present) == before


def test_a_smaller_map_is_not_overfilled(pins: Pins) -> None:
    sizes = dataclasses.replace(SIZES, affinity=256), dataclasses.replace(PRESENT, affinity=64)
    with contextlib.closing(Both(pins, *sizes)) as both:
        known: Entries = {}
        for number in range(200):
            known |= client(number)
        write(both.previous["affinity"], known)
        newer = {key: value for number in range(1000, 1016) for key, value in client(number).items()}
        write(both.present["affinity"], newer)
        with both.migration() as migration, pytest.MonkeyPatch.context() as patch:
            written: list[bytes] = []
            real = Map.update

            def update(self: Map, key: bytes, *rest: Any) -> None:
                written.append(key)
                real(self, key, *rest)

            patch.setattr(Map, "update", update)
            migration.copy()
        assert len(written) == 64 - len(newer)
        assert read(both.present["affinity"]).items() <= known.items() | newer.items()


def test_65536_connected_sockets_take_few_system_calls(pins: Pins, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries are copied in memory. One system call for each would take seconds, while the previous
    programs run."""
    sizes = (dataclasses.replace(SIZES, sockets=number) for number in (131_072, 262_144))
    with contextlib.closing(Both(pins, *sizes)) as both:
        cookies = range(10_000, 10_000 + 65_536)
        both.previous["socket_peers"].update_all([(U32.pack(n % 131_072), peer(n)) for n in cookies])
        with both.migration() as migration:
            calls = counted(monkeypatch)
            migration.copy()
            assert 0 < calls() < 65_536 / 10
        assert peers(both.present).keys() == set(cookies)


# Flows


def test_flows_of_a_map_with_other_flags_are_found(pins: Pins, tmp_path: Path) -> None:
    """Bug: the kernel accepts an inner map only with the flags of the template."""
    source = edited(tmp_path, "/* Value of `slots`", "/* The value of `slots`")
    maps_h = (source / "maps.h").read_text()
    former = maps_h.replace("FLOW_ENTRIES_MAX, 0", "FLOW_ENTRIES_MAX, BPF_F_NO_PREALLOC")
    assert former != maps_h
    (source / "maps.h").write_text(former)
    make(pins, "former", source=source)
    for name in ("a", "b", "c"):  # the second one replaces maps with the present flags by others
        previous, sizes = pins.in_force(), dataclasses.replace(SIZES, flows=4096 + ord(name))
        make(pins, name, sizes)
        with contextlib.closing(opened(pins, name)) as maps:
            migration = Migration(shapes(sizes), maps, pins.maps_of(previous))
            with contextlib.closing(migration):
                migration.start()
                assert maps["previous_flows"].lookup(bytes(4))
                assert maps["previous_replies"].lookup(bytes(4))


def test_new_programs_look_up_flows_until_all_are_copied(both: Both) -> None:
    flows = entries(a_flow(1), a_flow(2, masquerade="192.0.2.10"))
    write(both.previous["flows"], flows)
    with both.migration() as migration:
        migration.start()
        shown = both.present["previous_flows"].lookup(bytes(4))
        assert shown
        assert U32.unpack(shown)[0] == both.previous["flows"].shape.id
        assert read(both.present["flows"]) == {}
        migration.finish_flows()
        assert both.present["previous_flows"].lookup(bytes(4)) is None
    assert read(both.present["flows"]) == flows


def test_a_flow_updated_by_the_new_programs_is_kept(both: Both) -> None:
    previous, newer = entries(a_flow(1, last_seen=5)), entries(a_flow(1, last_seen=6))
    write(both.previous["flows"], previous | entries(a_flow(2)))
    with both.migration() as migration:
        migration.start()
        write(both.present["flows"], newer)
        migration.finish_flows()
    assert read(both.present["flows"]) == newer | entries(a_flow(2))


def test_flows_are_copied_once(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change triggers a sync, and there may be hundreds of thousands of flows."""
    write(both.previous["flows"], entries(a_flow(1)))
    with both.migration() as migration:
        migration.start()
        migration.finish_flows()
        calls = counted(monkeypatch)
        migration.finish_flows()
        assert calls() == 0


def test_if_the_kernel_rejects_the_fallback_map_flows_are_copied_at_once(
    both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before Linux 5.10, both maps must have the same size."""
    write(both.previous["flows"], entries(a_flow(1)))
    real = Map.update

    def update(self: Map, *given: Any) -> None:
        if self.name == "previous_flows":
            raise bpf.error(errno.EINVAL, "cannot write map previous_flows")
        real(self, *given)

    monkeypatch.setattr(Map, "update", update)
    with both.migration() as migration, caplog.at_level(logging.ERROR):
        migration.start()
    assert [record.message for record in caplog.records] == [migrate.NO_FALLBACK]
    assert read(both.present["flows"]) == entries(a_flow(1))


def test_a_write_to_a_locked_bucket_is_retried(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    flows = entries(a_flow(1))
    write(both.previous["flows"], flows)
    real, attempts = Map.update, itertools.count()

    def update(self: Map, *given: Any) -> None:
        if self.name == "flows" and not next(attempts):
            raise bpf.error(errno.EBUSY, "cannot write map flows")
        real(self, *given)

    monkeypatch.setattr(Map, "update", update)
    with both.migration() as migration:
        migration.finish_flows()
    assert read(both.present["flows"]) == flows


# What is not migrated


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    return [(record.message, vars(record)["values"]) for record in caplog.records]


def test_maps_of_another_layout_are_discarded_by_name(
    both: Both, pins: Pins, caplog: pytest.LogCaptureFixture
) -> None:
    """Maps that the service plan writes are not named."""
    links = pins.root / "programs-a" / "maps"
    for name in ("flows", "affinity", "devices", "services"):
        pin = links / name
        target = pins.maps / pin.readlink().name
        other = pins.maps / f"{name}-00000000-{target.name.rpartition('-')[2]}"
        target.rename(other)
        pin.unlink()
        pin.symlink_to(f"../../maps/{other.name}")
    write(both.previous["affinity"], client(1))
    connect(both.previous, 1000)
    with caplog.at_level(logging.WARNING), both.migration() as migration:
        migration.start()
        migration.finish_flows()
    assert messages(caplog) == [(migrate.DISCARDED, {"maps": "affinity,flows"})]
    assert read(both.present["affinity"]) == {}
    assert peers(both.present) == {1000: peer(1000)}


def test_maps_of_the_same_shape_need_no_migration(pins: Pins, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Both(pins, SIZES, SIZES)) as both:
        write(both.previous["flows"], entries(a_flow(1)))
        with both.migration() as migration:
            calls = counted(monkeypatch)
            migration.start()
            assert calls() == 0
        assert read(both.present["flows"]) == entries(a_flow(1))


def test_nothing_is_copied_after_the_migration_is_closed(both: Both) -> None:
    with both.migration() as migration:
        pass
    connect(both.previous, 1000)
    write(both.previous["flows"], entries(a_flow(1)))
    migration.start()
    migration.finish_flows()
    assert peers(both.present) == {}
    assert read(both.present["flows"]) == {}
