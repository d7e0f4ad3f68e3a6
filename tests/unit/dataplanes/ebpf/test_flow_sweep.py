"""A walk over the flows removes what is over, whole flows at a time, and nothing that came to life again."""

import errno
from collections.abc import Callable, Iterator
from socket import IPPROTO_SCTP, IPPROTO_TCP, IPPROTO_UDP
from typing import cast

import pytest

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.flow_state import Flow, FlowTimeouts, keys
from ebpfproxy.dataplanes.ebpf.flow_sweep import BATCH, FlowSweep, Swept
from ebpfproxy.errors import KernelError
from ebpfproxy.kernel import bpf
from tests.support.flows import NS, FlowMap, a_flow, endpoints, entries

NOW = 1_000_000 * NS
LONG_AGO = NOW - 500_000 * NS
LIVE = abi.FLOW_REPLIED | abi.FLOW_ESTABLISHED


def sweep(flows: FlowMap, memory: bytearray | None = None) -> FlowSweep:
    memory = endpoints() if memory is None else memory
    return FlowSweep(cast(bpf.Map, flows), memory, FlowTimeouts(), lambda: NOW)


def never(worked: float) -> bool:
    return False


def test_flows_that_are_over_go_with_all_their_entries_and_the_others_stay() -> None:
    over = [a_flow(1, last_seen=LONG_AGO), a_flow(2, last_seen=LONG_AGO, masquerade="10.0.0.1")]
    alive = entries(a_flow(3, flags=LIVE, last_seen=NOW - 3600 * NS), a_flow(4, last_seen=NOW))
    flows = FlowMap(entries(*over) | alive)
    assert sweep(flows).run(never) == Swept(entries=4, expired=5)
    assert flows.contents == alive


def test_an_empty_map() -> None:
    assert sweep(FlowMap({})).run(never) == Swept()


@pytest.mark.parametrize("fresh", [abi.FROM_CLIENT, abi.BETWEEN, abi.FROM_ENDPOINT])
def test_a_flow_of_which_one_entry_is_in_use_stays_whole(fresh: int) -> None:
    flow = a_flow(last_seen=LONG_AGO, masquerade="10.0.0.1")
    contents = entries(flow)
    contents[keys(flow)[fresh]] = flow._replace(way=fresh, last_seen=NOW).pack()
    flows = FlowMap(contents)
    assert sweep(flows).run(never) == Swept(entries=3)
    assert flows.contents == contents


def test_an_entry_that_is_alone_goes_too() -> None:
    """The other ones were evicted: the map is LRU."""
    flow = a_flow(last_seen=LONG_AGO, masquerade="10.0.0.1")
    flows = FlowMap({keys(flow)[abi.BETWEEN]: flow._replace(way=abi.BETWEEN).pack()})
    assert sweep(flows).run(never) == Swept(entries=0, expired=1)


def test_another_flow_that_has_taken_a_key_stays() -> None:
    former = a_flow(last_seen=LONG_AGO)
    present = former._replace(endpoint_id=8, between_port=77, last_seen=NOW)
    flows = FlowMap(entries(former) | entries(present))
    assert keys(former)[abi.FROM_CLIENT] == keys(present)[abi.FROM_CLIENT]
    assert sweep(flows).run(never) == Swept(entries=2, expired=1)
    assert flows.contents == entries(present)


class Refreshed(FlowMap):
    """A packet of `flow` comes right after the `nth` look at its first entry."""

    def __init__(self, flow: Flow, nth: int) -> None:
        super().__init__(entries(flow))
        self._flow = flow
        self._key = keys(flow)[abi.FROM_CLIENT]
        self._left = nth

    def lookup(self, key: bytes) -> bytes | None:
        found = super().lookup(key)
        self._left -= key == self._key
        if key == self._key and not self._left and found:
            self.contents |= entries(self._flow._replace(last_seen=NOW))
        return found


def test_an_entry_that_is_refreshed_between_the_look_and_the_deletion_is_not_deleted() -> None:
    """Calico's cleaner re-checks for this reason: an entry may be used while its expiry is on its way."""
    flow = a_flow(last_seen=LONG_AGO, masquerade="10.0.0.1")
    flows = Refreshed(flow, nth=1)
    assert sweep(flows).run(never) == Swept(entries=3)
    assert flows.contents == entries(flow._replace(last_seen=NOW))


