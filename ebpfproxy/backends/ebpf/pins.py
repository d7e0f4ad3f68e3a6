"""The paths of pinned objects below the bpffs root.

    maps/NAME-<shape>                 one pin for each map and shape
    programs-<digest>/NAME            one folder for each source with its settings
    programs-<digest>/maps/NAME       links to those pins of maps/ that these programs use
    links/NAME                        what attaches a program to its hook
    devices/IFINDEX_SIDE              the tcx link of a device, SIDE being ingress or egress
    xdp/IFINDEX                       the XDP link of a device
    current -> programs-<digest>      the programs in force

Two folders of programs exist side by side only while one replaces the other. Version 0.1 had folders
v2-<digest> with maps and programs, which only `ebpfproxy cleanup` and a mode switch remove. Names contain no
dots, since bpffs does not allow them.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.errors import NotFound, Rejected

_DIGITS = 10
_PROGRAMS = "programs-"
_PARTIAL = "_partial"  # the compiler's suffix of a folder that is not complete


@contextlib.contextmanager
def converted(root: Path) -> Iterator[None]:
    """Convert an error of a file operation on pins below `root` to Rejected. Usually memory is missing."""
    try:
        yield
    except OSError as failure:
        raise Rejected(f"cannot access {failure.filename or root}: {failure.strerror}") from failure


class Pins:
    """The paths below one bpffs root. Each agent of a machine has its own root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.maps = root / "maps"
        self.links = root / "links"
        self.devices = root / "devices"
        self.xdp = root / "xdp"
        self.current = root / "current"

    def programs(self, code: str) -> Path:
        """The folder of the programs compiled from `code`: the source and all settings."""
        return self.root / f"{_PROGRAMS}{hashlib.sha256(code.encode()).hexdigest()[:_DIGITS]}"

    def folders(self) -> Iterator[Path]:
        """Every folder of programs, including incomplete ones and those of version 0.1."""
        for pattern in (f"{_PROGRAMS}*", "v*-*"):
            yield from sorted(path for path in self.root.glob(pattern) if path.is_dir())

    def loaded(self) -> Iterator[Path]:
        """The folders that are complete. No program of another folder was ever attached."""
        return (folder for folder in self.folders() if not folder.name.endswith(_PARTIAL))

    def pinned_programs(self, name: str) -> Iterator[Path]:
        """Every pin of a program, of any version."""
        yield from sorted(self.root.glob(f"{_PROGRAMS}*/{name}"))

    def pinned_maps(self, name: str) -> Iterator[Path]:
        """Every pin of a map, of any shape."""
        yield from sorted(self.maps.glob(f"{name}-*-*"))

    def maps_of(self, folder: Path | None) -> dict[str, Path]:
        """The pins of the maps that the programs of a folder use, by map name. Empty without that folder."""
        if folder is None or not (folder / "maps").is_dir():
            return {}
        links = (path for path in (folder / "maps").iterdir() if path.is_symlink())
        return {path.name: self.maps / path.readlink().name for path in links}

    def hooked_in(self) -> Path:
        """The folder whose programs are attached, or were attached last.

        Raises NotFound if nothing is pinned, Rejected if permissions are missing, or if they are of version
        0.1.
        """
        try:
            folder = self.root / self.current.readlink()
        except (FileNotFoundError, NotADirectoryError) as failure:
            raise NotFound(
                f"no maps of mode ebpf in {self.root}",
                "check --bpffs-root and the mode; `ebpfproxy dump objects` shows what another mode has",
            ) from failure
        except OSError as failure:
            hint = "run as root" if isinstance(failure, PermissionError) else ""
            raise Rejected(f"cannot access {self.root}: {failure.strerror}", hint) from failure
        if not folder.name.startswith(_PROGRAMS):
            raise Rejected(f"cannot use {folder}: it is of version 0.1", "run `ebpfproxy cleanup`")
        return folder

    def in_force(self) -> Path | None:
        """Like `hooked_in`, but None if there is no such folder. Raises Rejected."""
        try:
            folder = self.hooked_in()
        except NotFound:
            return None
        return folder if folder.is_dir() else None

    def set_current(self, folder: Path) -> None:
        """Change `current` to this folder in one step."""
        new = self.root / "current_new"
        new.unlink(missing_ok=True)
        new.symlink_to(folder.name)
        new.rename(self.current)

    def remove_unlinked_maps(self) -> None:
        """Remove the pins of maps that no folder links: an interrupted run left them."""
        linked = {pin for folder in self.folders() for pin in self.maps_of(folder).values()}
        for path in self.maps.glob("*"):
            if path not in linked:
                path.unlink()

    def remove_others(self, programs: Path) -> list[Path]:
        """Remove all pins except those of these programs and their maps. Attachments stay: links keep them.

        Returns the removed paths.
        """
        stale = [path for path in self.folders() if path != programs]
        for path in stale:
            shutil.rmtree(path)
        used = set(self.maps_of(programs).values())
        unused = sorted(path for path in self.maps.glob("*") if path not in used)
        for path in unused:
            path.unlink()
        return stale + unused
