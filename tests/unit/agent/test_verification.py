"""The verification between changes: in slices, with a clock that the test moves."""

from collections.abc import Iterator

from ebpfproxy.agent.verification import Verification
from ebpfproxy.errors import Rejected
from tests.support.clock import Clock


def steps(clock: Clock, *results: bool, each: float = 0.001) -> Iterator[bool]:
    for result in results:
        clock.now += each
        yield result


def test_a_slice_ends_after_a_few_milliseconds_and_the_next_one_goes_on() -> None:
    clock = Clock()
    verification = Verification(clock)
    verification.start(steps(clock, *[True] * 10))
    began = clock.now
    assert verification.run_slice() is None
    assert clock.now - began <= 0.005
    assert verification.is_running
    while (result := verification.run_slice()) is None:
        pass
    assert result is True
    assert not verification.is_running
    assert round(clock.now - began, 6) == 0.01


def test_a_difference_ends_the_check() -> None:
    clock = Clock()
    verification = Verification(clock)
    verification.start(steps(clock, True, False, True))
    assert verification.run_slice() is False
    assert not verification.is_running


def test_a_failed_step_counts_as_a_difference() -> None:
    def failing() -> Iterator[bool]:
        yield True
        raise Rejected("no")

    verification = Verification()
    verification.start(failing())
    assert verification.run_slice() is False
    assert not verification.is_running


def test_a_check_without_steps_finds_no_difference() -> None:
    verification = Verification()
    verification.start(iter(()))
    assert verification.run_slice() is True


def test_a_canceled_check_runs_no_further_step() -> None:
    clock = Clock()
    verification = Verification(clock)
    verification.start(steps(clock, *[True] * 10))
    assert verification.run_slice() is None
    before = clock.now
    verification.cancel()
    assert verification.run_slice() is True
    assert clock.now == before