def test_when_a_packet_comes_in_the_midst_of_a_flows_removal_the_rest_of_it_stays() -> None:
    """The program restores from any entry those that are gone."""
    flow = a_flow(last_seen=LONG_AGO, masquerade="10.0.0.1")
    flows = Refreshed(flow, nth=2)
    assert sweep(flows).run(never) == Swept(entries=2, expired=1)
    left = set(flows.contents)
    assert left == {keys(flow)[abi.BETWEEN], keys(flow)[abi.FROM_ENDPOINT]}


RETIRED: dict[str, Callable[[], bytearray]] = {
    "not listed": lambda: endpoints(flags=abi.ENDPOINT_ON_NODE),
    "of another service": lambda: endpoints(service=6),
    "another endpoint by now": lambda: endpoints(port=9090),
    "beyond the map": lambda: bytearray(),
}


@pytest.mark.parametrize("memory", RETIRED.values(), ids=RETIRED.keys())
def test_udp_flows_of_a_retired_endpoint_go_at_once(memory: Callable[[], bytearray]) -> None:
    udp = a_flow(1, IPPROTO_UDP, abi.FLOW_REPLIED, NOW)
    staying = entries(a_flow(2, IPPROTO_TCP, LIVE, NOW), a_flow(3, IPPROTO_SCTP, abi.FLOW_REPLIED, NOW))
    flows = FlowMap(entries(udp) | staying)
    assert sweep(flows, memory()).run(never) == Swept(entries=4, retired=2)
    assert flows.contents == staying


def test_udp_flows_of_an_endpoint_that_drains_stay() -> None:
    """Listed, and in neither list: it still serves those it has."""
    flows = FlowMap(entries(a_flow(1, IPPROTO_UDP, abi.FLOW_REPLIED, NOW)))
    assert sweep(flows).run(never) == Swept(entries=2)


def test_udp_flows_of_the_node_to_an_endpoint_as_such_stay() -> None:
    flow = a_flow(1, IPPROTO_UDP, abi.FLOW_REPLIED | abi.FLOW_DIRECT, NOW)._replace(
        service_id=0, endpoint_id=0
    )
    assert sweep(FlowMap(entries(flow))).run(never) == Swept(entries=2)


def test_the_map_is_read_in_small_batches_with_a_rest_after_each() -> None:
    flows = FlowMap(entries(*(a_flow(n, last_seen=NOW) for n in range(3 * BATCH))))
    rests: list[float] = []

    def rest(worked: float) -> bool:
        rests.append(worked)
        return False

    assert sweep(flows).run(rest).entries == 6 * BATCH
    assert flows.calls == [BATCH] * 6
    assert len(rests) == 6
    assert flows.lookups == 0  # what is alive costs no call


def test_a_walk_ends_where_it_is_told_to() -> None:
    flows = FlowMap(entries(*(a_flow(n, last_seen=NOW) for n in range(3 * BATCH))))
    assert sweep(flows).run(lambda worked: True).entries == BATCH


def test_a_bucket_that_cannot_be_read_just_now_is_counted_and_the_walk_goes_on() -> None:
    class Locked(FlowMap):
        def batches(self, room: int) -> Iterator[tuple[bytes, bytes]]:
            yield b"", b""
            yield from super().batches(room)

    flows = Locked(entries(a_flow(last_seen=LONG_AGO)))
    assert sweep(flows).run(never) == Swept(expired=2, busy=1)


def test_a_bucket_that_is_locked_is_counted_and_left_for_the_next_walk() -> None:
    """cilium #35010: -EBUSY while somebody else has the bucket."""

    class Locked(FlowMap):
        def delete(self, key: bytes) -> bool:
            raise bpf.error(errno.EBUSY, "cannot delete from map flows")

    flows = Locked(entries(a_flow(last_seen=LONG_AGO)))
    found = sweep(flows).run(never)
    assert (found.expired, len(flows.contents)) == (0, 2)
    assert found.busy > 0


def test_another_error_ends_the_walk() -> None:
    class Refusing(FlowMap):
        def delete(self, key: bytes) -> bool:
            raise bpf.error(errno.EPERM, "cannot delete from map flows")

    with pytest.raises(KernelError, match="flows"):
        sweep(Refusing(entries(a_flow(last_seen=LONG_AGO)))).run(never)
