"""The thread that looks for stale sockets outlives what goes wrong in it, and holds up nobody's end."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebpfproxy.dataplanes.ebpf import stale_sockets
from ebpfproxy.dataplanes.ebpf.stale_sockets import StaleSockets
from ebpfproxy.errors import KernelError
from ebpfproxy.kernel import namespaces


class EmptyMap:
    """A pinned array without room, of which nothing is read here."""

    closed = 0

    def __init__(self) -> None:
        self.shape = SimpleNamespace(max_entries=0)

    @classmethod
    def pinned(cls, path: Path) -> "EmptyMap":
        return cls()

    def mapped(self) -> "EmptyMap":
        return self

    def close(self) -> None:
        EmptyMap.closed += 1


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], StaleSockets]:
    """Make one that calls something whenever it asks for the namespaces, of which there are none."""
    monkeypatch.setattr(stale_sockets, "Map", EmptyMap)
    monkeypatch.setattr(EmptyMap, "closed", 0)

    def made(act: Callable[[], None]) -> StaleSockets:
        def none_opened(proc_root: str) -> Iterator[int]:
            act()
            yield from ()

        monkeypatch.setattr(namespaces, "opened_network_namespaces", none_opened)
        return StaleSockets(Path("/nowhere"), Path("/proc"), lambda destroyed, failed: None)

    return made


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ValueError("what was not foreseen"), "ValueError('what was not foreseen')"),
        (OSError(24, "too many files"), "OSError(24, 'too many files')"),
        (KernelError("the kernel said no"), "the kernel said no"),
    ],
)
def test_a_search_that_goes_wrong_is_told_and_the_next_one_is_made(
    search: Callable[[Callable[[], None]], StaleSockets],
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    reason: str,
) -> None:
    searches: list[Exception | None] = [failure, None]
    again = threading.Event()

    def act() -> None:
        if met := searches.pop(0):
            raise met
        again.set()

    stale = search(act)
    with caplog.at_level(logging.ERROR, logger="ebpfproxy"):
        stale.look(None)
        stale.look(frozenset())
        assert again.wait(10.0)
        stale.close()
    assert [record.__dict__["values"] for record in caplog.records] == [{"reason": reason}]
    assert EmptyMap.closed == 4


def test_the_end_waits_for_a_search_that_was_asked_for(
    search: Callable[[Callable[[], None]], StaleSockets],
) -> None:
    done: list[bool] = []
    stale = search(lambda: done.append(True))
    stale.look(None)
    stale.close()
    assert done == [True]


def test_a_search_that_does_not_end_does_not_hold_up_the_end_and_keeps_its_maps(
    search: Callable[[Callable[[], None]], StaleSockets],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(stale_sockets, "_PATIENCE", 0.05)
    began, go_on, went_on = (threading.Event() for _ in range(3))

    def act() -> None:
        began.set()
        if go_on.wait(10.0):
            went_on.set()

    stale = search(act)
    stale.look(None)
    assert began.wait(10.0)
    with caplog.at_level(logging.WARNING, logger="ebpfproxy"):
        stale.close()
    assert EmptyMap.closed == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    go_on.set()
    assert went_on.wait(10.0)
