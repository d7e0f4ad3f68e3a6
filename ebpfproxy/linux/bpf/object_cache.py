"""Finds a compiled object file by its digest: in the package, or in a folder of this machine.

Each file is named by the digest of its source and settings, so a file of another version is never used. A
damaged file is replaced. A folder that cannot be written means that each start compiles.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ebpfproxy.errors import Rejected
from ebpfproxy.linux.bpf.object_file import ObjectFile, decode, encode
from ebpfproxy.log import Logger

log = Logger(__name__)

DAMAGED = "Compiling again, an object file is damaged"
"""The file of compiled BPF programs is replaced."""

SHIPPED = Path(__file__).parents[2] / "objects"
"""The object file of a wheel or an image. Empty in a source checkout."""
FOLDER = Path("/var/cache/ebpfproxy/objects")
_SUFFIX = ".bpf"
_LOCK_SUFFIX = ".lock"
_KEPT = 64  # files in FOLDER, each of about 600 kB
_PATIENCE = 60.0  # seconds; clang takes ten on a slow machine
_PAUSE = 0.05


def find(digest: str) -> ObjectFile | None:
    """The object file of a digest, None if there is none."""
    for path in (SHIPPED / f"{digest}{_SUFFIX}", FOLDER / f"{digest}{_SUFFIX}"):
        found = _read(path, digest)
        if found:
            return found
    return None


def _read(path: Path, digest: str) -> ObjectFile | None:
    try:
        found = decode(path.read_bytes())
        if found.digest != digest:
            raise Rejected("it belongs to another source")
    except OSError:
        return None
    except Rejected as failure:
        log.warning(DAMAGED, file=path, reason=failure.message)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the least recently used file is removed first
    return found


def save(file: ObjectFile, folder: Path | None = None) -> bool:
    """Write the file in one step, by default to FOLDER. Returns False if the folder cannot be written."""
    folder = folder or FOLDER
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            written = Path(fresh, "file")
            written.write_bytes(encode(file))
            written.rename(folder / f"{file.digest}{_SUFFIX}")
        _prune(folder)
    except OSError:
        return False
    return True


def save_only(file: ObjectFile, folder: Path) -> Path:
    """Write the file, and remove all others of the folder. Returns its path. Raises Rejected."""
    path = folder / f"{file.digest}{_SUFFIX}"
    if not save(file, folder):
        raise Rejected(f"cannot write {path}", "check the permissions of the folder")
    for other in folder.glob(f"*{_SUFFIX}"):
        if other != path:
            other.unlink()
    return path


def _prune(folder: Path) -> None:
    """Remove the files beyond _KEPT, and their locks."""
    for path in _by_use(folder)[_KEPT:]:
        path.unlink(missing_ok=True)
        path.with_suffix(_LOCK_SUFFIX).unlink(missing_ok=True)


def _by_use(folder: Path) -> list[Path]:
    """All files, the most recently used one first. Another process may remove some meanwhile."""

    def stamped() -> Iterator[tuple[float, Path]]:
        for path in folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                yield path.stat().st_mtime, path

    return [path for _, path in sorted(stamped(), reverse=True)]


def cached(digest: str, compile_: Callable[[], ObjectFile]) -> tuple[ObjectFile, bool]:
    """The object file of a digest, and whether it had to be compiled. Processes that need the same file at
    the same time compile it once."""
    if found := find(digest):
        return found, False
    with _locked(digest):
        if found := find(digest):
            return found, False
        made = compile_()
        save(made)
    return made, True


@contextlib.contextmanager
def _locked(digest: str) -> Iterator[None]:
    """Wait until no other process compiles this file, at most for _PATIENCE. Without effect if FOLDER cannot
    be written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
            # Any user who may open the file may lock it.
            file = os.open(FOLDER / f"{digest}{_LOCK_SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, file)
            _await(file)
        yield


def _await(lock: int) -> None:
    """Raises BlockingIOError after _PATIENCE, since the process that has the lock may hang."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)
        else:
            return
