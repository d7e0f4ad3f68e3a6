"""The maps of bpf/maps.h: their sizes, and opening and checking them by their pins."""

import dataclasses
import functools
import os
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


_BY_MEMORY = {
    "services": (64 << 10, 65536, 262144),
    "slots": (16 << 10, 524288, 2097152),
    "endpoints": (64 << 10, 262144, 1048576),
    "sockets": (256 << 10, 4096, 262144),
    "flows": (32 << 10, 65536, 262144),
}
"""Sizes that follow the node's memory: bytes of memory for each entry, the smallest and the largest size. The
smallest sizes are enough for 10,000 dual-stack Services of 10 endpoints."""

_ROW: int = abi.CONSTANTS["HALF_OPEN_ROW"]


@dataclasses.dataclass(frozen=True, slots=True)
class MapSizes:
    """The capacities of the maps, in entries. The fields before `half_open` have an option --ebpf-NAME-max.

    - `services`, `slots`, `endpoints`, `sockets`, `flows` (established ones): 0: by the memory of the node
      (`_BY_MEMORY`), rounded down to a power of two. The maps of sockets are never full: they evict entries.
    - `traffic`: the highest service id whose traffic is counted separately.
    - `half_open`: half-open flows, which have their own room. 0: an eighth of `flows`, at least 4096.
    - `tunneled_flows`: flows that are sent to other nodes by direct server return. If there are more, the
      oldest ones may move to another endpoint when endpoints change. 1 if the node sends none.
    - `tunnels`: endpoints of Services with direct server return. 0: as many as `endpoints`.
    """

    services: int = 0
    slots: int = 0
    endpoints: int = 0
    affinity: int = 65536
    sockets: int = 0
    flows: int = 0
    source_ranges: int = 1048576
    traffic: int = 0
    half_open: int = 0
    tunneled_flows: int = 65536
    tunnels: int = 0

    def __post_init__(self) -> None:
        for name, (memory_per_entry, smallest, largest) in _BY_MEMORY.items():
            if not getattr(self, name):
                entries = 1 << max(1, _memory() // memory_per_entry).bit_length() - 1
                object.__setattr__(self, name, min(max(entries, smallest), largest))
        if not self.tunnels:
            object.__setattr__(self, "tunnels", self.endpoints)
        if not self.half_open:
            half_open = max(self.flows // _HALF_OPEN_PART, _HALF_OPEN_MIN) // _ROW * _ROW
            object.__setattr__(self, "half_open", half_open)

    def defines(self) -> dict[str, str]:
        """The macros that maps.h expects from the compiler's command line."""
        sizes = dataclasses.asdict(self)
        sizes |= {"slot_pairs": (sizes.pop("slots") + 1) // 2}
        sizes |= {"flow_entries": self.flows + sizes.pop("half_open")}
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


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


COMPILED_SIZES = MapSizes(64, 64, 64, 64, 64, 64, 64, tunneled_flows=64)
"""The sizes in object files. The agent makes maps of its own sizes, so any object file fits any size."""


def shapes(sizes: MapSizes) -> dict[str, MapShape]:
    """The shapes of this version's maps, by map name."""
    return _shapes(abi.source_directory(), sizes)


@functools.cache
def _shapes(source: Path, sizes: MapSizes) -> dict[str, MapShape]:
    return map_shapes.read(source, sizes.defines())


class Maps:
    """All maps, open. Close with `close`."""

    def __init__(self, directory: Path, kind: type[Map] = Map) -> None:
        """Open the maps that are pinned in `directory`, of any size, as objects of this kind.

        Raises NotFound if one is missing, AbiMismatch if a key or value has another layout.
        """
        self._maps: dict[str, Map] = {}
        try:
            for name, shape in shapes(MapSizes()).items():
                opened = self._maps[name] = kind.pinned(directory / name)
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


def slots_in(map_: Map) -> int:
    """The capacity of `slots`, in slots."""
    return map_.shape.max_entries * 2


def missing(directory: Path) -> list[str]:
    """The maps that are not pinned in this directory, sorted."""
    return sorted(name for name in shapes(MapSizes()) if not (directory / name).exists())
