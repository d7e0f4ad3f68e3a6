"""Maps of two sizes below one bpffs root, made as an agent makes them but without programs."""

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
    """Have the maps for `programs-NAME`, which are in force then; their shapes."""
    shapes = map_shapes.read(source or abi.source_directory(), sizes.defines())
    folder = pins.root / f"programs-{name}"
    map_pins.provide(pins, folder / "maps", shapes, pins.maps_of(pins.in_force()))
    pins.set_current(folder)
    return shapes


def opened(pins: Pins, name: str) -> Maps:
    """To be closed."""
    return Maps(pins.root / f"programs-{name}" / "maps")


def ids(pins: Pins, name: str) -> Mapping[str, int]:
    """The kernel's id of each map: one that is made again has another."""
    maps = opened(pins, name)
    try:
        return {
            path.name: maps[path.name].shape.id for path in (pins.root / f"programs-{name}/maps").iterdir()
        }
    finally:
        maps.close()


def edited(folder: Path, old: str, new: str) -> Path:
    """The C sources that say what maps are like, with a change in abi.h."""
    for name in ("abi.h", "maps.h"):
        shutil.copy(abi.source_directory() / name, folder)
    text = (folder / "abi.h").read_text()
    assert old in text
    (folder / "abi.h").write_text(text.replace(old, new))
    return folder
