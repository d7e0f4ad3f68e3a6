"""The lists of hash algorithms and of weights in the maps, and the turns of round robin."""

import contextlib
from array import array
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.services.new_endpoints import NewEndpoints
from ebpfproxy.backends.ebpf.services.record import Record
from ebpfproxy.backends.ebpf.services.table import ServiceTable
from ebpfproxy.plan import maglev
from tests.kernel.service_table.samples import (
    BOTH,
    CLUSTER,
    TURNS,
    WEB,
    WEIGHTED,
    Entries,
    bring,
    endpoint,
    entry,
    frontend,
    key,
    opened,
    packed,
    rows,
    weighted,
    wipe,
)
from tests.support.bpf_place import BpfPlace, build_maps
from tests.support.clock import Clock
from tests.support.service_maps import View, check_exact, write_slot

pytestmark = pytest.mark.kernel

TABLES = (abi.ALGORITHM_SOURCE_HASH, abi.ALGORITHM_MAGLEV)
FRONTENDS = [frontend("10.96.0.8"), frontend("203.0.113.8", flags=abi.SERVICE_EXTERNAL_LOCAL)]
ENDPOINTS = [endpoint("10.1.0.1"), endpoint("10.1.0.2", BOTH), endpoint("10.1.0.3", weighted(CLUSTER, 5))]


@pytest.fixture(scope="module")
def large_maps(place: BpfPlace) -> Iterator[Maps]:
    with contextlib.closing(
        Maps(build_maps(place, MapSizes(64, 32768, 64, 64, 16, 16, 64), "large"))
    ) as maps:
        yield maps


@pytest.fixture
def large(large_maps: Maps) -> Maps:
    wipe(large_maps)
    return large_maps


def bring_and_check(table: ServiceTable, maps: Maps, before: Entries, wanted: Entries) -> None:
    bring(table, before, wanted)
    check_exact(maps, wanted, table.usage())
    assert all(table.check())


@pytest.mark.parametrize("algorithm", TABLES)
def test_a_table_is_read_back_by_a_new_process(large: Maps, algorithm: int) -> None:
    wanted = {key("hashed"): entry(FRONTENDS, ENDPOINTS, algorithm=algorithm), key("web"): WEB}
    with opened(large) as table:
        bring_and_check(table, large, {}, wanted)
        assert table.read() == wanted
    with opened(large) as other:
        assert other.read() == wanted
        assert all(other.check())
        check_exact(large, wanted, other.usage())


def test_a_service_changes_between_all_kinds_of_lists(large: Maps) -> None:
    states: list[Entries] = [
        {key("web"): entry(FRONTENDS, endpoints, algorithm=algorithm)}
        for endpoints in (ENDPOINTS, ENDPOINTS[:2])
        for algorithm in abi.ALGORITHMS
    ]
    with opened(large) as table:
        present: Entries = {}
        for state in (*states, *reversed(states), {}):
            bring_and_check(table, large, present, state)
            present = state
        assert table.usage()["slots"][0] == 0


