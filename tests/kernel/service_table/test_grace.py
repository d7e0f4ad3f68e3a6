"""Freed slots and ids are not reused for a grace period, since a program may still read them."""

import pytest

from ebpfproxy.backends.ebpf.entries import ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.errors import Unsupported
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.linux.bpf.grace_period import GracePeriod
from tests.kernel.service_table.samples import (
    WEB,
    Entries,
    bring,
    endpoint,
    exposed,
    key,
    opened,
    packed,
)
from tests.support.bpf_place import BpfPlace, build_maps
from tests.support.clock import Clock
from tests.support.service_maps import View, check_exact

pytestmark = pytest.mark.kernel


def blocks_of(maps: Maps) -> set[int]:
    """The slots that a program may find through `services`."""
    return {
        slot
        for found in View(maps).services.values()
        for first, count in (found.internal, found.external)
        for slot in range(first, first + count)
    }


def blocks_of_key(maps: Maps, of: ServicePortKey) -> set[int]:
    view = View(maps)
    return {
        slot
        for found in view.services.values()
        if view.names[found.id] == of
        for first, count in (found.internal, found.external)
        for slot in range(first, first + count)
    }


@pytest.mark.parametrize("reads_between", [False, True])
def test_slots_and_ids_are_not_reused_within_the_grace_period(roomy: Maps, reads_between: bool) -> None:
    """Also if the maps are read back meanwhile, as by a sync that verifies."""
    clock = Clock()
    with opened(roomy, clock) as table:
        bring(table, {}, {key("web"): WEB})
        old_slots, old_ids = blocks_of(roomy), View(roomy).listed().keys()
        old_names = View(roomy).names.keys()
        bring(table, {key("web"): WEB}, {})
        clock.now += GRACE / 2
        if reads_between:
            assert table.read() == {}
        other = {key("other"): WEB}
        bring(table, {}, other)
        assert not old_slots & blocks_of(roomy)
        assert not old_ids & View(roomy).listed().keys()
        assert not old_names & View(roomy).names.keys()
        check_exact(roomy, other, table.usage())


def test_the_grace_period_begins_after_the_last_write_of_a_change(
    roomy: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first sync of many services takes seconds, during which programs still use the old lists."""
    clock = Clock()
    original = Map.update_all

    def slowly(self: Map, entries: list[tuple[bytes, bytes]]) -> None:
        original(self, entries)
        clock.now += GRACE

    with opened(roomy, clock) as table:
        bring(table, {}, {key("web"): WEB})
        old_slots = blocks_of(roomy)
        monkeypatch.setattr(Map, "update_all", slowly)
        smaller = {key("web"): WEB._replace(endpoints=WEB.endpoints[:1])}
        bring(table, {key("web"): WEB}, smaller)
        monkeypatch.undo()
        bring(table, smaller, {**smaller, key("b"): exposed(9, endpoints=2)})
        assert not old_slots & (blocks_of(roomy) - blocks_of_key(roomy, key("web")))


def test_a_large_service_that_changes_often_does_not_exhaust_the_slots(
    place: BpfPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the replaced ranges of 8,000 endpoints at 40 changes/s filled `slots` for 3 s.

    The lists of 20 changes fit, the clock stands still, and there are 200 changes.
    """
    waits: list[None] = []
    original = GracePeriod.wait

    def wait(self: GracePeriod) -> None:
        waits.append(None)
        original(self)

    monkeypatch.setattr(GracePeriod, "wait", wait)
    sizes = MapSizes(16, 20 * 8192, 1 << 14, 16, 16, 16, 16)
    maps = Maps(build_maps(place, sizes, "churn"))
    ips = [f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}" for n in range(1 << 17, (1 << 17) + 8200)]
    every = tuple(sorted(endpoint(ip) for ip in ips))
    try:
        with opened(maps) as table:
            previous: Entries = {}
            for turn in range(200):
                wanted = {key("web"): WEB._replace(endpoints=packed(*every[turn : turn + 8000]))}
                bring(table, previous, wanted)
                previous = wanted
            check_exact(maps, previous, table.usage())
        assert 1 <= len(waits) <= 200 / 10
    finally:
        maps.close()


def test_without_a_way_to_wait_a_full_map_reports_what_rests(
    tiny: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def fail(self: GracePeriod) -> None:
        raise Unsupported("no arrays of maps")

    monkeypatch.setattr(GracePeriod, "wait", fail)
    many = exposed(1, endpoints=9)
    with opened(tiny, clock) as table:
        bring(table, {}, {key("web"): many})
        bring(table, {key("web"): many}, {})
        failure = table.apply({key("web"): many}, ())[key("web")]
        assert "map endpoints is full: 0 of 15 entries in use, 9 resting, 9 more needed" in failure.message
        assert failure.hint == "raise --ebpf-endpoints-max; resting entries become free within 3 s"
        fewer = {key("web"): exposed(1, endpoints=1)}
        assert "map slots is full" in table.apply(fewer, ())[key("web")].kind
        clock.now += GRACE
        bring(table, {}, {key("web"): many})
