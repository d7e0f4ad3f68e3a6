"""When a program that lost the first position is moved back, and what is reported meanwhile."""

import logging

import pytest

from ebpfproxy.backends.ebpf.attachments import Running
from ebpfproxy.backends.ebpf.devices.positions import FIRST_AGAIN, PROGRAMS_BEFORE, Positions

FIRST = Running(7, True, (), can_advance=False)
BEHIND = Running(7, True, ("theirs",), can_advance=True)
BLOCKED = Running(7, True, ("u32 filter, priority 1",), can_advance=False)
ETH0 = (2, "ingress")


class Uplink:
    """eth0 at ingress, with a clock that only `later` advances."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.positions = Positions(lambda: self.now)

    def due(self, running: Running) -> bool:
        return self.positions.is_due(*ETH0, "eth0", running)

    def regain(self) -> None:
        self.positions.tried(*ETH0)
        assert not self.due(FIRST)

    def later(self, seconds: float) -> None:
        self.now += seconds

    def contested(self) -> list[bool]:
        return [each.contested for each in self.positions.troubles()]


@pytest.fixture
def place() -> Uplink:
    return Uplink()


def test_after_the_first_loss_the_program_is_due_at_once_and_not_contested(place: Uplink) -> None:
    assert not place.due(FIRST)
    assert place.positions.troubles() == ()
    assert place.due(BEHIND)
    assert place.contested() == [False]
    place.regain()
    assert place.positions.troubles() == ()


def test_each_further_loss_doubles_the_delay_up_to_five_minutes(place: Uplink) -> None:
    waits = []
    for _ in range(9):
        began = place.now
        while not place.due(BEHIND):
            place.later(0.5)
        waits.append(place.now - began)
        place.regain()
    assert waits == [0, 4, 8, 16, 32, 64, 128, 256, 300]


def test_a_second_loss_is_contested_until_the_first_position_is_regained(place: Uplink) -> None:
    place.due(BEHIND)
    place.regain()
    assert not place.due(BEHIND)
    assert place.contested() == [True]
    place.later(5)
    assert place.due(BEHIND)
    place.regain()
    assert place.contested() == []


def test_a_minute_at_the_first_position_ends_the_contest(place: Uplink) -> None:
    place.due(BEHIND)
    place.regain()
    place.later(61)
    assert not place.due(FIRST)
    assert place.due(BEHIND)
    assert place.contested() == [False]


def test_a_program_that_cannot_be_passed_is_reported_but_never_due(place: Uplink) -> None:
    for _ in range(3):
        assert not place.due(BLOCKED)
        place.later(100)
    assert place.contested() == [False]


def test_a_device_without_the_agents_program_is_forgotten(place: Uplink) -> None:
    place.due(BEHIND)
    place.positions.forget(2)
    assert place.positions.troubles() == ()


def test_each_change_is_logged_once(place: Uplink, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for running in (FIRST, BEHIND, BEHIND, FIRST, FIRST):
            place.due(running)
    assert caplog.messages == [PROGRAMS_BEFORE, FIRST_AGAIN]
