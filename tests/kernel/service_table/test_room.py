"""Maps that are too small: services that fit are served, and nothing leaks."""

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.backends.ebpf.services.table import ServiceTable
from ebpfproxy.errors import TableFull
from tests.kernel.service_table.samples import (
    BOTH,
    Entries,
    bring,
    endpoint,
    entry,
    exposed,
    frontend,
    key,
    opened,
    packed,
    wipe,
)
from tests.support.clock import Clock
from tests.support.service_maps import check_exact

pytestmark = pytest.mark.kernel


def rejected_names(table: ServiceTable, puts: Entries) -> dict[str, TableFull]:
    rejected = table.apply(puts, ())
    assert all(isinstance(failure, TableFull) for failure in rejected.values())
    return {k.name: failure for k, failure in rejected.items() if isinstance(failure, TableFull)}


def test_a_full_map_of_frontends_rejects_with_the_flag_to_raise(tiny: Maps) -> None:
    """Regression, cilium/cilium#15864: a full map was reported only by its errno."""
    wanted = {key(f"s{n}"): exposed(n, frontends=3) for n in range(4)}
    with opened(tiny) as table:
        rejected = rejected_names(table, wanted)
        assert set(rejected) == {"default/s2", "default/s3"}
        failure = rejected["default/s2"]
        assert "map services is full" in failure.message
        assert "6 of 8 entries in use, 3 more needed" in failure.message
        assert failure.hint == "raise --ebpf-services-max"
        served = {k: e for k, e in wanted.items() if k.name not in rejected}
        check_exact(tiny, served, table.usage())


def test_services_that_fit_are_served_beside_those_that_do_not(tiny: Maps) -> None:
    """A rejected service uses no room of later ones, in any map."""
    wanted = {
        key("a"): exposed(1, frontends=6),
        key("too-many-endpoints"): exposed(2, frontends=2, endpoints=16),
        key("too-many-frontends"): exposed(3, frontends=3),
        key("b"): exposed(4, frontends=2),
    }
    with opened(tiny) as table:
        assert set(rejected_names(table, wanted)) == {
            "default/too-many-endpoints",
            "default/too-many-frontends",
        }
        check_exact(tiny, {k: wanted[k] for k in (key("a"), key("b"))}, table.usage())


def test_a_full_map_of_endpoints_rejects_with_the_flag_to_raise(tiny: Maps) -> None:
    with opened(tiny) as table:
        fits = {key("a"): exposed(1, endpoints=8)}
        assert not rejected_names(table, fits)
        rejected = rejected_names(table, {key("b"): exposed(2, endpoints=8)})
        assert "map endpoints is full" in rejected["default/b"].message
        assert "8 of 15 entries in use, 8 more needed" in rejected["default/b"].message
        assert rejected["default/b"].hint == "raise --ebpf-endpoints-max"
        check_exact(tiny, fits, table.usage())


def test_a_full_map_of_slots_rejects_with_the_flag_to_raise(tiny: Maps) -> None:
    """The size of a list is a power of two: 5 endpoints in two scopes need 16 slots."""
    two_scopes = exposed(1)._replace(
        endpoints=packed(*(endpoint(f"10.1.1.{i}", BOTH) for i in range(5))),
    )
    with opened(tiny) as table:
        fits = {key("a"): two_scopes}
        assert not rejected_names(table, fits)
        rejected = rejected_names(table, {key("b"): exposed(2)})
        assert "map slots is full" in rejected["default/b"].message
        assert "16 of 16 entries in use, 1 more in one range needed" in rejected["default/b"].message
        assert rejected["default/b"].hint == "raise --ebpf-slots-max"
        check_exact(tiny, fits, table.usage())


def guarded(n: int, *sources: str) -> ServicePortEntry:
    restricted = frontend(f"203.0.113.{n}", flags=abi.SERVICE_RESTRICTED)
    return entry([restricted], [endpoint(f"10.1.{n}.0")], sources=sources)


