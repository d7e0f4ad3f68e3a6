"""What is given back rests, since a program may still be reading it."""

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
def test_slots_and_ids_rest_before_they_are_used_again(roomy: Maps, reads_between: bool) -> None:
    """Also where the kernel is read back meanwhile, as a sync that verifies does."""
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


def test_the_grace_period_begins_when_a_change_is_in_force_not_before(
    roomy: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first sync of many services takes seconds, during which the old lists are still in use."""
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
