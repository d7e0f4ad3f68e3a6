"""The cluster's state from manifests in a folder, for nodes without an API server and for tests.

All files ``*.yaml``, ``*.yml`` and ``*.json`` of the folder itself count, hidden ones do not. What has
vanished from all files is gone; what does not parse is an Invalid event, and its last good state stays.
"""

import contextlib
import dataclasses
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import watchfiles

from ebpfproxy.api.event import (
    ENDPOINT_SLICE,
    NODE,
    SERVICE,
    Event,
    Invalid,
    NodeChanged,
    ServiceChanged,
    SliceChanged,
    Synced,
)
from ebpfproxy.api.manifest_file import Located, Unreadable, read_manifest
from ebpfproxy.errors import ConfigError
from ebpfproxy.log import Logger

log = Logger(__name__)

POLLING = "Cannot watch the manifests, polling them"
"""inotify is not available there."""
KEEPING = "Cannot read the manifests, keeping the last ones"
"""Services stay as they were read last."""

FILE = "file"
"""The kind in an Invalid about a whole file."""

SUFFIXES = frozenset({".yaml", ".yml", ".json"})
_DEBOUNCE_MS = 20
_STEP_MS = 2
"""A change is reported after a pause of a step, at the latest after the debounce: many files, one change."""
_SETTLED_NS = 1_000_000_000
"""How long ago a file must have changed for its time stamps to be trusted: theirs is a coarse clock, so a
change right behind another may not show in them."""
_WRITTEN_NS = 200_000_000
"""How long ago a file must have been written for it to be taken as whole where it has lost something."""
_LOOK_ROUND_MS = 250
"""How often the folder is read without a notification: inotify does not report everything, such as
a change behind a symbolic link, or that the folder is another one now, is found so."""

Key = tuple[str, str]
"""Kind and name of an object."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileReading:
    """What one file said when it last parsed. `fingerprint`: hash() of the bytes read last, good or bad.

    `stamp` is the file's identity, size and times when it was read, None where they are not to be
    trusted yet: while they are the same, it need not be read again. `inode` and `size` are those of the
    same bytes as `objects`. `held`: the file says less now, and seems to be in the midst of being written.
    """

    fingerprint: int
    objects: Mapping[Key, Located] = dataclasses.field(default_factory=dict)
    invalid: tuple[Invalid, ...] = ()
    stamp: "_Stamp | None" = None
    inode: int = 0
    size: int = 0
    held: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a folder says. `objects` holds last good values too; `invalid` is what cannot be served."""

    files: Mapping[str, FileReading] = dataclasses.field(default_factory=dict)
    objects: Mapping[Key, Event] = dataclasses.field(default_factory=dict)
    invalid: tuple[Invalid, ...] = ()

    @property
    def held(self) -> bool:
        """Whether some file is to be looked at again, though it may not change any more."""
        return any(each.held for each in self.files.values())


def read_directory(directory: Path, node_name: str, before: Reading | None = None) -> Reading:
    """Read all manifests of `directory`; files that are as `before` are not parsed, or even read, again.

    A file that is written in place is empty first, and then cut short, which YAML cannot tell from an
    object that was removed: one that lost something a moment ago is taken as it was, and `held`. One that
    another was renamed over, or that is gone, is taken as it is at once.
    Raises OSError where the directory itself cannot be listed.
    """
    known = before.files if before else {}
    files: dict[str, FileReading] = {}
    for name in _names(directory):
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            files[name] = _read_again(directory / name, node_name, known.get(name))
    return _merge(files)


def _read_again(path: Path, node_name: str, known: FileReading | None) -> FileReading:
    """One file, if it does not look as it did when it was `known`. Raises FileNotFoundError."""
    try:
        stamp = _stamp(path)
        if known and known.stamp and known.stamp == stamp:
            return known
        content = path.read_bytes()
        now = path.stat()  # after the content: what was changed in between shows
    except FileNotFoundError:
        raise
    except OSError as error:
        why = Invalid(FILE, path.name, f"{path.name}: {error.strerror}")
        return FileReading(0, known.objects if known else {}, (why,))
    if known and known.fingerprint == hash(content):
        fresh = known
    else:
        fresh = _read_file(path.name, content, node_name, known)
        if known and _is_being_written(known, fresh, now, len(content)):
            return dataclasses.replace(known, stamp=None, held=True)
    return dataclasses.replace(fresh, stamp=stamp, inode=now.st_ino, size=len(content), held=False)


def _is_being_written(known: FileReading, fresh: FileReading, now: os.stat_result, size: int) -> bool:
    """Whether the same file was written a moment ago, and has fewer objects, or bytes, than were known."""
    lost = size < known.size or bool(known.objects.keys() - fresh.objects.keys())
    return (
        bool(known.objects)
        and lost
        and now.st_ino == known.inode
        and 0 <= time.time_ns() - now.st_mtime_ns < _WRITTEN_NS
    )


_Stamp = tuple[int, int, int, int]


def _stamp(path: Path) -> _Stamp | None:
    """None where the file was changed so lately that the next change may look the same."""
    found = path.stat()
    if time.time_ns() - found.st_ctime_ns < _SETTLED_NS:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def changes(before: Reading, after: Reading) -> list[Event]:
    """The events that lead from one reading to the next: what is new or different, gone, newly invalid."""
    known = set(before.invalid)
    reported: list[Event] = [one for one in after.invalid if one not in known]
    for key, event in after.objects.items():
        if before.objects.get(key) != event:
            reported.append(event)
    return reported + [_gone(before.objects[key]) for key in before.objects.keys() - after.objects.keys()]


