"""Flows of the packet path, from one layout's map into another's."""

import contextlib
import errno
import os
from socket import htons

import pytest

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.carry_over_flows import CarriedFlows
from ebpfproxy.dataplanes.ebpf.carry_over_ids import Translation
from ebpfproxy.dataplanes.ebpf.flow_state import Flow, keys
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.kernel import bpf
from ebpfproxy.kernel.bpf import Map
from ebpfproxy.model.address import Address
from tests.kernel.carry_over.layouts import (
    DNS,
    ONE,
    OTHER,
    TCP,
    TWO,
    U32,
    UDP,
    VIP,
    Both,
    Layout,
    service,
)
from tests.kernel.device_table.plane import refuse
from tests.support.bpf_place import BpfPlace, build_maps, create_map
from tests.support.flows import NS, a_flow, entries
from tests.support.system_calls import counted

pytestmark = pytest.mark.kernel

NODE = "192.0.2.10"
LRU_HASH = 9  # BPF_MAP_TYPE_LRU_HASH
REPLIED, ESTABLISHED = abi.FLOW_REPLIED, abi.FLOW_ESTABLISHED


def to(place: Address, ids: tuple[int, int], flow: Flow) -> Flow:
    """The same flow, to the service DNS, with these ids."""
    there = flow._replace(frontend=VIP, endpoint=place, endpoint_port=htons(5353))
    return there._replace(service_id=ids[0], endpoint_id=ids[1])


def unpacked(*flows: Flow) -> dict[bytes, Flow]:
    return {key: Flow.unpack(value) for key, value in entries(*flows).items()}


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("masquerade", [False, True])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_a_flow_keeps_everything_but_its_ids(
    both: Both, protocol: int, masquerade: bool, family: int
) -> None:
    by = "" if not masquerade else NODE if family == 4 else "2001:db8::a"
    flow = a_flow(1, protocol, REPLIED | abi.FLOW_CLIENT_FIN, 77 * NS, by, family)
    both.former.track(to(TWO, both.former.ids(TWO), flow))
    assert both.carry() == 2 + masquerade
    assert both.present.tracked() == unpacked(to(TWO, both.present.ids(TWO), flow))


def test_a_flow_of_the_node_itself_comes_along(both: Both) -> None:
    flow = a_flow(flags=abi.FLOW_NODE, masquerade=NODE)
    both.former.track(to(ONE, both.former.ids(), flow))
    assert both.carry() == 2
    assert both.present.tracked() == unpacked(to(ONE, both.present.ids(), flow))


def test_a_flow_whose_endpoint_is_gone_goes_on_and_counts_as_retired(both: Both) -> None:
    both.former.track(to(OTHER, (both.former.ids()[0], 63), a_flow()))
    both.carry()
    assert both.present.tracked() == unpacked(to(OTHER, (both.present.ids()[0], 0), a_flow()))


def test_a_flow_whose_id_was_given_to_another_endpoint_counts_as_retired(both: Both) -> None:
    """What the flow says of its endpoint holds, not what has that id now."""
    both.former.track(to(OTHER, both.former.ids(TWO), a_flow()))
    both.carry()
    assert both.present.tracked() == unpacked(to(OTHER, (both.present.ids()[0], 0), a_flow()))


def test_a_flow_whose_service_is_gone_goes_on(both: Both) -> None:
    both.present.serve({})
    both.former.track(to(ONE, both.former.ids(), a_flow()))
    both.carry()
    assert both.present.tracked() == unpacked(to(ONE, (0, 0), a_flow()))


def test_twice_is_as_once(both: Both) -> None:
    both.former.track(to(ONE, both.former.ids(), a_flow(masquerade=NODE)))
    with both.carrying() as carry_over:
        assert carry_over.copy() == 3
        once = both.present.tracked()
        assert carry_over.copy() == 0
    assert both.carry() == 0
    assert both.present.tracked() == once


# While programs write to the present map


def test_what_the_programs_have_seen_since_stays(both: Both) -> None:
    """Also a later flow of the same client, which was sent elsewhere."""
    mine = to(ONE, both.present.ids(), a_flow(1, last_seen=50 * NS))
    elsewhere = to(TWO, both.present.ids(TWO), a_flow(2, last_seen=20 * NS))
    both.present.track(mine, elsewhere)
    before = both.present.tracked()
    for number in (1, 2):
        flow = a_flow(number, flags=abi.FLOW_RESET, last_seen=40 * NS)
        both.former.track(to(ONE, both.former.ids(), flow))
    both.carry()
    after = both.present.tracked()
    assert {key: after[key] for key in before} == before
    way_back = keys(to(ONE, both.former.ids(), a_flow(2)))[abi.BETWEEN]  # another endpoint's is another key
    assert after.keys() - before.keys() == {way_back}


