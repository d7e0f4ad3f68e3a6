"""The threads of the sources: when they end, and which ends they report."""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpfproxy.agent.inbox import Died, Inbox, Received, Reload
from ebpfproxy.agent.sources import Sources
from ebpfproxy.api.event import ADDRESSES, DEVICES, LISTENING, Synced
from ebpfproxy.config import Config
from ebpfproxy.http.metrics import Metrics

SOON = 10.0
Start = Callable[[Callable[[threading.Event], object]], Sources]


@pytest.fixture
def inbox() -> Inbox:
    return queue.SimpleQueue()


@pytest.fixture
def started(tmp_path: Path, inbox: Inbox) -> Iterator[Start]:
    """Starts sources that read a folder, and one that runs the given function."""
    made: list[Sources] = []

    def start(run: Callable[[threading.Event], object]) -> Sources:
        config = Config(hostname_override="here", manifests=tmp_path)
        made.append(Sources(config, inbox, Metrics(), None, {"further": run}))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        each.stop()


def received(inbox: Inbox, kinds: set[str]) -> None:
    """Wait until everything of these kinds is known."""
    while kinds:
        item = inbox.get(timeout=SOON)
        assert not isinstance(item, Died), item
        if isinstance(item, Received) and isinstance(item.event, Synced):
            kinds = kinds - {item.event.kind}


def death(inbox: Inbox) -> Died:
    """The first report of a source that has ended."""
    while not isinstance(item := inbox.get(timeout=SOON), Died):
        pass
    return item


def test_sources_end_when_they_are_asked_to_and_this_is_no_failure(inbox: Inbox, started: Start) -> None:
    ended = queue.SimpleQueue[threading.Thread]()

    def run(stop: threading.Event) -> None:
        if stop.wait(SOON):
            ended.put(threading.current_thread())

    sources = started(run)
    sources.stop()
    ended.get(timeout=SOON).join(SOON)
    while not inbox.empty():
        assert not isinstance(inbox.get(), Died)


def test_what_the_node_has_is_known_soon_after_the_start(inbox: Inbox, started: Start) -> None:
    """The first sync waits for it."""
    started(threading.Event.wait)
    received(inbox, {ADDRESSES, DEVICES, LISTENING})


def test_a_source_that_ends_by_itself_is_reported(inbox: Inbox, started: Start) -> None:
    started(lambda stop: None)
    assert death(inbox).source == "further"


def test_an_error_that_ends_a_source_is_reported(inbox: Inbox, started: Start) -> None:
    failure = RuntimeError("no memory")

    def run(stop: threading.Event) -> None:
        raise failure

    started(run)
    assert death(inbox) == Died("further", failure)


def test_a_change_of_the_configuration_file_is_reported(tmp_path: Path, inbox: Inbox) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("mode: nftables")
    config = Config(hostname_override="here", manifests=tmp_path, config=file)
    sources = Sources(config, inbox, Metrics(), file.read_bytes())
    sources.start()
    try:
        file.write_text("mode: ebpf")
        while not isinstance(item := inbox.get(timeout=SOON), Reload):
            assert not isinstance(item, Died), item
        assert str(file) in item.reason
    finally:
        sources.stop()
