"""The log line about syncs: at once after a quiet second, otherwise once in 10 s; nothing is lost."""

import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpfproxy.agent.sync_log import SYNCED, SyncLog, SyncSummary


def synced(put: int = 1, dropped: int = 0, latency: float = 0.001) -> SyncSummary:
    return SyncSummary(5, 7, put, dropped, 0, latency, 0.0005)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    assert all(record.getMessage() == SYNCED for record in caplog.records)
    return [record.__dict__["values"] for record in caplog.records]


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ebpfproxy")


def test_syncs_with_quiet_times_between_them_are_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    one = SyncLog(each=False)
    for moment in (100.0, 101.0, 103.0):
        one.add(synced(), moment)
        assert one.wait(moment) is None
    assert [line["syncs"] for line in lines(caplog)] == [1, 1, 1]


def test_under_churn_a_line_sums_up_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    one = SyncLog(each=False)
    for number in range(1001):
        one.add(synced(put=2, dropped=1, latency=0.004 if number == 7 else 0.001), 100.0 + number / 50)
    assert [(line["syncs"], line["put"], line["dropped"]) for line in lines(caplog)] == [
        (1, 2, 1),
        (500, 1000, 500),
        (500, 1000, 500),
    ]
    assert [line["latency_ms"] for line in lines(caplog)] == [1.0, 4.0, 1.0]


def test_the_end_of_churn_is_logged_when_the_interval_has_passed(caplog: pytest.LogCaptureFixture) -> None:
    one = SyncLog(each=False)
    one.add(synced(), 100.0)
    one.add(synced(put=3), 100.5)
    assert one.wait(104.0) == 6.0
    one.flush(110.0)
    assert one.wait(110.0) is None
    one.flush(120.0)
    assert [line["put"] for line in lines(caplog)] == [1, 3]


def test_a_change_after_churn_and_a_quiet_time_is_logged_at_once_with_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = SyncLog(each=False)
    for moment in (100.0, 100.5, 102.0):
        one.add(synced(), moment)
    assert [line["syncs"] for line in lines(caplog)] == [1, 2]


def test_every_sync_is_logged_at_high_verbosity(caplog: pytest.LogCaptureFixture) -> None:
    one = SyncLog(each=True)
    for _ in range(3):
        one.add(synced(), 100.0)
    assert [line["syncs"] for line in lines(caplog)] == [1, 1, 1]


@given(st.lists(st.floats(0.0, 4.0), max_size=100))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_is_lost_or_delayed_however_syncs_follow(
    caplog: pytest.LogCaptureFixture, pauses: list[float]
) -> None:
    caplog.clear()
    one, now = SyncLog(each=False), 100.0
    for pause in pauses:
        wait = one.wait(now)
        if wait is not None and wait <= pause:
            one.flush(now + wait)
        now += pause
        one.add(synced(), now)
        assert (one.wait(now) or 0.0) <= SyncLog.INTERVAL + 1e-9
    one.flush(now)
    assert sum(line["put"] for line in lines(caplog)) == len(pauses)
