"""Read the cluster's state from a folder of manifests, for nodes without an API server and for tests.

The source reads all files ``*.yaml``, ``*.yml`` and ``*.json`` directly in the folder, except hidden ones.
An object that is in no file any more is deleted. A file or object that does not parse yields an Invalid
event, and its last good state stays.
"""

import contextlib
import dataclasses
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from inotify_simple import INotify, flags

from ebpfproxy.api.event import (
    ENDPOINT_SLICE,
    NAMESPACE,
    NODE,
    PEER_NODE,
    POD,
    SERVICE,
    SERVICE_CIDR,
    Event,
    Invalid,
    NamespaceChanged,
    NodeChanged,
    PeerChanged,
    PodChanged,
    ServiceChanged,
    ServiceCidrChanged,
    SliceChanged,
    Synced,
)
from ebpfproxy.api.manifest_file import Located, Unreadable, read_manifest
from ebpfproxy.errors import ConfigError
from ebpfproxy.log import Logger

log = Logger(__name__)

POLLING = "Cannot watch the manifests, polling them"
"""inotify is not available for the folder."""
KEEPING = "Cannot read the manifests, keeping the last ones"
"""The Services that were read last stay in effect."""

FILE = "file"
"""The kind in an Invalid about a file that does not parse."""

SUFFIXES = frozenset({".yaml", ".yml", ".json"})
_PAUSE_MS = 5
_LONGEST_S = 0.02
"""Changes are read after a pause of `_PAUSE_MS`, at the latest after `_LONGEST_S`. Thus a change of many
files is read once."""
_CHANGES = (
    flags.CREATE
    | flags.MODIFY
    | flags.ATTRIB
    | flags.MOVED_FROM
    | flags.MOVED_TO
    | flags.DELETE
    | flags.DELETE_SELF
    | flags.MOVE_SELF
)
_SETTLED_NS = 1_000_000_000
"""A file's time stamps are trusted if it changed at least this long ago. Their clock is coarse, so two
changes in quick succession may have equal time stamps."""
_WRITTEN_NS = 200_000_000
"""A file that became smaller or lost objects counts as completely written after this time."""
_POLL_MS = 250
"""How often the folder is checked without a notification. inotify misses some changes, for example behind a
symbolic link or the replacement of the folder."""

Key = tuple[str, str]
"""Kind and name of an object."""


