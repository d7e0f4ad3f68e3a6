"""Freed slots and ids are not reused for a grace period, since a program may still read them."""

import pytest

from ebpfproxy.backends.ebpf.entries import ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.linux.bpf.bpf import Map
from tests.kernel.service_table.samples import (
    WEB,
    bring,
    exposed,
    key,
    opened,
)
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
