"""Following the configuration file, however it is replaced."""

import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpfproxy.config import document
from ebpfproxy.config import follow as following
from ebpfproxy.config.follow import KEEPING, follow

SOON = 0.01
PATIENCE = 60


class Follower:
    """`follow` in a thread; `looks` gets an item after each look, `changes` one for each change told."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.changes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.looks: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._known: bytes | None = None

        def counted(path: Path) -> bytes:
            try:
                return document.read(path)
            finally:
                self.looks.put(None)

        monkeypatch.setattr(following, "read", counted)

    def _run(self) -> None:
        follow(self.path, self.stop, lambda: self.changes.put(self.path.read_bytes()), self._known, SOON)

    def start(self, known: bytes | None = None) -> None:
        self._known = known
        self.thread.start()

    def look_again(self) -> None:
        """Return after two more looks began and ended that saw the file as it is now."""
        while not self.looks.empty():
            self.looks.get()
        for _ in range(3):  # the first may have begun before
            self.looks.get(timeout=PATIENCE)

    def changed(self) -> bytes:
        return self.changes.get(timeout=PATIENCE)


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    made = Follower(tmp_path / "config.conf", monkeypatch)
    made.path.write_bytes(b"one")
    yield made
    made.stop.set()
    made.thread.join(PATIENCE)
    assert not made.thread.is_alive()


def test_an_unchanged_file_is_no_change(follower: Follower) -> None:
    follower.start()
    follower.look_again()
    follower.path.touch()
    follower.path.write_bytes(b"one")
    follower.look_again()
    assert follower.changes.empty()


def test_a_file_that_is_written_in_place_is_reported_once(follower: Follower) -> None:
    follower.start()
    follower.look_again()
    follower.path.write_bytes(b"two")
    assert follower.changed() == b"two"
    follower.look_again()
    assert follower.changes.empty()


def test_a_file_that_is_replaced_by_rename_is_reported(follower: Follower, tmp_path: Path) -> None:
    follower.start()
    follower.look_again()
    (tmp_path / "new").write_bytes(b"two")
    (tmp_path / "new").rename(follower.path)
    assert follower.changed() == b"two"


def test_a_config_map_volume_is_reported_each_time_it_is_swapped(follower: Follower, tmp_path: Path) -> None:
    def swap(number: int) -> None:
        folder = tmp_path / f"..{number}"
        folder.mkdir()
        (folder / "config.conf").write_bytes(b"%d" % number)
        (tmp_path / "..data_tmp").symlink_to(folder.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    swap(1)
    follower.path.unlink()
    follower.path.symlink_to("..data/config.conf")
    follower.start()
    follower.look_again()
    for number in 2, 3:
        swap(number)
        assert follower.changed() == b"%d" % number


def test_a_change_before_the_first_read_is_reported(follower: Follower) -> None:
    follower.start(known=b"zero")
    assert follower.changed() == b"one"


def test_content_that_is_already_in_effect_is_not_reported(follower: Follower) -> None:
    follower.start(known=b"one")
    follower.look_again()
    assert follower.changes.empty()


def test_a_deleted_file_is_logged_once_and_its_return_is_reported(
    follower: Follower, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    follower.start()
    follower.look_again()
    follower.path.unlink()
    follower.look_again()
    assert follower.changes.empty()
    assert [record.getMessage() for record in caplog.records] == [KEEPING]
    follower.path.write_bytes(b"two")
    assert follower.changed() == b"two"


def test_a_file_that_is_being_written_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, told = threading.Event(), []
    contents = iter([b"one", b"", b"tw", b"two", b"two", b"two"])

    def read(path: Path) -> bytes:
        content = next(contents, None)
        if content is None:
            stop.set()
        return content or b"two"

    monkeypatch.setattr(following, "read", read)
    follow(tmp_path, stop, lambda: told.append(1), period=0)
    assert told == [1]
