"""When to sync and when to check for external changes: rules by example, guarantees by random histories."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpfproxy.agent.pacing import BATCH, CheckTimer, Pacer, SliceSize


def pacer(least: float = 0.0, most: float = 30.0) -> Pacer:
    return Pacer(least, most, backoff_first=1.0, backoff_max=8.0, reread_interval=0.0)


def synced(least: float = 0.0) -> Pacer:
    """A pacer whose sync at 100 verified."""
    one = pacer(least)
    one.changed(100.0)
    one.succeeded(100.0, verified=True)
    return one


def test_nothing_is_due_before_the_first_change() -> None:
    one = pacer()
    assert (one.due(1e9), one.verify_due(1e9), one.wait(1e9)) == (False, False, None)


def test_the_first_change_is_due_at_once_and_verifies() -> None:
    one = pacer(least=5.0)
    one.changed(7.0)
    assert (one.due(7.0), one.verify_due(7.0), one.wait(7.0)) == (True, True, 0.0)


def test_a_change_waits_for_the_minimum_interval_since_the_last_sync() -> None:
    one = synced(least=2.0)
    one.changed(100.5)
    assert (one.due(101.9), one.wait(100.5)) == (False, 1.5)
    assert (one.due(102.0), one.wait(103.0)) == (True, 0.0)
    assert not one.verify_due(102.0)


def test_remaining_changes_do_not_wait_for_the_minimum_interval() -> None:
    one = synced(least=2.0)
    one.remaining()
    assert one.wait(100.0) == 0.0
    one.succeeded(100.5, verified=False)
    one.changed(100.5)
    assert one.wait(100.5) == 2.0


def test_a_slice_shrinks_after_a_long_sync_and_grows_while_changes_remain() -> None:
    size = SliceSize()
    first = size.most
    size.took(0.001, full=False)
    assert size.most == first
    size.took(0.001, full=True)
    assert size.most == 1.25 * first
    for _ in range(20):
        size.took(1.0, full=True)
    assert 0 < size.most < first


def test_more_entries_are_retried_while_syncs_are_short() -> None:
    """Regression: two were, however many thousands remained. More changes are planned only if any remain."""
    size = SliceSize()
    for _ in range(10):
        size.took(1.0, full=True)
        size.took(0.001, full=False)
    assert size.retries == 2
    planned = size.most
    for _ in range(40):
        size.took(0.001, full=False, retrying=True)
    assert size.retries > 1000
    assert size.most == planned


def test_a_slice_is_as_large_as_the_fixed_costs_of_a_sync_require() -> None:
    size = SliceSize()
    for _ in range(10):
        size.took(0.3, full=True)
    assert size.most > 2000


def test_changes_in_quick_succession_share_a_sync_and_the_first_one_does_not_wait() -> None:
    one = synced()
    one.changed(105.0)
    assert one.due(105.0)
    one.succeeded(105.001, verified=False)
    for moment in (105.002, 105.005, 105.009):
        one.changed(moment)
        assert not one.due(moment)
    assert one.wait(105.009) == pytest.approx(BATCH - 0.008)
    assert one.due(105.0111)


def test_many_changes_cause_one_sync() -> None:
    one = synced()
    for moment in range(101, 110):
        one.changed(float(moment))
    one.succeeded(110.0, verified=False)
    assert not one.due(110.0)


def test_without_a_change_the_next_sync_is_the_periodic_verification() -> None:
    one = synced()
    assert (one.due(129.9), one.verify_due(129.9), one.wait(120.0)) == (False, False, 10.0)
    assert (one.due(130.0), one.verify_due(130.0)) == (True, True)


def test_new_intervals_apply_at_once() -> None:
    """For example after a mode switch."""
    one = synced(least=2.0)
    one.set_intervals(5.0, 60.0, 0.0)
    assert (one.wait(120.0), one.verify_due(159.9), one.verify_due(160.0)) == (40.0, False, True)
    one.changed(101.0)
    assert one.wait(101.0) == 4.0


def test_an_external_change_is_verified_at_once() -> None:
    one = synced(least=2.0)
    one.verify_soon()
    assert (one.due(101.0), one.verify_due(101.0), one.due(102.0)) == (False, True, True)
    one.succeeded(102.0, verified=True)
    assert not one.due(131.0)


def test_syncs_of_changes_do_not_delay_the_verification() -> None:
    one = synced()
    one.changed(129.0)
    one.succeeded(129.0, verified=False)
    assert one.wait(129.0) == 1.0


def test_a_verification_waits_for_the_minimum_interval() -> None:
    one = synced(least=10.0)
    one.changed(129.0)
    one.succeeded(129.0, verified=False)
    assert (one.due(130.0), one.due(139.0)) == (False, True)


def test_failures_are_retried_after_1_2_4_8_and_8_seconds() -> None:
    one, now, waits = synced(), 200.0, []
    one.changed(now)
    for _ in range(5):
        one.failed(now)
        assert one.verify_due(now)
        wait = one.wait(now)
        assert wait is not None
        waits.append(wait)
        now += wait
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]


def test_the_sync_after_a_failure_reads_the_kernel_back() -> None:
    one = synced()
    one.changed(101.0)
    assert not one.verify_due(101.0)
    one.failed(101.0)
    assert one.verify_due(102.0)


def test_a_thousand_failures_are_still_retried() -> None:
    one = synced()
    for _ in range(1000):
        one.failed(200.0)
    assert one.wait(200.0) == 8.0


def test_a_change_long_after_a_failure_is_synced_at_once() -> None:
    one = synced()
    for _ in range(4):
        one.failed(200.0)
    assert not one.due(205.0)
    one.changed(205.0)
    assert one.due(205.0)


def test_a_change_right_after_a_failure_waits_for_the_first_pause() -> None:
    one = synced()
    for _ in range(4):
        one.failed(200.0)
    one.changed(200.1)
    assert (one.due(200.9), one.due(201.0)) == (False, True)


def test_a_success_ends_the_pauses() -> None:
    one = synced()
    for _ in range(4):
        one.failed(200.0)
    one.succeeded(208.0, verified=True)
    one.changed(208.0)
    one.failed(208.0)
    assert one.wait(208.0) == 1.0


def test_a_failed_first_sync_is_retried() -> None:
    one = pacer()
    one.changed(5.0)
    one.failed(5.0)
    assert (one.due(5.5), one.due(6.0), one.verify_due(6.0)) == (False, True, True)


# Rejections


def rejected(least: float = 0.0, most: float = 30.0) -> Pacer:
    """A pacer whose sync at 100 verified and had a rejected entry."""
    one = Pacer(least, most, backoff_first=1.0, backoff_max=20.0, reread_interval=0.0)
    one.changed(100.0)
    one.rejected(100.0, verified=True)
    return one


def test_rejected_entries_are_retried_after_3_6_12_20_and_20_seconds() -> None:
    one, now, waits = rejected(most=1000.0), 100.0, []
    for _ in range(5):
        wait = one.wait(now)
        assert wait is not None
        waits.append(wait)
        now += wait
        assert one.due(now)
        one.rejected(now, verified=False)
    assert waits == [3.0, 6.0, 12.0, 20.0, 20.0]
    assert rejected(most=2.0).wait(100.0) == 2.0


def test_a_rejection_delays_no_change() -> None:
    one = rejected()
    one.changed(100.5)
    assert (one.due(100.5), one.wait(100.5)) == (True, 0.0)
    paced = rejected(least=2.0)
    paced.changed(100.0)
    assert paced.wait(100.0) == 2.0


def test_a_rejection_neither_causes_nor_delays_a_verification() -> None:
    one = rejected()
    assert not one.verify_due(103.0)
    one.rejected(103.0, verified=False)
    assert not one.verify_due(109.0)
    one.rejected(129.0, verified=False)
    assert (one.wait(129.0), one.verify_due(130.0)) == (1.0, True)


def test_a_sync_with_rejections_that_did_not_verify_leaves_the_first_verification_due() -> None:
    one = pacer()
    one.changed(5.0)
    one.rejected(5.0, verified=False)
    assert (one.due(5.01), one.verify_due(5.01)) == (True, True)


def test_a_change_restarts_the_pauses_of_rejected_entries() -> None:
    one = rejected(most=1000.0)
    for moment in (103.0, 109.0, 121.0):
        one.rejected(moment, verified=False)
    one.changed(125.0)
    one.rejected(125.0, verified=False)
    assert one.wait(125.0) == 3.0


def test_a_retry_of_rejected_entries_waits_for_the_minimum_interval() -> None:
    assert rejected(least=10.0).wait(100.0) == 10.0


def test_after_the_last_rejection_nothing_is_retried() -> None:
    one = rejected()
    one.succeeded(103.0, verified=False)
    assert one.wait(103.0) == 27.0


def test_a_sync_with_rejections_ends_the_pauses_of_failures() -> None:
    one = synced()
    for _ in range(4):
        one.failed(200.0)
    one.rejected(208.0, verified=True)
    assert (one.wait(208.0), one.verify_due(211.0)) == (3.0, False)
    one.changed(208.0)
    assert one.due(208.0 + BATCH)


def test_a_failure_after_rejections_pauses_and_verifies() -> None:
    one = rejected()
    one.failed(103.0)
    assert (one.wait(103.0), one.verify_due(104.0)) == (1.0, True)


def test_a_thousand_rejections_are_still_retried() -> None:
    one = rejected(most=1e9)
    for _ in range(1000):
        one.rejected(200.0, verified=False)
    assert one.wait(200.0) == 20.0


@dataclasses.dataclass
class History:
    """The times at which a loop synced and verified, and the longest wait of a change."""

    attempts: list[float] = dataclasses.field(default_factory=list)
    verifications: list[float] = dataclasses.field(default_factory=list)
    slowest: float = 0.0


STEPS = st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans(), st.booleans()), min_size=1, max_size=80)


def run(least: float, steps: list[tuple[float, bool, bool]]) -> History:
    """Run a loop. A step: seconds that pass, whether there is a change, whether a due sync succeeds."""
    one, now, history = pacer(least, most=10.0), 1000.0, History()
    oldest: float | None = None
    for seconds, change, works in steps:
        now += seconds
        if change:
            one.changed(now)
            oldest = now if oldest is None else oldest
        if one.due(now):
            history.attempts.append(now)
            verify = one.verify_due(now)
            if works:
                one.succeeded(now, verified=verify)
                if verify:
                    history.verifications.append(now)
                if oldest is not None:
                    history.slowest = max(history.slowest, now - oldest)
                oldest = None
            else:
                one.failed(now)
    return history


@given(st.floats(0.1, 4.0), STEPS)
def test_two_attempts_are_never_closer_than_the_minimum_interval(
    least: float, steps: list[tuple[float, bool, bool]]
) -> None:
    attempts = run(least, steps).attempts
    # Times near 1000 are exact to about 1e-13.
    assert all(later - earlier >= least - 1e-9 for earlier, later in itertools.pairwise(attempts))


@given(st.floats(0.0, 4.0), STEPS)
def test_every_change_is_synced_in_time_however_many_follow(
    least: float, steps: list[tuple[float, bool, bool]]
) -> None:
    working = [(seconds, change, True) for seconds, change, _ in steps]
    # A step is at most 5 seconds, which is when the loop timer next.
    assert run(least, working).slowest <= max(least, BATCH) + 5.0 + 1e-9


@given(STEPS)
def test_verifications_happen_at_least_every_maximum_interval(steps: list[tuple[float, bool, bool]]) -> None:
    working = [(1000.0, True, True), *((seconds, change, True) for seconds, change, _ in steps)]
    moments = run(0.0, working).verifications
    assert moments
    end = 2000.0 + sum(seconds for seconds, _, _ in working[1:])
    gaps = [later - earlier for earlier, later in zip(moments, [*moments[1:], end], strict=True)]
    assert max(gaps) <= 10.0 + 5.0 + 1e-9


@given(st.floats(0.0, 4.0), STEPS, st.floats(0.0, 50.0))
def test_wait_and_due_agree(least: float, steps: list[tuple[float, bool, bool]], later: float) -> None:
    one, now = pacer(least, most=10.0), 1000.0
    for seconds, change, works in steps:
        now += seconds
        if change:
            one.changed(now)
        assert (one.due(now) or one.check_due(now)) == (one.wait(now) == 0.0)
        if one.due(now):
            if works:
                one.succeeded(now, verified=one.verify_due(now))
            else:
                one.failed(now)
    wait = one.wait(now)
    if wait is not None:
        assert wait <= max(10.0, 8.0, least) + 1e-9
        assert one.due(now + wait + 1e-6) or one.check_due(now + wait + 1e-6)


@pytest.fixture
def timer() -> CheckTimer:
    return CheckTimer(100.0)


def test_a_check_is_due_every_two_seconds(timer: CheckTimer) -> None:
    assert timer.wait(101.5) == 0.5
    assert timer.wait(102.0) == 0
    assert timer.wait(103.0) == 0
    timer.checked(103.0, took=0.0, notified=True)
    assert timer.wait(103.0) == 2.0


def test_a_hastened_check_is_due_at_once_and_only_once(timer: CheckTimer) -> None:
    timer.hasten()
    timer.hasten()
    assert timer.wait(100.1) == 0
    timer.checked(100.1, took=0.0, notified=True)
    assert timer.wait(100.1) == 2.0


def test_a_hastened_check_is_due_at_once_after_a_periodic_one(timer: CheckTimer) -> None:
    timer.checked(102.0, took=0.0, notified=True)
    timer.hasten()
    assert timer.wait(102.1) == 0


def test_continuous_notifications_cause_one_check_per_second(timer: CheckTimer) -> None:
    timer.hasten()
    timer.checked(100.25, took=0.0, notified=True)
    timer.hasten()
    assert timer.wait(100.25) == 1.0
    assert timer.wait(101.25) == 0
    timer.checked(101.25, took=0.0, notified=True)
    timer.hasten()
    assert timer.wait(101.5) == 0.75


def test_expensive_checks_are_less_frequent_only_if_changes_are_notified(timer: CheckTimer) -> None:
    timer.checked(102.0, took=0.125, notified=True)
    assert timer.wait(102.0) == 12.5
    timer.hasten()
    assert timer.wait(102.0) == 0
    timer.checked(102.0, took=0.125, notified=False)
    assert timer.wait(102.0) == 2.0


def test_checks_are_due_between_verifications() -> None:
    one = Pacer(0.0, 30.0, reread_interval=3600.0)
    assert not one.check_due(0.0)
    one.changed(0.0)
    assert one.verify_due(0.0)
    one.succeeded(1.0, verified=True)
    assert one.wait(1.0) == 30.0
    assert not one.check_due(30.9)
    assert one.check_due(31.0)
    assert not one.due(31.0)
    one.checked(32.0)
    assert not one.check_due(61.9)
    assert one.check_due(62.0)
    assert one.verify_due(3601.0)
    assert one.due(3601.0)


def test_a_verification_replaces_the_next_check() -> None:
    one = Pacer(0.0, 30.0, reread_interval=3600.0)
    one.changed(0.0)
    one.succeeded(0.0, verified=True)
    one.verify_soon()
    assert not one.check_due(40.0)
    assert one.due(40.0)
    one.succeeded(40.0, verified=True)
    assert not one.check_due(69.9)
    assert one.check_due(70.0)


def test_no_check_is_due_after_a_failure() -> None:
    one = Pacer(0.0, 30.0, reread_interval=3600.0)
    one.changed(0.0)
    one.succeeded(0.0, verified=True)
    one.failed(10.0)
    assert not one.check_due(40.0)
    assert one.verify_due(40.0)
