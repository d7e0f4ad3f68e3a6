"""A walk over the flows removes both entries of those that are over, and none in use."""

import errno
from collections.abc import Callable, Iterator
from socket import IPPROTO_SCTP, IPPROTO_TCP, IPPROTO_UDP

import pytest

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.flows.state import Flow, FlowTimeouts
from ebpfproxy.backends.ebpf.flows.sweep import BATCH, FlowSweep, Swept
from ebpfproxy.errors import KernelError
from ebpfproxy.linux.bpf import bpf
from tests.support.flows import NS, FlowMap, Tables, a_flow, endpoints, entries, reply_entries, seen

NOW = 1_000_000 * NS
LONG_AGO = NOW - 500_000 * NS
CLOSED = abi.FLOW_CLIENT_FIN | abi.FLOW_ENDPOINT_FIN


def sweep(tables: Tables, timeouts: FlowTimeouts | None = None) -> FlowSweep:
    return FlowSweep(tables.maps(), timeouts or FlowTimeouts(), lambda: NOW)


def never(worked: float) -> bool:
    return False


def test_flows_that_are_over_lose_both_entries_and_the_others_stay() -> None:
    over = [a_flow(1, last_seen=LONG_AGO), a_flow(2, last_seen=LONG_AGO, masquerade="10.0.0.1")]
    over.append(a_flow(3, flags=CLOSED, last_seen=NOW - 60 * NS))
    alive = [a_flow(4, last_seen=NOW - 3600 * NS), a_flow(5, last_seen=NOW, masquerade="10.0.0.1")]
    tables = Tables(*over, *alive)
    assert sweep(tables).run(never) == Swept(entries=2, expired=3, replies=2)
    assert tables.has(*alive)


def test_a_walk_over_empty_maps_removes_nothing() -> None:
    assert sweep(Tables()).run(never) == Swept()


@pytest.mark.parametrize("times", [(NOW, LONG_AGO), (LONG_AGO, NOW)], ids=["client", "endpoint"])
@pytest.mark.parametrize("protocol", [IPPROTO_TCP, IPPROTO_UDP, IPPROTO_SCTP])
def test_a_flow_stays_while_one_side_sends(times: tuple[int, int], protocol: int) -> None:
    flow = seen(a_flow(protocol=protocol, masquerade="10.0.0.1"), *times)
    tables = Tables(flow)
    assert sweep(tables).run(never) == Swept(entries=1, replies=1)
    assert tables.has(flow)


def test_a_flow_whose_client_has_closed_stays_while_the_endpoint_sends() -> None:
    flow = seen(a_flow(flags=abi.FLOW_CLIENT_FIN), NOW - 7200 * NS, NOW - 3000 * NS)
    tables = Tables(flow)
    assert sweep(tables).run(never) == Swept(entries=1, replies=1)
    assert sweep(tables, FlowTimeouts(tcp_close_wait=2000)).run(never) == Swept(expired=1)


def test_a_flow_without_a_reply_entry_is_removed_by_its_own_timeout() -> None:
    tables = Tables(a_flow(1, last_seen=LONG_AGO), a_flow(2, last_seen=NOW))
    tables.replies.contents.clear()
    assert sweep(tables).run(never) == Swept(entries=1, expired=1)
    assert tables.flows.contents == entries(a_flow(2, last_seen=NOW))


def test_a_flow_whose_reply_entry_belongs_to_another_flow_is_removed_without_it() -> None:
    previous = a_flow(1, last_seen=LONG_AGO, masquerade="10.0.0.1")
    present = previous._replace(client_port=77)
    present = seen(present, NOW, NOW)
    assert previous.reply_entry()[0] == present.reply_entry()[0]
    tables = Tables(previous, present)
    assert sweep(tables).run(never) == Swept(entries=1, expired=1, replies=1)
    assert tables.has(present)


@pytest.mark.parametrize(
    ("protocol", "flags", "silent", "goes"),
    [
        (IPPROTO_TCP, 0, 7200, False),
        (IPPROTO_TCP, 0, 90000, True),
        (IPPROTO_TCP, CLOSED, 20, False),
        (IPPROTO_TCP, CLOSED, 60, True),
        (IPPROTO_UDP, 0, 100, False),
        (IPPROTO_UDP, 0, 200, True),
    ],
)
@pytest.mark.parametrize("other", [False, True], ids=["gone", "another"])
def test_a_reply_entry_without_its_flow_is_removed_by_its_own_timeout(
    protocol: int, flags: int, silent: int, goes: bool, other: bool
) -> None:
    flow = a_flow(1, protocol, flags, NOW - silent * NS)
    present = seen(flow._replace(reply_port=99), NOW, NOW)
    tables = Tables(*[present] if other else [])
    expected = dict(tables.replies.contents)
    tables.replies.contents |= reply_entries(flow)
    found = sweep(tables).run(never)
    assert (found.orphaned, found.expired, found.replies) == (goes, 0, other + (not goes))
    assert tables.replies.contents == (expected if goes else expected | reply_entries(flow))
    assert tables.flows.contents == (entries(present) if other else {})


