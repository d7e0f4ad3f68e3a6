"""Ranges and Ids against a model that keeps a list of every place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as HypothesisBundle
from hypothesis.stateful import (
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from ebpfproxy.backends.ebpf.services.slot_ranges import GRACE, Ids, Ranges
from tests.support.examples import examples

COUNTS = st.integers(1, 9) | st.sampled_from((16, 17, 33))


def rounded(count: int) -> int:
    return next(1 << order for order in range(64) if 1 << order >= count)


class RangesMachine(RuleBasedStateMachine):
    """`taken`: the owner of each place. `resting`: the time from which a place may be used again."""

    held: HypothesisBundle[tuple[int, int]] = HypothesisBundle("held")

    @initialize(capacity=st.sampled_from((1, 2, 13, 16, 31, 64, 100)), can_wait=st.booleans())
    def make(self, capacity: int, can_wait: bool) -> None:
        self.capacity = capacity
        self.can_wait = can_wait
        self.ranges = Ranges(capacity, self.end_grace)
        self.now = 100.0
        self.taken: set[int] = set()
        self.resting: dict[int, float] = {}
        self.in_force: set[int] = set()  # resting places that new programs find

    def end_grace(self) -> bool:
        if self.can_wait:
            self.resting = {place: until for place, until in self.resting.items() if place in self.in_force}
        return self.can_wait

    def free(self, first: int, size: int) -> bool:
        places = range(first, first + size)
        return all(p < self.capacity and p not in self.taken and p not in self.resting for p in places)

    def wake(self) -> None:
        self.resting = {place: until for place, until in self.resting.items() if until > self.now}

    @rule(target=held, count=COUNTS)
    def allocate(self, count: int) -> tuple[int, int] | MultipleResults[tuple[int, int]]:
        first = self.ranges.allocate(count, self.now)
        self.wake()
        size = rounded(count)
        if first is None:
            fits = [at for at in range(0, self.capacity, size) if self.free(at, size)]
            assert not fits, "there was room"
            return multiple()
        assert first % size == 0
        assert self.free(first, size), "somebody has it, or it rests"
        self.taken.update(range(first, first + size))
        return first, count

    @rule(target=held, first=st.integers(0, 120), count=COUNTS)
    def reserve(self, first: int, count: int) -> tuple[int, int] | MultipleResults[tuple[int, int]]:
        size = rounded(count)
        possible = first % size == 0 and self.free(first, size)
        assert self.ranges.reserve(first, count) is possible
        if not possible:
            return multiple()
        self.taken.update(range(first, first + size))
        return first, count

    @rule(range_=consumes(held), in_force=st.booleans())
    def release(self, range_: tuple[int, int], in_force: bool) -> None:
        first, count = range_
        self.ranges.release(first, count, self.now, in_force=in_force)
        places = range(first, first + rounded(count))
        self.taken.difference_update(places)
        (self.in_force.update if in_force else self.in_force.difference_update)(places)
        self.resting.update(dict.fromkeys(places, self.now + GRACE))

    @rule(count=COUNTS)
    def allocate_and_undo(self, count: int) -> None:
        """It does not rest: the same room is there again."""
        first = self.ranges.allocate(count, self.now)
        self.wake()
        if first is None:
            return
        self.ranges.undo(first, count)
        assert self.ranges.reserve(first, count)
        self.ranges.undo(first, count)

    @rule(seconds=st.sampled_from((0.1, GRACE / 2, GRACE)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take_over(self) -> None:
        """As when the kernel is read back: what is found is reserved, what rests goes on resting."""
        previous, self.ranges = self.ranges, Ranges(self.capacity, self.end_grace)
        assert all(self.ranges.reserve(place, 1) for place in sorted(self.taken))
        self.ranges.inherit(previous)

    @invariant()
    def what_is_used_is_counted(self) -> None:
        if hasattr(self, "ranges"):
            assert self.ranges.used == len(self.taken)
            assert self.ranges.resting >= len(self.resting)

    @precondition(lambda self: hasattr(self, "ranges") and not self.taken)
    @rule()
    def everything_comes_back(self) -> None:
        self.now += GRACE
        largest = 1 << (self.capacity.bit_length() - 1)
        assert self.ranges.allocate(largest, self.now) == 0
        self.ranges.release(0, largest, self.now)
        self.now += GRACE
        self.wake()
        firsts = [self.ranges.allocate(1, self.now) for _ in range(self.capacity)]
        assert sorted(f for f in firsts if f is not None) == list(range(self.capacity))
        assert self.ranges.allocate(1, self.now) is None
        for first in range(self.capacity):
            self.ranges.release(first, 1, self.now)
        self.in_force.clear()
        self.resting = dict.fromkeys(range(self.capacity), self.now + GRACE)


class IdsMachine(RuleBasedStateMachine):
    held: HypothesisBundle[int] = HypothesisBundle("held")

    @initialize(
        target=held,
        capacity=st.sampled_from((1, 2, 5, 12)),
        adopted=st.sets(st.integers(1, 11)) | st.none(),
        can_wait=st.booleans(),
    )
    def make(self, capacity: int, adopted: set[int] | None, can_wait: bool) -> MultipleResults[int]:
        self.capacity = capacity
        self.can_wait = can_wait
        self.in_force: set[int] = set()  # resting ids that new programs find
        self.ids = Ids(capacity, self.end_grace)
        self.now = 100.0
        self.taken = {id_ for id_ in adopted or () if id_ < capacity}
        self.resting: dict[int, float] = {}
        if adopted is not None:
            self.ids.adopt(set(self.taken))
        return multiple(*sorted(self.taken))

    def end_grace(self) -> bool:
        if self.can_wait:
            self.resting = {id_: until for id_, until in self.resting.items() if id_ in self.in_force}
        return self.can_wait

    @rule(target=held)
    def allocate(self) -> int | MultipleResults[int]:
        id_ = self.ids.allocate(self.now)
        self.resting = {i: until for i, until in self.resting.items() if until > self.now}
        busy = self.taken | self.resting.keys()
        if id_ is None:
            assert busy == set(range(1, self.capacity)), "there was one"
            return multiple()
        assert 1 <= id_ < self.capacity
        assert id_ not in busy
        self.taken.add(id_)
        return id_

    @rule(id_=consumes(held), in_force=st.booleans())
    def release(self, id_: int, in_force: bool) -> None:
        self.ids.release(id_, self.now, in_force=in_force)
        (self.in_force.add if in_force else self.in_force.discard)(id_)
        self.taken.remove(id_)
        self.resting[id_] = self.now + GRACE

    @rule(seconds=st.sampled_from((0.1, GRACE / 2, GRACE)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def allocate_and_undo(self) -> None:
        id_ = self.ids.allocate(self.now)
        if id_ is not None:
            self.ids.undo(id_)
        assert self.ids.allocate(self.now) == id_
        if id_ is not None:
            self.ids.undo(id_)
        self.resting = {i: until for i, until in self.resting.items() if until > self.now}

    @rule()
    def take_over(self) -> None:
        self.ids.adopt(set(self.taken))

    @invariant()
    def what_is_used_is_counted(self) -> None:
        if hasattr(self, "ids"):
            assert self.ids.used == len(self.taken)


_SETTINGS = settings(max_examples=examples(60), stateful_step_count=40)
TestRanges = RangesMachine.TestCase
TestRanges.settings = _SETTINGS
TestIds = IdsMachine.TestCase
TestIds.settings = _SETTINGS


@given(st.integers(1, 300), st.lists(COUNTS, max_size=40))
@settings(max_examples=examples(50))
def test_ranges_that_were_reserved_at_the_start_are_not_allocated(capacity: int, counts: list[int]) -> None:
    """A new process reserves the ranges of the previous one in another order."""
    previous = Ranges(capacity)
    had = [(first, count) for count in counts if (first := previous.allocate(count, 0.0)) is not None]
    ranges = Ranges(capacity)
    assert all(ranges.reserve(first, count) for first, count in reversed(had))
    assert ranges.used == previous.used
    taken = {place for first, count in had for place in range(first, first + rounded(count))}
    while (first := ranges.allocate(1, 0.0)) is not None:
        assert first not in taken
        taken.add(first)
    assert taken == set(range(capacity))


def test_a_released_range_rests_for_the_complete_grace_period() -> None:
    ranges = Ranges(4)
    assert ranges.allocate(4, 10.0) == 0
    ranges.release(0, 4, 10.0)
    assert ranges.allocate(1, 10.0 + GRACE - 0.001) is None
    assert ranges.allocate(4, 10.0 + GRACE) == 0


def test_the_wait_for_programs_is_left_out_if_it_cannot_make_enough_room() -> None:
    """A rejected service is tried again at each sync, which must not wait each time."""
    waits: list[bool] = []

    def end_grace() -> bool:
        waits.append(True)
        return True

    ranges, ids = Ranges(8, end_grace), Ids(3, end_grace)
    first = ranges.allocate(4, 10.0)
    assert first is not None
    ranges.release(first, 4, 10.0)
    assert ranges.allocate(4, 10.0) == 4 - first  # the other half
    assert ranges.allocate(8, 10.0) is None
    assert not waits
    assert ranges.allocate(4, 10.0) == first
    assert len(waits) == 1
    assert [ids.allocate(10.0) for _ in range(3)] == [1, 2, None]
    ids.release(1, 10.0)
    assert ids.allocate(10.0) == 1
    assert len(waits) == 2
    assert ranges.allocate(1, 10.0) is ids.allocate(10.0) is None
    assert len(waits) == 2


def test_an_allocation_beyond_the_capacity_fails_and_takes_nothing() -> None:
    ranges = Ranges(100)
    assert ranges.allocate(65, 0.0) is None  # takes 128
    assert ranges.allocate(64, 0.0) == 0
    assert ranges.used == 64


def test_no_id_is_ever_0() -> None:
    ids = Ids(3)
    assert [ids.allocate(0.0) for _ in range(3)] == [1, 2, None]


@pytest.mark.parametrize("junk", [{0}, {0xFFFFFFFF}, {0, 2, 5_000_000}])
def test_invalid_ids_are_not_adopted(junk: set[int]) -> None:
    """Another program may have written any number: memory and time must not depend on it."""
    ids = Ids(4)
    ids.adopt(junk)
    assert ids.used == len(junk & {1, 2, 3})
    for id_ in junk:
        ids.release(id_, 0.0)
    assert ids.used == 0
    given_out = {ids.allocate(GRACE) for _ in range(3)}
    assert given_out == {1, 2, 3}
    assert ids.allocate(GRACE) is None
