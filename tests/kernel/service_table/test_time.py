"""A change that takes long postpones ServicePorts, but none that takes over a frontend. Large tables are
computed in parts."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.services.smaller import plain
from ebpfproxy.backends.ebpf.services.table import ServiceTable
from ebpfproxy.errors import KernelError, NotYet
from tests.kernel.service_table.samples import (
    BOTH,
    bring,
    endpoint,
    entry,
    exposed,
    frontend,
    key,
    opened,
    wipe,
)
from tests.support.bpf_place import BpfPlace, build_maps
from tests.support.service_maps import check_exact

pytestmark = pytest.mark.kernel

TABLES = 100
"""More changes than a large table needs parts."""


@pytest.fixture(scope="module")
def spacious_maps(place: BpfPlace) -> Iterator[Maps]:
    with contextlib.closing(
        Maps(build_maps(place, MapSizes(64, 1 << 19, 2048, 64, 16, 16, 64), "spacious"))
    ) as maps:
        yield maps


@pytest.fixture
def spacious(spacious_maps: Maps) -> Maps:
    wipe(spacious_maps)
    return spacious_maps


def hashed(n: int, endpoints: int = 200, flags: int = BOTH) -> ServicePortEntry:
    """Its table has 65,521 entries."""
    return entry(
        [frontend(f"10.96.1.{n}")],
        [endpoint(f"10.{n}.0.{i}", flags) for i in range(endpoints)],
        algorithm=abi.ALGORITHM_MAGLEV,
    )


def slow_clock() -> Callable[[], float]:
    """A clock with which a call computes a small part of a large table."""
    return itertools.count(1000.0, 0.002).__next__


def apply_again(
    table: ServiceTable, wanted: dict[ServicePortKey, ServicePortEntry]
) -> Iterator[dict[ServicePortKey, KernelError]]:
    """Apply what is postponed until nothing is. Yields what is postponed after each change."""
    rejected: dict[ServicePortKey, KernelError] = dict.fromkeys(wanted, KernelError(""))
    for _ in range(TABLES):
        rejected = table.apply({each: wanted[each] for each in rejected}, (), seconds=1)
        if not rejected:
            return
        assert all(isinstance(each, NotYet) for each in rejected.values())
        yield rejected
    raise AssertionError(f"{rejected} are still postponed")


def test_a_large_table_keeps_its_state_until_its_table_is_complete(spacious: Maps) -> None:
    with opened(spacious, slow_clock()) as table:
        before, after = {key("web"): hashed(1)}, {key("web"): hashed(1, endpoints=199)}
        bring(table, {}, before)
        count = 0
        for rejected in apply_again(table, after):
            (failure,) = rejected.values()
            assert isinstance(failure, NotYet)
            assert failure.has_begun
            check_exact(spacious, before, table.usage())
            count += 1
        assert count > 3
        check_exact(spacious, after, table.usage())


def test_a_new_service_has_a_plain_list_until_its_table_is_complete(spacious: Maps) -> None:
    wanted = {key(name): hashed(n) for n, name in enumerate(("a", "b"))}
    with opened(spacious, slow_clock()) as table:
        for rejected in apply_again(table, wanted):
            assert sum(isinstance(each, NotYet) and each.has_begun for each in rejected.values()) == 1
            served = {each: plain(of) if each in rejected else of for each, of in wanted.items()}
            check_exact(spacious, served, table.usage())
        check_exact(spacious, wanted, table.usage())


def test_namespaces_do_not_wait_for_tables_of_each_other(spacious: Maps) -> None:
    other = key("web")._replace(name="other/web")
    with opened(spacious, slow_clock()) as table:
        (first, *_) = apply_again(table, {key("a"): hashed(1), key("b"): hashed(2), other: hashed(3)})
        begun = {each for each, failure in first.items() if isinstance(failure, NotYet) and failure.has_begun}
        assert begun == {key("a"), other}


def test_endpoints_that_always_change_come_into_force(spacious: Maps) -> None:
    with opened(spacious, slow_clock()) as table:
        bring(table, {}, {key("web"): hashed(1)})
        for endpoints in range(150, 170):
            wanted = {key("web"): hashed(1, endpoints=endpoints)}
            if not table.apply(wanted, (), seconds=1):
                break
        else:
            raise AssertionError("no change came into force")
        check_exact(spacious, wanted, table.usage())


def test_a_table_that_is_not_requested_again_delays_no_other(spacious: Maps) -> None:
    with opened(spacious, slow_clock()) as table:
        assert table.apply({key("a"): hashed(1)}, (), seconds=1)
        assert not table.apply({}, [key("a")], seconds=1)
        *_, last = apply_again(table, {key("b"): hashed(2)})
        assert last.keys() == {key("b")}
        check_exact(spacious, {key("b"): hashed(2)}, table.usage())


def test_the_rest_of_a_long_change_keeps_its_state_until_the_next_one(roomy: Maps) -> None:
    before = {key(f"s{n}"): exposed(n) for n in range(4)}
    after = {key(f"s{n}"): exposed(n, endpoints=3) for n in range(4)}
    with opened(roomy, itertools.count().__next__) as table:
        assert not table.apply(before, ())
        rejected = table.apply(after, (), seconds=1)
        assert rejected
        assert all(isinstance(each, NotYet) for each in rejected.values())
        check_exact(roomy, {**after, **{each: before[each] for each in rejected}}, table.usage())
        for _ in range(4):
            rejected = table.apply({each: after[each] for each in rejected}, (), seconds=1)
        assert not rejected
        check_exact(roomy, after, table.usage())


def test_a_change_of_another_namespace_is_not_postponed(roomy: Maps) -> None:
    web = key("web")._replace(name="other/web")
    puts = {**{key(f"s{n}"): exposed(n) for n in range(20)}, web: exposed(20)}
    with opened(roomy, itertools.count().__next__) as table:
        rejected = table.apply(puts, (), seconds=3)
        assert rejected
        assert web not in rejected


def test_a_frontend_that_changes_its_service_port_is_not_postponed(roomy: Maps) -> None:
    a, b = frontend("10.96.0.1"), frontend("10.96.0.2")
    to = [endpoint("10.1.0.1")], [endpoint("10.1.0.2")]
    before = {key("a"): entry([a], to[0]), key("b"): entry([b], to[1])}
    after = {key("a"): entry([b], to[0]), key("b"): entry([a], to[1])}
    with opened(roomy, itertools.count().__next__) as table:
        assert not table.apply(before, ())
        assert not table.apply(after, (), seconds=0)
        check_exact(roomy, after, table.usage())