def test_an_unchanged_table_is_neither_computed_nor_written_again(
    large: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = entry(FRONTENDS, ENDPOINTS, algorithm=abi.ALGORITHM_MAGLEV)
    after = before._replace(affinity_timeout=600)
    with opened(large) as table:
        bring(table, {}, {key("web"): before})
        ranges = [found[:2] for found in View(large).services.values()]
        monkeypatch.setattr(maglev, "table", None)
        bring_and_check(table, large, {key("web"): before}, {key("web"): after})
        assert [found[:2] for found in View(large).services.values()] == ranges


@pytest.mark.parametrize("algorithm", TABLES)
def test_a_changed_entry_of_a_table_is_found_and_repaired(large: Maps, algorithm: int) -> None:
    wanted = {key("web"): entry(FRONTENDS, ENDPOINTS, algorithm=algorithm)}
    with opened(large) as table:
        bring(table, {}, wanted)
        first, count = View(large).services[FRONTENDS[0][:3]].internal
        slots = View(large).slots
        other = next(slot for slot in range(first, first + count) if slots[slot] != slots[first])
        write_slot(large["slots"], first, slots[other])
        assert not all(table.check())
        found = table.read()
        assert found != wanted
        bring_and_check(table, large, found, wanted)


def test_turns_continue_after_a_change_of_endpoints(large: Maps) -> None:
    """Otherwise the first endpoints would get more connections if endpoints change often."""
    with opened(large) as table:
        bring(table, {}, {key("turns"): TURNS})
        first, count = View(large).services[TURNS.frontends[0][:3]].internal
        write_slot(large["slots"], first + count, 77)
        more = TURNS._replace(endpoints=packed(*rows(TURNS), endpoint("10.1.0.3")))
        bring_and_check(table, large, {key("turns"): TURNS}, {key("turns"): more})
        first, count = View(large).services[TURNS.frontends[0][:3]].internal
        assert View(large).slots[first + count] == 77


def test_the_turn_is_no_difference(large: Maps) -> None:
    with opened(large) as table:
        bring(table, {}, {key("turns"): TURNS})
        first, count = View(large).services[TURNS.frontends[0][:3]].internal
        write_slot(large["slots"], first + count, 0)
        assert all(table.check())
        assert table.read() == {key("turns"): TURNS}


def test_a_changed_weight_keeps_the_ids_of_endpoints(large: Maps) -> None:
    heavier = WEIGHTED._replace(
        endpoints=packed(
            endpoint("10.1.0.1", weighted(CLUSTER, 2)), endpoint("10.1.0.2", weighted(CLUSTER, 9))
        )
    )
    with opened(large) as table:
        bring(table, {}, {key("web"): WEIGHTED})
        before = View(large).listed().keys()
        bring_and_check(table, large, {key("web"): WEIGHTED}, {key("web"): heavier})
        assert View(large).listed().keys() == before


SLOW = WEB._replace(slow_start=60)
MORE = SLOW._replace(endpoints=packed(*rows(WEB), endpoint("10.1.0.7")))


def new_endpoints(maps: Maps) -> set[int]:
    return {int.from_bytes(key, "little") for key, _ in maps["new_endpoints"].items()}


def test_slow_start_survives_a_restart_and_begins_none(large: Maps) -> None:
    with opened(large) as table:
        bring_and_check(table, large, {}, {key("web"): SLOW})
        assert new_endpoints(large) == set()
        bring_and_check(table, large, {key("web"): SLOW}, {key("web"): MORE})
        before = list(large["new_endpoints"].items())
        assert len(before) == 1
    with opened(large) as other:
        assert other.read() == {key("web"): MORE}
        assert list(large["new_endpoints"].items()) == before
        bring(other, {key("web"): MORE}, {})
        assert new_endpoints(large) == set()


def test_entries_of_unknown_endpoints_are_removed(large: Maps) -> None:
    large["new_endpoints"].update((7).to_bytes(4, "little"), bytes(8))
    large["connections"].update((7).to_bytes(4, "little"), bytes(4))
    with opened(large) as table:
        table.read()
    assert new_endpoints(large) == set()
    assert not list(large["connections"].items())


def test_slow_start_ends_after_its_time(large: Maps) -> None:
    clock = Clock()
    new = NewEndpoints(large["new_endpoints"], lambda: int(clock.now * 1e9))
    old, added = Record(1, SLOW, array("I", [1, 2])), Record(1, MORE, array("I", [1, 2, 3]))
    new.change(None, old)
    new.change(old, added)
    new.expire()
    assert new_endpoints(large) == {3}
    clock.now += 60
    new.expire()
    assert new_endpoints(large) == set()


def test_a_longer_slow_start_applies_to_endpoints_that_are_in_it(large: Maps) -> None:
    clock = Clock()
    new = NewEndpoints(large["new_endpoints"], lambda: int(clock.now * 1e9))
    old, added = Record(1, SLOW, array("I", [1, 2])), Record(1, MORE, array("I", [1, 2, 3]))
    longer = Record(1, MORE._replace(slow_start=90), added.ids)
    new.change(old, added)
    new.change(added, longer)
    clock.now += 80
    new.expire()
    assert new_endpoints(large) == {3}
    clock.now += 10
    new.expire()
    assert new_endpoints(large) == set()
