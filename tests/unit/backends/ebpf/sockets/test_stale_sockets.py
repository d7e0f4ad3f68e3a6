"""The thread that searches stale sockets continues after errors, retries, and does not delay `close`."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from ebpfproxy.backends.ebpf.sockets import reconnect, stale_sockets
from ebpfproxy.backends.ebpf.sockets.peers import StalePeer
from ebpfproxy.backends.ebpf.sockets.reconnect import Outcome
from ebpfproxy.backends.ebpf.sockets.stale_sockets import StaleSockets
from ebpfproxy.backends.ebpf.sockets.translation import StaleTranslation, Translated
from ebpfproxy.errors import KernelError, Rejected
from ebpfproxy.model.address import parse_address
from ebpfproxy.model.counters import SocketCounts

ENDPOINT, FRONTEND = (parse_address("10.1.0.1"), 5353), (parse_address("10.96.0.53"), 53)
Pass = Callable[[Mapping[int, StalePeer]], Outcome]


def peer(cookie: int, waiting: bool = False) -> StalePeer:
    return StalePeer(cookie, ENDPOINT, FRONTEND, service=1, waiting=waiting)


class Kernel:
    """Replaces the maps and the passes: `act` is called for each pass with the stale sockets."""

    def __init__(self) -> None:
        self.sockets: dict[int, StalePeer] = {}
        self.act: Pass = self.cure
        self.passes = 0
        self.closed = False
        self.counts: list[SocketCounts] = []
        self.translatable: set[int] = set()
        self.without_programs: set[int] = set()
        self.forgotten = 0
        self.searches = 0  # with or without stale sockets
        self.searched = threading.Condition()

    def stale(self) -> dict[int, StalePeer]:
        with self.searched:
            self.searches += 1
            self.searched.notify_all()
        return dict(self.sockets)

    def service_name(self, id_: int) -> str:
        return "default/dns:udp"

    def close(self) -> None:
        self.closed = True

    def cure(self, stale: Mapping[int, StalePeer]) -> Outcome:
        self.sockets = {cookie: each for cookie, each in self.sockets.items() if cookie not in stale}
        return Outcome(reconnected=set(stale))

    def reconnect(self, proc_root: str, peers: Any, stale: Mapping[int, StalePeer]) -> Outcome:
        with self.searched:
            self.passes += 1
            self.searched.notify_all()
        return self.act(stale)

    def count(self, counts: SocketCounts) -> None:
        with self.searched:
            self.counts.append(counts)
            self.searched.notify_all()

    @property
    def is_empty(self) -> bool:
        return not self.translatable

    def translate(self, stale: Mapping[int, StalePeer]) -> Translated:
        return Translated(
            frozenset(stale.keys() & self.translatable), frozenset(stale.keys() & self.without_programs)
        )

    def forget(self, peers: Any) -> None:
        with self.searched:
            self.forgotten += 1
            self.searched.notify_all()

    def destroy(self, stale: Mapping[int, StalePeer]) -> tuple[int, int]:
        self.sockets = {cookie: each for cookie, each in self.sockets.items() if cookie not in stale}
        return len(stale), 0

    def await_passes(self, count: int) -> None:
        with self.searched:
            assert self.searched.wait_for(lambda: self.passes >= count, 10.0)

    def await_searches(self, count: int) -> None:
        with self.searched:
            assert self.searched.wait_for(lambda: self.searches >= count, 10.0)

    def await_counts(self, count: int) -> SocketCounts:
        with self.searched:
            assert self.searched.wait_for(lambda: len(self.counts) >= count, 10.0)
            return self.counts[count - 1]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(stale_sockets, "SocketPeers", lambda maps: made)
    monkeypatch.setattr(reconnect, "reconnect", made.reconnect)
    monkeypatch.setattr(stale_sockets, "_FIRST_RETRY", 0.01)
    monkeypatch.setattr(stale_sockets, "_LAST_RETRY", 0.02)
    return made


def search_of(kernel: Kernel, destroy: bool = False) -> StaleSockets:
    search = StaleSockets(
        Path("/nowhere"), Path("/proc"), destroy, kernel.count, cast(StaleTranslation, kernel)
    )
    search._destroy_all = kernel.destroy  # type: ignore[method-assign]
    return search


def failing(failure: Exception) -> Pass:
    def act(stale: Mapping[int, StalePeer]) -> Outcome:
        raise failure

    return act


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ValueError("what was not foreseen"), "ValueError('what was not foreseen')"),
        (OSError(24, "too many files"), "OSError(24, 'too many files')"),
        (KernelError("the kernel said no"), "the kernel said no"),
    ],
)
def test_a_failed_search_is_logged_and_repeated_without_a_request(
    kernel: Kernel, caplog: pytest.LogCaptureFixture, failure: Exception, reason: str
) -> None:
    kernel.sockets = {7: peer(7)}
    kernel.act = failing(failure)
    stale = search_of(kernel)
    with caplog.at_level(logging.ERROR, logger="ebpfproxy"):
        stale.look()
        kernel.await_passes(2)
        kernel.act = kernel.cure
        assert kernel.await_counts(1) == SocketCounts(reconnected=1)
        stale.close()
    assert {record.__dict__["values"]["reason"] for record in caplog.records} == {reason}
    assert kernel.closed


def test_sockets_that_remain_are_logged_once_and_retried_until_they_are_reconnected(
    kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.sockets = {7: peer(7), 8: peer(8)}
    kernel.act = lambda stale: Outcome(failed={each: Rejected("it cannot be", "do this") for each in stale})
    stale = search_of(kernel)
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        stale.look()
        assert kernel.await_counts(1) == SocketCounts(left=2)
        kernel.await_passes(4)
        kernel.act = kernel.cure
        with kernel.searched:
            assert kernel.searched.wait_for(lambda: kernel.counts[-1].left == 0, 10.0)
        stale.close()
    assert kernel.counts[-1] == SocketCounts(reconnected=2)
    assert [record.__dict__["values"] for record in caplog.records] == [
        {
            "frontend": "10.96.0.53:53",
            "service": "default/dns:udp",
            "sockets": 2,
            "reason": "it cannot be",
            "hint": "do this",
        }
    ]


def failing_all(stale: Mapping[int, StalePeer]) -> Outcome:
    return Outcome(failed={each: Rejected("it cannot be", "do this") for each in stale})


def test_translated_sockets_do_not_count_as_remaining_and_are_not_destroyed(
    kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.sockets = {7: peer(7), 8: peer(8)}
    kernel.translatable = {7}
    kernel.act = failing_all
    stale = search_of(kernel, destroy=True)
    with caplog.at_level(logging.INFO, logger="ebpfproxy"):
        stale.look()
        assert kernel.await_counts(1) == SocketCounts(destroyed=1, translated=1)
        stale.close()
    assert kernel.sockets.keys() == {7}
    lines = {
        record.getMessage().partition(" sockets=")[0]: record.__dict__["values"] for record in caplog.records
    }
    assert any(values.get("sockets") == 1 and values.get("hint") == "do this" for values in lines.values())


def test_a_socket_is_not_destroyed_while_its_device_waits_for_programs(
    kernel: Kernel,
) -> None:
    kernel.sockets = {7: peer(7)}
    kernel.without_programs = {7}
    kernel.act = failing_all
    stale = search_of(kernel, destroy=True)
    stale.look()
    assert kernel.await_counts(2) == SocketCounts(left=1)
    assert kernel.sockets.keys() == {7}
    kernel.without_programs = set()
    with kernel.searched:
        assert kernel.searched.wait_for(lambda: kernel.counts[-1].destroyed == 1, 10.0)
    stale.close()
    assert not kernel.sockets


def test_closed_sockets_are_forgotten_between_searches(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale_sockets, "_FIRST_RETRY", 60.0)
    monkeypatch.setattr(stale_sockets, "_LAST_RETRY", 60.0)
    monkeypatch.setattr(stale_sockets, "_POLL", 0.01)
    kernel.sockets = {7: peer(7)}
    kernel.translatable = {7}
    kernel.act = failing_all
    stale = search_of(kernel)
    stale.look()
    with kernel.searched:
        assert kernel.searched.wait_for(lambda: kernel.forgotten >= 2, 10.0)
    stale.close()
    assert kernel.passes == 1


def test_sockets_in_no_network_namespace_are_retried_and_not_logged(
    kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    """They were closed, on a kernel without the hook sock_release."""
    kernel.sockets = {7: peer(7)}
    kernel.act = lambda stale: Outcome(absent=set(stale))
    stale = search_of(kernel)
    with caplog.at_level(logging.INFO, logger="ebpfproxy"):
        stale.look()
        kernel.await_passes(3)
        stale.close()
    assert kernel.counts == []
    assert caplog.records == []


def test_a_socket_that_still_waits_is_not_reconnected_again(kernel: Kernel) -> None:
    """Its frontend has endpoints, but its hook selects none."""
    kernel.sockets = {7: peer(7, waiting=True)}
    kernel.act = lambda stale: Outcome(reconnected=set(stale))
    stale = search_of(kernel)
    stale.look()
    assert kernel.await_counts(1) == SocketCounts(reconnected=1)
    stale.close()
    assert kernel.passes == 1


def test_endpoints_that_change_during_a_search_are_handled_by_the_same_search(kernel: Kernel) -> None:
    kernel.sockets = {7: peer(7)}

    def act(stale: Mapping[int, StalePeer]) -> Outcome:
        if kernel.passes == 2:
            return kernel.cure(stale)
        return Outcome(reconnected=set(stale))

    kernel.act = act
    stale = search_of(kernel)
    stale.look()
    assert kernel.await_counts(1) == SocketCounts(reconnected=1)
    stale.close()
    assert kernel.passes == 2


def test_close_waits_for_a_requested_search(kernel: Kernel) -> None:
    kernel.sockets = {7: peer(7)}
    stale = search_of(kernel)
    stale.look()
    stale.look()
    stale.close()
    assert kernel.passes == 1
    assert kernel.counts == [SocketCounts(reconnected=1)]


@pytest.fixture
def cpu_time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The CPU time of each search, in seconds: the only element."""
    took = [0.0]
    calls = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: took[0] if next(calls) % 2 else 0.0)
    return took