def test_what_begins_between_the_two_copies(both: Both) -> None:
    first, second = a_flow(1), a_flow(2, masquerade=NODE)
    both.former.track(to(ONE, both.former.ids(), first))
    with both.carrying() as carry_over:
        assert carry_over.copy() == 2
        both.former.track(to(TWO, both.former.ids(TWO), second))
        assert carry_over.copy() == 3
    ids = both.present.ids(), both.present.ids(TWO)
    assert both.present.tracked() == unpacked(to(ONE, ids[0], first), to(TWO, ids[1], second))


def test_what_a_flow_comes_to_between_the_two_copies(both: Both) -> None:
    """It is copied between ingress and egress of its first packet, then masqueraded and answered."""
    begun = a_flow(1, flags=abi.FLOW_MASQUERADE, last_seen=10 * NS)
    complete = a_flow(1, flags=REPLIED | ESTABLISHED, last_seen=11 * NS, masquerade=NODE)
    both.former.track(to(ONE, both.former.ids(), begun))
    with both.carrying() as carry_over:
        assert carry_over.copy() == 2
        both.former.track(to(ONE, both.former.ids(), complete))
        assert carry_over.copy() == 3
    assert both.present.tracked() == unpacked(to(ONE, both.present.ids(), complete))


def test_what_both_layouts_saw_of_a_flow_within_one_second_is_put_together(both: Both) -> None:
    """`last_seen` is written once a second, flags at once."""
    flow = a_flow(1, flags=REPLIED, last_seen=10 * NS)
    both.former.track(to(ONE, both.former.ids(), flow))
    with both.carrying() as carry_over:
        carry_over.copy()
        closed = flow._replace(flags=REPLIED | abi.FLOW_CLIENT_FIN)
        both.former.track(to(ONE, both.former.ids(), closed))
        masqueraded = a_flow(1, flags=REPLIED | abi.FLOW_ENDPOINT_FIN, last_seen=10 * NS, masquerade=NODE)
        both.present.track(to(ONE, both.present.ids(), masqueraded))
        carry_over.copy()
    both_closed = masqueraded._replace(flags=masqueraded.flags | abi.FLOW_CLIENT_FIN)
    found = both.present.tracked()
    for way in (abi.FROM_CLIENT, abi.BETWEEN):
        wanted = to(ONE, both.present.ids(), both_closed)
        assert found[keys(wanted)[way]] == wanted._replace(way=way)


def bring_over(layout: Layout, *flows: Flow) -> None:
    """As the programs do with what is lent to them."""
    brought = (
        flow._replace(flags=flow.flags | abi.FLOW_BROUGHT, service_id=0, endpoint_id=0) for flow in flows
    )
    layout.track(*brought)


def test_a_flow_that_the_programs_brought_over_gets_its_ids(both: Both) -> None:
    """Also an entry that the former programs did not know, and those that were copied, and lost then."""
    begun = a_flow(1, flags=REPLIED, last_seen=10 * NS)
    masqueraded = a_flow(1, flags=REPLIED, last_seen=12 * NS, masquerade=NODE)
    both.former.track(to(ONE, both.former.ids(), begun))
    with both.carrying() as carry_over:
        carry_over.lend()
        carry_over.copy()
        bring_over(both.present, to(ONE, both.former.ids(), masqueraded))
        assert carry_over.copy() == 0
        for _ in range(2):
            carry_over.take_back()
    assert both.present.tracked() == unpacked(to(ONE, both.present.ids(), masqueraded))


def test_a_flow_that_was_brought_over_and_is_forgotten_there_counts_as_retired(both: Both) -> None:
    flow = a_flow(1, flags=REPLIED, last_seen=10 * NS)
    bring_over(both.present, to(ONE, both.former.ids(), flow))
    both.former.track(to(TWO, both.former.ids(TWO), flow))  # another one has its place
    with both.carrying() as carry_over:
        carry_over.take_back()
    assert both.present.tracked() == unpacked(to(ONE, (0, 0), flow))


def test_what_the_former_programs_brought_over_themselves_is_copied_as_nobodys(both: Both) -> None:
    flow = to(ONE, both.former.ids(), a_flow(1, flags=REPLIED, last_seen=10 * NS))
    bring_over(both.former, flow)
    both.carry()
    assert both.present.tracked() == unpacked(flow._replace(service_id=0, endpoint_id=0))


def test_ids_that_the_programs_chose_stay(both: Both) -> None:
    """The flow was begun anew, by a Service of another name."""
    begun = a_flow(1, flags=REPLIED, last_seen=10 * NS)
    both.former.track(to(ONE, (9, 9), begun))
    both.present.track(to(ONE, both.present.ids(), begun._replace(flags=0)))
    assert both.carry() == 2
    assert both.present.tracked() == unpacked(to(ONE, both.present.ids(), begun))


