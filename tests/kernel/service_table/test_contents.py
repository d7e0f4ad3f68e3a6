"""ServiceTable writes exactly the given entries to the maps."""

import contextlib
import re
import struct
from collections.abc import Iterator

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import FrontendEntry
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.linux.bpf.bpf import Map
from ebpfproxy.model.address import Protocol, parse_address
from tests.kernel.service_table.samples import (
    API,
    SEVERAL,
    WEB,
    bring,
    endpoint,
    entry,
    exposed,
    frontend,
    key,
    opened,
    packed,
    rows,
    wipe,
)
from tests.kernel.service_table.steps import watched
from tests.support.bpf_place import BpfPlace
from tests.support.clock import Clock
from tests.support.service_maps import View, check_exact

pytestmark = pytest.mark.kernel


def test_written_entries_are_read_back_also_by_a_new_process(roomy: Maps) -> None:
    with opened(roomy) as table:
        assert table.read() == {}
        bring(table, {}, SEVERAL)
        check_exact(roomy, SEVERAL, table.usage())
        assert table.read() == SEVERAL
    with opened(roomy) as other:
        assert other.read() == SEVERAL
        check_exact(roomy, SEVERAL, other.usage())


def test_reading_changes_nothing(roomy: Maps) -> None:
    with opened(roomy) as table:
        bring(table, {}, SEVERAL)
        before = [sorted(roomy[name].items()) for name in ("services", "service_names", "slots", "endpoints")]
        for _ in range(3):
            table.read()
        after = [sorted(roomy[name].items()) for name in ("services", "service_names", "slots", "endpoints")]
    assert before == after


def test_dropping_everything_empties_the_maps(roomy: Maps) -> None:
    with opened(roomy) as table:
        bring(table, {}, SEVERAL)
        bring(table, SEVERAL, {})
        check_exact(roomy, {}, table.usage())
        assert table.usage()["slots"][0] == 0


def test_dropping_an_unknown_service_is_no_error(roomy: Maps) -> None:
    with opened(roomy) as table:
        table.read()
        assert table.apply({}, [key("unknown")]) == {}


def test_an_endpoint_that_stays_keeps_its_id(roomy: Maps) -> None:
    """Affinity and unconnected sockets store ids, which must not change when other endpoints do."""
    with opened(roomy) as table:
        bring(table, {}, {key("web"): WEB})
        before = {place.address: id_ for id_, place in View(roomy).listed().items()}
        more = WEB._replace(endpoints=packed(endpoint("10.1.0.0"), *rows(WEB)[1:], endpoint("10.1.0.7")))
        bring(table, {key("web"): WEB}, {key("web"): more})
        after = {place.address: id_ for id_, place in View(roomy).listed().items()}
    stays = parse_address("10.1.0.2")
    assert before[stays] == after[stays]
    assert len(after) == 3


def test_a_list_that_stays_the_same_is_not_written_again(roomy: Maps) -> None:
    with opened(roomy) as table:
        bring(table, {}, {key("web"): WEB})
        before = View(roomy).services
        exposed = WEB._replace(frontends=tuple(sorted((*WEB.frontends, frontend("203.0.113.2")))))
        bring(table, {key("web"): WEB}, {key("web"): exposed})
        after = View(roomy).services
    assert before.items() <= after.items()


def test_the_freed_slots_of_a_service_that_shrinks_are_not_reachable(roomy: Maps) -> None:
    """Regression, kubernetes-sigs/kpng: slots above the new count were never deleted."""
    large = WEB._replace(endpoints=packed(*(endpoint(f"10.1.0.{n}") for n in range(1, 10))))
    with opened(roomy) as table:
        bring(table, {}, {key("web"): large})
        bring(table, {key("web"): large}, {key("web"): WEB})
        check_exact(roomy, {key("web"): WEB}, table.usage())
        assert table.usage()["slots"][0] == 2


def test_one_endpoint_of_two_services_is_listed_for_each(roomy: Maps) -> None:
    """Regression, kubernetes-sigs/kpng: ids made of address and port collided. An id belongs to one
    service."""
    wanted = {
        key("one"): entry([frontend("10.96.0.1")], [endpoint("10.1.0.1"), endpoint("10.1.0.1", port=81)]),
        key("two"): entry([frontend("10.96.0.2")], [endpoint("10.1.0.1"), endpoint("10.1.0.2")]),
    }
    with opened(roomy) as table:
        bring(table, {}, wanted)
        check_exact(roomy, wanted, table.usage())
        bring(table, wanted, {key("two"): wanted[key("two")]})
        check_exact(roomy, {key("two"): wanted[key("two")]}, table.usage())


# Frontends that move to another service


def test_a_frontend_moves_to_another_service_in_one_delta(roomy: Maps) -> None:
    moved = FrontendEntry(parse_address("203.0.113.1"), 80, Protocol.TCP, 3, 0)
    before = {key("a"): entry([frontend("10.96.0.1"), moved], [endpoint("10.1.0.1")])}
    before[key("b")] = entry([frontend("10.96.0.2")], [endpoint("10.1.0.2")])
    after = {
        key("a"): before[key("a")]._replace(frontends=(frontend("10.96.0.1"),)),
        key("b"): before[key("b")]._replace(frontends=(frontend("10.96.0.2"), moved)),
    }
    for start, end in ((before, after), (after, before)):
        wipe(roomy)
        with opened(roomy) as table:
            bring(table, {}, start)
            bring(table, start, end)
            check_exact(roomy, end, table.usage())
            assert table.read() == end


