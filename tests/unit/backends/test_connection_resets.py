"""When connections to removed endpoints are reset: after the grace period, at the rate, and again after a
failure. The connections are those of a mode in memory.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import pytest

from ebpfproxy.backends import connection_resets
from ebpfproxy.backends.connection_resets import SEARCH_FAILED, ConnectionResets, Pace, pace
from ebpfproxy.backends.interface import Callbacks
from ebpfproxy.config import Config
from ebpfproxy.errors import Rejected
from ebpfproxy.plan.service_plan import PlanKey
from tests.support.build import endpoint
from tests.unit.plan.test_removed_endpoints import ONE, TWO, Plans, connection, plan
from tests.unit.plan.udp_flows import Flow

PATIENCE = 60.0


class Mode:
    """A `Resetter`. `failing`: the next attempts to reset a connection fail; `broken`: so do searches."""

    def __init__(self, *connections: Flow) -> None:
        self.open = list(connections)
        self.reset_at: list[float] = []
        self.failing = self.broken = 0
        self.threads: set[str] = set()

    def connections(self) -> list[Flow]:
        self.threads.add(threading.current_thread().name)
        if self.broken:
            self.broken -= 1
            raise Rejected("cannot list connections")
        return list(self.open)

    def reset(self, connections: Sequence[Flow]) -> Generator[tuple[Flow, bool]]:
        for each in connections:
            if self.failing:
                self.failing -= 1
                yield each, False
            elif each in self.open:
                self.open.remove(each)
                self.reset_at.append(time.monotonic())
                yield each, True


def connections(count: int, to: str = ONE) -> list[Flow]:
    """Different connections: each to another zone."""
    return [connection("10.96.0.10:80", to)._replace(zone=number) for number in range(count)]


@pytest.fixture
def started() -> Iterator[Callable[[Mode, Pace], ConnectionResets[Flow]]]:
    made: list[ConnectionResets[Flow]] = []

    def start(mode: Mode, when: Pace) -> ConnectionResets[Flow]:
        made.append(ConnectionResets(mode, when, Callbacks()))
        return made[-1]

    yield start
    for each in made:
        each.close()


Start = Callable[[Mode, Pace], ConnectionResets[Flow]]


def bring(of: ConnectionResets[Flow], changed: Plans) -> float:
    of.expect(changed)
    of.in_force(lambda: ())
    return time.monotonic()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_connections_are_reset_after_the_grace_period_and_not_before(started: Start) -> None:
    mode = Mode(*connections(3), *connections(2, TWO))
    of = started(mode, Pace(0.5, 1000))
    bring(of, plan(endpoint(ONE), endpoint(TWO)))
    removed = bring(of, plan(endpoint(TWO)))
    eventually(lambda: len(mode.open) == 2)
    assert mode.open == connections(2, TWO)
    assert min(mode.reset_at) >= removed + 0.5


def test_the_rate_limits_resets(started: Start) -> None:
    mode = Mode(*connections(30))
    of = started(mode, Pace(0.0, 20))
    bring(of, plan(endpoint(ONE)))
    bring(of, plan(endpoint(TWO)))
    eventually(lambda: not mode.open)
    assert max(mode.reset_at) - min(mode.reset_at) >= 29 / 20 - 0.1


def test_an_endpoint_that_is_back_in_time_keeps_its_connections(started: Start) -> None:
    mode = Mode(*connections(2))
    of = started(mode, Pace(0.3, 1000))
    bring(of, plan(endpoint(ONE)))
    bring(of, plan(endpoint(TWO)))
    bring(of, plan(endpoint(ONE), endpoint(TWO)))
    time.sleep(0.6)
    assert mode.open == connections(2)


def test_failed_searches_are_tried_again(started: Start) -> None:
    mode = Mode(*connections(2))
    mode.broken = 1
    of = started(mode, Pace(0.0, 1000))
    bring(of, plan(endpoint(ONE)))
    bring(of, plan(endpoint(TWO)))
    eventually(lambda: not mode.open)


def test_a_connection_that_cannot_be_reset_does_not_delay_others(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again later."""
    monkeypatch.setattr(connection_resets, "_TRY_AGAIN", 2.0)
    mode = Mode(*connections(4))
    mode.failing = 3
    of = started(mode, Pace(0.0, 2))
    bring(of, plan(endpoint(ONE)))
    removed = bring(of, plan(endpoint(TWO)))
    eventually(lambda: len(mode.open) == 3)
    assert mode.reset_at[0] < removed + 3.5
    eventually(lambda: not mode.open)


def test_without_a_request_there_is_no_thread(started: Start) -> None:
    mode = Mode(*connections(2))
    of = started(mode, Pace(0.0, 1000))
    bring(of, plan(endpoint(ONE), request=None))
    assert "connection-resets" not in {each.name for each in threading.enumerate()}
    bring(of, plan(endpoint(ONE)))
    bring(of, plan(endpoint(TWO)))
    eventually(lambda: not mode.open)
    assert mode.threads == {"connection-resets"}


def test_a_thread_can_be_started_again(started: Start) -> None:
    """As after the mode was closed and opened."""
    mode = Mode()
    of = started(mode, Pace(0.0, 1000))
    bring(of, plan(endpoint(ONE)))
    of.close()
    mode.open = connections(1)
    bring(of, plan(endpoint(TWO)))
    eventually(lambda: not mode.open)


def test_the_shortest_grace_period_is_a_second() -> None:
    parsed = Config.parse({"removed_endpoints_grace": "0s", "removed_endpoints_rate": "7"})
    assert pace(parsed) == Pace(1.0, 7, parsed.node_name)
    assert pace(Config.parse({}))[:2] == (30.0, 100)


def test_closing_ends_the_exclusion_of_full_endpoints(started: Start) -> None:
    """Bug: after a switch to another mode, they got no new connections any more."""
    mode = Mode(*connections(10))
    full: dict[PlanKey, frozenset[bytes]] = {}
    callbacks = Callbacks(
        endpoints_full=lambda service, family, targets: full.update({(service, family): targets})
    )
    of: ConnectionResets[Flow] = ConnectionResets(mode, Pace(0.0, 1000), callbacks)
    bring(of, plan(endpoint(ONE), request=None, rebalance=10))
    bring(of, plan(endpoint(ONE), endpoint(TWO), request=None, rebalance=10))
    eventually(lambda: any(full.values()))
    of.close()
    assert list(full.values()) == [frozenset()]


def test_closing_does_not_wait_for_the_rate(started: Start) -> None:
    mode = Mode(*connections(10))
    of = started(mode, Pace(0.0, 1))
    bring(of, plan(endpoint(ONE)))
    bring(of, plan(endpoint(TWO)))
    eventually(lambda: bool(mode.reset_at))
    began = time.monotonic()
    of.close()
    assert time.monotonic() - began < 0.9
    assert mode.open


def test_an_error_in_the_thread_does_not_end_it(
    started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mode = Mode(*connections(2))
    of = started(mode, Pace(0.0, 1000))
    bring(of, plan(endpoint(ONE)))
    with monkeypatch.context() as patch:
        patch.setattr(of._open, "expect", lambda plans: 1 // 0)
        bring(of, plan(endpoint(ONE)))
        eventually(lambda: SEARCH_FAILED in [each.getMessage() for each in caplog.records])
    bring(of, plan(endpoint(ONE)))
    bring(of, plan(endpoint(TWO)))
    eventually(lambda: not mode.open)