class FileSource:
    """Puts what a folder of manifests says as events, first all, and then what changes.

    Raises ConfigError where `directory` is none. `put` is called on the thread of `run` alone.
    """

    def __init__(self, directory: Path, node_name: str, put: Callable[[Event], object]) -> None:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is not a directory", "It must hold the manifests of the cluster")
        self._directory = directory
        self._node_name = node_name
        self._put = put
        self._reading: Reading | None = None
        self._seen: object = None
        self._missed = self._blind = False

    def run(self, stop: threading.Event) -> None:
        """Read the folder and follow it, until `stop` is set. For a thread of its own.

        A folder that is deleted, or replaced, is waited for; until then its last state stays.
        """
        while not stop.is_set():
            self._look(always=False)
            watched = self._identity()
            for reported in self._wake_ups(stop):
                self._look(always=reported)
                if self._identity() != watched:
                    break
            if self._identity() in (None, watched):
                stop.wait(_LOOK_ROUND_MS / 1000)

    def _wake_ups(self, stop: threading.Event) -> Iterator[bool]:
        """True after a change that inotify reported, False when it is time to look; ends if it cannot."""
        try:
            for reported in watchfiles.watch(
                self._directory,
                watch_filter=None,
                debounce=_DEBOUNCE_MS,
                step=_STEP_MS,
                stop_event=stop,
                rust_timeout=_LOOK_ROUND_MS,
                yield_on_timeout=True,
                raise_interrupt=False,
                recursive=False,
            ):
                yield bool(reported)
        except FileNotFoundError:
            return
        except (OSError, RuntimeError) as error:  # WatchfilesRustInternalError is a RuntimeError
            if not self._blind:
                log.warning(POLLING, error=error)
            self._blind = True

    def _identity(self) -> tuple[int, int] | None:
        """Which directory the path leads to now; None where to none."""
        try:
            found = self._directory.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _look(self, always: bool) -> None:
        """Read the folder, if only where its files look different from last time, and put what changed."""
        try:
            seen = _signature(self._directory)
            if seen == self._seen and not always:
                return
            reading = read_directory(self._directory, self._node_name, self._reading)
        except OSError as error:
            if not self._missed:
                log.warning(KEEPING, path=self._directory, error=error)
            self._missed, self._seen = True, None
            return
        self._missed, self._seen = False, None if reading.held else seen
        for event in changes(self._reading or Reading(), reading):
            self._put(event)
        if self._reading is None:
            for kind in SERVICE, ENDPOINT_SLICE, NODE:
                self._put(Synced(kind))
        self._reading = reading


def _names(directory: Path) -> list[str]:
    """The manifests, by name. A dangling link, a subfolder or a pipe is none. Raises OSError."""
    with os.scandir(directory) as entries:
        found = [entry.name for entry in entries if _is_manifest(entry)]
    return sorted(found)


def _is_manifest(entry: os.DirEntry[str]) -> bool:
    visible = not entry.name.startswith(".") and Path(entry.name).suffix in SUFFIXES
    try:
        return visible and entry.is_file()
    except OSError:
        return False


def _signature(directory: Path) -> list[tuple[str, int, int, int, int]]:
    """By which a changed file shows without being read. Raises OSError where the directory is gone."""
    seen = []
    for name in _names(directory):
        try:
            found = (directory / name).stat()
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode):
            seen.append((name, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return seen


def _read_file(name: str, content: bytes, node_name: str, known: FileReading | None) -> FileReading:
    """Parse a file. Where it does not parse, what it said before stays, and its objects that do not, too."""
    last = known.objects if known else {}
    try:
        located = read_manifest(name, content, node_name)
    except Unreadable as error:
        return FileReading(hash(content), last, (Invalid(FILE, name, error.message),))
    objects: dict[Key, Located] = {}
    invalid: list[Invalid] = []
    for where, event in located:
        key = _key(event)
        if isinstance(event, Invalid):
            invalid.append(event)
            key = (event.kind, event.name)
            if key in last:
                objects.setdefault(key, last[key])
        elif key in objects:
            invalid.append(_twice(key, where, objects[key].where))
        else:
            objects[key] = Located(where, event)
    return FileReading(hash(content), objects, tuple(invalid))


def _merge(files: Mapping[str, FileReading]) -> Reading:
    """One value for each object: that of the first file by name that has it."""
    found: dict[Key, Located] = {}
    invalid: list[Invalid] = []
    for name in sorted(files):
        invalid += files[name].invalid
        for key, located in files[name].objects.items():
            first = found.setdefault(key, located)
            if first is not located:
                invalid.append(_twice(key, located.where, first.where))
    return Reading(files, {key: located.event for key, located in found.items()}, tuple(invalid))


def _twice(key: Key, where: str, first: str) -> Invalid:
    return Invalid(key[0], key[1], f"{where}: it is in {first} already, which counts")


def _key(event: Event) -> Key:
    match event:
        case ServiceChanged(name):
            return SERVICE, str(name)
        case SliceChanged(name):
            return ENDPOINT_SLICE, str(name)
        case NodeChanged(node):
            return NODE, node.name if node else ""
        case _:
            return "", ""


def _gone(event: Event) -> Event:
    match event:
        case ServiceChanged(name):
            return ServiceChanged(name, None)
        case SliceChanged(name):
            return SliceChanged(name, None)
        case _:
            return NodeChanged(None)
