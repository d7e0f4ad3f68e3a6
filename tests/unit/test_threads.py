"""The end of threads in limited time."""

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
