"""Map entries for the packet path: source ranges, ping addresses, used ports, and counters of services."""

import struct

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.entries import ServicePortKey
from ebpfproxy.backends.ebpf.maps import Maps
from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE
from ebpfproxy.linux.bpf.bpf import possible_cpus
from ebpfproxy.model.address import Address, Family, parse_address
from tests.kernel.service_table.samples import (
    BOTH,
    CLUSTER,
    GUARDED,
    LISTED,
    SEVERAL,
    WEB,
    Entries,
    bring,
    endpoint,
    entry,
    exposed,
    frontend,
    key,
    opened,
    packed,
)
from tests.kernel.service_table.steps import watched
from tests.support.clock import Clock
from tests.support.service_maps import View, check_exact

pytestmark = pytest.mark.kernel

U32 = struct.Struct("=I")


def admits(maps: Maps, service: ServicePortKey, client: str) -> bool:
    """As in a program: bpf_map_lookup_elem() of an LPM trie, with all bits of the client's address."""
    id_ = next(id_ for id_, name in View(maps).names.items() if name == service)
    found = maps["source_ranges"].lookup(abi.SOURCE_RANGE_KEY.pack(160, id_, parse_address(client)))
    return found == U32.pack(1)


def test_a_client_is_admitted_by_the_source_ranges_of_its_service(roomy: Maps) -> None:
    other = GUARDED._replace(
        frontends=(frontend("203.0.113.6", flags=abi.SERVICE_RESTRICTED),),
        source_ranges=entry([], [], sources=["10.0.0.0/8"]).source_ranges,
    )
    with opened(roomy) as table:
        bring(table, {}, {key("guarded"): GUARDED, key("other"): other})
        clients = ("198.51.7.7", "198.51.100.1", "192.0.2.7", "192.0.2.8", "10.2.3.4", "2001:db8::1")
        assert [c for c in clients if admits(roomy, key("guarded"), c)] == list(clients[:3])
        assert [c for c in clients if admits(roomy, key("other"), c)] == ["10.2.3.4"]


def test_a_range_of_all_addresses_applies_only_to_its_family(roomy: Maps) -> None:
    both = {
        key("four"): entry([frontend("203.0.113.5")], [], sources=["0.0.0.0/0"]),
        key("six", family=Family.IPV6): entry([frontend("fd00::5")], [], sources=["fd00::/8"]),
    }
    with opened(roomy) as table:
        bring(table, {}, both)
        assert table.read() == both
        assert admits(roomy, key("four"), "255.255.255.255")
        assert not admits(roomy, key("four"), "fd00::1")
        assert admits(roomy, key("six", family=Family.IPV6), "fdff::1")
        assert not admits(roomy, key("six", family=Family.IPV6), "10.0.0.1")


def test_a_client_in_both_old_and_new_ranges_is_admitted_at_every_step(roomy: Maps) -> None:
    """The common network of both is not written separately."""
    before = {key("web"): GUARDED._replace(source_ranges=entry([], [], sources=["10.0.0.0/8"]).source_ranges)}
    after = {key("web"): GUARDED._replace(source_ranges=entry([], [], sources=["10.1.0.0/16"]).source_ranges)}
    for start, end in ((before, after), (after, before)):
        with opened(roomy) as table:
            bring(table, table.read(), start)
            with watched(roomy, start, end) as steps:
                bring(table, start, end)
            assert len(steps) == 1 + 2  # one written, one deleted
            check_exact(roomy, end, table.usage())


def test_unchanged_source_ranges_are_not_written_again(roomy: Maps) -> None:
    with opened(roomy) as table:
        bring(table, {}, {key("guarded"): GUARDED})
        changed = {key("guarded"): GUARDED._replace(endpoints=packed())}
        with watched(roomy, {key("guarded"): GUARDED}, changed) as steps:
            bring(table, {key("guarded"): GUARDED}, changed)
        endpoints_and_services = 1 + len(GUARDED.frontends)
        addresses = 2  # without an endpoint their pings get no answer
        assert len(steps) == 1 + endpoints_and_services + addresses


