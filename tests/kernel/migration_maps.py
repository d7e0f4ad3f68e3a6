"""Maps of two sizes below one bpffs root, created as by an agent but without programs."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.maps import Maps, MapSizes
from ebpfproxy.backends.ebpf.migration import map_pins, map_shapes
from ebpfproxy.backends.ebpf.migration.map_shapes import MapShape
from ebpfproxy.backends.ebpf.pins import Pins

SIZES = MapSizes(64, 64, 64, 32, 64, 4096, 16)


def make(pins: Pins, name: str, sizes: MapSizes = SIZES, source: Path | None = None) -> dict[str, MapShape]:
    """Create the maps for `programs-NAME` and make them current; their shapes."""
    shapes = map_shapes.read(source or abi.source_directory(), sizes.defines())
    folder = pins.root / f"programs-{name}"
    map_pins.provide(pins, folder / "maps", shapes, pins.maps_of(pins.in_force()))
    pins.set_current(folder)
    return shapes


def opened(pins: Pins, name: str) -> Maps:
    """The maps of `programs-NAME`. The caller closes them."""
    return Maps(pins.root / f"programs-{name}" / "maps")


def ids(pins: Pins, name: str) -> Mapping[str, int]:
    """The kernel's id of each map: a recreated map has another id."""
    maps = opened(pins, name)
    try:
        return {
            path.name: maps[path.name].shape.id for path in (pins.root / f"programs-{name}/maps").iterdir()
        }
    finally:
        maps.close()


def edited(folder: Path, old: str, new: str) -> Path:
    """A copy of the C sources that define the maps, with a change in abi.h."""
    for name in ("abi.h", "maps.h"):
        shutil.copy(abi.source_directory() / name, folder)
    text = (folder / "abi.h").read_text()
    assert old in text
    (folder / "abi.h").write_text(text.replace(old, new))
    return folder
