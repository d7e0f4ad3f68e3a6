"""When the thread searches for stale flows, and which it ends. A table of flows replaces the kernel."""

import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from ebpfproxy.backends.netfilter import stale_conntrack
from ebpfproxy.backends.netfilter.stale_conntrack import SearchResult, StaleConntrack
from ebpfproxy.errors import KernelError, Rejected, Unsupported
from ebpfproxy.linux.netlink import conntrack
from ebpfproxy.model.address import Family, Protocol
from ebpfproxy.plan.service_plan import Frontend, NodePlan
from tests.support.build import endpoint
from tests.unit.plan.udp_flows import (
    LOCAL,
    NODE,
    ONE,
    TO_ONE,
    TO_TWO,
    TWO,
    UDP,
    Flow,
    flow,
    gone,
    place,
    plan,
)

PATIENCE = 60.0
V4, V6 = Family.IPV4, Family.IPV6


class Table:
    """The flows of the kernel, and the reads. `during` is called within each read."""

    def __init__(self) -> None:
        self.flows: list[Flow] = []
        self.asked: list[Family] = []
        self.failure: KernelError | None = None
        self.rejections = 0
        self.undeletable: set[Flow] = set()
        self.during: Callable[[], object] = lambda: None

    def read(self, protocol: Protocol, of: Family) -> list[Flow]:
        assert protocol is UDP
        self.asked.append(of)
        if self.failure:
            self.rejections += 1
            raise self.failure
        self.during()
        return list(self.flows)

    def delete(self, one: Flow) -> bool:
        if one in self.undeletable:
            raise Rejected("busy")
        if one not in self.flows:
            return False
        self.flows.remove(one)
        return True


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table()
    monkeypatch.setattr(conntrack, "flows", made.read)
    monkeypatch.setattr(conntrack, "delete", made.delete)
    return made


class Watched:
    """The thread, and the searches that it reported."""

    def __init__(self, table: Table) -> None:
        self.searches: queue.SimpleQueue[SearchResult] = queue.SimpleQueue()
        self._table = table
        self._counted = 0
        self.stale = StaleConntrack(self._count)

    def next_search(self) -> tuple[Family, int, int]:
        """Return the next search: the family, how many flows were ended, how many could not be."""
        return self.searches.get(timeout=PATIENCE)[:3]

    def idle(self) -> bool:
        """Wait until all requests are processed. Return whether there was no search besides those taken."""
        ends: queue.SimpleQueue[bool] = queue.SimpleQueue()
        while True:
            self.stale._jobs.put(lambda flows: ends.put(self._is_done()))
            if ends.get(timeout=PATIENCE):
                return self.searches.empty()

    def _is_done(self) -> bool:
        """Called in the thread. Return whether nothing is due. It is never called within a search."""
        return not self.stale._due and len(self._table.asked) == self._counted + self._table.rejections

    def _count(self, result: SearchResult) -> None:
        self._counted += 1
        self.searches.put(result)


@pytest.fixture
def watched(table: Table) -> Iterator[Watched]:
    made = Watched(table)
    yield made
    table.during = lambda: None
    made.stale.close()
    assert not made.stale._thread.is_alive()


def bring(watched: Watched, *changes: object) -> None:
    for changed in changes:
        assert isinstance(changed, dict)
        watched.stale.expect(changed)
    watched.stale.in_force()


def test_flows_of_a_removed_endpoint_are_ended_and_others_stay(table: Table, watched: Watched) -> None:
    table.flows = [TO_ONE, TO_TWO, flow("8.8.8.8:53", "10.1.0.1:5353")]
    bring(watched, plan(ONE, TWO))
    assert watched.next_search() == (V4, 0, 0)
    bring(watched, plan(TWO))
    assert watched.next_search() == (V4, 1, 0)
    assert TO_ONE not in table.flows
    assert len(table.flows) == 2


def test_flows_are_not_read_before_the_sync_has_succeeded(table: Table, watched: Watched) -> None:
    watched.stale.expect(plan(ONE))
    assert watched.idle()
    assert table.asked == []


def test_flows_are_not_read_if_no_udp_plan_changed(table: Table, watched: Watched) -> None:
    bring(watched, plan(ONE))
    assert watched.next_search() == (V4, 0, 0)
    bring(watched, plan(ONE, protocol=Protocol.TCP), {})
    bring(watched, plan(ONE))
    watched.stale.in_force()
    assert watched.idle()
    assert table.asked == [V4]


def test_only_the_family_that_changed_is_read(table: Table, watched: Watched) -> None:
    bring(watched, plan(endpoint("fd01::1"), ips=("fd00::53",)))
    assert watched.next_search() == (V6, 0, 0)
    assert watched.idle()
    assert table.asked == [V6]


def test_requests_during_a_search_are_combined_into_one(table: Table, watched: Watched) -> None:
    inside, proceed = threading.Event(), threading.Event()

    def during() -> None:
        inside.set()
        assert proceed.wait(PATIENCE)

    table.during = during
    bring(watched, plan(ONE))
    assert inside.wait(PATIENCE)
    for number in range(10):
        bring(watched, plan(endpoint(f"10.1.0.{number}")))
    proceed.set()
    assert watched.next_search() == (V4, 0, 0)
    assert watched.next_search() == (V4, 0, 0)
    assert watched.idle()
    assert table.asked == [V4, V4]


