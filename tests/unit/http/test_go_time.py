"""Moments as Go prints them."""

import time
from collections.abc import Iterator

import pytest

from ebpfproxy.http.go_time import format_moment

# 2024-05-01 10:00:00 UTC
TENTH_HOUR = 1_714_557_600_000_000_000


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("zone", "nanoseconds", "since_start", "expected"),
    [
        ("UTC", 123456789, 12.3, "2024-05-01 10:00:00.123456789 +0000 UTC m=+12.300000000"),
        ("UTC", 120000000, 0.0, "2024-05-01 10:00:00.12 +0000 UTC m=+0.000000000"),
        ("UTC", 0, 3600.000000001, "2024-05-01 10:00:00 +0000 UTC m=+3600.000000001"),
        ("UTC", 7, -0.5, "2024-05-01 10:00:00.000000007 +0000 UTC m=-0.500000000"),
        ("Europe/Berlin", 0, 1.0, "2024-05-01 12:00:00 +0200 CEST m=+1.000000000"),
        ("<-03>3", 0, 1.0, "2024-05-01 07:00:00 -0300 -03 m=+1.000000000"),
    ],
    indirect=["zone"],
)
@pytest.mark.usefixtures("zone")
def test_a_moment_reads_as_in_go(nanoseconds: int, since_start: float, expected: str) -> None:
    assert format_moment(TENTH_HOUR + nanoseconds, since_start) == expected