def await_taken(search: StaleSockets) -> None:
    """Wait until the thread has taken all requests."""
    deadline = time.monotonic() + 10.0
    while not search._jobs.empty():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_continuous_changes_cause_one_search_for_each_pause(kernel: Kernel, cpu_time: list[float]) -> None:
    """Regression: 100 changes/s used 0.76 of a CPU."""
    cpu_time[0] = 0.2  # a pause of 4 s
    search = search_of(kernel)
    search.look()
    kernel.await_searches(1)  # at once
    for _ in range(50):
        search.look()
        await_taken(search)
    assert kernel.searches == 1
    search.close()  # does not wait for the pause
    assert kernel.searches == 2


def test_the_last_of_many_changes_is_followed_by_a_search(kernel: Kernel, cpu_time: list[float]) -> None:
    cpu_time[0] = 0.005  # a pause of 0.1 s
    search = search_of(kernel)
    search.look()
    kernel.await_searches(1)
    search.look()
    await_taken(search)
    kernel.sockets = {7: peer(7)}
    search.look()
    kernel.await_passes(1)
    search.close()
    assert kernel.sockets == {}


def test_close_does_not_wait_for_an_endless_search_whose_maps_stay_open(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stale_sockets, "_PATIENCE", 0.05)
    go_on = threading.Event()
    kernel.sockets = {7: peer(7)}

    def act(stale: Mapping[int, StalePeer]) -> Outcome:
        assert go_on.wait(10.0)
        return kernel.cure(stale)

    kernel.act = act
    stale = search_of(kernel)
    stale.look()
    kernel.await_passes(1)
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        stale.close()
    assert not kernel.closed
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    go_on.set()
    kernel.await_counts(1)
