"""Tenants whose Services do not fit: what they remove is gone, and those of other namespaces are served."""

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortEntry, ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.errors import TableFull
from ebpfproxy.model.address import Family, Protocol
from tests.kernel.service_table.samples import (
    BOTH,
    CLUSTER,
    Entries,
    bring,
    endpoint,
    entry,
    exposed,
    frontend,
    in_force,
    key,
    opened,
    packed,
    rows,
    weighted,
    wipe,
)
from tests.support.clock import Clock
from tests.support.service_maps import View, check_exact

pytestmark = pytest.mark.kernel

WEB = key("web")


def of(namespace: str, number: int = 0) -> ServicePortKey:
    return ServicePortKey(f"{namespace}/web-{number}", Protocol.TCP, Family.IPV4)


def addresses(of_service: ServicePortEntry) -> set[bytes]:
    return {each.address for each in of_service.endpoints}


def targets(served: ServicePortEntry | None) -> set[bytes]:
    assert served
    return set(served.endpoints.targets())


@pytest.mark.parametrize("algorithm", [abi.ALGORITHM_RANDOM, abi.ALGORITHM_ROUND_ROBIN])
@pytest.mark.parametrize("bits", [CLUSTER, BOTH])
def test_an_endpoint_is_removed_without_room(tiny: Maps, algorithm: int, bits: int) -> None:
    """A list of 5 takes 8 slots, one of 4 would take 4 more while both exist. All 16 are in use."""
    count = 5 if bits == BOTH else 9
    web = entry(
        [frontend("10.96.0.1")], [endpoint(f"10.1.0.{i}", bits) for i in range(count)], algorithm=algorithm
    )
    shorter = web._replace(endpoints=packed(*rows(web)[1:]))
    clock = Clock()
    with opened(tiny, clock) as table:
        bring(table, {}, {WEB: web})
        assert table.usage()["slots"] == (16, 16)
        (failure,) = table.apply({WEB: shorter}, ()).values()
        assert isinstance(failure, TableFull)
        check_exact(tiny, {WEB: shorter}, table.usage())
        assert table.read() == {WEB: shorter}
        clock.now += GRACE
        assert not table.apply({WEB: shorter}, ())
        check_exact(tiny, {WEB: shorter}, table.usage())


def test_a_replaced_endpoint_is_gone_and_the_new_one_comes_with_room(tiny: Maps) -> None:
    web = exposed(1, endpoints=15)
    moved = web._replace(endpoints=packed(*rows(web)[1:], endpoint("10.1.9.9")))
    clock = Clock()
    with opened(tiny, clock) as table:
        bring(table, {}, {WEB: web})
        assert table.apply({WEB: moved}, ())
        assert targets(in_force(table, WEB)) == targets(web) & targets(moved)
        check_exact(tiny, {WEB: web._replace(endpoints=packed(*rows(web)[1:]))}, table.usage())
        clock.now += GRACE
        table.apply({WEB: moved}, ())
        clock.now += GRACE
        table.apply({WEB: moved}, ())
        assert targets(in_force(table, WEB)) >= targets(web) & targets(moved)


def test_the_last_endpoint_and_a_frontend_are_removed_without_room(tiny: Maps) -> None:
    web = exposed(1, frontends=6, endpoints=9)
    other = exposed(2, frontends=2, endpoints=6)
    added = (frontend(f"10.96.9.{n}") for n in range(3))
    none = web._replace(frontends=(*web.frontends[:2], *added), endpoints=packed())
    with opened(tiny) as table:
        bring(table, {}, {WEB: web})
        table.apply({of("other"): other}, ())
        assert WEB in table.apply({WEB: none}, ())
        served = in_force(table, WEB)
        assert served
        assert (served.frontends, targets(served)) == (web.frontends[:2], set())
        assert not any(each.flags for each in View(tiny).endpoints if each.address in addresses(web))


@pytest.mark.parametrize(
    ("algorithm", "bits"),
    [
        (abi.ALGORITHM_MAGLEV, CLUSTER),
        (abi.ALGORITHM_SOURCE_HASH, CLUSTER),
        (abi.ALGORITHM_RANDOM, weighted(CLUSTER, 17)),
    ],
)
def test_without_room_for_weights_or_a_table_the_list_is_plain(tiny: Maps, algorithm: int, bits: int) -> None:
    web = entry(
        [frontend("10.96.0.1")], [endpoint("10.1.0.1", bits), endpoint("10.1.0.2")], algorithm=algorithm
    )
    plain = entry([frontend("10.96.0.1")], [endpoint("10.1.0.1"), endpoint("10.1.0.2")])
    with opened(tiny) as table:
        (failure,) = table.apply({WEB: web}, ()).values()
        assert "default/web: map slots is full" in failure.message
        assert in_force(table, WEB) == plain
        check_exact(tiny, {WEB: plain}, table.usage())
        assert table.read() == {WEB: plain}
        before = View(tiny).services
        assert table.apply({WEB: web}, ())
        assert View(tiny).services == before


def large(number: int) -> ServicePortEntry:
    """Most of every map of `tiny_maps`."""
    web = exposed(number, frontends=3, endpoints=5)
    guarded = tuple(each._replace(flags=abi.SERVICE_RESTRICTED) for each in web.frontends)
    sources = entry([], [], sources=[f"10.{number}.{i}.0/24" for i in range(2)]).source_ranges
    return web._replace(frontends=guarded, source_ranges=sources)


def test_a_namespace_that_fills_the_maps_leaves_room_for_others(tiny_maps: Maps) -> None:
    wipe(tiny_maps)
    wanted: Entries = {of("large", n): large(n) for n in range(1, 5)}
    small = {of("small"): exposed(9), of("smaller"): exposed(10)}
    with opened(tiny_maps) as table:
        rejected = table.apply(wanted, ())
        assert rejected
        assert all(key.name.startswith("large/") for key in rejected)
        assert any("full for namespace large" in failure.message for failure in rejected.values())
        assert not table.apply(small, ())
        served = {key: each for key, each in (wanted | small).items() if key not in rejected}
        check_exact(tiny_maps, served, table.usage())
        assert table.apply({of("large", 1): large(1)._replace(endpoints=packed())}, ()) == {}


def test_all_at_once_the_large_service_is_the_one_that_is_rejected(tiny_maps: Maps) -> None:
    wipe(tiny_maps)
    too_large = exposed(1, frontends=3, endpoints=14)
    others = {of("small", n): exposed(10 + n) for n in range(2)}
    with opened(tiny_maps) as table:
        assert set(table.apply({of("large"): too_large} | others, ())) == {of("large")}
        check_exact(tiny_maps, others, table.usage())
