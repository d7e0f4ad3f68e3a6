"""Rejected entries are retried in parts, each once after a change, and postponed ones first."""

import logging
from collections.abc import Mapping

import pytest

from ebpfproxy.agent.reconciler import NOT_SERVED
from ebpfproxy.backends.delta import Delta
from ebpfproxy.errors import KernelError, NotYet
from tests.support.build import service
from tests.support.fake_backend import Entry, FakeBackend, FakeKernel, Key
from tests.unit.agent.agent import Agent, gone

MANY = [service(f"s{number}", ips=[f"10.96.1.{number}"]) for number in range(1, 11)]


class Slow(FakeBackend):
    """Applies two puts at a time."""

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        keys = list(delta.puts)
        rejected = super().apply(Delta({key: delta.puts[key] for key in keys[:2]}, delta.drops))
        return {**rejected, **{key: NotYet("later") for key in keys[2:]}}


class OneDrop(FakeBackend):
    """Drops one entry at a time."""

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        drops = sorted(delta.drops, key=str)
        first, others = drops[:1], drops[1:]
        rejected = super().apply(Delta(delta.puts, frozenset(first)))
        return {**rejected, **{key: NotYet("later") for key in others}}


class OneTable(FakeBackend):
    """Postpones everything. The put with the greatest key has begun."""

    tried: list[list[Key]]

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        self.tried.append(list(delta.puts))
        rejected = {key: NotYet("later") for key in delta.puts}
        rejected[max(rejected)].has_begun = True
        return rejected


class Partly(FakeBackend):
    """Rejects each put, and serves it nevertheless."""

    def apply(self, delta: Delta[Key, Entry]) -> Mapping[Key, KernelError]:
        super().apply(delta)
        rejected = {key: KernelError("full") for key in delta.puts}
        for failure in rejected.values():
            failure.in_force = True
        return rejected


def rounds(agent: Agent, retries: int) -> int:
    """The number of further syncs until none remains."""
    count = 0
    while agent.reconciler.sync(False, retries).remaining:
        count += 1
        assert count < 100
    return count


@pytest.mark.parametrize("retries", [1, 3, 100])
def test_postponed_entries_come_into_force_without_a_message(
    caplog: pytest.LogCaptureFixture, retries: int
) -> None:
    agent = Agent(plane=Slow())
    agent.sync()
    with caplog.at_level(logging.WARNING):
        done = agent.sync(*MANY)
        assert (done.put, done.rejected, done.remaining) == (2, 0, True)
        rounds(agent, retries)
    assert len(agent.served()) == len(MANY)
    assert NOT_SERVED not in caplog.messages


@pytest.mark.parametrize("beside", [0, 1, 5])
def test_the_changes_of_a_namespace_need_not_wait_for_those_of_another(beside: int) -> None:
    """In the meantime the other namespace changes further Services in each sync, all of which are
    postponed."""
    agent = Agent(plane=Slow())
    agent.sync()
    assert agent.sync(*MANY).remaining
    wanted = [service(f"quiet/w{number}", ips=[f"10.96.2.{number}"]) for number in range(1, 4)]
    agent.fold(*wanted)
    for number in range(8):
        agent.fold(*(service(f"t{number}-{i}", ips=[f"10.96.{3 + number}.{1 + i}"]) for i in range(beside)))
        agent.plan()
        agent.reconciler.sync(False, 2)
    assert {f"quiet/{each.name.name}" for each in wanted} <= agent.served()


def test_of_a_namespace_the_oldest_retry_is_next() -> None:
    agent = Agent(plane=Slow())
    agent.sync()
    agent.sync(*MANY)
    waiting = len(MANY) - 2
    for number in range(waiting):
        agent.fold(service(f"t{number}", ips=[f"10.96.3.{1 + number}"]))
        agent.plan()
        agent.reconciler.sync(False, 2)
    assert {f"default/{each.name.name}" for each in MANY} <= agent.served()


def test_postponed_drops_come_into_force() -> None:
    agent = Agent(plane=OneDrop())
    agent.sync(*MANY)
    before = len(agent.kernel.ports)
    done = agent.sync(*(gone(each.name.name) for each in MANY))
    assert (done.dropped, done.remaining) == (1, True)
    assert rounds(agent, 1) >= before - 2
    assert not agent.served()


@pytest.mark.parametrize("retries", [2, 100])
def test_what_has_begun_is_retried_before_everything_else(retries: int) -> None:
    plane = OneTable()
    plane.tried = []
    agent = Agent(plane=plane)
    agent.sync(*MANY)
    for _ in range(2 * len(MANY)):
        agent.reconciler.sync(False, retries)
    begun = max(plane.tried[0])
    assert all(each[0] == begun for each in plane.tried[1:])
    assert set().union(*plane.tried[1:]) == set(plane.tried[0])


def test_a_rejected_entry_of_which_a_part_is_in_force_is_dropped_with_its_service() -> None:
    """Regression: the agent served a deleted Service until its end."""
    agent = Agent(plane=Partly())
    agent.sync()
    agent.sync(MANY[0])
    assert len(agent.served()) == 1
    assert agent.sync().put == 0
    agent.sync(gone("s1"))
    assert not agent.served()


def test_rejected_entries_are_retried_in_parts_and_all_of_them_after_a_change() -> None:
    agent = Agent(FakeKernel(capacity=4))
    agent.sync()
    assert agent.sync(*MANY).rejected == 6
    assert rounds(agent, 2) == 2  # three parts, then nothing more
    assert len(agent.served()) == 4
    agent.fold(gone("s1"), gone("s2"))
    agent.plan()
    agent.reconciler.sync(False, 1)
    rounds(agent, 1)
    assert len(agent.served()) == 4
    assert agent.reconciler.sync(False).rejected == 4


def test_a_rejected_entry_that_is_no_longer_wanted_is_forgotten() -> None:
    agent = Agent(FakeKernel(capacity=9))
    agent.sync()
    assert agent.sync(*MANY).rejected == 1
    rejected = {f"default/{each.name.name}" for each in MANY} - agent.served()
    done = agent.sync(gone(rejected.pop().partition("/")[2]))
    assert (done.rejected, done.remaining) == (0, False)