def test_a_flow_that_a_new_rule_created_during_a_search_is_not_ended(table: Table, watched: Watched) -> None:
    """Rules are in the kernel before the sync has returned, and clients use them at once."""

    def sync_begins() -> None:
        table.during = lambda: None
        watched.stale.expect(plan(TWO))
        table.flows.append(TO_TWO)

    bring(watched, plan(endpoint("10.1.0.3")))
    assert watched.next_search() == (V4, 0, 0)
    table.flows = [TO_ONE]
    table.during = sync_begins
    bring(watched, plan(endpoint("10.1.0.4")))
    assert watched.next_search() == (V4, 1, 0)
    assert table.flows == [TO_TWO]
    watched.stale.in_force()
    assert watched.next_search() == (V4, 0, 0)
    assert table.flows == [TO_TWO]


def test_flows_of_a_service_deleted_during_a_search_are_ended_by_the_next_one(
    table: Table, watched: Watched
) -> None:
    def sync() -> None:
        table.during = lambda: None
        bring(watched, gone(plan(ONE)))

    table.flows = [TO_ONE]
    table.during = sync
    bring(watched, plan(ONE))
    assert watched.next_search() == (V4, 0, 0)
    assert watched.next_search() == (V4, 1, 0)
    assert table.flows == []


def test_a_removed_endpoint_is_forgotten_after_its_flows_were_ended(table: Table, watched: Watched) -> None:
    bring(watched, plan(ONE))
    bring(watched, gone(plan(ONE)))
    bring(watched, plan(ONE, called="other", ips=("10.96.0.77",)))
    while not watched.idle():
        watched.next_search()
    table.flows = [TO_ONE]  # somebody else has the address now
    watched.stale.search()
    assert sorted([watched.next_search(), watched.next_search()], key=str) == [(V4, 0, 0), (V6, 0, 0)]
    assert table.flows == [TO_ONE]


def test_a_flow_that_could_not_be_ended_is_tried_again(
    table: Table, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale_conntrack, "_RETRY_S", 0.01)
    table.flows, table.undeletable = [TO_ONE], {TO_ONE}
    bring(watched, plan(ONE))
    assert watched.next_search() == (V4, 0, 0)
    bring(watched, gone(plan(ONE)))
    assert watched.next_search() == (V4, 0, 1)
    table.undeletable = set()
    while table.flows:
        watched.next_search()


def test_a_failed_read_is_retried(table: Table, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stale_conntrack, "_RETRY_S", 0.01)
    table.flows, table.failure = [TO_TWO], Rejected("no room")
    bring(watched, plan(ONE))
    while len(table.asked) < 3:
        assert watched.idle()
    table.failure = None
    assert watched.next_search() == (V4, 1, 0)
    assert watched.idle()


def test_an_unsupported_kernel_is_logged_once_and_not_retried(
    table: Table, watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stale_conntrack, "_RETRY_S", 0.0)
    table.failure = Unsupported("cannot be listed", "modprobe it")
    for endpoints in ([ONE], [TWO], [ONE]):
        bring(watched, plan(*endpoints))
        assert watched.idle()
    watched.stale.close()
    assert table.asked == [V4, V4, V4]
    (values,) = [record.__dict__["values"] for record in caplog.records]
    assert values == {"reason": "cannot be listed", "hint": "modprobe it"}


def test_a_rejected_plan_ends_no_flow_until_it_is_in_force(table: Table, watched: Watched) -> None:
    table.flows = [TO_ONE]
    bring(watched, plan(ONE))
    assert watched.next_search() == (V4, 0, 0)
    rejected = plan(TWO)
    watched.stale.expect(rejected)
    watched.stale.in_force(rejected.keys())
    watched.stale.in_force(rejected.keys())
    assert watched.idle()
    watched.stale.in_force()
    assert watched.next_search() == (V4, 1, 0)
    watched.stale.in_force()
    assert watched.idle()


def test_flows_of_a_node_port_are_found_by_the_networks_of_the_node(table: Table, watched: Watched) -> None:
    table.flows = [flow(f"{NODE}:30053", "10.1.0.2:5353")]
    watched.stale.expect(plan(ONE, node_port=30053), NodePlan(node_port_networks=frozenset(LOCAL)))
    watched.stale.in_force()
    assert watched.next_search() == (V4, 1, 0)


def test_flows_of_frontends_that_only_a_previous_run_served_are_ended(table: Table, watched: Watched) -> None:
    left = flow("10.96.0.99:53", "10.1.0.9:5353")
    table.flows = [TO_ONE, left]
    watched.stale.inherit([Frontend(*place("10.96.0.53:53"), UDP), Frontend(*place("10.96.0.99:53"), UDP)])
    bring(watched, plan(ONE))
    assert watched.next_search() == (V4, 1, 0)
    assert table.flows == [TO_ONE]


def test_close_finishes_requested_searches(table: Table) -> None:
    table.flows = [TO_ONE]
    watched = Watched(table)
    bring(watched, plan(TWO))
    watched.stale.close()
    assert table.flows == []
    assert not watched.stale._thread.is_alive()