def test_a_reused_id_has_no_source_ranges_of_its_previous_service(roomy: Maps) -> None:
    clock = Clock()
    with opened(roomy, clock) as table:
        bring(table, {}, {key("guarded"): GUARDED})
        ids = set(View(roomy).names)
        bring(table, {key("guarded"): GUARDED}, {})
        clock.now += GRACE
        bring(table, {}, {key("web"): WEB})
        assert set(View(roomy).names) == ids
        assert not View(roomy).sources


def test_an_address_of_two_frontends_is_deleted_with_the_last_one(roomy: Maps) -> None:
    first, second = (frontend("10.96.0.1", port, flags=abi.SERVICE_REJECT) for port in (80, 443))
    states = [
        {key("a"): entry([first], []), key("b"): entry([second], [])},
        {key("b"): entry([second], [])},
        {key("b"): entry([first], [])},
        {key("c"): entry([second, frontend("10.96.0.2", 443, flags=abi.SERVICE_REJECT)], [])},
        {},
    ]
    with opened(roomy) as table:
        for before, after in zip([{}, *states], states, strict=False):
            bring(table, before, after)
            wanted = {f.address for each in after.values() for f in each.frontends}
            assert View(roomy).pings.keys() == wanted


INSIDE, OUTSIDE = abi.PING_FROM_INSIDE, abi.PING_FROM_OUTSIDE
LOCAL = abi.ENDPOINT_LISTED | abi.ENDPOINT_LOCAL


def pings_of(maps: Maps) -> dict[Address, int]:
    """The clients that get a reply, by address. All frontends here are ClusterIPs."""
    pings = View(maps).pings
    assert all(clients & abi.PING_TO_CLUSTER_IP for clients in pings.values())
    return {address: clients & (INSIDE | OUTSIDE) for address, clients in pings.items()}


@pytest.mark.parametrize(("flags", "endpoints", "answered"), [
    (0, [CLUSTER], INSIDE | OUTSIDE),
    (0, [], 0),
    (abi.SERVICE_REJECT, [], INSIDE | OUTSIDE),
    (abi.SERVICE_EXTERNAL_LOCAL, [CLUSTER], INSIDE),
    (abi.SERVICE_EXTERNAL_LOCAL, [CLUSTER, BOTH], INSIDE | OUTSIDE),
    (abi.SERVICE_EXTERNAL_LOCAL, [LOCAL], OUTSIDE),
    (abi.SERVICE_EXTERNAL_LOCAL | abi.SERVICE_REJECT, [], INSIDE | OUTSIDE),
    (abi.SERVICE_INTERNAL_LOCAL, [CLUSTER], OUTSIDE),
    (abi.SERVICE_INTERNAL_LOCAL | abi.SERVICE_EXTERNAL_LOCAL, [CLUSTER, LISTED], 0),
    (abi.SERVICE_INTERNAL_LOCAL | abi.SERVICE_EXTERNAL_LOCAL, [BOTH], INSIDE | OUTSIDE),
    (abi.SERVICE_RESTRICTED, [CLUSTER], INSIDE | OUTSIDE),
])  # fmt: skip
def test_pings_of_a_client_are_answered_unless_the_frontend_drops_its_packets(
    roomy: Maps, flags: int, endpoints: list[int], answered: int
) -> None:
    places = [endpoint(f"10.1.0.{number}", each) for number, each in enumerate(endpoints, 1)]
    with opened(roomy) as table:
        bring(table, {}, {key("web"): entry([frontend("10.96.0.1", flags=flags)], places)})
        address = parse_address("10.96.0.1")
        assert pings_of(roomy) == ({address: answered} if answered else {})


def test_pings_follow_an_endpoint_that_leaves_the_node_and_returns(roomy: Maps) -> None:
    balancer = frontend("203.0.113.1", flags=abi.SERVICE_EXTERNAL_LOCAL)
    here = {key("web"): entry([balancer], [endpoint("10.1.0.1", BOTH)]), key("api"): exposed(7)}
    gone = here | {key("web"): entry([balancer], [endpoint("10.1.0.1", CLUSTER)])}
    with opened(roomy) as table:
        bring(table, {}, here)
        for before, after, answered in ((here, gone, INSIDE), (gone, here, INSIDE | OUTSIDE)):
            with watched(roomy, before, after):
                bring(table, before, after)
            assert pings_of(roomy)[balancer.address] == answered
            check_exact(roomy, after, table.usage())