def test_the_former_map_is_lent_whatever_its_size_and_taken_back(both: Both) -> None:
    lent = both.present.maps["former_flows"]
    with both.carrying() as carry_over:
        assert carry_over.lend()
        assert carry_over.lend()
        assert lent.lookup(U32.pack(0)) == U32.pack(both.former.maps["flows"].shape.id)
        for _ in range(2):
            carry_over.take_back()
            assert lent.lookup(U32.pack(0)) is None


def test_a_former_map_that_cannot_be_lent_ends_nothing(
    both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both.former.track(to(ONE, both.former.ids(), a_flow()))
    with both.carrying() as carry_over:
        with monkeypatch.context() as patch:
            patch.setattr(Map, "update", refuse)
            assert not carry_over.lend()
        assert "flows that begin while programs are replaced" in caplog.text
        assert carry_over.copy() == 2


def test_a_flow_that_is_only_busy_costs_no_system_call(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = to(ONE, both.former.ids(), a_flow(last_seen=10 * NS))
    both.former.track(flow)
    with both.carrying() as carry_over:
        carry_over.copy()
        both.former.track(flow._replace(last_seen=12 * NS))
        monkeypatch.setattr(Map, "update", lambda *_: pytest.fail("written again"))
        assert carry_over.copy() == 0


def test_a_flow_that_ended_between_the_two_copies_does_not_come_back(both: Both) -> None:
    both.former.track(to(ONE, both.former.ids(), a_flow()))
    with both.carrying() as carry_over:
        carry_over.copy()
        for key in both.present.tracked():
            both.present.maps["flows"].delete(key)
        assert carry_over.copy() == 0
    assert not both.present.tracked()


def test_an_entry_that_is_locked_is_left_out_and_the_others_come(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression, cilium/cilium#35010: a bucket was busy, and the whole operation failed."""
    both.present.track(to(TWO, both.present.ids(TWO), a_flow(99)))  # so that they are written one by one
    both.former.track(*(to(ONE, both.former.ids(), a_flow(number)) for number in range(10)))
    locked = keys(to(ONE, both.former.ids(), a_flow(3)))[abi.BETWEEN]
    update = Map.update

    def refuse(self: Map, key: bytes, value: bytes, flags: int = 0) -> None:
        if key == locked:
            raise bpf.error(errno.EBUSY, os.strerror(errno.EBUSY))
        update(self, key, value, flags)

    monkeypatch.setattr(Map, "update", refuse)
    assert both.carry() == 19
    assert locked not in both.present.tracked()


# Much


def test_a_smaller_map_keeps_the_flows_seen_last(both: Both) -> None:
    former, room = both.former, both.present.maps["flows"].shape.max_entries
    ids = former.ids()
    count = former.maps["flows"].shape.max_entries * 3 // 8  # of two entries; before the kernel evicts any
    former.track(*(to(ONE, ids, a_flow(number, last_seen=number * NS)) for number in range(count)))
    seen = sorted(flow.last_seen for flow in former.tracked().values())
    assert len(seen) > room
    both.carry()
    carried = [flow.last_seen for flow in both.present.tracked().values()]
    assert set(carried) <= set(seen[-room:])
    assert len(carried) > room * 3 / 4  # the kernel evicts some before the map is full


def test_400000_entries_of_200000_flows_take_a_system_call_for_a_hundred_of_them(
    place: BpfPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each would take seconds, in which the former programs go on without the copies."""
    sizes = MapSizes(64, 64, 64, 16, 16, 524288, 16)
    layout = Layout(build_maps(place, sizes, f"v{abi.ABI_VERSION}-flows"))
    with contextlib.closing(layout):
        layout.serve({DNS: service("10.1.0.1", "10.1.0.2")})
        former = layout.maps["flows"]
        former.update_all(many(200_000, layout.ids()))
        known = sum(len(keys) for keys, _ in former.batches(4096)) // abi.FLOW_KEY.size
        assert known > 390_000  # such a map evicts a few before it is full
        ids = Translation(layout.maps["service_names"], layout.table.ids_of)
        present = create_map(LRU_HASH, abi.FLOW_KEY.size, abi.FLOW.size, former.shape.max_entries)
        calls = counted(monkeypatch)
        with contextlib.closing(present):
            carried = CarriedFlows(former, present)
            assert carried.copy(ids) == known
            assert carried.copy(ids) == 0
        assert 0 < calls() < known / 100


def many(count: int, ids: tuple[int, int]) -> list[tuple[bytes, bytes]]:
    """Each with a client's address of its own; packed by hand, which takes a tenth of the time."""
    found = []
    flow = to(ONE, ids, a_flow(flags=REPLIED, last_seen=NS))
    for key, value in entries(flow).items():
        for number in range(count):
            client = flow.client[:12] + number.to_bytes(4)
            found.append((key.replace(flow.client, client), value.replace(flow.client, client)))
    return found