def test_two_services_swap_their_frontends(roomy: Maps) -> None:
    one, two = frontend("10.96.0.1"), frontend("10.96.0.2")
    before = {
        key("a"): entry([one], [endpoint("10.1.0.1")]),
        key("b"): entry([two], [endpoint("10.1.0.2")]),
    }
    after = {k: e._replace(frontends=(two,) if k == key("a") else (one,)) for k, e in before.items()}
    with opened(roomy) as table:
        bring(table, {}, before)
        with watched(roomy, before, after):
            bring(table, before, after)
        check_exact(roomy, after, table.usage())


def test_a_service_recreated_under_another_name_takes_over_without_a_gap(roomy: Maps) -> None:
    """The frontend is replaced, not deleted and written again."""
    with opened(roomy) as table:
        bring(table, {}, {key("old"): WEB})
        with watched(roomy, {key("old"): WEB}, {key("new"): WEB}) as steps:
            bring(table, {key("old"): WEB}, {key("new"): WEB})
        check_exact(roomy, {key("new"): WEB}, table.usage())
    wanted = {(f.address, f.port, f.protocol) for f in WEB.frontends}
    assert steps
    assert all(seen >= wanted for seen in steps)


def remember(maps: Maps, service: int, client: int, endpoint_id: int) -> None:
    address = bytes(12) + struct.pack("=I", client)
    packed = abi.AFFINITY_KEY.pack(address, service, abi.CONSTANTS["CLIENT_ADDRESS"])
    maps["affinity"].update(packed, abi.AFFINITY.pack(1, endpoint_id, 0))


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("change", ["turned off", "dropped"])
def test_affinity_starts_empty_when_it_is_turned_on_again_or_the_id_is_reused(
    roomy: Maps, change: str, restarts: bool
) -> None:
    """The entries of other services stay."""
    clock = Clock()
    other = entry([frontend("10.96.0.7")], [endpoint("10.1.0.7")], affinity=60)
    lasting = {key("other"): other}
    with contextlib.ExitStack() as tables:
        table = tables.enter_context(opened(roomy, clock))
        bring(table, {}, {key("api"): API, **lasting})
        ids = {name: id_ for id_, name in View(roomy).names.items()}
        for client in range(5):
            remember(roomy, ids[key("api")], client, 1)
            remember(roomy, ids[key("other")], client, 2)
        changed = {key("api"): API._replace(affinity_timeout=700), **lasting}
        bring(table, {key("api"): API, **lasting}, changed)
        assert len(list(roomy["affinity"].items())) == 10
        without = (
            lasting if change == "dropped" else {key("api"): API._replace(affinity_timeout=0), **lasting}
        )
        bring(table, changed, without)
        clock.now += GRACE
        if restarts:
            table = tables.enter_context(opened(roomy, clock))
            table.read()
        successor = key("next") if change == "dropped" else key("api")
        bring(table, without, {successor: API, **lasting})
        assert View(roomy).names[ids[key("api")]] == successor
        left = [abi.AFFINITY_KEY.unpack(packed)[1] for packed, _ in roomy["affinity"].items()]
    assert left == [ids[key("other")]] * 5


def test_a_service_that_loses_affinity_causes_no_walk_over_the_clients(
    roomy: Maps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each loss of affinity walked over the complete map."""
    walked: list[str] = []
    original = Map.batches

    def batches(self: Map, size: int) -> Iterator[tuple[bytes, bytes]]:
        walked.append(self.name)
        return original(self, size)

    monkeypatch.setattr(Map, "batches", batches)
    wanted = {key(str(n)): exposed(n)._replace(affinity_timeout=60) for n in range(3)}
    with opened(roomy) as table:
        bring(table, {}, wanted)
        walked.clear()
        for each in wanted:
            bring(table, {each: wanted[each]}, {})
        assert walked == []
        more = {key(f"more-{n}"): exposed(10 + n)._replace(affinity_timeout=60) for n in range(3)}
        bring(table, {}, more)  # their ids are fresh, since the others rest
        assert walked == []


PINNED = re.compile(r'^PINNED\("[\w$]+", (?:struct )?(\w+), (?:struct )?(\w+), (\w+),', re.MULTILINE)


def test_the_maps_have_the_sizes_that_python_packs(roomy: Maps, place: BpfPlace) -> None:
    """Regression, projectcalico/calico 2a9648d33f. Compares the kernel's sizes with those read from abi.h."""
    declared = PINNED.findall((abi.source_directory() / "maps.h").read_text())
    sizes = {"u32": 4, "u64": 8} | {name: layout.size for name, layout in abi.LAYOUTS.items()}
    wanted = {name: (sizes[key_], sizes[value]) for key_, value, name in declared}
    pinned = {path.name for path in (place.bpffs / "roomy" / "maps").iterdir()}
    assert wanted.keys() | {"events"} == pinned, "a ring buffer has no keys and values"
    assert {name: (roomy[name].shape.key_size, roomy[name].shape.value_size) for name in wanted} == wanted