class Refreshed(FlowMap):
    """A packet refreshes the entry at `key` right after the `nth` lookup of it."""

    def __init__(self, contents: dict[bytes, bytes], fresh: dict[bytes, bytes], nth: int) -> None:
        super().__init__(contents)
        self._fresh = fresh
        self._left = nth

    def lookup(self, key: bytes) -> bytes | None:
        found = super().lookup(key)
        self._left -= 1
        if not self._left:
            self.contents |= self._fresh
        return found


def test_a_client_that_sends_after_its_batch_was_read_keeps_its_flow() -> None:
    """Calico's cleaner checks again for this reason."""
    flow = a_flow(last_seen=LONG_AGO)
    tables = Tables(flow)

    class Late(FlowMap):
        def batches(self, room: int) -> Iterator[tuple[bytes, bytes]]:
            yield from list(super().batches(room))
            self.contents |= entries(seen(flow, NOW, 0))

        def lookup(self, key: bytes) -> bytes | None:
            self.contents |= entries(seen(flow, NOW, 0))
            return super().lookup(key)

    tables.flows = Late(entries(flow))
    assert sweep(tables).run(never) == Swept(entries=1, replies=1)
    assert tables.has(seen(flow, NOW, LONG_AGO))


def test_a_flow_whose_endpoint_sends_while_it_is_removed_is_put_back() -> None:
    flow = a_flow(last_seen=LONG_AGO, masquerade="10.0.0.1")
    fresh = seen(flow, LONG_AGO, NOW)
    tables = Tables(flow)
    tables.replies = Refreshed(reply_entries(flow), reply_entries(fresh), nth=1)
    assert sweep(tables).run(never) == Swept(entries=1, replies=1)
    assert tables.has(fresh)


def test_a_flow_that_begins_while_the_previous_one_is_removed_stays() -> None:
    """The programs have established it with the same tuples, and so with the same keys."""
    flow = a_flow(last_seen=LONG_AGO)
    fresh = seen(flow, NOW, NOW)._replace(endpoint_id=9)
    tables = Tables(flow)

    class Begun(Refreshed):
        def lookup(self, key: bytes) -> bytes | None:
            found = super().lookup(key)
            if self._left == 0:
                tables.flows.delete = begin  # type: ignore[method-assign]
            return found

    def begin(key: bytes) -> bool:
        tables.flows.contents[key] = fresh.entry()[1]
        return True

    tables.replies = Begun(reply_entries(flow), reply_entries(fresh), nth=1)
    assert sweep(tables).run(never) == Swept(entries=1, replies=1)
    assert tables.has(fresh)


RETIRED: dict[str, Callable[[], bytearray]] = {
    "not listed": lambda: endpoints(flags=abi.ENDPOINT_ON_NODE),
    "of another service": lambda: endpoints(service=6),
    "another endpoint by now": lambda: endpoints(port=9090),
    "beyond the map": lambda: bytearray(),
}


@pytest.mark.parametrize("memory", RETIRED.values(), ids=RETIRED.keys())
def test_udp_flows_of_an_unlisted_endpoint_are_removed_at_once(memory: Callable[[], bytearray]) -> None:
    staying = [a_flow(2, IPPROTO_TCP, last_seen=NOW), a_flow(3, IPPROTO_SCTP, last_seen=NOW)]
    tables = Tables(a_flow(1, IPPROTO_UDP, last_seen=NOW), *staying)
    tables.endpoints = memory()
    assert sweep(tables).run(never) == Swept(entries=2, retired=1, replies=2)
    assert tables.has(*staying)


def test_udp_flows_of_a_draining_endpoint_stay() -> None:
    """It is listed, but in neither list: it still serves its existing flows."""
    assert sweep(Tables(a_flow(1, IPPROTO_UDP, last_seen=NOW))).run(never) == Swept(entries=1, replies=1)


def test_direct_udp_flows_stay() -> None:
    """They belong to no Service."""
    flow = a_flow(1, IPPROTO_UDP, abi.FLOW_DIRECT, NOW)._replace(service_id=0, endpoint_id=0)
    assert sweep(Tables(flow)).run(never) == Swept(entries=1, replies=1)


def test_half_open_flows_have_their_own_timeouts() -> None:
    tcp = [a_flow(n, last_seen=NOW - seconds * NS, half_open=True) for n, seconds in ((1, 50), (2, 70))]
    udp = [a_flow(n, IPPROTO_UDP, last_seen=NOW - n * 10 * NS, half_open=True) for n in (2, 5)]
    tables = Tables(*tcp, *udp)
    assert sweep(tables).run(never) == Swept(half_open=2, expired=2, replies=2)
    assert tables.has(tcp[0], udp[0])


