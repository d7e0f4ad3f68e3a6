"""Where our objects are pinned below the bpffs root.

    v1-<digest>/maps/NAME               one folder for each layout: abi.h, maps.h and the maps' sizes
    v1-<digest>/programs_<digest>/NAME  one folder for each code that uses these maps
    links/NAME                          what attaches a program to its hook
    devices/IFINDEX_SIDE                the tcx link of a device, SIDE being ingress or egress
    current -> v1-<digest>              the layout that is hooked in

Two layouts exist side by side only while one takes over from the other. bpffs allows no dots in names.
"""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.dataplanes.ebpf import abi
from ebpfproxy.dataplanes.ebpf.maps import MapSizes
from ebpfproxy.errors import NotFound, Rejected

_DIGITS = 10


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_DIGITS]


class Pins:
    """The paths below one bpffs root. Each agent of a machine has its own root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.links = root / "links"
        self.devices = root / "devices"
        self.current = root / "current"

    def layout(self, sizes: MapSizes) -> Path:
        """The folder of the layout that this version has with these sizes."""
        source = abi.source_directory()
        texts = [(source / name).read_text() for name in ("abi.h", "maps.h")]
        return self.root / f"v{abi.ABI_VERSION}-{_digest(*texts, str(sizes))}"

    def layouts(self) -> Iterator[Path]:
        """Every layout that is there, ours and others'."""
        yield from sorted(path for path in self.root.glob("v*-*") if path.is_dir())

    def loaded(self) -> Iterator[Path]:
        """Those layouts that have programs: of others none was ever attached."""
        for layout in self.layouts():
            if any(not path.name.endswith("_partial") for path in layout.glob("programs_*")):
                yield layout

    def hooked_in(self) -> Path:
        """The layout whose programs are, or were last, attached.

        Raises NotFound, or Rejected where we may not look.
        """
        try:
            return self.root / self.current.readlink()
        except PermissionError as failure:
            raise Rejected(f"{self.root} cannot be looked at: {failure.strerror}", "run as root") from failure
        except OSError as failure:
            raise NotFound(
                f"nothing of ebpfproxy is pinned in {self.root}",
                "is the agent running on this node, in mode ebpf, with this --bpffs-root? What another mode "
                "(localhost:10249/proxyMode) has, nft, iptables-save, ipvsadm -Ln and ipset list show",
            ) from failure

    def set_current(self, layout: Path) -> None:
        """In one step."""
        fresh = self.root / "current_new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(layout.name)
        fresh.rename(self.current)

    def programs(self, layout: Path, code: str) -> Path:
        """The folder of the programs made of `code`: the whole source and what it was compiled with."""
        return layout / f"programs_{_digest(code)}"

    def remove_others(self, layout: Path, programs: Path) -> list[Path]:
        """Drop the pins of all but these; what is attached stays alive by its link."""
        stale = [path for path in self.layouts() if path != layout]
        stale += [path for path in layout.glob("programs_*") if path != programs]
        for path in stale:
            shutil.rmtree(path)
        return stale
