"""The shape of each map, parsed from bpf/maps.h and bpf/abi.h, so that there is no second list to maintain.

A map is pinned as NAME-<layout>-<room>. `layout` is a digest of its key and value: fields by name, offset and
type. `room` is a digest of its type, flags and size. Neither includes comments, or structs that the map does
not use.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpfproxy.backends.ebpf import abi
from ebpfproxy.linux.bpf import ring_buffer

SERVICE_MAPS = (
    "service_names",
    "services",
    "slots",
    "endpoints",
    "source_ranges",
    "service_ports",
    "frontend_addresses",
    "tunnels",
    "tunnel_endpoints",
)
"""Maps that refer to each other by ids and ranges. If the shape of one changes, all are created again.

Programs are replaced one after another. Those that are not replaced yet must not see an incomplete change.
"""

_TYPES = {  # enum bpf_map_type
    "hash": 1,
    "array": 2,
    "percpu_hash": 5,
    "percpu_array": 6,
    "lru_hash": 9,
    "lru_percpu_hash": 10,
    "lpm_trie": 11,
    "array_of_maps": 12,
    "hash_of_maps": 13,
}
_FLAGS = {"0": 0, "BPF_F_NO_PREALLOC": 1, "BPF_F_MMAPABLE": 1 << 10}
_SCALARS = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
_ANY_PINNED = re.compile(r'\bPINNED\("|\bPINNED_RING\(struct')
_PINNED = re.compile(r'PINNED\("(\w+)(?:\$(\w+))?", ([\w ]+), ([\w ]+), (\w+), (\w+)(?: \+ (\d+))?, (\w+)\);')
_PINNED_RING = re.compile(r"PINNED_RING\(([\w ]+), (\w+), (\w+)\);")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DIGITS = 8


class MapShape(NamedTuple):
    """The shape of a map. `type` and `flags` are those of bpf(2). Sizes are in bytes. `entries`: the
    capacity.

    `inner`: for an array of maps, the map that is the template of its entries. "" for all other types.
    """

    name: str
    type: int
    inner: str
    key_size: int
    value_size: int
    entries: int
    flags: int
    layout: str
    room: str

    @property
    def pin(self) -> str:
        """The name of the pin. It has no dots, since bpffs does not allow them."""
        return f"{self.name}-{self.layout}-{self.room}"


def layout_of(pin: str) -> str:
    """The digest of key and value in a pin's name. "" if the name has none."""
    parts = pin.rsplit("-", 2)
    return parts[1] if len(parts) == 3 else ""


def read(source: Path, defines: Mapping[str, str]) -> dict[str, MapShape]:
    """The maps by name, as maps.h in the folder `source` declares them. `defines`: the sizes.

    Raises ValueError if a declaration cannot be read.
    """
    parsed = abi.parse((source / "abi.h").read_text())
    found = dict(_declared((source / "maps.h").read_text(), parsed, defines))
    unit = _digest(*(f"{found[name].layout} {found[name].room}" for name in SERVICE_MAPS))
    for name in SERVICE_MAPS:
        found[name] = found[name]._replace(room=unit)
    for name, shape in found.items():
        if shape.inner:
            template = found[shape.inner]
            layout = _digest(shape.layout, template.layout, str(template.type))
            found[name] = for_flags(shape._replace(layout=layout), template.flags)
    return found


def for_flags(shape: MapShape, flags: int) -> MapShape:
    """The shape of an array of maps for entries with these flags. The kernel accepts no others
    (bpf_map_meta_equal())."""
    return shape._replace(room=_digest(str(shape.entries), str(flags)))


def _declared(text: str, of: abi.Abi, defines: Mapping[str, str]) -> Iterator[tuple[str, MapShape]]:
    plain = " ".join(_COMMENT.sub("", text).split())
    declared, rings = _PINNED.findall(plain), _PINNED_RING.findall(plain)
    if len(declared) + len(rings) != len(_ANY_PINNED.findall(plain)):
        raise ValueError("maps.h has a map that cannot be read")
    for type_, inner, key, value, name, size, more, flags in declared:
        entries = int(defines.get(size, of.constants.get(size, size))) + int(more or 0)
        fields = _describe(key, of), _describe(value, of)
        room = _digest(type_, str(entries), flags)
        layout = _digest(*(text for _, text in fields), *_ids(key, value, of))
        sizes = fields[0][0], fields[1][0]
        yield name, MapShape(name, _TYPES[type_], inner, *sizes, entries, _FLAGS[flags], layout, room)
    for record, name, size in rings:  # the kernel knows only its size in bytes
        size_in_bytes = int(defines.get(size, of.constants.get(size, size)))
        layout = _digest(_describe(record, of)[1], *_ids(record, record, of))
        yield (
            name,
            MapShape(name, ring_buffer.TYPE, "", 0, 0, size_in_bytes, 0, layout, _digest(str(size_in_bytes))),
        )


def _describe(type_: str, of: abi.Abi) -> tuple[int, str]:
    """The size of a key or value in bytes, and a description of its fields."""
    if type_ in _SCALARS:
        return _SCALARS[type_], type_
    layout = of.layouts[type_.removeprefix("struct ")]
    return layout.size, layout.shape


def _ids(key: str, value: str, of: abi.Abi) -> Iterator[str]:
    """The layouts of the maps that define ids, for a map whose key or value contains ids.

    Ids are valid only as long as the maps that define them are kept. So the layouts of these are part of the
    digest.
    """
    structs = [of.layouts[type_.removeprefix("struct ")] for type_ in (key, value) if type_ not in _SCALARS]
    names = {field.name for layout in structs for field in layout.fields}
    if names & {"service_id", "endpoint_id"}:
        yield from (of.layouts[name].shape for name in ("service_name", "endpoint"))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_DIGITS]