def test_a_half_open_flow_is_over_when_neither_side_sends() -> None:
    alive = seen(a_flow(1, half_open=True), NOW - 70 * NS, NOW - 50 * NS)
    tables = Tables(alive)
    assert sweep(tables).run(never) == Swept(half_open=1, replies=1)


def test_a_walk_over_crowded_maps_removes_closed_flows_earlier_and_no_others() -> None:
    closed = [a_flow(n, flags=CLOSED, last_seen=NOW - n * NS) for n in (2, 4, 8, 20)]
    others = [
        a_flow(100, flags=abi.FLOW_CLIENT_FIN, last_seen=NOW - 20 * NS),
        a_flow(101, last_seen=NOW - 20 * NS),
        a_flow(102, last_seen=NOW - 20 * NS, half_open=True),
    ]
    tables = Tables(*closed, *others)
    assert sweep(tables).run(never).expired == 0
    assert sweep(tables).run(never, crowded=True).expired == 2
    assert tables.has(*closed[:2], *others)
    assert sweep(tables, FlowTimeouts(tcp_fin=3)).run(never, crowded=True).expired == 1


def test_the_number_of_established_flows_is_written_for_the_programs() -> None:
    half_open = [a_flow(n, last_seen=NOW, half_open=True) for n in range(200, 205)]
    over = [a_flow(n, last_seen=LONG_AGO) for n in range(300, 303)]
    tables = Tables(*(a_flow(n, last_seen=NOW) for n in range(BATCH + 1)), *half_open, *over)
    assert tables.established() is None
    sweep(tables).run(lambda worked: True)  # which has not seen all of them
    assert tables.established() is None
    sweep(tables).run(never)
    assert tables.established() == BATCH + 1


def test_the_maps_are_read_in_small_batches_with_a_rest_after_each() -> None:
    flows = tuple(a_flow(n, last_seen=NOW) for n in range(3 * BATCH))
    tables = Tables(*flows)
    rests: list[float] = []

    def rest(worked: float) -> bool:
        rests.append(worked)
        return False

    found = sweep(tables).run(rest)
    assert (found.entries, found.replies) == (3 * BATCH,) * 2
    for each in (tables.flows, tables.replies):
        assert (each.calls, each.lookups) == ([BATCH] * 3, 0)  # what is alive costs no call
    assert len(rests) == 6


@pytest.mark.parametrize("batches", [1, 3, 4])
def test_a_walk_ends_when_rest_returns_true(batches: int) -> None:
    flows = tuple(a_flow(n, last_seen=NOW) for n in range(3 * BATCH))
    tables = Tables(*flows)
    left = iter(range(1, 100))
    found = sweep(tables).run(lambda worked: next(left) == batches)
    assert found.entries + found.replies == batches * BATCH


def test_a_locked_bucket_is_counted_and_the_walk_continues() -> None:
    class Locked(FlowMap):
        def batches(self, room: int) -> Iterator[tuple[bytes, bytes]]:
            yield b"", b""
            yield from super().batches(room)

    tables = Tables(a_flow(last_seen=LONG_AGO))
    tables.flows = Locked(tables.flows.contents)
    assert sweep(tables).run(never) == Swept(expired=1, busy=1)


def rejecting(tables: Tables, name: str, number: int) -> None:
    """Make a map reject deletions."""

    class Refusing(FlowMap):
        def delete(self, key: bytes) -> bool:
            raise bpf.error(number, "cannot delete from map flows")

    setattr(tables, name, Refusing(getattr(tables, name).contents))


def flows_left(flow: Flow, tables: Tables) -> tuple[int, int]:
    return len(tables.flows.contents), len(tables.replies.contents)


def test_a_deletion_in_a_locked_bucket_is_counted_and_left_to_the_next_walk() -> None:
    """cilium #35010: -EBUSY while another CPU has locked the bucket."""
    flow = a_flow(last_seen=LONG_AGO)
    tables = Tables(flow)
    rejecting(tables, "flows", errno.EBUSY)
    assert sweep(tables).run(never) == Swept(entries=1, replies=1, busy=1)
    assert flows_left(flow, tables) == (1, 1)


def test_a_reply_entry_that_cannot_be_deleted_with_its_flow_is_removed_by_the_next_walk() -> None:
    tables = Tables(a_flow(last_seen=LONG_AGO))
    rejecting(tables, "replies", errno.EBUSY)
    assert sweep(tables).run(never) == Swept(expired=1, replies=1, busy=2)
    tables.replies = FlowMap(tables.replies.contents)
    assert sweep(tables).run(never) == Swept(orphaned=1)


def test_another_error_ends_the_walk() -> None:
    tables = Tables(a_flow(last_seen=LONG_AGO))
    rejecting(tables, "flows", errno.EPERM)
    with pytest.raises(KernelError, match="flows"):
        sweep(tables).run(never)
