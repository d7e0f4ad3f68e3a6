"""Collects the parts of a support bundle, and writes them into a gzipped tar archive.

A part that fails is a line in the list of contents, and the others are written. Every part is redacted here,
so that none can be forgotten.
"""

import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ebpfproxy.diagnose.bundle.anonymize import Anonymizer
from ebpfproxy.diagnose.bundle.redact import redact, redact_json, redact_options
from ebpfproxy.errors import ConfigError, EbpfProxyError

CONTENTS = "contents.json"
"""The list of all parts, with their errors."""


class Content(NamedTuple):
    """The text of a part. `note`: what a reader should know of it, "" for nothing."""

    text: str
    note: str = ""


class Part(NamedTuple):
    """A file of the bundle. `collect` returns its text, or raises any exception.

    `harmless`: the members of a file .json, or the options of another file, whose values have no secrets.
    Other values are replaced. Without it, another file is free text.
    """

    file: str
    title: str
    collect: Callable[[], Content]
    harmless: Set[str] = frozenset()


class Entry(NamedTuple):
    """A line in the list of contents. `size` is in bytes. `error` is "" for a part that was collected; others
    have no file."""

    file: str
    title: str
    size: int
    note: str = ""
    error: str = ""


def collect(parts: Iterable[Part], anonymizer: Anonymizer | None = None) -> Iterator[tuple[Entry, bytes]]:
    """Yield each part and its content: redacted, and with an anonymizer anonymous.

    Parts are collected before they are anonymized, because logs have names that other parts have as well.
    """
    collected = [_collected(part) for part in parts]
    if anonymizer:
        for entry, text in collected:
            _learn(anonymizer, entry.file, text)
    for entry, text in collected:
        if anonymizer and not entry.error:
            text = _anonymous(anonymizer, entry.file, text)
        if anonymizer:
            entry = entry._replace(note=anonymizer.text(entry.note), error=anonymizer.text(entry.error))
        packed = text.encode("utf-8", "replace")
        yield entry._replace(size=len(packed)), packed


def _collected(part: Part) -> tuple[Entry, str]:
    try:
        content = part.collect()
        text = _redacted(part, content.text)
    except Exception as error:  # whatever is broken on this node is why the bundle is made
        reason = error.message if isinstance(error, EbpfProxyError) else f"{type(error).__name__}: {error}"
        return Entry(part.file, part.title, 0, error=redact(" ".join(reason.split()))), ""
    return Entry(part.file, part.title, 0, redact(content.note)), text


def _redacted(part: Part, text: str) -> str:
    if part.file.endswith(".json"):
        return redact_json(text, part.harmless)
    return redact_options(text, part.harmless) if part.harmless else redact(text)


def _learn(anonymizer: Anonymizer, file: str, text: str) -> None:
    if file.endswith(".json"):
        try:
            anonymizer.learn(_names(json.loads(text)))
        except ValueError:
            return
    else:
        anonymizer.learn_from_log(text)


def _names(value: object) -> Iterator[str]:
    """The names of Services and nodes in JSON."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("service", "node") and isinstance(each, str):
                yield each
            else:
                yield from _names(each)
    elif isinstance(value, list):
        for each in value:
            yield from _names(each)


def _anonymous(anonymizer: Anonymizer, file: str, text: str) -> str:
    if file.endswith(".json"):
        try:
            return anonymizer.json(text)
        except ValueError:
            pass
    return anonymizer.text(text)


def write(path: Path | None, collected: Iterable[tuple[Entry, bytes]], output: BinaryIO) -> list[Entry]:
    """Write the archive to a new file at `path`, which only its owner can read; without a path to `output`.

    Returns the list of contents. Raises ConfigError if the file exists or cannot be written.
    """
    if path is None:
        return _write(output, collected, "ebpfproxy-support")
    name = path.name.removesuffix(".gz").removesuffix(".tgz").removesuffix(".tar")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"cannot write {path}: it exists", "give another name, or remove the file"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", "give a file in a folder that exists"
        ) from error
    try:
        with open(descriptor, "wb") as file:
            return _write(file, collected, name)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write(output: BinaryIO, collected: Iterable[tuple[Entry, bytes]], folder: str) -> list[Entry]:
    entries: list[Entry] = []
    with tarfile.open(fileobj=output, mode="w|gz") as archive:
        for entry, content in collected:
            entries.append(entry)
            if not entry.error:
                _add(archive, f"{folder}/{entry.file}", content)
        listing = json.dumps([entry._asdict() for entry in entries], indent=2) + "\n"
        _add(archive, f"{folder}/{CONTENTS}", listing.encode())
    return entries


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
    archive.addfile(member, io.BytesIO(content))