def test_pings_of_an_address_are_answered_if_any_of_its_frontends_serves(roomy: Maps) -> None:
    """Two Services share the address of a load balancer. One has an endpoint on this node."""
    shared = [
        frontend("203.0.113.1", port, flags=abi.SERVICE_EXTERNAL_LOCAL | abi.SERVICE_INTERNAL_LOCAL)
        for port in (80, 443)
    ]
    address = shared[0].address
    here, away = endpoint("10.1.0.1", BOTH), endpoint("10.1.0.2", CLUSTER)
    states = [
        ({key("a"): entry(shared[:1], [here]), key("b"): entry(shared[1:], [away])}, INSIDE | OUTSIDE),
        ({key("a"): entry(shared[:1], [away]), key("b"): entry(shared[1:], [away])}, 0),
        ({key("a"): entry(shared[:1], [away]), key("b"): entry(shared[1:], [here])}, INSIDE | OUTSIDE),
        ({key("a"): entry(shared, [away])}, 0),
        ({key("b"): entry(shared, [here])}, INSIDE | OUTSIDE),
        ({}, 0),
    ]
    before: Entries = {}
    with opened(roomy) as table:
        for after, answered in states:
            bring(table, before, after)
            assert pings_of(roomy).get(address, 0) == answered
            check_exact(roomy, after, table.usage())
            before = after


def test_node_ports_have_no_ping_address(roomy: Maps) -> None:
    node_ports = entry([frontend("0.0.0.0", 30080), frontend("::", 30080)], [endpoint("10.1.0.1")])
    with opened(roomy) as table:
        bring(table, {}, {key("web"): node_ports})
        assert View(roomy).pings == {}


def test_missing_ping_addresses_are_restored_by_a_read(roomy: Maps) -> None:
    with opened(roomy) as table:
        bring(table, {}, SEVERAL)
        for packed, _ in list(roomy["frontend_addresses"].items()):
            roomy["frontend_addresses"].delete(packed)
    with opened(roomy) as other:
        assert other.read() == SEVERAL
        check_exact(roomy, SEVERAL, other.usage())


def test_a_port_of_two_services_stays_when_one_is_dropped(roomy: Maps) -> None:
    one, other = entry([frontend("10.96.0.1", 80)], []), entry([frontend("10.96.0.2", 80)], [])
    with opened(roomy) as table:
        bring(table, {}, {key("one"): one, key("other"): other})
        bring(table, {key("one"): one, key("other"): other}, {key("one"): one})
        assert View(roomy).ports == {(False, 6, 80)}
        bring(table, {key("one"): one}, {})
        assert View(roomy).ports == set()


def test_the_highest_and_the_lowest_port_of_each_protocol_have_separate_bits(roomy: Maps) -> None:
    of = [(p, port) for p in (6, 17, 132) for port in (1, 65535)]
    ends = [frontend(ip, port)._replace(protocol=p) for ip in ("10.96.0.1", "0.0.0.0") for p, port in of]
    with opened(roomy) as table:
        bring(table, {}, {key("web"): entry(ends, [])})
        assert View(roomy).ports == {(node_port, *port) for node_port in (False, True) for port in of}


def traffic_of(maps: Maps, service: int) -> bytes:
    found = maps["traffic"].lookup(U32.pack(service))
    assert found is not None
    return found


def test_the_counters_of_a_reused_id_begin_at_zero(roomy: Maps) -> None:
    """On each CPU. A service keeps its counters through all changes."""
    clock = Clock()
    some = bytes(range(1, 1 + abi.TRAFFIC.size)) * possible_cpus()
    with opened(roomy, clock) as table:
        bring(table, {}, {key("web"): WEB, key("api"): exposed(7)})
        ids = {name.name: id_ for id_, name in View(roomy).names.items()}
        for id_ in ids.values():
            roomy["traffic"].update(U32.pack(id_), some)
        bring(table, {key("web"): WEB}, {key("web"): WEB._replace(endpoints=packed())})
        table.read()
        assert traffic_of(roomy, ids["default/web"]) == some
        table.apply({}, [key("web")])
        clock.now += GRACE
        bring(table, {}, {key("next"): WEB})
        assert View(roomy).names[ids["default/web"]] == key("next")
        assert not any(traffic_of(roomy, ids["default/web"]))
        assert traffic_of(roomy, ids["default/api"]) == some
