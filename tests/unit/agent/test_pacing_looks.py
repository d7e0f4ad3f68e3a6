"""When to look whether another program has changed what is in the kernel."""

import pytest

from ebpfproxy.agent.pacing import CheckTimer


@pytest.fixture
def looks() -> CheckTimer:
    return CheckTimer(100.0)


def test_a_look_is_due_every_two_seconds(looks: CheckTimer) -> None:
    assert looks.wait(101.5) == 0.5
    assert looks.wait(102.0) == 0
    assert looks.wait(103.0) == 0
    looks.checked(103.0, took=0.0, notified=True)
    assert looks.wait(103.0) == 2.0


def test_a_hastened_look_is_due_at_once_and_once(looks: CheckTimer) -> None:
    looks.hasten()
    looks.hasten()
    assert looks.wait(100.1) == 0
    looks.checked(100.1, took=0.0, notified=True)
    assert looks.wait(100.1) == 2.0


def test_a_hastened_look_is_due_at_once_after_one_that_was_not_hastened(looks: CheckTimer) -> None:
    looks.checked(102.0, took=0.0, notified=True)
    looks.hasten()
    assert looks.wait(102.1) == 0


def test_notifications_without_end_lead_to_one_look_in_a_second(looks: CheckTimer) -> None:
    looks.hasten()
    looks.checked(100.25, took=0.0, notified=True)
    looks.hasten()
    assert looks.wait(100.25) == 1.0
    assert looks.wait(101.25) == 0
    looks.checked(101.25, took=0.0, notified=True)
    looks.hasten()
    assert looks.wait(101.5) == 0.75


def test_an_expensive_look_is_made_less_often_only_where_changes_are_notified(looks: CheckTimer) -> None:
    looks.checked(102.0, took=0.125, notified=True)
    assert looks.wait(102.0) == 12.5
    looks.hasten()
    assert looks.wait(102.0) == 0
    looks.checked(102.0, took=0.125, notified=False)
    assert looks.wait(102.0) == 2.0