def test_a_full_map_of_source_ranges_rejects_with_the_flag_to_raise(tiny: Maps) -> None:
    """Six source ranges fit. A rejected service uses no room of later ones."""
    fits = {key("a"): guarded(1, "10.0.0.0/8", "10.1.0.0/16", "10.2.0.0/16")}
    more = {
        key("b"): guarded(2, *(f"10.{n}.0.0/16" for n in range(4))),
        key("c"): guarded(3, *(f"10.{n}.0.0/16" for n in range(3))),
        key("d"): guarded(4, "10.0.0.0/8"),
    }
    with opened(tiny) as table:
        assert not rejected_names(table, fits)
        rejected = rejected_names(table, more)
        assert set(rejected) == {"default/b", "default/d"}
        assert "map source_ranges is full" in rejected["default/b"].message
        assert "3 of 6 entries in use, 4 more needed" in rejected["default/b"].message
        assert rejected["default/b"].hint == "raise --ebpf-source-ranges-max"
        check_exact(tiny, {**fits, key("c"): more[key("c")]}, table.usage())


def test_replacing_source_ranges_needs_room_for_both_sets(tiny: Maps) -> None:
    """Otherwise a client of both would be rejected meanwhile. The rejected service is served as before."""
    before = {key("a"): guarded(1, *(f"10.{n}.0.0/16" for n in range(4)))}
    after = {key("a"): guarded(1, *(f"10.{n}.0.0/16" for n in range(1, 4)), "192.0.2.0/24", "192.0.3.0/24")}
    other = {key("a"): guarded(1, "192.0.2.0/24", "192.0.3.0/24", "192.0.4.0/24")}
    with opened(tiny) as table:
        bring(table, {}, before)
        assert set(rejected_names(table, other)) == {"default/a"}
        check_exact(tiny, before, table.usage())
        bring(table, before, after)
        check_exact(tiny, after, table.usage())
        assert table.read() == after


def test_a_full_map_of_names_rejects_with_the_flag_to_raise(tiny: Maps) -> None:
    wanted = {key(f"s{n}"): entry([], []) for n in range(9)}
    with opened(tiny) as table:
        rejected = rejected_names(table, wanted)
        assert "map service_names is full" in rejected["default/s8"].message
        assert "8 of 8 entries in use, 1 more needed" in rejected["default/s8"].message
        assert rejected["default/s8"].hint == "raise --ebpf-services-max"
        check_exact(tiny, {k: e for k, e in wanted.items() if k != key("s8")}, table.usage())


def test_a_service_that_outgrows_the_maps_stays_unchanged(tiny: Maps) -> None:
    small = {key("a"): exposed(1, frontends=2, endpoints=4), key("b"): exposed(2)}
    for large in (exposed(1, frontends=9, endpoints=4), exposed(1, 2, 15), exposed(1, 2, 12)):
        wipe(tiny)
        with opened(tiny) as table:
            bring(table, {}, small)
            assert set(rejected_names(table, {key("a"): large})) == {"default/a"}
            check_exact(tiny, small, table.usage())
            assert table.read() == small


@pytest.mark.parametrize(
    "first", [exposed(1, frontends=8), exposed(1, endpoints=15), exposed(1, frontends=8, endpoints=8)]
)
def test_a_rejected_service_fits_once_others_are_dropped(tiny: Maps, first: ServicePortEntry) -> None:
    clock = Clock()
    second = exposed(2, len(first.frontends), len(first.endpoints))
    with opened(tiny, clock) as table:
        bring(table, {}, {key("a"): first})
        for _ in range(3):  # a rejection leaks nothing
            assert set(rejected_names(table, {key("b"): second})) == {"default/b"}
        table.apply({}, [key("a")])
        clock.now += GRACE
        bring(table, {}, {key("b"): second})
        check_exact(tiny, {key("b"): second}, table.usage())


def test_a_full_map_accepts_changes_of_existing_entries(tiny: Maps) -> None:
    """The kernel has spare elements for replacements in a full hash map (htab_map_update_elem,
    extra_elems)."""
    full = {key("a"): exposed(1, frontends=8)}
    changed = {key("a"): full[key("a")]._replace(endpoints=packed(endpoint("10.1.7.7")), affinity_timeout=5)}
    with opened(tiny) as table:
        bring(table, {}, full)
        bring(table, full, changed)
        check_exact(tiny, changed, table.usage())
