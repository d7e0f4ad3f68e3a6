"""Threads continue after a failure; their end in limited time."""

import logging
import threading

import pytest

from ebpfproxy import threads


def test_only_a_thread_that_still_runs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="stuck", daemon=True)
    thread.start()
    with caplog.at_level(logging.WARNING):
        assert not threads.join(thread, 0.01)
        (record,) = caplog.records
        assert record.getMessage() == threads.NOT_ENDED
        assert record.__dict__["values"] == {"thread": "stuck", "after_s": 0.01}
        release.set()
        assert threads.join(thread, 10.0)
    assert caplog.records == [record]


def test_a_thread_runs_again_after_an_error_and_ends_when_it_returns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_PAUSE_SECONDS", 0.0)
    calls = iter([OSError("no more room"), ValueError(), None])

    def run() -> None:
        if error := next(calls):
            raise error

    threads.start("worker", run).join(10)
    assert next(calls, "none is left") == "none is left"
    assert [record.getMessage() for record in caplog.records] == [threads.FAILED] * 2
    assert caplog.records[0].__dict__["values"] == {
        "thread": "worker",
        "error": "OSError('no more room')",
    }
