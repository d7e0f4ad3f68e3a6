"""The maps of bpf/maps.h: their sizes, and opening and checking them by their pins."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.backends.ebpf.migration import map_shapes
from ebpfproxy.backends.ebpf.migration.map_shapes import MapShape
from ebpfproxy.errors import AbiMismatch
from ebpfproxy.linux.bpf.bpf import Map

_HALF_OPEN_PART, _HALF_OPEN_MIN = 8, 4096
"""Half-open flows have an eighth of the room of established ones, at least 4096. The default is 32 768, so a
flood occupies at most half of the ports by which one endpoint can be reached."""


_ROW: int = abi.CONSTANTS["HALF_OPEN_ROW"]


@dataclasses.dataclass(frozen=True, slots=True)
class MapSizes:
    """The capacities of the maps, in entries. Each field has an option --ebpf-NAME-max.

    `traffic`: the highest service id whose traffic is counted separately.
    """

    services: int = 65536
    slots: int = 1048576
    endpoints: int = 262144
    affinity: int = 65536
    sockets: int = 262144
    flows: int = 262144
    source_ranges: int = 65536
    traffic: int = 0

    def defines(self) -> dict[str, str]:
        """The macros that maps.h expects from the compiler's command line."""
        sizes = dataclasses.asdict(self) | {"flow_entries": self.flows + self.half_open}
        defines = {f"{name.upper()}_MAX": str(value) for name, value in sizes.items()}
        return defines | {"HALF_OPEN_ROWS": str(self.half_open // _ROW)}

    def numbers(self) -> dict[int, int]:
        """What the loader writes into the programs, by `enum placeholder` of bpf/abi.h."""
        return {
            abi.PLACEHOLDER_FLOWS: self.flows,
            abi.PLACEHOLDER_HALF_OPEN_ROWS: self.half_open // _ROW,
            abi.PLACEHOLDER_SOCKETS: self.sockets,
            abi.PLACEHOLDER_TRAFFIC: self.traffic,
        }

    @property
    def half_open(self) -> int:
        """The maximum number of half-open flows."""
        return max(self.flows // _HALF_OPEN_PART, _HALF_OPEN_MIN) // _ROW * _ROW


COMPILED_SIZES = MapSizes(64, 64, 64, 64, 64, 64, 64)
"""The sizes in object files. The agent makes maps of its own sizes, so any object file fits any size."""


def shapes(sizes: MapSizes) -> dict[str, MapShape]:
    """The shapes of this version's maps, by map name."""
    return map_shapes.read(abi.source_directory(), sizes.defines())


class Maps:
    """All maps, open. Close with `close`."""

    def __init__(self, directory: Path) -> None:
        """Open the maps that are pinned in `directory`, of any size.

        Raises NotFound if one is missing, AbiMismatch if a key or value has another layout.
        """
        self._maps: dict[str, Map] = {}
        try:
            for name, shape in shapes(MapSizes()).items():
                opened = self._maps[name] = Map.pinned(directory / name)
                _check(directory / name, opened, shape)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> Map:
        return self._maps[name]

    def __iter__(self) -> Iterator[Map]:
        return iter(self._maps.values())

    def close(self) -> None:
        for opened in self._maps.values():
            opened.close()


def _check(path: Path, opened: Map, shape: MapShape) -> None:
    """bpffs does not store a map's layout. The pin's name contains it, and `path` is a link to the pin."""
    found, wanted = (opened.shape.key_size, opened.shape.value_size), (shape.key_size, shape.value_size)
    hint = "run `ebpfproxy cleanup`, then start the agent"
    if found != wanted:
        raise AbiMismatch(
            f"{path} has keys of {found[0]} and values of {found[1]} bytes, not {wanted[0]} and {wanted[1]}",
            hint,
        )
    if path.is_symlink() and map_shapes.layout_of(path.readlink().name) != shape.layout:
        raise AbiMismatch(f"{path} has the layout of another version", hint)


def is_complete(directory: Path) -> bool:
    """Whether all maps are pinned in this directory."""
    return all((directory / name).exists() for name in shapes(MapSizes()))