@dataclasses.dataclass(frozen=True, slots=True)
class FileReading:
    """The content of one file when it last parsed.

    - `fingerprint`: hash() of the bytes read last, valid or not;
    - `stamp`: inode, size and times when the file was read. While they are the same, it is not read again.
      None if they cannot be trusted yet;
    - `inode`, `size`: those of the file when `objects` were read;
    - `incomplete`: the file has less content now and is probably being written.
    """

    fingerprint: int
    objects: Mapping[Key, Located] = dataclasses.field(default_factory=dict)
    invalid: tuple[Invalid, ...] = ()
    stamp: "_Stamp | None" = None
    inode: int = 0
    size: int = 0
    incomplete: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The content of a folder. `objects` includes last good states; `invalid` are the rejections."""

    files: Mapping[str, FileReading] = dataclasses.field(default_factory=dict)
    objects: Mapping[Key, Event] = dataclasses.field(default_factory=dict)
    invalid: tuple[Invalid, ...] = ()

    @property
    def incomplete(self) -> bool:
        """Whether a file must be read again, even if it does not change any more."""
        return any(each.incomplete for each in self.files.values())


def read_directory(directory: Path, node_name: str, before: Reading | None = None) -> Reading:
    """Read all manifests of `directory`. Files that are unchanged since `before` are not read again.

    A file that is written in place is first empty, then truncated. In YAML this looks like removed objects.
    So a file that lost content a moment ago keeps its previous state and is `incomplete`. A file that was
    replaced by rename, or deleted, takes effect at once.
    Raises OSError if the directory cannot be listed.
    """
    known = before.files if before else {}
    files: dict[str, FileReading] = {}
    for name in _names(directory):
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            files[name] = _read_if_changed(directory / name, node_name, known.get(name))
    return _merge(files)


def _read_if_changed(path: Path, node_name: str, known: FileReading | None) -> FileReading:
    """Read one file unless it looks as in `known`. Raises FileNotFoundError."""
    try:
        stamp = _stamp(path)
        if known and known.stamp and known.stamp == stamp:
            return known
        content = path.read_bytes()
        now = path.stat()  # after the content, so that a change in between is visible
    except FileNotFoundError:
        raise
    except OSError as error:
        rejection = Invalid(FILE, path.name, f"cannot read {path.name}: {error.strerror}")
        return FileReading(0, known.objects if known else {}, (rejection,))
    if known and known.fingerprint == hash(content):
        current = known
    else:
        current = _read_file(path.name, content, node_name, known)
        if known and _is_being_written(known, current, now, len(content)):
            return dataclasses.replace(known, stamp=None, incomplete=True)
    return dataclasses.replace(current, stamp=stamp, inode=now.st_ino, size=len(content), incomplete=False)


def _is_being_written(known: FileReading, current: FileReading, now: os.stat_result, size: int) -> bool:
    """Whether the same inode was written a moment ago and has fewer objects or bytes than before."""
    lost = size < known.size or bool(known.objects.keys() - current.objects.keys())
    return (
        bool(known.objects)
        and lost
        and now.st_ino == known.inode
        and 0 <= time.time_ns() - now.st_mtime_ns < _WRITTEN_NS
    )


_Stamp = tuple[int, int, int, int]


def _stamp(path: Path) -> _Stamp | None:
    """Return inode, size and times; None if the last change is so recent that the next may look the same."""
    status = path.stat()
    if time.time_ns() - status.st_ctime_ns < _SETTLED_NS:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def changes(before: Reading, after: Reading) -> list[Event]:
    """Return the events from one reading to the next: new rejections, new and changed objects, deletions."""
    known = set(before.invalid)
    reported: list[Event] = [each for each in after.invalid if each not in known]
    for key, event in after.objects.items():
        if before.objects.get(key) != event:
            reported.append(event)
    return reported + [_deleted(before.objects[key]) for key in before.objects.keys() - after.objects.keys()]


class FileSource:
    """Puts the objects of a folder of manifests as events, then every change.

    Raises ConfigError if `directory` is not a directory. Only the thread of `run` calls `put`.
    """

    def __init__(self, directory: Path, node_name: str, put: Callable[[Event], object]) -> None:
        if not directory.is_dir():
            raise ConfigError(
                f"cannot read manifests: {directory} is not a directory",
                "create it, or give another directory with --manifests",
            )
        self._directory = directory
        self._node_name = node_name
        self._put = put
        self._reading: Reading | None = None
        self._seen: object = None
        self._failed = self._polling = False

    def run(self, stop: threading.Event) -> None:
        """Read the folder and watch it until `stop` is set. Run it in a thread of its own.

        If the folder is deleted or moved, this waits for a new one; meanwhile the last state stays.
        """
        while not stop.is_set():
            self._check(always=False)
            watched = self._identity()
            for reported in self._wake_ups(stop):
                self._check(always=reported)
                if self._identity() != watched:
                    break
            if self._identity() in (None, watched):
                stop.wait(_POLL_MS / 1000)

    def _wake_ups(self, stop: threading.Event) -> Iterator[bool]:
        """Yield True after a change reported by inotify, False after `_POLL_MS`. End if inotify fails."""
        try:
            with INotify() as watch:
                watch.add_watch(self._directory, _CHANGES)
                yield False  # a change since the last check is not reported
                while not stop.is_set():
                    reported = watch.read(_POLL_MS)
                    until = time.monotonic() + _LONGEST_S
                    while reported and time.monotonic() < until and watch.read(_PAUSE_MS):
                        pass
                    yield bool(reported)
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._polling:
                log.warning(POLLING, error=error)
            self._polling = True

    def _identity(self) -> tuple[int, int] | None:
        """Return device and inode of the directory at the path; None if there is none."""
        try:
            status = self._directory.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _check(self, always: bool) -> None:
        """Read the folder and put the changes. Skip it if no file looks different, unless `always`."""
        try:
            seen = _signature(self._directory)
            if seen == self._seen and not always:
                return
            reading = read_directory(self._directory, self._node_name, self._reading)
        except OSError as error:
            if not self._failed:
                log.warning(KEEPING, path=self._directory, error=error)
            self._failed, self._seen = True, None
            return
        self._failed, self._seen = False, None if reading.incomplete else seen
        for event in changes(self._reading or Reading(), reading):
            self._put(event)
        if self._reading is None:
            for kind in SERVICE, ENDPOINT_SLICE, NODE, PEER_NODE, POD, NAMESPACE, SERVICE_CIDR:
                self._put(Synced(kind))
        self._reading = reading


def _names(directory: Path) -> list[str]:
    """Return the sorted names of the manifests: regular files and links to them. Raises OSError."""
    with os.scandir(directory) as entries:
        merged = [entry.name for entry in entries if _is_manifest(entry)]
    return sorted(merged)


def _is_manifest(entry: os.DirEntry[str]) -> bool:
    visible = not entry.name.startswith(".") and Path(entry.name).suffix in SUFFIXES
    try:
        return visible and entry.is_file()
    except OSError:
        return False


def _signature(directory: Path) -> list[tuple[str, int, int, int, int]]:
    """Return name, inode, size and times of each file: they reveal changes without reading the files.

    Raises OSError if the directory cannot be listed.
    """
    signature = []
    for name in _names(directory):
        try:
            status = (directory / name).stat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            signature.append((name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return signature


def _read_file(name: str, content: bytes, node_name: str, known: FileReading | None) -> FileReading:
    """Parse a file. If the file or an object in it does not parse, its previous state stays."""
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
            kinds = (NODE, PEER_NODE) if event.kind == NODE else (event.kind,)
            for key in ((kind, event.name) for kind in kinds):
                if key in last:
                    objects.setdefault(key, last[key])
        elif key in objects:
            invalid += _duplicates(key, where, objects[key].where)
        else:
            objects[key] = Located(where, event)
    return FileReading(hash(content), objects, tuple(invalid))


def _merge(files: Mapping[str, FileReading]) -> Reading:
    """Merge the files. Of an object in two files, the first file by name wins."""
    merged: dict[Key, Located] = {}
    invalid: list[Invalid] = []
    for name in sorted(files):
        invalid += files[name].invalid
        for key, located in files[name].objects.items():
            first = merged.setdefault(key, located)
            if first is not located:
                invalid += _duplicates(key, located.where, first.where)
    return Reading(files, {key: located.event for key, located in merged.items()}, tuple(invalid))


def _duplicates(key: Key, where: str, first: str) -> list[Invalid]:
    """Return the rejection of an object, once: a Node, which may have two keys, always has the second."""
    kind, name = key
    if kind == NODE:
        return []
    reason = f"{where}: ignored, because {first} defines the same object"
    return [Invalid(NODE if kind == PEER_NODE else kind, name, reason)]


def _key(event: Event) -> Key:
    match event:
        case ServiceChanged(name):
            return SERVICE, str(name)
        case SliceChanged(name):
            return ENDPOINT_SLICE, str(name)
        case PodChanged(name):
            return POD, str(name)
        case NamespaceChanged(name):
            return NAMESPACE, name
        case NodeChanged(node):
            return NODE, node.name if node else ""
        case PeerChanged(name):
            return PEER_NODE, name
        case ServiceCidrChanged(name):
            return SERVICE_CIDR, name
        case _:
            return "", ""


def _deleted(event: Event) -> Event:
    match event:
        case ServiceChanged(name):
            return ServiceChanged(name, None)
        case SliceChanged(name):
            return SliceChanged(name, None)
        case PodChanged(name):
            return PodChanged(name, None)
        case NamespaceChanged(name):
            return NamespaceChanged(name, None)
        case PeerChanged(name):
            return PeerChanged(name, None)
        case ServiceCidrChanged(name):
            return ServiceCidrChanged(name, ())
        case _:
            return NodeChanged(None)
