"""Object files on disk: found by digest, damaged, pruned, and a folder that cannot be written."""

import fcntl
import functools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.bpf import object_cache
from ebpfproxy.linux.bpf.object_file import ObjectFile, encode


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(object_cache, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(object_cache, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "cache"


def file(digest: str) -> ObjectFile:
    return ObjectFile(digest, "GPL", (), ())


def never() -> ObjectFile:
    raise AssertionError("it has to be found")


def test_a_compiled_file_is_found_by_the_next_start() -> None:
    assert object_cache.cached("aa", lambda: file("aa")) == (file("aa"), True)
    assert object_cache.cached("aa", never) == (file("aa"), False)


def test_a_file_of_the_image_is_found_without_the_folder(tmp_path: Path) -> None:
    object_cache.save(file("aa"), tmp_path / "shipped")
    assert object_cache.cached("aa", never) == (file("aa"), False)
    assert not (tmp_path / "cache").exists()


def test_a_damaged_file_is_compiled_again_and_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    object_cache.save(file("aa"))
    (folder / "aa.bpf").write_bytes(b"damaged")
    assert object_cache.cached("aa", lambda: file("aa")) == (file("aa"), True)
    assert object_cache.DAMAGED in caplog.text
    assert object_cache.cached("aa", never) == (file("aa"), False)


def test_a_damaged_file_of_the_image_is_replaced_by_one_of_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The image is read-only."""
    object_cache.save(file("aa"), tmp_path / "shipped")
    damaged = bytearray((tmp_path / "shipped" / "aa.bpf").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "shipped" / "aa.bpf").write_bytes(damaged)
    assert object_cache.cached("aa", lambda: file("aa")) == (file("aa"), True)
    assert object_cache.DAMAGED in caplog.text
    assert object_cache.cached("aa", never) == (file("aa"), False)


def test_a_file_of_the_image_for_other_sources_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "aa.bpf").write_bytes(encode(file("bb")))
    assert object_cache.cached("aa", lambda: file("aa")) == (file("aa"), True)


def test_only_the_file_of_this_version_is_kept_for_an_image(folder: Path) -> None:
    object_cache.save(file("aa"))
    assert object_cache.save_only(file("bb"), folder) == folder / "bb.bpf"
    assert [path.name for path in folder.iterdir()] == ["bb.bpf"]


def test_a_folder_for_an_image_that_cannot_be_written_is_an_error(folder: Path) -> None:
    folder.write_text("no folder")
    with pytest.raises(Rejected, match=r"cannot write .*/cache/aa\.bpf"):
        object_cache.save_only(file("aa"), folder)


def test_a_file_under_the_name_of_another_is_not_used(folder: Path) -> None:
    folder.mkdir()
    (folder / "aa.bpf").write_bytes(encode(file("bb")))
    assert object_cache.find("aa") is None


def test_a_folder_that_cannot_be_written_is_no_failure(folder: Path) -> None:
    folder.write_text("no folder")
    assert object_cache.cached("aa", lambda: file("aa")) == (file("aa"), True)
    assert object_cache.cached("aa", lambda: file("aa")) == (file("aa"), True)


def test_processes_that_need_the_same_file_compile_it_once(folder: Path) -> None:
    compiled = []

    def compile_() -> ObjectFile:
        compiled.append("aa")
        time.sleep(0.2)  # a lock of a file descriptor also excludes other threads
        return file("aa")

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: object_cache.cached("aa", compile_), range(4)))
    assert compiled == ["aa"]
    assert sorted(is_new for _, is_new in done) == [False, False, False, True]


def test_a_process_that_hangs_with_the_lock_delays_others_for_some_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "_PATIENCE", 0.1)
    folder.mkdir()
    with (folder / "aa.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert object_cache.cached("aa", lambda: file("aa")) == (file("aa"), True)


def test_files_that_were_not_used_for_longest_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "_KEPT", 2)
    for age, digest in ((30, "aa"), (20, "bb")):
        object_cache.cached(digest, functools.partial(file, digest))
        os.utime(folder / f"{digest}.bpf", (1_000_000 - age, 1_000_000 - age))
    object_cache.find("aa")
    object_cache.save(file("cc"))
    assert sorted(path.name for path in folder.iterdir()) == ["aa.bpf", "aa.lock", "cc.bpf"]
