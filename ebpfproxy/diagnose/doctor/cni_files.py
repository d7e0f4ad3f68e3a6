"""The CNI configuration of a node: which plugins the container runtime calls.

Sources: the CNI specification 1.1.0, "Section 1: Network configuration format"; LoadConfList in
libcni/api.go of containernetworking/cni.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FOLDER = "etc/cni/net.d"
_SUFFIXES = (".conf", ".conflist", ".json")
_MAX_BYTES = 1 << 20


class CniFile(NamedTuple):
    """One file. `network`: its name field. `types`: the executables of the plugins, in the order in which
    they are called; empty if the file cannot be parsed."""

    path: Path
    network: str
    types: tuple[str, ...]


def default_folders(proc_root: Path) -> tuple[Path, ...]:
    """Where the node's configuration may be: in a pod with the host's root at /host, by the root of the
    node's first process, or on the node itself."""
    return Path("/host") / _FOLDER, proc_root / "1/root" / _FOLDER, Path("/") / _FOLDER


def read(folders: tuple[Path, ...]) -> tuple[CniFile, ...]:
    """The files of the first folder that has any, in the order in which the runtime prefers them.

    Empty if there are none, or if none may be read.
    """
    for folder in folders:
        if found := tuple(_read(path) for path in _paths(folder)):
            return found
    return ()


def _paths(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208  (Path.iterdir hides no error, but has no order)
    except OSError:
        return []
    return [folder / name for name in names if name.endswith(_SUFFIXES)]


def _read(path: Path) -> CniFile:
    from msgspec import DecodeError
    from msgspec.json import decode

    try:
        with path.open("rb") as file:
            content = decode(file.read(_MAX_BYTES))
    except (OSError, DecodeError):
        return CniFile(path, "", ())
    if not isinstance(content, dict):
        return CniFile(path, "", ())
    return CniFile(path, str(content.get("name", "")), tuple(_types(content)))


def _types(content: dict[str, object]) -> Iterator[str]:
    """A file has one plugin, or a list."""
    listed = content.get("plugins")
    for plugin in listed if isinstance(listed, list) else [content]:
        type_ = plugin.get("type") if isinstance(plugin, dict) else None
        if isinstance(type_, str):
            yield type_
