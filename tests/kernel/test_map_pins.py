"""Creation and reuse of pinned maps, and the initial contents of new Service maps."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpfproxy.backends.delta import diff
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.migration.map_shapes import SERVICE_MAPS
from ebpfproxy.backends.ebpf.pins import Pins
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.backends.ebpf.services.table import ServiceTable
from ebpfproxy.errors import AbiMismatch
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Family, Protocol
from tests.kernel.migration_maps import SIZES, edited, ids, make, opened
from tests.kernel.service_table.samples import bring, endpoint, entry, frontend, record_of
from tests.support.bpf_place import bpf_place
from tests.support.clock import Clock

pytestmark = pytest.mark.kernel

WEB = ServicePortKey("default/web", Protocol.TCP, Family.IPV4)
WANTED = {WEB: entry([frontend("10.96.0.1")], [endpoint("10.1.0.1"), endpoint("10.1.0.2")])}


@pytest.fixture
def pins() -> Iterator[Pins]:
    with bpf_place() as made:
        yield Pins(made.bpffs)


@contextlib.contextmanager
def table(pins: Pins, name: str) -> Iterator[ServiceTable]:
    with (
        contextlib.closing(opened(pins, name)) as maps,
        contextlib.closing(ServiceTable(maps, Clock())) as found,
    ):
        yield found


def test_each_map_is_created_as_declared_in_maps_h(pins: Pins) -> None:
    for name, shape in make(pins, "a").items():
        with contextlib.closing(Map.pinned(pins.maps / shape.pin)) as made:
            known = made.shape
        assert (known.type, known.key_size, known.value_size) == (
            shape.type,
            shape.key_size,
            shape.value_size,
        )
        assert (known.max_entries, known.flags, known.name) == (shape.entries, shape.flags, name[:15])


def test_programs_with_other_code_use_the_same_maps(pins: Pins, tmp_path: Path) -> None:
    make(pins, "a")
    make(pins, "b", source=edited(tmp_path, "/* Key of `services`:", "/* The key of `services`:"))
    assert ids(pins, "a") == ids(pins, "b")


def other_maps(pins: Pins, sizes: MapSizes) -> set[str]:
    """The maps that are created again for these sizes."""
    make(pins, "a")
    make(pins, "b", sizes)
    before, after = ids(pins, "a"), ids(pins, "b")
    return {name for name, id_ in after.items() if id_ != before[name]}


@pytest.mark.parametrize(
    ("size", "maps"),
    [("flows", {"flows", "replies"}), ("affinity", {"affinity"}), ("slots", set(SERVICE_MAPS))],
)
def test_another_size_recreates_only_its_maps(pins: Pins, size: str, maps: set[str]) -> None:
    assert other_maps(pins, dataclasses.replace(SIZES, **{size: 128})) == maps


def ids_in(table: ServiceTable) -> tuple[int, dict[bytes, int]]:
    """The id of WEB, and those of its endpoints."""
    record = record_of(table, WEB)
    assert record
    return record.id, dict(record.ids_by_target())


@pytest.mark.parametrize(
    "sizes",
    [
        dataclasses.replace(SIZES, endpoints=4096, services=128),
        dataclasses.replace(SIZES, endpoints=16, slots=32, services=16),
    ],
    ids=["larger", "smaller"],
)
def test_services_and_endpoints_keep_their_ids_in_maps_of_other_sizes(pins: Pins, sizes: MapSizes) -> None:
    make(pins, "a")
    with table(pins, "a") as before:
        bring(before, before.read(), {})
        bring(before, before.read(), WANTED)
        known = ids_in(before)
    make(pins, "b", sizes)
    with table(pins, "b") as after:
        assert after.read() == WANTED
        assert ids_in(after) == known


SINGLES = [ServicePortKey(f"default/s{n}", Protocol.TCP, Family.IPV4) for n in range(16)]


def single(number: int) -> ServicePortEntry:
    return entry([frontend(f"10.96.1.{number}")], [endpoint(f"10.2.0.{number}")])


def test_entries_that_do_not_fit_are_omitted_and_written_by_the_next_sync(pins: Pins) -> None:
    """Endpoints with too high ids and slot lists with too high indexes are omitted. The hash map determines
    which Services are copied; unwanted ones may take up the room until they are removed."""
    make(pins, "a")
    many = [endpoint(f"10.1.0.{number}") for number in range(1, 33)]
    with table(pins, "a") as before:
        bring(before, before.read(), {WEB: entry([frontend("10.96.0.1")], many)})
        bring(
            before,
            before.read(),
            {WEB: before.read()[WEB]} | {key: single(n) for n, key in enumerate(SINGLES)},
        )
    make(pins, "b", dataclasses.replace(SIZES, services=8, endpoints=16, slots=16))
    clock = Clock()
    with (
        contextlib.closing(opened(pins, "b")) as maps,
        contextlib.closing(ServiceTable(maps, clock)) as after,
    ):
        assert after.read() != WANTED
        delta = diff(after.read(), WANTED)
        after.apply(delta.puts, delta.drops)
        clock.now += 2 * GRACE
        bring(after, after.read(), WANTED)
        assert after.read() == WANTED


def test_maps_with_another_endpoint_layout_start_empty(pins: Pins, tmp_path: Path) -> None:
    make(pins, "a")
    with table(pins, "a") as before:
        bring(before, before.read(), WANTED)
    source = edited(tmp_path, "\t__u32 service_id; /* 0: the entry", "\t__u32 owner; /* 0: the entry")
    shapes = make(pins, "b", source=source)
    with contextlib.closing(Map.pinned(pins.maps / shapes["endpoints"].pin)) as found:
        assert not any(any(value) for _, value in found.items())
    with contextlib.closing(Map.pinned(pins.maps / shapes["services"].pin)) as found:
        assert len(list(found.items())) == 1
    with pytest.raises(AbiMismatch, match="layout of another version"):
        opened(pins, "b")


def test_maps_with_an_interrupted_copy_are_not_pinned(pins: Pins, monkeypatch: pytest.MonkeyPatch) -> None:
    make(pins, "a")
    with table(pins, "a") as before:
        bring(before, before.read(), WANTED)
    real: Callable[[Map, Path], None] = Map.pin

    def pin(self: Map, path: Path) -> None:
        if path.name.startswith("endpoints-"):
            raise KeyboardInterrupt
        real(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Map, "pin", pin)
        with pytest.raises(KeyboardInterrupt):
            make(pins, "b", dataclasses.replace(SIZES, slots=128))
    make(pins, "b", dataclasses.replace(SIZES, slots=128))
    with table(pins, "b") as after:
        assert after.read() == WANTED


def test_a_pinned_map_with_another_layout_is_rejected(pins: Pins) -> None:
    shape = make(pins, "a")["node"]
    links = pins.root / "programs-a" / "maps"
    (pins.maps / shape.pin).rename(pins.maps / "node-00000000-00000000")
    (links / "node").unlink()
    (links / "node").symlink_to("../../maps/node-00000000-00000000")
    with pytest.raises(AbiMismatch, match="another version"):
        Maps(links)
